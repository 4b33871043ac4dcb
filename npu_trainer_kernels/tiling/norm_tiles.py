"""Tiles of the norms."""

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
    """Returns a tile of whole rows if at least one row fits, else of column blocks.

    Args:
        cols: columns of a row.
        kernel: the name of the kernel in `tiles.json`.
        itemsize: bytes of the widest element that is read or written.
        widest: on an NPU, the maximum columns of a tile of one row. It needs less memory than a tile of several rows,
            which broadcasts the weight to each row.
        spec: the device.
        widest_halves: on an NPU, the maximum columns of a row in two halves, which stay on the chip in their dtype.
    """
    if spec.has_warps:
        # At least 8 elements per thread (16 bytes of bf16), at most 64 with 16 warps; short rows share a program.
        # On an H200 the registers of one program hold at most 32768 fp32 columns of a few tensors.
        blocks = cdiv(cols, 32768)
        cols = next_power_of_2(cdiv(cols, blocks))
        # Two rows of 8192 columns take 132 us, one row 135 us (H200, 16384 x 8192).
        rows = 2 if cols == 8192 else max(1, 2048 // cols)
        warps = max(1, min(8 if cols <= 8192 else 16, rows * cols // 512))
        return RowTile(rows, cols, blocks, launch_options(spec, warps))
    if spec.has_buffer:
        elements = tile_limit(kernel, itemsize, spec)
        if cols <= max(elements // 2, widest):
            # At most 128 short rows, which make transfers of 8 KiB and more.
            return RowTile(max(1, min(elements // cols, 128)), cols, fold=_pieces(cols))
        if cols <= widest_halves and cols % 2 == 0 and _pieces(cols // 2) > 1:
            return RowTile(1, cols // 2, fold=_pieces(cols // 2), halves=True)
        # At least two rows, because the sum over one row would be a scalar.
        blocks = cdiv(cols, min(2048, elements // 2))
        cols = cdiv(cdiv(cols, blocks), 64) * 64
        return RowTile(max(1, elements // cols), cols, blocks)
    # The interpreter supports only powers of two. Tiles are small there, so that a few rows make several tiles and a
    # tail, and a row of more than 128 columns makes two halves or several blocks.
    if cols == 256 and widest_halves:
        return RowTile(1, 128, fold=4, halves=True)
    if cols > 128:
        return RowTile(2, 64, cdiv(cols, 64))
    if cols == 128:
        return RowTile(1, 128, fold=4)
    return RowTile(4 if cols <= 64 else 1, next_power_of_2(cols))


def _pieces(cols: int) -> int:
    """Returns the number of pieces of whole 32-byte units into which a row is folded."""
    return next((fold for fold in (8, 4, 2) if cols % (16 * fold) == 0), 1)


@tunable
def norm_forward_tile(cols: int, itemsize: int, rounds: bool, stores_sum: bool, has_residual: bool,
                      spec: DeviceSpec) -> RowTile:  # fmt: skip
    """Returns the tile of the norms' forward kernel.

    Args:
        cols: hidden size.
        itemsize: bytes of the widest element that is read or written.
        rounds: whether the kernel rounds the normed value before the product with the weight.
        stores_sum: whether the kernel writes the sum with the residual.
        has_residual: whether there is a residual.
        spec: the device.
    """
    if spec.has_warps and has_residual and 2048 < cols <= 4096:
        # Four tensors: 8 elements per thread take 68 us, 16 elements 70 us (H200, 8192 x 4096).
        return RowTile(1, 4096, 1, launch_options(spec, 16))
    # `widest` is the widest row whose loads do not wait for the vector unit by a fixed event (bishengir-compile 1.2.0,
    # 910B4; 4096 to 10240 columns, every casting). fp32 inputs need no fp32 copy and may be wider: backward of 5376
    # columns takes half of the simulated cycles of blocks. Rows wider than two halves are read twice, in blocks. The
    # alternative of four pieces would take 1.04 times as many simulated cycles for 8192 columns with a sum, and 1.01
    # and 1.06 times for 12288 and 16384 columns without a residual.
    if stores_sum:
        widest, halves = (5120, 6144) if itemsize == 2 else (5376, 0)
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec, halves)
    if has_residual:
        widest = 6144 if itemsize == 2 else 8192
        return _row_tile(cols, "rms_norm._forward_kernel with residual", itemsize, widest, spec)
    return _row_tile(cols, "rms_norm._forward_kernel", itemsize, 8192, spec)


@tunable
def norm_backward_tile(cols: int, itemsize: int, has_residual: bool, has_ds: bool, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the norms' backward kernel.

    Args:
        cols: hidden size.
        itemsize: bytes of the widest element that is read or written.
        has_residual: whether the kernel reads a residual.
        has_ds: whether the kernel reads a gradient of the sum.
        spec: the device.
    """
    if spec.has_warps and cols <= 32768:
        # 32 elements per thread, which make two rows or more, so that their loads overlap (H200, hidden 128 to 16384).
        width = next_power_of_2(cols)
        size = 4096 if width <= 1024 else 8192 if width <= 4096 or cols < width <= 8192 else 16384
        return RowTile(max(1, size // width), width, 1, launch_options(spec, size // 1024))
    # The limits are found as in forward. 8192 columns in halves would take 1.08 times as many simulated cycles as in
    # blocks, and with a gradient of the sum, in four pieces, 1.15 times, because no memory is left to overlap loads.
    halves = 0 if itemsize == 4 else 6144 if has_ds else 5632 if has_residual else 7168
    if has_ds or has_residual:
        return _row_tile(cols, "rms_norm._backward_kernel of a sum", itemsize, 4608, spec, halves)
    return _row_tile(cols, "rms_norm._backward_kernel", itemsize, 5120 if itemsize == 2 else 5376, spec, halves)


@tunable
def general_norm_forward_tile(cols: int, itemsize: int, gated: bool, biased: bool, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the forward kernel of norms that are centred or have a gate or groups.

    Args:
        cols: columns of a group.
        itemsize: bytes of the widest element that is read or written.
        gated: whether the kernel reads a gate.
        biased: whether the kernel reads a bias.
        spec: the device.
    """
    if spec.has_warps and gated and 4096 < cols <= 8192:
        # 16 elements per thread need 56 registers on sm_90, so two programs share a multiprocessor (H200, 8192 x 8192:
        # 128 us). Two rows with 64 elements per thread need 174 registers, so one program runs, and it reads the gate
        # in eight steps, each of which waits for the previous one (210 us).
        return RowTile(1, 8192, 1, launch_options(spec, 16))
    # The limits are found as for the norms above.
    if gated:
        return _row_tile(cols, "gated_rms_norm._forward_kernel", itemsize, 6144, spec)
    return _row_tile(cols, "layer_norm._forward_kernel", itemsize, 7168 if biased else 8192, spec)


@tunable
def general_norm_backward_tile(cols: int, itemsize: int, gated: bool, biased: bool, spec: DeviceSpec) -> RowTile:
    """Returns the tile of their backward kernel. The arguments are those of `general_norm_forward_tile`."""
    if spec.has_warps and cols <= 32768:
        return norm_backward_tile(cols, itemsize, False, False, spec)
    if gated:
        return _row_tile(cols, "gated_rms_norm._backward_kernel", itemsize, 3072, spec)
    widest = (4096, 5120) if itemsize == 2 else (4608, 5376)
    return _row_tile(cols, "layer_norm._backward_kernel", itemsize, widest[0 if biased else 1], spec)


@cache
def partial_sums_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the kernel that adds the programs' partial weight gradients."""
    if spec.has_buffer:
        # Few enough columns that most cores have some, and rows for two loads of 16 KiB at once.
        block = min(512, next_power_of_2(cols))
        return RowTile(8, block, cdiv(cols, block))
    if spec.has_warps:
        # 128 bytes of each row, so that there are enough programs.
        return RowTile(64, 32, cdiv(cols, 32), launch_options(spec, 8))
    return RowTile(2, 16, cdiv(cols, 16))
