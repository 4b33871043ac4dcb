"""Learns from the first backward passes which gradient a loss on TRL's log-probabilities sends back.

Supervised fine-tuning sends back the same gradient for every token or, with TRL's `dft`, one proportional to the
token's probability, whatever it divides by. Two backward passes are observed. If both agree, the gradient is planned
from then on: three matrix products instead of four. Every later backward is still compared with the plan
(`ops/head/engine.py`), so a loss that changes costs time, not correctness.
"""

from dataclasses import dataclass

import torch

from ..ops.head import GIVE_UP, LogProbObjective, Objective

__all__ = ["LearnedPlan"]

_WATCHED = 2
# Relative to the largest gradient: the rounding of an fp32 sum, far below any real difference between tokens.
_TOLERANCE = 1e-5

_uniform = LogProbObjective(lambda log_prob, chunk: log_prob.sum())
_probability = LogProbObjective(lambda log_prob, chunk: log_prob.exp().sum())


def _proportional(gradient: torch.Tensor, to: torch.Tensor) -> bool:
    top = to.abs().argmax().view(1)  # a 0-d index would make the host wait
    return bool(
        ((gradient * to[top] - gradient[top] * to).abs() <= _TOLERANCE * (gradient[top] * to).abs().max()).all()
    )


@dataclass
class LearnedPlan:
    """The objective that fits the observed gradients, once there are enough.

    Attributes:
        objective: the objective for the head engine, or None.
        seen: the number of backward passes observed so far.
    """

    objective: Objective | None = None
    seen: int = 0

    @classmethod
    def settled(cls, planned: bool) -> "LearnedPlan":
        """Returns a plan that observes no more: the same gradient for every token, or no planned gradient."""
        return cls(_uniform if planned else None, _WATCHED)

    def watch(self, log_prob: torch.Tensor) -> None:
        """Observes the gradient of this call's log-probabilities, if more observations are needed."""
        if self.seen < _WATCHED and log_prob.requires_grad and log_prob.numel() > 1:
            values = log_prob.detach()
            log_prob.register_hook(lambda gradient: self._note(gradient, values))

    def _note(self, gradient: torch.Tensor, log_prob: torch.Tensor) -> None:
        fits = None
        for objective, shape in ((_uniform, torch.ones_like(log_prob)), (_probability, log_prob.exp())):
            if fits is None and _proportional(gradient, shape):
                fits = objective
        if fits is None and not bool(gradient.isfinite().all()):
            # After an overflow the gradient says nothing about the loss.
            return
        agrees = self.seen == 0 or fits is self.objective
        self.objective = fits if agrees else None
        self.seen = self.seen + 1 if agrees and fits is not None else _WATCHED

    @property
    def usable(self) -> Objective | None:
        """The objective, once two backward passes agree on it."""
        return self.objective if self.seen >= _WATCHED else None

    def whys(self) -> dict[str, int]:
        """Returns why no gradient is planned, with the number of backward passes that showed it; empty where one is,
        or where none was observed yet."""
        if self.seen < _WATCHED or self.objective is not None:
            return {}
        return {"the gradients of the loss were not the same for all tokens, nor as their probabilities": 0}

    def mismatch(self, share: float) -> None:
        """Stops planning if most rows differed from the plan."""
        if share > GIVE_UP:
            self.objective = None
