"""The kernels of `layer_norm` and `gated_rms_norm`, one for forward and one for backward, and their torch
implementation. They subtract a mean, apply a gate and work in groups.

Maths
-----
Row i of `[N, H]`. Its H columns are G groups of D = H / G. Each group has its own statistics and its own part of weight
and bias. Everything is fp32, and a is the gate's activation:

    s      = x a(gate)                           gate "before"; else s = x
    mean   = mean_j s_j                          if centred; else 0
    rstd   = (mean_j (s_j - mean)^2 + eps)^(-1/2)
    n      = (s - mean) rstd
    u      = cast(n) w' + b     "llama"          w' = offset + w, cast: to x's dtype
             n w' + b           "gemma"
    y      = cast(u) a(gate)                     gate "after", this cast only with "llama"; else y = u

    g      = dy a(gate), gate "after"; else dy
    dw     = sum_i g n                           db = sum_i g
    h      = g w'
    ds     = rstd (h - n mean_j h_j n_j - mean_j h_j)      the last mean only if centred
    dx     = ds a(gate)         dgate = ds x a'(gate)      gate "before"
             ds                         dy u a'(gate)      gate "after"

    silu       a = z s     a' = s (1 + z (1 - s))     s = 1 / (1 + exp(-z))
    sigmoid    a = s       a' = s (1 - s)

Forward saves the inputs, rstd and, if centred, mean; both are `[G, N]` fp32. Weight and bias gradients are summed as in
`rms_kernels.py`: each program sums its rows, and a second kernel adds these sums in a fixed order.

Tiles
-----
Tiles are those of `rms_kernels.py`. The second axis of the grid counts groups and, for rows that are too wide for the
chip, column blocks. With column blocks each kernel runs twice: with REDUCE it writes sums per row and block (if
centred, sums of the distances from the block's mean, which add up without cancellation); with APPLY it is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..blocks import load_fp32, load_per_row, rounded, row_of_weight, row_sums, store, store_per_row, tile_mask, tile_of
from ..fallback import falls_back
from ..host import contiguous_like, promoted
from ..launch import launch
from .rms_kernels import as_rows, shifted, sum_of_partials

__all__ = ["ACTIVATIONS", "GeneralNormForm", "general_backward", "general_forward", "general_reference"]

ACTIVATIONS = ("silu", "sigmoid")


@dataclass(frozen=True)
class GeneralNormForm:
    """The checked options of a call.

    Attributes:
        eps, offset: the numbers of the module's docstring.
        centred: whether the norm subtracts the mean.
        casting: `"llama"` or `"gemma"`.
        gate: whether the gate applies `"before"` or `"after"` the norm; `"none"` for no gate.
        activation: the activation of the gate, one of `ACTIVATIONS`.
        groups: the number of groups of the last dimension.
    """

    eps: float
    offset: float = 0.0
    centred: bool = False
    casting: str = "gemma"
    gate: str = "none"
    activation: str = "silu"
    groups: int = 1

    @property
    def rounds_weight(self) -> bool:
        """Whether the norm adds the offset in the weight's dtype."""
        return self.centred or self.casting == "llama"

    def result_dtype(self, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of y."""
        return x if weight is None or self.gate == "after" or self.casting != "llama" else promoted(x, weight)

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        """Computes a, operation for operation as models do."""
        return torch.nn.functional.silu(gate) if self.activation == "silu" else torch.sigmoid(gate)

    def slope(self, gate: torch.Tensor) -> torch.Tensor:
        """Computes a'."""
        s = torch.sigmoid(gate)
        return s * (1 + gate * (1 - s)) if self.activation == "silu" else s * (1 - s)


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


def general_reference(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: GeneralNormForm,
) -> torch.Tensor:
    """Computes the norm in plain PyTorch, operation for operation as transformers' modules do."""
    return _normed(x, gate, weight, bias, form)[0]


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _normed(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: GeneralNormForm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (y, mean, rstd); mean and rstd are `[..., G, 1]`."""
    s = _wide(x)
    if gate is not None and form.gate == "before":
        s = s * form.activate(_wide(gate))
    s = s.unflatten(-1, (form.groups, -1))
    mean = s.mean(-1, keepdim=True) if form.centred else s.new_zeros(())
    if form.centred:
        s = s - mean
    rstd = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + form.eps)
    u = (s * rstd).flatten(-2)
    if form.casting == "llama":
        u = u.to(x.dtype)
    if weight is not None:
        u = _weight(weight, form, u.dtype) * u
    if bias is not None:
        u = u + _wide(bias)
    if gate is not None and form.gate == "after":
        u = u * form.activate(_wide(gate))
    return u.to(form.result_dtype(x.dtype, None if weight is None else weight.dtype)), mean, rstd


def _weight(weight: torch.Tensor, form: GeneralNormForm, dtype: torch.dtype) -> torch.Tensor:
    """Returns w', which is fp32 with casting "gemma"."""
    if form.casting == "llama":
        return shifted(weight, form.offset)
    if form.rounds_weight:
        return shifted(weight, form.offset).to(dtype)
    return shifted(weight.to(dtype), form.offset)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _activated(z, ACTIVATION: tl.constexpr):
    """Returns (a, a') of the gate."""
    s = tl.sigmoid(z)
    if ACTIVATION == "silu":
        return z * s, s * (1.0 + z * (1.0 - s))
    else:
        return s, s * (1.0 - s)


@jit
def _distances(s, mean, width, SIZE: tl.constexpr, COLS: tl.constexpr):
    """Returns s - mean, with zeros in the columns past the last one."""
    d = s - mean[:, None]
    if SIZE % COLS != 0:
        d = tl.where(tl.arange(0, COLS)[None, :] < width, d, 0.0)
    return d


@jit
def _statistics(s, x, width, eps, CENTRED: tl.constexpr, APPLY: tl.constexpr, SIZE: tl.constexpr, COLS: tl.constexpr,
                FOLD: tl.constexpr):  # fmt: skip
    """Returns (mean, rstd) of a tile's rows; without APPLY, the mean and the sum of squares of a column block."""
    mean = row_sums(s, FOLD)
    d = s
    if CENTRED:
        # A division, not a product with a reciprocal, so that the mean of equal numbers is exactly that number.
        count = SIZE if APPLY else tl.minimum(width, COLS).to(tl.float32)
        mean = mean / count
        d = _distances(s, mean, width, SIZE, COLS)
        if x.dtype.element_ty == tl.float32:
            # The rounding error of a large mean can reach digits of s - mean that an fp32 x resolves. Add it back.
            mean += row_sums(d, FOLD) / count
            d = _distances(s, mean, width, SIZE, COLS)
    squares = row_sums(d * d, FOLD)
    if APPLY:
        squares = tl.rsqrt(squares * (1.0 / SIZE) + eps)
    return mean, squares


@jit
def _forward_tile(x, gate, w, b, y, mean_at, rstd_at, row, n_rows, width, x_stride, gate_stride, eps,
                  CENTRED: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                  HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, ROUND_PRODUCT: tl.constexpr, REDUCE: tl.constexpr,
                  APPLY: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    MASKED: tl.constexpr = TAIL or SIZE % COLS != 0
    mask = tile_mask(row, n_rows, width, ROWS, COLS)
    s = load_fp32(tile_of(x, row, x_stride, ROWS, COLS, FOLD), mask, MASKED)
    if GATE != "none":
        a, _ = _activated(load_fp32(tile_of(gate, row, gate_stride, ROWS, COLS, FOLD), mask, MASKED), ACTIVATION)
    if GATE == "before":
        s = s * a
    if REDUCE:
        mean, rstd = _statistics(s, x, width, eps, CENTRED, APPLY, SIZE, COLS, FOLD)
        if CENTRED:
            store_per_row(mean_at, mean, row, n_rows, ROWS, FOLD, TAIL)
        store_per_row(rstd_at, rstd, row, n_rows, ROWS, FOLD, TAIL)
    else:
        mean = load_per_row(mean_at, row, n_rows, ROWS, FOLD, TAIL)
        rstd = load_per_row(rstd_at, row, n_rows, ROWS, FOLD, TAIL)
    if APPLY:
        if CENTRED:
            s = s - mean[:, None]
        u = rounded(s * rstd[:, None], x, ROUND)
        if HAS_WEIGHT:
            u = u * w
        if HAS_BIAS:
            u = u + b
        if GATE == "after":
            u = rounded(u, x, ROUND_PRODUCT) * a
        store(tile_of(y, row, HIDDEN, ROWS, COLS, FOLD), u, mask, MASKED)


@jit(lengths=("n_rows",))
def _forward_kernel(
    x,  # [n_rows, HIDDEN] with row stride x_stride
    gate,  # [n_rows, HIDDEN] with row stride gate_stride, read unless GATE is "none"
    weight,  # [HIDDEN], read if HAS_WEIGHT
    bias,  # [HIDDEN], read if HAS_BIAS
    y,  # [n_rows, HIDDEN] contiguous
    mean,  # [groups, n_rows] fp32, used if CENTRED; [groups blocks, n_rows] without APPLY
    rstd,  # likewise, always used
    n_rows,
    x_stride,
    gate_stride,
    eps,
    offset,
    CENTRED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND: tl.constexpr,  # round n to x's dtype (casting "llama")
    ROUND_PRODUCT: tl.constexpr,  # round n w' + b to x's dtype
    ROUND_WEIGHT: tl.constexpr,  # add the offset in the weight's dtype
    CONTIGUOUS: tl.constexpr,
    REDUCE: tl.constexpr,  # compute the statistics
    APPLY: tl.constexpr,  # compute y; without REDUCE, read the statistics from mean and rstd
    SIZE: tl.constexpr,  # columns of a group
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,  # number of pieces into which a tile of one row is folded
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        gate_stride = HIDDEN
    width = SIZE
    if HIDDEN > COLS:
        # The second axis of the grid counts groups and the column blocks in them.
        BLOCKS: tl.constexpr = (SIZE + COLS - 1) // COLS
        group = tl.program_id(1) // BLOCKS
        block = tl.program_id(1) - group * BLOCKS
        column = group * SIZE + block * COLS
        width -= block * COLS
        x += column
        gate += column
        weight += column
        bias += column
        y += column
        at = group * n_rows
        if not APPLY:
            at = tl.program_id(1) * n_rows
        mean += at
        rstd += at
    w = 0.0
    b = 0.0
    if HAS_WEIGHT and APPLY:
        w = row_of_weight(weight, offset, width, COLS, FOLD, SIZE % COLS != 0, ROUND_WEIGHT)
    if HAS_BIAS and APPLY:
        b = row_of_weight(bias, 0.0, width, COLS, FOLD, SIZE % COLS != 0, False)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    n_whole = n_rows // ROWS * ROWS
    for row in range(first, n_whole, step):
        _forward_tile(x, gate, w, b, y, mean, rstd, row, n_rows, width, x_stride, gate_stride, eps, CENTRED, GATE,
                      ACTIVATION, HAS_WEIGHT, HAS_BIAS, ROUND, ROUND_PRODUCT, REDUCE, APPLY, SIZE, HIDDEN, ROWS, COLS,
                      FOLD, False)  # fmt: skip
    if ROWS > 1:
        # The last program, which has the fewest tiles, also processes the rows that do not fill a tile.
        for row in range(n_whole + step - ROWS - first, n_rows, step):
            _forward_tile(x, gate, w, b, y, mean, rstd, row, n_rows, width, x_stride, gate_stride, eps, CENTRED, GATE,
                          ACTIVATION, HAS_WEIGHT, HAS_BIAS, ROUND, ROUND_PRODUCT, REDUCE, APPLY, SIZE, HIDDEN, ROWS,
                          COLS, FOLD, True)  # fmt: skip


@jit
def _backward_tile(x, gate, w, b, dy, mean_at, rstd_at, dots, sums, dx, dgate, row, n_rows, width, x_stride,
                   gate_stride, dy_stride, CENTRED: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr,
                   HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_DX: tl.constexpr, REDUCE: tl.constexpr,
                   APPLY: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
                   COLS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Writes dx and dgate of the tile and returns (g n, g), whose sums over rows are dw and db."""
    MASKED: tl.constexpr = TAIL or SIZE % COLS != 0
    mask = tile_mask(row, n_rows, width, ROWS, COLS)
    raw = load_fp32(tile_of(x, row, x_stride, ROWS, COLS, FOLD), mask, MASKED)
    if GATE != "none":
        a, slope = _activated(load_fp32(tile_of(gate, row, gate_stride, ROWS, COLS, FOLD), mask, MASKED), ACTIVATION)
    s = raw
    if GATE == "before":
        s = raw * a
    if CENTRED:
        s = s - load_per_row(mean_at, row, n_rows, ROWS, FOLD, TAIL)[:, None]
    rstd = load_per_row(rstd_at, row, n_rows, ROWS, FOLD, TAIL)[:, None]
    n = s * rstd
    g = load_fp32(tile_of(dy, row, dy_stride, ROWS, COLS, FOLD), mask, MASKED)
    if GATE == "after":
        if STORE_DX and APPLY:
            u = n
            if HAS_WEIGHT:
                u = u * w
            if HAS_BIAS:
                u = u + b
            store(tile_of(dgate, row, HIDDEN, ROWS, COLS, FOLD), g * u * slope, mask, MASKED)
        g = g * a
    g_n = g * n
    if STORE_DX:
        h = g
        h_n = g_n
        if HAS_WEIGHT:
            h = g * w
            h_n = g_n * w
        if REDUCE:
            dot = row_sums(h_n, FOLD)
            total = dot
            if CENTRED:
                total = row_sums(h, FOLD)
            if not APPLY:
                store_per_row(dots, dot, row, n_rows, ROWS, FOLD, TAIL)
                if CENTRED:
                    store_per_row(sums, total, row, n_rows, ROWS, FOLD, TAIL)
        else:
            dot = load_per_row(dots, row, n_rows, ROWS, FOLD, TAIL)
            total = dot
            if CENTRED:
                total = load_per_row(sums, row, n_rows, ROWS, FOLD, TAIL)
        if APPLY:
            d = h - n * (dot[:, None] * (1.0 / SIZE))
            if CENTRED:
                d = d - total[:, None] * (1.0 / SIZE)
            d = d * rstd
            if GATE == "before":
                store(tile_of(dgate, row, HIDDEN, ROWS, COLS, FOLD), d * raw * slope, mask, MASKED)
                d = d * a
            store(tile_of(dx, row, HIDDEN, ROWS, COLS, FOLD), d, mask, MASKED)
    return g_n, g


@jit(lengths=("n_rows",))
def _backward_kernel(
    x,  # [n_rows, HIDDEN] with row stride x_stride; likewise gate and dy
    gate,
    weight,
    bias,
    dy,
    mean,  # [groups, n_rows] fp32
    rstd,  # likewise
    dots,  # [groups, n_rows] fp32, the sums of h n; [groups blocks, n_rows] without APPLY; unused with REDUCE and APPLY
    sums,  # likewise the sums of h, used if CENTRED
    dx,  # [n_rows, HIDDEN] contiguous, written if STORE_DX
    dgate,  # likewise
    dw,  # [programs, HIDDEN] fp32, written if STORE_DW
    db,  # likewise, written if STORE_DB
    n_rows,
    x_stride,
    gate_stride,
    dy_stride,
    offset,
    CENTRED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND_WEIGHT: tl.constexpr,
    STORE_DX: tl.constexpr,
    STORE_DW: tl.constexpr,
    STORE_DB: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    REDUCE: tl.constexpr,  # compute the sums of h n and h
    APPLY: tl.constexpr,  # compute dx and dgate; without REDUCE, read the sums from dots and sums
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,
):
    if CONTIGUOUS:
        x_stride = HIDDEN
        gate_stride = HIDDEN
        dy_stride = HIDDEN
    width = SIZE
    if HIDDEN > COLS:
        BLOCKS: tl.constexpr = (SIZE + COLS - 1) // COLS
        group = tl.program_id(1) // BLOCKS
        block = tl.program_id(1) - group * BLOCKS
        column = group * SIZE + block * COLS
        width -= block * COLS
        x += column
        gate += column
        weight += column
        bias += column
        dy += column
        dx += column
        dgate += column
        dw += column
        db += column
        mean += group * n_rows
        rstd += group * n_rows
        at = group * n_rows
        if not APPLY:
            at = tl.program_id(1) * n_rows
        dots += at
        sums += at
    w = 0.0
    b = 0.0
    if HAS_WEIGHT and STORE_DX:
        w = row_of_weight(weight, offset, width, COLS, FOLD, SIZE % COLS != 0, ROUND_WEIGHT)
    if HAS_BIAS and (GATE == "after" and STORE_DX):
        b = row_of_weight(bias, 0.0, width, COLS, FOLD, SIZE % COLS != 0, False)
    sum_w = tl.zeros([FOLD, COLS // FOLD], tl.float32)
    sum_b = tl.zeros([FOLD, COLS // FOLD], tl.float32)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    n_whole = n_rows // ROWS * ROWS
    for row in range(first, n_whole, step):
        g_n, g = _backward_tile(x, gate, w, b, dy, mean, rstd, dots, sums, dx, dgate, row, n_rows, width, x_stride,
                                gate_stride, dy_stride, CENTRED, GATE, ACTIVATION, HAS_WEIGHT, HAS_BIAS, STORE_DX,
                                REDUCE, APPLY, SIZE, HIDDEN, ROWS, COLS, FOLD, False)  # fmt: skip
        if STORE_DW:
            sum_w += tl.sum(g_n, axis=0)[None, :] if ROWS > 1 else g_n
        if STORE_DB:
            sum_b += tl.sum(g, axis=0)[None, :] if ROWS > 1 else g
    if ROWS > 1:
        for row in range(n_whole + step - ROWS - first, n_rows, step):
            g_n, g = _backward_tile(x, gate, w, b, dy, mean, rstd, dots, sums, dx, dgate, row, n_rows, width, x_stride,
                                    gate_stride, dy_stride, CENTRED, GATE, ACTIVATION, HAS_WEIGHT, HAS_BIAS, STORE_DX,
                                    REDUCE, APPLY, SIZE, HIDDEN, ROWS, COLS, FOLD, True)  # fmt: skip
            if STORE_DW:
                sum_w += tl.sum(g_n, axis=0)[None, :]
            if STORE_DB:
                sum_b += tl.sum(g, axis=0)[None, :]
    exists = tile_mask(0, 1, width, 1, COLS)
    if STORE_DW:
        store(tile_of(dw, tl.program_id(0), HIDDEN, 1, COLS, FOLD), sum_w, exists, SIZE % COLS != 0)
    if STORE_DB:
        store(tile_of(db, tl.program_id(0), HIDDEN, 1, COLS, FOLD), sum_b, exists, SIZE % COLS != 0)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def _grid(programs: int, columns: int) -> tuple[int, ...]:
    return (programs,) if columns == 1 else (programs, columns)


def _launch_forward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, form: GeneralNormForm, tile: tiling.RowTile,
    spec: device.DeviceSpec, reduce: bool = True, apply: bool = True,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    x, x_stride = as_rows(x)
    z, z_stride = (x, x_stride) if gate is None else as_rows(gate)
    columns = form.groups * tile.blocks
    launch(
        _forward_kernel, _grid(tiling.programs(-(-n_rows // tile.rows), spec, columns), columns),
        (x, z, x if weight is None else weight, x if bias is None else bias, y, mean, rstd, n_rows, x_stride, z_stride,
         form.eps, form.offset),
        {"CENTRED": form.centred, "GATE": form.gate, "ACTIVATION": form.activation, "HAS_WEIGHT": weight is not None,
         "HAS_BIAS": bias is not None, "ROUND": form.casting == "llama",
         "ROUND_PRODUCT": form.casting == "llama" and (weight is None or promoted(x.dtype, weight.dtype) == x.dtype),
         "ROUND_WEIGHT": form.rounds_weight, "CONTIGUOUS": x_stride == hidden == z_stride, "REDUCE": reduce,
         "APPLY": apply, "SIZE": hidden // form.groups, "HIDDEN": hidden, "ROWS": tile.rows, "COLS": tile.cols,
         "FOLD": tile.pieces, **tile.options},
    )  # fmt: skip


@falls_back("layer_norm", "gated_rms_norm")
def general_forward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    form: GeneralNormForm,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Returns y `[..., H]`, mean and rstd, which are `[groups, N]` fp32; mean is None unless the form is centred."""
    if backend == "torch":
        y, found, rstd = _normed(x, gate, weight, bias, form)
        return y, _by_group(found, form) if form.centred else None, _by_group(rstd, form)
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    y = contiguous_like(x, form.result_dtype(x.dtype, None if weight is None else weight.dtype))
    rstd = x.new_empty(form.groups, n_rows, dtype=torch.float32)
    mean: torch.Tensor | None = torch.empty_like(rstd) if form.centred else None
    if not n_rows:
        return y, mean, rstd
    w, b = None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()
    spec = device.spec(x.device)
    size = hidden // form.groups
    itemsize = max(y.dtype.itemsize, 0 if gate is None else gate.dtype.itemsize)
    tile = tiling.general_norm_forward_tile(size, itemsize, gate is not None, bias is not None, spec)
    if tile.blocks == 1:
        _launch_forward(x, gate, w, b, y, rstd if mean is None else mean, rstd, form, tile, spec)
        return y, mean, rstd
    # Copy here, if a copy is necessary, so that the two launches share it.
    x, gate = as_rows(x)[0], None if gate is None else as_rows(gate)[0]
    squares = x.new_empty(form.groups * tile.blocks, n_rows, dtype=torch.float32)
    means = torch.empty_like(squares) if form.centred else squares
    _launch_forward(x, gate, w, b, y, means, squares, form, tile, spec, apply=False)
    squares = squares.view(form.groups, tile.blocks, n_rows)
    total = squares.sum(1)
    if mean is not None:
        # For a block of n columns with mean m: sum (s - mean)^2 = sum (s - m)^2 + n (m - mean)^2. Average the distances
        # from the first block's mean, because they stay small when the means are large.
        means = means.view(form.groups, tile.blocks, n_rows)
        mean = means[:, 0] + _over_blocks(means - means[:, :1], size, tile) / size
        total += _over_blocks((means - mean.unsqueeze(1)).square_(), size, tile)
    rstd = torch.rsqrt(total / size + form.eps)
    _launch_forward(x, gate, w, b, y, rstd if mean is None else mean, rstd, form, tile, spec, reduce=False)
    return y, mean, rstd


def _over_blocks(values: torch.Tensor, size: int, tile: tiling.RowTile) -> torch.Tensor:
    """Sums `[G, blocks, N]` values over a group's columns. All columns of a block have the same value."""
    last = size - (tile.blocks - 1) * tile.cols
    return (values[:, :-1].sum(1) * tile.cols).add_(values[:, -1], alpha=last)


def _by_group(statistic: torch.Tensor, form: GeneralNormForm) -> torch.Tensor:
    """Returns a statistic `[..., G, 1]` as `[G, N]`."""
    return statistic.reshape(-1, form.groups).t().contiguous()


def _launch_backward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    dy: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, dots: torch.Tensor, sums: torch.Tensor,
    dx: torch.Tensor | None, dgate: torch.Tensor | None, needs_dw: bool, needs_db: bool, form: GeneralNormForm,
    tile: tiling.RowTile, spec: device.DeviceSpec, reduce: bool = True, apply: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Returns (dw, db) in the dtypes of their parameters; a gradient that is not needed is None."""
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    x, x_stride = as_rows(x)
    z, z_stride = (x, x_stride) if gate is None else as_rows(gate)
    dy, dy_stride = as_rows(dy)
    columns = form.groups * tile.blocks
    programs = tiling.accumulating_programs(-(-n_rows // tile.rows), spec, columns, tile.options)
    dw = x.new_empty(programs, hidden, dtype=torch.float32) if needs_dw else None
    db = x.new_empty(programs, hidden, dtype=torch.float32) if needs_db else None
    launch(
        _backward_kernel, _grid(programs, columns),
        (x, z, x if weight is None else weight, x if bias is None else bias, dy, mean, rstd, dots, sums,
         x if dx is None else dx, x if dgate is None else dgate, rstd if dw is None else dw,
         rstd if db is None else db, n_rows, x_stride, z_stride, dy_stride, form.offset),
        {"CENTRED": form.centred, "GATE": form.gate, "ACTIVATION": form.activation, "HAS_WEIGHT": weight is not None,
         "HAS_BIAS": bias is not None, "ROUND_WEIGHT": form.rounds_weight, "STORE_DX": dx is not None,
         "STORE_DW": needs_dw, "STORE_DB": needs_db,
         "CONTIGUOUS": x_stride == hidden == z_stride and dy_stride == hidden, "REDUCE": reduce, "APPLY": apply,
         "SIZE": hidden // form.groups, "HIDDEN": hidden, "ROWS": tile.rows, "COLS": tile.cols, "FOLD": tile.pieces,
         **tile.options},
    )  # fmt: skip
    return (
        None if dw is None or weight is None else sum_of_partials(dw, weight.dtype, spec),
        None if db is None or bias is None else sum_of_partials(db, bias.dtype, spec),
    )


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@falls_back("layer_norm", "gated_rms_norm")
def general_backward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    mean: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    form: GeneralNormForm, needs_dx: bool, needs_dw: bool,
    needs_db: bool, backend: str,
) -> Gradients:  # fmt: skip
    """Returns (dx, dgate, dw, db), each in the dtype of its tensor. `needs_dx` asks for both dx and dgate."""
    if backend == "torch":
        return _backward_torch(x, gate, weight, bias, mean, rstd, dy, form, needs_dx, needs_dw, needs_db)
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    dx = contiguous_like(x) if needs_dx else None
    dgate = contiguous_like(gate) if needs_dx and gate is not None else None
    if not n_rows:
        dw = torch.zeros_like(weight) if weight is not None and needs_dw else None
        return dx, dgate, dw, torch.zeros_like(bias) if bias is not None and needs_db else None
    w, b = None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()
    m = rstd if mean is None else mean
    spec = device.spec(x.device)
    itemsize = max(t.dtype.itemsize for t in (x, gate, dy) if t is not None)
    tile = tiling.general_norm_backward_tile(hidden // form.groups, itemsize, gate is not None, bias is not None, spec)
    if tile.blocks == 1:
        found = _launch_backward(
            x, gate, w, b, dy, m, rstd, rstd, rstd, dx, dgate, needs_dw, needs_db, form, tile, spec
        )
        return dx, dgate, *found
    x, gate, dy = as_rows(x)[0], None if gate is None else as_rows(gate)[0], as_rows(dy)[0]
    dots = x.new_empty(form.groups * tile.blocks, n_rows, dtype=torch.float32)
    sums = torch.empty_like(dots) if form.centred else dots
    found = _launch_backward(x, gate, w, b, dy, m, rstd, dots, sums, dx, dgate, needs_dw, needs_db, form, tile, spec,
                             apply=False)  # fmt: skip
    if dx is not None:
        dots, sums = (t.view(form.groups, tile.blocks, n_rows).sum(1) for t in (dots, sums))
        _launch_backward(x, gate, w, b, dy, m, rstd, dots, sums, dx, dgate, False, False, form, tile, spec,
                         reduce=False)  # fmt: skip
    return dx, dgate, *found


def _backward_torch(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    mean: torch.Tensor | None, rstd: torch.Tensor, dy: torch.Tensor,
    form: GeneralNormForm, needs_dx: bool, needs_dw: bool,
    needs_db: bool,
) -> Gradients:  # fmt: skip
    def per_row(statistic: torch.Tensor) -> torch.Tensor:
        return statistic.t().reshape(*x.shape[:-1], form.groups, 1)

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (form.groups, -1))

    z = None if gate is None else gate.float()
    s, g = x.float(), dy.float()
    if z is not None and form.gate == "before":
        s = s * form.activate(z)
    n = grouped(s)
    if mean is not None:
        n = n - per_row(mean)
    n = (n * per_row(rstd)).flatten(-2)
    w = None if weight is None else _weight(weight, form, torch.float32).float()
    dgate = None
    if z is not None and form.gate == "after":
        if needs_dx:
            u = n if w is None else n * w
            u = u if bias is None else u + bias.float()
            dgate = (g * u * form.slope(z)).to(gate.dtype)  # type: ignore[union-attr]
        g = g * form.activate(z)
    dw = (g * n).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if weight is not None and needs_dw else None
    db = g.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype) if bias is not None and needs_db else None
    if not needs_dx:
        return None, None, dw, db
    h, n = grouped(g if w is None else g * w), grouped(n)
    d = torch.addcmul(h, n, (h * n).mean(-1, keepdim=True), value=-1)
    if form.centred:
        d -= h.mean(-1, keepdim=True)
    d = (d * per_row(rstd)).flatten(-2)
    if z is not None and form.gate == "before":
        dgate = (d * x.float() * form.slope(z)).to(gate.dtype)  # type: ignore[union-attr]
        d = d * form.activate(z)
    return d.to(x.dtype), dgate, dw, db
