"""From bytes to block sizes: pure integer functions that return frozen dataclasses (no torch, testable anywhere).

What `npu-kernels tune` measured varies the tiles of `TUNABLE` (`Variation`): half or twice the size that the formula
gives, with half or twice the warps. No more can be said there, so that no file, whatever it holds, makes a tile that
does not cover its row.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any, TypeVar

from . import tuned
from .device import GIB, MIB, DeviceSpec
from .tile_limits import tile_limit
from .tuned import Variation

__all__ = [
    "TUNABLE",
    "BorrowingChunks",
    "GradientTile",
    "RowTile",
    "StatisticsTile",
    "accumulating_programs",
    "asked_tiles",
    "block_of_rows",
    "borrowing_chunks",
    "clearing_block",
    "clearing_grid",
    "embedding_tile",
    "expert_gate_tile",
    "expert_rows_tile",
    "expert_sums_tile",
    "forget_tiles",
    "fused_tile",
    "gate_block",
    "general_norm_backward_tile",
    "general_norm_forward_tile",
    "gradient_tile",
    "head_chunk",
    "launch_options",
    "norm_backward_tile",
    "norm_forward_tile",
    "partial_sums_tile",
    "rope_pair_tile",
    "rope_tile",
    "rows_inside",
    "scale_block",
    "shortest_chunk",
    "statistics_tile",
    "swiglu_block",
    "token_block",
    "try_variation",
    "varied",
    "vocabulary_tile",
    "wants_int32_ids",
]


_Tile = TypeVar("_Tile")
TUNABLE: dict[str, Any] = {}
"""The functions whose tiles can be tuned, by name. The last argument of each is the device."""
_asked: set[tuple[str, tuple[Any, ...]]] = set()
_tried: dict[tuple[str, tuple[Any, ...]], Variation] = {}


def _tunable(fn: Callable[..., _Tile], on: Callable[[DeviceSpec], bool] = lambda spec: True) -> Callable[..., _Tile]:
    """`cache`, and beyond it what was measured on the device, where it is one that `on` is true of."""

    @cache
    @wraps(fn)
    def tile(*args: Any) -> Any:
        *sizes, spec = args
        if not on(spec):
            return fn(*args)
        key = fn.__name__, args
        _asked.add(key)
        measured = tuned.variation(fn.__name__, tuple(sizes), spec.name)
        return varied(fn(*args), _tried.get(key, measured))

    TUNABLE[fn.__name__] = tile
    return tile


def _tunable_on_npus(fn: Callable[..., _Tile]) -> Callable[..., _Tile]:
    """As `_tunable`, on NPUs alone: elsewhere these tiles are settled, and `tune` would only take longer."""
    return _tunable(fn, lambda spec: spec.has_buffer)


def varied(tile: Any, by: Variation | None) -> Any:
    """A tile with its rows, size, fold or block halved or doubled, and its warps; None, and what does not exist, stay.

    Whether a larger one fits an NPU, its compiler says.
    """
    if tile is None or by is None:
        return tile
    name = next(name for name in ("rows", "size", "fold", "block") if hasattr(tile, name))
    # A row in halves is on the chip alone: its kernel takes one at a time.
    size = 0 if isinstance(tile, RowTile) and tile.halves else by.size
    changes: dict[str, Any] = {name: max(1, _shifted(getattr(tile, name), size))}
    if "num_warps" in tile.options:
        warps = max(1, min(32, _shifted(tile.options["num_warps"], by.warps)))
        changes["options"] = {**tile.options, "num_warps": warps}
    return replace(tile, **changes)


def _shifted(value: int, by: int) -> int:
    return value << by if by >= 0 else value >> -by


def forget_tiles() -> None:
    """Computes every tunable tile anew when it is next asked for; `asked_tiles` starts anew, too."""
    _asked.clear()
    for function in TUNABLE.values():
        function.cache_clear()


def asked_tiles() -> set[tuple[str, tuple[Any, ...]]]:
    """Which tiles were computed since `forget_tiles`: (function, arguments)."""
    return set(_asked)


def try_variation(name: str, args: tuple[Any, ...], by: Variation | None) -> None:
    """Varies one tile in this process, whatever was measured; None: no longer."""
    if by is None:
        _tried.pop((name, args), None)
    else:
        _tried[name, args] = by
    forget_tiles()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def programs(tasks: int, spec: DeviceSpec, blocks: int = 1) -> int:
    """How many programs to start for `tasks` independent row tiles (of each of `blocks` column blocks): at least 1.

    On Ascend a persistent grid of one program per vector core (a grid beyond 65535 is refused there, and each further
    wave costs a launch); elsewhere the hardware schedules, and one program per tile balances best.
    """
    if spec.has_buffer:
        return max(1, min(tasks, spec.vector_cores // blocks))
    return tasks if tasks > 0 else 1


def launch_options(spec: DeviceSpec, num_warps: int) -> dict[str, int]:
    """Launch options that exist on this kind of device (warps are a CUDA notion)."""
    return {"num_warps": num_warps} if spec.has_warps else {}


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatisticsTile:
    """Blocks of the row-statistics kernel: a step reads `fold * width` contiguous logits of one row and folds them
    into `width` running maxima and sums; `programs` at most are worth starting."""

    fold: int
    width: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)

    def tail(self, n_cols: int, spec: DeviceSpec) -> int:
        """How many times `width` covers the columns that whole steps leave of a row; a power of two, or 0, where Triton
        knows no other sizes."""
        times = _cdiv(n_cols % (self.fold * self.width), self.width)
        return times if spec.has_buffer or not times else next_power_of_2(times)


@dataclass(frozen=True)
class GradientTile:
    """Blocks of the in-place gradient kernel: a step turns `block` contiguous logits of one row into gradients;
    `programs` at most are worth starting."""

    block: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# One program a row, however many there are. The tiles know nothing of rows, so that there is one for all lengths.
_ONE_PER_ROW = 1 << 30


@_tunable_on_npus
def statistics_tile(n_cols: int, itemsize: int, extras: int, spec: DeviceSpec) -> StatisticsTile:
    """Tile of the row-statistics kernel.

    Args:
        n_cols: vocabulary size.
        itemsize: bytes of a logit.
        extras: what the kernel forms beyond the maximum and the sum of exponentials (entropy, mean, squares, argmax),
            and class weights that it reads and a softcap: how many of these.
        spec: the device.
    """
    if spec.has_warps:
        # 1024 lanes over 4 warps: 16-byte loads of bf16; four of them in flight hide HBM latency (H200).
        return StatisticsTile(4, min(1024, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 4))
    if spec.has_buffer:
        # Narrow lanes, a tall fold: accumulators stay small, transfers reach 20 KiB, the lanes are rescaled once per
        # fold. What is formed beyond the maximum and the sum of exponentials needs room of its own.
        largest = tile_limit(f"head._row_statistics_kernel {min(3, extras)} extras", itemsize, spec)
        width = min(256, n_cols)
        return StatisticsTile(_fold(n_cols, width, largest), width, spec.vector_cores)
    # The interpreter: small, so that short rows take several steps and a tail.
    return StatisticsTile(2, min(64, next_power_of_2(n_cols)), 2)


def _fold(n_cols: int, width: int, largest: int) -> int:
    """The fold that reads a row of n_cols in the least time, among those whose tail takes up little room."""

    def costs(fold: int) -> int:
        steps, left = divmod(n_cols, fold * width)
        tail = _cdiv(left, width)
        # Twice the time that `width` logits take: beside its logits a step costs 7; the row's first load is not hidden;
        # a tail costs 24 and, being masked, half as much again (simulated pipes of 910B4: good for ratios).
        return 14 * steps + 2 * fold + (48 + tail if tail else 0)

    # A tail of 8 was there when the limits were swept. A fold of 8 and less has no longer one.
    folds = [f for f in range(1, largest + 1) if n_cols % (f * width) <= 8 * width and f * width <= n_cols]
    return min(folds, key=costs)


@_tunable_on_npus
def gradient_tile(n_cols: int, itemsize: int, has_weights: bool, spec: DeviceSpec) -> GradientTile:
    """Tile of the in-place gradient kernel; arguments as for `statistics_tile`."""
    if spec.has_warps:
        return GradientTile(min(4096, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 16))
    if spec.has_buffer:
        # Blocks of equal size, so that the last one is nearly full.
        kernel = "head._row_gradient_kernel weighted" if has_weights else "head._row_gradient_kernel"
        largest = tile_limit(kernel, itemsize, spec)
        block = _cdiv(_cdiv(n_cols, _cdiv(n_cols, largest)), 64) * 64
        return GradientTile(min(block, largest), spec.vector_cores)
    return GradientTile(min(64, next_power_of_2(n_cols)), 2)


@_tunable
def fused_tile(n_cols: int, itemsize: int, spec: DeviceSpec) -> StatisticsTile | None:
    """Tile of the kernel that forms statistics and gradient of a row at once; None: two kernels do.

    Args:
        n_cols: vocabulary size.
        itemsize: bytes of a logit.
        spec: the device.
    """
    if not spec.has_warps or itemsize == 4:
        # Of fp32 logits more digits are wanted than its fast exponentials keep.
        return None
    # Two programs of 16 warps a multiprocessor: with more than 64 registers a thread there would be but one.
    options = {**launch_options(spec, 16), "maxnreg": 64}
    return StatisticsTile(4, min(4096, next_power_of_2(n_cols)), 2 * spec.vector_cores, options)


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
    chunks = max(1, _cdiv(n_rows, rows))
    return max(1, min(n_rows, _cdiv(_cdiv(n_rows, chunks), multiple) * multiple))


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
    units = _cdiv(n_rows - first, 512)
    chunks = _cdiv(n_rows - first, later)
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


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTile:
    """Blocks of a kernel over rows: a step takes `rows` rows of `cols` columns: whole rows, or one of `blocks` of each,
    or both `halves` of one row. A tile of one row goes in `fold` pieces (`row_sums` of `ops/_blocks.py`)."""

    rows: int
    cols: int
    blocks: int = 1
    options: dict[str, int] = field(default_factory=dict, hash=False)
    fold: int = 1
    halves: bool = False

    @property
    def pieces(self) -> int:
        """In how many pieces a row goes."""
        return self.fold if self.rows == 1 else 1


def accumulating_programs(
    tasks: int, spec: DeviceSpec, blocks: int = 1, options: Mapping[str, int] | None = None
) -> int:
    """How many programs to start for `tasks` row tiles when each program adds up a row of its own over its tiles;
    `options` are the tile's launch options."""
    if spec.has_warps:
        # 16 warps a multiprocessor hide each other's latency; more would only write more partial sums (H200).
        each = max(1, 16 // (options or {}).get("num_warps", 4))
        return max(1, min(tasks, each * spec.vector_cores // blocks))
    return programs(tasks, spec, blocks)


def _row_tile(cols: int, kernel: str, itemsize: int, widest: int, spec: DeviceSpec, widest_halves: int = 0) -> RowTile:
    """Whole rows where at least one fits, else column blocks.

    Args:
        cols: columns of a row.
        kernel: its name among the limits of `tiles.json`.
        itemsize: bytes of the widest element that is read or written.
        widest: on an NPU, the most columns of a tile of one row; it needs less than several, of which the weight is
            broadcast to each.
        spec: the device.
        widest_halves: there, the most columns of a row in two halves, which wait on the chip in their own dtype.
    """
    if spec.has_warps:
        # 8 elements per thread at least (16 bytes of bf16), 64 at most with 16 warps; short rows share a program.
        # The H200 keeps 32768 fp32 columns of a few tensors in the registers of one program, not more.
        blocks = _cdiv(cols, 32768)
        cols = next_power_of_2(_cdiv(cols, blocks))
        # Two rows of 8192 (H200, 16384 x 8192: 132 us, one row 135).
        rows = 2 if cols == 8192 else max(1, 2048 // cols)
        warps = max(1, min(8 if cols <= 8192 else 16, rows * cols // 512))
        return RowTile(rows, cols, blocks, launch_options(spec, warps))
    if spec.has_buffer:
        elements = tile_limit(kernel, itemsize, spec)
        if cols <= max(elements // 2, widest):
            # Of short rows no more than 128: transfers of 8 KiB and more.
            return RowTile(max(1, min(elements // cols, 128)), cols, fold=_pieces(cols))
        if cols <= widest_halves and cols % 2 == 0 and _pieces(cols // 2) > 1:
            return RowTile(1, cols // 2, fold=_pieces(cols // 2), halves=True)
        # Of two rows at least: a sum over one would be a scalar.
        blocks = _cdiv(cols, min(2048, elements // 2))
        cols = _cdiv(_cdiv(cols, blocks), 64) * 64
        return RowTile(max(1, elements // cols), cols, blocks)
    # The interpreter, which knows powers of two only: small, so that a few rows make several tiles and a tail, and a
    # row of more than 128 columns two halves or several blocks.
    if cols == 256 and widest_halves:
        return RowTile(1, 128, fold=4, halves=True)
    if cols > 128:
        return RowTile(2, 64, _cdiv(cols, 64))
    if cols == 128:
        return RowTile(1, 128, fold=4)
    return RowTile(4 if cols <= 64 else 1, next_power_of_2(cols))


def _pieces(cols: int) -> int:
    """In how many pieces of whole 32-byte units a row goes."""
    return next((fold for fold in (8, 4, 2) if cols % (16 * fold) == 0), 1)


@_tunable
def norm_forward_tile(cols: int, itemsize: int, rounds: bool, stores_sum: bool, has_residual: bool,
                      spec: DeviceSpec) -> RowTile:  # fmt: skip
    """Tile of the norms' forward kernel.

    Args:
        cols: hidden size.
        itemsize: bytes of the widest element that is read or written.
        rounds: the normed value is rounded before the weight multiplies it.
        stores_sum: the sum with the residual is written.
        has_residual: there is one.
        spec: the device.
    """
    if spec.has_warps and has_residual and 2048 < cols <= 4096:
        # With four tensors to move, 8 elements a thread (H200, 8192 x 4096: 68 us, with 16 elements 70).
        return RowTile(1, 4096, 1, launch_options(spec, 16))
    # One row: the widest for which no load waits for the vector unit by a fixed event (bishengir-compile 1.2.0, 910B4;
    # of 4096 to 10240 columns, every casting). A row that is wider than two halves may be is read twice, in blocks:
    # with a sum, 8192 columns in four pieces would take 1.04 times as many simulated cycles; without a residual 12288
    # and 16384 columns 1.01 and 1.06 times.
    if stores_sum:
        widest, halves = 5120, 6144 if itemsize == 2 else 0
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec, halves)
    if has_residual:
        widest = 6144 if itemsize == 2 else 8192
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec)
    return _row_tile(cols, "rms_norm._forward_kernel", itemsize, 8192, spec)


@_tunable
def norm_backward_tile(cols: int, itemsize: int, has_residual: bool, has_ds: bool, spec: DeviceSpec) -> RowTile:
    """Tile of the norms' backward kernel.

    Args:
        cols: hidden size.
        itemsize: bytes of the widest element that is read or written.
        has_residual: a residual is read.
        has_ds: a gradient of the sum itself is.
        spec: the device.
    """
    if spec.has_warps and cols <= 32768:
        # 32 elements a thread: two rows or more, so that their loads overlap (H200, hidden 128 to 16384).
        width = next_power_of_2(cols)
        size = 4096 if width <= 1024 else 8192 if width <= 4096 or cols < width <= 8192 else 16384
        return RowTile(max(1, size // width), width, 1, launch_options(spec, size // 1024))
    # As above. 8192 columns in halves would take 1.08 times as many simulated cycles as in blocks, with a gradient of
    # the sum, in four pieces, 1.15 times: there is no room left in which loads overlap.
    halves = 0 if itemsize == 4 else 6144 if has_ds else 5632 if has_residual else 7168
    if has_ds or has_residual:
        return _row_tile(cols, "rms_norm._backward_kernel of a sum", itemsize, 4608, spec, halves)
    return _row_tile(cols, "rms_norm._backward_kernel", itemsize, 5120, spec, halves)


@_tunable
def general_norm_forward_tile(cols: int, itemsize: int, gated: bool, biased: bool, spec: DeviceSpec) -> RowTile:
    """Tile of the forward kernel of norms that are centred, or have a gate or groups.

    Args:
        cols: columns of a group.
        itemsize: bytes of the widest element that is read or written.
        gated: a gate is read.
        biased: a bias is.
        spec: the device.
    """
    if spec.has_warps and gated and 4096 < cols <= 8192:
        # 16 elements a thread: 56 registers for sm_90, and two programs share a multiprocessor (H200, 8192 x 8192: 128
        # us). With two rows of 64 it is 174 and one, and the gate is read in eight steps, each of which waits for the
        # one before (210 us).
        return RowTile(1, 8192, 1, launch_options(spec, 16))
    # As for the norms above.
    if gated:
        return _row_tile(cols, "gated_rms_norm._forward_kernel", itemsize, 6144, spec)
    return _row_tile(cols, "layer_norm._forward_kernel", itemsize, 7168 if biased else 8192, spec)


@_tunable
def general_norm_backward_tile(cols: int, itemsize: int, gated: bool, biased: bool, spec: DeviceSpec) -> RowTile:
    """Tile of their backward kernel; arguments as above."""
    if spec.has_warps and cols <= 32768:
        return norm_backward_tile(cols, itemsize, False, False, spec)
    if gated:
        return _row_tile(cols, "gated_rms_norm._backward_kernel", itemsize, 3072, spec)
    return _row_tile(cols, "layer_norm._backward_kernel", itemsize, 4096 if biased else 5120, spec)


@cache
def partial_sums_tile(cols: int, spec: DeviceSpec) -> RowTile | None:
    """Tile of the kernel that adds up the programs' partial weight gradients; None: PyTorch does."""
    if spec.has_buffer:
        return None
    if spec.has_warps:
        # 128 bytes of each row: short columns, so that there are programs enough.
        return RowTile(64, 32, _cdiv(cols, 32), launch_options(spec, 8))
    return RowTile(2, 16, _cdiv(cols, 16))


# ---------------------------------------------------------------------------------------------------------------------
# SwiGLU, rotary embedding, embedding
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Block of an elementwise kernel: a step takes `size` elements that lie one after another."""

    size: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@cache
def scale_block(spec: DeviceSpec) -> Block | None:
    """Block of the kernel that multiplies by a number unless it is one; None: PyTorch multiplies."""
    if spec.has_buffer:
        return None
    return Block(4096, launch_options(spec, 8)) if spec.has_warps else Block(64)


@cache
def token_block(spec: DeviceSpec) -> Block:
    """Block of the kernel that does a loss's arithmetic on one number a token."""
    if spec.has_buffer:
        # A chunk of the head has a few thousand tokens: one step for each of a few cores. Up to 2816 keep double
        # buffering with every input there is (bishengir-compile, 910B4), but would leave more cores idle.
        return Block(1024)
    return Block(1024, launch_options(spec, 4)) if spec.has_warps else Block(16)


# By the number of tensors.
_GATE_KERNELS = {3: "_forward_kernel", 5: "_backward_kernel", 6: "_backward_kernel with product"}


@_tunable
def swiglu_block(itemsize: int, tensors: int, spec: DeviceSpec) -> Block:
    """Block of SwiGLU's kernels.

    Args:
        itemsize: bytes of an element.
        tensors: that are read and written: 3 forward, 5 backward, 6 where backward forms the product once more.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements a thread: one 16-byte access of bf16 per tensor (H200).
        return Block(2048, launch_options(spec, 8))
    if spec.has_buffer:
        return Block(tile_limit(f"swiglu.{_GATE_KERNELS[tensors]}", itemsize, spec))
    return Block(64)


@_tunable
def gate_block(itemsize: int, tensors: int, by_turns: int, spec: DeviceSpec) -> Block:
    """Block of the same kernels for another gate than SwiGLU's, or for gate and up in one tensor.

    Args:
        itemsize: bytes of an element.
        tensors: as above, where gate and up count as two.
        by_turns: 1 where they lie in one tensor by turns, else 0.
        spec: the device.
    """
    if not spec.has_buffer:
        return swiglu_block(itemsize, tensors, spec)
    variant = "by turns" if by_turns else "any gate"
    return Block(tile_limit(f"swiglu.{_GATE_KERNELS[tensors]} {variant}", itemsize, spec))


def block_of_rows(size: int, cols: int, itemsize: int, spec: DeviceSpec) -> RowTile:
    """How rows that do not lie one after another are cut: into whole rows, or into parts of one, of at most `size`
    elements, and on an NPU into equal ones, so that nothing is computed in vain and no core has more to do.

    Args:
        size: of the block.
        cols: columns of a row.
        itemsize: bytes of an element.
        spec: the device.
    """
    if spec.has_warps:
        return RowTile(1, size, _cdiv(cols, size))
    # Rows lie at multiples of 32 bytes in the buffer. The interpreter knows powers of two only.
    aligned = cols * itemsize % 32 == 0 if spec.has_buffer else next_power_of_2(cols) == cols
    if cols <= size and (aligned or spec.has_buffer):
        return RowTile(min(size // cols, 128) if aligned else 1, cols)
    fewest = _cdiv(cols, size)
    if spec.has_buffer:
        for blocks in range(fewest, 2 * fewest):
            if cols * itemsize % (32 * blocks) == 0:
                return RowTile(1, cols // blocks, blocks)
        size = _cdiv(_cdiv(cols, fewest), 64) * 64
    return RowTile(1, size, fewest)


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts
# ---------------------------------------------------------------------------------------------------------------------


@cache
def expert_rows_tile(cols: int, itemsize: int, spec: DeviceSpec) -> RowTile:
    """Tile of the kernels that bring rows to their experts and back: one row of `cols` columns, or of a block of them.

    Args:
        cols: columns of a row.
        itemsize: bytes of the widest element.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements a thread, as many threads as a row of 1024 wants: not timed yet.
        blocks = _cdiv(cols, 2048)
        cols = next_power_of_2(_cdiv(cols, blocks))
        return RowTile(1, cols, blocks, launch_options(spec, max(1, min(8, cols // 256))))
    if spec.has_buffer:
        blocks = _cdiv(cols, 8192)
        return RowTile(1, cols if blocks == 1 else _cdiv(_cdiv(cols, blocks), 64) * 64, blocks)
    return RowTile(1, min(64, next_power_of_2(cols)), _cdiv(cols, 64))


@cache
def expert_gate_tile(cols: int, itemsize: int, up: int, by_turns: int, biased: int, backward: int,
                     spec: DeviceSpec) -> RowTile:  # fmt: skip
    """Tile of the kernels that gate the rows of experts.

    Args:
        cols: columns of the gate.
        itemsize: bytes of an element.
        up: 1 where there is one, else 0.
        by_turns: 1 where gate and up lie in one row by turns, else 0.
        biased: 1 where each expert has a bias, else 0.
        backward: 1 for the kernel of backward, 0 for that of forward.
        spec: the device.
    """
    if spec.has_warps:
        # Blocks of columns with the fewest lanes in vain, the widest of them; 8 elements a thread: not timed yet.
        width = min((1024, 512, 256), key=lambda each: _cdiv(cols, each) * each)
        width = min(width, next_power_of_2(cols))
        return RowTile(max(1, 2048 // width), width, _cdiv(cols, width), launch_options(spec, 8))
    if spec.has_buffer:
        kernel = "moe_experts._gate_backward_kernel" if backward else "moe_experts._gate_kernel"
        # A bias is one more row of the columns, in fp32, for each part of a row.
        size = tile_limit(kernel + by_turns * " by turns", itemsize, spec) // (1 + biased)
        # Backward sums over each row: several at once, so that the sums are a vector and no scalar is waited for.
        blocks = _even_blocks(cols, size // 4 if backward else size)
        cols = cols if blocks == 1 else _cdiv(_cdiv(cols, blocks), 16) * 16
        return RowTile(max(1, min(size // cols, 128)), cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), _cdiv(cols, 64))


def _even_blocks(cols: int, most: int) -> int:
    """Into how many blocks of at most `most` columns a row is cut: the fewest of one size, if they are not many more
    than the fewest of all."""
    fewest = _cdiv(cols, most)
    even = (n for n in range(fewest, 2 * fewest + 1) if cols % (16 * n) == 0)
    return next(even, fewest)


@cache
def expert_sums_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Tile of the kernel that adds up the rows of each expert: `rows` rows of a block of columns at once."""
    if spec.has_warps:
        # 128 bytes of each row of bf16: programs enough for few experts. Not timed yet.
        return RowTile(64, 64, _cdiv(cols, 64), launch_options(spec, 8))
    if spec.has_buffer:
        blocks = _cdiv(cols, 512)
        return RowTile(16, _cdiv(_cdiv(cols, blocks), 64) * 64 if blocks > 1 else cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), _cdiv(cols, 64))


@cache
def clearing_block(itemsize: int, spec: DeviceSpec) -> Block:
    """Block of zeros that a step of the kernel writes that clears the gradients of experts without rows."""
    if spec.has_warps:
        return Block(8192 // itemsize * 2, launch_options(spec, 8))
    return Block(24 * 1024 // itemsize) if spec.has_buffer else Block(64)


def clearing_grid(groups: int, spec: DeviceSpec) -> tuple[int, int]:
    """Its programs: of which groups, and of which blocks of each. On an NPU all cores go through one group together."""
    if spec.has_buffer:
        return 1, spec.vector_cores
    return groups, 32 if spec.has_warps else 2


@dataclass(frozen=True)
class TokensTile:
    """Tile of the rotary kernel: `rows` tokens by `cols` pairs, and `rest_cols` elements that pass through."""

    rows: int
    cols: int
    rest_cols: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@_tunable_on_npus
def rope_tile(half: int, rest: int, itemsize: int, by_turns: bool, spec: DeviceSpec) -> TokensTile:
    """Tile of the rotary kernel.

    Args:
        half: pairs of a head.
        rest: elements of a head that pass through.
        itemsize: bytes of the widest element.
        by_turns: the pairs lie next to each other in a head.
        spec: the device.
    """
    if spec.has_warps:
        cols = next_power_of_2(half)
        return TokensTile(max(1, 1024 // cols), cols, next_power_of_2(rest), launch_options(spec, 4))
    if spec.has_buffer:
        # Each part of a row lies at a multiple of 32 bytes: of 16 elements where heads have 16 bits, also beside tables
        # of 32. Of elements that pass through there are two buffers, twice, which is a sixth of a pair's. 128 tokens
        # are enough.
        limit = tile_limit(f"rope._rotate_kernel{' by turns' if by_turns else ''}", itemsize, spec)
        rows = 6 * limit // (6 * _cdiv(half, 16) * 16 + _cdiv(rest, 16) * 16)
        return TokensTile(max(1, min(rows, 128)), half, rest)
    return TokensTile(4, next_power_of_2(half), next_power_of_2(rest))


@dataclass(frozen=True)
class HeadsTile:
    """Blocks of the kernel that rotates a token of queries and keys: `heads` at once, half a head of `cols` columns;
    so many blocks are read `ahead`."""

    heads: int
    cols: int
    ahead: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# Of one token in the rotary kernel, where they are unrolled: 256 heads of 128, say.
_MOST_HEAD_GROUPS = 32


@cache
def rope_pair_tile(q_heads: int, k_heads: int, half: int, spec: DeviceSpec) -> HeadsTile | None:
    """Tile of the rotary kernel for queries and keys in one launch; None: one launch for each."""
    if not spec.has_warps:
        return None
    # 8 elements a thread of each half: one 16-byte access of bf16 (H200; 16 and 32 heads at a time were slower, and so
    # were several programs a token).
    cols = next_power_of_2(half)
    heads = min(max(1, 512 // cols), next_power_of_2(max(q_heads, k_heads)))
    if -(-q_heads // heads) - (-k_heads // heads) > _MOST_HEAD_GROUPS:
        return None
    return HeadsTile(heads, cols, 5, launch_options(spec, 2))


def wants_int32_ids(spec: DeviceSpec) -> bool:
    """Whether the embedding's kernels should get 32-bit ids (an NPU's scalar loads), or ids as they come."""
    return not spec.has_warps


@cache
def vocabulary_tile(cols: int, spec: DeviceSpec) -> RowTile | None:
    """Tile of the embedding's backward that writes every row of the weight gradient: `rows` rows of dy at once, for a
    block of `cols` columns; None: rows that occur are written over zeros."""
    if not spec.has_warps:
        return None
    # Whole rows: most ids do not occur, and their zeros leave in one go (H200).
    blocks = _cdiv(cols, 4096)
    cols = next_power_of_2(_cdiv(cols, blocks))
    return RowTile(2, cols, blocks, launch_options(spec, max(1, min(8, cols // 512))))


@_tunable_on_npus
def embedding_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Tile of the embedding's kernels: `rows` rows of `cols` columns, or of a block of them.

    Args:
        cols: columns of the table.
        spec: the device.
    """
    if spec.has_warps:
        blocks = _cdiv(cols, 2048)
        cols = next_power_of_2(_cdiv(cols, blocks))
        return RowTile(max(1, 1024 // cols), cols, blocks, launch_options(spec, 4))
    if spec.has_buffer:
        blocks = _cdiv(cols, 8192)
        cols = cols if blocks == 1 else _cdiv(_cdiv(cols, blocks), 64) * 64
        # 16 bytes an element: a scaled fp32 row, in and out, twice. bf16 makes transfers of 24 KiB of it. Several rows
        # lie at multiples of 32 bytes: others would be brought there one element at a time.
        rows = min(64, spec.on_chip_bytes // (16 * cols)) if cols % 16 == 0 else 1
        return RowTile(max(1, rows), cols, blocks)
    return RowTile(2, min(32, next_power_of_2(cols)), _cdiv(cols, 32))
