"""Mixtures of experts."""

from functools import cache

from ..device import DeviceSpec
from .common import Block, ColumnsTile, RowTile, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable_on_npus

__all__ = ["clearing_block", "clearing_grid", "expert_gate_tile", "expert_rows_tile", "expert_sums_tile"]


@tunable_on_npus
def expert_rows_tile(cols: int, itemsize: int, spec: DeviceSpec) -> ColumnsTile:
    """Tile of the kernels that bring rows to their experts and back: one row of `cols` columns, or of a block of them.

    Args:
        cols: columns of a row.
        itemsize: bytes of the widest element.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements a thread, as many threads as a row of 1024 wants: not timed yet.
        width = next_power_of_2(cdiv(cols, cdiv(cols, 2048)))
        return ColumnsTile(width, cols, launch_options(spec, max(1, min(8, width // 256))))
    if spec.has_buffer:
        blocks = cdiv(cols, 8192)
        return ColumnsTile(cols if blocks == 1 else cdiv(cdiv(cols, blocks), 64) * 64, cols)
    return ColumnsTile(min(64, next_power_of_2(cols)), cols)


@tunable_on_npus
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
        width = min((1024, 512, 256), key=lambda each: cdiv(cols, each) * each)
        width = min(width, next_power_of_2(cols))
        return RowTile(max(1, 2048 // width), width, cdiv(cols, width), launch_options(spec, 8))
    if spec.has_buffer:
        kernel = "moe_experts._gate_backward_kernel" if backward else "moe_experts._gate_kernel"
        # A bias is one more row of the columns, in fp32, for each part of a row.
        size = tile_limit(kernel + by_turns * " by turns", itemsize, spec) // (1 + biased)
        # Backward sums over each row: several at once, so that the sums are a vector and no scalar is waited for.
        blocks = _even_blocks(cols, size // 4 if backward else size)
        cols = cols if blocks == 1 else cdiv(cdiv(cols, blocks), 16) * 16
        return RowTile(max(1, min(size // cols, 128)), cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), cdiv(cols, 64))


def _even_blocks(cols: int, most: int) -> int:
    """Into how many blocks of at most `most` columns a row is cut: the fewest of one size, if they are not many more
    than the fewest of all."""
    fewest = cdiv(cols, most)
    even = (n for n in range(fewest, 2 * fewest + 1) if cols % (16 * n) == 0)
    return next(even, fewest)


@cache
def expert_sums_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Tile of the kernel that adds up the rows of each expert: `rows` rows of a block of columns at once."""
    if spec.has_warps:
        # 128 bytes of each row of bf16: programs enough for few experts. Not timed yet.
        return RowTile(64, 64, cdiv(cols, 64), launch_options(spec, 8))
    if spec.has_buffer:
        blocks = cdiv(cols, 512)
        return RowTile(16, cdiv(cdiv(cols, blocks), 64) * 64 if blocks > 1 else cols, blocks)
    return RowTile(4, min(64, next_power_of_2(cols)), cdiv(cols, 64))


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
