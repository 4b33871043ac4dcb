"""Which replay wrote what a backward reads.

Graphs write to the same memory at each replay. So memory carries the number of the turn that wrote it last, and whoever
is going to read it in a backward remembers the number and compares it then: another turn's values are never taken for
those of this one. `Owner` says whose calls replay graphs: those of one thread, since two would write to the same memory
at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

__all__ = ["Owner", "Reading", "ReplayedMemory"]


class ReplayedMemory:
    """Memory that replays write to.

    Attributes:
        turn: the number of the turn that wrote it last.
    """

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn = 0


class Reading:
    """What the backward of one replay reads, as it is when the replay begins.

    Args:
        memory: what is read.
        turn: what lives as long as the backward may come.
    """

    __slots__ = ("_memory", "_numbers", "turn")

    def __init__(self, memory: Iterable[ReplayedMemory], turn: object = None) -> None:
        self._memory = tuple(memory)
        self._numbers = [each.turn for each in self._memory]
        self.turn = turn

    @property
    def over(self) -> bool:
        """Whether another turn has written to the memory."""
        return [each.turn for each in self._memory] != self._numbers


class Owner:
    """The thread whose calls may be replayed: the first one that asks, as long as it lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._number: int | None = None

    def is_here(self) -> bool:
        """Whether this thread is the owner."""
        number = threading.get_ident()
        if number == self._number:
            return True
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False
            self._thread, self._number = threading.current_thread(), number
            return True
