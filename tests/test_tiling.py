"""Plans of the LM head's chunks: what they may rely on whatever the sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_trainer_kernels import tiling
from npu_trainer_kernels.device import GIB, KIB, DeviceSpec
from npu_trainer_kernels.tile_limits import tile_limit

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


EXTRAS = ("entropy", "mean", "squares", "argmax", "weights", "softcap")


@given(
    n_cols=st.integers(1, 300_000),
    itemsize=st.sampled_from([2, 4]),
    kind=st.sampled_from(["npu", "cuda", "cpu"]),
    extras=st.sets(st.sampled_from(EXTRAS)),
)
def test_steps_and_tail_of_the_statistics_cover_a_row(n_cols, itemsize, kind, extras):
    spec = DeviceSpec(kind, "a device", 40, 192 * KIB)
    tile = tiling.statistics_tile(n_cols, itemsize, spec, **dict.fromkeys(extras, True))
    left, tail = n_cols % (tile.fold * tile.width), tile.tail(n_cols, spec)
    assert left <= tail * tile.width
    if kind != "npu":
        assert tail == 0 or tail & (tail - 1) == 0
        return
    # No step reads beyond the row, no more of a tail than the sweeps had, and none of it for nothing.
    assert tile.fold * tile.width <= n_cols
    assert tail <= 8
    assert (tail - 1) * tile.width < left or tail == 0
    most = tile_limit(f"head._row_statistics_kernel {min(3, len(extras))} extras", itemsize, spec)
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
