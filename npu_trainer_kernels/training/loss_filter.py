"""The Trainer's filter of losses that are nan or infinite (`logging_nan_inf_filter`, on by default), without waiting.

After each micro-batch's backward the Trainer reads the loss, and adds the average so far to its log if the loss is nan
or infinite. So the host waits until the device has done all of it, and the device then waits until the host asks for
clipping and the optimizer. Here the device decides; the sum that is logged is the same.
"""

import functools
from typing import Any

import torch
from transformers.utils import is_torch_xla_available

from ..patching.undo import Undo

__all__ = ["LossFilter"]

_OFF = 0
"""The argument's value while it is off: false, and told apart from a False that other code sets in the meantime."""


class LossFilter:
    """Filters the losses of a trainer, once started. The trainer's argument is off from the end of a micro-batch until
    `ask_again`, if it was on.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._switched: Any = None  # the arguments whose filter is off; a callback may replace those of the trainer

    @staticmethod
    def applies_to(trainer: Any) -> bool:
        """Whether the trainer filters, and has the sum of its losses as an attribute (transformers 5)."""
        filters = trainer.args.logging_nan_inf_filter and not is_torch_xla_available()
        return filters and isinstance(getattr(trainer, "_tr_loss", None), torch.Tensor)

    def start(self, undo: Undo) -> None:
        """Filters losses until `undo` restores."""
        original = self._trainer.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self._filtered(original(*args, **kwargs))

        undo.add(self.ask_again)
        undo.set_attribute(self._trainer, "training_step", training_step)

    def _filtered(self, loss: Any) -> Any:
        trainer = self._trainer
        total = trainer._tr_loss
        # The Trainer refuses a loss on another device.
        if not (trainer.args.logging_nan_inf_filter and isinstance(loss, torch.Tensor) and loss.device == total.device):
            return loss
        self._switched = trainer.args
        self._switched.logging_nan_inf_filter = _OFF
        average = total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, average)

    def ask_again(self) -> None:
        """Switches the argument on again after the Trainer has added a loss: evaluation reads it, too."""
        if self._switched is not None and self._switched.logging_nan_inf_filter is _OFF:
            self._switched.logging_nan_inf_filter = True
        self._switched = None
