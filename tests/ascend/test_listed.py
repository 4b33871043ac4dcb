"""The list of what need not keep a rule about waiting."""

import json
from dataclasses import asdict, replace

import pytest

from npu_trainer_kernels.ascend import listed
from npu_trainer_kernels.ascend.gate import CHIPS, GateRow, failures, no_longer_needed
from npu_trainer_kernels.ascend.listed import Listed, parse, written

ENTRY = Listed("rms_norm", "_forward_kernel", "fixed waits", ("bf16", "fp16"), (512, 8192), "its rows are short")
DELAY = "fixed waits: 1 of the next tile's loads for the vector unit"


def _row(size=512, dtype="bf16", delays=(DELAY,), **changed):
    row = GateRow("rms_norm", "_forward_kernel", f"4096 x {size} (hidden)", dtype, CHIPS[0], None, None, False, ())
    return replace(row, delays=delays, **changed)


def test_the_packages_own_list_is_as_it_must_be():
    assert all(entry.why for entry in parse(listed.FILE.read_text()))


def test_what_is_listed_does_not_fail_and_all_else_does():
    assert failures([_row()], [ENTRY]) == []
    for row in (_row(1024), _row(dtype="fp32"), _row(op="add_rms_norm"), _row(kernel="_backward_kernel")):
        assert failures([row], [ENTRY]) == [f"{row.op} {row.kernel} {row.shape} {row.dtype} {row.chip}: {DELAY}"]
    # Another rule is another matter, and so is one that is about right and wrong.
    assert len(failures([_row(delays=("waits per row: 9.0 executed, at most 8",))], [ENTRY])) == 1
    assert len(failures([_row(broken=("fixed waits: no",))], [ENTRY])) == 1


def test_what_keeps_its_rule_may_not_stay_listed():
    rows = [_row(size, dtype) for size in (512, 8192) for dtype in ("bf16", "fp16")]
    assert no_longer_needed(rows, [ENTRY]) == []
    rows[-1] = replace(rows[-1], delays=())
    assert no_longer_needed(rows, [ENTRY]) == [
        "rms_norm _forward_kernel fixed waits fp16 8192: listed, but it keeps the rule"
    ]


def test_a_list_is_written_with_the_reasons_that_are_known_and_refused_without_the_others():
    broken = [("rms_norm", "_forward_kernel", f"4096 x {size} (hidden)", "bf16", DELAY) for size in (8192, 512)]
    assert parse(written(broken, [ENTRY])) == (replace(ENTRY, dtypes=("bf16",)),)
    broken.append(("swiglu", "_forward_kernel", "4096 x 4864 (intermediate)", "bf16", DELAY))
    with pytest.raises(ValueError, match=r"swiglu _forward_kernel .*: dtypes, sizes and why must not be empty"):
        parse(written(broken, [ENTRY]))


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"rule": "traffic"}, "rule must be one of fixed waits, "), ({"also": 1}, "must have the fields of Listed")],
)
def test_what_is_wrong_is_named(changed, says):
    with pytest.raises(ValueError, match=says):
        parse(json.dumps([{**asdict(ENTRY), **changed}]))
