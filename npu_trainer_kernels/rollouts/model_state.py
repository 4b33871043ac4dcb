"""Everything that decides how a model's code makes a token, except the rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..capture import Reads, Watched, parts_of
from ..patching.probe import replaced_functions

__all__ = ["ModelState"]


class ModelState:
    """What decides how a model's code runs, as it was when a step was captured: its modules with their attributes and
    configurations, where its tensors are, and what else the code reads (`capture.watched`).

    Args:
        model: the causal model.
        moves: whether its parameters are at other addresses in each rollout, which is then no change.
        reads: the code of a step that ran; None: none is known yet.
        settings: PyTorch's settings at the capture; None: as they are now.

    Attributes:
        reads: the code.
        values: the values that it reads.
    """

    def __init__(
        self, model: nn.Module, moves: bool, reads: Reads | None = None, settings: tuple[Any, ...] | None = None
    ) -> None:
        self._kind, self.reads = type(model), reads
        if reads is not None:
            # An op may compute in the place of a module's own code, by which it was recognised.
            for function in replaced_functions(model):
                reads.adds(function)
        said = frozenset() if reads is None else reads.names
        self.values = Watched(model.modules(), reads, functools.partial(_unread, model, said), settings)
        owners = [(each, moving) for module in model.modules()
                  for each, moving in ((module._parameters, moves), (module._buffers, False))]  # fmt: skip
        self._owners = [(owner, len(owner)) for owner, _ in owners]
        self._tensors = [
            (owner, name, t, None if t is None or moving else _places(t))
            for owner, moving in owners for name, t in owner.items()
        ]  # fmt: skip

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is still in this state."""
        if type(model) is not self._kind or any(len(owner) != size for owner, size in self._owners):
            return False
        if not all(owner.get(name) is t and _is_at(t, at) for owner, name, t, at in self._tensors):
            return False
        return self.values.holds()

    def signature(self) -> int:
        """Returns a number that another state of the same model has if nothing has changed in between. The number keeps
        no object of the model alive."""
        tensors = tuple((name, id(t), at) for _, name, t, at in self._tensors)
        return hash((id(self._kind), tensors, self.values.signature()))


def _is_at(tensor: torch.Tensor | None, places: tuple[int, ...] | None) -> bool:
    return tensor is None or places is None or _places(tensor) == places


def _places(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the addresses of the tensors that a tensor is made of; of one of a class that is not torch's own the
    numbers are elsewhere."""
    parts = list(parts_of(tensor))
    return tuple(part.data_ptr() for part in (parts[1:] or parts))


def _unread(model: nn.Module, said: frozenset[str], module: nn.Module) -> list[str]:
    """Returns the attributes of a module that do not count: hooks, which are asked about at each call, and those of the
    causal model that its code does not name. Trainers note things there."""
    return [
        name for name in vars(module)
        if "_hooks" in name or name == "_gradient_checkpointing_func"
        or (module is model and name not in said and name != "_modules")
    ]  # fmt: skip
