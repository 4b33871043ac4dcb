"""Rows of a tensor in another order, some of them several times, some places empty; gradients come back by sums.

    y_i = x[index_i]                          zero where index_i is -1              [m, ...] of x [n, ...]
    dx_r = sum over i with index_i = r of dy_i          fp32, in a fixed order, rounded once

Backward adds nothing with atomics, so it gives the same bits every time: rows that are used once are gathered; for
those that are used several times, the places where they are used stand in a matrix, and one sum goes over its rows.
What has to be known of the index is read on the host, where it was made, and uploaded once: nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..host import once_differentiable

__all__ = ["Shared", "take", "uploaded"]


def uploaded(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values on a device. From pageable memory the host would wait for what the device is still doing."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Where rows are gathered from, all on the device.

    Attributes:
        rows: `[m]`, for each row of the result a row of the source; any valid one where the result is to be zero.
        empty: `[m]` bool, where that is; None where it is nowhere.
    """

    rows: torch.Tensor
    empty: torch.Tensor | None

    @classmethod
    def make(cls, index: np.ndarray, device: torch.device) -> _Plan:
        empty = index < 0
        rows = np.where(empty, 0, index)
        return cls(uploaded(rows, device), uploaded(empty, device) if empty.any() else None)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        y = x.index_select(0, self.rows)
        if self.empty is not None:
            y.masked_fill_(self.empty.view(-1, *(1,) * (y.dim() - 1)), 0)
        return y


@dataclass(frozen=True, eq=False)
class Shared:
    """For each row of a result, the row of a source that it is; -1: a row of zeros.

    Attributes:
        index: `[m]` int64, on the host.
        n: rows of the source.
        gather: what forward gathers.
    """

    index: np.ndarray
    n: int
    gather: _Plan
    _once: _Plan
    _several: torch.Tensor | None
    _uses: tuple[_Plan, int] | None

    @classmethod
    def make(cls, index: np.ndarray, n: int, device: torch.device | str) -> Shared:
        """From an index on the host.

        Args:
            index: `[m]` integers in `[-1, n)`.
            n: rows of the source.
            device: of the tensors whose rows are taken.

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
        places = np.flatnonzero(index >= 0)
        # By row, and within a row in the order of the result.
        places = places[np.argsort(index[places], kind="stable")]
        uses = np.bincount(index[places], minlength=n)
        first = np.cumsum(uses) - uses
        once = np.full(n, -1, np.int64)
        once[uses == 1] = places[first[uses == 1]]
        several = np.flatnonzero(uses > 1)
        most = int(uses.max(initial=0))
        plan = None
        if several.size:
            turn = np.arange(most)[:, None]
            matrix = np.where(turn < uses[several], places[np.minimum(first[several] + turn, places.size - 1)], -1)
            plan = _Plan.make(matrix.reshape(-1), device), most
            # They are written over: no need to make them zero first.
            once[several] = places[first[several]]
        return cls(
            index, n, _Plan.make(index, device), _Plan.make(once, device),
            uploaded(several, device) if several.size else None, plan,
        )  # fmt: skip

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Of the source, from that of the result."""
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
    def forward(ctx: Any, x: torch.Tensor, rows: Shared) -> torch.Tensor:
        ctx.rows = rows
        if not rows.n:
            return x.new_zeros(len(rows.index), *x.shape[1:])
        return rows.gather.of(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.gradient(dy), None


def take(x: torch.Tensor, rows: Shared) -> torch.Tensor:
    """The rows of x `[n, ...]` that `rows` names, `[m, ...]`; formulas in the module's docstring.

    Raises:
        ValueError: x has another number of rows than `rows` was made for.
    """
    if x.dim() < 1 or x.shape[0] != rows.n:
        raise ValueError(f"x must have {rows.n} rows, for which the index was made; got shape {list(x.shape)}")
    return _Take.apply(x, rows)
