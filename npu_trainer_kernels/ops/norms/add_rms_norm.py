"""Residual addition and RMS norm in one pass.

    S = m x + residual                      in the promoted dtype, each operation rounded as PyTorch rounds it; m = 1
    y = rms_norm(S, weight)                 `ops/norms/rms_norm.py` has the formulas and the castings

    mode "pre"    returns (y, S). S continues as the residual stream (Llama, Qwen).
         "post"   returns y alone, which continues. Forward does not write S; backward computes it again.

    dresidual = ds of the norm + dS         dS: the incoming gradient of S (mode "pre"), added in the same kernel
    dx = m dresidual                        the same tensor if m = 1

`ops/norms/rms_kernels.py` has the kernels and their torch implementation. Forward saves S (`"pre"`, where it is an
output anyway) or x and residual (`"post"`), weight and one fp32 number per row.
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
    """Computes the op in plain PyTorch, as the two statements of a decoder layer do."""
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
            # The caller used S alone, so the norm adds nothing to the gradient.
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
    """Computes the RMS norm of `multiplier * x + residual`. The module's docstring has the formulas.

    Args:
        x: `[..., H]`, fp32, bf16 or fp16; any strides.
        residual: a tensor of x's shape; its dtype may differ from x's.
        weight: `[H]` or None.
        eps: added to the mean square; not negative.
        offset: added to the weight.
        casting: as in `rms_norm`.
        mode: `"pre"` or `"post"`.
        multiplier: factor of x before the addition. Triton compiles a kernel for each value.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `(y, S)` in mode `"pre"`, y in mode `"post"`. S and y have the promoted dtype of x and residual; with casting
        `"llama"`, y has the promoted dtype of the weight and S.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an eps, offset or multiplier that is not finite, an unknown casting, mode
            or backend, a call that does not suit `backend="vendor"`.
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
