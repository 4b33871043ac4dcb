"""The gate of a mixture's experts, on rows sorted by expert. The names are those of `row_kernels.py`.

    a_r = gate(h_r + c_e)                                        `gated_rows`

and in backward, in one pass, from g_r, the gradient of a_r before the multiplication with the weight:

    dh_r = w_r g_r gate'(h_r + c_e)     q_r = w_r a_r     dw_r = <g_r, a_r>              `gated_rows_backward`

The gradient of the next matrix needs q. The kernels compute in fp32; `ops/gates.py` has the gate's formulas. Unlike the
kernels of `swiglu`, they handle rows without an expert, biases and weights.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..blocks import load_fp32, store
from ..fallback import falls_back
from ..gates import Gate, activated, bounded_gate, bounded_up, slope, within_limit
from ..launch import launch
from .row_kernels import Routing, in_torch

__all__ = ["gated_rows", "gated_rows_backward"]


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. A program processes a range of rows. JOINED is as in `swiglu.py`, but 0 means that there is no up.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _run_of_rows(ends, n_experts, ROWS: tl.constexpr):
    """Returns (first row, end) of this program's range. All ranges but the last one consist of whole tiles."""
    live = tl.load(ends + n_experts - 1)
    tiles = (live + ROWS - 1) // ROWS
    each = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0) * ROWS
    first = tl.program_id(0) * each
    return first, tl.minimum(first + each, live)


@jit
def _parts(h, row, first, left, mask, N_COLS: tl.constexpr, JOINED: tl.constexpr, ROWS: tl.constexpr,
           COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Loads the gate `[ROWS, COLS]` and up of a tile, in fp32."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    WIDTH: tl.constexpr = N_COLS if JOINED == 0 else 2 * N_COLS
    h += tl.cast(row, tl.int64) * WIDTH
    if JOINED == 2:
        # Load once with a wide access and split on the chip: each of two separate accesses would fetch all the memory.
        wide = tl.arange(0, 2 * COLS)[None, :]
        at = h + rows * WIDTH + 2 * first + wide
        both = tl.load(at, mask=(rows < left) & (wide < 2 * (N_COLS - first)), other=0.0) if MASKED else tl.load(at)
        g, u = tl.split(tl.reshape(both, (ROWS, COLS, 2)))
        return g.to(tl.float32), u.to(tl.float32)
    at = h + rows * WIDTH + first + cols
    g = load_fp32(at, mask, MASKED)
    u = g
    if JOINED == 1:
        u = load_fp32(at + N_COLS, mask, MASKED)
    return g, u


@jit
def _gate_tile(h, g_bias, u_bias, d, row_weights, a, dh, dots, row, stop, first, N_COLS: tl.constexpr,
               ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
               JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    mask = (rows < stop - row) & (cols < N_COLS - first)
    g_raw, u_raw = _parts(h, row, first, stop - row, mask, N_COLS, JOINED, ROWS, COLS, MASKED)
    if HAS_BIAS:
        g_raw += g_bias
        u_raw += u_bias
    g = bounded_gate(g_raw, LIMIT)
    act, s = activated(g, ACTIVATION, ALPHA)
    at = tl.cast(row, tl.int64) * N_COLS + rows * N_COLS + first + cols
    # The dtype in which forward stores a and the next product reads it.
    stored = a.dtype.element_ty
    u = g
    if JOINED == 0:
        y = act
    else:
        u = bounded_up(u_raw, LIMIT, OFFSET)
        y = act.to(stored).to(tl.float32) * u
    if not BACKWARD:
        store(a + at, y, mask, MASKED)
    else:
        d_raw = load_fp32(d + at, mask, MASKED)
        lane = tl.arange(0, ROWS)
        w = load_fp32(row_weights + row + lane, lane < stop - row, MASKED)[:, None]
        y = y.to(stored).to(tl.float32)
        dot = tl.sum(d_raw * y, axis=1)
        if MASKED:
            tl.store(dots + row + lane, dot, mask=lane < stop - row)
        else:
            tl.store(dots + row + lane, dot)
        store(a + at, w * y, mask, MASKED)
        dy = w * d_raw
        if JOINED == 0:
            store(dh + at, dy * slope(g, act, s, ACTIVATION, ALPHA), mask, MASKED)
        else:
            du = dy * act
            dg = dy * u * slope(g, act, s, ACTIVATION, ALPHA)
            if LIMIT > 0:
                du = within_limit(du, u_raw, bounded_up(u_raw, LIMIT, 0), LIMIT, True)
                dg = within_limit(dg, g_raw, g, LIMIT, False)
            dh += tl.cast(row, tl.int64) * (2 * N_COLS)
            if JOINED == 1:
                to = dh + rows * (2 * N_COLS) + first + cols
                store(to, dg, mask, MASKED)
                store(to + N_COLS, du, mask, MASKED)
            else:
                wide = tl.arange(0, 2 * COLS)[None, :]
                both = tl.reshape(tl.join(dg.to(stored), du.to(stored)), (ROWS, 2 * COLS))
                to = dh + rows * (2 * N_COLS) + 2 * first + wide
                store(to, both, (rows < stop - row) & (wide < 2 * (N_COLS - first)), MASKED)


@jit
def _gate_rows(h, bias, d, row_weights, a, dh, dots, row, stop, expert, first, N_COLS: tl.constexpr,
               ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
               JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr):  # fmt: skip
    """Processes rows that share one bias or have none: whole tiles without a mask, then the rest with one."""
    COLUMN_TAIL: tl.constexpr = N_COLS % COLS != 0
    g_bias = 0.0
    u_bias = 0.0
    if HAS_BIAS:
        cols = tl.arange(0, COLS)[None, :]
        g_bias, u_bias = _parts(bias, expert, first, 1, cols < N_COLS - first, N_COLS, JOINED, 1, COLS, COLUMN_TAIL)
    whole = row + (stop - row) // ROWS * ROWS
    for tile in range(row, whole, ROWS):
        _gate_tile(h, g_bias, u_bias, d, row_weights, a, dh, dots, tile, stop, first, N_COLS, ACTIVATION, ALPHA, LIMIT,
                   OFFSET, JOINED, HAS_BIAS, BACKWARD, ROWS, COLS, COLUMN_TAIL)  # fmt: skip
    if whole < stop:
        _gate_tile(h, g_bias, u_bias, d, row_weights, a, dh, dots, whole, stop, first, N_COLS, ACTIVATION, ALPHA,
                   LIMIT, OFFSET, JOINED, HAS_BIAS, BACKWARD, ROWS, COLS, True)  # fmt: skip


@jit
def _gate_program(h, bias, experts, ends, d, row_weights, a, dh, dots, n_experts, N_COLS: tl.constexpr,
                  ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
                  JOINED: tl.constexpr, HAS_BIAS: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr):  # fmt: skip
    first = tl.program_id(1) * COLS
    row, end = _run_of_rows(ends, n_experts, ROWS)
    if HAS_BIAS:
        if row < end:
            # A range contains rows of a few experts. Read the bias of each once.
            for expert in range(tl.load(experts + row), tl.load(experts + end - 1) + 1):
                stop = tl.minimum(tl.load(ends + expert), end)
                _gate_rows(h, bias, d, row_weights, a, dh, dots, row, stop, expert, first, N_COLS, ACTIVATION, ALPHA,
                           LIMIT, OFFSET, JOINED, HAS_BIAS, BACKWARD, ROWS, COLS)  # fmt: skip
                row = stop
    else:
        _gate_rows(h, bias, d, row_weights, a, dh, dots, row, end, 0, first, N_COLS, ACTIVATION, ALPHA, LIMIT, OFFSET,
                   JOINED, HAS_BIAS, BACKWARD, ROWS, COLS)  # fmt: skip


@jit
def _gate_kernel(
    h,  # [n_rows, N_COLS], or [n_rows, 2 N_COLS] with up
    bias,  # [n_experts, columns of h], read if HAS_BIAS
    experts,  # [n_rows] int32
    ends,  # [n_experts] int32
    a,  # [n_rows, N_COLS]
    n_experts,
    N_COLS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    JOINED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    _gate_program(h, bias, experts, ends, h, h, a, h, h, n_experts, N_COLS, ACTIVATION, ALPHA, LIMIT, OFFSET, JOINED,
                  HAS_BIAS, False, ROWS, COLS)  # fmt: skip


@jit(lengths=("n_rows",))
def _gate_backward_kernel(
    h,  # as in `_gate_kernel`
    bias,
    experts,
    ends,
    d,  # [n_rows, N_COLS], g of the module's docstring
    row_weights,  # [n_rows]
    a,  # [n_rows, N_COLS], q; may be the memory of d, because the kernel reads every tile before it writes it
    dh,  # the shape of h
    dots,  # [blocks, n_rows] fp32, initialised with zeros
    n_rows,
    n_experts,
    N_COLS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    JOINED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    dots += tl.program_id(1) * n_rows
    _gate_program(h, bias, experts, ends, d, row_weights, a, dh, dots, n_experts, N_COLS, ACTIVATION, ALPHA, LIMIT,
                  OFFSET, JOINED, HAS_BIAS, True, ROWS, COLS)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def _launch_gate(
    kernel: Any, h: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, routing: Routing, form: Gate,
    tile: tiling.RowTile, *given: Any,
) -> None:  # fmt: skip
    spec = device.spec(h.device)
    n_rows, n_cols = a.shape
    launch(
        kernel, (tiling.programs(-(-n_rows // tile.rows), spec, tile.blocks), tile.blocks),
        (h, h if bias is None else bias.contiguous(), routing.experts, routing.ends, *given, routing.ends.shape[0]),
        {"N_COLS": n_cols, **form.flags, "HAS_BIAS": bias is not None, "ROWS": tile.rows, "COLS": tile.cols,
         **tile.options},
    )  # fmt: skip


def _tile(h: torch.Tensor, bias: torch.Tensor | None, n_cols: int, form: Gate, backward: bool) -> tiling.RowTile:
    given = form.joined is not None, form.joined == "interleaved", bias is not None, backward
    return tiling.expert_gate_tile(n_cols, h.dtype.itemsize, *map(int, given), device.spec(h.device))


def _biased(h: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    if bias is None:
        return h
    return h + bias.index_select(0, routing.experts.clamp(max=bias.shape[0] - 1))


@falls_back("moe_experts")
def gated_rows(h: torch.Tensor, bias: torch.Tensor | None, routing: Routing, form: Gate, backend: str) -> torch.Tensor:
    """Computes a `[S, I]` from h `[S, 2 I]`, or from h `[S, I]` if `form.joined` is None, which means no up."""
    if in_torch(backend):
        h = _biased(h, bias, routing)
        return form.activate(h) if form.joined is None else form.product(*form.parts(h, None))
    a = h.new_empty(h.shape[0], h.shape[1] // (1 if form.joined is None else 2))
    if a.numel():
        tile = _tile(h, bias, a.shape[1], form, False)
        _launch_gate(_gate_kernel, h, bias, a, routing, form, tile, a)
    return a


@falls_back("moe_experts")
def gated_rows_backward(
    h: torch.Tensor, bias: torch.Tensor | None, d: torch.Tensor, row_weights: torch.Tensor, routing: Routing,
    form: Gate, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns dh, q in the memory of d, and dw of each row in fp32, which is zero for a row without an expert."""
    if in_torch(backend):
        w, h = row_weights.float().unsqueeze(1), _biased(h, bias, routing)
        gate, up = (h, torch.ones_like(h)) if form.joined is None else form.parts(h, None)
        y = form.activate(h) if form.joined is None else form.product(gate, up)
        dots = (d.float() * y.float()).sum(1).masked_fill_(routing.experts >= routing.ends.shape[0], 0)
        dgate, dup = form.gradients(gate, up, d.float() * w)
        if form.joined is None:
            dh = dgate.to(h.dtype)
        else:
            dh = torch.empty_like(h)
            for part, gradient in zip(form.parts(dh, None), (dgate, dup), strict=True):
                part.copy_(gradient)
        return dh, d.copy_(y * w), dots
    dh = torch.empty_like(h)
    n_rows, n_cols = d.shape
    tile = _tile(h, bias, n_cols, form, True)
    dots = h.new_zeros(tile.blocks * n_rows, dtype=torch.float32)
    if d.numel():
        _launch_gate(_gate_backward_kernel, h, bias, d, routing, form, tile, d, row_weights, d, dh, dots, n_rows)
    return dh, d, dots if tile.blocks == 1 else dots.view(tile.blocks, n_rows).sum(0)
