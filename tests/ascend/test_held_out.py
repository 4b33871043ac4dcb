"""Tiles at sizes that no limit was chosen from: nothing in their loops waits for the vector unit.

What is planned is what the ops launch. Two tests plant the faults that the tiles are there to avoid.
"""

from dataclasses import replace

import pytest

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ascend import gate
from npu_trainer_kernels.ascend.cases import cases_of
from npu_trainer_kernels.descriptions import GATE
from npu_trainer_kernels.tiling import limits, norm_tiles

pytestmark = pytest.mark.usefixtures("kept_cache")

CHIPS = ("Ascend910B4",)
ENTRIES = {entry.op: entry for entry in GATE}
# Tiles of several rows, one row in pieces, two halves, column blocks.
HELD_OUT = [
    *(("rms_norm", size) for size in (768, 1792, 3328, 4608, 6656, 7680)),
    *(("rms_norm, gemma", size) for size in (2304, 7168)),
    *(("add_rms_norm, pre", size) for size in (1280, 2304, 2816, 5376, 6656)),
    *(("add_rms_norm, post, gemma", size) for size in (1152, 3840, 5376)),
    *(("layer_norm", size) for size in (1600, 3072, 7168)),
    ("gated_rms_norm, gate first", 2560),
    *(("rms_norm, of heads", size) for size in (40, 72, 192)),
    # Rows and parts of heads that are no whole 32-byte units.
    ("embedding", 1000),
    ("rope, of images", 104),
]


@pytest.fixture(autouse=True)
def fresh_tiles():
    tiling.forget_tiles()
    yield
    tiling.forget_tiles()


def planned(op, size, dtype="bf16", chips=CHIPS):
    entry = replace(ENTRIES[op], sizes=(size,), dtypes=(dtype,))
    rows = gate.collect([replace(case, run_small=None) for case in cases_of(entry)], chips)
    assert rows
    return rows


@pytest.mark.parametrize(("op", "size"), HELD_OUT, ids=str)
def test_nothing_waits_at_sizes_that_were_not_swept(op, size):
    for row in planned(op, size):
        assert row.broken == (), row
        assert row.plan.double_buffered
        assert (row.plan.fixed_waits, row.plan.vector_scalar_switches) == (0, 0), row


@pytest.mark.parametrize(
    ("op", "size", "kernel"),
    [
        ("rms_norm", 5376, "_backward_kernel"),
        ("add_rms_norm, pre, gemma", 5376, "_forward_kernel"),
        ("layer_norm", 4544, "_backward_kernel"),
    ],
)
def test_a_row_of_fp32_needs_no_copy_and_may_be_wider(op, size, kernel):
    """In blocks it would be read twice, and take 1.4 to 2 times the simulated cycles."""
    rows = planned(op, size, "fp32")
    assert [row.in_blocks for row in rows if row.kernel == kernel] == [False]
    assert gate.failures(rows, known=()) == []


# What keeps the rules on the 910 and breaks one on the 950 has limits of its own there.
@pytest.mark.parametrize(
    ("op", "size"), [("add_rms_norm, pre", 512), ("add_rms_norm, pre", 2048), ("rope, half", 128)], ids=str
)
def test_fp32_on_the_950(op, size):
    assert gate.failures(planned(op, size, "fp32", gate.SAMPLED_CHIPS), known=()) == []


def test_the_largest_tile_that_fits_would_wait():
    with limits.trying("rms_norm._forward_kernel", 2, 14336):
        assert max(row.plan.fixed_waits for row in planned("rms_norm", 2048)) > 0


def test_a_row_that_is_not_in_pieces_would_stop_the_scalar_unit(monkeypatch):
    monkeypatch.setattr(norm_tiles, "_pieces", lambda cols: 1)
    assert max(row.plan.vector_scalar_switches for row in planned("rms_norm", 4608)) > 0
