"""How many rows of logits are alive at once in the LM head, and where they lie."""

import itertools
from dataclasses import dataclass
from functools import cache

from ..device import GIB, MIB, DeviceSpec
from .common import cdiv

__all__ = ["BorrowingChunks", "borrowing_chunks", "head_chunk", "rows_inside", "shortest_chunk"]


def head_chunk(n_rows: int, vocab: int, itemsize: int, spec: DeviceSpec, hidden: int = 0,
               in_place: bool = False, shared: bool = False) -> int:  # fmt: skip
    """Rows of logits that are alive at once in the LM head engine.

    Few, large products: the matrix unit needs a thousand rows and more, and every chunk re-reads the weight and the
    fp32 weight gradient. So the budget is in bytes of logits, with a floor in rows, and the rows are split evenly so
    that no small last chunk remains.

    Args:
        n_rows: rows in all.
        vocab: vocabulary size.
        itemsize: bytes of a logit.
        spec: the device.
        hidden: columns of the weight, where its gradient is accumulated, else 0.
        in_place: kernels do what is done to the logits; others make fp32 copies of a chunk.
        shared: ranks share the vocabulary out, and meet once in each chunk.
    """
    # One chunk needs no fp32 weight gradient beside it, half of which takes memory of its own: on an NPU one chunk does
    # where it is no more than several would take with that.
    alone = GIB if spec.has_warps else GIB // 2 + 2 * vocab * hidden if spec.has_buffer and in_place else 0
    if n_rows * vocab * itemsize <= alone and n_rows * vocab < 1 << 31:
        return max(1, n_rows)
    # 0.5 GiB on an accelerator. On a CPU a thousand rows feed the matrix product: chunks of 64, 256 and 512 rows took
    # 3.5, 1.7 and 1.25 times as long as 1024 (2 cores, 4096 x 256 x 8191, fp32, forward and backward).
    budget, floor, multiple = (32 * MIB, 1024, 8) if spec.is_host else (GIB // 2, 1024, 128)
    rows = max(floor, budget // (vocab * itemsize))
    if spec.has_warps:
        # At multiples of 512 rows the products with the weight fill their last wave (H200, hidden 1024 to 4096). More
        # rows accumulate less often; 1.6 GiB in all with the half of the fp32 weight gradient that needs memory of its
        # own, and with a last chunk that is an eighth longer.
        room = (16 * GIB // 10 - 2 * vocab * hidden) * 8 // 9 // (vocab * itemsize)
        # A chunk of a slice waits for the other ranks' statistics of it: as few as these bytes allow.
        most = room if shared else max(2560, 3 * GIB // 10 // (vocab * itemsize))
        return max(1024, min(room, most) // 512 * 512)
    chunks = max(1, cdiv(n_rows, rows))
    return max(1, min(n_rows, cdiv(cdiv(n_rows, chunks), multiple) * multiple))


@dataclass(frozen=True)
class BorrowingChunks:
    """Chunks of logits of which the first lies partly in memory that the weight gradient is not yet written to.

    Attributes:
        stops: the row at which each chunk ends.
        columns: of the first chunk's logits, how many lie there.
    """

    stops: tuple[int, ...]
    columns: int


def rows_inside(vocab: int) -> int:
    """Rows of the weight whose fp32 sums of gradients lie in the memory of the two-byte result: half of them, down to
    where the matrix unit's accesses stay aligned."""
    return vocab // 2 // 128 * 128


def borrowing_chunks(n_rows: int, vocab: int, hidden: int, itemsize: int, weight_itemsize: int,
                     spec: DeviceSpec) -> BorrowingChunks | None:  # fmt: skip
    """How the LM head's rows are cut where its first chunk may borrow; None: as `head_chunk` says.

    If all rows fit one chunk, the weight gradient comes from one product per block of columns: k columns of the logits
    lie where rows k and up of the result will be written, so k n_rows itemsize <= (vocab - k) hidden weight_itemsize.
    Otherwise they lie in that part of the fp32 sums that needs memory of its own. The fp32 sum for the chunk's dx lies
    where the first k rows will be written.

    Args:
        n_rows: rows in all.
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
    # Three copies of a chunk's x at most lie beside its logits: rows of it, their gradients, and x times a factor.
    columns = gradient // (n_rows * itemsize + hidden * weight_itemsize) // 128 * 128
    own = n_rows * (row - columns * itemsize) + 3 * n_rows * hidden * itemsize
    if own <= max(3 * GIB // 2, rest + 2048 * row):
        return BorrowingChunks((n_rows,), columns) if columns * weight_itemsize >= 4 * n_rows else None
    first, later, columns = _longest_chunks(row, vocab, gradient, hidden * weight_itemsize, itemsize, rest)
    if n_rows <= first or columns < first:
        return None
    # As many chunks as the rest needs, as even as multiples of 512 allow, the longer ones first.
    units = cdiv(n_rows - first, 512)
    chunks = cdiv(n_rows - first, later)
    sizes = [512 * (units // chunks + (i < units % chunks)) for i in range(chunks)]
    return BorrowingChunks((first, *(min(n_rows, first + end) for end in itertools.accumulate(sizes))), columns)


@cache
def _longest_chunks(row: int, vocab: int, gradient: int, gradient_row: int, itemsize: int,
                    rest: int) -> tuple[int, int, int]:  # fmt: skip
    """(rows of the first of several chunks, of the later ones, columns of the first that lie in borrowed memory).
    Bytes: `row` of a row of logits, `gradient` of the weight's gradient, `gradient_row` of a row of it, `rest` of the
    fp32 sums beside it."""

    def columns(rows: int) -> int:
        if not rest:
            return gradient // (rows * itemsize + gradient_row) // 128 * 128
        return min(rows_inside(vocab), rest // (rows * itemsize) // 128 * 128)

    # 1.6 GiB in all, and no more logits than make the products efficient, but no fewer than 2048 rows either: below
    # that the product waits for its sums. At multiples of 512 rows the products with the weight fill their last wave
    # (H200, hidden 1024 to 4096).
    room = max(2048 * row, min(16 * GIB // 10 - rest, 9 * GIB // 10))
    first = later = room // row // 512 * 512
    while (first + 512) * (row - columns(first + 512) * itemsize) <= room:
        first += 512
    return first, later, columns(first)


def shortest_chunk(rows: int, spec: DeviceSpec) -> int:
    """A last chunk that is shorter than this joins the one before, where chunks have `rows` rows."""
    return rows // 8 if spec.has_warps else 0
