"""Patched modules have their own classes while a model generates.

A forward of one token of each row runs the modules' own code (`call.generates`), which every patched class would ask
about: two frames of Python for each of some hundred modules, about 3% of the host's work for a token. So for the length
of such a forward these modules get the classes back that they had. This takes some 60 us for 250 modules, and leaves
nothing behind: after the forward, and whenever another one begins, they have the patched classes again.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

from .classes import is_patched_class, original_class
from .undo import Undo

__all__ = ["STAYS", "StandAside"]

STAYS = "_npu_kernels_stays"
"""An attribute of patched classes: a function without arguments that says whether they serve single tokens, too."""

# `nn.Module.__setattr__` looks for parameters first, which takes fifteen times as long.
_set_class = vars(object)["__class__"].__set__

_Found = list[tuple["weakref.ref[nn.Module]", type[nn.Module], type[nn.Module]]]


class StandAside:
    """The patched modules of one model, while forwards of it begin and end, on any thread.

    Args:
        undo: the record of changes of the model's classes; when it grows, there may be more patched modules.
    """

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._lock = threading.Lock()
        self._running = 0
        self._found: _Found = []
        self._found_at: tuple[int, int] | None = None
        self._aside = False

    def __deepcopy__(self, memo: object) -> StandAside:
        # A copy of a hooked model calls its hooks, and has modules of its own.
        return self

    def begins(self, model: nn.Module, generates: bool) -> None:
        """A forward of the outermost model begins; all of its modules stand aside if it generates, and no other
        forward is under way."""
        with self._lock:
            self._running += 1
            if self._aside:
                self._come_back()
            elif generates and self._running == 1:
                self._go(model)

    def ends(self) -> None:
        """A forward of the outermost model ends."""
        with self._lock:
            self._running -= 1
            if self._aside:
                self._come_back()

    def stop(self) -> None:
        """All modules come back at once, since their patches are taken out."""
        with self._lock:
            if self._aside:
                self._come_back()

    def _go(self, model: nn.Module) -> None:
        now = id(model), len(self._undo)
        if self._found_at != now:
            self._found, self._found_at = _patched(model), now
        self._aside = True
        for reference, patched, own in self._found:
            module = reference()
            if type(module) is patched:
                _set_class(module, own)

    def _come_back(self) -> None:
        self._aside = False
        for reference, patched, own in self._found:
            module = reference()
            if type(module) is own:
                _set_class(module, patched)


def _patched(model: nn.Module) -> _Found:
    """Returns the modules inside of a model that may stand aside, with their classes: not the model itself, whose
    forward has begun, and none that a wrapper has given a class of its own."""
    return [
        (weakref.ref(module), type(module), original_class(module)) for module in model.modules()
        if module is not model and is_patched_class(type(module)) and not _stays(type(module))
    ]  # fmt: skip


def _stays(kind: Any) -> bool:
    return any(stays() for cls in kind.__mro__ if (stays := vars(cls).get(STAYS)) is not None)
