"""The gate of an MLP, a(gate) * up: the activation of every Llama, Qwen, Gemma, GLM and Phi layer (arXiv:2002.05202),
SwiGLU by default.

    y = cast(a(gate)) up        dgate = dy up a'(gate)        dup = dy a(gate)        rounded as `act_fn(gate) * up` is

The kernels compute in fp32; `gates.py` has a, a' and the limits. Forward saves gate and up, and backward computes a
again. If one projection computes both, gate and up may be one tensor, as halves or interleaved; their gradient is then
one tensor, too.

`swiglu_linear` adds the output projection of the MLP, z = y W^T + bias:

    dy = dz W        dgate, dup as above        dW = dz^T y        dbias = sum of dz over rows

A separate projection would save y `[N, I]` for dW, a third of the memory that a layer's MLP saves. Here the kernel of
dgate and dup computes y again and writes it to the memory of dy.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, device, tiling, vendor
from ..support.triton import jit, tl
from .blocks import load, load_fp32, store, tile_of
from .checks import check_float, check_same_device
from .fallback import falls_back
from .gates import Gate, activated, bounded_gate, bounded_up, gate_options, slope, within_limit
from .host import autocasts, compute_dtype, contiguous_like, in_dtype, once_differentiable
from .launch import launch

__all__ = ["swiglu", "swiglu_linear", "swiglu_linear_reference", "swiglu_reference", "unserved"]


def swiglu_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    joined: str | None = None,
) -> torch.Tensor:
    """Computes the op in plain PyTorch."""
    form = gate_options(activation, alpha, limit, offset, joined)
    return form.product(*form.parts(gate, up))


def swiglu_linear_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Computes the op in plain PyTorch; takes the options of `swiglu_reference`."""
    return torch.nn.functional.linear(swiglu_reference(gate, up, **options), weight, bias)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: `[n_rows, n_cols]` in tiles of ROWS whole rows, or of COLS columns of a row. Contiguous tensors are one long
# row. JOINED: 0, gate and up are two tensors; 1, the halves of each row of one tensor; 2, its even and odd columns.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _tile_at(task, blocks, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns (row, first column, remaining columns) of a task; the first two are 64-bit integers."""
    if ROWS > 1:
        return tl.cast(task, tl.int64) * ROWS, tl.cast(0, tl.int64), n_cols
    row = task // blocks
    column = tl.cast(task - row * blocks, tl.int64) * COLS
    return tl.cast(row, tl.int64), column, tl.cast(n_cols - column, tl.int32)


@jit
def _mask(left, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.broadcast_to(tl.arange(0, COLS)[None, :] < left, (ROWS, COLS))


@jit
def _load_both(gate, up, row, column, left, n_cols, gate_stride, up_stride, JOINED: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Loads a tile of the gate and a tile of up."""
    if JOINED == 2:
        # Load once with a wide access and split on the chip: each of two separate accesses would fetch all the memory.
        at = tile_of(gate + 2 * column, row, gate_stride, ROWS, 2 * COLS, 1)
        both = load(at, _mask(2 * left, ROWS, 2 * COLS), MASKED)
        even, odd = tl.split(tl.reshape(both, (ROWS, COLS, 2)))
        return even.to(tl.float32), odd.to(tl.float32)
    mask = _mask(left, ROWS, COLS)
    g = load_fp32(tile_of(gate + column, row, gate_stride, ROWS, COLS, 1), mask, MASKED)
    if JOINED == 1:
        up = gate + n_cols
    u = load_fp32(tile_of(up + column, row, up_stride, ROWS, COLS, 1), mask, MASKED)
    return g, u


@jit
def _store_product(pointers, a, u, mask, MASKED: tl.constexpr):
    store(pointers, a.to(pointers.dtype.element_ty).to(tl.float32) * u, mask, MASKED)


@jit
def _forward_tile(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, ACTIVATION: tl.constexpr,
                  ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, JOINED: tl.constexpr,
                  ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _tile_at(task, blocks, n_cols, ROWS, COLS)
    g, u = _load_both(gate, up, row, column, left, n_cols, gate_stride, up_stride, JOINED, ROWS, COLS, MASKED)
    a, _ = activated(bounded_gate(g, LIMIT), ACTIVATION, ALPHA)
    at = tile_of(y + column, row, n_cols, ROWS, COLS, 1)
    _store_product(at, a, bounded_up(u, LIMIT, OFFSET), _mask(left, ROWS, COLS), MASKED)


@jit(lengths=("n_tasks", "n_whole", "blocks"))
def _forward_kernel(
    gate,  # [n_rows, n_cols] with row stride gate_stride; joined: [n_rows, 2 n_cols]
    up,  # [n_rows, n_cols] with row stride up_stride; not read if joined
    y,  # [n_rows, n_cols] contiguous
    n_tasks,  # number of tiles; with ROWS > 1, number of rows
    n_whole,  # number of tiles without a mask: of one long row all but the last, else all or none; each has ROWS rows
    blocks,  # tiles per row
    n_cols,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    JOINED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EXACT: tl.constexpr,  # COLS divides n_cols
):
    for task in range(tl.program_id(0), n_whole, tl.num_programs(0)):
        _forward_tile(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, ACTIVATION, ALPHA, LIMIT, OFFSET,
                      JOINED, ROWS, COLS, False)  # fmt: skip
    if ROWS > 1:
        # The rows that do not fill a tile, one by one. Start with the last program, which has the fewest tiles.
        last = n_whole * ROWS + tl.num_programs(0) - 1 - tl.program_id(0)
        for row in range(last, n_tasks, tl.num_programs(0)):
            _forward_tile(gate, up, y, row, 1, n_cols, gate_stride, up_stride, ACTIVATION, ALPHA, LIMIT, OFFSET,
                          JOINED, 1, COLS, False)  # fmt: skip
    elif not EXACT:
        for task in range(n_whole + tl.program_id(0), n_tasks, tl.num_programs(0)):
            _forward_tile(gate, up, y, task, blocks, n_cols, gate_stride, up_stride, ACTIVATION, ALPHA, LIMIT, OFFSET,
                          JOINED, 1, COLS, True)  # fmt: skip


@jit
def _backward_tile(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                   ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
                   JOINED: tl.constexpr, STORE_PRODUCT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   MASKED: tl.constexpr):  # fmt: skip
    row, column, left = _tile_at(task, blocks, n_cols, ROWS, COLS)
    mask = _mask(left, ROWS, COLS)
    g_raw, u_raw = _load_both(gate, up, row, column, left, n_cols, gate_stride, up_stride, JOINED, ROWS, COLS, MASKED)
    d = load_fp32(tile_of(dy + column, row, dy_stride, ROWS, COLS, 1), mask, MASKED)
    g = bounded_gate(g_raw, LIMIT)
    u = bounded_up(u_raw, LIMIT, OFFSET)
    a, s = activated(g, ACTIVATION, ALPHA)
    if STORE_PRODUCT:
        _store_product(tile_of(y + column, row, n_cols, ROWS, COLS, 1), a, u, mask, MASKED)
    du = d * a
    if LIMIT > 0:
        du = within_limit(du, u_raw, bounded_up(u_raw, LIMIT, 0), LIMIT, True)
    stride = n_cols
    if JOINED == 1:
        stride = 2 * n_cols
        dup = dgate + n_cols
    if JOINED != 2:
        store(tile_of(dup + column, row, stride, ROWS, COLS, 1), du, mask, MASKED)
    dg = d * u * slope(g, a, s, ACTIVATION, ALPHA)
    if LIMIT > 0:
        dg = within_limit(dg, g_raw, g, LIMIT, False)
    if JOINED != 2:
        store(tile_of(dgate + column, row, stride, ROWS, COLS, 1), dg, mask, MASKED)
    else:
        stored = dgate.dtype.element_ty
        both = tl.reshape(tl.join(dg.to(stored), du.to(stored)), (ROWS, 2 * COLS))
        at = tile_of(dgate + 2 * column, row, 2 * n_cols, ROWS, 2 * COLS, 1)
        store(at, both, _mask(2 * left, ROWS, 2 * COLS), MASKED)


@jit(lengths=("n_tasks", "n_whole", "blocks"))
def _backward_kernel(
    gate,  # [n_rows, n_cols] with row stride gate_stride; joined: [n_rows, 2 n_cols]
    up,  # [n_rows, n_cols] with row stride up_stride; not read if joined
    dy,  # [n_rows, n_cols] with row stride dy_stride
    # With STORE_PRODUCT the next three may be the memory of gate, up and dy: every tile is read before it is written.
    dgate,  # [n_rows, n_cols] contiguous; joined: [n_rows, 2 n_cols]
    dup,  # [n_rows, n_cols] contiguous; not written if joined
    y,  # [n_rows, n_cols] contiguous, written if STORE_PRODUCT
    n_tasks,
    n_whole,
    blocks,
    n_cols,
    gate_stride,
    up_stride,
    dy_stride,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    JOINED: tl.constexpr,
    STORE_PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EXACT: tl.constexpr,
):
    for task in range(tl.program_id(0), n_whole, tl.num_programs(0)):
        _backward_tile(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                       ACTIVATION, ALPHA, LIMIT, OFFSET, JOINED, STORE_PRODUCT, ROWS, COLS, False)  # fmt: skip
    if ROWS > 1:
        last = n_whole * ROWS + tl.num_programs(0) - 1 - tl.program_id(0)
        for row in range(last, n_tasks, tl.num_programs(0)):
            _backward_tile(gate, up, dy, dgate, dup, y, row, 1, n_cols, gate_stride, up_stride, dy_stride,
                           ACTIVATION, ALPHA, LIMIT, OFFSET, JOINED, STORE_PRODUCT, 1, COLS, False)  # fmt: skip
    elif not EXACT:
        for task in range(n_whole + tl.program_id(0), n_tasks, tl.num_programs(0)):
            _backward_tile(gate, up, dy, dgate, dup, y, task, blocks, n_cols, gate_stride, up_stride, dy_stride,
                           ACTIVATION, ALPHA, LIMIT, OFFSET, JOINED, STORE_PRODUCT, 1, COLS, True)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


def _rows(t: torch.Tensor) -> torch.Tensor:
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _launch(kernel: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], form: Gate, **flags: bool) -> None:
    """Launches a kernel that reads `inputs` (any strides) and writes `outputs` (contiguous). All have one shape, which
    must not be empty; a joined tensor of gate and up stands for both."""
    spec = device.spec(inputs[0].device)
    # Without STORE_PRODUCT the last output is passed again in place of y, and does not count as a moved tensor.
    moved = len(inputs) + len(outputs)
    if flags.get("STORE_PRODUCT") is False:
        outputs = [*outputs, outputs[-1]]
    itemsize = outputs[0].dtype.itemsize
    if form.is_swiglu and form.joined is None:
        block = tiling.swiglu_block(itemsize, moved, spec)
    else:
        block = tiling.gate_block(itemsize, moved, int(form.joined == "interleaved"), spec)
    parts = 1 if form.joined is None else 2
    n_cols = inputs[0].shape[-1] // parts
    # One long row, whose length is a multiple of 16 for any number of tokens, so that Triton compiles one kernel.
    if n_cols % 16 == 0 and form.joined != "halves" and all(map(torch.Tensor.is_contiguous, inputs)):
        n_cols = inputs[0].numel() // parts
        rows, cols, blocks = 1, block.size, -(-n_cols // block.size)
        n_tasks, n_whole, exact = blocks, n_cols // cols, False
        strides = [n_cols] * len(inputs)
    else:
        inputs = [_rows(t) for t in inputs]
        tile = tiling.block_of_rows(block.size, n_cols, itemsize, spec)
        rows, cols, blocks = tile.rows, tile.cols, tile.blocks
        n_rows, exact = inputs[0].shape[0], n_cols % cols == 0
        n_tasks = n_rows * blocks
        n_whole = n_tasks // rows if exact else 0
        strides = [t.stride(0) for t in inputs]
    tasks = n_whole + n_tasks - n_whole * rows
    launch(
        kernel, (tiling.programs(tasks, spec),),
        (*inputs, *outputs, n_tasks, n_whole, blocks, n_cols, *strides),
        {**form.flags, **flags, "ROWS": rows, "COLS": cols, "EXACT": exact, **block.options},
    )  # fmt: skip


def _product_like(gate: torch.Tensor, form: Gate) -> torch.Tensor:
    """Allocates y."""
    if form.joined is None:
        return contiguous_like(gate)
    return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)


@falls_back("swiglu")
def _forward(gate: torch.Tensor, up: torch.Tensor | None, form: Gate, backend: str) -> torch.Tensor:
    if backend == "torch":
        return form.product(*form.parts(gate, up))
    if backend == "vendor":
        return vendor.swiglu(gate, up)
    y = _product_like(gate, form)
    if y.numel():
        _launch(_forward_kernel, [gate, gate if up is None else up], [y], form)
    return y


@falls_back("swiglu")
def _backward(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, form: Gate, backend: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (dgate, dup); if gate and up are joined, (the gradient of both, None)."""
    if backend == "torch":
        return _backward_torch(gate, up, dy, form)
    if backend == "vendor":
        return vendor.swiglu_backward(gate, up, dy)
    dgate = contiguous_like(gate)
    dup = None if up is None else contiguous_like(up)
    if dgate.numel():
        _launch_backward(gate, up, dy, dgate, dup, None, form)
    return dgate, dup


@falls_back("swiglu")
def _backward_and_product(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, overwrite: bool, form: Gate, backend: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns dgate, dup and y. y overwrites dy, which must be contiguous; with `overwrite`, dgate and dup overwrite
    gate and up if these are contiguous."""
    if backend == "torch":
        return *_backward_torch(gate, up, dy, form), dy.copy_(form.product(*form.parts(gate, up)))
    if backend == "vendor":
        return *vendor.swiglu_backward(gate, up, dy), dy.copy_(vendor.swiglu(gate, up))
    dgate = _place(gate, overwrite)
    dup = None if up is None else _place(up, overwrite)
    if dgate.numel():
        _launch_backward(gate, up, dy, dgate, dup, dy, form)
    return dgate, dup, dy


def _place(t: torch.Tensor, overwrite: bool) -> torch.Tensor:
    """Returns the memory for t's gradient: t itself with `overwrite`, or a new tensor."""
    return t if overwrite and t.is_contiguous() else contiguous_like(t)


def _launch_backward(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor | None,
    y: torch.Tensor | None, form: Gate,
) -> None:  # fmt: skip
    outputs = [dgate, dgate if dup is None else dup]
    _launch(
        _backward_kernel, [gate, gate if up is None else up, dy], outputs if y is None else [*outputs, y], form,
        STORE_PRODUCT=y is not None,
    )  # fmt: skip


def _backward_torch(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, form: Gate
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dgate, dup = form.gradients(*form.parts(gate, up), dy)
    if up is not None:
        return dgate.to(gate.dtype), dup.to(gate.dtype)
    d = contiguous_like(gate)
    for part, gradient in zip(form.parts(d, None), (dgate, dup), strict=True):
        part.copy_(gradient)
    return d, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, form: Gate, backend: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.form, ctx.backend = form, backend
        return _forward(gate, up, form, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = _backward(gate, up, dy, ctx.form, ctx.backend)
        return dgate if ctx.needs_input_grad[0] else None, dup if ctx.needs_input_grad[1] else None, None, None


def _keeps_graph() -> bool:
    """Whether the running backward retains the graph and may run again. AOTAutograd uses the same private function
    before it overwrites saved tensors; there is no public one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _SwiGluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
                overwrite: bool, form: Gate, backend: str) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(gate, up, weight)
        ctx.overwrite, ctx.form, ctx.backend = overwrite, form, backend
        return torch.nn.functional.linear(_forward(gate, up, form, backend), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        form: Gate = ctx.form
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        rows = dz.reshape(-1, weight.shape[0])
        y = dgate = dup = None
        if needs_gate or needs_up:
            dy = (rows @ weight).view(*gate.shape[:-1], weight.shape[1])
            if needs_weight:
                overwrite = ctx.overwrite and not _keeps_graph()
                dgate, dup, y = _backward_and_product(gate, up, dy, overwrite, form, ctx.backend)
            else:
                dgate, dup = _backward(gate, up, dy, form, ctx.backend)
        elif needs_weight:
            y = _forward(gate, up, form, ctx.backend)
        dw = None if y is None else rows.t() @ y.view(rows.shape[0], weight.shape[1])
        return (
            dgate if needs_gate else None, dup if needs_up else None, dw, rows.sum(0) if needs_bias else None, None,
            None, None,
        )  # fmt: skip


def _check(gate: torch.Tensor, up: torch.Tensor | None, joined: str | None) -> int:
    """Checks gate and up and returns their number of columns."""
    check_float("gate", gate)
    if gate.dim() < 1:
        raise ValueError("gate must have at least one dimension; got []")
    if joined is not None:
        if up is not None:
            raise ValueError(f"up must be None where gate holds both, as joined={joined!r} says")
        if gate.shape[-1] % 2:
            raise ValueError(f"gate must have an even last dimension with joined={joined!r}; got {list(gate.shape)}")
        return gate.shape[-1] // 2
    if up is None:
        raise ValueError("up must be a tensor unless joined says how gate holds both; got None")
    check_float("up", up)
    if up.device != gate.device:
        check_same_device(gate=gate, up=up)
    shape = gate.shape
    if up.shape != shape:
        raise ValueError(f"up must have gate's shape {list(shape)}; got {list(up.shape)}")
    if up.dtype != gate.dtype:
        raise ValueError(f"up must have gate's dtype {gate.dtype}; got {up.dtype}")
    return shape[-1]


def _chosen(gate: torch.Tensor, form: Gate, backend: str | None) -> str:
    """Chooses the backend of a call."""

    def at() -> backends.Shape:
        dtype, tokens, (width,) = backends.of_rows(gate)
        return dtype, tokens, (width // 2 if form.joined else width,)

    chosen = backends.choose("swiglu", gate.device, backend, lambda: vendor.uncovered_swiglu(form), at=at)
    if chosen == "triton" and form.joined == "interleaved" and unserved(gate, gate.shape[-1] // 2, backend) is not None:
        chosen = "torch"
    return chosen


def unserved(like: torch.Tensor, cols: int, backend: str | None) -> str | None:
    """Returns why the kernels do not take interleaved gate and up of `cols` columns each on the device of `like` unless
    a user asks for them; None if they do, or if `torch.compile` traces the call, which uses no kernels."""
    if torch.compiler.is_compiling():
        return None
    spec = device.spec(like.device)
    if not spec.has_buffer or backends.asked_for("swiglu", backend):
        return None
    return tiling.swiglu_unserved(cols, like.dtype.itemsize, spec)


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    joined: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes activation(gate) * up, SwiGLU by default. The module's docstring and `gates.py` have the formulas.

    Args:
        gate: `[..., I]`, fp32, bf16 or fp16; any strides.
        up: a tensor of gate's shape and dtype; None with `joined`.
        activation: the name of a formula in `gates.py`: `"silu"`, `"gelu"` (with the error function), `"gelu_tanh"`
            (its approximation) or another.
        alpha: factor of gate inside silu's sigmoid.
        limit: clamps gate to at most `limit` and up to between -limit and limit, before anything else; or None.
        offset: the number that is added to up.
        joined: gate is `[..., 2 I]` and contains both: `"halves"` has gate before up, `"interleaved"` has gate in the
            even and up in the odd columns. Its gradient is one tensor.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[..., I]`.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that differ, an option that is not allowed, an unknown backend, a call that does
            not suit `backend="vendor"`.
    """
    form = gate_options(activation, alpha, limit, offset, joined)
    _check(gate, up, joined)
    chosen = _chosen(gate, form, backend)
    if chosen == "torch" and torch.compiler.is_compiling():
        return form.product(*form.parts(gate, up))
    return _SwiGlu.apply(gate, up, form, chosen)


def swiglu_linear(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    joined: str | None = None,
    overwrite: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes (activation(gate) * up) W^T + bias without saving the product for backward. The module's docstring has
    the formulas. Under autocast the projection runs in autocast's dtype, as in `torch.nn.functional.linear`.

    Args:
        gate: `[..., I]`, fp32, bf16 or fp16; any strides.
        up: a tensor of gate's shape and dtype; None with `joined`.
        weight: `[H, I]`, in gate's dtype unless autocast is on.
        bias: `[H]` or None.
        activation: as in `swiglu`; likewise the next four.
        alpha: factor of gate inside silu's sigmoid.
        limit: bounds of gate and up.
        offset: the number that is added to up.
        joined: the layout of gate and up in one tensor.
        overwrite: allows backward to write the gradients of gate and up over them. The caller promises that nothing
            else reads them and that the operations that computed them did not save them (tanh does; a linear layer does
            not). Backward overwrites them only if it does not retain the graph.
        backend: overrides the choice of `backends.choose("swiglu", ...)`.

    Returns:
        `[..., H]`.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes or dtypes that do not match, an option that is not allowed, an unknown backend, a call that
            does not suit `backend="vendor"`.
    """
    form = gate_options(activation, alpha, limit, offset, joined)
    size = _check(gate, up, joined)
    check_float("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != size:
        raise ValueError(f"weight must have shape [H, {size}], as gate says; got {list(weight.shape)}")
    if bias is not None:
        check_float("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape [{weight.shape[0]}]; got {list(bias.shape)}")
    if weight.device != gate.device or (bias is not None and bias.device != gate.device):
        check_same_device(gate=gate, weight=weight, bias=bias)
    chosen = _chosen(gate, form, backend)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != gate.dtype and not autocasts(gate):
            raise ValueError(f"{name} must have gate's dtype {gate.dtype} without autocast; got {t.dtype}")
    if chosen == "torch" and torch.compiler.is_compiling():
        return torch.nn.functional.linear(form.product(*form.parts(gate, up)), weight, bias)
    dtype = compute_dtype(gate)
    if dtype != gate.dtype:
        # Autocast casts the product for the projection, which saves the cast copy. Two separate ops do the same.
        return torch.nn.functional.linear(_SwiGlu.apply(gate, up, form, chosen), weight, bias)
    weight, bias = in_dtype(weight, dtype), None if bias is None else in_dtype(bias, dtype)
    return _SwiGluLinear.apply(gate, up, weight, bias, overwrite, form, chosen)
