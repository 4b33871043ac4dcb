"""Triton pieces that several ops share."""

from __future__ import annotations

from .._triton import jit, tl

__all__ = ["load", "load_fp32", "rounded", "row_of_weight", "store", "tile_mask", "tile_of"]


@jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Values as they are stored; zeros where the mask says no, if there is one."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@jit
def load_fp32(pointers, mask, MASKED: tl.constexpr):
    """fp32 values; zeros where the mask says no, if there is one. Whole tiles carry no mask: on an NPU it costs a fill
    of the buffer."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@jit
def store(pointers, value, mask, MASKED: tl.constexpr):
    """Stores `value` in the dtype of what is pointed to, where the mask says so, if there is one."""
    value = value.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


# Of tiles `[ROWS, COLS]` of whole rows, or of column blocks of them.


@jit
def tile_mask(row, n_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements of the tile at `row` exist."""
    rows = row + tl.arange(0, ROWS)[:, None] < n_rows
    cols = tl.arange(0, COLS)[None, :] < width
    return rows & cols


@jit
def tile_of(pointer, row, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers `[ROWS, COLS]`. The row offset is 64-bit: rows x columns may exceed 2^31."""
    start = pointer + tl.cast(row, tl.int64) * stride
    return start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]


@jit
def rounded(value, like, ROUND: tl.constexpr):
    """fp32 value rounded to the dtype of `like`."""
    if ROUND:
        value = value.to(like.dtype.element_ty).to(tl.float32)
    return value


@jit
def row_of_weight(weight, offset, width, COLS: tl.constexpr, MASKED: tl.constexpr, ROUND: tl.constexpr):
    """w' as `[1, COLS]` fp32, rounded to the weight's dtype where the casting adds the offset there."""
    cols = tl.arange(0, COLS)[None, :]
    w = load_fp32(weight + cols, cols < width, MASKED) + offset
    return rounded(w, weight, ROUND)
