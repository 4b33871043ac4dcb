"""Gated MLPs, rotary embedding, token embedding."""

from dataclasses import dataclass, field
from functools import cache

from ..device import DeviceSpec
from .common import Block, RowTile, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable, tunable_on_npus

__all__ = [
    "HeadsTile",
    "TokensTile",
    "block_of_rows",
    "embedding_tile",
    "gate_block",
    "rope_pair_tile",
    "rope_tile",
    "rope_unserved",
    "swiglu_block",
    "swiglu_unserved",
    "vocabulary_tile",
    "wants_int32_ids",
]


# By the number of tensors.
_GATE_KERNELS = {3: "_forward_kernel", 5: "_backward_kernel", 6: "_backward_kernel with product"}


@tunable
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


@tunable
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


# Of a row, at each of which the scalar unit waits for the vector unit once where gate and up are put by turns; as many
# waits as the gate allows (`MAX_WAITS_PER_ROW` of `ascend/gate.py`).
_MOST_BLOCKS_BY_TURNS = 8


@cache
def swiglu_unserved(cols: int, itemsize: int, spec: DeviceSpec) -> str | None:
    """Why SwiGLU's kernels had better not be given gate and up by turns in one tensor; None: they serve it.

    Args:
        cols: of gate.
        itemsize: bytes of an element.
        spec: the device.
    """
    if not spec.has_buffer:
        return None
    most = _MOST_BLOCKS_BY_TURNS * gate_block(itemsize, 6, 1, spec).size
    if cols <= most:
        return None
    return f"gate and up by turns, of {cols} columns each: above {most} the kernel waits too often on {spec.name}"


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
        return RowTile(1, size, cdiv(cols, size))
    # Rows lie at multiples of 32 bytes in the buffer. The interpreter knows powers of two only.
    aligned = cols * itemsize % 32 == 0 if spec.has_buffer else next_power_of_2(cols) == cols
    if cols <= size and (aligned or spec.has_buffer):
        return RowTile(min(size // cols, 128) if aligned else 1, cols)
    fewest = cdiv(cols, size)
    if spec.has_buffer:
        for blocks in range(fewest, 2 * fewest):
            if cols * itemsize % (32 * blocks) == 0:
                return RowTile(1, cols // blocks, blocks)
        size = cdiv(cdiv(cols, fewest), 64) * 64
    return RowTile(1, size, fewest)


@dataclass(frozen=True)
class TokensTile:
    """Tile of the rotary kernel: `rows` tokens by `cols` pairs, and `rest_cols` elements that pass through."""

    rows: int
    cols: int
    rest_cols: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@tunable_on_npus
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
        rows = 6 * limit // (6 * cdiv(half, 16) * 16 + cdiv(rest, 16) * 16)
        return TokensTile(max(1, min(rows, 128)), half, rest)
    return TokensTile(4, next_power_of_2(half), next_power_of_2(rest))


# What a transfer of the chip moves at least: less is moved one element at a time.
_TRANSFER_BYTES = 32
# Pairs by turns are taken apart in fp32: rows of 32 bytes' multiples on chip.
_PAIRS_OF_A_UNIT = 8


@cache
def rope_unserved(half: int, rest: int, itemsize: int, by_turns: bool, spec: DeviceSpec) -> str | None:
    """Why the rotary kernel had better not rotate these heads; None: it serves them.

    Args:
        half: pairs of a head.
        rest: elements of a head that pass through.
        itemsize: bytes of the narrowest element.
        by_turns: the pairs lie next to each other in a head.
        spec: the device.
    """
    if not spec.has_buffer:
        return None
    for count, what in ((half, "halves of"), (rest, "a rest of")):
        if 0 < count * itemsize < _TRANSFER_BYTES:
            return f"{what} {count} elements, less than the {_TRANSFER_BYTES} bytes of a transfer on {spec.name}"
    if by_turns and half % _PAIRS_OF_A_UNIT:
        return f"{half} pairs by turns, not a multiple of {_PAIRS_OF_A_UNIT}: the kernel waits for each on {spec.name}"
    return None


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
    blocks = cdiv(cols, 4096)
    cols = next_power_of_2(cdiv(cols, blocks))
    return RowTile(2, cols, blocks, launch_options(spec, max(1, min(8, cols // 512))))


@tunable_on_npus
def embedding_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Tile of the embedding's kernels: `rows` rows of `cols` columns, or of a block of them.

    Args:
        cols: columns of the table.
        spec: the device.
    """
    if spec.has_warps:
        blocks = cdiv(cols, 2048)
        cols = next_power_of_2(cdiv(cols, blocks))
        return RowTile(max(1, 1024 // cols), cols, blocks, launch_options(spec, 4))
    if spec.has_buffer:
        blocks = cdiv(cols, 8192)
        cols = cols if blocks == 1 else cdiv(cdiv(cols, blocks), 64) * 64
        # 16 bytes an element: a scaled fp32 row, in and out, twice. bf16 makes transfers of 24 KiB of it. Several rows
        # lie at multiples of 32 bytes: others would be brought there one element at a time.
        rows = min(64, spec.on_chip_bytes // (16 * cols)) if cols % 16 == 0 else 1
        return RowTile(max(1, rows), cols, blocks)
    return RowTile(2, min(32, next_power_of_2(cols)), cdiv(cols, 32))
