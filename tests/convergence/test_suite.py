"""The suite around the rule: cases, replayed rollouts, planted faults, output, exit status, `verify`."""

import contextlib
import functools
import json
import pkgutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from convergence import __main__ as command
from convergence import mutations, output
from convergence.cases import CASES, TASKS, WarmUp, find
from convergence.data import tokenizer_for
from convergence.runs import Workshop, _recording, _replaying, run
from convergence.suite import CaseResult
from npu_trainer_kernels import apply_npu_kernels, device
from npu_trainer_kernels.ops.experts import grouped
from npu_trainer_kernels.ops.head import fused as fused_module
from npu_trainer_kernels.ops.launch import launch
from npu_trainer_kernels.patching.body import packed as packed_module
from npu_trainer_kernels.patching.body import proof
from npu_trainer_kernels.verify import PRECISIONS, Check, Variant, verify
from tests.conftest import DEVICE
from tests.models import FAMILIES, small_model


def result(distance: float = 1.0) -> CaseResult:
    """A case with all the quantities that a figure shows."""
    per_step = ["loss", "gradient norm", "held-out log-probability", "held-out log-probabilities, by token",
                "held-out top 5"]  # fmt: skip
    checks = [Check(name, [0.0, distance], [1.0, 1.0], 3.0) for name in per_step]
    checks.append(Check("parameters at the end", [distance], [1.0], 3.0, ["weight"]))
    curves = {name: {"unpatched": [[1.0, 2.0]] * 3, "patched": [1.0, 2.0]} for name in per_step[:3]}
    case = {"name": "a-case", "family": "llama", "task": "lm", "precision": "fp32", "backend": "device", "steps": 2}
    return CaseResult(case, checks=checks, curves=curves, seconds=1.0)


def test_cases_are_consistent() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.task for case in CASES} == set(TASKS)
    assert {case.precision for case in CASES} == set(PRECISIONS)
    assert {case.family for case in CASES} <= set(FAMILIES)


def test_the_quick_subset_trains_both_ways_for_fifty_steps() -> None:
    long = {(case.family, case.task) for case in CASES if case.quick and case.steps >= 50}
    assert {("llama", "lm"), ("qwen3", "grpo")} <= long
    assert any(case.quick and case.backend == "triton" for case in CASES)


def test_an_unknown_case_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"llama-lm.*got 'lama'"):
        find("lama")


def test_rollouts_are_replayed_and_leave_the_random_state_alone() -> None:
    rollouts: list[Any] = []
    record = _recording(lambda prompts: ([torch.randint(99, (3,)).tolist() for _ in prompts], None), rollouts)
    torch.manual_seed(3)
    first = record([[1], [2]])
    after_recording = torch.rand(1)
    replay = _replaying(record, rollouts)
    torch.manual_seed(3)
    assert replay([[1], [2]]) == first
    assert torch.equal(torch.rand(1), after_recording)
    with pytest.raises(RuntimeError, match="different prompts"):
        _replaying(record, rollouts)([[1], [3]])


def test_the_batch_is_not_spread_over_the_gpus_in_sight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = TrainingArguments._setup_devices.func

    def two_gpus(arguments: TrainingArguments) -> torch.device:
        where = found(arguments)
        arguments._n_gpu = 2
        return where

    several = functools.cached_property(two_gpus)
    several.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", several)
    assert TrainingArguments(str(tmp_path)).n_gpu == 2
    for task in TASKS:
        case = next(case for case in CASES if case.task == task)
        assert Workshop(tmp_path, "cuda")._arguments(case, Variant()).n_gpu == 1


def test_what_is_to_be_sabotaged_exists() -> None:
    of_the_head = [mutations._LOGIT_GRADIENT, mutations._ACCUMULATE, mutations._STATISTICS, mutations._GRADIENT]
    of_packed_rows = [mutations._POSITIONS, mutations._LAYOUT, mutations._SEGMENTS, mutations._REORDER]
    of_packed_rows += [mutations._RULE, mutations._TAKE]
    of_teachers = [mutations._DIVERGENCE, mutations._OF_DIVERGENCE]
    for target in [*of_the_head, *of_packed_rows, *of_teachers, mutations._LOSS, mutations._SEAM, mutations._NORM]:
        assert callable(pkgutil.resolve_name(f"npu_trainer_kernels.{target}"))


def test_a_student_is_trained_by_the_divergence_of_two_heads(tmp_path: Path) -> None:
    case = replace(find("qwen3-distil-jsd"), steps=2, warm_up=WarmUp(steps=1))
    workshop = Workshop(tmp_path, "cpu")
    assert run(workshop, case, Variant()).report is None
    assert len(workshop.rollouts[case.name]) == 2
    report = run(workshop, case, Variant(patched=True)).report
    assert report is not None
    assert report.ran["linear_divergence"] == 2
    teacher = workshop.trainer(case, Variant()).teacher_model
    assert teacher.config.hidden_size != small_model(case.family).config.hidden_size


def test_a_planted_fault_is_removed_again() -> None:
    for mutation in mutations.MUTATIONS:
        with mutation.planted():
            pass
    for _, function in mutations._functions():
        assert "mutations" not in function.backward.__module__


@pytest.mark.parametrize(
    "name",
    ["logit gradient x 1.01", "logit gradient x 1.01, bf16 autocast", "logit gradient x 1.01, bf16",
     "last partial block of the vocabulary dropped", "softcap without its derivative"],
)  # fmt: skip
def test_a_fault_of_the_head_is_reached_in_the_kernels_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = mutations.chosen([name])
    (case,) = mutations.cases_of([fault])
    fused: list[Any] = []
    monkeypatch.setattr(fused_module, "launch", lambda *given: fused.append(given) or launch(*given))
    model = small_model(case.family).to(DEVICE, torch.bfloat16 if case.precision == "bf16" else torch.float32)
    ids = torch.randint(3, 250, (2, 9), device=DEVICE)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=case.precision == "bf16-autocast"):
            model(input_ids=ids, labels=ids).loss.backward()
        return model.model.embed_tokens.weight.grad.float()

    gpu = device.DeviceSpec("cuda", "a card", 132, 256 << 10, 80 << 30)
    with apply_npu_kernels(model, backend="triton", ops=("linear_cross_entropy",)), device.use_spec(gpu):
        right = gradient()
        with fault.planted() as fired:
            wrong = gradient()
    assert bool(fused) == (case.precision != "fp32")
    assert fired.times
    assert not torch.equal(wrong, right)


def test_a_fault_that_a_device_has_no_place_for_says_so_and_others_have_to_be_reached(tmp_path: Path) -> None:
    absent = mutations.Mutation("x", ("lm",), mutations._seen_neighbour, lambda device: f"no place on {device}")
    result = mutations.plant(absent, Workshop(tmp_path, "cpu"), lambda case: pytest.fail("it was run"))
    assert (result.outcome, result.caught, result.shown_in) == ("not on this device", True, "no place on cpu")
    assert mutations.cases_of([absent], "cpu") == []
    apart = {m.name.split(":")[0] for m in mutations.MUTATIONS if m.absent("cpu")}
    assert apart == {"segment_kernels.ByKernel", "engine._LogitsStatistics", "chunk_states._States"}
    unreached = mutations.Mutation("y", (), mutations._seen_neighbour)
    result = mutations.plant(unreached, Workshop(tmp_path, "cpu"), lambda case: [])
    assert (result.outcome, result.caught) == ("not reached", False)


@pytest.mark.parametrize("key", mutations.CASES)
def test_what_looks_at_a_model_sees_no_planted_fault(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What it shows is kept for a process; a fault may be planted in one that has shown nothing yet.
    case = mutations.CASES[key]
    model = small_model(case.family, **{"hidden_size": 64, **case.model})

    def looked_at() -> tuple[list[Any], list[Any]]:
        monkeypatch.setattr(proof, "_proofs", {})
        with apply_npu_kernels(model, backend="torch") as kernels:
            return kernels.report().replaced, kernels.report().left_alone

    expected = looked_at()
    with contextlib.ExitStack() as stack:
        for mutation in mutations.MUTATIONS:
            if key in mutation.cases:
                stack.enter_context(mutation.planted())
        assert looked_at() == expected
    packs = bool({"ragged", "states", "scan"} & set(key.split("-")))
    assert any(module.op == "varlen_attention" for module in expected[0]) or not packs


@pytest.mark.parametrize(
    ("module", "given"),
    [(packed_module, ((16, 16), True, 5.0, True, None)), (packed_module, ((16, 16), False, None, False, None)),
     (grouped, ("triton",))],
    ids=["attention by the formula", "attention", "grouped products"],
)  # fmt: skip
def test_what_is_tried_on_a_device_sees_no_planted_fault(module: Any, given: tuple[Any, ...]) -> None:
    # A run in a process of its own is the first to try.
    trial = module.trial
    trial.cache_clear()
    with contextlib.ExitStack() as stack:
        fired = [stack.enter_context(mutation.planted()) for mutation in mutations.MUTATIONS]
        assert module.trial(torch.device(DEVICE), torch.float32, *given) is None
    assert trial.cache_info().misses == 1
    assert not any(each.times for each in fired)


def test_results_survive_json(tmp_path: Path) -> None:
    document = output.write_json(tmp_path / "r.json", [result()], [], "cpu", output.current_commit())
    loaded = json.loads((tmp_path / "r.json").read_text())
    assert loaded == json.loads(json.dumps(document))
    again = CaseResult.from_dict(loaded["cases"][0])
    assert again.passed
    assert again.verdict.worst.ratio == 1.0


@pytest.mark.parametrize(("distance", "passed"), [(3.0, True), (3.1, False)])
def test_summary_figure_and_verdict(tmp_path: Path, distance: float, passed: bool) -> None:
    summary = output.write_results(tmp_path, [result(distance)], [], "cpu", "abc")
    text = summary.read_text()
    assert ("# Convergence: passed" in text) == passed
    assert ("a-case: loss" in text) != passed
    assert len(list(tmp_path.rglob("*.png"))) == 1


def test_a_skipped_case_is_no_pass() -> None:
    assert not CaseResult({"name": "x"}, skipped="no compiler").passed
    assert not CaseResult({"name": "x"}).passed


@pytest.mark.parametrize(("distance", "status"), [(1.0, 0), (9.0, 1)])
def test_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, distance: float, status: int) -> None:
    monkeypatch.setattr(command, "run_cases", lambda *args: [result(distance)])
    assert command.main(["--case", "llama-lm", "--device", "cpu", "--output", str(tmp_path)]) == status


def test_a_release_needs_a_full_passing_result_of_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output, "current_commit", lambda: "abc")
    assert "no full result" in output.release_problem(tmp_path)
    for full, passed, expected in ((False, True, "no full"), (True, False, "failed"), (True, True, "")):
        document = {"commit": "abc", "full": full, "passed": passed, "date": "today"}
        (tmp_path / "r.json").write_text(json.dumps(document))
        problem = output.release_problem(tmp_path)
        assert expected in problem
        assert bool(expected) == bool(problem)
    monkeypatch.setattr(output, "current_commit", lambda: "abc-dirty")
    assert "not a commit" in output.release_problem(tmp_path)


def test_one_device_that_failed_stops_a_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output, "current_commit", lambda: "abc")
    for name, passed in (("cpu", True), ("npu", False)):
        document = {"commit": "abc", "full": True, "passed": passed, "date": "today"}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert "npu.json" in output.release_problem(tmp_path)


def test_a_commit_during_the_run_spoils_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output, "current_commit", lambda: "def")
    document = output.write_json(tmp_path / "r.json", [result()], [], "cpu", "abc")
    assert document["commit"] == "abc, changed during the run"


def test_the_release_gets_what_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output, "current_commit", lambda: "abc")
    monkeypatch.setattr(output, "_is_full", lambda *_: True)
    summary = output.write_results(tmp_path / "results", [result()], [], "cpu", "abc")
    monkeypatch.setattr(output, "_is_full", lambda *_: False)
    part = output.write_results(tmp_path / "results", [result()], [], "cpu", "abc")
    assert part != summary
    arguments = ["--check-release", "--output", str(tmp_path / "results"), "--attach", str(tmp_path / "dist")]
    assert command.main(arguments) == 0
    with zipfile.ZipFile(tmp_path / "dist" / "convergence.zip") as packed:
        assert sorted(packed.namelist()) == [f"{summary.stem}.json", f"{summary.stem}.md",
                                             f"{summary.stem}/{result().name}.png"]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with its tokenizer, on disk."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), tokenizer_for("grpo")
    small_model("llama", vocab_size=263).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_verify_accepts_the_kernels(tiny: str) -> None:
    said: list[str] = []
    verdict = verify(tiny, steps=3, sequence_length=32, noise_runs=3, on_run=lambda variant: said.append(str(variant)))
    assert verdict.passed, str(verdict)
    assert verdict.report is not None
    assert verdict.report.replaced
    assert said == ["reference", "noise 1", "noise 2", "noise 3", "with the kernels"]


def test_verify_refuses_a_faulty_kernel(tiny: str) -> None:
    fault = next(m for m in mutations.MUTATIONS if m.name == "logit gradient x 1.01")
    with fault.planted():
        verdict = verify(tiny, steps=3, sequence_length=32, noise_runs=3)
    assert not verdict.passed
    assert "gradient norm" in str(verdict)


def test_verify_names_a_missing_tokenizer(tmp_path: Path) -> None:
    small_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer makes no tokens"):
        verify(str(tmp_path), steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"noise_runs": 1}, "noise_runs must be at least 2; got 1"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"dataset": ["too short"]}, "sequences of 256 tokens are needed"),
    ],
)
def test_verify_names_a_bad_argument(tiny: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(tiny, **options)
