"""From bytes to block sizes: pure integer functions that return frozen dataclasses (no torch, testable anywhere)."""

from dataclasses import dataclass, field
from functools import cache

from .device import GIB, MIB, DeviceSpec

__all__ = [
    "GradientTile",
    "RowTile",
    "StatisticsTile",
    "accumulating_programs",
    "gradient_tile",
    "head_chunk",
    "launch_options",
    "norm_backward_tile",
    "norm_forward_tile",
    "statistics_tile",
]


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
    if spec.kind == "npu":
        return max(1, min(tasks, spec.vector_cores // blocks))
    return max(1, tasks)


def launch_options(spec: DeviceSpec, num_warps: int) -> dict[str, int]:
    """Launch options that exist on this kind of device (warps are a CUDA notion)."""
    return {"num_warps": num_warps} if spec.kind == "cuda" else {}


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatisticsTile:
    """Blocks of the row-statistics kernel: a step reads `fold * width` contiguous logits of one row and folds them
    into `width` running maxima and sums."""

    fold: int
    width: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class GradientTile:
    """Blocks of the in-place gradient kernel: a step turns `block` contiguous logits of one row into gradients."""

    block: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@cache
def statistics_tile(n_rows: int, n_cols: int, n_sums: int, spec: DeviceSpec) -> StatisticsTile:
    """Tile of the row-statistics kernel.

    Args:
        n_rows: rows of the chunk.
        n_cols: vocabulary size.
        n_sums: running accumulators per lane, the maximum included (2 for lse alone, up to 6).
        spec: the device.
    """
    if spec.kind == "cuda":
        # 1024 lanes x 8 warps: 16-byte loads of bf16; four of them in flight hide HBM latency (H200).
        width, fold = min(1024, next_power_of_2(n_cols)), 4
        return StatisticsTile(fold, width, programs(n_rows, spec), launch_options(spec, 4))
    if spec.kind == "npu":
        width, fold = min(2048, next_power_of_2(n_cols)), 2
        return StatisticsTile(fold, width, programs(n_rows, spec))
    # The interpreter: small, so that short rows take several steps and a tail.
    return StatisticsTile(2, min(64, next_power_of_2(n_cols)), min(n_rows, 2) or 1)


@cache
def gradient_tile(n_rows: int, n_cols: int, spec: DeviceSpec) -> GradientTile:
    """Tile of the in-place gradient kernel; arguments as for `statistics_tile`."""
    if spec.kind == "cuda":
        return GradientTile(min(4096, next_power_of_2(n_cols)), programs(n_rows, spec), launch_options(spec, 8))
    if spec.kind == "npu":
        # 92% of 192 KiB with double buffering; 8192 does not fit (bishengir-compile, 910B4, bf16).
        return GradientTile(min(4096, next_power_of_2(n_cols)), programs(n_rows, spec))
    return GradientTile(min(64, next_power_of_2(n_cols)), min(n_rows, 2) or 1)


@cache
def head_chunk(n_rows: int, vocab: int, itemsize: int, spec: DeviceSpec) -> int:
    """Rows of logits that are alive at once in the LM head engine.

    Few, large products: the matrix unit needs a thousand rows and more, and every chunk re-reads the weight and the
    fp32 weight gradient. So the budget is in bytes of logits, with a floor in rows, and the rows are split evenly so
    that no small last chunk remains.

    Args:
        n_rows: rows in all.
        vocab: vocabulary size.
        itemsize: bytes of a logit.
        spec: the device.
    """
    # 0.5 GiB on an accelerator. On a CPU the chunk should stay near the cache, but 256 rows feed its matrix product.
    budget, floor, multiple = (16 * MIB, 256, 8) if spec.kind == "cpu" else (GIB // 2, 1024, 128)
    rows = max(floor, budget // (vocab * itemsize))
    chunks = max(1, _cdiv(n_rows, rows))
    return max(1, min(n_rows, _cdiv(_cdiv(n_rows, chunks), multiple) * multiple))


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTile:
    """Blocks of a kernel over rows: a step takes `rows` rows of `cols` columns, the whole row or one of `blocks`."""

    rows: int
    cols: int
    blocks: int = 1
    options: dict[str, int] = field(default_factory=dict, hash=False)


def accumulating_programs(tasks: int, spec: DeviceSpec, blocks: int = 1) -> int:
    """How many programs to start for `tasks` row tiles when each program adds up a row of its own over its tiles."""
    if spec.kind == "cuda":
        # Four per multiprocessor hide each other's latency; more would only write more partial sums (H200).
        return max(1, min(tasks, 4 * spec.vector_cores // blocks))
    return programs(tasks, spec, blocks)


def _row_tile(cols: int, per_element: int, per_column: int, spec: DeviceSpec) -> RowTile:
    """Whole rows where at least one fits, else column blocks.

    Args:
        cols: columns of a row.
        per_element: bytes of on-chip memory per element of the tile, buffers of both turns and temporaries together.
        per_column: bytes per column whatever the rows: what a program keeps for its lifetime.
        spec: the device.
    """
    if spec.kind == "cuda":
        # 8 elements per thread at least (16 bytes of bf16), 64 at most with 16 warps; short rows share a program.
        # The H200 keeps 32768 fp32 columns of a few tensors in the registers of one program, not more.
        blocks = _cdiv(cols, 32768)
        cols = next_power_of_2(_cdiv(cols, blocks))
        rows = max(1, 2048 // cols)
        return RowTile(rows, cols, blocks, launch_options(spec, max(1, min(16, rows * cols // 512))))
    if spec.kind == "npu":
        rows = (spec.on_chip_bytes // cols - per_column) // per_element
        if rows >= 1:
            # 64 rows of 512 columns and less are 32 KiB of bf16: transfers reach their full rate from 24 KiB on.
            return RowTile(min(rows, 128), cols)
        blocks = _cdiv(cols, 2048)
        cols = _cdiv(_cdiv(cols, blocks), 64) * 64
        return RowTile(max(1, (spec.on_chip_bytes // cols - per_column) // per_element), cols, blocks)
    # The interpreter, which knows powers of two only: small, so that a few rows make several tiles and a tail, and a
    # row of more than 128 columns several blocks.
    if cols > 128:
        return RowTile(2, 64, _cdiv(cols, 64))
    return RowTile(4 if cols <= 64 else 1, next_power_of_2(cols))


@cache
def norm_forward_tile(cols: int, itemsize: int, extra: int, spec: DeviceSpec) -> RowTile:
    """Tile of the norms' forward kernel.

    Args:
        cols: hidden size.
        itemsize: bytes of the widest element that is read or written.
        extra: tensors read or written beyond x and y: 1 with a residual, 2 where the sum is written too.
        spec: the device.
    """
    # Largest tiles that kept double buffering, 910B4, hidden 512 to 8192, llama casting (bishengir-compile 1.2.0):
    # 16-bit 13.7 bytes an element (x and y twice, two fp32 temporaries less what shares their place), fp32 16.
    per_element = {0: (13, 16), 1: (13, 19), 2: (19, 21)}[extra][itemsize == 4]
    return _row_tile(cols, per_element, 4, spec)


@cache
def norm_backward_tile(cols: int, itemsize: int, spec: DeviceSpec) -> RowTile:
    """Tile of the norms' backward kernel; arguments as above."""
    # As above: x, dy and dx twice and three fp32 temporaries; per column w' and the weight gradient in fp32. A residual
    # or a gradient of the sum changes nothing: they take the place of a temporary.
    return _row_tile(cols, 26 if itemsize == 4 else 23, 8, spec)
