"""The RMS norm engine: one pair of kernels (and their torch twin) behind `rms_norm` and `add_rms_norm`.

Maths
-----
Row i of `[N, H]`, with an optional residual; S, x and residual are stored in their own dtypes, everything else is fp32:

    s      = x + residual                       rounded to S's dtype as PyTorch would; s = x without a residual
    rstd   = (mean_j s_j^2 + eps)^(-1/2)        [N], the only thing kept for backward besides the inputs
    n      = s rstd
    y      = cast(n) w'        "llama"          w' = offset + w, cast: to S's dtype
             cast(n w')        "gemma"
             (s cast(rstd)) cast(w')  "none"    each product rounded to S's dtype

    g      = dy w'
    ds     = rstd (g - n mean_j g_j n_j) + dS   dS: what arrives for S itself, where S was returned
    dw     = sum_i dy n

The weight gradient is summed in fp32 by each program over its own rows into `[programs, H]`, and those few rows are
added up afterwards in a fixed order: no atomics, the same bits every time.

Tiles
-----
A row tile `[ROWS, COLS]` holds whole rows, so each element is read once. Rows that are too wide for the chip go in
column blocks instead, a second read each. Per-row values stay `[ROWS, 1]` tensors: a scalar would cross from the
vector to the scalar unit and back on an NPU.
"""

from __future__ import annotations

import math

import torch

from .. import device, tiling
from .._triton import jit, tl
from ._checks import check_choice, check_float, check_same_device
from ._launch import launch

__all__ = ["CASTINGS", "as_rows", "check_norm", "norm_backward", "norm_forward", "norm_reference"]

CASTINGS = ("llama", "gemma", "none")


def check_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str) -> None:
    """Arguments that the norms share."""
    check_float("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have shape [..., H] with H >= 1; got {list(x.shape)}")
    if weight is not None:
        check_float("weight", weight)
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight must have shape [{x.shape[-1]}], x's last dimension; got {list(weight.shape)}")
    check_same_device(x=x, weight=weight)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number that is not negative; got {eps!r}")
    if not math.isfinite(offset):
        raise ValueError(f"offset must be a finite number; got {offset!r}")
    if weight is None and offset:
        raise ValueError(f"offset must be 0 without a weight; got {offset!r}")
    check_choice("casting", casting, CASTINGS)


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


def norm_reference(
    s: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> torch.Tensor:
    """The norm in plain PyTorch, operation for operation as transformers' modules do it."""
    return _normed(s, weight, eps, offset, casting)[0]


def _normed(
    s: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd `[..., 1]`)."""
    wide = s if s.dtype == torch.float64 else s.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "none":
        n = s * rstd.to(s.dtype)
        return n if weight is None else n * _shifted(weight, offset).to(s.dtype), rstd
    n = wide * rstd
    if weight is None:
        return n.to(s.dtype), rstd
    if casting == "llama":
        return _shifted(weight, offset) * n.to(s.dtype), rstd
    return (n * _shifted(weight.to(n.dtype), offset)).to(s.dtype), rstd


def _shifted(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return offset + weight if offset else weight


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """fp32 values; zeros where the mask says no, if there is one."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@jit
def _store(pointers, value, mask, MASKED: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


@jit
def _mask(row, n_rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements of the tile at `row` exist."""
    rows = row + tl.arange(0, ROWS)[:, None] < n_rows
    cols = tl.arange(0, COLS)[None, :] < HIDDEN
    return rows & cols


@jit
def _tile_of(pointer, row, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers `[ROWS, COLS]`. The row offset is 64-bit: rows x columns may exceed 2^31."""
    start = pointer + tl.cast(row, tl.int64) * stride
    return start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]


@jit
def _rounded(value, like, ROUND: tl.constexpr):
    """fp32 value rounded to the dtype of `like`."""
    if ROUND:
        value = value.to(like.dtype.element_ty).to(tl.float32)
    return value


@jit
def _row_of_weight(weight, offset, HIDDEN: tl.constexpr, COLS: tl.constexpr, ROUND: tl.constexpr):
    """w' as `[1, COLS]` fp32, rounded to the weight's dtype where the casting adds the offset there."""
    cols = tl.arange(0, COLS)[None, :]
    w = _load(weight + cols, cols < HIDDEN, COLS != HIDDEN) + offset
    return _rounded(w, weight, ROUND)


@jit
def _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, x_stride, residual_stride, eps,
                  HAS_RESIDUAL: tl.constexpr, STORE_SUM: tl.constexpr, ROUND_SUM: tl.constexpr,
                  HAS_WEIGHT: tl.constexpr, CASTING: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    MASKED: tl.constexpr = TAIL or COLS != HIDDEN
    mask = _mask(row, n_rows, HIDDEN, ROWS, COLS)
    s = _load(_tile_of(x, row, x_stride, ROWS, COLS), mask, MASKED)
    if HAS_RESIDUAL:
        r = _load(_tile_of(residual, row, residual_stride, ROWS, COLS), mask, MASKED)
        s = _rounded(s + r, x, ROUND_SUM)
    if STORE_SUM:
        _store(_tile_of(s_out, row, HIDDEN, ROWS, COLS), s, mask, MASKED)
    rstd = tl.rsqrt(tl.sum(s * s, axis=1) * (1.0 / HIDDEN) + eps)
    row_index = row + tl.arange(0, ROWS)
    _store(rstd_out + row_index, rstd, row_index < n_rows, TAIL)
    rstd = rstd[:, None]
    n = s * _rounded(rstd, x, ROUND_SUM and CASTING == "none")
    if HAS_WEIGHT:
        n = _rounded(n, x, ROUND_SUM and CASTING != "gemma") * w
    _store(_tile_of(y, row, HIDDEN, ROWS, COLS), n, mask, MASKED)


@jit
def _forward_kernel(
    x,  # [n_rows, HIDDEN], row stride given; with HAS_RESIDUAL so is residual
    residual,
    weight,  # [HIDDEN], read where HAS_WEIGHT
    s_out,  # [n_rows, HIDDEN] contiguous, written where STORE_SUM
    y,  # [n_rows, HIDDEN] contiguous
    rstd_out,  # [n_rows] fp32
    n_rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    STORE_SUM: tl.constexpr,
    ROUND_SUM: tl.constexpr,  # S has x's dtype; otherwise S is fp32
    HAS_WEIGHT: tl.constexpr,
    CASTING: tl.constexpr,
    CONTIGUOUS: tl.constexpr,  # rows lie back to back: a tile is one transfer
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        residual_stride = HIDDEN
    w = 0.0
    if HAS_WEIGHT:
        w = _row_of_weight(weight, offset, HIDDEN, COLS, CASTING != "gemma")
        w = _rounded(w, x, ROUND_SUM and CASTING == "none")
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    n_whole = n_rows // ROWS * ROWS
    for row in range(first, n_whole, step):
        _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, x_stride, residual_stride, eps, HAS_RESIDUAL,
                      STORE_SUM, ROUND_SUM, HAS_WEIGHT, CASTING, HIDDEN, ROWS, COLS, False)  # fmt: skip
    if ROWS > 1:
        # The rows that fill no tile go to the last program, which has no more tiles than any other.
        for row in range(n_whole + step - ROWS - first, n_rows, step):
            _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, x_stride, residual_stride, eps, HAS_RESIDUAL,
                          STORE_SUM, ROUND_SUM, HAS_WEIGHT, CASTING, HIDDEN, ROWS, COLS, True)  # fmt: skip


@jit
def _backward_tile(x, residual, w, dy, ds, rstd_in, dx, row, n_rows, x_stride, residual_stride, dy_stride, ds_stride,
                   HAS_RESIDUAL: tl.constexpr, HAS_DS: tl.constexpr, ROUND_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                   STORE_DX: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   TAIL: tl.constexpr):  # fmt: skip
    """Writes ds of the tile; returns dy n, of which dw is the sum over rows."""
    MASKED: tl.constexpr = TAIL or COLS != HIDDEN
    mask = _mask(row, n_rows, HIDDEN, ROWS, COLS)
    row_index = row + tl.arange(0, ROWS)
    rstd = _load(rstd_in + row_index, row_index < n_rows, TAIL)[:, None]
    s = _load(_tile_of(x, row, x_stride, ROWS, COLS), mask, MASKED)
    if HAS_RESIDUAL:
        r = _load(_tile_of(residual, row, residual_stride, ROWS, COLS), mask, MASKED)
        s = _rounded(s + r, x, ROUND_SUM)
    g = _load(_tile_of(dy, row, dy_stride, ROWS, COLS), mask, MASKED)
    n = s * rstd
    dy_n = g * n
    if STORE_DX:
        g_n = dy_n
        if HAS_WEIGHT:
            g = g * w
            g_n = dy_n * w
        mean = tl.sum(g_n, axis=1)[:, None] * (1.0 / HIDDEN)
        d = rstd * (g - n * mean)
        if HAS_DS:
            d += _load(_tile_of(ds, row, ds_stride, ROWS, COLS), mask, MASKED)
        _store(_tile_of(dx, row, HIDDEN, ROWS, COLS), d, mask, MASKED)
    return dy_n


@jit
def _backward_kernel(
    x,  # [n_rows, HIDDEN], row stride given, as are residual (HAS_RESIDUAL), dy and ds (HAS_DS)
    residual,
    weight,  # [HIDDEN], read where HAS_WEIGHT
    dy,
    ds,
    rstd_in,  # [n_rows] fp32
    dx,  # [n_rows, HIDDEN] contiguous, written where STORE_DX
    dw,  # [programs, HIDDEN] fp32, written where STORE_DW
    n_rows,
    x_stride,
    residual_stride,
    dy_stride,
    ds_stride,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DS: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUND_WEIGHT: tl.constexpr,  # the casting adds the offset in the weight's dtype
    STORE_DX: tl.constexpr,
    STORE_DW: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        residual_stride = HIDDEN
        dy_stride = HIDDEN
        ds_stride = HIDDEN
    w = 0.0
    if HAS_WEIGHT:
        w = _row_of_weight(weight, offset, HIDDEN, COLS, ROUND_WEIGHT)
    total = tl.zeros([1, COLS], tl.float32)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    n_whole = n_rows // ROWS * ROWS
    for row in range(first, n_whole, step):
        dy_n = _backward_tile(x, residual, w, dy, ds, rstd_in, dx, row, n_rows, x_stride, residual_stride, dy_stride,
                              ds_stride, HAS_RESIDUAL, HAS_DS, ROUND_SUM, HAS_WEIGHT, STORE_DX, HIDDEN, ROWS, COLS,
                              False)  # fmt: skip
        if STORE_DW:
            if ROWS > 1:
                total += tl.sum(dy_n, axis=0)[None, :]
            else:
                total += dy_n
    if ROWS > 1:
        for row in range(n_whole + step - ROWS - first, n_rows, step):
            dy_n = _backward_tile(x, residual, w, dy, ds, rstd_in, dx, row, n_rows, x_stride, residual_stride,
                                  dy_stride, ds_stride, HAS_RESIDUAL, HAS_DS, ROUND_SUM, HAS_WEIGHT, STORE_DX, HIDDEN,
                                  ROWS, COLS, True)  # fmt: skip
            if STORE_DW:
                total += tl.sum(dy_n, axis=0)[None, :]
    if STORE_DW:
        cols = tl.arange(0, COLS)[None, :]
        _store(dw + tl.program_id(0) * HIDDEN + cols, total, cols < HIDDEN, COLS != HIDDEN)


# ---------------------------------------------------------------------------------------------------------------------
# The two steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """`t` as `[N, H]` with unit column stride; a view where the strides allow it."""
    rows = t.reshape(-1, t.shape[-1]) if t.numel() else t.new_empty(t.shape[:-1].numel(), t.shape[-1])
    # The offsets inside a tile are 32-bit.
    return rows if rows.stride(1) == 1 and 0 < rows.stride(0) < 1 << 24 else rows.contiguous()


def norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, offset: float,
    casting: str, store_sum: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(y, S or None, rstd `[N]` fp32) of x (and residual) `[..., H]`."""
    if backend == "torch":
        s = x if residual is None else x + residual
        y, rstd = _normed(s, weight, eps, offset, casting)
        return y, s if store_sum else None, rstd.reshape(-1)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y_dtype = torch.promote_types(dtype, weight.dtype) if casting == "llama" and weight is not None else dtype
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device)
    s_out = torch.empty(x.shape, dtype=dtype, device=x.device) if store_sum else None
    rows = as_rows(x)
    n_rows, hidden = rows.shape
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if not n_rows:
        return y, s_out, rstd
    r_rows = rows if residual is None else as_rows(residual)
    tile = tiling.norm_forward_tile(hidden, max(t.dtype.itemsize for t in (rows, r_rows, y)),
                                    (residual is not None) + store_sum, device.spec(x.device))  # fmt: skip
    launch(
        _forward_kernel, (tiling.programs(-(-n_rows // tile.rows), device.spec(x.device)),),
        rows, r_rows, rows if weight is None else weight.contiguous(), y if s_out is None else s_out, y, rstd,
        n_rows, rows.stride(0), r_rows.stride(0), eps, offset,
        HAS_RESIDUAL=residual is not None, STORE_SUM=store_sum, ROUND_SUM=dtype == x.dtype,
        HAS_WEIGHT=weight is not None, CASTING=casting,
        CONTIGUOUS=rows.stride(0) == hidden and r_rows.stride(0) == hidden,
        HIDDEN=hidden, ROWS=tile.rows, COLS=tile.cols, **tile.options,
    )  # fmt: skip
    return y, s_out, rstd


def norm_backward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    ds: torch.Tensor | None, offset: float, casting: str, needs_ds: bool, needs_dw: bool, backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(ds in S's dtype, dw in the weight's), each where it is needed. `ds`: what arrived for S."""
    if backend == "torch":
        return _backward_torch(x, residual, weight, rstd, dy, ds, offset, casting, needs_ds, needs_dw)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    dx = torch.empty(x.shape, dtype=dtype, device=x.device) if needs_ds else None
    rows = as_rows(x)
    n_rows, hidden = rows.shape
    if not n_rows:
        return dx, torch.zeros_like(weight) if weight is not None and needs_dw else None
    spec = device.spec(x.device)
    r_rows = rows if residual is None else as_rows(residual)
    g_rows = as_rows(dy)
    s_rows = rows if ds is None else as_rows(ds)
    tile = tiling.norm_backward_tile(hidden, max(t.dtype.itemsize for t in (rows, r_rows, g_rows)),
                                     (residual is not None) + (ds is not None), spec)  # fmt: skip
    programs = tiling.accumulating_programs(-(-n_rows // tile.rows), spec)
    dw = torch.empty(programs, hidden, dtype=torch.float32, device=x.device) if needs_dw else None
    launch(
        _backward_kernel, (programs,),
        rows, r_rows, rows if weight is None else weight.contiguous(), g_rows, s_rows, rstd,
        rows if dx is None else dx, rstd if dw is None else dw,
        n_rows, rows.stride(0), r_rows.stride(0), g_rows.stride(0), s_rows.stride(0), offset,
        HAS_RESIDUAL=residual is not None, HAS_DS=ds is not None, ROUND_SUM=dtype == x.dtype,
        HAS_WEIGHT=weight is not None, ROUND_WEIGHT=casting != "gemma", STORE_DX=needs_ds, STORE_DW=needs_dw,
        CONTIGUOUS=all(t.stride(0) == hidden for t in (rows, r_rows, g_rows, s_rows)),
        HIDDEN=hidden, ROWS=tile.rows, COLS=tile.cols, **tile.options,
    )  # fmt: skip
    return dx, dw if dw is None or weight is None else dw.sum(0).to(weight.dtype)


def _backward_torch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    ds: torch.Tensor | None, offset: float, casting: str, needs_ds: bool, needs_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    s = x if residual is None else x + residual
    rstd = rstd.view(*s.shape[:-1], 1)
    n = s.float() * rstd
    g = dy.float()
    dw: torch.Tensor | None = None
    if needs_dw and weight is not None:
        dw = (g * n).reshape(-1, s.shape[-1]).sum(0).to(weight.dtype)
    if not needs_ds:
        return None, dw
    if weight is not None:
        w = _shifted(weight.float(), offset) if casting == "gemma" else _shifted(weight, offset).float()
        g = g * w
    d = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(rstd)
    if ds is not None:
        d.add_(ds)
    return d.to(s.dtype), dw
