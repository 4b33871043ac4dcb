"""Tiles of gated MLPs, rotary and token embedding, convolutions, linear attention and the attention of generation."""

import math
from dataclasses import dataclass, field
from functools import cache

from ..device import DeviceSpec
from .common import Block, RowTile, cdiv, launch_options, next_power_of_2
from .limits import tile_limit
from .tunable import tunable, tunable_on_npus

__all__ = [
    "CacheTile",
    "DecodeTile",
    "HeadsTile",
    "StateTile",
    "TokenTile",
    "TokensTile",
    "block_of_rows",
    "cache_tile",
    "convolution_tile",
    "decode_tile",
    "embedding_tile",
    "gate_block",
    "rope_pair_tile",
    "rope_tile",
    "rope_unserved",
    "state_tile",
    "swiglu_block",
    "swiglu_unserved",
    "token_tile",
    "vocabulary_tile",
    "wants_int32_ids",
]


# The kernel by its number of tensors.
_GATE_KERNELS = {3: "_forward_kernel", 5: "_backward_kernel", 6: "_backward_kernel with product"}


@tunable
def swiglu_block(itemsize: int, tensors: int, spec: DeviceSpec) -> Block:
    """Returns the block of SwiGLU's kernels.

    Args:
        itemsize: bytes of an element.
        tensors: the number of tensors read and written: 3 in forward, 5 in backward, 6 if backward computes y again.
        spec: the device.
    """
    if spec.has_warps:
        # 8 elements per thread, which is one 16-byte access of bf16 per tensor (H200).
        return Block(2048, launch_options(spec, 8))
    if spec.has_buffer:
        return Block(tile_limit(f"swiglu.{_GATE_KERNELS[tensors]}", itemsize, spec))
    return Block(64)


@tunable
def gate_block(itemsize: int, tensors: int, by_turns: int, spec: DeviceSpec) -> Block:
    """Returns the block of the same kernels for other gates than SwiGLU's, or for gate and up in one tensor.

    Args:
        itemsize: bytes of an element.
        tensors: as in `swiglu_block`, where gate and up count as two.
        by_turns: 1 if gate and up are interleaved in one tensor, else 0.
        spec: the device.
    """
    if not spec.has_buffer:
        return swiglu_block(itemsize, tensors, spec)
    variant = "by turns" if by_turns else "any gate"
    return Block(tile_limit(f"swiglu.{_GATE_KERNELS[tensors]} {variant}", itemsize, spec))


# The maximum number of blocks of a row with interleaved gate and up. The scalar unit waits for the vector unit once per
# block, and the compile gate allows this number of waits (`MAX_WAITS_PER_ROW` of `ascend/gate.py`).
_MOST_BLOCKS_BY_TURNS = 8


@cache
def swiglu_unserved(cols: int, itemsize: int, spec: DeviceSpec) -> str | None:
    """Returns why SwiGLU's kernels should not process interleaved gate and up; None if they should.

    Args:
        cols: columns of gate.
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
    """Returns the tile for rows with gaps between them: whole rows, or parts of one row, of at most `size` elements. On
    an NPU the parts of a row are equal, so that no lanes are wasted and all cores have equal work.

    Args:
        size: the size of the block.
        cols: columns of a row.
        itemsize: bytes of an element.
        spec: the device.
    """
    if spec.has_warps:
        return RowTile(1, size, cdiv(cols, size))
    # Rows start at multiples of 32 bytes in the buffer. The interpreter supports only powers of two.
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
    """Tile of the rotary kernel: `rows` tokens by `cols` pairs, and `rest_cols` elements that it copies."""

    rows: int
    cols: int
    rest_cols: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@tunable_on_npus
def rope_tile(half: int, rest: int, itemsize: int, by_turns: bool, spec: DeviceSpec) -> TokensTile:
    """Returns the tile of the rotary kernel.

    Args:
        half: pairs of a head.
        rest: elements of a head that are copied.
        itemsize: bytes of the widest element.
        by_turns: whether the pairs are interleaved.
        spec: the device.
    """
    if spec.has_warps:
        cols = next_power_of_2(half)
        return TokensTile(max(1, 1024 // cols), cols, next_power_of_2(rest), launch_options(spec, 4))
    if spec.has_buffer:
        # Each part of a row starts at a multiple of 32 bytes, which is 16 elements for heads of 16 bits, even with
        # tables of 32 bits. Elements that are copied need two double buffers, a sixth of the memory of a pair. 128
        # tokens are enough.
        limit = tile_limit(f"rope._rotate_kernel{' by turns' if by_turns else ''}", itemsize, spec)
        rows = 6 * limit // (6 * cdiv(half, 16) * 16 + cdiv(rest, 16) * 16)
        return TokensTile(max(1, min(rows, 128)), half, rest)
    return TokensTile(4, next_power_of_2(half), next_power_of_2(rest))


# The minimum size of a transfer; smaller ones move one element at a time.
_TRANSFER_BYTES = 32
# The kernel splits interleaved pairs in fp32, where rows on the chip are multiples of 32 bytes.
_PAIRS_OF_A_UNIT = 8


@cache
def rope_unserved(half: int, rest: int, itemsize: int, by_turns: bool, spec: DeviceSpec) -> str | None:
    """Returns why the rotary kernel should not rotate these heads; None if it should.

    Args:
        half: pairs of a head.
        rest: elements of a head that are copied.
        itemsize: bytes of the narrowest element.
        by_turns: whether the pairs are interleaved.
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
    """Tile of the kernel that rotates a token of queries and keys: `heads` heads at once, with `cols` columns for half
    a head. The kernel reads `ahead` groups of heads before it writes the first."""

    heads: int
    cols: int
    ahead: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# The maximum number of head groups of a token, which the rotary kernel unrolls: for example 256 heads of 128.
_MOST_HEAD_GROUPS = 32


@cache
def rope_pair_tile(q_heads: int, k_heads: int, half: int, spec: DeviceSpec) -> HeadsTile | None:
    """Returns the tile of the rotary kernel for queries and keys in one launch; None for one launch each."""
    if not spec.has_warps:
        return None
    # 8 elements per thread of each half, which is one 16-byte access of bf16 (H200; 16 and 32 heads at a time and
    # several programs per token were slower).
    cols = next_power_of_2(half)
    heads = min(max(1, 512 // cols), next_power_of_2(max(q_heads, k_heads)))
    if -(-q_heads // heads) - (-k_heads // heads) > _MOST_HEAD_GROUPS:
        return None
    return HeadsTile(heads, cols, 5, launch_options(spec, 2))


def wants_int32_ids(spec: DeviceSpec) -> bool:
    """Whether the embedding's kernels need 32-bit ids, for an NPU's scalar loads, or take the caller's dtype."""
    return not spec.has_warps


@cache
def vocabulary_tile(cols: int, spec: DeviceSpec) -> RowTile | None:
    """Returns the tile of the embedding's backward that writes every row of the weight gradient: `rows` rows of dy at
    once, for a block of `cols` columns. None selects the kernel that writes the rows of existing ids over zeros."""
    if not spec.has_warps:
        return None
    # Whole rows: most ids do not occur, and one store writes the zeros of such a row (H200).
    blocks = cdiv(cols, 4096)
    cols = next_power_of_2(cdiv(cols, blocks))
    return RowTile(2, cols, blocks, launch_options(spec, max(1, min(8, cols // 512))))


@tunable_on_npus
def embedding_tile(cols: int, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the embedding's kernels: `rows` rows, or a block of `cols` columns of them.

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
        # 16 bytes per element, for the double-buffered input and output of a scaled fp32 row; transfers of bf16 are
        # then 24 KiB. A tile has several rows only if each starts at a multiple of 32 bytes: otherwise a transfer moves
        # one element.
        rows = min(64, spec.on_chip_bytes // (16 * cols)) if cols % 16 == 0 else 1
        return RowTile(max(1, rows), cols, blocks)
    return RowTile(2, min(32, next_power_of_2(cols)), cdiv(cols, 32))


# Tokens of a chunk. Beside it a program reads K - 1 tokens more, in backward on both sides: with 4 taps 2% and 5%. On
# CUDA a chunk is a task of its own, and its sums of K + 1 fp32 numbers per channel are 8% of x in bf16. Not timed.
_TOKENS_OF_A_CHUNK = 128
# Ascend910B4, bf16 and fp32, kernels of up to four taps: with so many channels in a block they fit and have no fixed
# wait. For each channel they hold K weights, K inputs and some temporaries in fp32; in backward also K gradients of
# inputs and of the weight. So with more taps there are fewer channels.
_CONVOLUTION_COLUMNS = 2048
_CONVOLUTION_BACKWARD_COLUMNS = 1024


@cache
def convolution_tile(channels: int, taps: int, backward: bool, spec: DeviceSpec) -> RowTile:
    """Returns the tile of the short convolution: chunks of `rows` tokens, for a block of `cols` channels.

    Args:
        channels: the number of channels.
        taps: the number of taps.
        backward: whether the kernel computes gradients.
        spec: the device.
    """
    if spec.has_warps:
        # A warp with 4 channels for each thread, a load of 8 bytes of bf16, in backward with some 20 numbers for each.
        # Not timed.
        return RowTile(_TOKENS_OF_A_CHUNK, 128, cdiv(channels, 128), launch_options(spec, 1))
    if spec.has_buffer:
        # Blocks of equal size, if they can be multiples of 32 bytes of 16-bit numbers.
        most = (_CONVOLUTION_BACKWARD_COLUMNS if backward else _CONVOLUTION_COLUMNS) // cdiv(taps, 4)
        fewest = cdiv(channels, most)
        for blocks in range(fewest, 2 * fewest):
            if channels % (16 * blocks) == 0:
                return RowTile(_TOKENS_OF_A_CHUNK, channels // blocks, blocks)
        cols = cdiv(cdiv(channels, fewest), 64) * 64
        return RowTile(_TOKENS_OF_A_CHUNK, cols, cdiv(channels, cols))
    return RowTile(8, 16, cdiv(channels, 16))


@dataclass(frozen=True)
class StateTile:
    """Tile of the kernels of linear attention: a program keeps `keys` rows of the state and `cols` of its columns, of
    which there are `blocks`."""

    keys: int
    cols: int
    blocks: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# Numbers of a state that a program keeps: 32 for each thread of two warps on CUDA, with which compiled code spills less
# than with more (Triton 3.9 for sm_90). Not timed.
_NUMBERS_OF_A_STATE = 2048


@cache
def state_tile(key: int, value: int, spec: DeviceSpec) -> StateTile:
    """Returns the tile of the kernels that walk from chunk to chunk of linear attention, on a device without a buffer.

    Args:
        key: elements of a key, the rows of a state.
        value: elements of a value, the columns of a state.
        spec: the device.
    """
    keys = next_power_of_2(key)
    if not spec.has_warps:
        return StateTile(keys, 8, cdiv(value, 8))
    keys = max(keys, _DOT_ROWS)
    cols = max(_DOT_ROWS, min(next_power_of_2(value), _NUMBERS_OF_A_STATE // keys))
    # Chunks are not loaded ahead: they would need the shared memory of other programs, which hide the latency as well.
    return StateTile(keys, cols, cdiv(value, cols), {**launch_options(spec, 2), "num_stages": 1})


@dataclass(frozen=True)
class DecodeTile:
    """Tile of the attention of generation: a step processes `keys` keys for `heads` of the heads of q that share them,
    with `cols` columns of keys and `value_cols` of values. `splits` programs share the keys of a row. `dot` says
    whether the kernel multiplies on the matrix unit. A part writes its statistics `copies` times."""

    heads: int
    keys: int
    cols: int
    value_cols: int
    splits: int
    dot: bool
    copies: int = 1
    options: dict[str, int] = field(default_factory=dict, hash=False)


# The maximum number of parts of a row: the kernel that merges them holds all parts of one head.
_MOST_SPLITS = 64
# The minimum number of keys of a part of the longest row. Below it the partial sums are no longer small beside the
# keys: for each column of a head, a part of 64 keys in 16 bits reads 64 x 2 x 2 bytes and writes 4 for each head of q.
_KEYS_OF_A_SPLIT = 128
# Ascend910B4, bf16 and fp32, as the compiler plans groups of 1 to 8 heads of 64 to 256: with so many elements in a tile
# [heads, keys, cols] loads rotate between two buffers without a fixed wait. With twice as many some plans have a fixed
# wait or do not rotate, and with four times as many none fits.
_ELEMENTS_OF_A_STEP = 4096
# Keys of a step are a multiple of the fp32 numbers of a 32-byte block of the buffer.
_LANES = 8
# Rows of tl.dot's smallest tile on CUDA.
_DOT_ROWS = 16


@cache
def decode_tile(
    group: int, size: int, value_size: int, itemsize: int, pairs: int, most: int, spec: DeviceSpec
) -> DecodeTile:
    """Returns the tile of the attention of generation.

    Args:
        group: heads of q that share a head of keys.
        size: elements of a key.
        value_size: elements of a value.
        itemsize: bytes of an element.
        pairs: the number of rows times the number of heads of keys.
        most: the maximum number of keys of a row.
        spec: the device.
    """
    if spec.has_buffer:
        # Rows start at multiples of 32 bytes, which is 16 elements of 16 bits. A large group has several programs.
        cols, value_cols = cdiv(size, 16) * 16, cdiv(value_size, 16) * 16
        widest = max(cols, value_cols)
        pieces = cdiv(group, max(1, _ELEMENTS_OF_A_STEP // (_LANES * widest)))
        heads = cdiv(group, pieces)
        keys = max(1, min(64 // _LANES, _ELEMENTS_OF_A_STEP // (heads * widest * _LANES))) * _LANES
        splits = _splits(pairs * pieces, most, spec.vector_cores)
        # 32 bytes for each number, since smaller transfers move one element at a time.
        return DecodeTile(heads, keys, cols, value_cols, splits, False, _LANES)
    cols, value_cols = next_power_of_2(size), next_power_of_2(value_size)
    if not spec.has_warps:
        return DecodeTile(next_power_of_2(group), 8, cols, value_cols, _splits(pairs, most, 8), False)
    cols, value_cols = max(cols, _DOT_ROWS), max(value_cols, _DOT_ROWS)
    # 32 KiB of keys and values in a step, of which a multiprocessor loads several ahead. Not timed.
    keys = max(_DOT_ROWS, min(128, 32768 // ((cols + value_cols) * itemsize) // 16 * 16))
    keys = 1 << keys.bit_length() - 1
    # Four programs per multiprocessor hide each other's latency. Not timed.
    splits = _splits(pairs, most, 4 * spec.vector_cores)
    return DecodeTile(
        max(_DOT_ROWS, next_power_of_2(group)), keys, cols, value_cols, splits, True, options=launch_options(spec, 4)
    )


def _splits(pairs: int, most: int, programs: int) -> int:
    """Returns the largest power of two with which there are at most `programs` programs and parts are not too short, at
    least 1. Powers of two, because a kernel is compiled for each number."""
    splits = min(programs // pairs, most // _KEYS_OF_A_SPLIT, _MOST_SPLITS)
    return 1 << max(0, splits.bit_length() - 1)


@dataclass(frozen=True)
class CacheTile:
    """Tile of the kernel that writes a token to the cache: `heads` heads with `cols` columns of the key and
    `value_cols` of the value."""

    heads: int
    cols: int
    value_cols: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TokenTile:
    """Tile of the kernel that prepares a token's heads for attention: `heads` heads with `cols` columns of each half of
    the rotated elements, `rest_cols` of the others and `value_cols` of the value."""

    heads: int
    cols: int
    rest_cols: int
    value_cols: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


# Elements of a tile [heads, size] of the kernel that prepares a token. Ascend910B4, fp32: about ten tiles of so many
# elements are on the chip at once.
_ELEMENTS_OF_A_TOKEN = 2048
# Heads of a program on CUDA: a row of Qwen3-0.6B, of 16 heads of queries and 8 of keys, has three programs. Not timed.
_HEADS_OF_A_PROGRAM = 8


@cache
def token_tile(q_heads: int, k_heads: int, half: int, rest: int, value_size: int, spec: DeviceSpec) -> TokenTile:
    """Returns the tile of the kernel that norms and rotates a token's queries and keys and writes it to the cache.

    Args:
        q_heads: heads of queries.
        k_heads: heads of keys.
        half: half of the rotated elements of a head.
        rest: elements of a head that are not rotated.
        value_size: elements of a value.
        spec: the device.
    """
    if spec.has_buffer:
        # A divisor of both numbers of heads, so that nothing is masked.
        most = max(1, _ELEMENTS_OF_A_TOKEN // max(2 * half + rest, value_size))
        both = math.gcd(q_heads, k_heads)
        heads = max(n for n in range(1, both + 1) if both % n == 0 and n <= most)
        return TokenTile(heads, half, max(1, rest), value_size)
    heads = min(_HEADS_OF_A_PROGRAM, next_power_of_2(q_heads))
    cols, rest_cols, value_cols = (next_power_of_2(n) if n else 1 for n in (half, rest, value_size))
    return TokenTile(heads, cols, rest_cols, value_cols, launch_options(spec, 4))


@cache
def cache_tile(heads: int, size: int, value_size: int, spec: DeviceSpec) -> CacheTile:
    """Returns the tile of the kernel that writes a token to the cache: all heads of a row.

    Args:
        heads: heads of keys.
        size: elements of a key.
        value_size: elements of a value.
        spec: the device.
    """
    if spec.has_buffer:
        return CacheTile(heads, size, value_size)
    # Two elements or more for each thread: a row of Qwen3-0.6B has 8 x 128 of them. Not timed.
    cols, value_cols = next_power_of_2(size), next_power_of_2(value_size)
    return CacheTile(next_power_of_2(heads), cols, value_cols, launch_options(spec, 4))
