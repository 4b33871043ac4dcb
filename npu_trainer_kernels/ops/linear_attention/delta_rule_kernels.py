"""The kernels that walk from chunk to chunk, and their launches; `chunk_states.py` has the formulas.

A program has one row or segment of one head and a block of the columns of its state, which it keeps on the chip. The
columns of a state do not depend on each other, so that no program adds to the result of another one: gradients have
the same bits every time. Of the products of a layer only the two that need the state are here. Those that need the
states of all chunks, which are known then, are batched products outside, where the matrix library is faster than a
kernel that has to keep a state.

Each product of fp32 is three of TF32 ("tf32x3"): with the halves of the numbers that TF32 cuts off it leaves out only
the product of two of these, about 2^-22 of the result. In fp32 itself ("ieee"), which tensor cores do not have, the
compiler keeps so many operands in registers that it spills kilobytes of them for each thread (Triton 3.9 for sm_90).
"""

from __future__ import annotations

from typing import Any

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..blocks import load, store
from ..launch import launch

__all__ = ["launch_backward", "launch_forward"]

_PRECISION = "tf32x3"


@jit
def _chunk_of(pointer, at, KEY: tl.constexpr, LENGTH: tl.constexpr, KEYS: tl.constexpr):
    """Returns `[LENGTH, KEYS]`: the rows of a chunk, zero in columns that do not exist."""
    tokens, keys = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    pointers = pointer + at * (LENGTH * KEY) + tokens[:, None] * KEY + keys[None, :]
    return load(pointers, keys[None, :] < KEY, KEY != KEYS)


@jit
def _transposed_chunk_of(pointer, at, KEY: tl.constexpr, LENGTH: tl.constexpr, KEYS: tl.constexpr):
    """Returns `_chunk_of` as `[KEYS, LENGTH]`."""
    tokens, keys = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    pointers = pointer + at * (LENGTH * KEY) + tokens[None, :] * KEY + keys[:, None]
    return load(pointers, keys[:, None] < KEY, KEY != KEYS)


@jit
def _decay_of(decay, at, KEY: tl.constexpr, KEYS: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Returns the decay of a chunk, `[KEYS, 1]` or a number."""
    if BY_CHANNEL:
        keys = tl.arange(0, KEYS)[:, None]
        return load(decay + at * KEY + keys, keys < KEY, KEY != KEYS)
    else:
        return tl.load(decay + at)


@jit(lengths=("count", "rows"))
def _forward_kernel(
    u,  # [heads, count, LENGTH, VALUE] fp32, contiguous like all tensors
    read,  # [heads, count, LENGTH, KEY], read if DELTA
    written,  # [heads, count, LENGTH, KEY]
    decay,  # [heads, count, KEY if BY_CHANNEL else 1]
    state,  # [heads, rows, KEY, VALUE], read if HAS_STATE
    first,  # [rows] int64, the first chunk of each row
    last,  # [rows] int64, the last one
    entering,  # [heads, count, KEY, VALUE]
    corrected,  # [heads, count, LENGTH, VALUE], written if DELTA
    left,  # [heads, rows, KEY, VALUE]
    count,
    rows,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LENGTH: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    KEYS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (VALUE + COLS - 1) // COLS
    MASKED: tl.constexpr = KEY != KEYS or VALUE % COLS != 0
    # Neighbouring programs have the columns of one state, and read the same chunks.
    pair = tl.program_id(0) // BLOCKS
    head = tl.cast(pair // rows, tl.int64)
    row = pair % rows
    keys = tl.arange(0, KEYS)[:, None]
    cols = tl.program_id(0) % BLOCKS * COLS + tl.arange(0, COLS)[None, :]
    found = (keys < KEY) & (cols < VALUE)
    of_state = keys * VALUE + cols
    of_tokens = tl.arange(0, LENGTH)[:, None] * VALUE + cols
    at_row = tl.cast(pair, tl.int64) * (KEY * VALUE)
    e = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_STATE:
        e = load(state + at_row + of_state, found, MASKED)
    for chunk in range(tl.load(first + row), tl.load(last + row) + 1):
        at = head * count + chunk
        store(entering + at * (KEY * VALUE) + of_state, e, found, MASKED)
        x = load(u + at * (LENGTH * VALUE) + of_tokens, cols < VALUE, VALUE % COLS != 0)
        if DELTA:
            x -= tl.dot(_chunk_of(read, at, KEY, LENGTH, KEYS), e, input_precision=PRECISION)
            store(corrected + at * (LENGTH * VALUE) + of_tokens, x, cols < VALUE, VALUE % COLS != 0)
        e = e * _decay_of(decay, at, KEY, KEYS, BY_CHANNEL)
        e += tl.dot(_transposed_chunk_of(written, at, KEY, LENGTH, KEYS), x, input_precision=PRECISION)
    store(left + at_row + of_state, e, found, MASKED)


@jit(lengths=("count", "rows", "n_sums"))
def _backward_kernel(
    read,  # as in forward; likewise written, decay, first, last and entering
    written,
    decay,
    first,
    last,
    entering,
    d_entering,  # [heads, count, KEY, VALUE]
    d_corrected,  # [heads, count, LENGTH, VALUE]
    d_left,  # [heads, rows, KEY, VALUE], read if HAS_LEFT
    du,  # [heads, count, LENGTH, VALUE]
    d_leaving,  # [heads, count, KEY, VALUE], the gradients of the states that leave the chunks
    d_decay,  # [BLOCKS, heads, count, KEY], the sums over a block's columns
    d_state,  # [heads, rows, KEY, VALUE]
    count,
    rows,
    n_sums,  # heads * count
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LENGTH: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    KEYS: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (VALUE + COLS - 1) // COLS
    MASKED: tl.constexpr = KEY != KEYS or VALUE % COLS != 0
    pair = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    head = tl.cast(pair // rows, tl.int64)
    row = pair % rows
    keys = tl.arange(0, KEYS)[:, None]
    cols = block * COLS + tl.arange(0, COLS)[None, :]
    found = (keys < KEY) & (cols < VALUE)
    of_state = keys * VALUE + cols
    of_tokens = tl.arange(0, LENGTH)[:, None] * VALUE + cols
    at_row = tl.cast(pair, tl.int64) * (KEY * VALUE)
    of_sums = d_decay + tl.cast(block, tl.int64) * n_sums * KEY + tl.arange(0, KEYS)
    d = tl.zeros([KEYS, COLS], tl.float32)
    if HAS_LEFT:
        d = load(d_left + at_row + of_state, found, MASKED)
    begin, end = tl.load(first + row), tl.load(last + row) + 1
    for step in range(0, end - begin):
        at = head * count + end - 1 - step
        store(d_leaving + at * (KEY * VALUE) + of_state, d, found, MASKED)
        e = load(entering + at * (KEY * VALUE) + of_state, found, MASKED)
        store(of_sums + at * KEY, tl.sum(e * d, axis=1), tl.arange(0, KEYS) < KEY, KEY != KEYS)
        x = load(d_corrected + at * (LENGTH * VALUE) + of_tokens, cols < VALUE, VALUE % COLS != 0)
        x += tl.dot(_chunk_of(written, at, KEY, LENGTH, KEYS), d, input_precision=PRECISION)
        store(du + at * (LENGTH * VALUE) + of_tokens, x, cols < VALUE, VALUE % COLS != 0)
        d = d * _decay_of(decay, at, KEY, KEYS, BY_CHANNEL)
        d += load(d_entering + at * (KEY * VALUE) + of_state, found, MASKED)
        if DELTA:
            d -= tl.dot(_transposed_chunk_of(read, at, KEY, LENGTH, KEYS), x, input_precision=PRECISION)
    store(d_state + at_row + of_state, d, found, MASKED)


def _constants(
    u: torch.Tensor, written: torch.Tensor, decay: torch.Tensor, read: torch.Tensor | None
) -> tuple[int, dict[str, Any]]:
    """Returns the number of blocks of columns, and the constants of both kernels."""
    key, value = written.shape[-1], u.shape[-1]
    tile = tiling.state_tile(key, value, device.spec(u.device))
    return tile.blocks, {
        "KEY": key, "VALUE": value, "LENGTH": u.shape[-2], "DELTA": read is not None,
        "BY_CHANNEL": decay.shape[-1] > 1, "KEYS": tile.keys, "COLS": tile.cols, "PRECISION": _PRECISION,
        **tile.options,
    }  # fmt: skip


def launch_forward(
    u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None,
    first: torch.Tensor, last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the states that enter the chunks, the corrected u, which is u itself without `read`, and the states that
    the rows leave.

    Args:
        u: `[..., count, C, Dv]` fp32, of any heads.
        read, written: `[..., count, C, Dk]`; read may be None.
        decay: `[..., count, Dk]`, or 1 for Dk.
        state: `[..., rows, Dk, Dv]`, or None for zeros.
        first, last: `[rows]` int64, the first and the last chunk of each row.
    """
    u, written, decay = u.contiguous(), written.contiguous(), decay.contiguous()
    blocks, constants = _constants(u, written, decay, read)
    *heads, count, _, value = u.shape
    rows, key = first.shape[0], written.shape[-1]
    entering, left = u.new_empty(*heads, count, key, value), u.new_empty(*heads, rows, key, value)
    corrected = u if read is None else torch.empty_like(u)
    launch(
        _forward_kernel, (left.shape[:-2].numel() * blocks,),
        (u, u if read is None else read.contiguous(), written, decay, u if state is None else state.contiguous(),
         first, last, entering, corrected, left, count, rows),
        {**constants, "HAS_STATE": state is not None},
    )  # fmt: skip
    return entering, corrected, left


def launch_backward(
    read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, entering: torch.Tensor,
    d_entering: torch.Tensor, d_corrected: torch.Tensor, d_left: torch.Tensor | None, first: torch.Tensor,
    last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of u, of the states that leave the chunks, of decay and of the states before the rows.

    Args:
        read, written, decay, first, last: as in forward.
        entering: the states that enter the chunks, as forward returned them.
        d_entering, d_corrected, d_left: the gradients of forward's results; None for zeros.
    """
    written, decay, d_entering, d_corrected = (t.contiguous() for t in (written, decay, d_entering, d_corrected))
    blocks, constants = _constants(d_corrected, written, decay, read)
    *heads, count, key, value = entering.shape
    rows = first.shape[0]
    du, d_leaving = torch.empty_like(d_corrected), torch.empty_like(entering)
    sums, d_state = du.new_empty(blocks, *heads, count, key), du.new_empty(*heads, rows, key, value)
    launch(
        _backward_kernel, (d_state.shape[:-2].numel() * blocks,),
        (du if read is None else read.contiguous(), written, decay, first, last, entering, d_entering, d_corrected,
         du if d_left is None else d_left.contiguous(), du, d_leaving, sums, d_state, count, rows,
         sums.shape[1:-1].numel()),
        {**constants, "HAS_LEFT": d_left is not None},
    )  # fmt: skip
    d_decay = sums.sum(0) if decay.shape[-1] == key else sums.sum((0, -1)).unsqueeze(-1)
    return du, d_leaving, d_decay, d_state
