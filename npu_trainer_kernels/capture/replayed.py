"""Which replay wrote what a backward reads.

Graphs write to the same memory at each replay. So memory carries the number of the turn that wrote it last, and whoever
is going to read it in a backward remembers the number and compares it then: another turn's values are never taken for
those of this one. `Outlets` say whether other code still has what a replay has returned. `Owner` says whose calls
replay graphs: those of one thread, since two would write to the same memory at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

__all__ = ["Outlets", "Owner", "Reading", "ReplayedMemory"]


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


_uses = torch._C._storage_Use_Count


class Outlets:
    """Where replays leave what they return. Each storage counts the tensors that have it: views, `detach()`, what
    autograd has saved, arrays of NumPy. If there are more of them than there were at first, other code keeps one.

    Args:
        tensors: at the addresses that replays write to, each with a storage object of its own. Replays return aliases
            of them.
    """

    __slots__ = ("_storages", "_tensors", "_unused")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [t for t in tensors if type(t) is torch.Tensor]
        self._storages = [t.untyped_storage()._cdata for t in self._tensors]
        self._unused = [*map(_uses, self._storages)]

    def kept(self, given: Sequence[torch.Tensor] = ()) -> bool:
        """Whether anybody has an alias of one, apart from these tensors."""
        now = [*map(_uses, self._storages)]
        if now == self._unused:
            return False
        known = [t.untyped_storage()._cdata for t in given]
        return any(
            uses != unused + known.count(at)
            for at, uses, unused in zip(self._storages, now, self._unused, strict=True)
        )  # fmt: skip


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
