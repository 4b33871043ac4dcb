"""Where the segments of a packed row begin and go on, for modules that carry a state along it.

A segment without a shared prefix begins with no state. One that continues a prefix begins with the state that the
prefix has ended with, so prefixes are computed first: segments have *levels*, and those of a level begin with end
states of the level before. The host knows the segments, computes every index once for all layers, and uploads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...ops.attention import Segments, Shared, take

__all__ = ["StateRow"]


@dataclass(frozen=True, eq=False)
class _Level:
    """Segments that are computed at once.

    Attributes:
        tokens: the tokens of the packed row that are in them.
        segments: the segments of these tokens.
        parents: for each segment, its place among those of the level before; None: they begin without a state.
    """

    tokens: Shared
    segments: Segments
    parents: Shared | None


Carry = Callable[[tuple[torch.Tensor, ...], Segments, torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor]]
"""Computes segments from their tensors, each `[1, n, ...]`, the states that they begin with (None: zeros), and whether
the states that they end with are asked for; returns `[1, n, ...]` and these states `[segments, ...]`."""


class StateRow:
    """The segments of a packed row, as modules with a state need them.

    Attributes:
        segments: the segments without their shared keys.
    """

    def __init__(self, segments: Segments) -> None:
        self._device = segments.cu_q.device
        queries = [q for q, _ in segments.lengths]
        self.segments = segments if segments.keys is None else Segments.make(queries, self._device)
        self._ends = np.array(segments.q_ends, np.int64)
        self._begins = self._ends - queries
        # The tokens of each segment's prefix, in order.
        self._prefixes: list[np.ndarray] = []
        if segments.keys is not None:
            begin = 0
            for (q, k), end in zip(segments.lengths, segments.k_ends, strict=True):
                self._prefixes.append(segments.keys.index[begin : begin + k - q])
                begin = end
        self._before: dict[int, Shared] = {}

    def inputs_before(self, x: torch.Tensor, count: int) -> torch.Tensor | None:
        """Returns the inputs right before each segment, in its prefix, zeros where there are none: `[n, C, count]` of x
        `[1, C, T]`; None if no segment has a prefix."""
        if not self._prefixes:
            return None
        if count not in self._before:
            places = np.full((len(self.segments), count), -1, np.int64)
            for row, prefix in zip(places, self._prefixes, strict=True):
                last = prefix[max(0, len(prefix) - count) :]
                row[count - len(last) :] = last
            self._before[count] = Shared.make(places.reshape(-1), len(self), self._device)
        found = take(x[0].t(), self._before[count])
        return found.view(len(self.segments), count, x.shape[1]).transpose(1, 2)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def _levels(self) -> tuple[list[_Level], Shared]:
        """Returns the levels, and where each token of the row is in their concatenated results."""
        parents = [
            int(np.searchsorted(self._ends, prefix[-1], "right")) if len(prefix) else -1 for prefix in self._prefixes
        ]
        depths: list[int] = []  # a prefix is laid out before what continues it
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        levels: list[_Level] = []
        order: list[np.ndarray] = []
        place: dict[int, int] = {}  # of the members of the level before
        for depth in range(max(depths) + 1):
            members = [i for i, each in enumerate(depths) if each == depth]
            tokens = np.concatenate([np.arange(self._begins[i], self._ends[i]) for i in members])
            of_parents = None
            if depth:
                index = np.array([place[parents[i]] for i in members])
                of_parents = Shared.make(index, len(levels[-1].segments), self._device)
            lengths = [int(self._ends[i] - self._begins[i]) for i in members]
            segments = Segments.make(lengths, self._device)
            levels.append(_Level(Shared.make(tokens, len(self), self._device), segments, of_parents))
            order.append(tokens)
            place = {i: at for at, i in enumerate(members)}
        back = np.empty(len(self), np.int64)
        back[np.concatenate(order)] = np.arange(len(self))
        return levels, Shared.make(back, len(self), self._device)

    def run(self, carry: Carry, *tensors: torch.Tensor) -> torch.Tensor:
        """Computes the row `[1, T, ...]` of tensors `[1, T, ...]`, level by level."""
        if not self._prefixes:
            return carry(tensors, self.segments, None, False)[0]
        levels, back = self._levels
        state: torch.Tensor | None = None
        outputs = []
        for i, level in enumerate(levels):
            if level.parents is not None:
                assert state is not None
                state = take(state, level.parents)
            given = tuple(take(t[0], level.tokens).unsqueeze(0) for t in tensors)
            out, state = carry(given, level.segments, state, i + 1 < len(levels))
            outputs.append(out[0])
        return take(torch.cat(outputs), back).unsqueeze(0)
