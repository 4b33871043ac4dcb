"""Plans of the LM head's chunks, and the norms' tiles: what they may rely on whatever the sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_trainer_kernels import tiling
from npu_trainer_kernels.device import GIB, KIB, DeviceSpec, chip_spec
from npu_trainer_kernels.tiling.limits import tile_limit

CUDA = DeviceSpec("cuda", "a card", 132, 256 * KIB, 80 * GIB)


@given(
    n_rows=st.integers(1, 100_000),
    vocab=st.integers(1, 300_000),
    hidden=st.integers(1, 2048).map(lambda units: 8 * units),
    itemsize=st.sampled_from([2, 4]),
    weight_itemsize=st.sampled_from([2, 4]),
)
def test_borrowed_memory_is_free(n_rows, vocab, hidden, itemsize, weight_itemsize):
    plan = tiling.borrowing_chunks(n_rows, vocab, hidden, itemsize, weight_itemsize, CUDA)
    if plan is None:
        return
    first, columns = plan.stops[0], plan.columns
    assert plan.stops[-1] == n_rows
    assert all(a < b for a, b in itertools.pairwise((0, *plan.stops)))
    assert 0 < columns < vocab
    inside = tiling.rows_inside(vocab)
    in_result = len(plan.stops) == 1 or weight_itemsize == 4
    size = weight_itemsize if in_result else 4
    # `_WeightSum.room`: the rows of the sums behind the borrowed columns, or the half with memory of its own.
    room = (vocab - (columns if in_result else inside)) * hidden * size
    assert first * columns * itemsize <= room
    # `_WeightSum.scratch`: an fp32 sum of the chunk's dx, in the rows before.
    assert in_result or columns <= inside
    assert first * hidden * 4 <= columns * hidden * size


@pytest.mark.parametrize(
    ("n_rows", "vocab", "hidden", "most"),
    [(8192, 128256, 4096, 1.6), (16384, 128256, 4096, 1.6), (65536, 128256, 4096, 1.6), (6554, 151936, 2048, 1.5),
     (26214, 151936, 2048, 1.5)],
)  # fmt: skip
def test_extra_memory_is_bounded(n_rows, vocab, hidden, most):
    plan = tiling.borrowing_chunks(n_rows, vocab, hidden, 2, 2, CUDA)
    assert plan is not None
    sizes = [b - a for a, b in itertools.pairwise((0, *plan.stops))]
    logits = [sizes[0] * (vocab - plan.columns), *(rows * vocab for rows in sizes[1:])]
    sums = 0 if len(sizes) == 1 else (vocab - tiling.rows_inside(vocab)) * hidden * 4
    assert 2 * max(logits) + sums <= most * GIB


def test_nothing_is_borrowed_elsewhere():
    for kind in ("npu", "cpu"):
        assert tiling.borrowing_chunks(8192, 128256, 4096, 2, 2, DeviceSpec(kind, kind, 40, 192 * KIB)) is None


@pytest.mark.parametrize("vocab", [16_032, 32_064, 64_128, 75_968])
def test_a_slice_of_a_vocabulary_takes_few_chunks_within_the_same_memory(vocab):
    """Ranks that share a vocabulary out meet once in each."""
    rows, hidden = 131_072, 2048
    own, shared = (tiling.head_chunk(rows, vocab, 2, CUDA, hidden, True, among) for among in (False, True))
    assert shared > own
    assert 2 * shared * vocab + 2 * vocab * hidden <= 16 * GIB // 10


@given(vocab=st.integers(1, 300_000), hidden=st.integers(1, 1024).map(lambda units: 16 * units))
def test_one_chunk_on_an_npu_takes_no_more_memory_than_several(vocab, hidden):
    npu = DeviceSpec("npu", "Ascend910B4", 40, 192 * KIB)
    # Half the fp32 sums beside half a GiB of logits.
    several = GIB // 2 + 2 * vocab * hidden
    for rows in (several // (2 * vocab), 1024, 4096, 16384):
        chunk = tiling.head_chunk(rows, vocab, 2, npu, hidden, True)
        alone = chunk >= rows
        assert not alone or 2 * rows * vocab <= max(several, 2 * 1024 * vocab)
        assert alone or 2 * rows * vocab > several or rows * vocab >= 1 << 31
        # Without a gradient of the weight there are no sums, and torch makes copies.
        for arguments in ((), (0, True), (hidden, False)):
            chunk = tiling.head_chunk(rows, vocab, 2, npu, *arguments)
            assert chunk * vocab * 2 <= max(GIB // 2, 2 * 1024 * vocab) + 2 * 128 * vocab


NPU = DeviceSpec("npu", "Ascend910B4", 40, 192 * KIB)
# Every function that gives a tile of rows, with the flags that it takes.
NORM_TILES = [
    (function, flags)
    for function, count in ((tiling.norm_forward_tile, 3), (tiling.norm_backward_tile, 2),
                            (tiling.general_norm_forward_tile, 2), (tiling.general_norm_backward_tile, 2))
    for flags in itertools.product((False, True), repeat=count)
]  # fmt: skip


@given(
    cols=st.one_of(st.integers(1, 20_000), st.integers(1, 160).map(lambda units: 128 * units)),
    itemsize=st.sampled_from([2, 4]),
    tile=st.sampled_from(NORM_TILES),
)
def test_a_tile_of_rows_covers_them(cols, itemsize, tile):
    function, flags = tile
    found = function(cols, itemsize, *flags, NPU)
    assert 1 <= found.rows <= 128
    if found.halves:
        assert (found.rows, 2 * found.cols, found.blocks) == (1, cols, 1)
        assert itemsize == 2, "what waits on the chip has the dtype of x"
        assert found.pieces > 1
    elif found.blocks == 1:
        assert found.cols == cols
    else:
        assert (found.blocks - 1) * found.cols < cols <= found.blocks * found.cols
        assert found.rows > 1, "a sum over one row would be a scalar"
    if found.pieces > 1:
        # The pieces of a row lie end to end and begin at 32 bytes.
        assert found.rows == 1
        assert found.cols % (16 * found.pieces) == 0
    if found.rows == 1 and found.cols % 128 == 0:
        assert found.pieces == 8


@pytest.mark.parametrize(
    ("function", "flags"), NORM_TILES, ids=[f"{function.__name__}-{flags}" for function, flags in NORM_TILES]
)
def test_several_rows_keep_to_the_swept_limit(function, flags):
    """Wider rows: fewer in a tile, until one goes alone; then halves, then blocks. Nothing comes back."""
    sizes = range(128, 17_000, 128)
    forms = [function(cols, 2, *flags, NPU) for cols in sizes]
    most = max(found.rows * found.cols for found in forms if found.rows > 1)
    assert most <= 8960
    kinds = [2 if found.blocks > 1 else 1 if found.halves else 0 for found in forms]
    assert kinds == sorted(kinds)
    assert kinds[0] == 0
    assert kinds[-1] == 2


# Of models' MLPs and experts, between 704 and 53248.
WIDTHS = (704, 768, 1408, 2560, 2880, 4864, 5632, 6912, 8960, 9728, 10944, 11008, 12288, 13696, 13824, 14336, 17920,
          18432, 18944, 22016, 25600, 27648, 28672, 29568, 53248)  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [2048, 3072, 4096, 6144])
def test_rows_of_a_models_width_are_cut_into_equal_tiles_on_an_npu(itemsize, size):
    npu = DeviceSpec("npu", "Ascend910B4", 40, 192 * KIB)
    for width in WIDTHS:
        tile = tiling.block_of_rows(size, width, itemsize, npu)
        assert tile.cols * tile.blocks == width
        assert tile.cols * itemsize % 32 == 0
        assert size // 3 < tile.rows * tile.cols <= size or tile.rows == 1


@given(
    size=st.integers(1, 1 << 14),
    cols=st.integers(1, 1 << 17),
    itemsize=st.sampled_from([2, 4]),
    kind=st.sampled_from(["npu", "cuda", "cpu"]),
)
def test_every_column_of_a_row_is_in_one_tile(size, cols, itemsize, kind):
    block = tiling.next_power_of_2(size) if kind != "npu" else 64 * size
    spec = DeviceSpec(kind, "a device", 40, 192 * KIB)
    tile = tiling.block_of_rows(block, cols, itemsize, spec)
    assert (tile.blocks - 1) * tile.cols < cols <= tile.blocks * tile.cols
    assert tile.rows * tile.cols <= max(block, 1)
    # Tiles of several rows have no mask.
    assert tile.rows == 1 or (tile.cols == cols and tile.blocks == 1)


@given(
    n_cols=st.integers(1, 300_000),
    itemsize=st.sampled_from([2, 4]),
    kind=st.sampled_from(["npu", "cuda", "cpu"]),
    extras=st.integers(0, 6),
)
def test_steps_and_tail_of_the_statistics_cover_a_row(n_cols, itemsize, kind, extras):
    spec = DeviceSpec(kind, "a device", 40, 192 * KIB)
    tile = tiling.statistics_tile(n_cols, itemsize, extras, spec)
    left, tail = n_cols % (tile.fold * tile.width), tile.tail(n_cols, spec)
    assert left <= tail * tile.width
    if kind != "npu":
        assert tail == 0 or tail & (tail - 1) == 0
        return
    # No step reads beyond the row, no more of a tail than the sweeps had, and none of it for nothing.
    assert tile.fold * tile.width <= n_cols
    assert tail <= 8
    assert (tail - 1) * tile.width < left or tail == 0
    most = tile_limit(f"head._row_statistics_kernel {min(3, extras)} extras", itemsize, spec)
    assert tile.fold <= most
    # Nor so small a step that its own cost counts, where the row is long.
    assert tile.fold >= most // 2 or n_cols < 2 * most * tile.width


@given(n_cols=st.integers(1, 300_000), itemsize=st.sampled_from([2, 4]), weighted=st.booleans())
def test_blocks_of_the_gradient_are_even(n_cols, itemsize, weighted):
    npu = DeviceSpec("npu", "Ascend910B4", 40, 192 * KIB)
    block = tiling.gradient_tile(n_cols, itemsize, weighted, npu).block
    most = tile_limit("head._row_gradient_kernel weighted" if weighted else "head._row_gradient_kernel", itemsize, npu)
    steps = -(-n_cols // block)
    assert block <= most
    assert steps == -(-n_cols // most)
    assert steps * block - n_cols < 64 * steps


@given(n_cols=st.integers(1, 300_000), itemsize=st.sampled_from([2, 4]), kind=st.sampled_from(["npu", "cuda", "cpu"]))
def test_blocks_of_the_divergence_are_even(n_cols, itemsize, kind):
    block = tiling.divergence_tile(n_cols, itemsize, DeviceSpec(kind, "a device", 40, 192 * KIB)).block
    if kind != "npu":
        assert block & (block - 1) == 0
        return
    steps = -(-n_cols // block)
    # What the compiler plans in two buffers.
    assert block <= 2048
    assert steps == -(-n_cols // 2048)
    assert steps * block - n_cols < 64 * steps


def test_chips_of_the_950_are_not_given_the_kernel_of_two_rows_of_logits():
    assert tiling.divergence_unserved(chip_spec("Ascend910B4")) is None
    assert "waits 8 times a row" in str(tiling.divergence_unserved(chip_spec("Ascend950PR_9589")))
