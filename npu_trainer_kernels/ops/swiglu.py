"""SwiGLU (arXiv:2002.05202): silu(gate) * up, the activation of every Llama and Qwen layer.

    sigma = 1 / (1 + exp(-gate))        a = gate sigma         y = cast(a) up         as `act_fn(gate) * up` rounds
    dgate = dy up (sigma + a (1 - sigma))                      dup = dy a

All in fp32 between loads and stores. Saved for backward: gate and up; sigma is formed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .. import backends, device, tiling
from .._triton import jit, tl
from ._blocks import load_fp32, store
from ._checks import check_float, check_same_device
from ._launch import launch

__all__ = ["swiglu", "swiglu_reference"]


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The op in plain PyTorch."""
    return torch.nn.functional.silu(gate) * up


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: `[n_rows, n_cols]` in blocks of one row each; tensors without gaps count as one long row
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _block_of(task, blocks, n_cols, BLOCK: tl.constexpr):
    """(row, first column, columns left) of a task, the first two 64-bit."""
    row = task // blocks
    column = tl.cast(task - row * blocks, tl.int64) * BLOCK
    return tl.cast(row, tl.int64), column, tl.cast(n_cols - column, tl.int32)


@jit
def _forward_block(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, BLOCK: tl.constexpr,
                   MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _block_of(task, blocks, n_cols, BLOCK)
    lane = tl.arange(0, BLOCK)
    g = load_fp32(gate + row * gate_stride + column + lane, lane < left, MASKED)
    u = load_fp32(up + row * up_stride + column + lane, lane < left, MASKED)
    a = (g * tl.sigmoid(g)).to(y.dtype.element_ty).to(tl.float32)
    store(y + row * n_cols + column + lane, a * u, lane < left, MASKED)


@jit
def _forward_kernel(
    gate,  # [n_rows, n_cols], row stride given, as is up
    up,
    y,  # [n_rows, n_cols] contiguous
    n_tasks,  # blocks in all
    n_whole,  # of them without a mask: all but the last of one long row, or all or none
    blocks,  # per row
    n_cols,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
):
    for task in range(tl.program_id(0), n_whole, tl.num_programs(0)):
        _forward_block(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, BLOCK, False)
    for task in range(n_whole + tl.program_id(0), n_tasks, tl.num_programs(0)):
        _forward_block(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, BLOCK, True)


@jit
def _backward_block(gate, up, dy, dgate, dup, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                    BLOCK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _block_of(task, blocks, n_cols, BLOCK)
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    g = load_fp32(gate + row * gate_stride + column + lane, mask, MASKED)
    u = load_fp32(up + row * up_stride + column + lane, mask, MASKED)
    d = load_fp32(dy + row * dy_stride + column + lane, mask, MASKED)
    sigma = tl.sigmoid(g)
    a = g * sigma
    store(dup + row * n_cols + column + lane, d * a, mask, MASKED)
    store(dgate + row * n_cols + column + lane, d * u * (sigma + a * (1.0 - sigma)), mask, MASKED)


@jit
def _backward_kernel(
    gate,  # [n_rows, n_cols], row stride given, as are up and dy
    up,
    dy,
    dgate,  # [n_rows, n_cols] contiguous, as is dup
    dup,
    n_tasks,
    n_whole,
    blocks,
    n_cols,
    gate_stride,
    up_stride,
    dy_stride,
    BLOCK: tl.constexpr,
):
    for task in range(tl.program_id(0), n_whole, tl.num_programs(0)):
        _backward_block(gate, up, dy, dgate, dup, task, blocks, n_cols, gate_stride, up_stride, dy_stride, BLOCK,
                        False)  # fmt: skip
    for task in range(n_whole + tl.program_id(0), n_tasks, tl.num_programs(0)):
        _backward_block(gate, up, dy, dgate, dup, task, blocks, n_cols, gate_stride, up_stride, dy_stride, BLOCK,
                        True)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


def _rows(t: torch.Tensor) -> torch.Tensor:
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _launch(kernel: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Reads `inputs` (any strides) and writes `outputs` (contiguous), all of one shape that is not empty."""
    rows = [t.view(1, -1) for t in inputs] if all(t.is_contiguous() for t in inputs) else [_rows(t) for t in inputs]
    n_rows, n_cols = rows[0].shape
    spec = device.spec(rows[0].device)
    block = tiling.swiglu_block(outputs[0].dtype.itemsize, kernel is _backward_kernel, spec)
    blocks = -(-n_cols // block.size)
    n_tasks = n_rows * blocks
    n_whole = n_tasks if n_cols % block.size == 0 else (n_tasks - 1 if n_rows == 1 else 0)
    launch(
        kernel, (tiling.programs(n_tasks, spec),), *rows, *outputs, n_tasks, n_whole, blocks, n_cols,
        *(t.stride(0) for t in rows), BLOCK=block.size, **block.options,
    )  # fmt: skip


def _backward_torch(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g, d = gate.float(), dy.float()
    sigma = torch.sigmoid(g)
    a = g * sigma
    dup = (d * a).to(up.dtype)
    return d.mul(up).mul_(sigma.add_(a * (1 - sigma))).to(gate.dtype), dup


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        if backend == "torch":
            return swiglu_reference(gate, up)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if y.numel():
            _launch(_forward_kernel, [gate, up], [y])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        gate, up = ctx.saved_tensors
        if ctx.backend == "torch":
            dgate, dup = _backward_torch(gate, up, dy)
        else:
            dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
            if dgate.numel():
                _launch(_backward_kernel, [gate, up, dy], [dgate, dup])
        return dgate if ctx.needs_input_grad[0] else None, dup if ctx.needs_input_grad[1] else None, None


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """silu(gate) * up; formulas in the module's docstring.

    Args:
        gate: any shape, fp32, bf16 or fp16; any strides.
        up: gate's shape and dtype.
        backend: overrides the choice of `backends.choose`.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that differ, an unknown backend.
    """
    check_float("gate", gate)
    check_float("up", up)
    check_same_device(gate=gate, up=up)
    if gate.dim() < 1:
        raise ValueError("gate must have at least one dimension; got []")
    if up.shape != gate.shape:
        raise ValueError(f"up must have gate's shape {list(gate.shape)}; got {list(up.shape)}")
    if up.dtype != gate.dtype:
        raise ValueError(f"up must have gate's dtype {gate.dtype}; got {up.dtype}")
    chosen = backends.choose("swiglu", gate.device, backend)
    if torch.compiler.is_compiling():
        return swiglu_reference(gate, up)
    return _SwiGlu.apply(gate, up, chosen)
