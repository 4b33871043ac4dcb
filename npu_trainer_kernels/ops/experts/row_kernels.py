"""Moves tokens to the rows of their experts, and sums the experts' rows for each token.

Rows `[S, ...]`, S = N k, are sorted by expert. `places[t, s]` is the row of token t in its slot s, and expert e's rows
end at `ends[e]`. Rows after the last end have no expert on this rank: no kernel reads or writes them, and their number
stays on the device.

    x_r = x_t                                                    `to_rows`
    o_t = base_t + sum over s of w_ts y_r                        `sums_of_rows`, in the order of the slots; base or 0

and in backward

    dy_r = w_ts do_t     dw_ts = <do_t, y_r>                     `sums_of_rows_backward`
    db_e = sum over the rows of e of dy_r                        `expert_sums`, the gradient of a bias

The kernels compute in fp32 and sum in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..blocks import load_fp32, store
from ..fallback import falls_back
from ..host import autocasts
from ..launch import launch
from . import grouped

__all__ = [
    "Routing",
    "expert_sums",
    "fp32_product",
    "in_torch",
    "sums_of_rows",
    "sums_of_rows_backward",
    "to_rows",
    "without_tail",
]


class Routing(NamedTuple):
    """The assignment of rows to experts and tokens, as tensors on the device.

    Attributes:
        experts: `[S]` int32, the expert of each row, ascending; the last rows may have no expert.
        order: `[S]` int64, the index of each row in the flattened `[N, k]`.
        places: `[N, k]` int32.
        ends: `[E]` int32.
        groups: `ends` in the dtype of the grouped product.
    """

    experts: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def make(cls, ids: torch.Tensor, n_experts: int, backend: str) -> Routing:
        """Computes the routing of ids `[N, k]`. The sort is stable, so equal ids always give equal rows."""
        experts, order = torch.sort(ids.reshape(-1).int(), stable=True)
        # Row indices and expert indices. An expert's rows end after the last row with its index or a lower one.
        numbers = torch.arange(max(experts.shape[0], n_experts), dtype=torch.int32, device=ids.device)
        places = torch.empty_like(experts).scatter_(0, order, numbers[: experts.shape[0]]).view(ids.shape)
        ends = torch.searchsorted(experts, numbers[:n_experts], out_int32=True, right=True)
        return cls(experts, order, places, ends, grouped.groups_of(ends, backend))

    @property
    def slots(self) -> int:
        """The number of slots k."""
        return self.places.shape[1]

    def away(self) -> torch.Tensor:
        """Returns `[N, k]`, true for slots whose row has no expert on this rank."""
        return self.places >= self.ends[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. With BRANCHES a kernel skips a row without an expert by a branch, as an NPU's core can. Otherwise it masks
# the lanes of that row, so that the loads of all slots are in flight together.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _unless_nobodys(mask, row, live, COLS: tl.constexpr):
    """Returns the mask of a row's lanes, false for a row without an expert. It compares a vector, because Triton's
    interpreter cannot use a scalar condition as a mask."""
    return mask & (row + tl.zeros([COLS], tl.int32) < live)


@jit(lengths=("n_tokens",))
def _to_rows_kernel(
    x,  # [n_tokens, N_COLS] with row stride x_stride
    places,  # [n_tokens, SLOTS] int32
    ends,  # [n_experts] int32
    rows,  # [n_tokens SLOTS, N_COLS] contiguous
    n_tokens,
    n_experts,
    x_stride,
    SLOTS: tl.constexpr,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
    BRANCHES: tl.constexpr,
):
    MASKED: tl.constexpr = N_COLS % COLS != 0
    column = tl.program_id(1) * COLS
    lane = column + tl.arange(0, COLS)
    mask = lane < N_COLS
    live = tl.load(ends + n_experts - 1)
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        at = x + tl.cast(token, tl.int64) * x_stride + lane
        value = tl.load(at, mask=mask, other=0.0) if MASKED else tl.load(at)
        for slot in tl.static_range(SLOTS):
            row = tl.load(places + token * SLOTS + slot)
            to = rows + tl.cast(row, tl.int64) * N_COLS + lane
            if BRANCHES:
                if row < live:
                    store(to, value, mask, MASKED)
            else:
                store(to, value, _unless_nobodys(mask, row, live, COLS), True)


@jit
def _weighted(value, weights, at, HAS_WEIGHTS: tl.constexpr):
    if HAS_WEIGHTS:
        value *= tl.load(weights + at).to(tl.float32)
    return value


@jit(lengths=("n_tokens",))
def _sums_kernel(
    rows,  # [n_tokens SLOTS, N_COLS] contiguous
    places,  # [n_tokens, SLOTS] int32
    ends,  # [n_experts] int32
    weights,  # [n_tokens, SLOTS] contiguous, read if HAS_WEIGHTS
    base,  # [n_tokens, N_COLS] contiguous fp32, read if HAS_BASE
    out,  # [n_tokens, N_COLS] contiguous
    n_tokens,
    n_experts,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    SLOTS: tl.constexpr,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
    BRANCHES: tl.constexpr,
):
    MASKED: tl.constexpr = N_COLS % COLS != 0
    column = tl.program_id(1) * COLS
    lane = column + tl.arange(0, COLS)
    mask = lane < N_COLS
    live = tl.load(ends + n_experts - 1)
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * N_COLS + lane
        total = load_fp32(base + at, mask, MASKED) if HAS_BASE else tl.zeros([COLS], tl.float32)
        if BRANCHES:
            for slot in range(SLOTS):
                row = tl.load(places + token * SLOTS + slot)
                if row < live:
                    value = load_fp32(rows + tl.cast(row, tl.int64) * N_COLS + lane, mask, MASKED)
                    total += _weighted(value, weights, token * SLOTS + slot, HAS_WEIGHTS)
        else:
            for slot in tl.static_range(SLOTS):
                row = tl.load(places + token * SLOTS + slot)
                found = _unless_nobodys(mask, row, live, COLS)
                value = load_fp32(rows + tl.cast(row, tl.int64) * N_COLS + lane, found, True)
                total += _weighted(value, weights, token * SLOTS + slot, HAS_WEIGHTS)
        store(out + at, total, mask, MASKED)


@jit(lengths=("n_tokens",))
def _sums_backward_kernel(
    dout,  # [n_tokens, N_COLS] with row stride `stride`
    rows,  # [n_tokens SLOTS, N_COLS] contiguous
    places,  # [n_tokens, SLOTS] int32
    ends,  # [n_experts] int32
    weights,  # [n_tokens, SLOTS] contiguous
    drows,  # [n_tokens SLOTS, N_COLS] contiguous
    dots,  # [blocks, n_tokens, SLOTS] fp32, initialised with zeros
    n_tokens,
    n_experts,
    stride,
    SLOTS: tl.constexpr,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
):
    MASKED: tl.constexpr = N_COLS % COLS != 0
    column = tl.program_id(1) * COLS
    lane = column + tl.arange(0, COLS)
    mask = lane < N_COLS
    live = tl.load(ends + n_experts - 1)
    dots += tl.cast(tl.program_id(1), tl.int64) * n_tokens * SLOTS
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        d = load_fp32(dout + tl.cast(token, tl.int64) * stride + lane, mask, MASKED)
        for slot in tl.static_range(SLOTS):
            row = tl.load(places + token * SLOTS + slot)
            if row < live:
                at = tl.cast(row, tl.int64) * N_COLS + lane
                y = load_fp32(rows + at, mask, MASKED)
                tl.store(dots + token * SLOTS + slot, tl.sum(d * y, axis=0))
                store(drows + at, d * tl.load(weights + token * SLOTS + slot).to(tl.float32), mask, MASKED)


@jit(lengths=("n_rows",))
def _clear_tail_kernel(
    rows,  # [n_rows, N_COLS] contiguous
    ends,  # [n_experts] int32
    n_rows,
    n_experts,
    N_COLS: tl.constexpr,
    COLS: tl.constexpr,
):
    lane = tl.program_id(1) * COLS + tl.arange(0, COLS)
    zeros = tl.zeros([COLS], rows.dtype.element_ty)
    for row in range(tl.load(ends + n_experts - 1) + tl.program_id(0), n_rows, tl.num_programs(0)):
        store(rows + tl.cast(row, tl.int64) * N_COLS + lane, zeros, lane < N_COLS, N_COLS % COLS != 0)


@jit
def _expert_sums_kernel(
    rows,  # [n_rows, N_COLS] contiguous
    ends,  # [n_experts] int32
    sums,  # [n_experts, N_COLS] contiguous
    n_experts,
    N_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    MASKED: tl.constexpr = N_COLS % COLS != 0
    first = tl.program_id(1) * COLS
    cols = first + tl.arange(0, COLS)[None, :]
    lane = first + tl.arange(0, COLS)
    for expert in range(tl.program_id(0), n_experts, tl.num_programs(0)):
        end = tl.load(ends + expert)
        start = 0
        if expert > 0:
            start = tl.load(ends + expert - 1)
        total = tl.zeros([COLS], tl.float32)
        whole = start + (end - start) // ROWS * ROWS
        for row in range(start, whole, ROWS):
            at = rows + tl.cast(row, tl.int64) * N_COLS + tl.arange(0, ROWS)[:, None] * N_COLS + cols
            total += tl.sum(load_fp32(at, cols < N_COLS, MASKED), axis=0)
        if whole < end:
            at = rows + tl.cast(whole, tl.int64) * N_COLS + tl.arange(0, ROWS)[:, None] * N_COLS + cols
            found = (whole + tl.arange(0, ROWS)[:, None] < end) & (cols < N_COLS)
            total += tl.sum(load_fp32(at, found, True), axis=0)
        store(sums + tl.cast(expert, tl.int64) * N_COLS + lane, total, lane < N_COLS, MASKED)


# ---------------------------------------------------------------------------------------------------------------------
# The steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes the product of a and b in their dtype, even under autocast."""
    if not autocasts(a):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def in_torch(backend: str) -> bool:
    """Whether torch does the steps between the products; the vendor has only the products."""
    return backend in ("torch", "vendor")


@falls_back("moe_experts")
def to_rows(x: torch.Tensor, routing: Routing, backend: str) -> torch.Tensor:
    """Copies x `[N, H]` to the rows `[S, H]`."""
    if in_torch(backend):
        return x.index_select(0, routing.order // routing.slots)
    n, n_cols = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = x.new_empty(n * routing.slots, n_cols)
    if rows.shape[0]:
        spec = device.spec(x.device)
        tile = tiling.expert_rows_tile(n_cols, x.dtype.itemsize, spec)
        launch(
            _to_rows_kernel, (tiling.programs(n, spec, tile.blocks), tile.blocks),
            (x, routing.places, routing.ends, rows, n, routing.ends.shape[0], x.stride(0)),
            {"SLOTS": routing.slots, "N_COLS": n_cols, "COLS": tile.cols, "BRANCHES": spec.has_buffer, **tile.options},
        )  # fmt: skip
    return rows


@falls_back("moe_experts")
def sums_of_rows(
    rows: torch.Tensor, weights: torch.Tensor | None, base: torch.Tensor | None, routing: Routing, backend: str
) -> torch.Tensor:
    """Sums rows `[S, H]` to `[N, H]`; weights `[N, k]`, or None for ones; base `[N, H]` fp32, or None for zeros."""
    (n, slots), n_cols = routing.places.shape, rows.shape[1]
    if in_torch(backend):
        away, total = routing.away(), base
        for slot in range(slots):
            # Rows without an expert are uninitialised and may be NaN, so set them to zero instead of multiplying by it.
            part = rows.index_select(0, routing.places[:, slot]).float().masked_fill_(away[:, slot, None], 0)
            part = part if weights is None else part.mul_(weights[:, slot, None].float())
            total = part if total is None else total + part
        assert total is not None
        return total.to(rows.dtype)
    out = rows.new_empty(n, n_cols)
    if n:
        spec = device.spec(rows.device)
        tile = tiling.expert_rows_tile(n_cols, rows.dtype.itemsize, spec)
        launch(
            _sums_kernel, (tiling.programs(n, spec, tile.blocks), tile.blocks),
            (rows, routing.places, routing.ends, out if weights is None else weights.contiguous(),
             out if base is None else base, out, n, routing.ends.shape[0]),
            {"HAS_WEIGHTS": weights is not None, "HAS_BASE": base is not None, "SLOTS": slots, "N_COLS": n_cols,
             "COLS": tile.cols, "BRANCHES": spec.has_buffer, **tile.options},
        )  # fmt: skip
    return out


@falls_back("moe_experts")
def sums_of_rows_backward(
    dout: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, routing: Routing, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows and of the weights, `[N, k]` in fp32."""
    (n, slots), n_cols = routing.places.shape, rows.shape[1]
    if in_torch(backend):
        away, drows = routing.away(), torch.empty_like(rows)
        dots = torch.zeros_like(weights, dtype=torch.float32)
        for slot in range(slots):
            places = routing.places[:, slot].long()
            y = rows.index_select(0, places).float().masked_fill_(away[:, slot, None], 0)
            dots[:, slot] = (dout.float() * y).sum(1)
            drows.index_copy_(0, places, (dout.float() * weights[:, slot, None].float()).to(rows.dtype))
        return drows, dots
    drows = torch.empty_like(rows)
    spec = device.spec(rows.device)
    tile = tiling.expert_rows_tile(n_cols, rows.dtype.itemsize, spec)
    dots = torch.zeros((tile.blocks, n, slots), dtype=torch.float32, device=rows.device)
    if n:
        dout = dout if dout.stride(1) == 1 else dout.contiguous()
        launch(
            _sums_backward_kernel, (tiling.programs(n, spec, tile.blocks), tile.blocks),
            (dout, rows, routing.places, routing.ends, weights.contiguous(), drows, dots, n, routing.ends.shape[0],
             dout.stride(0)),
            {"SLOTS": slots, "N_COLS": n_cols, "COLS": tile.cols, **tile.options},
        )  # fmt: skip
    return drows, dots.sum(0)


@falls_back("moe_experts")
def without_tail(rows: torch.Tensor, routing: Routing, backend: str) -> torch.Tensor:
    """Sets rows without an expert to zero, in place, for the model's code, which reads all rows."""
    if in_torch(backend):
        return rows.masked_fill_((routing.experts >= routing.ends.shape[0]).unsqueeze(1), 0)
    n_rows, n_cols = rows.shape
    if n_rows:
        spec = device.spec(rows.device)
        tile = tiling.expert_rows_tile(n_cols, rows.dtype.itemsize, spec)
        launch(
            _clear_tail_kernel, (tiling.programs(n_rows, spec, tile.blocks), tile.blocks),
            (rows, routing.ends, n_rows, routing.ends.shape[0]),
            {"N_COLS": n_cols, "COLS": tile.cols, **tile.options},
        )  # fmt: skip
    return rows


@falls_back("moe_experts")
def expert_sums(rows: torch.Tensor, routing: Routing, backend: str) -> torch.Tensor:
    """Returns `[E, ...]`, the sum of each expert's rows."""
    n_experts, n_cols = routing.ends.shape[0], rows.shape[1]
    if in_torch(backend):
        each = torch.arange(n_experts, dtype=torch.int32, device=rows.device)
        own = routing.experts.unsqueeze(1) == each
        live = rows.float().masked_fill_(~own.any(1, keepdim=True), 0)
        return fp32_product(own.t().float(), live).to(rows.dtype)
    sums = rows.new_empty(n_experts, n_cols)
    spec = device.spec(rows.device)
    tile = tiling.expert_sums_tile(n_cols, spec)
    launch(
        _expert_sums_kernel, (tiling.programs(n_experts, spec, tile.blocks), tile.blocks),
        (rows, routing.ends, sums, n_experts),
        {"N_COLS": n_cols, "ROWS": tile.rows, "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    return sums
