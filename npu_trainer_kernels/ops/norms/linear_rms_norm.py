"""RMS norm of each head of a linear layer's output. Forward does not save that output for backward.

    p = x W^T + bias, seen as [..., heads, D]          y = rms_norm(p, weight = norm_weight) over D

Backward computes p again from x, which a linear layer saves anyway. This costs one matrix product and saves one tensor
of p's size for as long as the graph lives. In models that norm queries and keys (Qwen3), attention's backward does not
need these two tensors, and with gradient checkpointing memory peaks there.

`ops/norms/rms_norm.py` has the formulas of the norm and its gradients, `ops/norms/rms_kernels.py` the kernels. With dp
from the norm,

    dx = dp W        dW = dp^T x        dbias = sum over rows of dp

Forward saves x, the weights and one fp32 number per head.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_float, check_same_device
from ..host import autocasts, compute_dtype, in_dtype, once_differentiable
from .rms_kernels import check_norm_options, norm_backward, norm_forward, norm_reference
from .rms_norm import norm_backends, rms_norm

__all__ = ["linear_rms_norm", "linear_rms_norm_reference"]


def _heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int) -> torch.Tensor:
    product = torch.nn.functional.linear(x, weight, bias)
    return product.view(*x.shape[:-1], weight.shape[0] // size, size)


def linear_rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """Computes the op in plain PyTorch."""
    return norm_reference(_heads(x, weight, bias, norm_weight.shape[0]), norm_weight, eps, offset, casting)


class _LinearRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, bias: torch.Tensor | None,
                options: tuple[float, float, str, str, str]) -> torch.Tensor:  # fmt: skip
        eps, offset, casting, backend, _ = ctx.options = options
        product = _heads(x, weight, bias, norm_weight.shape[0])
        y, _, rstd = norm_forward(product, None, norm_weight, eps, offset, casting, 1.0, False, backend)
        ctx.save_for_backward(x, weight, norm_weight, bias, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, norm_weight, bias, rstd = ctx.saved_tensors
        _, offset, casting, _, backend = ctx.options
        needs_x, needs_weight, needs_norm, needs_bias, _ = ctx.needs_input_grad
        product = _heads(x, weight, bias, norm_weight.shape[0])
        needs_product = needs_x or needs_weight or needs_bias
        dp, dnorm = norm_backward(
            product, None, norm_weight, rstd, dy, None, offset, casting, 1.0, needs_product, needs_norm, backend
        )
        dx = dw = db = None
        if dp is not None:
            rows = dp.reshape(-1, weight.shape[0])
            dx = (rows @ weight).view(x.shape) if needs_x else None
            dw = rows.t() @ x.reshape(-1, weight.shape[1]) if needs_weight else None
            db = rows.sum(0) if needs_bias else None
        return dx, dw, dnorm, db, None


def linear_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    backend: str | None = None,
) -> torch.Tensor:
    """Computes rms_norm(x W^T + bias) over each head without saving the product for backward. The module's docstring
    has the formulas. Under autocast the product runs in autocast's dtype, as in `torch.nn.functional.linear`.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16.
        weight: `[heads D, H]`, in x's dtype unless autocast is on.
        norm_weight: `[D]`, the weight of the norm.
        bias: `[heads D]` or None.
        eps: as in `rms_norm`.
        offset: likewise.
        casting: likewise.
        backend: overrides the choice of `backends.choose("rms_norm", ...)`.

    Returns:
        `[..., heads, D]` in the dtype that `rms_norm` returns.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that do not match, an eps or offset that is not finite, an unknown casting or
            backend, a call that does not suit `backend="vendor"`.
    """
    check_float("x", x)
    check_float("weight", weight)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape [heads D, H] with x's last dimension H; got {list(weight.shape)} for x "
            f"{list(x.shape)}"
        )
    check_float("norm_weight", norm_weight)
    size = norm_weight.shape[0] if norm_weight.dim() == 1 else 0
    if not size or not weight.shape[0] or weight.shape[0] % size:
        raise ValueError(
            f"norm_weight must have shape [D] with D a divisor of weight's {weight.shape[0]} rows; got "
            f"{list(norm_weight.shape)}"
        )
    if bias is not None:
        check_float("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape [{weight.shape[0]}]; got {list(bias.shape)}")
    where = x.device
    if weight.device != where or norm_weight.device != where or (bias is not None and bias.device != where):
        check_same_device(x=x, weight=weight, norm_weight=norm_weight, bias=bias)
    check_norm_options(eps, offset, casting)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype and not autocasts(x):
            raise ValueError(f"{name} must have x's dtype {x.dtype} without autocast; got {t.dtype}")
    if torch.compiler.is_compiling():
        norm_backends(x, norm_weight, casting, backend)  # raises for an unknown backend
        return linear_rms_norm_reference(x, weight, norm_weight, bias, eps, offset=offset, casting=casting)
    dtype = compute_dtype(x)
    if dtype != x.dtype:
        # Autocast casts x for the linear layer, which would save that copy rather than x.
        return rms_norm(_heads(x, weight, bias, size), norm_weight, eps, offset=offset, casting=casting,
                        backend=backend)  # fmt: skip
    weight, bias = in_dtype(weight, dtype), None if bias is None else in_dtype(bias, dtype)
    chosen, backward = norm_backends(x, norm_weight, casting, backend)
    return _LinearRmsNorm.apply(x, weight, norm_weight, bias, (eps, offset, casting, chosen, backward))
