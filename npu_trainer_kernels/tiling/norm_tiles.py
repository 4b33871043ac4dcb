"""Norms."""

from functools import cache

from ..device import DeviceSpec
from .common import RowTile, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable

__all__ = [
    "general_norm_backward_tile",
    "general_norm_forward_tile",
    "norm_backward_tile",
    "norm_forward_tile",
    "partial_sums_tile",
]


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
        blocks = cdiv(cols, 32768)
        cols = next_power_of_2(cdiv(cols, blocks))
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
        blocks = cdiv(cols, min(2048, elements // 2))
        cols = cdiv(cdiv(cols, blocks), 64) * 64
        return RowTile(max(1, elements // cols), cols, blocks)
    # The interpreter, which knows powers of two only: small, so that a few rows make several tiles and a tail, and a
    # row of more than 128 columns two halves or several blocks.
    if cols == 256 and widest_halves:
        return RowTile(1, 128, fold=4, halves=True)
    if cols > 128:
        return RowTile(2, 64, cdiv(cols, 64))
    if cols == 128:
        return RowTile(1, 128, fold=4)
    return RowTile(4 if cols <= 64 else 1, next_power_of_2(cols))


def _pieces(cols: int) -> int:
    """In how many pieces of whole 32-byte units a row goes."""
    return next((fold for fold in (8, 4, 2) if cols % (16 * fold) == 0), 1)


@tunable
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
    # of 4096 to 10240 columns, every casting). What comes as fp32 needs no copy in fp32, and may be wider: 5376 columns
    # backward take half of the simulated cycles of blocks. A row that is wider than two halves may be is read twice, in
    # blocks: with a sum, 8192 columns in four pieces would take 1.04 times as many simulated cycles; without a residual
    # 12288 and 16384 columns 1.01 and 1.06 times.
    if stores_sum:
        widest, halves = (5120, 6144) if itemsize == 2 else (5376, 0)
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec, halves)
    if has_residual:
        widest = 6144 if itemsize == 2 else 8192
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec)
    return _row_tile(cols, "rms_norm._forward_kernel", itemsize, 8192, spec)


@tunable
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
    return _row_tile(cols, "rms_norm._backward_kernel", itemsize, 5120 if itemsize == 2 else 5376, spec, halves)


@tunable
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


@tunable
def general_norm_backward_tile(cols: int, itemsize: int, gated: bool, biased: bool, spec: DeviceSpec) -> RowTile:
    """Tile of their backward kernel; arguments as above."""
    if spec.has_warps and cols <= 32768:
        return norm_backward_tile(cols, itemsize, False, False, spec)
    if gated:
        return _row_tile(cols, "gated_rms_norm._backward_kernel", itemsize, 3072, spec)
    widest = (4096, 5120) if itemsize == 2 else (4608, 5376)
    return _row_tile(cols, "layer_norm._backward_kernel", itemsize, widest[0 if biased else 1], spec)


@cache
def partial_sums_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Tile of the kernel that adds up the programs' partial weight gradients."""
    if spec.has_buffer:
        # As many columns as give most cores some, and rows for two loads of 16 KiB at once.
        block = min(512, next_power_of_2(cols))
        return RowTile(8, block, cdiv(cols, block))
    if spec.has_warps:
        # 128 bytes of each row: short columns, so that there are programs enough.
        return RowTile(64, 32, cdiv(cols, 32), launch_options(spec, 8))
    return RowTile(2, 16, cdiv(cols, 16))
