"""Triton functions that several ops share."""

from __future__ import annotations

from ..support.triton import jit, tl

__all__ = [
    "load",
    "load_fp32",
    "load_per_row",
    "rounded",
    "row_of_weight",
    "row_sums",
    "store",
    "store_per_row",
    "tile_mask",
    "tile_of",
]


@jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Loads values in their dtype. With MASKED, masked elements are zero."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@jit
def load_fp32(pointers, mask, MASKED: tl.constexpr):
    """Loads values as fp32. With MASKED, masked elements are zero; on an NPU a mask costs a fill of the buffer."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@jit
def store(pointers, value, mask, MASKED: tl.constexpr):
    """Stores `value` in the dtype of the pointers' elements; with MASKED, only where the mask is true."""
    value = value.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


# The functions below work on tiles `[ROWS, COLS]` of whole rows or of column blocks. A tile of one row may be folded
# into `FOLD` pieces, one above the other; each per-row value then exists `FOLD` times. Otherwise a sum over a tile of
# one row would be a scalar, and an NPU's scalar unit, which issues all instructions, would wait for the vector unit.


@jit
def tile_mask(row, n_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns the mask of the elements of the tile at `row` that exist. A folded tile is a whole row and needs none."""
    rows = row + tl.arange(0, ROWS)[:, None] < n_rows
    cols = tl.arange(0, COLS)[None, :] < width
    return rows & cols


@jit
def tile_of(pointer, row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, FOLD: tl.constexpr):
    """Returns pointers `[ROWS, COLS]` or `[FOLD, COLS / FOLD]`. The row offset has 64 bits: rows x columns may exceed
    2^31."""
    start = pointer + tl.cast(row, tl.int64) * stride
    if FOLD == 1:
        return start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]
    else:
        PIECE: tl.constexpr = COLS // FOLD
        return start + tl.arange(0, FOLD)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]


@jit
def row_sums(tile, FOLD: tl.constexpr):
    """Returns the sum of each row, `[ROWS]` or `[FOLD]`."""
    sums = tl.sum(tile, axis=1)
    if FOLD > 1:
        sums = tl.sum(tl.broadcast_to(sums[None, :], [FOLD, FOLD]), axis=1)
    return sums


@jit
def load_per_row(pointer, row, n_rows, ROWS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):
    """Loads one number for each row of the tile, as fp32 `[ROWS]` or `[FOLD]`."""
    at = row + tl.arange(0, ROWS)
    numbers = load_fp32(pointer + at, at < n_rows, TAIL)
    if FOLD > 1:
        numbers = tl.broadcast_to(numbers, [FOLD])
    return numbers


@jit
def store_per_row(pointer, numbers, row, n_rows, ROWS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):
    """Stores one number for each row of the tile."""
    at = row + tl.arange(0, ROWS * FOLD)
    if FOLD > 1:
        tl.store(pointer + at, numbers, mask=at < row + 1)
    else:
        store(pointer + at, numbers, at < n_rows, TAIL)


@jit
def rounded(value, like, ROUND: tl.constexpr):
    """Returns an fp32 value; with ROUND, rounded to the dtype of `like`."""
    if ROUND:
        value = value.to(like.dtype.element_ty).to(tl.float32)
    return value


@jit
def row_of_weight(
    weight, offset, width, COLS: tl.constexpr, FOLD: tl.constexpr, MASKED: tl.constexpr, ROUND: tl.constexpr
):
    """Returns w' as fp32 `[1, COLS]`, or folded. ROUND: the casting adds the offset in the weight's dtype."""
    w = load_fp32(tile_of(weight, 0, 0, 1, COLS, FOLD), tile_mask(0, 1, width, 1, COLS), MASKED) + offset
    return rounded(w, weight, ROUND)
