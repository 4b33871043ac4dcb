"""The experts of a mixture: each token goes through k small MLPs, and their results are summed by the router's weights.

    h_r = x_t U_e^T + c_e            of each row r: token t in its slot s, whose expert is e = id_ts          [S, 2 I]
    a_r = gate(h_r)                  a gate of `_gates.py`, or any function of h                              [S, I]
    y_r = norm(a_r D_e^T + b_e)      norm is the identity unless there is one                                 [S, H]
    o_t = sum over s of w_ts y_r                            fp32, in the order of the slots, rounded once     [N, H]

A row whose id is E or more has no expert here (expert parallelism gives such ids): it adds nothing, and the gradient of
its weight is zero. An expert without rows gets a gradient that is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import _grouped
from ._checks import check_float, check_ids, check_range, check_same_device
from ._gates import Gate, gate_options
from ._host import autocasts

__all__ = ["moe_experts", "moe_experts_reference", "unserved"]

Function = Callable[[torch.Tensor], torch.Tensor]


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
    """The op in plain PyTorch: one expert after another."""
    form = _gate(gate, alpha, limit, offset, gated, interleaved)
    (n, k), flat = expert_ids.shape, expert_ids.reshape(-1)
    places, parts = [], []
    for e in range(gate_up.shape[0]):
        at = (flat == e).nonzero().squeeze(1)
        weights = (t[e].t() if transposed else t[e] for t in (gate_up, down))
        biases = (None if t is None else t[e] for t in (gate_up_bias, down_bias))
        (up, last), (up_bias, last_bias) = weights, biases
        y = F.linear(_activated(F.linear(x[at // k], up, up_bias), form, gated), last, last_bias)
        places.append(at)
        parts.append(y if post_norm is None else post_norm(y))
    rows = torch.cat(parts)
    rows = rows.new_zeros(n * k, rows.shape[1]).index_copy(0, torch.cat(places), rows)
    return (rows.view(n, k, -1) * expert_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _activated(h: torch.Tensor, form: Gate | Function, gated: bool) -> torch.Tensor:
    if not isinstance(form, Gate):
        return form(h)
    return form.product(*form.parts(h, None)) if gated else form.activate(h)


def _gate(
    gate: str | Function, alpha: float, limit: float | None, offset: float, gated: bool, interleaved: bool
) -> Gate | Function:
    """What is formed of h: by name, or a function of its own."""
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
            "alpha, limit, offset and interleaved must be 1, None, 0 and False where gate is a function, which is given "
            f"h as it is; got {alpha!r}, {limit!r}, {offset!r} and {interleaved!r}"
        )
    return gate


def _check(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, gated: bool,
    transposed: bool,
) -> None:  # fmt: skip
    floats = {
        "x": x, "expert_weights": expert_weights, "gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }  # fmt: skip
    for name, t in floats.items():
        if t is not None:
            check_float(name, t)
    check_ids("expert_ids", expert_ids)
    check_same_device(expert_ids=expert_ids, **floats)
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"x must have shape [N, H] with H at least 1; got {list(x.shape)}")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or not expert_ids.shape[1]:
        raise ValueError(
            f"expert_ids must have shape [{x.shape[0]}, k] with k at least 1; got {list(expert_ids.shape)}"
        )
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights must have expert_ids' shape {list(expert_ids.shape)}; got {list(expert_weights.shape)}"
        )
    hidden, width, inner = x.shape[1], "2I" if gated else "I", -1 if transposed else -2
    if gate_up.dim() != 3 or not gate_up.shape[0] or gate_up.shape[-3 - inner] != hidden or not gate_up.shape[inner]:
        wanted = f"[E, {hidden}, {width}]" if transposed else f"[E, {width}, {hidden}]"
        raise ValueError(f"gate_up must have shape {wanted} with transposed={transposed}; got {list(gate_up.shape)}")
    if gated and gate_up.shape[inner] % 2:
        raise ValueError(f"gate_up must hold as many columns of up as of gate; got {list(gate_up.shape)}")
    experts, size = gate_up.shape[0], gate_up.shape[inner] // (2 if gated else 1)
    wanted = [experts, size, hidden] if transposed else [experts, hidden, size]
    if list(down.shape) != wanted:
        raise ValueError(f"down must have shape {wanted}, as x and gate_up say; got {list(down.shape)}")
    for name, bias, columns in (("gate_up_bias", gate_up_bias, gate_up.shape[inner]), ("down_bias", down_bias, hidden)):
        if bias is not None and list(bias.shape) != [experts, columns]:
            raise ValueError(f"{name} must have shape {[experts, columns]}; got {list(bias.shape)}")
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        given = floats[name]
        if given is not None and given.dtype != x.dtype and not autocasts(x):
            raise ValueError(f"{name} must have x's dtype {x.dtype} without autocast; got {given.dtype}")


def unserved(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, *, backend: str | None = None
) -> str | None:
    """Why a model's experts had better stay as they are on this device, in words for a report; None where the op serves
    them. Reads no tensor.

    Args:
        device: of all tensors.
        dtype: that the products run in: the weights', or autocast's.
        hidden: H.
        intermediate: I.
        backend: overrides the choice of `backends.choose`.
    """
    return _grouped.unavailable(device, dtype, (hidden, intermediate))


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
    """The experts of a mixture; formulas in the module's docstring. Under autocast its products run in its dtype.

    Args:
        x: `[N, H]`, fp32, bf16 or fp16.
        expert_ids: `[N, k]` int64 or int32, at least 0; E and above: a row that has no expert here, costs nothing and
            adds nothing.
        expert_weights: `[N, k]`, the router's, fp32, bf16 or fp16.
        gate_up: `[E, 2 I, H]`, in x's dtype unless autocast is on; without a gate `[E, I, H]`, up alone.
        down: `[E, H, I]`.
        gate_up_bias: `[E, 2 I]` (without a gate `[E, I]`) or None.
        down_bias: `[E, H]` or None.
        gate: the name of a formula in `_gates.py`, or a function of h `[S, 2 I]` (without a gate `[S, I]`) that returns
            `[S, I]` row by row. It is given as many rows as there are ids, those without an expert last, as zeros.
        alpha: silu's sigmoid is that of alpha * gate.
        limit: gate is clamped to at most this, up to between its negative and itself, before anything else; None: not.
        offset: what is added to up.
        gated: False: there is no up, and h is activated as it is.
        interleaved: gate is in the even and up in the odd columns of h; else gate is its first half.
        transposed: gate_up is `[E, H, 2 I]` and down `[E, I, H]`.
        post_norm: a function of what `down` returns, `[S, H]` to `[S, H]` row by row, as for `gate`.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[N, H]` in x's dtype.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that do not match, an option that is not allowed or that a function as gate does
            not have, (on a CPU, or with NPU_KERNELS_DEBUG=1) a negative id, an unknown backend, a device without a
            grouped product.
    """
    _gate(gate, alpha, limit, offset, gated, interleaved)
    _check(x, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias, gated, transposed)
    check_range("expert_ids", expert_ids, expert_ids.device, 1 << 31)
    return moe_experts_reference(
        x, expert_ids, expert_weights, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias, gate=gate,
        alpha=alpha, limit=limit, offset=offset, gated=gated, interleaved=interleaved, transposed=transposed,
        post_norm=post_norm,
    )  # fmt: skip
