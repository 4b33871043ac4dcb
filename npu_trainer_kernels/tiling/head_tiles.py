"""Tiles of the LM head and of its losses."""

from dataclasses import dataclass, field
from functools import cache

from ..device import DeviceSpec
from .common import Block, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable, tunable_on_npus

__all__ = [
    "GradientTile",
    "StatisticsTile",
    "divergence_tile",
    "divergence_unserved",
    "fused_tile",
    "gradient_tile",
    "scale_block",
    "statistics_tile",
    "token_block",
]


@dataclass(frozen=True)
class StatisticsTile:
    """Tile of the row-statistics kernel: a step reads `fold * width` contiguous logits of one row and folds them into
    `width` running maxima and sums. `programs` is the maximum useful number of programs."""

    fold: int
    width: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)

    def tail(self, n_cols: int, spec: DeviceSpec) -> int:
        """Returns how many times `width` covers the columns that remain after whole steps, rounded up to a power of two
        where Triton requires that."""
        times = cdiv(n_cols % (self.fold * self.width), self.width)
        return times if spec.has_buffer or not times else next_power_of_2(times)


@dataclass(frozen=True)
class GradientTile:
    """Tile of the in-place gradient kernel: a step overwrites `block` contiguous logits of one row with gradients.
    `programs` is the maximum useful number of programs."""

    block: int
    programs: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# One program per row. Tiles do not depend on the number of rows, so one tile is used for all batch sizes.
_ONE_PER_ROW = 1 << 30


@tunable_on_npus
def statistics_tile(n_cols: int, itemsize: int, extras: int, spec: DeviceSpec) -> StatisticsTile:
    """Returns the tile of the row-statistics kernel.

    Args:
        n_cols: vocabulary size.
        itemsize: bytes of a logit.
        extras: the number of additional statistics (entropy, mean, squares, argmax), class weights and softcap.
        spec: the device.
    """
    if spec.has_warps:
        # 1024 lanes over 4 warps make 16-byte loads of bf16; four loads in flight hide HBM latency (H200).
        return StatisticsTile(4, min(1024, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 4))
    if spec.has_buffer:
        # With few lanes and a large fold the accumulators are small, transfers reach 20 KiB, and the lanes are rescaled
        # once per fold. Additional statistics need additional memory.
        largest = tile_limit(f"head._row_statistics_kernel {min(3, extras)} extras", itemsize, spec)
        width = min(256, n_cols)
        return StatisticsTile(_fold(n_cols, width, largest), width, spec.vector_cores)
    # In the interpreter tiles are small, so that short rows take several steps and a tail.
    return StatisticsTile(2, min(64, next_power_of_2(n_cols)), 2)


def _fold(n_cols: int, width: int, largest: int) -> int:
    """Returns the fold that reads a row of n_cols in the least time, among those whose tail needs little memory."""

    def costs(fold: int) -> int:
        steps, left = divmod(n_cols, fold * width)
        tail = cdiv(left, width)
        # Twice the time, in units of the time for `width` logits: a step has a fixed cost of 7, the first load of a row
        # is not hidden, and a tail costs 24 and, being masked, half as much again per logit (simulated pipes of 910B4,
        # valid for ratios).
        return 14 * steps + 2 * fold + (48 + tail if tail else 0)

    # The limits were swept with a tail of 8. A fold of 8 or less has no longer tail.
    folds = [f for f in range(1, largest + 1) if n_cols % (f * width) <= 8 * width and f * width <= n_cols]
    return min(folds, key=costs)


@tunable_on_npus
def gradient_tile(n_cols: int, itemsize: int, has_weights: bool, spec: DeviceSpec) -> GradientTile:
    """Returns the tile of the in-place gradient kernel. The arguments are those of `statistics_tile`."""
    if spec.has_warps:
        return GradientTile(min(4096, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 16))
    if spec.has_buffer:
        # Blocks have nearly equal size, so that the last one is nearly full.
        kernel = "head._row_gradient_kernel weighted" if has_weights else "head._row_gradient_kernel"
        largest = tile_limit(kernel, itemsize, spec)
        block = cdiv(cdiv(n_cols, cdiv(n_cols, largest)), 64) * 64
        return GradientTile(min(block, largest), spec.vector_cores)
    return GradientTile(min(64, next_power_of_2(n_cols)), 2)


@tunable_on_npus
def divergence_tile(n_cols: int, itemsize: int, spec: DeviceSpec) -> GradientTile:
    """Returns the tile of the kernel that reads a student's and a teacher's logits.

    Args:
        n_cols: vocabulary size.
        itemsize: bytes of a logit, of the wider of both.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements of each row per thread; not timed.
        return GradientTile(min(2048, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 8))
    if spec.has_buffer:
        # 96 bytes an element: two rows and a gradient in two buffers each, two sums, and temporaries. The compiler
        # plans 144 to 186 of 192 KiB, double-buffered and without fixed waits (bishengir-compile, 910B4); not swept.
        largest = spec.on_chip_bytes // 96 // 64 * 64
        return GradientTile(min(cdiv(cdiv(n_cols, cdiv(n_cols, largest)), 64) * 64, largest), spec.vector_cores)
    return GradientTile(min(64, next_power_of_2(n_cols)), 2)


def divergence_unserved(spec: DeviceSpec) -> str | None:
    """Returns why the kernel of a student's and a teacher's logits should not serve a device, or None.

    For a chip of the 950 its plan waits 8 times a row between the vector and the scalar unit, and 6 are the most
    (`ascend.plan.MAX_SWITCHES`): the kernel reads six numbers of each row.
    """
    if spec.name.startswith("Ascend950"):
        return "on a chip of the 950 its kernel waits 8 times a row for the scalar unit, 6 at most are allowed"
    return None


@tunable
def fused_tile(n_cols: int, itemsize: int, spec: DeviceSpec) -> StatisticsTile | None:
    """Returns the tile of the kernel that computes statistics and gradient of a row together; None for two kernels.

    Args:
        n_cols: vocabulary size.
        itemsize: bytes of a logit.
        spec: the device.
    """
    if not spec.has_warps or itemsize == 4:
        # Its fast exponentials are not accurate enough for fp32 logits.
        return None
    # Two programs of 16 warps per multiprocessor; with more than 64 registers per thread only one would fit.
    options = {**launch_options(spec, 16), "maxnreg": 64}
    return StatisticsTile(4, min(4096, next_power_of_2(n_cols)), 2 * spec.vector_cores, options)


@cache
def scale_block(spec: DeviceSpec) -> Block | None:
    """Returns the block of the kernel that multiplies by a number unless it is one; None if PyTorch multiplies."""
    if spec.has_buffer:
        return None
    return Block(4096, launch_options(spec, 8)) if spec.has_warps else Block(64)


@cache
def token_block(spec: DeviceSpec) -> Block:
    """Returns the block of the kernel that computes a loss from one number per token."""
    if spec.has_buffer:
        # A chunk of the head has a few thousand tokens, one step for each of a few cores. Blocks up to 2816 would keep
        # double buffering with all inputs (bishengir-compile, 910B4), but would leave more cores idle.
        return Block(1024)
    return Block(1024, launch_options(spec, 4)) if spec.has_warps else Block(16)
