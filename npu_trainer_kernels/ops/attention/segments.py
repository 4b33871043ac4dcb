"""How one packed row of tokens falls into segments: what `varlen_attention` knows besides its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from .shared_rows import Shared, uploaded

__all__ = ["Options", "Segments"]


@dataclass(frozen=True)
class Options:
    """What a layer decides; see `varlen_attention`."""

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
    """How the tokens of one packed row [1, n] fall into segments, and which keys each segment's queries see.

    Queries are causal, and aligned with the end of their segment's keys: query i of Lq sees the keys 0 .. Lk - Lq + i.

    Attributes:
        q_ends: where each segment's queries end, n at last.
        k_ends: the same for the keys that they see; equal to `q_ends` where nothing is shared.
        keys: the row of the packed row that each key is; None where they are the packed row itself.
        cu_q, cu_k: both with a 0 before them, int32 on the device.
        longest_q, longest_k: the greatest lengths.
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
        """From lengths on the host; made once for a forward, whatever number of layers uses it.

        Args:
            q_lengths: of the segments' queries.
            device: of the tensors.
            k_lengths: of the keys that they see, none shorter than its queries; None: the same.
            keys: the packed row's rows that the keys are; None: the keys are given as they are.

        Raises:
            ValueError: no segment, an empty one, fewer keys than queries, or other numbers of keys.
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
    def lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of each segment."""
        q, k = (0, *self.q_ends), (0, *self.k_ends)
        return [(q[i + 1] - q[i], k[i + 1] - k[i]) for i in range(len(self))]
