"""The kernels of `rms_norm` and `add_rms_norm`, one for forward and one for backward, and their torch implementation.

Maths
-----
Row i of `[N, H]`, with an optional residual. x, residual and S keep their dtypes; everything else is fp32:

    s      = m x + residual                     m: the multiplier, 1 by default; each operation rounded to S's dtype as
                                                PyTorch rounds it; s = x without a residual
    rstd   = (mean_j s_j^2 + eps)^(-1/2)        [N]; forward saves it and the inputs
    n      = s rstd
    y      = cast(n) w'        "llama"          w' = offset + w, cast: to S's dtype
             cast(n w')        "gemma"
             (s cast(rstd)) cast(w')  "none"    each product rounded to S's dtype

    g      = dy w'
    ds     = rstd (g - n mean_j g_j n_j) + dS   dS: the incoming gradient of S, if forward returned S
    dw     = sum_i dy n

Each program sums the weight gradient over its rows in fp32 and writes one row of `[programs, H]`. A second kernel adds
these rows in a fixed order. There are no atomics, so the result has the same bits every time.

Tiles
-----
A tile `[ROWS, COLS]` contains whole rows, so the kernel reads each element once. Per-row values stay `[ROWS, 1]`
tensors, because on an NPU a scalar would cross from the vector unit to the scalar unit and back. For the same reason a
tile of one row is folded there into `FOLD` pieces (`row_sums`).

A row that does not fit an NPU's buffer this way is processed as two halves (HALVES): the kernel keeps the inputs on the
chip in their dtypes until it has the sum over the row, and converts them to fp32 a second time. Wider rows are
processed in column blocks, which costs a second read: each kernel runs twice, controlled by the flags REDUCE and APPLY.
The first run writes one partial sum per row and block (and S, and dw); the second run is elementwise.
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
           "normed_tile", "shifted", "sum_of_partials"]  # fmt: skip

CASTINGS = ("llama", "gemma", "none")


def check_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str) -> None:
    """Checks the arguments that all norms have."""
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
    """Checks the arguments that are not tensors."""
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
    """Computes the norm in plain PyTorch, operation for operation as transformers' modules do."""
    return _normed(s, weight, eps, offset, casting)[0]


def _normed(
    s: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, rstd `[..., 1]`)."""
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
    """Returns w' in the weight's dtype."""
    return offset + weight if offset else weight


def _gamma(weight: torch.Tensor | None, offset: float, casting: str) -> torch.Tensor:
    """Returns w' as the weight argument of the vendor's norms: in fp32 if the casting adds the offset in fp32."""
    assert weight is not None  # `vendor.uncovered_norm` excludes norms without a weight
    return shifted(weight.float() if offset and casting == "gemma" else weight, offset)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _summed(x, residual, row, x_stride, residual_stride, mask, HAS_RESIDUAL: tl.constexpr, ROUND_SUM: tl.constexpr,
            MULTIPLIER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FOLD: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Returns S of a tile in fp32."""
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
    """Returns S of half a row in x's dtype."""
    if HAS_RESIDUAL:
        s = _summed(x, residual, row, x_stride, residual_stride, True, True, True, MULTIPLIER, 1, COLS, FOLD, False)
        return s.to(x.dtype.element_ty)
    else:
        return tl.load(tile_of(x, row, x_stride, 1, COLS, FOLD))


@jit
def _from_kept(w, offset, ROUND: tl.constexpr):
    """Returns w' in fp32."""
    w = w.to(tl.float32)
    if not ROUND:
        w += offset
    return w


@jit
def normed_tile(s, rstd, w, x, ROUND_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, CASTING: tl.constexpr):
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
        n = normed_tile(s, rstd, w, x, ROUND_SUM, HAS_WEIGHT, CASTING)
        store(tile_of(y, row, HIDDEN, ROWS, COLS, FOLD), n, mask, MASKED)


@jit
def _forward_halves(x, residual, w, w_right, offset, s_out, y, rstd_out, row, n_rows, x_stride, residual_stride, eps,
                    HAS_RESIDUAL: tl.constexpr, STORE_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                    CASTING: tl.constexpr, MULTIPLIER: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr,
                    FOLD: tl.constexpr):  # fmt: skip
    """Processes a row as two halves. S of both halves stays on the chip in x's dtype until the kernel has rstd."""
    left = _kept_sum(x, residual, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    right = _kept_sum(x + COLS, residual + COLS, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    if STORE_SUM:
        tl.store(tile_of(s_out, row, HIDDEN, 1, COLS, FOLD), left)
        tl.store(tile_of(s_out + COLS, row, HIDDEN, 1, COLS, FOLD), right)
    squares = tl.zeros([FOLD], tl.float32)
    # The condition is always true. Since the compiler cannot know that, it does not hold the fp32 copies for later use.
    if row < n_rows:
        s = left.to(tl.float32)
        squares = row_sums(s * s, FOLD)
        s = right.to(tl.float32)
        squares += row_sums(s * s, FOLD)
    rstd = tl.rsqrt(squares * (1.0 / HIDDEN) + eps)
    store_per_row(rstd_out, rstd, row, n_rows, 1, FOLD, False)
    if HAS_WEIGHT:
        w = _from_kept(w, offset, CASTING != "gemma")
    n = normed_tile(left.to(tl.float32), rstd, w, x, True, HAS_WEIGHT, CASTING)
    tl.store(tile_of(y, row, HIDDEN, 1, COLS, FOLD), n.to(y.dtype.element_ty))
    if HAS_WEIGHT:
        w_right = _from_kept(w_right, offset, CASTING != "gemma")
    n = normed_tile(right.to(tl.float32), rstd, w_right, x, True, HAS_WEIGHT, CASTING)
    tl.store(tile_of(y + COLS, row, HIDDEN, 1, COLS, FOLD), n.to(y.dtype.element_ty))


@jit(lengths=("n_rows",))
def _forward_kernel(
    x,  # [n_rows, HIDDEN] with row stride x_stride
    residual,  # [n_rows, HIDDEN] with row stride residual_stride, read if HAS_RESIDUAL
    weight,  # [HIDDEN], read if HAS_WEIGHT
    s_out,  # [n_rows, HIDDEN] contiguous, written if STORE_SUM
    y,  # [n_rows, HIDDEN] contiguous
    rstd_out,  # [n_rows] fp32; without APPLY the sums of squares, [blocks, n_rows]
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
    CONTIGUOUS: tl.constexpr,  # there are no gaps between rows, so a tile is one transfer
    REDUCE: tl.constexpr,  # compute the sums of squares
    APPLY: tl.constexpr,  # compute y; without REDUCE, read rstd from rstd_out
    MULTIPLIER: tl.constexpr,  # factor of x if HAS_RESIDUAL
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,  # number of pieces into which a tile of one row is folded
    HALVES: tl.constexpr,  # process a row as two tiles that are on the chip at the same time
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
            # The second axis of the grid counts column blocks.
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
            # The last program, which has the fewest tiles, also processes the rows that do not fill a tile.
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
    """Writes ds of the tile and returns dy n, whose sum over rows is dw."""
    MASKED: tl.constexpr = TAIL or HIDDEN % COLS != 0
    mask = tile_mask(row, n_rows, width, ROWS, COLS)
    rstd = load_per_row(rstd_in, row, n_rows, ROWS, FOLD, TAIL)[:, None]
    s = _summed(x, residual, row, x_stride, residual_stride, mask, HAS_RESIDUAL, ROUND_SUM, MULTIPLIER, ROWS, COLS,
                FOLD, MASKED)  # fmt: skip
    g = load_fp32(tile_of(dy, row, dy_stride, ROWS, COLS, FOLD), mask, MASKED)
    # On an NPU the kernel computes dy rstd once: dy n = (dy rstd) s, and ds = (dy rstd) w' - s (rstd^2 mean g n). With
    # this expression CUDA's compiler would sum the rows of a tile one after the other; with n it sums them together.
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
    """Writes ds of half a row from s and g on the chip and from factor = rstd^2 mean g n. Returns total + dy n."""
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
    """Processes a row as two halves. S and dy stay on the chip in their dtypes until the kernel has the sum of g n.
    Returns the totals with dy n added."""
    rstd = load_per_row(rstd_in, row, n_rows, 1, FOLD, False)[:, None]
    dot = tl.zeros([FOLD], tl.float32)
    left = _kept_sum(x, residual, row, x_stride, residual_stride, HAS_RESIDUAL, MULTIPLIER, COLS, FOLD)
    g_left = tl.load(tile_of(dy, row, dy_stride, 1, COLS, FOLD))
    # The condition is always true. Since the compiler cannot know that, it does not hold the fp32 copies for later use.
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
    x,  # [n_rows, HIDDEN] with row stride x_stride; likewise residual (if HAS_RESIDUAL), dy and ds (if HAS_DS)
    residual,
    weight,  # [HIDDEN], read if HAS_WEIGHT
    dy,
    ds,
    rstd_in,  # [n_rows] fp32
    dots,  # [n_rows] fp32, the sums of g n; [blocks, n_rows] without APPLY; unused with REDUCE and APPLY
    dx,  # [n_rows, HIDDEN] contiguous, written if STORE_DX
    dw,  # [programs, HIDDEN] fp32, written if STORE_DW
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
    ROUND_WEIGHT: tl.constexpr,  # add the offset in the weight's dtype
    STORE_DX: tl.constexpr,
    STORE_DW: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    REDUCE: tl.constexpr,  # compute the sums of g n
    APPLY: tl.constexpr,  # compute dx; without REDUCE, read the sums from dots
    MULTIPLIER: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,  # as in forward
    HALVES: tl.constexpr,
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
# Forward and backward, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns `t` as rows with one stride, and that stride in elements; copies only if the strides require it. Returns
    a contiguous tensor unchanged, because kernels do not read its shape."""
    if t.is_contiguous():
        return t, t.shape[-1]
    rows = t.reshape(-1, t.shape[-1])
    # Offsets inside a tile are 32-bit integers, which limits the row stride.
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
        weight, offset = shifted(weight, offset), 0.0  # the kernel holds w' in the weight's dtype
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
    """Returns (y, S or None, rstd `[N]` fp32) of x and residual `[..., H]`."""
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
    # No input has a wider dtype than y.
    tile = tiling.norm_forward_tile(hidden, y_dtype.itemsize, rounds, store_sum, residual is not None, spec)
    if tile.blocks == 1:
        _launch_forward(x, residual, w, s_out, y, rstd, eps, offset, casting, multiplier, tile, spec)
        return y, s_out, rstd
    # Copy here, if a copy is necessary, so that the two launches share it.
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
    """Returns dw in the weight's dtype if `needs_dw`, else None."""
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    x, x_stride = as_rows(x)
    r, r_stride = (x, x_stride) if residual is None else as_rows(residual)
    dy, dy_stride = as_rows(dy)
    s, s_stride = (x, x_stride) if ds is None else as_rows(ds)
    w = weight
    if tile.halves and casting != "gemma" and weight is not None:
        w, offset = shifted(weight, offset), 0.0  # the kernel holds w' in the weight's dtype
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
    """Adds the programs' partial sums."""
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
    """Returns the gradient of S and dw, in the dtypes of S and weight, or None. `ds` is the incoming gradient of S."""
    if backend == "torch":
        s = _sum(x, residual, multiplier)
        return _backward_torch(s, weight, rstd, dy, ds, offset, casting, needs_ds, needs_dw)
    if backend == "vendor":
        # With a residual, x is S, which the vendor's forward writes.
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
    # The incoming ds has S's dtype.
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
    """Computes S as decoder layers do."""
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
