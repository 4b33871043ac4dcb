"""SwiGLU (arXiv:2002.05202): silu(gate) * up, the activation of every Llama and Qwen layer.

    sigma = 1 / (1 + exp(-gate))        a = gate sigma         y = cast(a) up         as `act_fn(gate) * up` rounds
    dgate = dy up (sigma + a (1 - sigma))                      dup = dy a

All in fp32 between loads and stores. Saved for backward: gate and up; sigma is formed again.

`swiglu_linear` is a gated MLP from there to its end, z = y W^T + bias:

    dy = dz W        dgate, dup as above        dW = dz^T y        dbias = sum of dz over rows

On its own the projection would keep y `[N, I]` for dW: a third of what a layer's MLP keeps. Here y is formed again by
the kernel that forms dgate and dup, in the memory of dy.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _vendor, backends, device, tiling
from .._triton import jit, tl
from ._blocks import load_fp32, store
from ._checks import check_float, check_same_device
from ._fallback import falls_back
from ._host import autocasts, compute_dtype, contiguous_like, once_differentiable
from ._launch import launch

__all__ = ["swiglu", "swiglu_linear", "swiglu_linear_reference", "swiglu_reference"]


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The op in plain PyTorch."""
    return torch.nn.functional.silu(gate) * up


def swiglu_linear_reference(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The op in plain PyTorch."""
    return torch.nn.functional.linear(swiglu_reference(gate, up), weight, bias)


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
def _store_product(pointers, a, u, mask, MASKED: tl.constexpr):
    store(pointers, a.to(pointers.dtype.element_ty).to(tl.float32) * u, mask, MASKED)


@jit
def _forward_block(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, BLOCK: tl.constexpr,
                   MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _block_of(task, blocks, n_cols, BLOCK)
    lane = tl.arange(0, BLOCK)
    g = load_fp32(gate + row * gate_stride + column + lane, lane < left, MASKED)
    u = load_fp32(up + row * up_stride + column + lane, lane < left, MASKED)
    _store_product(y + row * n_cols + column + lane, g * tl.sigmoid(g), u, lane < left, MASKED)


@jit(lengths=("n_tasks", "n_whole", "blocks"))
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
def _backward_block(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                    STORE_PRODUCT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _block_of(task, blocks, n_cols, BLOCK)
    lane = tl.arange(0, BLOCK)
    mask = lane < left
    g = load_fp32(gate + row * gate_stride + column + lane, mask, MASKED)
    u = load_fp32(up + row * up_stride + column + lane, mask, MASKED)
    d = load_fp32(dy + row * dy_stride + column + lane, mask, MASKED)
    sigma = tl.sigmoid(g)
    a = g * sigma
    if STORE_PRODUCT:
        _store_product(y + row * n_cols + column + lane, a, u, mask, MASKED)
    store(dup + row * n_cols + column + lane, d * a, mask, MASKED)
    store(dgate + row * n_cols + column + lane, d * u * (sigma + a * (1.0 - sigma)), mask, MASKED)


@jit(lengths=("n_tasks", "n_whole", "blocks"))
def _backward_kernel(
    gate,  # [n_rows, n_cols], row stride given, as are up and dy
    up,
    dy,
    dgate,  # [n_rows, n_cols] contiguous, as are dup and y. With STORE_PRODUCT the same memory as gate, up and dy may
    # be given here: every block is read before it is written.
    dup,
    y,  # written with STORE_PRODUCT
    n_tasks,
    n_whole,
    blocks,
    n_cols,
    gate_stride,
    up_stride,
    dy_stride,
    STORE_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for task in range(tl.program_id(0), n_whole, tl.num_programs(0)):
        _backward_block(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                        STORE_PRODUCT, BLOCK, False)  # fmt: skip
    for task in range(n_whole + tl.program_id(0), n_tasks, tl.num_programs(0)):
        _backward_block(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                        STORE_PRODUCT, BLOCK, True)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


def _rows(t: torch.Tensor) -> torch.Tensor:
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _launch(kernel: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **flags: bool) -> None:
    """Reads `inputs` (any strides) and writes `outputs` (contiguous), all of one shape that is not empty."""
    # As one long row, whose length is then a multiple of 16 whatever the number of tokens: a kernel is compiled once.
    if inputs[0].shape[-1] % 16 == 0 and all(t.is_contiguous() for t in inputs):
        n_rows, n_cols = 1, inputs[0].numel()
        strides = [n_cols] * len(inputs)
    else:
        inputs = [_rows(t) for t in inputs]
        n_rows, n_cols = inputs[0].shape
        strides = [t.stride(0) for t in inputs]
    spec = device.spec(inputs[0].device)
    # The product is among the outputs, and then it counts, or the last output stands in for it.
    moved = len(inputs) + len(outputs)
    if flags.get("STORE_PRODUCT") is False:
        outputs = [*outputs, outputs[-1]]
    block = tiling.swiglu_block(outputs[0].dtype.itemsize, moved, spec)
    blocks = -(-n_cols // block.size)
    n_tasks = n_rows * blocks
    n_whole = n_tasks if n_cols % block.size == 0 else (n_tasks - 1 if n_rows == 1 else 0)
    launch(
        kernel, (tiling.programs(n_tasks, spec),), *inputs, *outputs, n_tasks, n_whole, blocks, n_cols, *strides,
        **flags, BLOCK=block.size, **block.options,
    )  # fmt: skip


@falls_back("swiglu")
def _forward(gate: torch.Tensor, up: torch.Tensor, backend: str) -> torch.Tensor:
    if backend == "torch":
        return swiglu_reference(gate, up)
    if backend == "vendor":
        return _vendor.swiglu(gate, up)
    y = contiguous_like(gate)
    if y.numel():
        _launch(_forward_kernel, [gate, up], [y])
    return y


@falls_back("swiglu")
def _backward(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup)."""
    if backend == "torch":
        return _backward_torch(gate, up, dy)
    if backend == "vendor":
        return _vendor.swiglu_backward(gate, up, dy)
    dgate, dup = contiguous_like(gate), contiguous_like(gate)
    if dgate.numel():
        _launch(_backward_kernel, [gate, up, dy], [dgate, dup], STORE_PRODUCT=False)
    return dgate, dup


@falls_back("swiglu")
def _backward_and_product(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, overwrite: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dgate, dup, y), the last in the memory of dy, which is contiguous; with `overwrite` the others in that of gate
    and up where they are."""
    if backend == "torch":
        return *_backward_torch(gate, up, dy), dy.copy_(swiglu_reference(gate, up))
    if backend == "vendor":
        return *_vendor.swiglu_backward(gate, up, dy), dy.copy_(_vendor.swiglu(gate, up))
    dgate, dup = (t if overwrite and t.is_contiguous() else contiguous_like(t) for t in (gate, up))
    if dgate.numel():
        _launch(_backward_kernel, [gate, up, dy], [dgate, dup, dy], STORE_PRODUCT=True)
    return dgate, dup, dy


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
        return _forward(gate, up, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = _backward(gate, up, dy, ctx.backend)
        return dgate if ctx.needs_input_grad[0] else None, dup if ctx.needs_input_grad[1] else None, None


def _keeps_graph() -> bool:
    """Whether the backward that is running may be run again. Under the name by which AOTAutograd asks before it writes
    into what was saved; there is no public one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _SwiGluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                overwrite: bool, backend: str) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(gate, up, weight)
        ctx.overwrite, ctx.backend = overwrite, backend
        return torch.nn.functional.linear(_forward(gate, up, backend), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        rows = dz.reshape(-1, weight.shape[0])
        y = dgate = dup = None
        if needs_gate or needs_up:
            dy = (rows @ weight).view(gate.shape)
            if needs_weight:
                overwrite = ctx.overwrite and not _keeps_graph()
                dgate, dup, y = _backward_and_product(gate, up, dy, overwrite, ctx.backend)
            else:
                dgate, dup = _backward(gate, up, dy, ctx.backend)
        elif needs_weight:
            y = _forward(gate, up, ctx.backend)
        dw = None if y is None else rows.t() @ y.view(rows.shape[0], weight.shape[1])
        return (
            dgate if needs_gate else None, dup if needs_up else None, dw, rows.sum(0) if needs_bias else None, None,
            None,
        )  # fmt: skip


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    check_float("gate", gate)
    check_float("up", up)
    check_same_device(gate=gate, up=up)
    if gate.dim() < 1:
        raise ValueError("gate must have at least one dimension; got []")
    if up.shape != gate.shape:
        raise ValueError(f"up must have gate's shape {list(gate.shape)}; got {list(up.shape)}")
    if up.dtype != gate.dtype:
        raise ValueError(f"up must have gate's dtype {gate.dtype}; got {up.dtype}")


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
    _check(gate, up)
    chosen = backends.choose("swiglu", gate.device, backend, at=lambda: backends.of_rows(gate))
    if torch.compiler.is_compiling():
        return swiglu_reference(gate, up)
    return _SwiGlu.apply(gate, up, chosen)


def swiglu_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    overwrite: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """(silu(gate) * up) W^T + bias without keeping the product for backward; formulas in the module's docstring. Under
    autocast in its dtype, as `torch.nn.functional.linear`.

    Args:
        gate: `[..., I]`, fp32, bf16 or fp16; any strides.
        up: gate's shape and dtype.
        weight: `[H, I]`, in gate's dtype unless autocast is on.
        bias: `[H]` or None.
        overwrite: nobody but this call reads gate and up, nor did what made them keep them for its backward (as tanh
            does; a linear layer does not), so that their gradients may take their place. That is done only where the
            graph is not kept for another backward.
        backend: overrides the choice of `backends.choose("swiglu", ...)`.

    Returns:
        `[..., H]`.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that do not match, an unknown backend.
    """
    _check(gate, up)
    check_float("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != gate.shape[-1]:
        raise ValueError(f"weight must have shape [H, {gate.shape[-1]}], as gate says; got {list(weight.shape)}")
    if bias is not None:
        check_float("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape [{weight.shape[0]}]; got {list(bias.shape)}")
    check_same_device(gate=gate, weight=weight, bias=bias)
    chosen = backends.choose("swiglu", gate.device, backend, at=lambda: backends.of_rows(gate))
    dtype = compute_dtype(gate)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != gate.dtype and not autocasts(gate):
            raise ValueError(f"{name} must have gate's dtype {gate.dtype} without autocast; got {t.dtype}")
    if torch.compiler.is_compiling():
        return swiglu_linear_reference(gate, up, weight, bias)
    if dtype != gate.dtype:
        # Autocast rounds the product before the projection reads it: there are two tensors, and the second is kept.
        return torch.nn.functional.linear(swiglu(gate, up, backend=chosen), weight, bias)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _SwiGluLinear.apply(gate, up, weight, bias, overwrite, chosen)
