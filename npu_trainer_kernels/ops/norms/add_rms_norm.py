"""Residual addition and RMS norm in one pass.

    S = m x + residual                      in the promoted dtype, each operation rounded as PyTorch would; m = 1
    y = rms_norm(S, weight)                 formulas and castings in `ops/norms/rms_norm.py`

    mode "pre"    returns (y, S): S goes on as the residual stream (Llama, Qwen).
         "post"   returns y alone: the normed value goes on, S is never written and formed again in backward.

    dresidual = ds of the norm + dS         dS: what arrives for S itself (mode "pre"), added in the same kernel
    dx = m dresidual                        the same tensor where m = 1

Kernels and torch twin: `ops/norms/rms_kernels.py`. Saved for backward: S (`"pre"`, an output anyway) or x and residual
(`"post"`), weight and one fp32 number per row.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import backends, vendor
from ..checks import check_choice, check_float, check_same_device, is_number
from ..host import in_dtype, once_differentiable
from .rms_kernels import check_norm, norm_backward, norm_forward, norm_reference

__all__ = ["MODES", "add_rms_norm", "add_rms_norm_reference"]

MODES = ("pre", "post")


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    mode: str = "pre",
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """The op in plain PyTorch: what a decoder layer's two statements compute."""
    s = (x if multiplier == 1.0 else x * multiplier) + residual
    y = norm_reference(s, weight, eps, offset, casting)
    return (y, s) if mode == "pre" else y


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None,
                options: tuple[float, float, str, str, float, str],
                ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        eps, offset, casting, mode, multiplier, backend = ctx.options = options
        y, s, rstd = norm_forward(x, residual, weight, eps, offset, casting, multiplier, mode == "pre", backend)
        ctx.save_for_backward(x if s is None else s, residual if s is None else None, weight, rstd)
        ctx.dtypes = x.dtype, residual.dtype
        return y if s is None else (y, s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None = None) -> tuple[Any, ...]:
        x, residual, weight, rstd = ctx.saved_tensors
        _, offset, casting, _, m, backend = ctx.options
        needs_x, needs_residual, needs_dw, _ = ctx.needs_input_grad
        needs_sum = needs_x or needs_residual
        if dy is None:
            # The normed value was not used: S is the whole result.
            d, dw = ds, None
        else:
            ds = ds if needs_sum else None
            d, dw = norm_backward(x, residual, weight, rstd, dy, ds, offset, casting, m, needs_sum, needs_dw, backend)
        if d is None:
            return None, None, dw, None
        dtype, residual_dtype = ctx.dtypes
        dx = in_dtype(d if m == 1.0 else d * m, dtype) if needs_x else None
        return dx, in_dtype(d, residual_dtype) if needs_residual else None, dw, None


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    mode: str = "pre",
    multiplier: float = 1.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """RMS norm of multiplier x + residual over the last dimension; formulas in the module's docstring.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16; any strides.
        residual: x's shape; its dtype may differ.
        weight: `[H]` or None.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        casting: `"llama"`, `"gemma"` or `"none"`.
        mode: `"pre"` or `"post"`.
        multiplier: of x, before the addition. Kernels are compiled for it.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `(y, S)` in mode `"pre"`, y in mode `"post"`. S has the promoted dtype of x and residual, and so has y; with
        casting `"llama"` y has the promoted dtype of the weight and S.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an eps, offset or multiplier that is not finite, an unknown casting, mode
            or backend, a call that backend `"vendor"` was asked to serve by name and does not cover.
    """
    check_norm(x, weight, eps, offset, casting)
    check_choice("mode", mode, MODES)
    if not is_number(multiplier):
        raise ValueError(f"multiplier must be a finite number; got {multiplier!r}")
    check_float("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {list(x.shape)}; got {list(residual.shape)}")
    if residual.device != x.device:
        check_same_device(x=x, residual=residual)

    def uncovered() -> str | None:
        return vendor.uncovered_norm(
            x.dtype,
            None if weight is None else weight.dtype,
            casting,
            residual=residual.dtype,
            mode=mode,
            multiplier=multiplier,
        )

    chosen = backends.choose("add_rms_norm", x.device, backend, uncovered, at=lambda: backends.of_rows(x))
    if chosen == "torch" and torch.compiler.is_compiling():
        return add_rms_norm_reference(
            x, residual, weight, eps, offset=offset, casting=casting, mode=mode, multiplier=multiplier
        )
    return _AddRmsNorm.apply(x, residual, weight, (eps, offset, casting, mode, multiplier, chosen))
