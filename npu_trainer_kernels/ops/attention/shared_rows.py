"""Gathers rows of a tensor, possibly several times, with zeros for index -1. Backward sums the gradients of each row.

    y_i = x[index_i]                          zero where index_i is -1              [m, ...] of x [n, ...]
    dx_r = sum over i with index_i = r of dy_i          fp32, in a fixed order, rounded once

Backward uses no atomics, so it gives the same bits every time. It gathers the gradients of rows that are used once. For
rows that are used several times a matrix has the positions of their uses, and one sum over that matrix adds the
gradients. The index comes from the host, which prepares everything from it and uploads it once, so the host never waits
for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..host import once_differentiable

__all__ = ["RowIndex", "Shared", "places_of_uses", "take", "uploaded"]


def uploaded(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies values to a device from pinned memory. From pageable memory the host would wait for the device's queue."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type in ("cpu", "meta") or torch.compiler.is_compiling():  # Dynamo has no pinned memory
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class RowIndex:
    """A gather, with its index on the device.

    Attributes:
        rows: `[m]`, the row of the source for each row of the result; any valid row where the result is zero.
        empty: `[m]` bool, which rows of the result are zero; None if no row is.
    """

    rows: torch.Tensor
    empty: torch.Tensor | None

    @classmethod
    def make(cls, index: np.ndarray, device: torch.device) -> RowIndex:
        empty = index < 0
        rows = np.where(empty, 0, index)
        return cls(uploaded(rows, device), uploaded(empty, device) if empty.any() else None)

    @classmethod
    def on_device(cls, index: torch.Tensor) -> RowIndex:
        """Returns the same for an index on the device, whose numbers the host does not know."""
        return cls(index.clamp(min=0), index < 0)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of x."""
        y = x.index_select(0, self.rows)
        if self.empty is not None:
            y.masked_fill_(self.empty.view(-1, *(1,) * (y.dim() - 1)), 0)
        return y


def places_of_uses(index: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what the gradient of a gather is computed from.

    Args:
        index: `[m]`, for each row of the result, a row of the source, or -1.
        n: the number of rows of the source.

    Returns:
        for each row of the source, its place in the result, or -1 if it has none, the first one if it has several,
        since backward overwrites these rows and need not set them to zero first; the rows that have several places; and
        a matrix with these places, a column for each of those rows, -1 where there are no more.
    """
    places = np.flatnonzero(index >= 0)
    # Sort by row of the source; positions of one row remain in the order of the result.
    places = places[np.argsort(index[places], kind="stable")]
    uses = np.bincount(index[places], minlength=n)
    first = np.cumsum(uses) - uses
    once = np.full(n, -1, np.int64)
    once[uses > 0] = places[first[uses > 0]]
    several = np.flatnonzero(uses > 1)
    turn = np.arange(uses[several].max(initial=0))[:, None]
    matrix = np.where(
        turn < uses[several], places[np.minimum(first[several] + turn, max(places.size - 1, 0))], -1
    ) if several.size else np.full((0, 0), -1, np.int64)  # fmt: skip
    return once, several, matrix


@dataclass(frozen=True, eq=False)
class Shared:
    """The index of a gather, and the plans of its forward and backward.

    Attributes:
        index: `[m]` int64 on the host: for each row of the result, a row of the source, or -1 for zeros.
        n: the number of rows of the source.
        gather: the plan of forward.
    """

    index: np.ndarray
    n: int
    gather: RowIndex
    _once: RowIndex
    _several: torch.Tensor | None
    _uses: tuple[RowIndex, int] | None

    @classmethod
    def make(cls, index: np.ndarray, n: int, device: torch.device | str) -> Shared:
        """Prepares a gather from an index on the host.

        Args:
            index: `[m]` integers in `[-1, n)`.
            n: the number of rows of the source.
            device: the device of the tensors whose rows are taken.

        Raises:
            ValueError: an index of another shape or dtype, or out of range.
        """
        index = np.asarray(index)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(f"index must be a list of integers; got {index.dtype} of shape {list(index.shape)}")
        index = index.astype(np.int64)
        if index.size and not (index.min() >= -1 and index.max() < n):
            raise ValueError(f"index must lie in [-1, {n}); got values from {index.min()} to {index.max()}")
        device = torch.device(device)
        once, several, matrix = places_of_uses(index, n)
        plan = (RowIndex.make(matrix.reshape(-1), device), len(matrix)) if several.size else None
        return cls(
            index, n, RowIndex.make(index, device), RowIndex.make(once, device),
            uploaded(several, device) if several.size else None, plan,
        )  # fmt: skip

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of x."""
        if not self.n:
            return x.new_zeros(len(self.index), *x.shape[1:])
        return self.gather.of(x)

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of the source from the gradient of the result."""
        if not len(self.index):
            return dy.new_zeros(self.n, *dy.shape[1:])
        dx = self._once.of(dy)
        if self._several is not None and self._uses is not None:
            plan, most = self._uses
            used = plan.of(dy).view(most, -1, *dy.shape[1:])
            summed = used.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
            dx.index_copy_(0, self._several, summed.to(dy.dtype))
        return dx


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Any) -> torch.Tensor:
        ctx.rows = rows
        return rows.of(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.gradient(dy), None


class Gather(Protocol):
    """What `take` is called with: `Shared`, or its counterpart in a graph (`bounded_segments.BoundedRows`)."""

    @property
    def n(self) -> int:
        """The number of rows of the source."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of x."""

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of the source from the gradient of the result."""


def take(x: torch.Tensor, rows: Gather) -> torch.Tensor:
    """Gathers the rows `[m, ...]` of x `[n, ...]` that `rows` names. The module's docstring has the formulas.

    Raises:
        ValueError: x does not have the number of rows that `rows` was made for.
    """
    if x.dim() < 1 or x.shape[0] != rows.n:
        raise ValueError(f"x must have {rows.n} rows, for which the index was made; got shape {list(x.shape)}")
    return _Take.apply(x, rows)
