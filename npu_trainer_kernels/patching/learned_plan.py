"""What the first backward passes say of a loss on TRL's log-probabilities.

Supervised fine-tuning sends back the same gradient for every token, or (TRL's `dft`) one proportional to the token's
probability, whatever it divides by. Two backward passes are watched; when both agree, the gradient is planned from then
on: three matrix products instead of four. Every later backward is still compared with the plan (`ops/head/engine.py`),
so a loss that changes its mind costs time, not correctness.
"""

from dataclasses import dataclass

import torch

from ..ops.head import GIVE_UP, LogProbObjective, Objective

__all__ = ["LearnedPlan"]

_WATCHED = 2
# Of the largest gradient: rounding of a sum in fp32, far below what any real difference between tokens makes.
_TOLERANCE = 1e-5

_uniform = LogProbObjective(lambda log_prob, chunk: log_prob.sum())
_probability = LogProbObjective(lambda log_prob, chunk: log_prob.exp().sum())


def _proportional(gradient: torch.Tensor, to: torch.Tensor) -> bool:
    top = to.abs().argmax().view(1)  # the host would wait for an index without dimensions
    return bool(
        ((gradient * to[top] - gradient[top] * to).abs() <= _TOLERANCE * (gradient[top] * to).abs().max()).all()
    )


@dataclass
class LearnedPlan:
    """The objective that fits what was seen, once enough was seen.

    Attributes:
        objective: for the head engine, or None.
        seen: backward passes watched so far.
    """

    objective: Objective | None = None
    seen: int = 0

    @classmethod
    def settled(cls, planned: bool) -> "LearnedPlan":
        """One that has seen enough: the same gradient for every token, or none that can be planned."""
        return cls(_uniform if planned else None, _WATCHED)

    def watch(self, log_prob: torch.Tensor) -> None:
        """Looks at the gradient that this call's log-probabilities will get, if that is still of interest."""
        if self.seen < _WATCHED and log_prob.requires_grad and log_prob.numel() > 1:
            values = log_prob.detach()
            log_prob.register_hook(lambda gradient: self._note(gradient, values))

    def _note(self, gradient: torch.Tensor, log_prob: torch.Tensor) -> None:
        fits = None
        for objective, shape in ((_uniform, torch.ones_like(log_prob)), (_probability, log_prob.exp())):
            if fits is None and _proportional(gradient, shape):
                fits = objective
        if fits is None and not bool(gradient.isfinite().all()):
            # A step that overflowed says nothing of the loss.
            return
        agrees = self.seen == 0 or fits is self.objective
        self.objective = fits if agrees else None
        self.seen = self.seen + 1 if agrees and fits is not None else _WATCHED

    @property
    def usable(self) -> Objective | None:
        """The objective, once two backward passes agree on it."""
        return self.objective if self.seen >= _WATCHED else None

    def mismatch(self, share: float) -> None:
        """Gives up when most rows were not as planned."""
        if share > GIVE_UP:
            self.objective = None
