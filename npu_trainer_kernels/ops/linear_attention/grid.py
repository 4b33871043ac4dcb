"""The chunks of tokens of rows, or of the segments of a packed row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from ..attention import Segments, once_for_segments, uploaded

__all__ = ["Grid"]

# 64 is where the work inside of chunks (it grows with their length) about equals that on states of 128 x 128 numbers.
_LENGTHS = (64, 32, 16)


@dataclass(frozen=True, eq=False)
class Grid:
    """The chunks of rows of one length, or of the segments of a packed row. A chunk belongs to one of them; the last
    chunk of each is filled up with tokens whose numbers are all zero, which leave the state as it is.

    Attributes:
        rows: the number of rows or segments.
        length: the number of tokens of a chunk.
        count: the number of chunks.
        places: the place in the chunks of each token of a packed row; None for rows, which are padded.
        first, last: `[rows]`, the first and the last chunk of each row or segment.
        begins: `[count]` bool, whether a chunk is the first one of a row; None if there is only one row.
        levels: `[log2(length), length, length]` bool, false where `_inverse` reads a matrix in each of its steps.
    """

    rows: int
    length: int
    count: int
    places: torch.Tensor | None
    first: torch.Tensor
    last: torch.Tensor
    begins: torch.Tensor | None
    levels: torch.Tensor

    @classmethod
    def of(cls, v: torch.Tensor, segments: Segments | None, numbers: Callable[[int], int]) -> Grid:
        """Returns the chunks of v `[B, L, Hv, Dv]`, of the length that needs the least memory: `numbers` are those of a
        chunk by its length. The indexes of segments are made once for all layers that share them."""

        rows, tokens = v.shape[:2]
        # Python's numbers: Dynamo in torch 2.11 knows no values of those that NumPy makes.
        lengths = None if segments is None else [queries for queries, _ in segments.lengths]

        def chunks(length: int) -> int:
            return rows * -(-tokens // length) if lengths is None else sum([-(-each // length) for each in lengths])

        # A loop, since Dynamo traces neither `min` with a key nor `index` in torch 2.11.
        length = _LENGTHS[0]
        for each in _LENGTHS[1:]:
            if chunks(each) * numbers(each) < chunks(length) * numbers(length):
                length = each
        if segments is None:
            of_row, count = -(-tokens // length), chunks(length)
            first = torch.arange(0, count, of_row, device=v.device)
            begins = torch.arange(count, device=v.device) % of_row == 0 if rows > 1 else None
            return cls(rows, length, count, None, first, first + (of_row - 1), begins, _levels(length, v.device))

        def make(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> Grid:
            assert lengths is not None
            number = [-(-each // length) for each in lengths]
            last = np.array(list(accumulate(number)), np.int64) - 1
            first = last - np.array(number, np.int64) + 1
            is_first = np.zeros(sum(number), np.bool_)
            is_first[first] = True
            # How far the tokens of a segment move. All sizes here are Python's numbers, as above.
            moved = first * length - begins
            steps = np.zeros(sum(lengths), np.int64)
            steps[begins] = np.concatenate((moved[:1], moved[1:] - moved[:-1]))
            places = np.arange(sum(lengths)) + np.cumsum(steps)
            return cls(
                len(number), length, sum(number), uploaded(places, where), uploaded(first, where),
                uploaded(last, where), uploaded(is_first, where) if len(number) > 1 else None, _levels(length, where),
            )  # fmt: skip

        return once_for_segments(segments, ("delta rule", length), make)

    def split(self, t: torch.Tensor) -> torch.Tensor:
        """Returns t `[B, L, H, D]` in fp32 as chunks `[H, count, length, D]`."""
        if self.places is None:
            t = F.pad(t, (0, 0, 0, 0, 0, self.count * self.length // t.shape[0] - t.shape[1]))
        else:
            t = t.new_zeros(self.count * self.length, *t.shape[2:]).index_copy_(0, self.places, t[0])
        t = t.reshape(self.count, self.length, *t.shape[-2:]).permute(2, 0, 1, 3)
        return t.to(torch.float32, memory_format=torch.contiguous_format)

    def join(self, t: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns chunks `[H, count, length, D]` as `[B, L, H, D]`, with `tokens` for L; the inverse of `split`."""
        t = t.permute(1, 2, 0, 3)
        if self.places is None:
            return t.reshape(self.rows, -1, *t.shape[2:])[:, :tokens]
        return t.flatten(0, 1).index_select(0, self.places).unsqueeze(0)


def _levels(size: int, device: torch.device) -> torch.Tensor:
    """Returns where the matrices are not read that join blocks of 1, 2, 4 ... tokens with the next ones."""
    at = torch.arange(size, device=device)
    apart = at.unsqueeze(1) ^ at  # its highest bit says in which doubling two tokens get into one block
    return apart >> torch.arange(size.bit_length() - 1, device=device).view(-1, 1, 1) != 1
