"""The segments of a packed row in a table of a fixed size on the device, as a device's graph reads them.

A graph remembers sizes and addresses, and the rows of each batch have other lengths. So a `Room` has upper bounds for
what a row may have, and one table of integers, which is filled before each replay, says what this row has: where
segments end, which tokens are keys, and where the gradients of these keys are added up. A row that exceeds a bound is
refused when the table is made.

Tokens that fill the row up are in segments of their own, which see themselves alone. Outside of all segments their
results would be whatever the memory had before, and a NaN there would reach the gradient of every weight. Segments
that the row does not have are empty and end where the row ends. Keys that it does not have are in no segment, and
their gradients are read by nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .shared_rows import RowIndex, places_of_uses

__all__ = ["BoundedRows", "BoundedSegments", "Room", "table_of"]

_FEWEST = 64
_FEWEST_SEGMENTS, _FEWEST_USES, _FEWEST_REPEATED = 16, 8, 256
"""Bounds that cost next to nothing, so that none of them is exceeded by the next row that is like this one."""


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True)
class Room:
    """What a row has, or may have at most.

    Attributes:
        tokens: the number of tokens; a row with fewer ones is filled up to it.
        segments: the number of segments, those that fill the row up included.
        longest: the number of keys of the longest segment.
        keys: the number of keys of all segments; 0: keys are the row's own tokens.
        repeated: the number of tokens that are keys of several segments.
        uses: the number of segments that a token is a key of.
    """

    tokens: int
    segments: int
    longest: int
    keys: int = 0
    repeated: int = 0
    uses: int = 0

    @classmethod
    def needed(cls, lengths: Sequence[int], key_lengths: Sequence[int], index: np.ndarray | None) -> Room:
        """Returns what a row of these segments has.

        Args:
            lengths: the number of queries of each segment.
            key_lengths: the number of keys of each segment.
            index: for each key, its token in the row; None: the keys are the segments' own tokens.
        """
        if index is None:
            return cls(sum(lengths), len(lengths), max(key_lengths))
        uses = np.bincount(index)
        return cls(
            sum(lengths), len(lengths), max(key_lengths), len(index), int((uses > 1).sum()), int(uses.max())
        )  # fmt: skip

    def for_row(self, row: Room) -> str | None:
        """Returns which bound is too small for a row, as a part of a sentence, or None if the row has room."""
        if (row.keys > 0) != (self.keys > 0):
            return "its segments share keys, or a row's do not"
        filling = max(self.tokens - row.tokens, 0)
        has = dataclasses.replace(
            row, segments=row.segments + -(-filling // self.longest), keys=row.keys + filling if row.keys else 0
        )  # fmt: skip
        for each in dataclasses.fields(Room):
            bound, needed = getattr(self, each.name), getattr(has, each.name)
            if needed > bound:
                return f"{each.name} must be at most {bound}; the row needs {needed}"
        return None

    @classmethod
    def bucket(cls, tokens: int) -> int:
        """Returns the power of two that a row of so many tokens may be filled up to."""
        return max(_power_of_two(tokens), _FEWEST)

    @classmethod
    def around(cls, row: Room, tokens: int, others: Sequence[Room] = ()) -> Room:
        """Returns bounds for a row and for rows that are like it: powers of two, none below those of other rooms. The
        longest segment may be twice as long.

        Args:
            row: the row.
            tokens: the number of tokens that it is filled up to.
            others: bounds; those with as many tokens count.
        """
        longest = _power_of_two(row.longest)
        longest = max(longest, min(2 * longest, tokens))
        filling = tokens - row.tokens
        pieces = -(-tokens // longest)  # of a row that has hardly any tokens
        segments = max(_power_of_two(row.segments + pieces), _FEWEST_SEGMENTS)
        bounds = cls(
            tokens, segments, longest, _power_of_two(row.keys + filling) if row.keys else 0,
            max(_power_of_two(row.repeated), _FEWEST_REPEATED) if row.keys else 0,
            max(_power_of_two(row.uses), _FEWEST_USES) if row.keys else 0,
        )  # fmt: skip
        alike = [other for other in others if other.tokens == tokens and (other.keys > 0) == (row.keys > 0)]
        names = [each.name for each in dataclasses.fields(cls)]
        return cls(*(max(getattr(each, name) for each in (bounds, *alike)) for name in names))

    def covers(self, other: Room) -> bool:
        """Whether every row that has room in the other one has room here, filled up to as many tokens."""
        if self.tokens != other.tokens or (self.keys > 0) != (other.keys > 0):
            return False
        return all(getattr(self, each.name) >= getattr(other, each.name) for each in dataclasses.fields(Room))

    @property
    def parts(self) -> tuple[int, ...]:
        """The lengths of the table's parts: ends of queries, ends of keys, keys, tokens that are keys once, tokens
        that are keys several times, and their places."""
        if not self.keys:
            return (self.segments + 1,)
        return (
            self.segments + 1, self.segments + 1, self.keys, self.tokens + 1, self.repeated,
            self.uses * self.repeated,
        )  # fmt: skip


def table_of(
    room: Room, lengths: Sequence[int], key_lengths: Sequence[int], index: np.ndarray | None
) -> np.ndarray:  # fmt: skip
    """Returns the table of a row.

    Args:
        room: the bounds.
        lengths, key_lengths, index: as for `Room.needed`.

    Raises:
        ValueError: a bound is too small for the row.
    """
    if (reason := room.for_row(Room.needed(lengths, key_lengths, index))) is not None:
        raise ValueError(reason)
    live = sum(lengths)
    filling = room.tokens - live
    pieces = [min(room.longest, filling - at) for at in range(0, filling, room.longest)]
    ends = [_ends([*lengths, *pieces], room.segments)]
    if index is None:
        return ends[0]
    ends.append(_ends([*key_lengths, *pieces], room.segments))
    keys = np.concatenate([index, np.arange(live, room.tokens)])
    once, several, matrix = places_of_uses(keys, room.tokens)
    # The row behind the last token takes what is added up for tokens that there are not.
    places = np.full((room.uses, room.repeated), -1, np.int64)
    places[: len(matrix), : len(several)] = matrix
    return np.concatenate([
        *ends, _padded(keys, room.keys, 0), _padded(once, room.tokens + 1, -1),
        _padded(several, room.repeated, room.tokens), places.reshape(-1),
    ])  # fmt: skip


def _padded(values: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), value, np.int64)])


def _ends(lengths: Sequence[int], most: int) -> np.ndarray:
    """Returns the ends of segments with a leading 0; segments that there are not end where the last one does."""
    ends = np.cumsum([0, *lengths]).astype(np.int64)
    return _padded(ends, most + 1, int(ends[-1]))


class BoundedRows:
    """The keys of a row as rows of its tokens; the counterpart of `Shared` whose index is on the device alone.

    Attributes:
        n: the number of tokens.
    """

    def __init__(
        self, room: Room, keys: torch.Tensor, once: torch.Tensor, several: torch.Tensor, places: torch.Tensor
    ) -> None:
        self.n, self._uses = room.tokens, room.uses
        self._keys, self._several = keys, several
        self._once, self._places = RowIndex.on_device(once), RowIndex.on_device(places)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of x."""
        return x.index_select(0, self._keys)

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of the source from the gradient of the result, as `Shared.gradient` does."""
        dx = self._once.of(dy)
        used = self._places.of(dy).view(self._uses, -1, *dy.shape[1:])
        summed = used.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
        return dx.index_copy_(0, self._several, summed.to(dy.dtype))[: self.n]


class BoundedSegments:
    """The segments that a table on the device describes; `varlen_attention` takes them in the place of `Segments`.

    Everything is computed from the table by operators, so a graph that holds these goes by the table that it finds.

    Args:
        table: a tensor of `table_of`, or of as many zeros, to be filled later.
        room: the bounds.

    Attributes:
        queries: the number of tokens of the row.
        key_rows: the number of rows of k and v before keys are gathered.
        keys: the tokens that are the keys; None: the row's own.
        cu_q, cu_k: the ends of each segment's queries and keys, with a leading 0, as int32 tensors.
        longest_q, longest_k: the bounds of a segment's queries and keys.
    """

    def __init__(self, table: torch.Tensor, room: Room) -> None:
        self._room = room
        self.queries = self.key_rows = room.tokens
        self.longest_q = self.longest_k = room.longest
        parts = table.split(room.parts)
        self.cu_q = parts[0].int()
        self.cu_k = parts[1].int() if room.keys else self.cu_q
        self.keys = BoundedRows(room, *parts[2:]) if room.keys else None

    def __len__(self) -> int:
        return self._room.segments

    def seen(self, window: int | None) -> torch.Tensor:
        """Returns the mask `[queries, keys]` of the keys that each query sees, computed on the device."""
        room, cu_q, cu_k = self._room, self.cu_q, self.cu_k
        query = torch.arange(room.tokens, device=cu_q.device)
        key = torch.arange(room.keys or room.tokens, device=cu_q.device)
        # The number of the segment, and 1. Queries behind the last segment see nothing.
        at = torch.searchsorted(cu_q.long(), query, right=True).clamp(max=room.segments)
        last = cu_k.index_select(0, at) - cu_q.index_select(0, at) + query
        first = cu_k.index_select(0, at - 1)
        if window is not None:
            first = torch.maximum(first, last - (window - 1))
        inside = (query < cu_q[-1]).unsqueeze(1)
        return inside & (key >= first.unsqueeze(1)) & (key <= last.unsqueeze(1))
