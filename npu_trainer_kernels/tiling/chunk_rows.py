"""The number of rows of logits that the LM head has in memory at a time, and the memory that they use."""

import itertools
from dataclasses import dataclass
from functools import cache

from ..device import GIB, MIB, DeviceSpec
from .common import cdiv

__all__ = ["BorrowingChunks", "borrowing_chunks", "head_chunk", "host_rows", "rows_inside", "shortest_chunk"]


def head_chunk(n_rows: int, vocab: int, itemsize: int, spec: DeviceSpec, hidden: int = 0,
               in_place: bool = False, shared: bool = False) -> int:  # fmt: skip
    """Returns the number of rows of a chunk of logits in the LM head.

    Few large products are best: the matrix unit needs a thousand rows and more, and every chunk reads the weight and
    the fp32 weight gradient again. So the budget is in bytes of logits, with a minimum of rows, and the rows are split
    evenly, so that there is no small last chunk.

    Args:
        n_rows: total number of rows.
        vocab: vocabulary size.
        itemsize: bytes of a logit.
        spec: the device.
        hidden: columns of the weight if its gradient is accumulated, else 0.
        in_place: whether kernels change the logits in place; otherwise there are fp32 copies of a chunk.
        shared: whether the vocabulary is sharded over ranks, which communicate once per chunk.
    """
    # A single chunk needs no fp32 weight gradient, half of which uses new memory. On an NPU there is a single chunk if
    # it needs no more memory than several chunks with that half.
    alone = GIB if spec.has_warps else GIB // 2 + 2 * vocab * hidden if spec.has_buffer and in_place else 0
    if n_rows * vocab * itemsize <= alone and n_rows * vocab < 1 << 31:
        return max(1, n_rows)
    # 0.5 GiB on an accelerator. On a CPU products of 256 rows are as fast as longer ones in fp32, those of 400 in bf16
    # (4096 x 512 x 50000, one core with AMX).
    budget, floor, multiple = (48 * MIB, 256, 8) if spec.is_host else (GIB // 2, 1024, 128)
    rows = max(floor, budget // (vocab * itemsize))
    if spec.has_warps:
        # At multiples of 512 rows the products with the weight fill their last wave (H200, hidden 1024 to 4096). More
        # rows accumulate less often. The total is 1.6 GiB, with the half of the fp32 weight gradient that needs new
        # memory and with a last chunk that is an eighth longer.
        room = (16 * GIB // 10 - 2 * vocab * hidden) * 8 // 9 // (vocab * itemsize)
        # With a sharded vocabulary each chunk waits for the statistics of the other ranks, so use few, large chunks.
        most = room if shared else max(2560, 3 * GIB // 10 // (vocab * itemsize))
        return max(1024, min(room, most) // 512 * 512)
    chunks = max(1, cdiv(n_rows, rows))
    return max(1, min(n_rows, cdiv(cdiv(n_rows, chunks), multiple) * multiple))


def host_rows(vocab: int) -> int:
    """Returns the number of rows of logits that torch computes with at a time on the host: their fp32 copy is 1 MiB, as
    much as the second cache of a core holds."""
    return max(1, (1 << 18) // max(1, vocab))


@dataclass(frozen=True)
class BorrowingChunks:
    """Chunks of logits, the first of which borrows the memory of the weight gradient before that is written.

    Attributes:
        stops: the row at which each chunk ends.
        columns: the number of columns of the first chunk's logits in borrowed memory.
    """

    stops: tuple[int, ...]
    columns: int


def rows_inside(vocab: int) -> int:
    """Returns the number of rows of the weight whose fp32 gradient sums use the memory of the two-byte result: half of
    them, rounded down so that the matrix unit's accesses stay aligned."""
    return vocab // 2 // 128 * 128


def borrowing_chunks(n_rows: int, vocab: int, hidden: int, itemsize: int, weight_itemsize: int,
                     spec: DeviceSpec) -> BorrowingChunks | None:  # fmt: skip
    """Returns the chunks of the LM head if its first chunk may borrow memory; None for the chunks of `head_chunk`.

    If all rows fit in one chunk, the weight gradient comes from one product per block of columns: k columns of the
    logits use the memory of rows k and up of the result, so k n_rows itemsize <= (vocab - k) hidden weight_itemsize.
    Otherwise they use the part of the fp32 sums that needs new memory. The fp32 sum for dx uses the first k rows.

    Args:
        n_rows: total number of rows.
        vocab, hidden: rows and columns of the weight.
        itemsize: bytes of a logit.
        weight_itemsize: bytes of an element of the weight's gradient.
        spec: the device.
    """
    if not spec.has_warps or n_rows * vocab * itemsize <= GIB:
        return None
    row = vocab * itemsize
    gradient = vocab * hidden * weight_itemsize
    rest = 0 if weight_itemsize == 4 else (vocab - rows_inside(vocab)) * hidden * 4
    # Besides logits a chunk has at most three copies of its x: the rows, their gradients, and x times a factor.
    columns = gradient // (n_rows * itemsize + hidden * weight_itemsize) // 128 * 128
    own = n_rows * (row - columns * itemsize) + 3 * n_rows * hidden * itemsize
    if own <= max(3 * GIB // 2, rest + 2048 * row):
        return BorrowingChunks((n_rows,), columns) if columns * weight_itemsize >= 4 * n_rows else None
    first, later, columns = _longest_chunks(row, vocab, gradient, hidden * weight_itemsize, itemsize, rest)
    if n_rows <= first or columns < first:
        return None
    # The smallest number of chunks for the other rows, as even as multiples of 512 allow, the longer ones first.
    units = cdiv(n_rows - first, 512)
    chunks = cdiv(n_rows - first, later)
    sizes = [512 * (units // chunks + (i < units % chunks)) for i in range(chunks)]
    return BorrowingChunks((first, *(min(n_rows, first + end) for end in itertools.accumulate(sizes))), columns)


@cache
def _longest_chunks(row: int, vocab: int, gradient: int, gradient_row: int, itemsize: int,
                    rest: int) -> tuple[int, int, int]:  # fmt: skip
    """Returns, for several chunks, the rows of the first chunk, the rows of the later ones, and the columns of the
    first chunk in borrowed memory. Arguments in bytes: `row` of a row of logits, `gradient` of the weight's gradient,
    `gradient_row` of a row of that, `rest` of the fp32 sums in new memory."""

    def columns(rows: int) -> int:
        if not rest:
            return gradient // (rows * itemsize + gradient_row) // 128 * 128
        return min(rows_inside(vocab), rest // (rows * itemsize) // 128 * 128)

    # The total is 1.6 GiB, with no more logits than efficient products need, but with at least 2048 rows: with fewer
    # rows the product waits for its sums. At multiples of 512 rows the products with the weight fill their last wave
    # (H200, hidden 1024 to 4096).
    room = max(2048 * row, min(16 * GIB // 10 - rest, 9 * GIB // 10))
    first = later = room // row // 512 * 512
    while (first + 512) * (row - columns(first + 512) * itemsize) <= room:
        first += 512
    return first, later, columns(first)


def shortest_chunk(rows: int, spec: DeviceSpec) -> int:
    """Returns the minimum length of the last chunk if chunks have `rows` rows; a shorter one joins the one before."""
    return rows // 8 if spec.has_warps else 0
