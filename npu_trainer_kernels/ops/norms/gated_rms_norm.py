"""RMS norm with a gate, in groups of the last dimension: the last step of state-space and linear-attention layers.

With D = H / groups, the mean over the D columns of a group, and a the gate's activation:

    order "norm_first"      rstd = (mean_j x_j^2 + eps)^(-1/2)       y = cast(cast(cast(x rstd) w') a(gate))   "llama"
                                                                     y = cast(x rstd w' a(gate))               "gemma"
          "gate_first"      s = x a(gate)
                            rstd = (mean_j s_j^2 + eps)^(-1/2)       y = cast(s rstd) w'                       "llama"
                                                                     y = cast(s rstd w')                       "gemma"

    w' = offset + weight    cast: to x's dtype    a: silu or sigmoid; a = 1 without a gate

    g = dy a(gate) or dy        h = g w'        n = x rstd or s rstd        ds = rstd (h - n mean_j h_j n_j)
    norm_first     dx = ds             dgate = dy n w' a'(gate)
    gate_first     dx = ds a(gate)     dgate = ds x a'(gate)             dw = sum over rows of g n

Qwen3-Next ("llama") and Kimi-Linear ("gemma") apply the norm first; Mamba 2 (arXiv:2405.21060), Bamba and Nemotron-H
apply the gate first. `ops/norms/general_kernels.py` has the kernels and their torch implementation. Forward saves x,
gate, weight and one fp32 number per row and group.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import backends
from ..checks import check_choice, check_float, check_same_device
from ..host import once_differentiable
from .general_kernels import ACTIVATIONS, GeneralNormForm, general_backward, general_forward, general_reference
from .rms_kernels import check_norm

__all__ = ["CASTINGS", "ORDERS", "gated_rms_norm", "gated_rms_norm_reference"]

ORDERS = ("norm_first", "gate_first")
CASTINGS = ("llama", "gemma")


def _form(
    gate: torch.Tensor | None, eps: float, offset: float, order: str, activation: str, casting: str, groups: int
) -> GeneralNormForm:
    where = "none" if gate is None else "after" if order == "norm_first" else "before"
    return GeneralNormForm(eps, offset, False, casting, where, activation, groups)


def gated_rms_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    order: str = "norm_first",
    activation: str = "silu",
    casting: str = "llama",
    groups: int = 1,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, as transformers' modules do."""
    return general_reference(x, gate, weight, None, _form(gate, eps, offset, order, activation, casting, groups))


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, form: GeneralNormForm,
                backend: str) -> torch.Tensor:  # fmt: skip
        y, _, rstd = general_forward(x, gate, weight, None, form, backend)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.form, ctx.backend = form, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        needs_x, needs_gate, needs_dw = ctx.needs_input_grad[:3]
        dx, dgate, dw, _ = general_backward(
            x, gate, weight, None, None, rstd, dy, ctx.form, needs_x or needs_gate, needs_dw, False, ctx.backend
        )
        return dx if needs_x else None, dgate if needs_gate else None, dw, None, None


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    order: str = "norm_first",
    activation: str = "silu",
    casting: str = "llama",
    groups: int = 1,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the gated RMS norm over groups of the last dimension. The module's docstring has the formulas.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16; any strides.
        gate: a tensor of x's shape, whose dtype may differ; None for the norm without a gate.
        weight: `[H]`.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        order: `"norm_first"` or `"gate_first"`.
        activation: the activation of the gate, `"silu"` or `"sigmoid"`.
        casting: `"llama"` or `"gemma"`.
        groups: the number of groups; it must divide H.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[..., H]` in x's dtype; with casting `"llama"`, unless the gate is applied last, in the promoted dtype of
        weight and x.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, groups that do not divide H, an eps or offset that is not finite, an
            unknown order, activation, casting or backend.
    """
    check_float("weight", weight)
    check_norm(x, weight, eps, offset, casting)
    check_choice("casting", casting, CASTINGS)
    check_choice("order", order, ORDERS)
    check_choice("activation", activation, ACTIVATIONS)
    if type(groups) is not int or groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"groups must be a positive int that divides x's last dimension {x.shape[-1]}; got {groups!r}")
    if gate is not None:
        check_float("gate", gate)
        if gate.shape != x.shape:
            raise ValueError(f"gate must have x's shape {list(x.shape)}; got {list(gate.shape)}")
        check_same_device(x=x, gate=gate)
    form = _form(gate, eps, offset, order, activation, casting, groups)
    chosen = backends.choose("gated_rms_norm", x.device, backend, at=lambda: backends.of_rows(x))
    if torch.compiler.is_compiling():
        return general_reference(x, gate, weight, None, form)
    return _GatedRmsNorm.apply(x, gate, weight, form, chosen)
