"""The segments of one packed row of tokens, and the options of `varlen_attention`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from .shared_rows import Shared, uploaded

__all__ = ["Options", "Segments", "once_for_segments"]

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Options:
    """The options of a layer; see `varlen_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def _ends(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{name} must be one length of at least 1 for each segment; got {list(lengths)!r}")
    return tuple(accumulate(int(length) for length in lengths))


def _from_zero(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return uploaded(np.array((0, *ends), np.int32), device)


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one packed row [1, n] of tokens, and the keys that each segment's queries attend to.

    Attention is causal and aligned at the end of each segment's keys: query i of Lq sees the keys 0 .. Lk - Lq + i.

    Attributes:
        q_ends: the end of each segment's queries; the last one is n.
        k_ends: the end of each segment's keys; equal to `q_ends` if segments share no keys.
        keys: for each key, its token in the packed row; None if the keys are the packed row itself.
        cu_q, cu_k: `q_ends` and `k_ends` with a leading 0, as int32 tensors on the device.
        longest_q, longest_k: the maximum numbers of queries and keys of a segment.
    """

    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    keys: Shared | None
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def make(
        cls,
        q_lengths: Sequence[int],
        device: torch.device | str,
        k_lengths: Sequence[int] | None = None,
        keys: Shared | None = None,
    ) -> Segments:
        """Makes segments from lengths on the host. All layers of a forward share one object.

        Args:
            q_lengths: the number of queries of each segment.
            device: the device of the tensors.
            k_lengths: the number of keys of each segment, at least that of its queries; None for the same numbers.
            keys: the tokens of the packed row that are the keys; None if the caller passes the keys themselves.

        Raises:
            ValueError: no segment, an empty one, one with fewer keys than queries, or `keys` of another total length.
        """
        device = torch.device(device)
        q_ends = _ends("q_lengths", q_lengths)
        k_ends = q_ends if k_lengths is None else _ends("k_lengths", k_lengths)
        if k_lengths is not None and (
            len(k_lengths) != len(q_lengths) or any(k < q for q, k in zip(q_lengths, k_lengths, strict=True))
        ):
            raise ValueError(
                f"k_lengths must be a length for each segment, none below its queries' {list(q_lengths)!r}; "
                f"got {list(k_lengths)!r}"
            )
        if keys is not None:
            if len(keys.index) != k_ends[-1]:
                raise ValueError(f"keys must name {k_ends[-1]} rows, the sum of k_lengths; got {len(keys.index)}")
            if keys.n != q_ends[-1] or (keys.index < 0).any():
                raise ValueError(f"keys must name rows of the packed row, all in [0, {q_ends[-1]})")
        cu_q = _from_zero(q_ends, device)
        return cls(
            q_ends, k_ends, keys, cu_q, cu_q if k_ends == q_ends else _from_zero(k_ends, device),
            max(q_lengths), max(k_lengths or q_lengths),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.q_ends)

    @property
    def queries(self) -> int:
        """The number of queries of all segments."""
        return self.q_ends[-1]

    @property
    def key_rows(self) -> int:
        """The number of rows that k and v have before keys are gathered."""
        return self.k_ends[-1] if self.keys is None else self.queries

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of queries and keys of each segment."""
        q, k = (0, *self.q_ends), (0, *self.k_ends)
        return [(q[i + 1] - q[i], k[i + 1] - k[i]) for i in range(len(self))]


_of_segments: weakref.WeakKeyDictionary[Segments, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once_for_segments(
    segments: Segments, key: Any, make: Callable[[np.ndarray, np.ndarray, torch.device], _Made]
) -> _Made:
    """Returns `make(begins, ends, device)`, which is called once for all layers that share the segments.

    Args:
        segments: the segments; `make` gets where their queries begin and end.
        key: says what is made; it begins with a name of its own for each caller.
        make: computes indexes on the host and uploads them.
    """
    made = _of_segments.setdefault(segments, {})
    if key not in made:
        ends = np.array(segments.q_ends, np.int64)
        made[key] = make(np.concatenate(([0], ends[:-1])), ends, segments.cu_q.device)
    return made[key]
