"""Tiles of mixtures of experts."""

from functools import cache

from ..device import DeviceSpec
from .common import Block, ColumnsTile, RowTile, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable_on_npus

__all__ = ["clearing_block", "clearing_grid", "expert_gate_tile", "expert_rows_tile", "expert_sums_tile"]


@tunable_on_npus
def expert_rows_tile(cols: int, itemsize: int, spec: DeviceSpec) -> ColumnsTile:
    """Returns the tile of the kernels that move rows to their experts and back: one row, or a column block of one.

    Args:
        cols: columns of a row.
        itemsize: bytes of the widest element.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements per thread. Not timed yet.
        width = next_power_of_2(cdiv(cols, cdiv(cols, 2048)))
        return ColumnsTile(width, cols, launch_options(spec, max(1, min(8, width // 256))))
    if spec.has_buffer:
        blocks = cdiv(cols, 8192)
        return ColumnsTile(cols if blocks == 1 else cdiv(cdiv(cols, blocks), 64) * 64, cols)
    return ColumnsTile(min(64, next_power_of_2(cols)), cols)


@tunable_on_npus
def expert_gate_tile(cols: int, itemsize: int, up: int, by_turns: int, biased: int, backward: int,
                     spec: DeviceSpec) -> RowTile:  # fmt: skip
    """Returns the tile of the kernels that apply the gate to the rows of experts.

    Args:
        cols: columns of the gate.
        itemsize: bytes of an element.
        up: 1 if there is an up, else 0.
        by_turns: 1 if gate and up are interleaved, else 0.
        biased: 1 if each expert has a bias, else 0.
        backward: 1 for the backward kernel, 0 for the forward kernel.
        spec: the device.
    """
    if spec.has_warps:
        # The widest of the column blocks that mask the fewest lanes; 8 elements per thread. Not timed yet.
        width = min((1024, 512, 256), key=lambda each: cdiv(cols, each) * each)
        width = min(width, next_power_of_2(cols))
        return RowTile(max(1, 2048 // width), width, cdiv(cols, width), launch_options(spec, 8))
    if spec.has_buffer:
        kernel = "moe_experts._gate_backward_kernel" if backward else "moe_experts._gate_kernel"
        # A bias needs one more fp32 row of the columns.
        size = tile_limit(kernel + by_turns * " by turns", itemsize, spec) // (1 + biased)
        # Backward sums over each row. It processes several rows at once, so that the sums are a vector, not a scalar.
        blocks = _even_blocks(cols, size // 4 if backward else size)
        cols = cols if blocks == 1 else cdiv(cdiv(cols, blocks), 16) * 16
        return RowTile(max(1, min(size // cols, 128)), cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), cdiv(cols, 64))


def _even_blocks(cols: int, most: int) -> int:
    """Returns the number of blocks of at most `most` columns for a row: the smallest number of equal blocks if that is
    at most twice the smallest possible number, else the latter."""
    fewest = cdiv(cols, most)
    even = (n for n in range(fewest, 2 * fewest + 1) if cols % (16 * n) == 0)
    return next(even, fewest)


@cache
def expert_sums_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the kernel that sums the rows of each expert: `rows` rows of a column block at once."""
    if spec.has_warps:
        # 128 bytes of each bf16 row, which makes enough programs for few experts. Not timed yet.
        return RowTile(64, 64, cdiv(cols, 64), launch_options(spec, 8))
    if spec.has_buffer:
        blocks = cdiv(cols, 512)
        return RowTile(16, cdiv(cdiv(cols, blocks), 64) * 64 if blocks > 1 else cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), cdiv(cols, 64))


@cache
def clearing_block(itemsize: int, spec: DeviceSpec) -> Block:
    """Returns the block of the kernel that writes zeros to the gradients of experts without rows."""
    if spec.has_warps:
        return Block(8192 // itemsize * 2, launch_options(spec, 8))
    return Block(24 * 1024 // itemsize) if spec.has_buffer else Block(64)


def clearing_grid(groups: int, spec: DeviceSpec) -> tuple[int, int]:
    """Returns the grid of that kernel: groups by blocks of a group. On an NPU all cores process each group together."""
    if spec.has_buffer:
        return 1, spec.vector_cores
    return groups, 32 if spec.has_warps else 2
