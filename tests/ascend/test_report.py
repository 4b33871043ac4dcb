"""The gate itself: every kernel at every production shape on every chip, and the report that says so."""

from pathlib import Path

import pytest

from npu_trainer_kernels import device
from npu_trainer_kernels.ascend.cases import cases, cases_of
from npu_trainer_kernels.ascend.gate import (
    CHIPS,
    SAMPLED_CHIPS,
    GateCase,
    collect_all,
    failures,
    no_longer_needed,
)
from npu_trainer_kernels.ascend.gate_report import not_reported, report_is_current, write_report
from npu_trainer_kernels.ascend.launcher import LaunchRecorder
from npu_trainer_kernels.ascend.lower import lower
from npu_trainer_kernels.ascend.plan import planned_code
from npu_trainer_kernels.descriptions import GATE
from npu_trainer_kernels.ops.launch import use_launcher

REPORT = Path(__file__).parents[2] / "docs" / "ascend-report.md"


def in_quick(case: GateCase) -> bool:
    """Whether a case is gated for every change: each form of an op in one size and one dtype, in turns. With empty
    caches most of a case's time goes into the program that counts the traffic."""
    (turn,) = (i for i, entry in enumerate(GATE) if entry.op == case.op)
    sizes, dtypes = GATE[turn].sizes, GATE[turn].dtypes
    size = int(case.shape.split(" x ")[1].split(" ")[0])
    return (size, case.dtype) == (sizes[turn % len(sizes)], dtypes[turn % len(dtypes)])


def test_every_form_passes_on_every_chip_as_the_report_says(kept_cache):
    rows = collect_all(cases(), keep=in_quick)
    assert {row.op for row in rows} == {entry.op for entry in GATE}
    assert failures(rows) == []
    assert not_reported(rows, REPORT) == [], (
        "docs/ascend-report.md is stale: run this file without --quick, and commit it"
    )


@pytest.mark.full(quick="test_every_form_passes_on_every_chip_as_the_report_says")
def test_every_kernel_passes_on_every_chip_and_the_report_says_so(kept_cache):
    # One test: two might run the gate in two processes, and the second find the report that the first has written.
    rows = collect_all(cases())
    current = report_is_current(rows, REPORT)
    write_report(rows, REPORT)
    assert {row.chip for row in rows} == {*CHIPS, *SAMPLED_CHIPS}
    assert failures(rows) == []
    assert no_longer_needed(rows) == []
    assert current, "docs/ascend-report.md was stale; it has been written anew: commit it"


@pytest.mark.parametrize("entry", GATE, ids=lambda entry: entry.op)
def test_the_number_of_cores_changes_no_plan(entry, kept_cache):
    case = next(iter(cases_of(entry)))
    recorder = LaunchRecorder()
    with device.use_chip("Ascend910B1"), use_launcher(recorder):
        case.run()
    for launched in recorder.launches:
        many, few = launched.specialize("Ascend910B1"), launched.specialize("Ascend910B4")
        assert device.chip_spec("Ascend910B1").vector_cores > device.chip_spec("Ascend910B4").vector_cores
        codes = [planned_code(spec.name, lower(spec), spec.chip) for spec in (many, few)]
        assert "hivm" in codes[0]
        assert codes[0] == codes[1]
