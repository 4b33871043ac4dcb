"""RMS norm over the last dimension (arXiv:1910.07467). `casting` selects where a model family rounds.

    rstd = (mean_j x_j^2 + eps)^(-1/2)          n = x rstd          w' = offset + weight          fp32

    casting "llama"   y = w' * n.to(x.dtype)        LlamaRMSNorm; y has the promoted dtype of weight and x
            "gemma"   y = (n * w').to(x.dtype)      Gemma (offset 1), Olmo2 and nn.RMSNorm (offset 0)
            "none"    y = (x * rstd.to(x.dtype)) * w'.to(x.dtype)      both products in x's dtype
    (`CASTINGS` in `ops/norms/rms_kernels.py` has all of them)

    g = dy w'        dx = rstd (g - n mean_j g_j n_j)        dw = sum over rows of dy n

`ops/norms/rms_kernels.py` has the kernels, also in torch. Forward saves x, weight and one fp32 number per row.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import backends, vendor
from ..host import once_differentiable
from .rms_kernels import check_norm, norm_backward, norm_forward, norm_reference

__all__ = ["norm_backends", "rms_norm", "rms_norm_reference"]


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """Computes the op in plain PyTorch, as transformers' modules do."""
    return norm_reference(x, weight, eps, offset, casting)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None,
                options: tuple[float, float, str, str, str]) -> torch.Tensor:  # fmt: skip
        eps, offset, casting, backend, _ = ctx.options = options
        y, _, rstd = norm_forward(x, None, weight, eps, offset, casting, 1.0, False, backend)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        _, offset, casting, _, backend = ctx.options
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx, dw = norm_backward(x, None, weight, rstd, dy, None, offset, casting, 1.0, needs_dx, needs_dw, backend)
        return dx, dw, None


def norm_backends(x: torch.Tensor, weight: torch.Tensor | None, casting: str, backend: str | None) -> tuple[str, str]:
    """Chooses the backends of a norm's forward and backward."""

    def uncovered() -> str | None:
        return vendor.uncovered_norm(x.dtype, None if weight is None else weight.dtype, casting)

    def at() -> backends.Shape:
        return backends.of_rows(x)

    chosen = backends.choose("rms_norm", x.device, backend, uncovered, at=at)
    if chosen != "vendor":
        return chosen, chosen
    # Our backward kernel may follow the vendor's forward, because both save the same rstd.
    backward = backends.choose("rms_norm", x.device, backend, uncovered, lambda: vendor.not_repeatable(weight), at)
    return chosen, backward


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the RMS norm over the last dimension. The module's docstring has the formulas.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16; any strides.
        weight: `[H]`, or None, which returns n rounded to x's dtype.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        casting: one of `CASTINGS`, as `"llama"`, `"gemma"` or `"none"`.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[..., H]` in x's dtype; with casting `"llama"`, in the promoted dtype of weight and x.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an eps or offset that is not finite, an unknown casting or backend, a call
            that does not suit `backend="vendor"`.
    """
    check_norm(x, weight, eps, offset, casting)
    chosen, backward = norm_backends(x, weight, casting, backend)
    if chosen == "torch" and torch.compiler.is_compiling():
        return rms_norm_reference(x, weight, eps, offset=offset, casting=casting)
    return _RmsNorm.apply(x, weight, (eps, offset, casting, chosen, backward))
