"""The benchmarks' own logic: the table, inputs and truth, statistics, results, comparison. No assertion on a time."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
import types

import pytest
import torch

from benchmarks import cli, endtoend, measure, models, report, results, runner, step_cases, step_clock, steps
from benchmarks.cases import OPS, OpCase, table
from benchmarks.providers import Absent, Provider, providers
from npu_trainer_kernels.descriptions import ModelShapes, of_model
from tests import warm

CPU = torch.device("cpu")
FAST = measure.Settings(seconds=0.0, least=2, most=2, warmup=1)
SHAPES = ModelShapes(
    hidden=8,
    intermediate=16,
    vocabulary=31,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    slots=2,
    channels=12,
    taps=4,
    state_keys=1,
    state_values=2,
    key_size=6,
    value_size=4,
)
TINY = {work.op: work.sizes for work in of_model(SHAPES, 16, "float32")}


def tiny(op: str, **changes) -> OpCase:
    forward = {"modes": ("forward",)} if op == "decode_attention" else {}  # it has no gradient
    return OpCase(op, TINY[op], "float32", **{**forward, **changes})


def row(ms=(1.0, 0.9, 1.1), mode="both", provider="ours-torch", extra=0, **changes):
    median, q1, q3 = ms
    return {
        "group": "ops", "op": "rms_norm", "shape": "N=6 H=16", "sizes": {"N": 6, "H": 16}, "dtype": "float32",
        "provider": provider, "version": "1", "mode": mode, "status": "ok", "extra_bytes": extra, "verdict": "ok",
        "ms": {"median": median, "q1": q1, "q3": q3, "least": q1, "samples": 5}, "floor_ratio": 2.0, "gbps": 1.0,
        "tflops": 0.0, "errors": {"out0": 1e-7}, **changes,
    }  # fmt: skip


def meta(**changes):
    return results.environment(CPU, ["--quick"]) | changes


def write(path, rows, **changes):
    results.Results(path, meta(**changes)).add(rows)
    return path


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_table_names_each_row_once(kind):
    cases = table(kind)
    assert len({c.key for c in cases}) == len(cases)
    assert {c.op for c in cases if c.group == "ops"} == set(OPS)
    for case in cases:
        names = [p.name for p in providers(case)]
        assert len(set(names)) == len(names)
        assert {"ours-triton", "ours-torch", "reference", "torch.compile"} <= set(names)


def test_grpo_counts_unmasked_tokens_alone():
    case = next(c for c in table("cuda") if c.op == "fused_linear_grpo_loss")
    rows, hidden, vocab = OPS[case.op].products(case)
    assert rows == pytest.approx(0.8 * 8 * 1024, abs=4)
    assert OPS[case.op].work(case)["both"].flops == 6.0 * rows * hidden * vocab


@pytest.mark.parametrize("op", sorted(OPS))
def test_reference_agrees_with_the_truth(op):
    case = tiny(op)
    truth = measure.truth_of(case, runner._inputs(case, CPU, seed=0))
    found = measure.errors(OPS[op].reference, runner._inputs(case, CPU, seed=0), truth)
    assert set(found) >= {"out0"}
    assert {f"d{leaf}" for leaf in runner._inputs(case, CPU, 0).leaves} <= set(found)
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("op", sorted(OPS))
def test_ours_runs_in_every_mode(op, tmp_path):
    case = tiny(op)
    cell = next(c for c in runner.cells([case], lambda path: path.endswith("ours-torch"))[0])
    store = results.Results(tmp_path / "r.json", meta())
    ((_, rows),) = runner.run_case([cell], CPU, FAST, store, runner.Budget(None), 1e9)
    assert [r["mode"] for r in rows] == list(case.modes)
    assert all(r["status"] == "ok" and r["verdict"] == "ok" for r in rows), rows
    assert {r["provider"] for r in store.rows} == {"ours-torch", runner.FLOOR}


def test_what_raises_is_a_row_and_does_not_end_the_run(tmp_path):
    def broken(case, device):
        raise ValueError("no such luck\nsecond line")

    def absent(case, device):
        raise Absent("not installed")

    case = tiny("rms_norm", modes=("forward",))
    cells = [runner.Cell(case, Provider(make.__name__, make, "torch")) for make in (broken, absent)]
    store = results.Results(tmp_path / "r.json", meta())
    found = dict(
        zip(("broken", "absent"), runner.run_case(cells, CPU, FAST, store, runner.Budget(None), 1e9), strict=True)
    )
    assert found["broken"][1][0]["status"] == "error"
    assert found["broken"][1][0]["reason"] == "ValueError: no such luck"
    assert found["absent"][1][0]["status"] == "absent"
    text = report.markdown(store.meta, store.rows)
    assert "no such luck" in text
    assert "not installed" in text


def test_a_wrong_provider_is_flagged(tmp_path):
    def make(case, device):
        return lambda t: 1.01 * OPS["rms_norm"].reference(t)

    def nan(case, device):
        return lambda t: OPS["rms_norm"].reference(t) * float("nan")

    case = tiny("rms_norm", modes=("forward",))
    cells = [runner.Cell(case, Provider(name, fn, "torch")) for name, fn in (("off", make), ("nan", nan))]
    store = results.Results(tmp_path / "r.json", meta())
    verdicts = {c.provider.name: rows[0]["verdict"] for c, rows in
                runner.run_case(cells, CPU, FAST, store, runner.Budget(None), 1e9)}  # fmt: skip
    assert verdicts == {"off": "inaccurate", "nan": "wrong"}
    assert "INACCURATE" in report.markdown(store.meta, store.rows)


def test_gradients_do_not_add_up_between_calls():
    case = tiny("rms_norm")
    inputs = runner._inputs(case, CPU, 0)
    seen = []

    def fn(t):
        seen.append(t["x"].grad)
        return OPS["rms_norm"].reference(t)

    measure.measure(fn, [inputs], "both", CPU, FAST, cold=True)
    assert seen
    assert all(grad is None for grad in seen)


def test_peak_memory_counts_temporaries_and_not_what_is_left():
    case = OpCase("swiglu", {"N": 64, "I": 64}, "float32")
    size = 64 * 64 * 4
    inputs = runner._inputs(case, CPU, 0)
    # The factor becomes a scalar tensor of a few bytes.
    assert measure.peak_extra_bytes(lambda t: t["gate"].detach() * 2, inputs, "forward", CPU) < 64
    assert measure.peak_extra_bytes(
        lambda t: (t["gate"].detach() * 2) * 2 + 1, inputs, "forward", CPU
    ) == pytest.approx(size, abs=64)


def test_statistics():
    summary = measure.summarise([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.median, summary.q1, summary.q3, summary.least, summary.samples) == (3.0, 2.0, 4.0, 1.0, 5)
    assert measure.summarise([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="at least one"):
        measure.summarise([])


@pytest.mark.parametrize(
    ("found", "reference", "expected"),
    [
        ({"out0": 0.002}, {"out0": 0.002}, "ok"),
        ({"out0": 0.02}, {"out0": 0.002}, "inaccurate"),
        ({"out0": 0.001, "dx": 0.5}, {"out0": 0.002, "dx": 0.002}, "wrong"),
        ({"out0": math.inf}, None, "wrong"),
        ({"out0": math.nan}, None, "wrong"),
    ],
)
def test_verdict(found, reference, expected):
    assert measure.verdict(found, reference, "bfloat16") == expected


def test_results_survive_and_are_resumed(tmp_path):
    path = write(tmp_path / "r.json", [row(), row(mode="forward", status="error", reason="x"),
                                       row(mode="backward", status="error", reason="x", fatal=True)])  # fmt: skip
    again = results.Results(path, meta())
    assert again.has(results.key_of(row()), "1")
    assert not again.has(results.key_of(row()), "2"), "made by another version"
    assert not again.has(results.key_of(row(mode="forward")), "1"), "what failed is tried again"
    assert again.has(results.key_of(row(mode="backward")), "1"), "what lost the device is not"
    assert not path.with_suffix(".json.tmp").exists()
    elsewhere = results.Results(tmp_path / "new.json", meta(), [path])
    assert len(elsewhere.rows) == 3
    assert not (tmp_path / "new.json").exists()


def test_rows_of_two_machines_are_not_mixed(tmp_path):
    path = write(tmp_path / "r.json", [row()], device={"kind": "cuda", "name": "other", "memory_bytes": 0})
    with pytest.raises(ValueError, match="two machines"):
        results.Results(path, meta())


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="format"):
        results.read(path)


@pytest.mark.parametrize(
    ("new", "remark"),
    [
        (row(ms=(1.05, 1.0, 1.2)), ""),  # within the spread
        (row(ms=(1.5, 1.4, 1.6)), "slower"),
        (row(ms=(0.5, 0.4, 0.6)), "faster"),
        (row(extra=64 << 20), "larger"),
        (row(verdict="wrong"), "wrong"),
        (row(status="error", reason="x"), "now error"),
    ],
)
def test_compare(tmp_path, new, remark, capsys):
    old = write(tmp_path / "old.json", [row(), row(mode="forward")])
    now = write(tmp_path / "new.json", [new])
    found = results.compare(old, now)
    assert [r[5] for r in found.rows] == [remark]
    is_regression = remark not in ("", "faster")
    assert bool(found.regressions) == is_regression
    assert any("only in old.json" in note for note in found.notes)
    assert cli.main(["--compare", str(old), str(now)]) == int(is_regression)
    assert "rms_norm" in capsys.readouterr().out


def test_a_row_that_neither_file_has_measured_is_in_none(tmp_path):
    absent = row(provider="liger", status="absent")
    old, now = (write(tmp_path / f"{name}.json", [row(), absent]) for name in ("old", "new"))
    found = results.compare(old, now)
    assert len(found.rows) == 1
    assert found.notes == []


def test_comparing_two_devices_is_refused(tmp_path, capsys):
    old = write(tmp_path / "old.json", [row()])
    now = write(tmp_path / "new.json", [row()], device={"kind": "cuda", "name": "other", "memory_bytes": 0})
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--compare", str(old), str(now)])
    assert stopped.value.code == 2
    assert "not comparable" in capsys.readouterr().err


def test_patterns():
    wanted = cli.matcher(["rms_norm", "end-to-end/*flag"], ["liger"])
    assert wanted("ops/rms_norm/N=1 H=2/float32/ours-torch")
    assert wanted("end-to-end/sft-trainer/x/float32/flag")
    assert not wanted("ops/rms_norm/N=1 H=2/float32/liger")
    assert not wanted("ops/swiglu/N=1/float32/reference")
    assert not wanted("end-to-end/sft-trainer/x/float32/flag-tiled"), "a pattern with * says how a path ends"


def test_what_is_skipped_is_named_where_nothing_is_left(capsys):
    asked = ["--list", "--device", "cuda", "--groups", "end-to-end", "--only", "1x131072"]
    assert cli.main([*asked, "--skip", "*/plain", "--skip", "*/flag", "--skip", "*/liger"]) == 0
    assert capsys.readouterr().out.split("/")[-1] == "flag-tiled\n"
    with pytest.raises(SystemExit):
        cli.main([*asked, "--skip", "llama"])
    assert "--only '1x131072' leaves no row beside --skip llama on cuda" in capsys.readouterr().err


def test_list_measures_nothing(tmp_path, capsys):
    assert (
        cli.main(["--list", "--device", "cuda", "--only", "linear_cross_entropy/BT=8192", "--output", str(tmp_path)])
        == 0
    )
    lines = capsys.readouterr().out.split("\n")
    assert "ops/linear_cross_entropy/BT=8192 H=4096 V=128256/bfloat16/cut-cross-entropy" in lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--groups", "nothing"], ["--steps", "1"], ["--budget-seconds", "-1"],
                                       ["--variants", "flag,nothing"],
                                       ["--resume", "missing.json"]])  # fmt: skip
def test_bad_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_command_writes_reports_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "table", lambda kind: [tiny("rms_norm")])
    monkeypatch.setattr(cli, "QUICK", FAST)
    monkeypatch.setattr(runner, "bandwidth", lambda device, settings: 1e9)
    command = ["--quick", "--device", "cpu", "--groups", "ops", "--only", "ours-torch", "--only", "reference",
               "--output", str(tmp_path), "--name", "r"]  # fmt: skip
    assert cli.main(command) == 0
    capsys.readouterr()
    text = (tmp_path / "r.md").read_text()
    assert re.search(r"\| N=16 H=8 \| ours-torch \| .*x \|", text)
    before = results.read(tmp_path / "r.json")[1]
    assert cli.main(command) == 0
    assert results.read(tmp_path / "r.json")[1] == before, "nothing was measured again"
    assert cli.main([*command, "--compare", str(tmp_path / "r.json")]) == 0
    assert "no regression" in capsys.readouterr().out


def test_budget_leaves_the_rest_for_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "table", lambda kind: [tiny("rms_norm")])
    monkeypatch.setattr(runner, "bandwidth", lambda device, settings: 1e9)
    arguments = ["--device", "cpu", "--groups", "ops", "--only", "ours-torch", "--output", str(tmp_path)]
    assert cli.main([*arguments, "--budget-seconds", "1e-9"]) == 0
    assert "1 not measured" in capsys.readouterr().out


def test_plots(tmp_path):
    scaling = [row(group="scaling-H", sizes={"N": 6, "H": h}, shape=f"N=6 H={h}") for h in (16, 32)]
    written = report.plot([row(), row(provider="floor"), *scaling], tmp_path / "r")
    assert [p.name for p in written] == ["r-ops.png", "r-scaling.png"]
    assert all(p.stat().st_size > 1000 for p in written)


def test_preparation_is_no_part_of_a_step(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: float(next(now)))
    clock = step_clock.Clock(CPU)
    for pauses in (1, 0, 2):
        for _ in range(pauses):
            with clock.prepare():
                pass
        clock.tick()
    # Every look at the clock takes a second. A pause has two looks around it and two within: it takes three, of which
    # one is the host's.
    assert clock.seconds() == [1.0, 3.0]
    assert clock.prepared == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_step_is_named_once(kind):
    found = step_cases.workloads(kind)
    assert len({w.key for w in found}) == len(found)
    assert {w.name for w in found} == {"sft-trainer", "sft-trl", "grpo-trl", "dpo-trl", "distil-trl"}
    families = {models.MODELS[w.size][0] for w in found if w.name == "sft-trainer"}
    assert families == {"Llama", "Gemma3Text", "Qwen3Moe", *(["Qwen3_5Text"] if kind != "cpu" else [])}


@pytest.mark.parametrize(
    "workload",
    [
        step_cases.StepWorkload("sft-trainer", "tiny-qwen3-moe", 4, 24, lengths="exponential"),
        step_cases.StepWorkload("grpo-trl", "tiny-qwen3-moe", 4, 8, 4, group=2),
    ],
    ids=lambda workload: workload.name,
)
def test_a_step_with_experts_runs_their_op(workload):
    plain = endtoend.train(workload, "plain", steps=2)
    assert plain["ran"] == {}
    found = endtoend.train(workload, "flag", steps=2)
    # In both layers of both steps.
    assert found["ran"]["moe_experts"] >= 2 * 2
    assert not endtoend.differs({**found, "dtype": "float32"}, plain)
    assert step_cases.variants_of(workload) == ["plain", "flag", "flag-padded", "liger"]


def test_a_step_of_distillation_has_a_loss_of_two_heads():
    sizes = {"lengths": "exponential", "teacher": "tiny-qwen3-moe"}
    workload = step_cases.StepWorkload("distil-trl", "tiny-qwen3-moe", 4, 8, 4, **sizes)
    assert workload.shape == "tiny-qwen3-moe 4x(..4+..8 exponential) from tiny-qwen3-moe"
    plain, found = (endtoend.train(workload, variant, steps=2) for variant in ("plain", "flag"))
    assert min(plain["losses"]) > 1e-5
    assert plain["live_share"] < 0.8
    assert found["ran"]["linear_divergence"] == 2
    assert not endtoend.differs({**found, "dtype": "float32"}, plain)
    with pytest.raises(ValueError, match=r"teacher belongs to 'distil-trl' alone; got ''"):
        step_cases.StepWorkload("distil-trl", "tiny-qwen3-moe", 4, 8, 4)


def test_a_long_row_has_positions_and_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(step_cases, "_LONG", 200)
    workload = step_cases.StepWorkload("sft-trainer", "tiny-llama", 1, 200, checkpointing=True)
    assert step_cases.variants_of(workload) == ["plain", "flag", "flag-tiled", "liger"]
    assert workload.shape == "tiny-llama 1x200 checkpointed"
    clock = step_clock.Clock(CPU)
    trainer, _ = steps.build_trainer(workload, step_cases.VARIANTS["plain"], 1, str(tmp_path), clock)
    assert trainer.model.config.max_position_embeddings == 200
    assert trainer.args.gradient_checkpointing
    output = tmp_path / "row.json"
    command = ["--workload", json.dumps(dataclasses.asdict(workload)), "--variant", "plain", "--steps", "9"]
    assert endtoend.main([*command, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert (len(found["each_ms"]), found["ms"]["samples"]) == (3, 2)
    with pytest.raises(ValueError, match=r"checkpointing.*'grpo-trl'"):
        step_cases.StepWorkload("grpo-trl", "tiny-llama", 1, 200, checkpointing=True)


def test_a_variants_options_reach_the_package(monkeypatch):
    import npu_trainer_kernels

    given = []
    monkeypatch.setattr(npu_trainer_kernels, "NpuKernelsArguments", lambda **options: given.append(options))
    steps.kernels_of(step_cases.VARIANTS["flag-tiled"])
    assert given == [{"use_npu_kernels": True, "npu_kernels_tiled_mlp": 8192}]


@pytest.mark.full("sft")
@pytest.mark.parametrize(
    ("workload", "first_loss"),
    [
        # The first loss of a model with random weights is near that of a uniform choice.
        (step_cases.StepWorkload("sft-trainer", "tiny-llama", 2, 8), pytest.approx(math.log(97), abs=0.1)),
        (step_cases.StepWorkload("sft-trainer", "tiny-gemma3", 2, 8), pytest.approx(math.log(97), abs=0.1)),
        # Policy and reference agree.
        (step_cases.StepWorkload("dpo-trl", "tiny-llama", 2, 12, 2, 3), pytest.approx(math.log(2), abs=1e-6)),
        # Batches with padding.
        (
            step_cases.StepWorkload("sft-trainer", "tiny-llama", 4, 40, lengths="exponential"),
            pytest.approx(math.log(97), abs=0.1),
        ),
    ],
    ids=lambda value: value.key if isinstance(value, step_cases.StepWorkload) else "",
)
def test_an_end_to_end_step_in_a_process_of_its_own(workload, first_loss, tmp_path, monkeypatch):
    def in_a_warm_process(command, *, cwd, env, **_):
        done = warm.run(*command[2:], folder=cwd, output=tmp_path / "printed.txt", **env)
        return subprocess.CompletedProcess(command, done.returncode, "", done.output)

    with monkeypatch.context() as patch:
        if workload.size != "tiny-gemma3":  # which begins as a user's
            patch.setattr(endtoend.subprocess, "run", in_a_warm_process)
        found = {variant: endtoend.run(workload, variant, steps=2, timeout=300) for variant in ("plain", "flag")}
    rows = [{**row, "version": "1"} for row in found.values()]
    assert [r["status"] for r in rows] == ["ok", "ok"], rows
    # Of the first step and of the last.
    assert all(r["tokens_per_second"] > 0 and len(r["losses"]) == 2 for r in rows)
    assert [r["losses"][0] for r in rows] == [first_loss, first_loss]
    assert not endtoend.differs(rows[1], rows[0])
    assert set(endtoend.ratios(rows)) == {"flag"}
    text = report.markdown(meta(), rows)
    assert workload.name in text
    assert "DIFFERS" not in text
    assert f"{rows[0]['live_share']:.1%} of" in text
    assert f"{endtoend.ratios(rows)['flag'][0]:.3f} |" in text
    # Without a plain row there is nothing to compare with.
    assert f"| {rows[1]['peak_bytes'] / 2**30:.3f} |  |  |" in report.markdown(meta(), rows[1:])
    rows[1]["losses"][0] *= 1.1
    assert "DIFFERS" in report.markdown(meta(), rows)


@pytest.mark.parametrize(
    ("workload", "patched", "own_head"),
    [
        (step_cases.StepWorkload("sft-trainer", "tiny-gemma3", 2, 8), 1, True),
        (step_cases.StepWorkload("dpo-trl", "tiny-llama", 2, 12, 2, 3), 2, False),
    ],
    ids=lambda value: value.name if isinstance(value, step_cases.StepWorkload) else "",
)
def test_ligers_layers_are_in_every_model_of_a_step(workload, patched, own_head, monkeypatch):
    """By a stand-in that sets forwards on instances as Liger does, whose kernels do not run here."""
    asked, called = [], set()

    def apply(model, **settings):
        asked.append(settings)
        for layer in model.model.layers:
            own = type(layer.mlp).forward

            def forward(self, x, own=own):
                called.add(id(self))
                return own(self, x)

            layer.mlp.forward = types.MethodType(forward, layer.mlp)

    patch = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    found = endtoend.train(workload, "liger", steps=2)
    assert len(found["losses"]) == 2
    assert asked == [{"fused_linear_cross_entropy": own_head, "cross_entropy": False}]
    assert len(called) == patched * models.MODELS[workload.size][1]["num_hidden_layers"]


def test_an_end_to_end_failure_is_a_row():
    found = endtoend.run(step_cases.StepWorkload("sft-trainer", "tiny-llama", 2, 8), "plain", steps=2, timeout=0.01)
    assert found["status"] == "error"
    assert "not finished" in found["reason"]


def test_a_peer_that_is_not_installed_costs_no_process(monkeypatch):
    monkeypatch.setattr(endtoend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(endtoend.subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    found = endtoend.run(step_cases.StepWorkload("sft-trainer", "tiny-llama", 2, 8), "liger-flash", steps=2, timeout=60)
    assert found["status"] == "absent"
    assert "liger_kernel" in found["reason"]


def test_two_leaves_with_one_gradient_count_once():
    """What is left after a call is what is allocated: `add_rms_norm` hands one tensor to x and residual."""
    case = tiny("add_rms_norm")
    inputs = OPS[case.op].build(case, CPU).require_grad()
    left = measure._call(OPS[case.op].reference, inputs, "both")
    assert len(inputs.leaf_grads()) == 3
    assert len({t.data_ptr() for t in left}) == len(left)


def test_a_file_that_is_gone_on_with_keeps_its_commands(tmp_path):
    path = tmp_path / "r.json"
    for arguments in (["--only", "a"], ["--only", "b"], ["--only", "b"]):
        kept = results.Results(path, results.environment(CPU, arguments, commit="1234567"))
        kept.add([row()])
    written, _ = results.read(path)
    assert written["commands"] == ["python -m benchmarks --only a", "python -m benchmarks --only b"]
    assert written["commit"] == "1234567"
    assert "--only a" in report.markdown(written, [row()])


def test_end_to_end_plot(tmp_path):
    step = {"group": "end-to-end", "op": "sft-trainer", "shape": "tiny 1x1", "status": "ok", "tokens_per_second": 1e3,
            "peak_bytes": 1 << 30}  # fmt: skip
    written = report.plot([{**step, "provider": name} for name in ("plain", "flag")], tmp_path / "r")
    assert [p.name for p in written] == ["r-end-to-end.png"]
