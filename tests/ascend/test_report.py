"""The gate itself: every kernel at every production shape on every chip, and the report that says so."""

from pathlib import Path

import pytest

from npu_trainer_kernels.ascend.cases import cases
from npu_trainer_kernels.ascend.gate import (
    CHIPS,
    REPORTED_CHIPS,
    collect_all,
    failures,
    report_is_current,
    write_report,
)

REPORT = Path(__file__).parents[2] / "docs" / "ascend-report.md"


@pytest.fixture(scope="module")
def gate(kept_cache):
    """The gate's rows, and whether the report said the same before it was written anew."""
    rows = collect_all(cases())
    current = report_is_current(rows, REPORT)
    write_report(rows, REPORT)
    return rows, current


def test_every_kernel_passes_on_every_chip(gate):
    rows, _ = gate
    assert {row.chip for row in rows} == {*CHIPS, *REPORTED_CHIPS}
    assert failures(rows) == []


def test_the_report_is_current(gate):
    _, current = gate
    assert current, "docs/ascend-report.md was stale; it has been written anew: commit it"
