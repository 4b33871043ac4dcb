"""Rotary position embedding of queries and keys (arXiv:2104.09864) in the half-rotating form of transformers.

With x = [x1, x2] the halves of a head, and cos, sin `[T, D]` in the same halves,

    y1 = x1 cos1 - x2 sin1         dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2         dx2 = dy2 cos2 - dy1 sin1

so backward is the same kernel with the halves of sin exchanged and negated. fp32 between loads and stores. Nothing is
saved but cos and sin. Heads of which only a part rotates are the caller's to slice.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _vendor, backends, device, tiling
from .._triton import jit, tl
from ._blocks import load_fp32, store
from ._checks import check_float, check_same_device
from ._fallback import falls_back
from ._host import once_differentiable, promoted
from ._launch import launch

__all__ = ["rope", "rope_reference"]


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op in plain PyTorch, operation for operation as transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _mask(left, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    return (tl.arange(0, ROWS)[:, None] < left) & (tl.arange(0, COLS)[None, :] < HALF)


@jit
def _half_heads(pointer, row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers `[ROWS, COLS]` to half a head of successive tokens."""
    return pointer + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, COLS)[None, :]


@jit
def _rotated_halves(x1, x2, c1, c2, s1, s2, INVERSE: tl.constexpr):
    """Both halves of heads, rotated in fp32."""
    if INVERSE:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    return y1, y2


@jit
def _rotate_tile(x, y, cos, sin, batch, token, n_tokens, n_heads, x_batch, x_head, x_token, y_batch, y_head, y_token,
                 cos_batch, cos_token, sin_batch, sin_token, INVERSE: tl.constexpr, TAIL: tl.constexpr,
                 HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """All heads of the tokens at `token`; cos and sin are read once for them."""
    MASKED: tl.constexpr = TAIL or COLS != HALF
    mask = _mask(n_tokens - token, HALF, ROWS, COLS)
    batch = tl.cast(batch, tl.int64)
    token = tl.cast(token, tl.int64)
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    c1 = load_fp32(_half_heads(cos, cos_token, ROWS, COLS), mask, MASKED)
    c2 = load_fp32(_half_heads(cos + HALF, cos_token, ROWS, COLS), mask, MASKED)
    s1 = load_fp32(_half_heads(sin, sin_token, ROWS, COLS), mask, MASKED)
    s2 = load_fp32(_half_heads(sin + HALF, sin_token, ROWS, COLS), mask, MASKED)
    x += batch * x_batch + token * x_token
    y += batch * y_batch + token * y_token
    for head in range(0, n_heads):
        x_at = x + tl.cast(head, tl.int64) * x_head
        y_at = y + tl.cast(head, tl.int64) * y_head
        x1 = load_fp32(_half_heads(x_at, x_token, ROWS, COLS), mask, MASKED)
        x2 = load_fp32(_half_heads(x_at + HALF, x_token, ROWS, COLS), mask, MASKED)
        y1, y2 = _rotated_halves(x1, x2, c1, c2, s1, s2, INVERSE)
        store(_half_heads(y_at, y_token, ROWS, COLS), y1, mask, MASKED)
        store(_half_heads(y_at + HALF, y_token, ROWS, COLS), y2, mask, MASKED)


@jit(lengths=("n_batches", "n_tokens"))
def _rotate_kernel(
    x,  # [n_batches, n_heads, n_tokens, 2 HALF] by strides, the last one 1; so is y
    y,
    cos,  # [n_batches, n_tokens, 2 HALF] by strides; so is sin
    sin,
    n_batches,
    n_tokens,
    n_heads,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    whole = n_tokens // ROWS
    for task in range(tl.program_id(0), n_batches * whole, tl.num_programs(0)):
        batch = task // whole
        _rotate_tile(x, y, cos, sin, batch, (task - batch * whole) * ROWS, n_tokens, n_heads, x_batch, x_head, x_token,
                     y_batch, y_head, y_token, cos_batch, cos_token, sin_batch, sin_token, INVERSE, False, HALF, ROWS,
                     COLS)  # fmt: skip
    if whole * ROWS < n_tokens:
        # The tokens of each sequence that fill no tile; from the last program on, which has the fewest whole tiles.
        for batch in range(tl.num_programs(0) - 1 - tl.program_id(0), n_batches, tl.num_programs(0)):
            _rotate_tile(x, y, cos, sin, batch, whole * ROWS, n_tokens, n_heads, x_batch, x_head, x_token, y_batch,
                         y_head, y_token, cos_batch, cos_token, sin_batch, sin_token, INVERSE, True, HALF, ROWS,
                         COLS)  # fmt: skip


@jit
def _head_group(q, k, q_head, k_head, INDEX: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
                HALF: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Pointers `[GROUP, COLS]` to the first halves of a token's heads in group INDEX, q's groups before k's, and a mask
    of those that there are, which compiles to nothing where all are."""
    Q_GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    cols = tl.arange(0, COLS)[None, :]
    if INDEX < Q_GROUPS:
        heads = tl.cast(INDEX * GROUP + tl.arange(0, GROUP)[:, None], tl.int64)
        return q + heads * q_head + cols, (heads < Q_HEADS) & (cols < HALF)
    else:
        heads = tl.cast((INDEX - Q_GROUPS) * GROUP + tl.arange(0, GROUP)[:, None], tl.int64)
        return k + heads * k_head + cols, (heads < K_HEADS) & (cols < HALF)


@jit
def _rotate_pair_kernel(
    q,  # [n_batches, Q_HEADS, n_tokens, 2 HALF] by strides, the last one 1; so are k, and yq and yk, which are written
    k,
    yq,
    yk,
    cos,  # [n_batches, n_tokens, 2 HALF] by strides; so is sin
    sin,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    yq_batch,
    yq_head,
    yq_token,
    yk_batch,
    yk_head,
    yk_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    PACKED: tl.constexpr,  # the four have strides of 2 HALF between heads
):
    # A program rotates one token of q and k, GROUP heads at a time; AHEAD groups are read before the first is written.
    GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP + (K_HEADS + GROUP - 1) // GROUP
    if PACKED:
        # A model's heads lie one after another. With the constant their addresses are, too, and loads leave earlier.
        q_head = 2 * HALF
        k_head = 2 * HALF
        yq_head = 2 * HALF
        yk_head = 2 * HALF
    token = tl.cast(tl.program_id(0), tl.int64)
    batch = tl.cast(tl.program_id(1), tl.int64)
    q += batch * q_batch + token * q_token
    k += batch * k_batch + token * k_token
    yq += batch * yq_batch + token * yq_token
    yk += batch * yk_batch + token * yk_token
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    cols = tl.broadcast_to(tl.arange(0, COLS)[None, :], (GROUP, COLS))
    halves = tl.tuple([])
    for i in tl.static_range(GROUPS + AHEAD):
        if i == AHEAD:
            # The tables as wide as a group: each thread reads what it needs, 16 bytes at a time. As one row they would
            # be read 2 bytes at a time and pass through shared memory.
            c1 = load_fp32(cos + cols, cols < HALF, COLS != HALF)
            c2 = load_fp32(cos + HALF + cols, cols < HALF, COLS != HALF)
            s1 = load_fp32(sin + cols, cols < HALF, COLS != HALF)
            s2 = load_fp32(sin + HALF + cols, cols < HALF, COLS != HALF)
        if i < GROUPS:
            # They wait in registers as they are in memory: bf16 takes half as many as fp32.
            x, mask = _head_group(q, k, q_head, k_head, i, Q_HEADS, K_HEADS, HALF, GROUP, COLS)
            halves += ((tl.load(x, mask=mask), tl.load(x + HALF, mask=mask)),)
        if i >= AHEAD:
            x1 = halves[i - AHEAD][0].to(tl.float32)
            x2 = halves[i - AHEAD][1].to(tl.float32)
            y1, y2 = _rotated_halves(x1, x2, c1, c2, s1, s2, INVERSE)
            y, mask = _head_group(yq, yk, yq_head, yk_head, i - AHEAD, Q_HEADS, K_HEADS, HALF, GROUP, COLS)
            store(y, y1, mask, True)
            store(y + HALF, y2, mask, True)


def _with_unit_stride(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _table_strides(table: torch.Tensor) -> tuple[int, int]:
    """From sequence to sequence, which may share one, and from token to token."""
    batch, token, _ = table.stride()
    return batch if table.shape[0] > 1 else 0, token


# What CUDA takes in a grid's second dimension.
_MOST_BATCHES = (1 << 16) - 1


def _rotate_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype],
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q and k rotated, each in its dtype of `dtypes`; in one launch where that pays."""
    n_batches, q_heads, n_tokens, size = q.shape
    k_heads = k.shape[1]
    tile = tiling.rope_pair_tile(q_heads, k_heads, size // 2, device.spec(q.device))
    if tile is None or n_batches > _MOST_BATCHES or not q.numel() or not k.numel():
        return _rotate(q, cos, sin, dtypes[0], inverse), _rotate(k, cos, sin, dtypes[1], inverse)
    q, k = _with_unit_stride(q), _with_unit_stride(k)
    yq, yk = torch.empty_like(q, dtype=dtypes[0]), torch.empty_like(k, dtype=dtypes[1])
    launch(
        _rotate_pair_kernel, (n_tokens, n_batches),
        q, k, yq, yk, cos, sin, *q.stride()[:3], *k.stride()[:3], *yq.stride()[:3],
        *yk.stride()[:3], *_table_strides(cos), *_table_strides(sin),
        INVERSE=inverse, HALF=size // 2, Q_HEADS=q_heads, K_HEADS=k_heads, GROUP=tile.heads, COLS=tile.cols,
        AHEAD=tile.ahead, PACKED=all(t.stride(1) == size for t in (q, k, yq, yk)), **tile.options,
    )  # fmt: skip
    return yq, yk


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, inverse: bool) -> torch.Tensor:
    """x rotated, in `dtype`; keeps the order of x's dimensions in memory, as elementwise operations do."""
    x = _with_unit_stride(x)
    y = torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return y
    n_batches, n_heads, n_tokens, size = x.shape
    spec = device.spec(x.device)
    tile = tiling.rope_tile(size // 2, max(x.dtype.itemsize, cos.dtype.itemsize, sin.dtype.itemsize), spec)
    launch(
        _rotate_kernel, (tiling.programs(n_batches * -(-n_tokens // tile.rows), spec),),
        x, y, cos, sin, n_batches, n_tokens, n_heads, *x.stride()[:3], *y.stride()[:3],
        *_table_strides(cos), *_table_strides(sin),
        INVERSE=inverse, HALF=size // 2, ROWS=tile.rows, COLS=tile.cols, **tile.options,
    )  # fmt: skip
    return y


@falls_back("rope")
def _forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "torch":
        return rope_reference(q, k, cos, sin)
    if backend == "vendor":
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _vendor.rotate(q, cos, sin), _vendor.rotate(k, cos, sin)
    table = promoted(cos.dtype, sin.dtype)
    return _rotate_pair(q, k, cos, sin, (promoted(q.dtype, table), promoted(k.dtype, table)), False)


@falls_back("rope")
def _backward(
    cos: torch.Tensor, sin: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype], backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients in `dtypes` of the two that are given."""
    if backend in ("torch", "vendor"):
        rotated = _rotated if backend == "torch" else _vendor.rotate
        c, (s1, s2) = cos.unsqueeze(1), sin.unsqueeze(1).chunk(2, -1)
        inverse = -torch.cat((s2, s1), -1)
        q, k = (
            None if d is None else rotated(d, c, inverse).to(dtype) for d, dtype in zip((dq, dk), dtypes, strict=True)
        )
        return q, k
    if dq is not None and dk is not None:
        return _rotate_pair(dq, dk, cos, sin, dtypes, True)
    q, k = (None if d is None else _rotate(d, cos, sin, dtype, True) for d, dtype in zip((dq, dk), dtypes, strict=True))
    return q, k


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                backend: str) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if backend != "torch":
            cos, sin = _with_unit_stride(cos), _with_unit_stride(sin)
        ctx.save_for_backward(cos, sin)
        ctx.backend, ctx.dtypes = backend, (q.dtype, k.dtype)
        ctx.set_materialize_grads(False)
        return _forward(q, k, cos, sin, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        dq, dk = _backward(cos, sin, dq if needs_q else None, dk if needs_k else None, ctx.dtypes, ctx.backend)
        return dq, dk, None, None, None


def _check_table(name: str, table: torch.Tensor, batch: int, tokens: int, size: int) -> None:
    check_float(name, table)
    if table.shape not in ((1, tokens, size), (batch, tokens, size)):
        raise ValueError(f"{name} must have shape [{batch} or 1, {tokens}, {size}], as q says; got {list(table.shape)}")
    if table.requires_grad:
        raise ValueError(f"{name} must not require a gradient: rope does not differentiate its tables")


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by position; formulas in the module's docstring.

    Args:
        q: `[B, Hq, T, D]`, D even, fp32, bf16 or fp16; any strides.
        k: `[B, Hkv, T, D]`.
        cos: `[B or 1, T, D]`; it must not require a gradient.
        sin: likewise.
        backend: overrides the choice of `backends.choose`.

    Returns:
        q and k rotated, each in the promoted dtype of itself and the tables.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an odd D, tables that require a gradient, an unknown backend, a call that
            backend `"vendor"` was asked to serve by name and does not cover.
    """
    check_float("q", q)
    check_float("k", k)
    if q.dim() != 4 or q.shape[-1] % 2 or not q.shape[-1]:
        raise ValueError(f"q must have shape [B, H, T, D] with D even; got {list(q.shape)}")
    batch, _, tokens, size = q.shape
    if k.dim() != 4 or k.shape != (batch, k.shape[1], tokens, size):
        raise ValueError(f"k must have shape [{batch}, H, {tokens}, {size}], as q says; got {list(k.shape)}")
    _check_table("cos", cos, batch, tokens, size)
    _check_table("sin", sin, batch, tokens, size)
    check_same_device(q=q, k=k, cos=cos, sin=sin)

    def at() -> backends.Shape:
        return q.dtype, batch * tokens, (q.shape[1], k.shape[1], size)

    chosen = backends.choose("rope", q.device, backend, lambda: _vendor.uncovered_rope(q, k, cos, sin), at=at)
    if torch.compiler.is_compiling():
        return rope_reference(q, k, cos, sin)
    return _Rope.apply(q, k, cos, sin, chosen)
