"""Layer norm over the last dimension (arXiv:1607.06450), with and without weight and bias.

    mean = mean_j x_j        rstd = (mean_j (x_j - mean)^2 + eps)^(-1/2)        n = (x - mean) rstd        fp32

    y = cast(n w' + b)       w' = offset + weight in the weight's dtype; the rest in fp32, rounded once to x's dtype

    h = dy w'                dx = rstd (h - n mean_j h_j n_j - mean_j h_j)
    dw = sum over rows of dy n                db = sum over rows of dy

`ops/norms/general_kernels.py` has the kernels, also in torch. Forward saves x, weight and two fp32 numbers per row.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import backends
from ..checks import check_float, check_same_device
from ..host import once_differentiable
from .general_kernels import GeneralNormForm, general_backward, general_forward, general_reference
from .rms_kernels import check_norm

__all__ = ["layer_norm", "layer_norm_reference"]


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, operation for operation as Cohere's modules do."""
    return general_reference(x, None, weight, bias, GeneralNormForm(eps, offset, centred=True))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                form: GeneralNormForm,
                backend: str) -> torch.Tensor:  # fmt: skip
        y, mean, rstd = general_forward(x, None, weight, bias, form, backend)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.form, ctx.backend = form, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        form, backend = ctx.form, ctx.backend
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx, _, dw, db = general_backward(
            x, None, weight, bias, mean, rstd, dy, form, needs_dx, needs_dw, needs_db, backend
        )
        return dx, dw, db, None, None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the layer norm over the last dimension. The module's docstring has the formulas.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16; any strides.
        weight: `[H]` or None.
        bias: `[H]` or None; it must be None without a weight.
        eps: added to the variance; not negative.
        offset: added to the weight.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[..., H]` in x's dtype.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an eps or offset that is not finite, a bias without a weight, an unknown
            backend.
    """
    check_norm(x, weight, eps, offset, "gemma")
    if bias is not None:
        check_float("bias", bias)
        if weight is None:
            raise ValueError(f"bias must be None without a weight; got one of shape {list(bias.shape)}")
        if bias.shape != weight.shape:
            raise ValueError(f"bias must have the weight's shape {list(weight.shape)}; got {list(bias.shape)}")
        check_same_device(x=x, bias=bias)
    chosen = backends.choose("layer_norm", x.device, backend, at=lambda: backends.of_rows(x))
    if torch.compiler.is_compiling():
        return layer_norm_reference(x, weight, bias, eps, offset=offset)
    return _LayerNorm.apply(x, weight, bias, GeneralNormForm(eps, offset, centred=True), chosen)
