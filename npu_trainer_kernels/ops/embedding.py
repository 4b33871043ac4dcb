"""Embedding lookup with a deterministic gradient.

    y_i = scale W[id_i]                            [*, D]; in W's dtype, rounded once
    dW[v] = scale sum over i with id_i = v of dy_i     fp32, in a fixed order; zero for `padding_idx`

Backward sorts the ids (stable), finds where each distinct id begins, and starts one program per distinct id, which adds
its rows. There are no atomics, so the gradient has the same bits every time, and apart from the zero fill only rows of
ids that occur are written. The number of distinct ids stays on the device, so the host does not wait for it. On CUDA,
where programs are many and cheap, there is one program for every row of the vocabulary instead, which writes zeros if
its id does not occur. This saves one pass over the gradient and six launches.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, device, tiling
from ..support.triton import jit, tl
from .blocks import load_fp32, store
from .checks import check_float, check_ids, check_range, check_same_device, is_number
from .fallback import falls_back
from .host import once_differentiable
from .launch import launch

__all__ = ["embedding", "embedding_reference"]


def embedding_reference(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None, scale: float | None = None
) -> torch.Tensor:
    """Computes the op in plain PyTorch."""
    y = torch.nn.functional.embedding(ids, weight, padding_idx)
    return y if scale is None else y * scale


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _gather_tile(ids, weight, y, row, width, scale, HAS_SCALE: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr,
                 COLS: tl.constexpr):  # fmt: skip
    MASKED: tl.constexpr = N_COLS % COLS != 0
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    # Offsets have 64 bits, because tables of 2^31 elements exist (262144 x 8192). An NPU makes one transfer per row.
    if ROWS == 1:
        # Load the id as a scalar, because triton-ascend 3.2.0 cannot lower a gather by a vector of one id.
        source = weight + tl.load(ids + row).to(tl.int64) * N_COLS + cols
    else:
        source = weight + tl.load(ids + row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * N_COLS + cols
    target = y + tl.cast(row, tl.int64) * N_COLS + rows * N_COLS + cols
    if HAS_SCALE:
        store(target, load_fp32(source, cols < width, MASKED) * scale, cols < width, MASKED)
    else:
        value = tl.load(source, mask=cols < width, other=0.0) if MASKED else tl.load(source)
        store(target, value, cols < width, MASKED)


@jit(lengths=("n_rows",))
def _gather_kernel(
    ids,  # [n_rows] int32
    weight,  # [V, n_cols] contiguous
    y,  # [n_rows, n_cols] contiguous
    n_rows,
    scale,
    HAS_SCALE: tl.constexpr,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    column = tl.program_id(1) * COLS
    width = N_COLS - column
    weight += column
    y += column
    n_whole = n_rows // ROWS * ROWS
    for row in range(tl.program_id(0) * ROWS, n_whole, tl.num_programs(0) * ROWS):
        _gather_tile(ids, weight, y, row, width, scale, HAS_SCALE, N_COLS, ROWS, COLS)
    if ROWS > 1:
        # The programs process the rows that do not fill a tile one by one, so these need no mask.
        for row in range(n_whole + tl.program_id(0), n_rows, tl.num_programs(0)):
            _gather_tile(ids, weight, y, row, width, scale, HAS_SCALE, N_COLS, 1, COLS)


@jit
def _scatter_kernel(
    ids,  # [n_rows] int32, sorted
    order,  # [n_rows] int32, the row of dy that belongs to each sorted id
    starts,  # int32, the index in ids where each distinct id begins, then n_rows
    n_distinct,  # [1] int32
    dy,  # [n_rows, n_cols] with row stride dy_stride
    dw,  # [V, n_cols] contiguous, zeros
    dy_stride,
    scale,
    padding_idx,  # -1 for none
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
):
    first_column = tl.program_id(1) * COLS
    lane = tl.arange(0, COLS)
    mask = first_column + lane < N_COLS
    MASKED: tl.constexpr = N_COLS % COLS != 0
    dy += first_column
    dw += first_column
    for segment in range(tl.program_id(0), tl.load(n_distinct), tl.num_programs(0)):
        start = tl.load(starts + segment)
        end = tl.load(starts + segment + 1)
        row_id = tl.load(ids + start)
        if row_id != padding_idx:
            total = tl.zeros([COLS], tl.float32)
            for i in range(start, end):
                source = dy + tl.cast(tl.load(order + i), tl.int64) * dy_stride + lane
                total += load_fp32(source, mask, MASKED)
            store(dw + tl.cast(row_id, tl.int64) * N_COLS + lane, total * scale, mask, MASKED)


@jit
def _vocabulary_kernel(
    order,  # [n_rows], the rows of dy in the order of their ids
    starts,  # [V + 1] int32, the index in order where each id begins
    dy,  # [n_rows, n_cols] with row stride dy_stride
    dw,  # [V, n_cols] contiguous; the kernel writes every row
    dy_stride,
    scale,
    padding_idx,  # -1 for none
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row_id = tl.program_id(0)
    first_column = tl.program_id(1) * COLS
    lane = tl.arange(0, COLS)
    mask = first_column + lane < N_COLS
    dy += first_column
    start = tl.load(starts + row_id)
    end = tl.load(starts + row_id + 1)
    if row_id == padding_idx:
        end = start
    total = tl.zeros([COLS], tl.float32)
    for i in range(start, end, ROWS):
        at = i + tl.arange(0, ROWS)
        rows = tl.load(order + at, mask=at < end, other=0).to(tl.int64)
        found = (at < end)[:, None] & mask[None, :]
        at_dy = dy + rows[:, None] * dy_stride + lane[None, :]
        total += tl.sum(load_fp32(at_dy, found, True), axis=0)
    store(dw + first_column + tl.cast(row_id, tl.int64) * N_COLS + lane, total * scale, mask, N_COLS % COLS != 0)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


@falls_back("embedding")
def _forward(ids: torch.Tensor, weight: torch.Tensor, scale: float | None, backend: str) -> torch.Tensor:
    if backend == "torch":
        return embedding_reference(ids, weight, scale=scale)
    n_cols = weight.shape[1]
    y = weight.new_empty(*ids.shape, n_cols)
    if not y.numel():
        return y
    spec = device.spec(weight.device)
    tile = tiling.embedding_tile(n_cols, spec)
    n_rows = ids.numel()
    launch(
        _gather_kernel, (tiling.programs(-(-n_rows // tile.rows), spec, tile.blocks), tile.blocks),
        (_given_ids(ids, spec), weight.contiguous(), y, n_rows, 1.0 if scale is None else scale),
        {"HAS_SCALE": scale is not None, "N_COLS": n_cols, "ROWS": tile.rows, "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    return y


def _given_ids(ids: torch.Tensor, spec: device.DeviceSpec) -> torch.Tensor:
    flat = ids.reshape(-1)
    return flat.int() if tiling.wants_int32_ids(spec) else flat


@falls_back("embedding")
def _backward(ids: torch.Tensor, dy: torch.Tensor, shape: torch.Size, dtype: torch.dtype, padding_idx: int | None,
              scale: float | None, backend: str) -> torch.Tensor:  # fmt: skip
    n_cols = shape[1]
    flat = ids.reshape(-1)
    if not dy.numel():
        return dy.new_zeros(shape, dtype=dtype)
    spec = device.spec(dy.device)
    tile = tiling.vocabulary_tile(n_cols, spec)
    if backend != "torch" and tile is not None:
        dw = dy.new_empty(shape, dtype=dtype)
        return _backward_by_vocabulary(flat, dy.reshape(-1, n_cols), dw, padding_idx, scale, tile)
    dw = dy.new_zeros(shape, dtype=dtype)
    rows = dy.reshape(-1, n_cols)
    if backend == "torch":
        distinct, place = torch.unique(flat, return_inverse=True)
        total = torch.zeros(distinct.shape[0], n_cols, dtype=torch.float32, device=dw.device)
        if device.has_atomic_index_add(dw.device):
            total.index_put_((place,), rows.float(), accumulate=True)
        else:
            total.index_add_(0, place, rows.float())
        if scale is not None:
            total *= scale
        dw[distinct] = total.to(dw.dtype)
        if padding_idx is not None:
            dw[padding_idx] = 0
        return dw
    n_rows = flat.shape[0]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    in_order, order = torch.sort(flat.int(), stable=True)
    begins = torch.ones(n_rows, dtype=torch.bool, device=dw.device)
    torch.ne(in_order[1:], in_order[:-1], out=begins[1:])
    rank = begins.cumsum(0)
    # The first row of each distinct id writes entry rank - 1; all other rows write to a last entry that nothing reads.
    starts = torch.full((n_rows + 2,), n_rows, dtype=torch.int32, device=dw.device)
    starts.scatter_(0, torch.where(begins, rank - 1, n_rows + 1),
                    torch.arange(n_rows, dtype=torch.int32, device=dw.device))  # fmt: skip
    tile = tiling.embedding_tile(n_cols, spec)
    launch(
        _scatter_kernel, (tiling.programs(n_rows, spec, tile.blocks), tile.blocks),
        (in_order, order.int(), starts, rank[-1:].int(), rows, dw, rows.stride(0), 1.0 if scale is None else scale,
         -1 if padding_idx is None else padding_idx),
        {"N_COLS": n_cols, "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    return dw


def _backward_by_vocabulary(
    ids: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor, padding_idx: int | None, scale: float | None,
    tile: tiling.RowTile,
) -> torch.Tensor:  # fmt: skip
    size, n_cols = dw.shape
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    # 32-bit keys halve the passes of the sort.
    in_order, order = torch.sort(ids.int(), stable=True)
    every = torch.arange(size + 1, dtype=torch.int32, device=dw.device)
    starts = torch.searchsorted(in_order, every, out_int32=True)
    launch(
        _vocabulary_kernel, (size, tile.blocks),
        (order, starts, dy, dw, dy.stride(0), 1.0 if scale is None else scale,
         -1 if padding_idx is None else padding_idx),
        {"N_COLS": n_cols, "ROWS": tile.rows, "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    return dw


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor,
                options: tuple[int | None, float | None, str]) -> torch.Tensor:  # fmt: skip
        # Backward does not need the weight, which other code may change before then.
        ctx.save_for_backward(ids)
        ctx.of_weight = weight.shape, weight.dtype
        _, scale, backend = ctx.options = options
        return _forward(ids, weight, scale, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        return None, _backward(ids, dy, *ctx.of_weight, *ctx.options), None


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Returns the rows of `weight` that `ids` select. The module's docstring has the formulas.

    Args:
        ids: int64 or int32 of any shape, values in `[0, V)`.
        weight: `[V, D]`, fp32, bf16 or fp16.
        padding_idx: an id in `[-V, V)` whose row gets no gradient, or None.
        scale: factor of the rows, applied in fp32 before they are rounded; None for 1. A model that multiplies by a
            scale in its weight's dtype must pass the rounded number.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[*ids.shape, D]` in weight's dtype.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: a weight that is not a matrix, a padding_idx or (on a CPU, or with NPU_KERNELS_DEBUG=1) an id out of
            range, a scale that is not finite, an unknown backend.
    """
    check_ids("ids", ids)
    check_float("weight", weight)
    if ids.device != weight.device:
        check_same_device(ids=ids, weight=weight)
    if weight.dim() != 2 or not 1 <= weight.shape[0] < 1 << 31 or weight.shape[1] < 1:
        raise ValueError(f"weight must have shape [V, D] with V and D at least 1; got {list(weight.shape)}")
    size = weight.shape[0]
    if padding_idx is not None:
        if type(padding_idx) is not int or not -size <= padding_idx < size:
            raise ValueError(f"padding_idx must lie in [{-size}, {size}); got {padding_idx!r}")
        padding_idx %= size
    if scale is not None and not is_number(scale):
        raise ValueError(f"scale must be None or a finite number; got {scale!r}")
    chosen = backends.choose("embedding", weight.device, backend, at=lambda: (weight.dtype, ids.numel(), weight.shape))
    if chosen == "torch" and torch.compiler.is_compiling():
        return embedding_reference(ids, weight, padding_idx=padding_idx, scale=scale)
    check_range("ids", ids, ids.device, size)
    return _Embedding.apply(ids, weight, (padding_idx, scale, chosen))
