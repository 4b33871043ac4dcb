"""Which call a thread is in, whatever hooks do; and what is learned of a loss from gradients."""

import contextlib

import pytest
import torch
from torch import nn

from npu_trainer_kernels.ops import linear_logprob
from npu_trainer_kernels.ops.head.engine import head_statistics
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.patching.call import CallSettings, current_call, track_calls
from npu_trainer_kernels.patching.learned_plan import LearnedPlan
from npu_trainer_kernels.patching.stand_aside import StandAside
from npu_trainer_kernels.patching.undo import Undo


class Outer(nn.Module):
    """Calls another model, and goes on when that fails."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[nn.Module | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ValueError):
            self.inner(x)
        call = current_call()
        self.seen.append(None if call is None else call.module)
        return x


def planted(*args):
    raise ValueError("planted")


HOOKS = {
    # Runs before ours, which then has nothing to take back.
    "before": lambda module: module.register_forward_pre_hook(planted, prepend=True),
    "between": lambda module: module.register_forward_pre_hook(planted),
    "after": lambda module: module.register_forward_hook(planted, prepend=True),
    "last": lambda module: module.register_forward_hook(planted),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_raises_ends_its_own_call_alone(name):
    inner, undo = nn.Identity(), Undo()
    outer = Outer(inner)
    for module in (outer, inner):
        track_calls(module, CallSettings(), StandAside(undo), undo)
    HOOKS[name](inner)
    outer(torch.ones(1))
    assert outer.seen == [outer]
    assert current_call() is None


def step(plan: LearnedPlan, scale: float) -> None:
    """A backward pass of a mean."""
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    log_prob = linear_logprob(x, weight, torch.arange(6)).log_prob
    plan.watch(log_prob)
    (scale * log_prob.mean()).backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_overflows_is_not_learned_from(value, at):
    plan = LearnedPlan()
    for i in range(3):
        assert plan.usable is None
        step(plan, value if i == at else 1.0)
    assert plan.usable is not None


def test_a_step_that_overflows_does_not_end_planning():
    plan = LearnedPlan.settled(True)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for value, usable in ((float("nan"), True), (1.0, True)):
        _, s = head_statistics(
            x, weight, torch.arange(6), None, HeadOptions(), objective=plan.usable, on_mismatch=plan.mismatch,
            backend="torch",
        )  # fmt: skip
        (value * s.log_prob).sum().backward()
        assert (plan.usable is not None) == usable
    # A gradient that is another one does.
    _, s = head_statistics(
        x, weight, torch.arange(6), None, HeadOptions(), objective=plan.usable, on_mismatch=plan.mismatch,
        backend="torch",
    )  # fmt: skip
    (s.log_prob * s.log_prob).sum().backward()
    assert plan.usable is None
