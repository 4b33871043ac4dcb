"""What the head's forward may form the gradient of: a function of the statistics, and what is known of it beforehand.
The maths: `ops/head/engine.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .options import HeadOptions
from .statistics import HeadStatistics

__all__ = ["GIVE_UP", "LinearObjective", "LogProbObjective", "Objective", "may_fuse", "objective_gradient"]

# Where the real gradients of a larger share of the rows are not the plan's, the formula is another one, rather than a
# ratio on the edge of its clip.
GIVE_UP = 0.5

# From a chunk's statistics, and which rows these are, to a scalar whose gradient is wanted.
Objective = Callable[[HeadStatistics, slice], torch.Tensor]


@dataclass(frozen=True)
class LinearObjective:
    """sum_i factor_i log_prob_i: an objective whose gradient is known before the logits are. `make` gives the `[n]`
    fp32 factors; asked once the first chunk of logits is on its way, so that the device need not wait."""

    make: Callable[[], torch.Tensor]

    @functools.cached_property
    def factor(self) -> torch.Tensor:
        return self.make()

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return (statistics.log_prob * self.factor[chunk]).sum()


@dataclass(frozen=True)
class LogProbObjective:
    """An objective of the log-probabilities alone, `function(log_prob, chunk)`. A row's gradient is then that of its
    log-probability times one number: one kernel may form it before the number is known. `gradient(log_prob, chunk,
    backend)` gives the value and these numbers, where there is a shorter way than autograd."""

    function: Callable[[torch.Tensor, slice], torch.Tensor]
    gradient: Callable[[torch.Tensor, slice, str], tuple[torch.Tensor, torch.Tensor]] | None = None

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return self.function(statistics.log_prob, chunk)


def objective_gradient(
    objective: Objective, statistics: HeadStatistics, chunk: slice, backend: str
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The objective of a chunk and its gradient with respect to log_prob, lse, entropy and mean."""
    if isinstance(objective, LogProbObjective) and objective.gradient is not None:
        value, d_log_prob = objective.gradient(statistics.log_prob, chunk, backend)
        return value, (d_log_prob, None, None, None)
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in statistics[:4]]
        value = objective(HeadStatistics._make([*leaves, *statistics[4:]]), chunk)
    given = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(value, given, allow_unused=True))
    return value.detach(), tuple(None if t is None else next(found) for t in leaves)


def may_fuse(objective: Objective | None, bias: torch.Tensor | None, dtype: torch.dtype, options: HeadOptions,
           backend: str) -> bool:  # fmt: skip
    """Whether statistics and gradient may come from one kernel."""
    if options.mean or options.log_sum_sq or options.argmax or backend == "torch":
        return False
    if isinstance(objective, LogProbObjective):
        # The number of a row multiplies x, and might leave fp16's range there.
        return bias is None and dtype != torch.float16
    return isinstance(objective, LinearObjective)
