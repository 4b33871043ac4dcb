"""Objectives: functions of the statistics whose gradient the head computes in forward. `ops/head/engine.py` has the
maths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .head_options import HeadOptions
from .statistics import DIFFERENTIABLE, HeadStatistics

__all__ = [
    "GIVE_UP",
    "DivergenceObjective",
    "LinearObjective",
    "LogProbObjective",
    "Objective",
    "may_fuse",
    "objective_gradient",
]

# If the real gradients of a larger fraction of the rows differ from the plan, the loss has another formula; fewer rows
# may have a ratio at the edge of its clip.
GIVE_UP = 0.5

# Maps a chunk's statistics and the slice of its rows to a scalar.
Objective = Callable[[HeadStatistics, slice], torch.Tensor]


@dataclass(frozen=True)
class LinearObjective:
    """sum_i factor_i log_prob_i, an objective whose gradient does not depend on the logits. `make` returns the `[n]`
    fp32 factors; the engine calls it after launching the first chunk's logits, so that the device has work."""

    make: Callable[[], torch.Tensor]

    @functools.cached_property
    def factor(self) -> torch.Tensor:
        return self.make()

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return (statistics.log_prob * self.factor[chunk]).sum()


@dataclass(frozen=True)
class LogProbObjective:
    """An objective of the log-probabilities alone, `function(log_prob, chunk)`. The gradient of a row is the gradient
    of its log-probability times one factor, so a kernel may compute it before the factor exists. The optional
    `gradient(log_prob, chunk, backend)` returns the value and these factors faster than autograd."""

    function: Callable[[torch.Tensor, slice], torch.Tensor]
    gradient: Callable[[torch.Tensor, slice, str], tuple[torch.Tensor, torch.Tensor]] | None = None

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return self.function(statistics.log_prob, chunk)


@dataclass(frozen=True)
class DivergenceObjective:
    """scale sum_i divergence_i, an objective whose gradient does not depend on the logits, so that the kernel of the
    divergence may write the gradient, too. `make` returns the scale, a number or a tensor of one; the engine calls it
    after launching the first chunk's logits."""

    make: Callable[[], torch.Tensor | float]

    @functools.cached_property
    def scale(self) -> torch.Tensor | float:
        return self.make()

    def factor(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the gradient with respect to the divergence of each row, of the shape of `like`."""
        return torch.ones_like(like) * self.scale

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        assert statistics.divergence is not None
        return statistics.divergence.sum() * self.scale


def objective_gradient(
    objective: Objective, statistics: HeadStatistics, chunk: slice, backend: str
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Computes the objective of a chunk and its gradient with respect to the differentiable statistics."""
    if isinstance(objective, LogProbObjective) and objective.gradient is not None:
        value, d_log_prob = objective.gradient(statistics.log_prob, chunk, backend)
        return value, (d_log_prob, *(None,) * (DIFFERENTIABLE - 1))
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in statistics[:DIFFERENTIABLE]]
        value = objective(HeadStatistics._make([*leaves, *statistics[DIFFERENTIABLE:]]), chunk)
    given = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(value, given, allow_unused=True))
    return value.detach(), tuple(None if t is None else next(found) for t in leaves)


def may_fuse(objective: Objective | None, bias: torch.Tensor | None, dtype: torch.dtype, options: HeadOptions,
           backend: str) -> bool:  # fmt: skip
    """Whether one kernel, or one loop over rows in torch, may compute statistics and gradient."""
    if options.mean or options.log_sum_sq or options.argmax:
        return False
    if backend == "torch":
        return isinstance(objective, LinearObjective)
    if isinstance(objective, LogProbObjective):
        # The factor of a row multiplies x, and the product might exceed fp16's range.
        return bias is None and dtype != torch.float16
    return isinstance(objective, LinearObjective)
