"""A mixture's experts with the model's code between the products: a gate that `gates.py` does not have, or a norm.

Each step is an autograd function, and autograd differentiates the model's code between them. So forward saves more than
in `moe_experts.py`: the gathered rows, the tensors that the model's code saves, and the experts' outputs. The model's
code reads all rows; rows without an expert on this rank are zeros there, in forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..gates import Gate
from ..host import once_differentiable
from . import grouped
from .row_kernels import Routing, expert_sums, sums_of_rows, sums_of_rows_backward, to_rows, without_tail

__all__ = ["Function", "activated", "in_steps"]

Function = Callable[[torch.Tensor], torch.Tensor]


def activated(h: torch.Tensor, form: Gate | Function, gated: bool) -> torch.Tensor:
    """Computes a in torch, from an h that contains the bias."""
    if not isinstance(form, Gate):
        return form(h)
    return form.product(*form.parts(h, None)) if gated else form.activate(h)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backend: str, *routed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*routed)
        ctx.backend = backend
        return to_rows(x, Routing(*routed), backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx = sums_of_rows(drows.contiguous(), None, None, Routing(*ctx.saved_tensors), ctx.backend)
        return dx, *(None,) * 6


class _Product(torch.autograd.Function):
    """Multiplies rows by their expert's weight and adds its bias. Rows without an expert become zeros in forward and
    backward, because the model's code reads them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool,
                backend: str, *routed: torch.Tensor) -> torch.Tensor:  # fmt: skip
        routing = Routing(*routed)
        ctx.save_for_backward(rows, weight, *routed)
        ctx.transposed, ctx.backend = transposed, backend
        y = grouped.grouped_product(rows, grouped.columns(weight, transposed), routing.groups, backend)
        if bias is not None:
            y += bias.index_select(0, routing.experts.clamp(max=bias.shape[0] - 1))
        return without_tail(y, routing, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, *routed = ctx.saved_tensors
        routing, backend, dy = Routing(*routed), ctx.backend, dy.contiguous()
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        drows = dw = None
        if needs_rows:
            columns = grouped.columns(weight, ctx.transposed).transpose(1, 2)
            drows = without_tail(grouped.grouped_product(dy, columns, routing.groups, backend), routing, backend)
        if needs_weight:
            dw = grouped.weight_gradient(rows, dy, ctx.transposed, routing.ends, routing.groups, backend)
        return drows, dw, expert_sums(dy, routing, backend) if needs_bias else None, *(None,) * 7


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, backend: str, *routed: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, *routed)
        ctx.backend = backend
        return sums_of_rows(rows, weights, None, Routing(*routed), backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, *routed = ctx.saved_tensors
        routing = Routing(*routed)
        drows, dots = sums_of_rows_backward(dout, rows, weights, routing, ctx.backend)
        return without_tail(drows, routing, ctx.backend), dots.to(weights.dtype), *(None,) * 6


def in_steps(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, form: Gate | Function, gated: bool,
    transposed: bool, post_norm: Function | None, backend: str,
) -> torch.Tensor:  # fmt: skip
    """Returns `[N, H]`, as `moe_experts` does."""
    routed = Routing.make(ids, gate_up.shape[0], backend)
    h = _Product.apply(_ToRows.apply(x, backend, *routed), gate_up, gate_up_bias, transposed, backend, *routed)
    a = _rows_of("gate", activated(h, form, gated), h.shape[0], down.shape[1 if transposed else 2])
    y = _Product.apply(a.to(h.dtype).contiguous(), down, down_bias, transposed, backend, *routed)
    if post_norm is not None:
        y = _rows_of("post_norm", post_norm(y), *y.shape).to(h.dtype).contiguous()
    return _Sums.apply(y, weights, backend, *routed)


def _rows_of(name: str, rows: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    if rows.shape != (n_rows, n_cols):
        raise ValueError(f"{name} must return a tensor of shape {[n_rows, n_cols]}; got {list(rows.shape)}")
    return rows
