"""`GRPOTrainer`: TRL's, with the kernels on. Its loss is TRL's own; nothing of it is copied here."""

from typing import Any

import torch

from .._optional import INSTALL
from .._triton import MissingDependencyError
from ..arguments import NpuKernelsArguments
from ..patching import Report
from ..patching._call import use_plan
from ..patching._trl import seam
from ._grpo_plan import Planner

try:
    from trl import GRPOTrainer as _GRPOTrainer
except (ImportError, OSError, RuntimeError) as error:
    raise MissingDependencyError(
        f"GRPOTrainer needs TRL, which cannot be imported ({type(error).__name__}: {error}): "
        f"pip install {INSTALL['trl']} {INSTALL['datasets']}"
    ) from error

__all__ = ["GRPOTrainer"]


class GRPOTrainer(_GRPOTrainer):
    """Drop-in for `trl.GRPOTrainer`: the same arguments, plus one.

    Args:
        npu_kernels: what to use; None: everything, on the device's own backends. With
            `NpuKernelsArguments(use_npu_kernels=False)` this is TRL's trainer.
    """

    def __init__(self, *args: Any, npu_kernels: NpuKernelsArguments | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = NpuKernelsArguments(use_npu_kernels=True) if npu_kernels is None else npu_kernels
        self._npu_kernels = chosen.callbacks()
        # A TRL without a head of ours to plan for: its trainer gets the layers' kernels, and the report says so.
        self._planner = Planner(self) if self._npu_kernels and seam.unsupported() is None else None
        for callback in self._npu_kernels:
            self.add_callback(callback)
            callback.attach(self)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        # The head is told what TRL's loss is going to make of its log-probabilities, so that it can form the gradient
        # while the logits are at hand. The loss stays TRL's, and its real gradient decides.
        plan = self._planner.plan(inputs) if self._planner is not None and torch.is_grad_enabled() else None
        with use_plan(plan):
            return super()._compute_loss(model, inputs)

    def npu_kernels_report(self) -> Report:
        """What was replaced and what was left alone; empty where the kernels are off."""
        report = self._npu_kernels[0].report() if self._npu_kernels else Report()
        if self._planner is not None and self._planner.off is not None:
            report.note(f"the head's gradient is not planned: {self._planner.off}")
        return report
