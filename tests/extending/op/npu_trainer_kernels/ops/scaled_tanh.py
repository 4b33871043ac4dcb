"""Tanh of a scale: y stays between -scale and scale, and close to x where x is small.

    t  = tanh(x / scale)
    y  = scale t               in x's shape and dtype; fp32 inside, rounded once
    dx = dy (1 - t^2)

Gemma 2 caps its logits this way (arXiv:2408.00118). Forward saves x.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, device, tiling
from ..support.triton import jit, tl
from .blocks import load_fp32, store
from .checks import check_float, is_number
from .fallback import falls_back
from .host import contiguous_like, once_differentiable
from .launch import launch

__all__ = ["scaled_tanh", "scaled_tanh_reference"]


def scaled_tanh_reference(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes the op in plain PyTorch, operation for operation as models do."""
    return scale * torch.tanh(x / scale)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _tanh(z):
    """Returns tanh(z) for z of either sign; exp has no number above 0, so it does not overflow."""
    e = tl.exp(-2.0 * tl.abs(z))
    # Near 0 the quotient below would lose digits. The series is exact to fp32 there.
    square = z * z
    small = z * (1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397)))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(z) < 0.125, small, tl.where(z < 0.0, -large, large))


@jit(lengths=("n_elements",))
def _forward_kernel(
    x,  # [n_elements] contiguous
    y,  # [n_elements] contiguous
    n_elements,
    scale,
    BLOCK: tl.constexpr,
):
    for start in range(tl.program_id(0) * BLOCK, n_elements, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < n_elements
        store(y + at, scale * _tanh(load_fp32(x + at, mask, True) / scale), mask, True)


@jit(lengths=("n_elements",))
def _backward_kernel(
    x,  # [n_elements] contiguous; likewise dy and dx
    dy,
    dx,
    n_elements,
    scale,
    BLOCK: tl.constexpr,
):
    for start in range(tl.program_id(0) * BLOCK, n_elements, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < n_elements
        t = _tanh(load_fp32(x + at, mask, True) / scale)
        store(dx + at, load_fp32(dy + at, mask, True) * (1.0 - t * t), mask, True)


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def _launch(kernel: Any, tensors: tuple[torch.Tensor, ...], scale: float) -> None:
    n_elements = tensors[0].numel()
    spec = device.spec(tensors[0].device)
    block = tiling.scaled_tanh_block(spec)
    launch(
        kernel, (tiling.programs(-(-n_elements // block.size), spec),), (*tensors, n_elements, scale),
        {"BLOCK": block.size, **block.options},
    )  # fmt: skip


@falls_back("scaled_tanh")
def _forward(x: torch.Tensor, scale: float, backend: str) -> torch.Tensor:
    if backend == "torch":
        return scaled_tanh_reference(x, scale)
    y = contiguous_like(x)
    if y.numel():
        _launch(_forward_kernel, (x.contiguous(), y), scale)
    return y


@falls_back("scaled_tanh")
def _backward(x: torch.Tensor, dy: torch.Tensor, scale: float, backend: str) -> torch.Tensor:
    if backend == "torch":
        t = torch.tanh(x.float() / scale)
        return (dy.float() * (1 - t * t)).to(x.dtype)
    dx = contiguous_like(x)
    if dx.numel():
        _launch(_backward_kernel, (x.contiguous(), dy.contiguous(), dx), scale)
    return dx


class _ScaledTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, backend: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options = scale, backend
        return _forward(x, scale, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return _backward(x, dy, *ctx.options), None, None


def scaled_tanh(x: torch.Tensor, scale: float, *, backend: str | None = None) -> torch.Tensor:
    """Computes scale * tanh(x / scale). The module's docstring has the formulas.

    Args:
        x: fp32, bf16 or fp16, of any shape and strides.
        scale: a positive finite number.
        backend: overrides the choice of `backends.choose`.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: a scale that is not allowed, an unknown backend.
    """
    check_float("x", x)
    if not (is_number(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number; got {scale!r}")
    chosen = backends.choose("scaled_tanh", x.device, backend, at=lambda: backends.of_rows(x))
    if chosen == "torch" and torch.compiler.is_compiling():
        return scaled_tanh_reference(x, scale)
    return _ScaledTanh.apply(x, scale, chosen)
