"""The RMS norm engine: one pair of kernels (and their torch twin) behind `rms_norm` and `add_rms_norm`.

Maths
-----
Row i of `[N, H]`, with an optional residual; S, x and residual are stored in their own dtypes, everything else is fp32:

    s      = m x + residual                     m: the multiplier, 1 by default; each operation rounded to S's dtype as
                                                PyTorch would; s = x without a residual
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
A row tile `[ROWS, COLS]` holds whole rows, so each element is read once. Per-row values stay `[ROWS, 1]` tensors: a
scalar would cross from the vector to the scalar unit and back on an NPU, so that there a tile of one row is folded into
`FOLD` pieces (`row_sums`).

A row that is too wide for that on an NPU goes in two halves (HALVES): what is read waits on the chip in its own dtype
until the row's sum is known, and is converted a second time. Rows that are wider still go in column blocks, at the
price of a second read: each kernel runs twice, by its flags REDUCE and APPLY. The first run leaves one partial sum per
row and block (and S, and dw), the second is elementwise.
"""

from __future__ import annotations

import torch

from ... import device, tiling, vendor
from ...support.triton import ON_ASCEND, jit, tl
from ..blocks import load_fp32, load_per_row, rounded, row_of_weight, row_sums, store, store_per_row, tile_mask, tile_of
from ..checks import check_choice, check_float, check_same_device, is_number
from ..fallback import falls_back
from ..host import contiguous_like, promoted
from ..launch import launch

__all__ = ["CASTINGS", "as_rows", "check_norm", "check_norm_options", "norm_backward", "norm_forward", "norm_reference",
           "shifted", "sum_of_partials"]  # fmt: skip

CASTINGS = ("llama", "gemma", "none")


def check_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str) -> None:
    """Arguments that the norms share."""
    check_float("x", x)
    shape = x.shape
    if not shape or shape[-1] < 1:
        raise ValueError(f"x must have shape [..., H] with H >= 1; got {list(shape)}")
    if weight is not None:
        check_float("weight", weight)
        if weight.dim() != 1 or weight.shape[0] != shape[-1]:
            raise ValueError(f"weight must have shape [{shape[-1]}], x's last dimension; got {list(weight.shape)}")
        if weight.device != x.device:
            check_same_device(x=x, weight=weight)
    check_norm_options(eps, offset, casting)
    if weight is None and offset:
        raise ValueError(f"offset must be 0 without a weight; got {offset!r}")


def check_norm_options(eps: float, offset: float, casting: str) -> None:
    """Those of them that are no tensors."""
    if not (is_number(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number that is not negative; got {eps!r}")
    if not is_number(offset):
        raise ValueError(f"offset must be a finite number; got {offset!r}")
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
        return n if weight is None else n * shifted(weight, offset).to(s.dtype), rstd
    n = wide * rstd
    if weight is None:
        return n.to(s.dtype), rstd
    if casting == "llama":
        return shifted(weight, offset) * n.to(s.dtype), rstd
    if casting == "gemma":
        return (n * shifted(weight.to(n.dtype), offset)).to(s.dtype), rstd
    raise ValueError(f"casting must be one of {', '.join(CASTINGS)}; got {casting!r}")


def shifted(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """w', in the weight's dtype."""
    return offset + weight if offset else weight


def _gamma(weight: torch.Tensor | None, offset: float, casting: str) -> torch.Tensor:
    """w', in fp32 where the casting adds the offset there: what the vendor's norms take for their weight."""
    assert weight is not None  # `npu_trainer_kernels.vendor.uncovered_norm`
    return shifted(weight.float() if offset and casting == "gemma" else weight, offset)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _summed(x, residual, row, x_stride, residual_stride, mask, HAS_RESIDUAL: tl.constexpr, ROUND_SUM: tl.constexpr,
            MULTIPLIER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FOLD: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """S of a tile, fp32."""
    s = load_fp32(tile_of(x, row, x_stride, ROWS, COLS, FOLD), mask, MASKED)
    if HAS_RESIDUAL:
        if MULTIPLIER != 1.0:
            s = rounded(s * MULTIPLIER, x, True)
        r = load_fp32(tile_of(residual, row, residual_stride, ROWS, COLS, FOLD), mask, MASKED)
        s = rounded(s + r, x, ROUND_SUM)
    return s


@jit
def _kept_sum(x, residual, row, x_stride, residual_stride, HAS_RESIDUAL: tl.constexpr, MULTIPLIER: tl.constexpr,
              COLS: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    """S of half a row, in x's dtype."""
    if HAS_RESIDUAL:
        s = _summed(x, residual, row, x_stride, residual_stride, True, True, True, MULTIPLIER, 1, COLS, FOLD, False)
        return s.to(x.dtype.element_ty)
    else:
        return tl.load(tile_of(x, row, x_stride, 1, COLS, FOLD))


@jit
def _from_kept(w, offset, ROUND: tl.constexpr):
    """w' in fp32."""
    w = w.to(tl.float32)
    if not ROUND:
        w += offset
    return w


@jit
def _normed_tile(s, rstd, w, x, ROUND_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, CASTING: tl.constexpr):
    n = s * rounded(rstd[:, None], x, ROUND_SUM and CASTING == "none")
    if HAS_WEIGHT:
        n = rounded(n, x, ROUND_SUM and CASTING != "gemma") * w
    return n


@jit
def _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, width, x_stride, residual_stride, eps,
                  HAS_RESIDUAL: tl.constexpr, STORE_SUM: tl.constexpr, ROUND_SUM: tl.constexpr,
                  HAS_WEIGHT: tl.constexpr, CASTING: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr,
                  MULTIPLIER: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                  FOLD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    MASKED: tl.constexpr = TAIL or HIDDEN % COLS != 0
    mask = tile_mask(row, n_rows, width, ROWS, COLS)
    s = _summed(x, residual, row, x_stride, residual_stride, mask, HAS_RESIDUAL, ROUND_SUM, MULTIPLIER, ROWS, COLS,
                FOLD, MASKED)  # fmt: skip
    if STORE_SUM:
        store(tile_of(s_out, row, HIDDEN, ROWS, COLS, FOLD), s, mask, MASKED)
    if REDUCE:
        rstd = row_sums(s * s, FOLD)
        if APPLY:
            rstd = tl.rsqrt(rstd * (1.0 / HIDDEN) + eps)
        store_per_row(rstd_out, rstd, row, n_rows, ROWS, FOLD, TAIL)
    else:
        rstd = load_per_row(rstd_out, row, n_rows, ROWS, FOLD, TAIL)
    if APPLY:
        n = _normed_tile(s, rstd, w, x, ROUND_SUM, HAS_WEIGHT, CASTING)
        store(tile_of(y, row, HIDDEN, ROWS, COLS, FOLD), n, mask, MASKED)


@jit
def _forward_halves(x, residual, w, w_right, offset, s_out, y, rstd_out, row, n_rows, x_stride, residual_stride, eps,
                    HAS_RESIDUAL: tl.constexpr, STORE_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                    CASTING: tl.constexpr, MULTIPLIER: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr,
                    FOLD: tl.constexpr):  # fmt: skip
    """A row in two halves, whose S, which has x's dtype, waits on the chip in it until rstd is known."""
    left = _kept_sum(x, residual, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    right = _kept_sum(x + COLS, residual + COLS, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    if STORE_SUM:
        tl.store(tile_of(s_out, row, HIDDEN, 1, COLS, FOLD), left)
        tl.store(tile_of(s_out + COLS, row, HIDDEN, 1, COLS, FOLD), right)
    squares = tl.zeros([FOLD], tl.float32)
    # A compiler that does not know that it is always so keeps no fp32 copy for what follows.
    if row < n_rows:
        s = left.to(tl.float32)
        squares = row_sums(s * s, FOLD)
        s = right.to(tl.float32)
        squares += row_sums(s * s, FOLD)
    rstd = tl.rsqrt(squares * (1.0 / HIDDEN) + eps)
    store_per_row(rstd_out, rstd, row, n_rows, 1, FOLD, False)
    if HAS_WEIGHT:
        w = _from_kept(w, offset, CASTING != "gemma")
    n = _normed_tile(left.to(tl.float32), rstd, w, x, True, HAS_WEIGHT, CASTING)
    tl.store(tile_of(y, row, HIDDEN, 1, COLS, FOLD), n.to(y.dtype.element_ty))
    if HAS_WEIGHT:
        w_right = _from_kept(w_right, offset, CASTING != "gemma")
    n = _normed_tile(right.to(tl.float32), rstd, w_right, x, True, HAS_WEIGHT, CASTING)
    tl.store(tile_of(y + COLS, row, HIDDEN, 1, COLS, FOLD), n.to(y.dtype.element_ty))


@jit(lengths=("n_rows",))
def _forward_kernel(
    x,  # [n_rows, HIDDEN], row stride given; with HAS_RESIDUAL so is residual
    residual,
    weight,  # [HIDDEN], read where HAS_WEIGHT
    s_out,  # [n_rows, HIDDEN] contiguous, written where STORE_SUM
    y,  # [n_rows, HIDDEN] contiguous
    rstd_out,  # [n_rows] fp32; [blocks, n_rows] sums of squares where they are only reduced
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
    REDUCE: tl.constexpr,  # form the sums of squares
    APPLY: tl.constexpr,  # form y; without REDUCE from rstd_out
    MULTIPLIER: tl.constexpr,  # of x, where HAS_RESIDUAL
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,  # pieces of a tile of one row
    HALVES: tl.constexpr,  # a row goes in two tiles that are on the chip together
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        residual_stride = HIDDEN
    if HALVES:
        w = 0.0
        w_right = 0.0
        if HAS_WEIGHT:
            w = tl.load(tile_of(weight, 0, 0, 1, COLS, FOLD))
            w_right = tl.load(tile_of(weight + COLS, 0, 0, 1, COLS, FOLD))
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            _forward_halves(x, residual, w, w_right, offset, s_out, y, rstd_out, row, n_rows, x_stride,
                            residual_stride, eps, HAS_RESIDUAL, STORE_SUM, HAS_WEIGHT, CASTING, MULTIPLIER, HIDDEN,
                            COLS, FOLD)  # fmt: skip
    else:
        width = HIDDEN
        if not (REDUCE and APPLY):
            # Column blocks along the grid's second axis.
            column = tl.program_id(1) * COLS
            width -= column
            x += column
            residual += column
            weight += column
            s_out += column
            y += column
            if REDUCE:
                rstd_out += tl.program_id(1) * n_rows
        w = 0.0
        if HAS_WEIGHT and APPLY:
            w = row_of_weight(weight, offset, width, COLS, FOLD, HIDDEN % COLS != 0, CASTING != "gemma")
            w = rounded(w, x, ROUND_SUM and CASTING == "none")
        first = tl.program_id(0) * ROWS
        step = tl.num_programs(0) * ROWS
        n_whole = n_rows // ROWS * ROWS
        for row in range(first, n_whole, step):
            _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, width, x_stride, residual_stride, eps,
                          HAS_RESIDUAL, STORE_SUM, ROUND_SUM, HAS_WEIGHT, CASTING, REDUCE, APPLY, MULTIPLIER, HIDDEN,
                          ROWS, COLS, FOLD, False)  # fmt: skip
        if ROWS > 1:
            # The rows that fill no tile go to the last program, which has no more tiles than any other.
            for row in range(n_whole + step - ROWS - first, n_rows, step):
                _forward_tile(x, residual, w, s_out, y, rstd_out, row, n_rows, width, x_stride, residual_stride, eps,
                              HAS_RESIDUAL, STORE_SUM, ROUND_SUM, HAS_WEIGHT, CASTING, REDUCE, APPLY, MULTIPLIER,
                              HIDDEN, ROWS, COLS, FOLD, True)  # fmt: skip


@jit
def _backward_tile(x, residual, w, dy, ds, rstd_in, dots, dx, row, n_rows, width, x_stride, residual_stride, dy_stride,
                   ds_stride, HAS_RESIDUAL: tl.constexpr, HAS_DS: tl.constexpr, ROUND_SUM: tl.constexpr,
                   HAS_WEIGHT: tl.constexpr, STORE_DX: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr,
                   MULTIPLIER: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   FOLD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Writes ds of the tile; returns dy n, of which dw is the sum over rows."""
    MASKED: tl.constexpr = TAIL or HIDDEN % COLS != 0
    mask = tile_mask(row, n_rows, width, ROWS, COLS)
    rstd = load_per_row(rstd_in, row, n_rows, ROWS, FOLD, TAIL)[:, None]
    s = _summed(x, residual, row, x_stride, residual_stride, mask, HAS_RESIDUAL, ROUND_SUM, MULTIPLIER, ROWS, COLS,
                FOLD, MASKED)  # fmt: skip
    g = load_fp32(tile_of(dy, row, dy_stride, ROWS, COLS, FOLD), mask, MASKED)
    # On an NPU what rstd multiplies is formed once: dy n = (dy rstd) s, and ds = (dy rstd) w' - s (rstd^2 mean g n).
    # Of that form CUDA's compiler adds up one row of a tile after the other; with n in the place of s both at once.
    if ON_ASCEND:
        g = g * rstd
    else:
        s = s * rstd
    dy_n = g * s
    if STORE_DX:
        if REDUCE:
            g_n = dy_n
            if HAS_WEIGHT:
                g_n = dy_n * w
            dot = row_sums(g_n, FOLD)
            if not APPLY:
                store_per_row(dots, dot, row, n_rows, ROWS, FOLD, TAIL)
        else:
            dot = load_per_row(dots, row, n_rows, ROWS, FOLD, TAIL)
        if APPLY:
            if HAS_WEIGHT:
                g = g * w
            mean = dot[:, None] * (1.0 / HIDDEN)
            d = g - s * (rstd * (rstd * mean)) if ON_ASCEND else rstd * (g - s * mean)
            if HAS_DS:
                d += load_fp32(tile_of(ds, row, ds_stride, ROWS, COLS, FOLD), mask, MASKED)
            store(tile_of(dx, row, HIDDEN, ROWS, COLS, FOLD), d, mask, MASKED)
    return dy_n


@jit
def _backward_half(s, g, w, offset, ds, dx, total, row, rstd, factor, ds_stride, HAS_DS: tl.constexpr,
                   HAS_WEIGHT: tl.constexpr, ROUND_WEIGHT: tl.constexpr, STORE_DX: tl.constexpr,
                   STORE_DW: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    """Writes ds from what waits on the chip, and from factor = rstd^2 mean g n; returns total + dy n."""
    s = s.to(tl.float32)
    g = g.to(tl.float32) * rstd
    if STORE_DW:
        total += g * s
    if STORE_DX:
        if HAS_WEIGHT:
            g = g * _from_kept(w, offset, ROUND_WEIGHT)
        d = g - s * factor
        if HAS_DS:
            d += tl.load(tile_of(ds, row, ds_stride, 1, COLS, FOLD)).to(tl.float32)
        tl.store(tile_of(dx, row, HIDDEN, 1, COLS, FOLD), d.to(dx.dtype.element_ty))
    return total


@jit
def _dots(s, g, w, offset, HAS_WEIGHT: tl.constexpr, ROUND_WEIGHT: tl.constexpr, FOLD: tl.constexpr):
    products = s.to(tl.float32) * g.to(tl.float32)
    if HAS_WEIGHT:
        products = products * _from_kept(w, offset, ROUND_WEIGHT)
    return row_sums(products, FOLD)


@jit
def _backward_halves(x, residual, w, w_right, offset, dy, ds, rstd_in, dx, total, total_right, row, n_rows, x_stride,
                     residual_stride, dy_stride, ds_stride, HAS_RESIDUAL: tl.constexpr, HAS_DS: tl.constexpr,
                     HAS_WEIGHT: tl.constexpr, ROUND_WEIGHT: tl.constexpr, STORE_DX: tl.constexpr,
                     STORE_DW: tl.constexpr, MULTIPLIER: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr,
                     FOLD: tl.constexpr):  # fmt: skip
    """A row in two halves, whose S and dy wait on the chip in their own dtypes until the sum of g n is known; returns
    the totals with dy n added."""
    rstd = load_per_row(rstd_in, row, n_rows, 1, FOLD, False)[:, None]
    dot = tl.zeros([FOLD], tl.float32)
    left = _kept_sum(x, residual, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    g_left = tl.load(tile_of(dy, row, dy_stride, 1, COLS, FOLD))
    # A compiler that does not know that it is always so keeps no fp32 copies for what follows.
    if row < n_rows:
        dot = _dots(left, g_left, w, offset, HAS_WEIGHT, ROUND_WEIGHT, FOLD)
    right = _kept_sum(x + COLS, residual + COLS, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    g_right = tl.load(tile_of(dy + COLS, row, dy_stride, 1, COLS, FOLD))
    if row < n_rows:
        dot += _dots(right, g_right, w_right, offset, HAS_WEIGHT, ROUND_WEIGHT, FOLD)
    factor = rstd * (rstd * (rstd * (dot[:, None] * (1.0 / HIDDEN))))
    total_right = _backward_half(right, g_right, w_right, offset, ds + COLS, dx + COLS, total_right, row, rstd, factor,
                                 ds_stride, HAS_DS, HAS_WEIGHT, ROUND_WEIGHT, STORE_DX, STORE_DW, HIDDEN, COLS,
                                 FOLD)  # fmt: skip
    total = _backward_half(left, g_left, w, offset, ds, dx, total, row, rstd, factor, ds_stride, HAS_DS, HAS_WEIGHT,
                           ROUND_WEIGHT, STORE_DX, STORE_DW, HIDDEN, COLS, FOLD)  # fmt: skip
    return total, total_right


@jit(lengths=("n_rows",))
def _backward_kernel(
    x,  # [n_rows, HIDDEN], row stride given, as are residual (HAS_RESIDUAL), dy and ds (HAS_DS)
    residual,
    weight,  # [HIDDEN], read where HAS_WEIGHT
    dy,
    ds,
    rstd_in,  # [n_rows] fp32
    dots,  # [n_rows] fp32 sums of g n; [blocks, n_rows] where they are only reduced; unused in one pass
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
    REDUCE: tl.constexpr,  # form the sums of g n
    APPLY: tl.constexpr,  # form dx; without REDUCE from dots
    MULTIPLIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,  # pieces of a tile of one row
    HALVES: tl.constexpr,  # a row goes in two tiles that are on the chip together
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        residual_stride = HIDDEN
        dy_stride = HIDDEN
        ds_stride = HIDDEN
    if HALVES:
        w = 0.0
        w_right = 0.0
        if HAS_WEIGHT and STORE_DX:
            w = tl.load(tile_of(weight, 0, 0, 1, COLS, FOLD))
            w_right = tl.load(tile_of(weight + COLS, 0, 0, 1, COLS, FOLD))
        total = tl.zeros([FOLD, COLS // FOLD], tl.float32)
        total_right = tl.zeros([FOLD, COLS // FOLD], tl.float32)
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            total, total_right = _backward_halves(
                x, residual, w, w_right, offset, dy, ds, rstd_in, dx, total, total_right, row, n_rows, x_stride,
                residual_stride, dy_stride, ds_stride, HAS_RESIDUAL, HAS_DS, HAS_WEIGHT, ROUND_WEIGHT, STORE_DX,
                STORE_DW, MULTIPLIER, HIDDEN, COLS, FOLD,
            )  # fmt: skip
        if STORE_DW:
            tl.store(tile_of(dw, tl.program_id(0), HIDDEN, 1, COLS, FOLD), total)
            tl.store(tile_of(dw + COLS, tl.program_id(0), HIDDEN, 1, COLS, FOLD), total_right)
    else:
        width = HIDDEN
        if not (REDUCE and APPLY):
            column = tl.program_id(1) * COLS
            width -= column
            x += column
            residual += column
            weight += column
            dy += column
            ds += column
            dx += column
            dw += column
            if REDUCE:
                dots += tl.program_id(1) * n_rows
        w = 0.0
        if HAS_WEIGHT and STORE_DX:
            w = row_of_weight(weight, offset, width, COLS, FOLD, HIDDEN % COLS != 0, ROUND_WEIGHT)
        total = tl.zeros([FOLD, COLS // FOLD], tl.float32)
        first = tl.program_id(0) * ROWS
        step = tl.num_programs(0) * ROWS
        n_whole = n_rows // ROWS * ROWS
        for row in range(first, n_whole, step):
            dy_n = _backward_tile(x, residual, w, dy, ds, rstd_in, dots, dx, row, n_rows, width, x_stride,
                                  residual_stride, dy_stride, ds_stride, HAS_RESIDUAL, HAS_DS, ROUND_SUM, HAS_WEIGHT,
                                  STORE_DX, REDUCE, APPLY, MULTIPLIER, HIDDEN, ROWS, COLS, FOLD, False)  # fmt: skip
            if STORE_DW:
                if ROWS > 1:
                    total += tl.sum(dy_n, axis=0)[None, :]
                else:
                    total += dy_n
        if ROWS > 1:
            for row in range(n_whole + step - ROWS - first, n_rows, step):
                dy_n = _backward_tile(x, residual, w, dy, ds, rstd_in, dots, dx, row, n_rows, width, x_stride,
                                      residual_stride, dy_stride, ds_stride, HAS_RESIDUAL, HAS_DS, ROUND_SUM,
                                      HAS_WEIGHT, STORE_DX, REDUCE, APPLY, MULTIPLIER, HIDDEN, ROWS, COLS, FOLD,
                                      True)  # fmt: skip
                if STORE_DW:
                    total += tl.sum(dy_n, axis=0)[None, :]
        if STORE_DW:
            exists = tile_mask(0, 1, width, 1, COLS)
            store(tile_of(dw, tl.program_id(0), HIDDEN, 1, COLS, FOLD), total, exists, HIDDEN % COLS != 0)


@jit(lengths=("n_rows",))
def _sum_kernel(
    partials,  # [n_rows, HIDDEN] fp32
    total,  # [HIDDEN], their sum in a fixed order
    n_rows,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for row in range(0, n_rows, ROWS):
        mask = (row + at < n_rows) & (cols[None, :] < HIDDEN)
        sums += tl.load(partials + (row + at) * HIDDEN + cols[None, :], mask=mask, other=0.0)
    store(total + cols, tl.sum(sums, axis=0), cols < HIDDEN, HIDDEN % COLS != 0)


# ---------------------------------------------------------------------------------------------------------------------
# The two steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(`t` with its rows of the last dimension at one distance, that distance in elements); without a copy where the
    strides allow it. A tensor without gaps comes back as it is: kernels do not see shapes."""
    if t.is_contiguous():
        return t, t.shape[-1]
    rows = t.reshape(-1, t.shape[-1])
    # The offsets inside a tile are 32-bit.
    if rows.stride(1) != 1 or not 0 < rows.stride(0) < 1 << 24:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def _launch_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, s_out: torch.Tensor | None,
    y: torch.Tensor, rstd: torch.Tensor, eps: float, offset: float, casting: str, multiplier: float,
    tile: tiling.RowTile, spec: device.DeviceSpec, reduce: bool = True, apply: bool = True,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    x, x_stride = as_rows(x)
    r, r_stride = (x, x_stride) if residual is None else as_rows(residual)
    if tile.halves and casting != "gemma" and weight is not None:
        weight, offset = shifted(weight, offset), 0.0  # the kernel keeps w' in the weight's dtype
    programs = tiling.programs(-(-n_rows // tile.rows), spec, tile.blocks)
    launch(
        _forward_kernel, (programs,) if tile.blocks == 1 else (programs, tile.blocks),
        (x, r, x if weight is None else weight, y if s_out is None else s_out, y, rstd, n_rows, x_stride, r_stride,
         eps, offset),
        {"HAS_RESIDUAL": residual is not None, "STORE_SUM": s_out is not None,
         "ROUND_SUM": r is x or promoted(x.dtype, r.dtype) == x.dtype, "HAS_WEIGHT": weight is not None,
         "CASTING": casting, "CONTIGUOUS": x_stride == hidden == r_stride, "REDUCE": reduce, "APPLY": apply,
         "MULTIPLIER": float(multiplier), "HIDDEN": hidden, "ROWS": tile.rows, "COLS": tile.cols, "FOLD": tile.pieces,
         "HALVES": tile.halves, **tile.options},
    )  # fmt: skip


@falls_back("rms_norm", "add_rms_norm")
def norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, offset: float,
    casting: str, multiplier: float, store_sum: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(y, S or None, rstd `[N]` fp32) of x (and residual) `[..., H]`."""
    if backend == "torch":
        s = _sum(x, residual, multiplier)
        y, rstd = _normed(s, weight, eps, offset, casting)
        return y, s if store_sum else None, rstd.reshape(-1)
    if backend == "vendor":
        y, s, rstd = vendor.norm_forward(x, residual, _gamma(weight, offset, casting), eps)
        return y, s if store_sum else None, rstd
    dtype = x.dtype if residual is None else promoted(x.dtype, residual.dtype)
    rounds, y_dtype = False, dtype
    if casting == "llama" and weight is not None:
        rounds, y_dtype = True, promoted(dtype, weight.dtype)
    y = contiguous_like(x, y_dtype)
    s_out = contiguous_like(x, dtype) if store_sum else None
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if not n_rows:
        return y, s_out, rstd
    w = None if weight is None else weight.contiguous()
    spec = device.spec(x.device)
    # No row that is read has a wider dtype than y.
    tile = tiling.norm_forward_tile(hidden, y_dtype.itemsize, rounds, store_sum, residual is not None, spec)
    if tile.blocks == 1:
        _launch_forward(x, residual, w, s_out, y, rstd, eps, offset, casting, multiplier, tile, spec)
        return y, s_out, rstd
    # Two launches, and one copy where one is needed.
    x, residual = as_rows(x)[0], None if residual is None else as_rows(residual)[0]
    squares = x.new_empty(tile.blocks, n_rows, dtype=torch.float32)
    _launch_forward(x, residual, w, s_out, y, squares, eps, offset, casting, multiplier, tile, spec, apply=False)
    rstd = torch.rsqrt(squares.sum(0) / hidden + eps)
    if s_out is not None:
        x, residual = s_out, None
    _launch_forward(x, residual, w, None, y, rstd, eps, offset, casting, multiplier, tile, spec, reduce=False)
    return y, s_out, rstd


def _launch_backward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    ds: torch.Tensor | None, dots: torch.Tensor, dx: torch.Tensor | None, needs_dw: bool, offset: float, casting: str,
    multiplier: float, tile: tiling.RowTile, spec: device.DeviceSpec, reduce: bool = True, apply: bool = True,
) -> torch.Tensor | None:  # fmt: skip
    """Returns dw in the weight's dtype, where it is needed."""
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    x, x_stride = as_rows(x)
    r, r_stride = (x, x_stride) if residual is None else as_rows(residual)
    dy, dy_stride = as_rows(dy)
    s, s_stride = (x, x_stride) if ds is None else as_rows(ds)
    w = weight
    if tile.halves and casting != "gemma" and weight is not None:
        w, offset = shifted(weight, offset), 0.0  # the kernel keeps w' in the weight's dtype
    programs = tiling.accumulating_programs(-(-n_rows // tile.rows), spec, tile.blocks, tile.options)
    dw = x.new_empty(programs, hidden, dtype=torch.float32) if needs_dw else None
    launch(
        _backward_kernel, (programs,) if tile.blocks == 1 else (programs, tile.blocks),
        (x, r, x if w is None else w, dy, s, rstd, dots, x if dx is None else dx, rstd if dw is None else dw, n_rows,
         x_stride, r_stride, dy_stride, s_stride, offset),
        {"HAS_RESIDUAL": residual is not None, "HAS_DS": ds is not None,
         "ROUND_SUM": r is x or promoted(x.dtype, r.dtype) == x.dtype, "HAS_WEIGHT": weight is not None,
         "ROUND_WEIGHT": casting != "gemma", "STORE_DX": dx is not None, "STORE_DW": needs_dw,
         "CONTIGUOUS": x_stride == hidden == r_stride and dy_stride == hidden == s_stride, "REDUCE": reduce,
         "APPLY": apply, "MULTIPLIER": float(multiplier), "HIDDEN": hidden, "ROWS": tile.rows, "COLS": tile.cols,
         "FOLD": tile.pieces, "HALVES": tile.halves, **tile.options},
    )  # fmt: skip
    return None if dw is None or weight is None else sum_of_partials(dw, weight.dtype, spec)


def sum_of_partials(partials: torch.Tensor, dtype: torch.dtype, spec: device.DeviceSpec) -> torch.Tensor:
    """The programs' partial sums, added up."""
    n_rows, hidden = partials.shape
    tile = tiling.partial_sums_tile(hidden, spec)
    total = partials.new_empty(hidden, dtype=dtype)
    launch(_sum_kernel, (tile.blocks,), (partials, total, n_rows),
           {"HIDDEN": hidden, "ROWS": tile.rows, "COLS": tile.cols, **tile.options})  # fmt: skip
    return total


@falls_back("rms_norm", "add_rms_norm")
def norm_backward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    ds: torch.Tensor | None, offset: float, casting: str, multiplier: float, needs_ds: bool, needs_dw: bool,
    backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(ds in S's dtype, dw in the weight's), each where it is needed. `ds`: what arrived for S."""
    if backend == "torch":
        s = _sum(x, residual, multiplier)
        return _backward_torch(s, weight, rstd, dy, ds, offset, casting, needs_ds, needs_dw)
    if backend == "vendor":
        # With a residual x is S: the vendor's forward writes it.
        d, dgamma = vendor.norm_backward(x, _gamma(weight, offset, casting), rstd, dy)
        if ds is not None:
            d.add_(ds)
        dw = dgamma.to(weight.dtype) if weight is not None and needs_dw else None
        return d if needs_ds else None, dw
    dtype = x.dtype if residual is None else promoted(x.dtype, residual.dtype)
    dx = contiguous_like(x, dtype) if needs_ds else None
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    if not n_rows:
        return dx, torch.zeros_like(weight) if weight is not None and needs_dw else None
    w = None if weight is None else weight.contiguous()
    spec = device.spec(x.device)
    # ds arrives in S's dtype.
    itemsize = max(dtype.itemsize, dy.dtype.itemsize)
    tile = tiling.norm_backward_tile(hidden, itemsize, residual is not None, ds is not None, spec)
    if tile.blocks == 1:
        dw = _launch_backward(x, residual, w, rstd, dy, ds, rstd, dx, needs_dw, offset, casting, multiplier, tile, spec)
        return dx, dw
    x, residual, dy = as_rows(x)[0], None if residual is None else as_rows(residual)[0], as_rows(dy)[0]
    dots = x.new_empty(tile.blocks, n_rows, dtype=torch.float32)
    dw = _launch_backward(x, residual, w, rstd, dy, None, dots, dx, needs_dw, offset, casting, multiplier, tile, spec,
                          apply=False)  # fmt: skip
    if dx is not None:
        _launch_backward(x, residual, w, rstd, dy, ds, dots.sum(0), dx, False, offset, casting, multiplier, tile, spec,
                         reduce=False)  # fmt: skip
    return dx, dw


def _sum(x: torch.Tensor, residual: torch.Tensor | None, multiplier: float) -> torch.Tensor:
    """S, as decoder layers form it."""
    if residual is None:
        return x
    return (x if multiplier == 1.0 else x * multiplier) + residual


def _backward_torch(
    s: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor, ds: torch.Tensor | None,
    offset: float, casting: str, needs_ds: bool, needs_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    rstd = rstd.view(*s.shape[:-1], 1)
    n = s.float() * rstd
    g = dy.float()
    dw: torch.Tensor | None = None
    if needs_dw and weight is not None:
        dw = (g * n).reshape(-1, s.shape[-1]).sum(0).to(weight.dtype)
    if not needs_ds:
        return None, dw
    if weight is not None:
        w = shifted(weight.float(), offset) if casting == "gemma" else shifted(weight, offset).float()
        g = g * w
    d = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(rstd)
    if ds is not None:
        d.add_(ds)
    return d.to(s.dtype), dw
