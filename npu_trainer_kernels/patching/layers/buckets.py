"""The graphs of a model by mode, number of tokens and layer.

There are three modes with a pool of memory each: training forwards, whose results stay until their backward; layers
that a checkpoint repeats; and calls without gradients. In each of them the numbers of tokens are rounded up to buckets.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture import Pieces, Recorder, ReplayedMemory
from ..patch import Site
from .layer_state import LayerState

__all__ = ["MOST_VARIANTS", "NUMBERS", "Bucket", "Captured", "Input", "Mode", "Turn", "bucket"]

_STEPS = 16
"""Buckets from a power of two to the next one. The step is a sixteenth of the lower one, so a bucket has between 0 and
6.2% more tokens than the row, 2.2% on average over evenly spread numbers; 32 would halve that and double the
number of captures."""
_LEAST_STEP = 16


def bucket(tokens: int) -> int:
    """Returns the number of tokens to which a packed row of `tokens` tokens is filled up."""
    step = max((1 << tokens.bit_length() - 1) // _STEPS, _LEAST_STEP)
    return -(-tokens // step) * step


MOST_VARIANTS = 4
"""The number of states of one layer (adapter on, adapter off) that are kept for the same arguments."""


NUMBERS = itertools.count(1)
"""The numbers of turns."""


@dataclass
class Turn:
    """One training forward of the captured layers, until its backward.

    Attributes:
        spot: the bucket of its layers; None: a whole body has none.
        pending: the layers whose backward is to come.
        last: the index of the layer that was replayed last; layers are replayed in the order of their capture.
        number: what it writes to the `ReplayedMemory` that it fills.
    """

    spot: Bucket | None = None
    pending: set[int] = field(default_factory=set)
    last: int = -1
    number: int = field(default_factory=NUMBERS.__next__)


class Input:
    """A buffer that a graph reads, and the tensor that was written to it last."""

    __slots__ = ("buffer", "memory", "path", "source", "version")

    def __init__(self, path: Any, buffer: torch.Tensor, memory: ReplayedMemory | None) -> None:
        self.path, self.buffer = path, buffer
        self.memory = memory or ReplayedMemory()
        self.source: Callable[[], torch.Tensor | None] = lambda: None
        self.version = -1

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is where the buffer is."""
        return tensor.data_ptr() == self.buffer.data_ptr()

    def load(self, tensor: torch.Tensor, turn: int) -> None:
        if not self.is_at(tensor):
            self.buffer.copy_(tensor)
            self.memory.turn = turn
        self.source, self.version = weakref.ref(tensor), tensor._version


@dataclass
class Captured:
    """A layer in one state, for one kind of call: its pieces, or why there are none."""

    layer: int
    """The `id` of the layer."""
    memory: ReplayedMemory
    """What its graphs write to."""
    place: int = 0
    """How many layers were called before it in the forward in which it was called last."""
    index: int = -1
    """How many layers of the bucket were captured before it."""
    state: LayerState | None = None
    """None before the layer is captured for the first time."""
    calls: int = 1
    forward: int = 0
    """The forward of the bucket in which it was called last."""
    pieces: Pieces | None = None
    inputs: list[Input] = field(default_factory=list)
    output: Any = None
    collected: list[str] = field(default_factory=list)
    """The names of the lists that its last results are appended to, for transformers' hooks."""
    reason: str = ""
    ran: list[tuple[Site, int]] = field(default_factory=list)

    def is_kept(self, given: Sequence[torch.Tensor] = ()) -> bool:
        """Whether anybody but the caller, who has been `given` some, keeps a result of its graphs."""
        return self.pieces is not None and self.pieces.outlets.kept(given)


@dataclass
class Bucket:
    """The captured layers of one number of tokens, in one mode."""

    layers: dict[Any, list[Captured]] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    results: dict[int, tuple[torch.Tensor, ReplayedMemory]] = field(default_factory=dict)
    """The results that stay until their backward, by their addresses: the next layer reads them where they are."""
    last: int = -1
    """The place of the layer that was captured last."""
    captured: int = 0
    """The number of layers that were captured."""
    forward: int = 0
    called: set[int] = field(default_factory=set)
    """The layers that were called in this forward. One that is called again begins another forward."""
    released: bool = False
    disordered: bool = False
    """Whether layers were called in another order than they were captured in."""
    restarts: int = 0

    def notes(self, one: Captured) -> None:
        """Records a call of a layer in the current forward, or in the next one if the layer begins it."""
        if one.layer in self.called:
            self.forward += 1
            self.called.clear()
        one.place, one.forward = len(self.called), self.forward
        self.called.add(one.layer)

    def earlier_is_coming(self, one: Captured) -> bool:
        """Whether an earlier layer of this forward has no graphs yet, and may get some."""
        return any(
            other.place < one.place and other.forward == self.forward and other.pieces is None and not other.reason
            for each in self.layers.values() for other in each
        )  # fmt: skip

    def release(self) -> None:
        """Lets the graphs of other buckets use the memory of these."""
        self.released = True
        for each in self.layers.values():
            for one in each:
                if one.pieces is not None:
                    one.pieces.release()

    def restart(self) -> None:
        """Discards all graphs."""
        self.layers, self.inputs, self.results, self.last, self.captured = {}, [], {}, -1, 0
        self.released = self.disordered = False
        self.restarts += 1

    def restarts_in_order(self) -> bool:
        """Discards all graphs if layers come in another order by now. No backward may be to come."""
        if not self.disordered or self.restarts == _MOST_RESTARTS:
            return False
        self.restart()
        self.called.clear()  # a forward begins
        return True

    @property
    def graphs(self) -> int:
        return sum(c.pieces.graphs for each in self.layers.values() for c in each if c.pieces is not None)


_MOST_RESTARTS = 3


@dataclass
class Mode:
    """The graphs of one mode, which share a pool."""

    recorder: Recorder
    keeps: bool
    most: int | None
    memory: ReplayedMemory
    """All memory of its recorder, which each turn writes to."""
    buckets: OrderedDict[tuple[Any, ...], Bucket] = field(default_factory=OrderedDict)
    open: Bucket | None = None
    turn: Callable[[], Turn | None] = lambda: None
    returned: list[Captured] = field(default_factory=list)
    """The layers of the last turn: another turn must find that nobody has what they have returned."""
    copied: set[int] = field(default_factory=set)
    """The layers, by `id`, of which other code has kept a result; it gets copies from then on."""

    def awaits(self) -> Turn | None:
        """Returns the turn whose backward is to come, or None. A turn is gone with the graph of autograd."""
        turn = self.turn()
        return turn if turn is not None and turn.pending else None

    def is_kept(self, given: Sequence[torch.Tensor], memory: ReplayedMemory) -> bool:
        """Whether other code keeps a result of the last turn.

        A layer that trains nothing, and is given nothing with a gradient, has no node of autograd, and its turn is gone
        with its call. Then the next layer begins a turn, and is given the result that this one has returned. It must be
        gone before the turn after that.

        Args:
            given: the arguments of the layer that begins a turn.
            memory: what the layer writes to.
        """
        self.returned = [one for one in self.returned if one.is_kept()]
        if not self.returned:
            return False
        kept = [one for one in self.returned if one.memory is memory or one.is_kept(given)]
        self.copied.update(one.layer for one in kept)
        return bool(kept)

    def begins(self, turn: Turn) -> None:
        """Begins a turn."""
        self.turn = weakref.ref(turn)

    def comes_often(self, spot: Bucket, calls: int) -> bool:
        """Whether a bucket has come so often that it is expected to come often enough.

        The graphs of a bucket take as long as some twenty replays save. Where there are few numbers of tokens, each
        comes again at once, and is captured when it comes the second time. Where there are many, each is seldom: then
        it must have come once more for every second bucket that has graphs.

        Args:
            spot: the bucket.
            calls: how often a layer was called for it, this call included.
        """
        others = sum(each.last >= 0 for each in self.buckets.values() if each is not spot)
        return calls >= 2 + others // 2

    def may_capture(self, spot: Bucket, place: int) -> str | None:
        """Returns why a layer is not captured now, or None.

        Where results stay until their backward, the layers of a bucket are captured in the order of their forward:
        what a layer's backward computes in between takes memory that was free then, and must not be what an earlier
        layer has saved. Buckets share the memory, so only the one that was captured last may get more graphs.

        Args:
            spot: the bucket.
            place: the place of the layer in its list.
        """
        if not self.keeps:
            return None
        if self.open is not spot and self.open is not None:
            self.open.release()
        self.open = spot
        if not spot.released and spot.last <= place:
            return None
        if spot.restarts == _MOST_RESTARTS:
            return f"its layers were captured {_MOST_RESTARTS} times, and differ each time"
        spot.restart()
        return ""
