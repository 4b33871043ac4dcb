"""Looks leave no trace: whatever a user's code counts, collects, draws or hooks goes as if nothing had been looked at.

A model gets a member of each kind of state; it is patched, compared on its first batch, and trained. The state, the
losses and the random numbers afterwards are those of a run without a comparison (applying the kernels may run nothing
of it either). Planted: with the judgement switched off, each member that a run advances is found.
"""

import collections
import copy
import itertools
import logging
import random
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES, audit
from npu_trainer_kernels.patching.probe import TRACE, traces
from tests.models import small_model
from tests.patching.padded import padded

OPS = [op for op in PATCHES if op != "linear_logprob"]
COUNTS = collections.Counter()
SEEN: list[int] = []
TABLE = {"calls": 0}
HELD = SimpleNamespace(calls=0)
NUMBERS = itertools.count()
CALLS = 0


class Act(nn.Module):
    """An activation; what it does besides is a function of it."""

    def __init__(self, beside=lambda self, x: None):
        super().__init__()
        self.beside = beside

    def forward(self, x):
        self.beside(self, x)
        return nn.functional.silu(x)


def counted_on_itself(self, x):
    self.calls = getattr(self, "calls", 0) + 1


def listed_on_itself(self, x):
    self.collected.append(float(x.sum()))


def counted_in_a_dictionary(self, x):
    self.stats["calls"] = self.stats.get("calls", 0) + 1


def counted_in_a_buffer(self, x):
    self.total += 1


def counted_in_a_plain_tensor(self, x):
    self.plain.add_(1)


def counted_globally(self, x):
    global CALLS
    CALLS += 1


def counted_in_a_global_object(self, x):
    HELD.calls += 1


def counted_in_a_global_counter(self, x):
    COUNTS["calls"] += 1


def counted_by_update(self, x):
    COUNTS.update(calls=1)


def listed_globally(self, x):
    SEEN.append(len(x))


def entered_in_a_global_table(self, x):
    TABLE["calls"] += 1


def taken_from_an_iterator(self, x):
    next(NUMBERS)


def set_by_name(self, x):
    setattr(HELD, "calls", HELD.calls + 1)  # noqa: B010


def set_in_its_class(self, x):
    type(self).of_all = getattr(type(self), "of_all", 0) + 1


def by_default(self, x, seen=SEEN):
    seen += [1]


def drawn_by_python(self, x):
    random.random()


def drawn_by_numpy(self, x):
    np.random.rand()


def drawn_by_torch(self, x):
    torch.rand(1)


def drawn_by_a_generator(self, x):
    torch.rand(1, generator=self.dice)


def in_a_closure():
    calls = 0

    def beside(self, x):
        nonlocal calls
        calls += 1
        COUNTS["closure"] = calls

    return beside


class Sets(nn.Module):
    """Whose `__setattr__` counts."""

    def __setattr__(self, name, value):
        COUNTS["set"] += 1
        super().__setattr__(name, value)

    def forward(self, x):
        self.last = 1
        return nn.functional.silu(x)


class Gets(nn.Module):
    """Whose attribute is a property that counts."""

    @property
    def scale(self):
        SEEN.append(1)
        return 1.0

    def forward(self, x):
        return nn.functional.silu(x) * self.scale


class Counted(torch.autograd.Function):
    """Which counts its forwards."""

    @staticmethod
    def forward(ctx, x):
        SEEN.append(2)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def by_an_autograd_function(self, x):
    Counted.apply(x)


TOTAL = torch.zeros(1)


def by_foreach(self, x):
    torch._foreach_add_([TOTAL], 1.0)


def into_an_argument(self, x):
    torch.add(TOTAL, 1.0, out=TOTAL)


def told(self, x):
    LOG.warning("a call")


class Listens(logging.Handler):
    """Keeps the lines."""

    def emit(self, record):
        SEEN.append(5)


LOG = logging.getLogger(__name__)
LOG.addHandler(Listens())
LOG.propagate = False


BESIDE = (
    counted_on_itself, listed_on_itself, counted_in_a_dictionary, counted_in_a_buffer, counted_in_a_plain_tensor,
    counted_globally, counted_in_a_global_object, counted_in_a_global_counter, counted_by_update, listed_globally,
    entered_in_a_global_table, taken_from_an_iterator, set_by_name, set_in_its_class, by_default, drawn_by_python,
    drawn_by_numpy, drawn_by_torch, drawn_by_a_generator, by_an_autograd_function, by_foreach, into_an_argument, told,
)  # fmt: skip


def act(beside):
    def put(model):
        made = Act(beside)
        made.stats, made.collected = {}, []
        made.plain, made.dice = torch.zeros(()), torch.Generator().manual_seed(1)
        made.register_buffer("total", torch.zeros(()))
        model.model.layers[0].mlp.act_fn = made
        return lambda: None

    return put


def exchanged(make):
    def put(model):
        model.model.layers[0].mlp.act_fn = make()
        return lambda: None

    return put


def hooked(register, where="layers.0.mlp.down_proj"):
    def put(model):
        return register(model.model.get_submodule(where)).remove

    return put


def counts(*_):
    SEEN.append(3)


class Listener:
    """A bound method is a hook."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        HELD.calls += 1

    def hook(self, *_):
        COUNTS["hook"] += 1


class Doubled(nn.Module):
    """A parametrization that counts."""

    def forward(self, weight):
        COUNTS["parametrized"] += 1
        return weight * 1.0


def parametrized(model):
    parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", Doubled())
    return lambda: None


def set_on_the_instance(model):
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward

    def counted(x):
        SEEN.append(4)
        return forward(x)

    norm.forward = counted
    return lambda: None


def put_into_transformers(model):
    original = modeling_llama.rotate_half

    def counted(x):
        COUNTS["rotated"] += 1
        return original(x)

    modeling_llama.rotate_half = counted
    return lambda: setattr(modeling_llama, "rotate_half", original)


def put_into_a_class(model):
    original = modeling_llama.LlamaRMSNorm.forward

    def counted(self, x):
        COUNTS["normed"] += 1
        return original(self, x)

    modeling_llama.LlamaRMSNorm.forward = counted
    return lambda: setattr(modeling_llama.LlamaRMSNorm, "forward", original)


def watched(model):
    """Every operator is counted by a mode, as torch's counter of FLOPs does."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            COUNTS["aten::mm"] += function is torch.ops.aten.mm.default
            return function(*args, **(kwargs or {}))

    mode = Mode()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


EVERYWHERE = nn.modules.module
MEMBERS = {
    **{each.__name__: act(each) for each in BESIDE},
    "in a closure": lambda model: act(in_a_closure())(model),
    "by __setattr__": exchanged(Sets),
    "by a property": exchanged(Gets),
    "a hook": hooked(lambda module: module.register_forward_hook(counts)),
    "a pre-hook": hooked(lambda module: module.register_forward_pre_hook(counts)),
    "an object that is a hook": hooked(lambda module: module.register_forward_hook(Listener())),
    "a method that is a hook": hooked(lambda module: module.register_forward_hook(Listener().hook), "norm"),
    "a hook of all modules": lambda model: EVERYWHERE.register_module_forward_hook(counts).remove,
    "a pre-hook of all modules": lambda model: EVERYWHERE.register_module_forward_pre_hook(counts).remove,
    "a backward hook": hooked(lambda module: module.register_full_backward_hook(counts)),
    "a gradient's hook": hooked(lambda module: module.weight.register_hook(counts)),
    "a parametrization": parametrized,
    "a forward on the instance": set_on_the_instance,
    "a function in transformers": put_into_transformers,
    "a forward in a class": put_into_a_class,
    "a mode": watched,
}


def state(model):
    """Everything that the members change."""
    own = [
        (copy.copy({n: v for n, v in vars(m).items() if isinstance(v, int | float | list | dict) and n[0] != "_"}))
        for m in model.modules()
    ]
    tensors = [t.clone() for m in model.modules() for t in (*m._buffers.values(), *vars(m).values())
               if isinstance(t, torch.Tensor)]  # fmt: skip
    dice = [m.dice.get_state().tolist() for m in model.modules() if hasattr(m, "dice")]
    outside = dict(COUNTS), list(SEEN), dict(TABLE), vars(HELD).copy(), repr(NUMBERS), CALLS, getattr(Act, "of_all", 0)
    outside = *outside, TOTAL.tolist()
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return own, [t.tolist() for t in tensors], dice, outside, drawn


def reset():
    global CALLS, NUMBERS
    CALLS, NUMBERS = 0, itertools.count()
    COUNTS.clear(), SEEN.clear()
    TABLE["calls"], HELD.calls, Act.of_all = 0, 0, 0
    TOTAL.zero_()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)


def outcome(members, audits, steps=1):
    """The state and losses of a training of a patched model, and its handle. Without padding the ops run module by
    module what the model's own code runs."""
    model = small_model("llama")
    inputs = padded(rows=((0, 21), (0, 21), (0, 21)))
    undo = []
    try:
        reset()
        undo = [MEMBERS[name](model) for name in members]
        reset()
        kernels = apply_npu_kernels(model, ops=OPS)
        if audits:
            kernels.audit(pytest.fail)
        losses = []
        for _ in range(steps):
            loss = model(**inputs).loss
            loss.backward()
            losses.append(float(loss.detach()))
        return state(model), losses, kernels
    finally:
        for each in reversed(undo):
            each()


# No op may be compared under these.
SEEN_EVERYWHERE = ("a hook of all modules", "a pre-hook of all modules", "a forward in a class", "a mode")


@pytest.mark.parametrize("name", MEMBERS)
def test_no_look_is_seen(name):
    found, losses, kernels = outcome([name], audits=True)
    expected, plain, _ = outcome([name], audits=False)
    assert found == expected
    assert losses == plain
    (seen,) = kernels.report().audits
    assert seen.calls > 0 or name in SEEN_EVERYWHERE


ADVANCED = [name for name in MEMBERS if name not in (
    # Put back whatever runs: attributes, buffers, tensors and random states. Without gradients the others do not run.
    "counted_on_itself", "listed_on_itself", "counted_in_a_dictionary", "counted_in_a_buffer",
    "counted_in_a_plain_tensor", "drawn_by_python", "drawn_by_numpy", "drawn_by_torch", "a backward hook",
    "a gradient's hook",
)]  # fmt: skip


@pytest.mark.parametrize("name", ADVANCED)
def test_planted_a_look_at_everything_is_seen(monkeypatch, name):
    monkeypatch.setattr(audit, "traces_within", lambda model: lambda module: None)
    found, *_ = outcome([name], audits=True)
    expected, *_ = outcome([name], audits=False)
    assert found != expected


@settings(max_examples=8, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(st.lists(st.sampled_from(sorted(MEMBERS)), min_size=2, max_size=4, unique=True))
def test_nor_are_several_members_at_once(names):
    found, losses, _ = outcome(names, audits=True, steps=2)
    expected, plain, _ = outcome(names, audits=False, steps=2)
    assert found == expected
    assert losses == plain


@pytest.mark.parametrize("name", ["counted_globally", "a hook", "in a closure"])
def test_the_report_says_what_is_not_compared(name):
    *_, kernels = outcome([name], audits=True)
    why = kernels.report().why("audit")
    assert TRACE in why
    assert "padding left out, are not compared" in why
    assert TRACE in str(kernels.report())


# What may run: it changes nothing that it could reach.
FACTOR, BOUNDS = 0.5, (0.1, 2.0)


class Pure(nn.Module):
    """Reads numbers, a tuple, a list, a table and its configuration."""

    table: ClassVar = {"silu": nn.functional.silu}

    def __init__(self):
        super().__init__()
        self.config, self.sizes = SimpleNamespace(scale=1.5), [1, 2]

    def forward(self, x):
        scale = max(self.config.scale, FACTOR) * self.sizes[0]
        return self.table["silu"](x).clamp(-BOUNDS[1], BOUNDS[1] * 1e6) * scale + torch.zeros_like(x)


def test_code_without_a_trace_is_compared():
    model = small_model("llama")
    model.model.layers[0].mlp.act_fn = Pure()
    model.model.layers[1].register_forward_hook(lambda module, args, out: out)
    assert traces.trace_of_all(model) is None
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(pytest.fail)
    model(**padded()).loss.backward()
    (seen,) = kernels.report().audits
    assert not seen.aside
    assert seen.rows == 3


@pytest.mark.parametrize("name", ["counted_globally", "a hook", "listed_globally"])
def test_ops_are_compared_in_the_runs_own_forward(monkeypatch, name):
    """An op that differs is found there, and only what leaves no trace is called for it."""
    from npu_trainer_kernels.patching.modules.norms import RmsNormPatch

    run, said = RmsNormPatch.run, []
    monkeypatch.setattr(RmsNormPatch, "run", lambda *args, **kwargs: run(*args, **kwargs) * 1.01)
    model = small_model("llama")
    reset()
    undo = MEMBERS[name](model)
    kernels = apply_npu_kernels(model, ops=OPS)
    kernels.audit(said.append)
    model(**padded()).loss.backward()
    undo()
    assert {site.op for site in kernels.report().sites if site.off} == {"rms_norm"}
    assert len(said) == 1
    assert "differed from the model's own code" in kernels.report().why("rms_norm")
