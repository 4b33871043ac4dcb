"""What a run of code may leave behind is told from its source of names: nothing is run to find it out."""

import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from npu_trainer_kernels.patching.probe import (
    TRACE,
    trace_of,
    trace_of_all,
    trace_of_class,
    trace_of_function,
    trace_of_operators,
)
from tests.models import small_model

TABLE, NUMBERS, HELD = {"calls": 0}, itertools.count(), SimpleNamespace(calls=0)
LIMIT = 3.0


class Meter:
    """Counts in its own attribute."""

    def __init__(self):
        self.calls = 0

    def step(self):
        self._bump()

    def _bump(self):
        self.calls += 1


class Iterated(nn.Module):
    """Takes from an iterator that it holds."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x):
        return x * next(self.numbers)


class Metered(nn.Module):
    """Calls a method of an object that it holds."""

    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def forward(self, x):
        self.meter.step()
        return x


class Registers(nn.Module):
    """Makes a buffer."""

    def forward(self, x):
        self.register_buffer("calls", x)
        return x


class OfConfig(nn.Module):
    """Whose configuration has a list that it appends to."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(log=[])

    def forward(self, x):
        self.config.log.append(1)
        return x


def in_place(x):
    x += 1
    return x


def around():
    calls = 0

    def inner(x):
        nonlocal calls
        calls = calls + 1
        return x

    return inner


def printed(x):
    print(x)
    return x


def imported(x):
    import os

    return os.environ


@functools.wraps(torch.relu)
def disguised(x):
    TABLE["calls"] = 1
    return torch.relu(x)


def of_a_default(x, seen=HELD):
    seen.step()
    return x


class OfItsOwnClass(nn.Module):
    """Counts in its class, by itself."""

    def forward(self, x):
        self.__class__.calls = 1
        return x


def local(x):
    parts = [part * LIMIT for part in x.split(1)]
    parts.append(x.clamp(max=max(LIMIT, 1.0)))
    return torch.cat(parts) + random.random()


FUNCTIONS = {
    in_place: "computes in place (+=)",
    around(): "sets calls of the function around it",
    printed: "calls print",
    imported: "imports os",
    disguised: "writes to an entry of something",
    functools.partial(lambda meter, x: meter.step(), Meter()): "whose Meter._bump computes in place (+=)",
}
MODULES = {
    Iterated: "reads numbers, a count, which may change",
    Metered: "reads meter, a Meter, whose Meter._bump computes in place (+=)",
    Registers: "Registers.forward calls or reads register_buffer",
    OfConfig: "OfConfig.forward calls append, and it reads config.log, a list",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_leave_something(function):
    assert FUNCTIONS[function] in trace_of_function(function)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_that_leave_something(kind):
    assert MODULES[kind] in trace_of(kind())
    assert trace_of(kind()).startswith(TRACE)


def test_what_changes_local_things_alone_leaves_nothing():
    assert trace_of_function(local) is None
    assert trace_of_function(torch.relu) is None
    assert trace_of_function(nn.functional.silu) is None


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2", "gpt-oss", "qwen3.5"])
def test_transformers_code_leaves_nothing(name):
    model = small_model(name)
    assert trace_of_all(model) is None
    assert trace_of_class(type(model.base_model), model.modules()) is None


def test_a_mode_that_sees_operators():
    with FlopCounterMode(display=False):
        assert "looks at every operator" in trace_of_operators()
    with torch.device("cpu"):
        assert trace_of_operators() is None


class Made(nn.Module):
    """Counts what is made of it."""

    def __init__(self):
        super().__init__()
        self.number = next(NUMBERS)


class MadeFreely(nn.Module):
    """What it sets is its own."""

    def __init__(self, config=None):
        super().__init__()
        self.seen, self.scale = [], 1.0

    def forward(self, x):
        self.seen = [*self.seen, 1]
        x[0] = self.scale
        return x


class OfItsClass(nn.Module):
    """Counts in its class."""

    made = 0

    def __init__(self):
        super().__init__()
        OfItsClass.made += 1


def test_classes():
    assert "reads NUMBERS, a count, which may change" in trace_of_class(Made)
    assert "sets OfItsClass.made" in trace_of_class(OfItsClass)
    assert "sets self.__class__.calls" in trace_of_class(OfItsOwnClass)
    assert trace_of_class(MadeFreely) is None


def test_a_class_without_a_source():
    space = {"nn": nn, "__name__": "somewhere"}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        x[0] = 1\n        return x", space)
    assert "its source is not at hand" in trace_of_class(space["Typed"])


def test_a_source_that_is_part_of_a_statement():
    space = {
        "forward": lambda self, x: x.add_(1),
    }  # fmt: skip
    assert "its source is part of a statement" in trace_of_class(type("Part", (nn.Module,), space))
