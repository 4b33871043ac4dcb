"""The kernels of the LM head and of its losses."""

from dataclasses import dataclass, field
from functools import cache

from ..device import DeviceSpec
from .common import Block, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable, tunable_on_npus

__all__ = [
    "GradientTile",
    "StatisticsTile",
    "fused_tile",
    "gradient_tile",
    "scale_block",
    "statistics_tile",
    "token_block",
]


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
        times = cdiv(n_cols % (self.fold * self.width), self.width)
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


@tunable_on_npus
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
        tail = cdiv(left, width)
        # Twice the time that `width` logits take: beside its logits a step costs 7; the row's first load is not hidden;
        # a tail costs 24 and, being masked, half as much again (simulated pipes of 910B4: good for ratios).
        return 14 * steps + 2 * fold + (48 + tail if tail else 0)

    # A tail of 8 was there when the limits were swept. A fold of 8 and less has no longer one.
    folds = [f for f in range(1, largest + 1) if n_cols % (f * width) <= 8 * width and f * width <= n_cols]
    return min(folds, key=costs)


@tunable_on_npus
def gradient_tile(n_cols: int, itemsize: int, has_weights: bool, spec: DeviceSpec) -> GradientTile:
    """Tile of the in-place gradient kernel; arguments as for `statistics_tile`."""
    if spec.has_warps:
        return GradientTile(min(4096, next_power_of_2(n_cols)), _ONE_PER_ROW, launch_options(spec, 16))
    if spec.has_buffer:
        # Blocks of equal size, so that the last one is nearly full.
        kernel = "head._row_gradient_kernel weighted" if has_weights else "head._row_gradient_kernel"
        largest = tile_limit(kernel, itemsize, spec)
        block = cdiv(cdiv(n_cols, cdiv(n_cols, largest)), 64) * 64
        return GradientTile(min(block, largest), spec.vector_cores)
    return GradientTile(min(64, next_power_of_2(n_cols)), 2)


@tunable
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
