"""A replay sees what Python sees: whatever a body's code reads may change after the capture, and then it counts."""

import collections
import contextvars
import copy
import cProfile
import dataclasses
import functools
import itertools
import os
import random
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from npu_trainer_kernels.capture import Reads, Watched
from tests.patching.tiny_body import Replayed, ids_of

Factor = Callable[[Any], Any]


class Layer(nn.Module):
    """Multiplies by a factor that a function gives at each call."""

    def __init__(self, factor: Factor, held: Any = None) -> None:
        super().__init__()
        self.linear, self.factor, self.held = nn.Linear(4, 4), factor, held

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * self.factor(self)


class Schedule:
    value = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def derived(self) -> float:
        return self.own * 2

    def method(self) -> float:
        return self.own

    def __call__(self) -> float:
        return self.own

    def __getattr__(self, name: str) -> float:
        return STATE["computed"] if name == "computed" else super().__getattribute__(name)

    def __getitem__(self, _: int) -> float:
        return self.own


class Inherits(Schedule):
    pass


class Slots:
    __slots__ = ("value",)


class Meta(type):
    @property
    def value(cls) -> float:
        return STATE["meta"]


class OfMeta(metaclass=Meta):
    pass


@dataclasses.dataclass
class Options:
    value: float = 1.0
    inner: Any = None


STATE: dict[str, Any] = {}
NUMBER = 1.0
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("factor", default=1.0)
MODULE = types.ModuleType("somewhere")
MODULE.value = 1.0  # type: ignore[attr-defined]
LOCAL = threading.local()
RANDOM = random.Random(0)
NUMPY = np.random.default_rng(0)
COUNTER = itertools.count(1)
TIMES: list[int] = []


def set_number(value: float) -> None:
    global NUMBER
    NUMBER = value


def closed_over() -> tuple[Factor, Callable[[float], None]]:
    number = 1.0

    def put(value: float) -> None:
        nonlocal number
        number = value

    return lambda _: number, put


def with_default(_: Any = None, options: list[float] = [1.0], *, word: float = 1.0) -> float:  # noqa: B006
    return options[0] * word


@functools.cache
def cached() -> float:
    return NUMBER


def decorated(function: Factor) -> Factor:
    @functools.wraps(function)
    def wrapper(layer: Any) -> Any:
        return function(layer) * STATE["decorated"]

    return wrapper


def other(_: Any) -> float:
    return 3.0


class Member:
    """What a factor reads, and what sets it."""

    def __init__(self, read: Factor, put: Callable[[Any, float], None], held: Callable[[], Any] = lambda: None) -> None:
        self.read, self.put, self.held = read, put, held


def _of_state(name: str) -> Callable[[Any, float], None]:
    return lambda _, value: STATE.__setitem__(name, value)


CLOSURE, PUT = closed_over()
MEMBERS: dict[str, Member] = {
    "global": Member(lambda _: NUMBER, lambda _, v: set_number(v)),
    "global dict": Member(lambda _: STATE["number"], _of_state("number")),
    "get of a dict": Member(lambda _: STATE.get("got", 1.0), _of_state("got")),
    "items of a dict": Member(lambda _: sum(v for k, v in STATE.items() if k == "item"), _of_state("item")),
    "nested dict": Member(lambda _: STATE["nested"]["a"][0], lambda _, v: _of_state("nested")(_, {"a": [v]})),
    "global set in": Member(
        lambda _: 3.0 if 3 in STATE["set"] else 1.0,
        lambda _, v: STATE.setdefault("set", set()).update({3} if v > 1 else ()),
    ),
    "class attribute": Member(lambda _: Schedule.value, lambda _, v: setattr(Schedule, "value", v)),
    "inherited attribute": Member(lambda s: s.held.value, lambda _, v: setattr(Schedule, "value", v), Inherits),
    "shadowed attribute": Member(lambda s: s.held.value, lambda s, v: setattr(s.held, "value", v), Inherits),
    "shadowed in a subclass": Member(lambda s: s.held.value, lambda s, v: setattr(Inherits, "value", v), Inherits),
    "type of self": Member(lambda s: type(s.held).value, lambda _, v: setattr(Schedule, "value", v), Schedule),
    "attribute of a module": Member(lambda s: s.scale, lambda s, v: setattr(s, "scale", v)),
    "attribute of an object": Member(lambda s: s.held.own, lambda s, v: setattr(s.held, "own", v), Schedule),
    "computed name": Member(
        lambda s: getattr(s.held, "".join(("ow", "n"))), lambda s, v: setattr(s.held, "own", v), Schedule
    ),
    "vars": Member(lambda s: vars(s.held)["own"], lambda s, v: setattr(s.held, "own", v), Schedule),
    "property": Member(lambda s: s.held.derived, lambda s, v: setattr(s.held, "own", v), Schedule),
    "method": Member(lambda s: s.held.method(), lambda s, v: setattr(s.held, "own", v), Schedule),
    "call": Member(lambda s: s.held(), lambda s, v: setattr(s.held, "own", v), Schedule),
    "item of an object": Member(lambda s: s.held[0], lambda s, v: setattr(s.held, "own", v), Schedule),
    "__getattr__": Member(lambda s: s.held.computed, _of_state("computed"), Schedule),
    "slots": Member(lambda s: s.held.value, lambda s, v: setattr(s.held, "value", v), Slots),
    "metaclass": Member(lambda _: OfMeta.value, _of_state("meta")),
    "dataclass": Member(
        lambda s: s.held.inner.value, lambda s, v: setattr(s.held.inner, "value", v), lambda: Options(inner=Options())
    ),
    "namespace": Member(lambda s: s.held.value, lambda s, v: setattr(s.held, "value", v), types.SimpleNamespace),
    "list": Member(lambda s: s.held[0], lambda s, v: s.held.__setitem__(0, v), lambda: [1.0]),
    "length of a list": Member(lambda s: len(s.held), lambda s, v: s.held.extend([0] * int(v)), list),
    "deque": Member(lambda s: s.held[-1], lambda s, v: s.held.append(v), lambda: collections.deque([1.0], maxlen=1)),
    "user dict": Member(lambda s: s.held["a"], lambda s, v: s.held.update(a=v), collections.UserDict),
    "tuple of objects": Member(
        lambda s: s.held[0].own, lambda s, v: setattr(s.held[0], "own", v), lambda: (Schedule(),)
    ),
    "array": Member(lambda s: float(np.max(s.held[:1])), lambda s, v: s.held.__setitem__(0, v), lambda: np.ones(2)),
    "module of Python": Member(lambda _: MODULE.value, lambda _, v: setattr(MODULE, "value", v)),  # type: ignore[attr-defined]
    "closure": Member(CLOSURE, lambda _, v: PUT(v)),
    "default": Member(with_default, lambda _, v: with_default.__defaults__[1].__setitem__(0, v)),
    "default of a word": Member(with_default, lambda _, v: with_default.__kwdefaults__.update(word=v)),
    "defaults exchanged": Member(with_default, lambda _, v: setattr(with_default, "__defaults__", (None, [v]))),
    "code exchanged": Member(
        lambda s: s.held(s),
        lambda s, v: v > 1 and setattr(s.held, "__code__", other.__code__),
        lambda: types.FunctionType((lambda _: 1.0).__code__, {}),
    ),
    "attribute of a function": Member(
        lambda s: s.held.scale,
        lambda s, v: setattr(s.held, "scale", v),
        lambda: types.FunctionType((lambda _: 1.0).__code__, {}),
    ),
    "attribute that a function has not got": Member(
        lambda s: s.held(s) * getattr(s.held, "scale", 1.0),
        lambda s, v: v > 1 and setattr(s.held, "scale", v),
        lambda: types.FunctionType((lambda _: 1.0).__code__, {}),
    ),
    "decorator": Member(decorated(lambda _: 1.0), _of_state("decorated")),
    "partial": Member(
        lambda s: s.held(),
        lambda s, v: s.held.args[0].__setitem__(0, v),
        lambda: functools.partial(lambda values: values[0], [1.0]),
    ),
    "weak reference": Member(
        lambda s: s.held[0]().own,
        lambda s, v: setattr(s.held[1], "own", v),
        lambda: (lambda one: (weakref.ref(one), one))(Schedule()),
    ),
    "cache that was cleared": Member(lambda _: cached(), lambda _, v: (set_number(v), cached.cache_clear())),
    "context variable": Member(lambda _: VARIABLE.get(), lambda _, v: VARIABLE.set(v)),
    "environment": Member(lambda _: float(os.environ["FACTOR"]), lambda _, v: os.environ.__setitem__("FACTOR", str(v))),
    "environment that is absent": Member(
        lambda _: float(os.environ.get("NO_FACTOR", 1.0)),
        lambda _, v: v > 1 and os.environ.__setitem__("NO_FACTOR", str(v)),
    ),
    "torch's dtype": Member(
        lambda _: 3.0 if torch.get_default_dtype() == torch.float64 else 1.0,
        lambda _, v: torch.set_default_dtype(torch.float64 if v > 1 else torch.float32),
    ),
    "torch's flag": Member(
        lambda _: 3.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda _, v: torch.use_deterministic_algorithms(v > 1),
    ),
    "torch's backend": Member(
        lambda _: 3.0 if torch.backends.mkldnn.deterministic else 1.0,
        lambda _, v: setattr(torch.backends.mkldnn, "deterministic", v > 1),
    ),
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FACTOR", "1")
    STATE.clear()
    STATE["decorated"] = 1.0
    yield
    os.environ.pop("NO_FACTOR", None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.deterministic = False
    with_default.__defaults__, with_default.__kwdefaults__["word"] = (None, [1.0]), 1.0
    Schedule.value = 1.0
    if "value" in vars(Inherits):
        del Inherits.value


def expected_of(made: Replayed, ids: torch.Tensor) -> torch.Tensor:
    """What the body's layer computes, without its factor."""
    (layer,) = made.body.layers
    hidden = made.body.embed(ids).view(1, -1, 4)
    return nn.functional.linear(hidden, layer.linear.weight, layer.linear.bias).view(*ids.shape, 4)


def compare(made: Replayed) -> None:
    """A call has the bits of the layer's own code."""
    ids = ids_of()
    found = made(ids)
    (layer,) = made.body.layers
    assert torch.equal(found, expected_of(made, ids) * layer.factor(layer))
    found.sum().backward()


def after_a_change(member: Member) -> Replayed:
    layer = Layer(member.read, member.held())
    member.put(layer, 1.0)
    made = Replayed.of_layer(layer)
    for _ in range(3):
        compare(made)
    before = made.replayed
    assert (before == 2) != bool(made.reasons), made.reasons
    member.put(layer, 3.0)
    for _ in range(3):
        compare(made)
    return made


@pytest.mark.parametrize("name", MEMBERS)
def test_what_a_bodys_code_reads_counts_in_a_replay(name: str) -> None:
    made = after_a_change(MEMBERS[name])
    assert made.replayed == 2 + 3, made.reasons  # captured anew, and replayed


@pytest.mark.parametrize("name", MEMBERS)
def test_fault_a_value_that_is_not_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "holds", lambda _: True)
    with pytest.raises(AssertionError):
        after_a_change(MEMBERS[name])


def counts(layer: Any) -> float:
    layer.count = getattr(layer, "count", 0) + 1
    return float(layer.count)


def counts_in_a_global(_: Any) -> float:
    global NUMBER
    NUMBER += 1
    return NUMBER


def counts_in_a_closure() -> Factor:
    count = 0

    def factor(_: Any) -> float:
        nonlocal count
        count += 1
        return float(count)

    return factor


def counts_in_a_dict(_: Any) -> float:
    STATE["count"] = STATE.get("count", 0) + 1
    return float(STATE["count"])


def counts_in_a_list(_: Any) -> float:
    TIMES.append(1)
    return float(len(TIMES))


def rotates(layer: Any) -> float:
    layer.held.append(layer.held.pop(0))
    return layer.held[0]


def sets_a_variable(_: Any) -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def of_a_generator(layer: Any) -> float:
    return next(layer.held)


def local(_: Any) -> float:
    LOCAL.count = getattr(LOCAL, "count", 0) + 1
    return float(LOCAL.count)


def imports_random(_: Any) -> float:
    from random import random as draw

    return draw()


DECLINED: dict[str, tuple[Factor, str]] = {
    "random": (lambda _: random.random(), "calls random.random"),
    "uniform": (lambda _: random.uniform(0, 1), "draws random numbers on the host|a Random, which"),
    "imported random": (imports_random, "calls random.random"),
    "a generator of random": (lambda _: RANDOM.random(), "calls random.random"),
    "NumPy": (lambda _: float(np.random.rand()), "a RandomState, which cannot be compared"),
    "a generator of NumPy": (lambda _: float(NUMPY.random()), "cannot be compared"),
    "a seed": (lambda _: torch.manual_seed(5) and 1.0, "calls manual_seed of a generator"),
    "time": (lambda _: time.perf_counter(), "calls time.perf_counter"),
    "monotonic": (lambda _: time.monotonic(), "calls time.monotonic"),
    "count": (lambda _: float(next(COUNTER)), "calls builtins.next"),
    "loop over an iterator": (
        lambda _: float(sum(each for each, _ in zip(COUNTER, [1], strict=False))),
        "a count, which cannot be compared",
    ),
    "attribute": (counts, "a call of it changes"),
    "global": (counts_in_a_global, "sets NUMBER"),
    "nonlocal": (counts_in_a_closure(), "sets count"),
    "dict": (counts_in_a_dict, "a call of it changes"),
    "list": (counts_in_a_list, "changes a list in place"),
    "rotated list": (rotates, "changes a list in place"),
    "context variable": (sets_a_variable, "sets the context variable factor"),
    "generator": (of_a_generator, "calls builtins.next"),
    "local of a thread": (local, "a call of it changes|cannot be compared"),
    "file": (lambda _: float(len(Path(__file__).read_text())), "opens a file"),
    "globals": (lambda _: globals()["NUMBER"], "calls builtins.globals"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_code_that_does_more_at_each_call_is_not_captured(name: str) -> None:
    factor, reason = DECLINED[name]
    held = iter(range(1000)) if factor is of_a_generator else [1.0, 2.0, 3.0]
    made = Replayed.of_layer(Layer(factor, held))
    for _ in range(4):
        made(ids_of())
    assert made.replayed == 0
    assert made.reasons
    assert all(re.search(reason, each) for each in made.reasons), made.reasons


class Act(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * NUMBER


def multiplied(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * NUMBER


def compiled_itself() -> Act:
    act = Act()
    act.compile(backend="eager")
    return act


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


COMPILED: dict[str, tuple[Callable[[], Any], str]] = {
    "torch.compile of a function": (lambda: torch.compile(multiplied, backend="eager"), "compiled.*multiplied"),
    "torch.compile of a module": (lambda: torch.compile(Act(), backend="eager"), "a module of it is compiled"),
    "a module's compile": (compiled_itself, "compiled.*Act"),
    "torch.compile within a function": (
        lambda: lambda hidden: torch.compile(multiplied, backend="eager")(hidden), "compiled.*multiplied"
    ),
    "torch.jit.script": (lambda: torch.jit.script(Scripted()), "a module of it is compiled"),
    "torch.jit.trace": (lambda: torch.jit.trace(Act(), torch.ones(64, 4)), "a module of it is compiled"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_is_not_captured(name: str) -> None:
    made, reason = COMPILED[name]
    set_number(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit
        held = made()
    made = Replayed.of_layer(Layer(lambda s: s.held(torch.ones(64, 4)), held))
    made(ids_of())
    with torch.no_grad():  # compiled before the body is looked at
        made(ids_of())
    for _ in range(3):
        made(ids_of()).sum().backward()
    assert made.replayed == 0
    assert any(re.search(reason, each) for each in made.reasons), made.reasons
    torch.compiler.reset()


def ticks(_: Any) -> float:
    return NUMBER


def ticks_by_python(_: Any) -> float:
    return random.random()


def ticks_by_variable(_: Any) -> float:
    return VARIABLE.get()


class Longer(Layer):
    """Calls its function for rows of more than 64 tokens alone."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.linear(hidden)
        return made * self.factor(self) if hidden.shape[1] > 64 else made


@pytest.mark.parametrize("factor", [ticks, ticks_by_python, ticks_by_variable])
def test_code_that_runs_for_longer_rows_alone(factor: Factor) -> None:
    """Each bucket is looked at: another one may take another branch."""
    layer = Longer(factor)
    made = Replayed.of_layer(layer)
    set_number(1.0)
    for rows in (8, 16, 8, 16):
        made(ids_of(rows)).sum().backward()
    set_number(2.0)
    VARIABLE.set(2.0)
    state = random.getstate()
    for rows in (8, 16, 8, 16):
        ids = ids_of(rows)
        random.setstate(state)
        found = made(ids)
        random.setstate(state)
        plain = expected_of(made, ids)
        assert torch.equal(found, plain * factor(layer) if rows > 8 else plain)
        found.sum().backward()
    VARIABLE.set(1.0)
    # A reason that was found in one bucket is one in all of them.
    assert (made.replayed == 0) == (factor is ticks_by_python)


def test_variables_of_the_call_itself_are_no_state() -> None:
    def factor(_: Any) -> float:
        total, values = 0.0, []

        def add(value: float) -> None:
            nonlocal total
            total += value
            values.append(value)

        for each in (1.0, 2.0):
            add(each)
        return total * len(values)

    made = Replayed.of_layer(Layer(factor))
    for _ in range(4):
        compare(made)
    assert made.replayed == 3, made.reasons


def test_an_input_that_is_kept() -> None:
    class Keeps(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            STATE["kept"] = hidden
            return self.linear(hidden)

    made = Replayed.of_layer(Keeps(lambda _: 1.0))
    for _ in range(3):
        ids = ids_of()
        made(ids)
        assert torch.equal(STATE["kept"], made.body.embed(ids).view(1, -1, 4))
    assert set(made.reasons) == {"a call of it keeps its input as STATE['kept']"}
    STATE.clear()


def test_equal_values_are_no_change() -> None:
    layer = Layer(lambda s: s.held.own, Schedule())
    made = Replayed.of_layer(layer)
    for step in range(4):
        layer.held.own = float(f"{1.5}")  # another object each time
        layer.held.unread = step
        compare(made)
    assert made.replayed == 3


def test_signs_and_types_of_numbers_count() -> None:
    for one, two in ((0.0, -0.0), (1, True), (2, 2.0)):
        layer = Layer(lambda s: s.scale)
        layer.scale = one
        watched = Watched(layer.modules(), None)
        assert watched.holds()
        layer.scale = two
        assert not watched.holds()
        assert watched.differs == "Layer.scale"


class Profiled:
    def __enter__(self) -> None:
        sys.setprofile(lambda *_: None)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("profiler", [Profiled, cProfile.Profile])
def test_a_profiler_is_a_reason_for_as_long_as_it_is_there(profiler: Any) -> None:
    made = Replayed.of_layer(Layer(lambda _: NUMBER))
    set_number(1.0)
    with profiler():
        seen = sys.getprofile()
        for _ in range(4):
            compare(made)
        assert sys.getprofile() is seen
    if seen is not None:  # cProfile watches otherwise in later versions of Python, and is in nobody's way
        assert made.replayed == 0
        assert all("a profiler watches this thread" in each for each in made.reasons), made.reasons
        assert made.reasons.total() == 3
    for _ in range(3):
        compare(made)
    with profiler():  # what was captured is replayed
        compare(made)
    assert made.replayed == (4 if seen is not None else 7)


@pytest.mark.parametrize("traced", ["settrace", "a look"])
def test_a_tracer_may_watch(traced: str) -> None:
    """Debuggers and coverage trace a thread otherwise than a profiler does."""
    made, before = Replayed.of_layer(Layer(lambda _: NUMBER)), sys.gettrace()
    set_number(1.0)
    try:
        if traced == "settrace":
            sys.settrace(lambda *_: None)
        for _ in range(3):
            compare(made)
    finally:
        sys.settrace(before)
    assert made.replayed == 2, made.reasons
    with Reads() as reads:
        ticks(None)
    assert reads.reason is None


def test_copies_of_what_was_reached_are_others() -> None:
    layer = Layer(lambda s: s.held.own, Schedule())
    watched = Watched(layer.modules(), None)
    layer.held = copy.copy(layer.held)
    assert not watched.holds()
