"""The experts of a mixture: k small MLPs process each token, and their outputs are summed with the router's weights.

    h_r = x_t U_e^T                  for each row r: token t in its slot s, with expert e = id_ts             [S, 2 I]
    a_r = gate(h_r + c_e)            a gate of `ops/gates.py`, or any function of h                              [S, I]
    y_r = norm(a_r D_e^T + b_e)      norm is optional                                                         [S, H]
    o_t = sum over s of w_ts y_r                            fp32, in the order of the slots, rounded once     [N, H]

A row whose id is E or more has no expert on this rank (expert parallelism produces such ids): it adds nothing, and the
gradient of its weight is zero. The gradient of an expert without rows is zero.

The op sorts rows by expert and multiplies them in groups (`grouped.py`); `row_kernels.py` and `gate_kernels.py` have
the other steps. With a norm or a function as gate, each step is an autograd function (`steps.py`). Else backward is

    g_r = do_t D_e                                   the gradient of a_r before its weight multiplies it      [S, I]
    dh_r = w_ts g_r gate'(h_r + c_e)      q_r = w_ts a_r      dw_ts = <g_r, a_r> + <do_t, b_e>
    dD_e = sum of do_t^T q_r      dU_e = sum of dh_r^T x_t      dc_e = sum of dh_r      db_e = sum of w_ts do_t
    dx_t = sum over s of dh_r U_e                           fp32, in the order of the slots, rounded once     [N, H]

where <g_r, a_r> is <do_t, y_r> without the bias. So backward does not read y, and of the tensors `[S, ...]` forward
saves only h: backward gathers x and computes a again. A matrix `[N, E]` of the weights adds b and gives its gradients,
which costs a small product instead of a pass over the rows. The drawback is that a value of b that is not finite
reaches every token, and a value of do_t that is not finite reaches every db.

The host does not wait for the device, and no shape depends on the routing, unless the grouped product requires it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ... import backends, vendor
from ... import device as devices
from ...support.opaque import opaque
from ..checks import check_float, check_ids, check_range, check_same_device
from ..gates import Gate, gate_options
from ..host import autocasts, compute_dtype, in_dtype, once_differentiable, stands_on
from . import grouped
from .gate_kernels import gated_rows, gated_rows_backward
from .row_kernels import Routing, expert_sums, fp32_product, sums_of_rows, to_rows
from .steps import Function, activated, in_steps

__all__ = ["moe_experts", "moe_experts_reference", "unserved"]


def moe_experts_reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: str | Function = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    post_norm: Function | None = None,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, one expert after another."""
    form = _gate(gate, alpha, limit, offset, gated, interleaved)
    (n, k), flat = expert_ids.shape, expert_ids.reshape(-1)
    places, parts = [], []
    for e in range(gate_up.shape[0]):
        at = (flat == e).nonzero().squeeze(1)
        weights = (t[e].t() if transposed else t[e] for t in (gate_up, down))
        biases = (None if t is None else t[e] for t in (gate_up_bias, down_bias))
        (up, last), (up_bias, last_bias) = weights, biases
        y = F.linear(activated(F.linear(x[at // k], up, up_bias), form, gated), last, last_bias)
        places.append(at)
        parts.append(y if post_norm is None else post_norm(y))
    rows = torch.cat(parts)
    rows = rows.new_zeros(n * k, rows.shape[1]).index_copy(0, torch.cat(places), rows)
    return (rows.view(n, k, rows.shape[1]) * expert_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _gate(
    gate: str | Function, alpha: float, limit: float | None, offset: float, gated: bool, interleaved: bool
) -> Gate | Function:
    """Checks the gate and returns it, as a `Gate` if it is a name."""
    if not gated and (limit is not None or offset or interleaved):
        raise ValueError(
            "limit, offset and interleaved must be None, 0 and False with gated=False, where there is no up; "
            f"got {limit!r}, {offset!r} and {interleaved!r}"
        )
    if isinstance(gate, str):
        joined = None if not gated else "interleaved" if interleaved else "halves"
        return gate_options(gate, alpha, limit, offset, joined)
    if not callable(gate):
        raise TypeError(f"gate must be the name of a gate or a function; got {gate!r}")
    if (alpha, limit, offset, interleaved) != (1.0, None, 0.0, False):
        raise ValueError(
            "alpha, limit, offset and interleaved must be 1, None, 0 and False where gate is a function of all of h; "
            f" got {alpha!r}, {limit!r}, {offset!r} and {interleaved!r}"
        )
    return gate


# ---------------------------------------------------------------------------------------------------------------------
# With a gate of `gates.py` and without a norm: one autograd function, whose only saved tensor of rows is h
# ---------------------------------------------------------------------------------------------------------------------


def _dense(ids: torch.Tensor, weights: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Returns `[N, E]` fp32, each expert's weight for each token, without atomics. A token may repeat an expert."""
    own = ids.unsqueeze(-1) == torch.arange(n_experts, dtype=ids.dtype, device=ids.device)
    # Not a product with `own`: an infinite weight times zero would be NaN.
    return torch.where(own, weights.unsqueeze(-1).float(), 0.0).sum(1)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
        gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, form: Gate, transposed: bool, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        routing = Routing.make(ids, gate_up.shape[0], backend)
        h = grouped.grouped_product(
            to_rows(x, routing, backend), grouped.columns(gate_up, transposed), routing.groups, backend
        )
        a = gated_rows(h, gate_up_bias, routing, form, backend)
        y = grouped.grouped_product(a, grouped.columns(down, transposed), routing.groups, backend)
        del a
        dense = base = None
        if down_bias is not None:
            dense = _dense(ids, weights, down.shape[0])
            base = fp32_product(dense, down_bias.float())
        # Do not save a tensor for the gradient of a frozen parameter.
        needs_gate_up, needs_down_bias = ctx.needs_input_grad[3], ctx.needs_input_grad[6]
        ctx.save_for_backward(
            x if needs_gate_up else None, ids, weights, gate_up, down, gate_up_bias, down_bias, h,
            dense if needs_down_bias else None, *routing,
        )  # fmt: skip
        if not needs_gate_up:
            stands_on(ctx, x)
        ctx.form, ctx.transposed, ctx.backend = form, transposed, backend
        return sums_of_rows(y, weights, base, routing, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, h, dense, *routed = ctx.saved_tensors
        routing, backend, transposed = Routing(*routed), ctx.backend, ctx.transposed
        needs_x, _, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias = (
            ctx.needs_input_grad[:7]
        )
        drows = to_rows(dout, routing, backend)
        g = grouped.grouped_product(drows, grouped.columns(down, transposed).transpose(1, 2), routing.groups, backend)
        row_weights = weights.reshape(-1).index_select(0, routing.order)
        dh, q, dots = gated_rows_backward(h, gate_up_bias, g, row_weights, routing, ctx.form, backend)
        del g
        of_rows = routing.ends, routing.groups, backend
        d_down = grouped.weight_gradient(q, drows, transposed, *of_rows) if needs_down else None
        del q, drows
        d_weights = d_down_bias = None
        wide: Any = dout.float() if down_bias is not None and (needs_weights or needs_down_bias) else None
        if needs_weights:
            found = dots.index_select(0, routing.places.reshape(-1)).view(ids.shape)
            if down_bias is not None:
                every = fp32_product(wide, down_bias.float().t())
                every = every.gather(1, ids.clamp(max=down.shape[0] - 1).long())
                found = found + every.masked_fill_(routing.away(), 0)
            d_weights = in_dtype(found, weights.dtype)
        if needs_down_bias:
            d_down_bias = fp32_product(dense.t(), wide).to(down_bias.dtype)
        d_gate_up_bias = expert_sums(dh, routing, backend) if needs_gate_up_bias else None
        d_gate_up = dx = None
        if needs_gate_up:
            d_gate_up = grouped.weight_gradient(to_rows(x, routing, backend), dh, transposed, *of_rows)
        if needs_x:
            dxs = grouped.grouped_product(
                dh, grouped.columns(gate_up, transposed).transpose(1, 2), routing.groups, backend
            )
            dx = sums_of_rows(dxs, None, None, routing, backend)
        return dx, None, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------------------------------


def _check(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, gated: bool,
    transposed: bool,
) -> None:  # fmt: skip
    parameters = {"gate_up": gate_up, "down": down}
    parameters |= {n: t for n, t in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)) if t is not None}
    floats = {"x": x, "expert_weights": expert_weights, **parameters}
    for name, t in floats.items():
        check_float(name, t)
    check_ids("expert_ids", expert_ids)
    check_same_device(expert_ids=expert_ids, **floats)
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"x must have shape [N, H] with H at least 1; got {list(x.shape)}")
    n, hidden = x.shape
    if expert_ids.dim() != 2 or expert_ids.shape[0] != n or not expert_ids.shape[1]:
        raise ValueError(f"expert_ids must have shape [{n}, k] with k at least 1; got {list(expert_ids.shape)}")
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights must have expert_ids' shape {list(expert_ids.shape)}; got {list(expert_weights.shape)}"
        )
    found = tuple(gate_up.shape)
    experts, first, second = found if len(found) == 3 else (0, 0, 0)
    rows, columns = (first, second) if transposed else (second, first)
    if not experts or rows != hidden or not columns:
        width = "2I" if gated else "I"
        wanted = f"[E, {hidden}, {width}]" if transposed else f"[E, {width}, {hidden}]"
        raise ValueError(f"gate_up must have shape {wanted} with transposed={transposed}; got {list(found)}")
    if gated and columns % 2:
        raise ValueError(f"gate_up must hold as many columns of up as of gate; got {list(found)}")
    size = columns // 2 if gated else columns
    shapes = {
        "gate_up": found,
        "down": (experts, size, hidden) if transposed else (experts, hidden, size),
        "gate_up_bias": (experts, columns),
        "down_bias": (experts, hidden),
    }
    for name, t in parameters.items():
        if t.shape != shapes[name]:
            raise ValueError(f"{name} must have shape {list(shapes[name])}, as x and gate_up say; got {list(t.shape)}")
        if t.dtype is not x.dtype and not autocasts(x):
            raise ValueError(f"{name} must have x's dtype {x.dtype} without autocast; got {t.dtype}")


def unserved(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, *, backend: str | None = None
) -> str | None:
    """Returns a reason for a report why the op should not replace a model's experts on this device; None if it may.
    Reads no tensor of the model. On an accelerator it tries the products, once for each dtype.

    Args:
        device: the device of all tensors.
        dtype: the dtype of the products: that of the weights, or autocast's.
        hidden: H.
        intermediate: I.
        backend: overrides the choice of `backends.choose`.
    """
    chosen = backends.choose("moe_experts", device, backend)
    reason = grouped.unavailable(device, dtype, (hidden, intermediate), chosen)
    if reason is None and device.type not in ("cpu", "meta"):
        reason = grouped.trial(device, dtype, chosen)
    return reason


@opaque
def moe_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: str | Function = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    post_norm: Function | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the experts of a mixture by the formulas of the module's docstring. Autocast applies to the products.

    Args:
        x: `[N, H]`, fp32, bf16 or fp16.
        expert_ids: `[N, k]` int64 or int32, not negative. A row with an id of E or more has no expert on this rank: it
            costs nothing and adds nothing.
        expert_weights: `[N, k]`, the router's weights, fp32, bf16 or fp16.
        gate_up: `[E, 2 I, H]`, in x's dtype unless autocast is on; without a gate `[E, I, H]`, up alone.
        down: `[E, H, I]`.
        gate_up_bias: `[E, 2 I]` (without a gate `[E, I]`) or None.
        down_bias: `[E, H]` or None.
        gate: the name of a formula in `ops/gates.py`, or a function of h `[S, 2 I]` (without a gate `[S, I]`) that
            returns `[S, I]` row by row. The op passes one row for each id; rows without an expert are last and zero.
        alpha: factor of gate inside silu's sigmoid.
        limit: clamps gate to at most `limit` and up to between -limit and limit, before anything else; or None.
        offset: the number that is added to up.
        gated: if False, there is no up, and the activation applies to all of h.
        interleaved: whether gate is in the even and up in the odd columns of h; else gate is the first half of h.
        transposed: whether gate_up is `[E, H, 2 I]` and down `[E, I, H]`.
        post_norm: a function of the rows after `down`, `[S, H]` to `[S, H]` row by row, like `gate`.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[N, H]` in x's dtype.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that do not match, an option that is not allowed, an option of a named gate with a
            function as gate, (on a CPU, or with NPU_KERNELS_DEBUG=1) a negative id, an unknown backend, a device
            without a grouped product.
    """
    form = _gate(gate, alpha, limit, offset, gated, interleaved)
    _check(x, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias, gated, transposed)
    check_range("expert_ids", expert_ids, expert_ids.device, 1 << 31)
    dtype, size = compute_dtype(x), down.shape[1 if transposed else 2]

    def uncovered() -> str | None:
        return vendor.uncovered_experts(dtype, (x.shape[1], size))

    def at() -> backends.Shape:
        return dtype, x.shape[0], (x.shape[1], size, down.shape[0], expert_ids.shape[1])

    chosen = backends.choose("moe_experts", x.device, backend, uncovered, at=at)
    reason = grouped.unavailable(x.device, dtype, (x.shape[1], size), chosen)
    if reason is not None:
        raise ValueError(f"moe_experts cannot run on {devices.kind_of(x.device)}: {reason}")
    rows, up, last = in_dtype(x, dtype), in_dtype(gate_up, dtype), in_dtype(down, dtype)
    up_bias = None if gate_up_bias is None else in_dtype(gate_up_bias, dtype)
    last_bias = None if down_bias is None else in_dtype(down_bias, dtype)
    given = rows, expert_ids, expert_weights, up, last, up_bias, last_bias, form
    if isinstance(form, Gate) and post_norm is None:
        y = _Experts.apply(*given, transposed, chosen)
    else:
        y = in_steps(*given, gated, transposed, post_norm, chosen)
    return in_dtype(y, x.dtype)
