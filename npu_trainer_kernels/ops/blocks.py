"""Triton pieces that several ops share."""

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


# Of tiles `[ROWS, COLS]` of whole rows, or of column blocks of them. A tile of one row may be folded: `FOLD` pieces of
# it, one above the other. What belongs to a row is then there `FOLD` times: a sum over a tile of one row would be a
# scalar, and an NPU's scalar unit, which issues all instructions, would wait until the vector unit is done.


@jit
def tile_mask(row, n_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements of the tile at `row` exist; not for folded ones, which are whole rows."""
    rows = row + tl.arange(0, ROWS)[:, None] < n_rows
    cols = tl.arange(0, COLS)[None, :] < width
    return rows & cols


@jit
def tile_of(pointer, row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, FOLD: tl.constexpr):
    """Pointers `[ROWS, COLS]` or `[FOLD, COLS / FOLD]`. The row offset is 64-bit: rows x columns may exceed 2^31."""
    start = pointer + tl.cast(row, tl.int64) * stride
    if FOLD == 1:
        return start + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]
    else:
        PIECE: tl.constexpr = COLS // FOLD
        return start + tl.arange(0, FOLD)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]


@jit
def row_sums(tile, FOLD: tl.constexpr):
    """The sum of each row, `[ROWS]` or `[FOLD]`."""
    sums = tl.sum(tile, axis=1)
    if FOLD > 1:
        sums = tl.sum(tl.broadcast_to(sums[None, :], [FOLD, FOLD]), axis=1)
    return sums


@jit
def load_per_row(pointer, row, n_rows, ROWS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):
    """A number of each row of the tile, fp32 `[ROWS]` or `[FOLD]`."""
    at = row + tl.arange(0, ROWS)
    numbers = load_fp32(pointer + at, at < n_rows, TAIL)
    if FOLD > 1:
        numbers = tl.broadcast_to(numbers, [FOLD])
    return numbers


@jit
def store_per_row(pointer, numbers, row, n_rows, ROWS: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):
    """Stores a number of each row of the tile."""
    at = row + tl.arange(0, ROWS * FOLD)
    if FOLD > 1:
        tl.store(pointer + at, numbers, mask=at < row + 1)
    else:
        store(pointer + at, numbers, at < n_rows, TAIL)


@jit
def rounded(value, like, ROUND: tl.constexpr):
    """fp32 value rounded to the dtype of `like`."""
    if ROUND:
        value = value.to(like.dtype.element_ty).to(tl.float32)
    return value


@jit
def row_of_weight(
    weight, offset, width, COLS: tl.constexpr, FOLD: tl.constexpr, MASKED: tl.constexpr, ROUND: tl.constexpr
):
    """w' as `[1, COLS]` fp32, or folded, rounded to the weight's dtype where the casting adds the offset there."""
    w = load_fp32(tile_of(weight, 0, 0, 1, COLS, FOLD), tile_mask(0, 1, width, 1, COLS), MASKED) + offset
    return rounded(w, weight, ROUND)
