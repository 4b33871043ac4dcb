"""The memory of captured bodies: forwards whose results stay until their backward have their own, and so have those
without gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from ...capture import Recorder, ReplayedMemory

__all__ = ["MOST_VARIANTS", "NUMBERS", "Mode", "Turn"]

MOST_VARIANTS = 4
"""The number of states of one body (adapter on, adapter off) that are kept for the same kinds of arguments."""


NUMBERS = itertools.count(1)
"""The numbers of states, and of what replays write to a `ReplayedMemory`."""


@dataclass
class Turn:
    """One training forward of a captured body, until its backward.

    Attributes:
        pending: the bodies, by `id`, whose backward is to come.
    """

    pending: set[int] = field(default_factory=set)


@dataclass
class Mode:
    """The graphs that share a pool.

    Attributes:
        recorder: records them.
        keeps: whether results stay until a backward.
        memory: all memory of the recorder, which each replay writes to.
        turn: returns the turn that began last, or None.
    """

    recorder: Recorder
    keeps: bool
    memory: ReplayedMemory
    turn: Callable[[], Turn | None] = lambda: None

    def awaits(self) -> Turn | None:
        """Returns the turn whose backward is to come, or None. A turn is gone with the graph of autograd."""
        turn = self.turn()
        return turn if turn is not None and turn.pending else None

    def begins(self, turn: Turn) -> None:
        """Begins a turn."""
        self.turn = weakref.ref(turn)
