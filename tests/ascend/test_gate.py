from dataclasses import replace
from functools import partial

import pytest
import torch

from npu_trainer_kernels import device
from npu_trainer_kernels.ascend import gate
from npu_trainer_kernels.ascend.gate import CHIPS, FewRows, GateCase, Minimum, collect, failures
from npu_trainer_kernels.ascend.gate_report import render, report_is_current, write_report
from npu_trainer_kernels.ascend.plan import plan_lowered
from npu_trainer_kernels.ops.launch import launch

from . import toys


def _scale(x, scale, block):
    y = torch.empty_like(x)
    programs = min(x.shape[0], device.spec(x.device).vector_cores)
    launch(toys.scaled_rows, (programs,), (x, scale, y, x.shape[0], x.shape[1], 1.0), {"BLOCK": block})
    return y


def _case(block=4096, op="scale", **more):
    def run():
        x = torch.empty(4000, 4096, dtype=torch.bfloat16, device="meta")
        _scale(x, torch.empty(4000, device="meta"), block)

    return GateCase(op, "4000 x 4096", "bf16", run, **more)


def _small():
    x, scale = torch.randn(16, 512), torch.randn(16)
    assert torch.equal(_scale(x, scale, 512), x * scale[:, None])
    return {"scaled_rows": 2 * x.numel() * 4}


def test_a_passing_gate():
    rows = collect([_case(run_small=_small)], ["Ascend910B1", "Ascend910B4"])
    assert [(row.op, row.kernel, row.shape, row.dtype, row.chip) for row in rows] == [
        ("scale", "scaled_rows", "4000 x 4096", "bf16", "Ascend910B1"),
        ("scale", "scaled_rows", "4000 x 4096", "bf16", "Ascend910B4"),
    ]
    assert failures(rows) == []
    assert rows[0].traffic == (2 * 16 * 512 * 4 + 16 * 4) / (2 * 16 * 512 * 4)


def test_each_failure_names_the_kernel_the_case_and_the_rule():
    def refused():
        launch(toys.refused, (1,), (torch.empty(64, device="meta"), torch.empty(64, device="meta")), {"BLOCK": 64})

    cases = [_case(block=65536), _case(run_small=_small, max_traffic=1.0), GateCase("refused", "64", "fp32", refused)]
    found = failures(collect(cases, ["Ascend910B4"]))
    assert [line.partition(" Ascend910B4: ")[0] for line in found] == [
        "scale scaled_rows 4000 x 4096 bf16",
        "scale scaled_rows 4000 x 4096 bf16",
        "refused refused 64 fp32",
    ]
    rules = [line.partition(" Ascend910B4: ")[2] for line in found]
    assert rules[0] == "buffer overflow: needs 393216 bytes of 196608"
    assert rules[1] == "traffic: 1.001 of the fewest bytes possible, at most 1.000"
    assert rules[2].startswith("does not compile: Triton frontend: ")


def _faulty(kernel, **constexprs):
    """A case of a right kernel and, after it, of one that leaves its tensors."""

    def run(where="meta", rows=4000, cols=4096):
        x, scale = torch.ones(rows, cols, device=where), torch.ones(rows, device=where)
        y = _scale(x, scale, 4096)
        launch(kernel, (1,), (y, torch.empty_like(y), rows, cols), constexprs)
        return {}

    return GateCase("faulty", "4000 x 4096", "fp32", run, partial(run, "cpu", 3, 67))


def test_a_kernel_that_leaves_its_tensors_fails_by_name_and_the_next_is_looked_at():
    unmasked = _faulty(toys.beyond_the_end, LOADS=False, BLOCK=4096)
    cases = [unmasked, _faulty(toys.far_away, BLOCK=128), _case(run_small=_small)]
    rows = collect(cases, ["Ascend910B4"])
    assert rows[-1].traffic is not None
    executed = [line for line in failures(rows) if "execute" in line]
    stage = "running on the CPU (ttadapter)"
    assert [line.partition(" 4000 x 4096 fp32 Ascend910B4: ")[::2] for line in executed] == [
        ("faulty scaled_rows", "traffic not counted: beyond_the_end of the same case cannot be executed"),
        ("faulty beyond_the_end", f"cannot be executed: {stage}: y is read or written 0 bytes past its end"),
        ("faulty scaled_rows", "traffic not counted: far_away of the same case cannot be executed"),
        ("faulty far_away", f"cannot be executed: {stage}: memory that is no argument's is read or written"),
    ]


def _toy(kernel, few=8, cols=98304, out=torch.bfloat16, minima=None, **constexprs):
    """A case of a toy: 4000 rows, and a few for the trace."""

    def run(rows=4000):
        x = torch.empty(rows, cols, dtype=torch.bfloat16, device="meta")
        programs = min(rows, device.spec(x.device).vector_cores)
        launch(kernel, (programs,), (x, torch.empty(rows, cols, dtype=out, device="meta"), rows, cols), constexprs)

    shape = f"4000 x {cols} (columns)"
    return GateCase("toy", shape, "bf16", run, few=FewRows(lambda: run(few), few, few * cols), minima=minima or {})


def test_a_fixed_wait_fails():
    found = failures(collect([_toy(toys.silu, BLOCK=12288), _toy(toys.silu, BLOCK=16384)], ["Ascend910B4"]))
    where = "toy silu 4000 x 98304 (columns) bf16 Ascend910B4"
    assert found == [f"{where}: fixed waits: 1 of the next tile's loads for the vector unit"]


def test_a_select_in_the_loop_over_blocks_fails():
    cases = [
        _toy(toys.row_maxima, out=torch.float32, cols=65536, BLOCK=4096, SELECT=select) for select in (False, True)
    ]
    rows = collect(cases, ["Ascend910B1", "Ascend910B4"])
    assert [row.waits for row in rows] == [2, 2, 18, 18]
    assert [row.plan.vector_scalar_switches for row in rows] == [2, 2, 2, 2]
    found = failures(rows)
    assert [line.partition(": ")[2] for line in found] == ["waits per row: 18.0 executed, at most 8"] * 2


def test_more_instructions_than_the_minimum_allows_fail():
    def rows(fewest):
        return collect([_toy(toys.silu, minima={"silu": Minimum(fewest, "by hand")}, BLOCK=12288)], ["Ascend910B4"])

    assert rows(6.4)[0].instructions == 7
    assert failures(rows(6.4)) == []
    (line,) = failures(rows(6.3))
    assert line.endswith(": instructions per element: 7.0, at most 6.9")
    assert "| toy | silu | 7.0 | 6.3 | by hand |" in render(rows(6.3))


def test_the_950_gates_too():
    rows = collect([_case(block=65536), _toy(toys.silu, BLOCK=8192)], ["Ascend950PR_9589"])
    where = "scale scaled_rows 4000 x 4096 bf16 Ascend950PR_9589"
    assert failures(rows) == [f"{where}: buffer overflow: needs 262144 bytes of 253952"]
    assert [row.waits for row in rows] == [None, None]


def test_chips_that_the_compiler_knows_alike_share_a_plan(monkeypatch):
    planned = []

    def plan(kernel, lowered, chip, *, multi_buffer):
        planned.append(chip)
        return plan_lowered(kernel, lowered, chip, multi_buffer=multi_buffer)

    monkeypatch.setattr(gate, "plan_lowered", plan)
    rows = collect([_case()], [*CHIPS, "Ascend950PR_9589"])
    assert planned == ["Ascend910B1", "Ascend950PR_9589"]
    assert [row.chip for row in rows] == [*CHIPS, "Ascend950PR_9589"]
    # And rightly so: asked one by one they get the same.
    alone = [collect([_case()], [chip])[0].plan for chip in CHIPS]
    assert len({replace(plan, chip="") for plan in alone}) == 1


def test_a_row_that_goes_in_blocks_may_be_read_twice():
    def run():
        x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
        launch(toys.scaled_rows, (4, 2), (x, x, x, 64, 4096, 1.0), {"BLOCK": 4096})

    case = GateCase("scale", "64 x 4096", "bf16", run, _small, 1.0)
    (row,) = collect([case], ["Ascend910B4"])
    assert row.in_blocks
    assert row.traffic > 1.0
    assert not any(rule.startswith("traffic") for rule in row.broken)


def test_a_case_that_launches_nothing_does_not_pass():
    with pytest.raises(RuntimeError, match="nothing 1 bf16 launches no kernel on Ascend910B4"):
        collect([GateCase("nothing", "1", "bf16", lambda: None)], ["Ascend910B4"])


def test_the_report_is_stale_exactly_when_the_facts_change(tmp_path):
    path = tmp_path / "docs" / "report.md"
    rows = collect([_case(run_small=_small)], ["Ascend910B1", "Ascend910B4"])
    assert not report_is_current(rows, path)
    write_report(rows, path)
    assert report_is_current(rows, path)
    facts = "48.0 / 192 | yes | 0 | 0 |  |  | 1.001 | passes | < 1 |"
    line = f"| scale | scaled_rows | 4000 x 4096 | bf16 | 910B1, 910B4 | {facts}"
    assert line in path.read_text().splitlines()
    # Another machine's compile times are no news, and do not touch the file.
    path.write_text(path.read_text().replace("| < 1 |", "| < 10 |"))
    assert report_is_current(rows, path)
    write_report(rows, path)
    assert "| < 10 |" in path.read_text()
    other = collect([_case(block=8192)], ["Ascend910B1", "Ascend910B4"])
    assert not report_is_current(other, path)
    assert render(rows) == render(rows)
