"""The runs of sizes that people know, at tiny sizes; several runs at a time, and how a stopped command goes on."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from convergence import __main__ as command
from convergence import mutations, output, pool, suite
from convergence.cases import CASES, SHOWCASE, Case, Text, WarmUp, find
from convergence.runs import HELD_OUT, Workshop, run
from convergence.suite import CaseResult, result_of, variants_of
from npu_trainer_kernels.verify import Variant
from tests import warm
from tests.models import small_model

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip
TEXT, SUMS = SHOWCASE
TINY_TEXT = replace(
    TEXT, steps=2, held_out=2, model={**TEXT.model, **SMALL, "vocab_size": 307}, text=Text(307, 33, 60_000)
)  # fmt: skip
TINY_SUMS = replace(
    SUMS, steps=3, held_out=2, model={**SUMS.model, **SMALL, "vocab_size": 401}, warm_up=WarmUp(2, 1e-3, 1.0)
)  # fmt: skip


@pytest.mark.parametrize(("case", "millions"), [(TEXT, 124), (SUMS, 596)])
def test_the_sizes_are_those_that_people_know(case: Case, millions: int) -> None:
    with torch.device("meta"):
        model = small_model(case.family, **case.model)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.6)
    assert case not in CASES
    assert case.is_large
    assert not any(other.is_large for other in CASES)
    assert find(case.name) is case


def test_text_is_not_held_out_and_trained_on(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, "cpu")
    trainer = workshop.trainer(TINY_TEXT, Variant())
    held_out = workshop.held_out(TINY_TEXT)
    assert held_out.shape == (2, 33)
    trained = torch.tensor(trainer.train_dataset["input_ids"])
    assert torch.equal(torch.cat((workshop.sequences(TINY_TEXT.text)[:HELD_OUT], trained)), torch.load(
        next(tmp_path.glob("text-*.pt"))))  # fmt: skip
    assert trained.max() < 307
    assert trainer.train_dataset["labels"] == trainer.train_dataset["input_ids"]


@pytest.mark.full(quick="test_text_is_not_held_out_and_trained_on")
def test_another_process_plays_the_same_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NOISE_RUNS", 2)
    first = Workshop(tmp_path, "cpu")
    runs = [(Variant(), run(first, TINY_SUMS, Variant()))]
    first.keep_rollouts(TINY_SUMS)
    other = Workshop(tmp_path, "cpu")
    runs += [(variant, run(other, TINY_SUMS, variant)) for variant in variants_of(TINY_SUMS)[1:]]
    assert other.rollouts[TINY_SUMS.name] == first.rollouts[TINY_SUMS.name]
    result = result_of(TINY_SUMS, runs, 1.0)
    assert result.passed, result.verdict.failures()
    assert result.replaced["linear_logprob"] == 1
    assert {path.suffix for path in tmp_path.iterdir()} <= {"", ".pt", ".6b-sums"}, "what was being written was left"


@pytest.mark.full(quick="test_text_is_not_held_out_and_trained_on")
def test_several_at_a_time_and_a_second_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NOISE_RUNS", 2)
    monkeypatch.setattr(pool, "get_context", lambda start: warm.context())
    wrong = replace(TINY_TEXT, name="wrong", options={**TINY_TEXT.options, "learning_rate": "much"})
    skipped = replace(find("llama-lm-ascend"), backend="triton")

    def cases(*chosen: Case) -> list[CaseResult]:
        found, faults = pool.run_all(chosen, False, None, "cpu", lambda *_: None, 2, tmp_path)
        assert not faults
        return found

    monkeypatch.setattr(pool, "unavailable", lambda case, device: "no" if case.backend == "triton" else "")
    good, bad, none = cases(TINY_TEXT, wrong, skipped)
    assert good.passed, good.verdict.failures()
    assert {"rms_norm", "linear_cross_entropy"} <= set(good.replaced)
    assert not bad.passed
    assert "reference: " in bad.problems[0]
    assert none.skipped == "no"
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    assert len(made) == 1 + 4
    lost = next(path for path in made if "with the kernels" in path.name)
    lost.unlink()
    (again,) = cases(TINY_TEXT)
    assert again.checks == good.checks
    now = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    assert {path for path in made if now[path] != made[path]} == {lost}


class Inline:
    """In the place of workers."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done


@pytest.mark.full(quick="test_text_is_not_held_out_and_trained_on")
def test_faults_are_planted_beside_runs_that_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NOISE_RUNS", 2)
    monkeypatch.setattr(pool, "_workshop", Workshop(tmp_path, "cpu"))
    planted = mutations.chosen(["logit gradient x 1.01", "softcap without its derivative"])
    of_lm, of_softcap = mutations.cases_of(planted)
    for variant in suite.variants_of(of_lm):
        pool._one(of_lm, variant)
    broken = {of_softcap.name: "loss"}
    caught, not_planted = pool._planted(cast(Any, Inline()), planted, broken, lambda *_: None)
    assert (caught.name, caught.case, caught.outcome) == (planted[0].name, of_lm.name, "caught")
    assert (not_planted.outcome, not_planted.caught, not_planted.shown_in) == ("not planted", False, "loss")
    assert not list(tmp_path.rglob(f"*{of_softcap.name}*"))
    good = mutations.control(suite.result_of(of_lm, pool._runs(tmp_path, of_lm), 0.0))
    assert (good.case, good.outcome, good.caught) == (of_lm.name, "pass", True)
    crashed = mutations.control(CaseResult({"name": "x"}, problems=["reference: it raised"]))
    assert (crashed.outcome, crashed.caught, crashed.shown_in) == ("FAIL", False, "reference: it raised")


def test_workers_are_spread_over_the_cards_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.cards_of("cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert pool.cards_of("cuda", {"CUDA_VISIBLE_DEVICES": "2,GPU-8"}) == ["2", "GPU-8"]
    assert pool.cards_of("npu", {"ASCEND_RT_VISIBLE_DEVICES": "7"}) == ["7"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert pool.cards_of("cuda", {}) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cards: Any = SimpleNamespace(get=lambda: "2")
    with pytest.raises(RuntimeError, match="a worker is to see one card; it sees 3"):
        pool._start(tmp_path, "cuda", cards)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


def test_what_other_sources_left_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pool.kept_in(tmp_path, "cuda")
    assert found == pool.kept_in(tmp_path, "cuda")
    assert found != pool.kept_in(tmp_path, "cpu")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "__init__.py").touch()
    monkeypatch.setattr(pool.npu_trainer_kernels, "__file__", str(tmp_path / "sources" / "__init__.py"))
    assert pool.kept_in(tmp_path, "cuda") != found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "somewhere"], "--keep goes with --jobs"),
        (["--jobs", "0"], "--jobs must be at least 1; got 0"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
    ],
)
def test_a_bad_option_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def _result(case: Case) -> CaseResult:
    names = ("loss", "gradient norm", "held-out log-probability")
    checks = [suite.Check(name, [0.0, 1.0], [1.0, 1.0], 3.0) for name in names]
    curves = {name: {"unpatched": [[1.0, 2.0]] * 3, "patched": [1.0, 2.0]} for name in (*names, "reward")}
    return CaseResult(suite.asdict(case), checks=checks, curves=curves)


def test_a_showcase_has_a_figure_of_its_own_and_is_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "figure", lambda result, path: None)
    monkeypatch.setattr(output, "_machine", lambda device: "a card")
    summary = output.write_results(tmp_path, [_result(TEXT), _result(SUMS)], [], "cuda", "abc", told=True)
    assert summary.stem.endswith("cuda-showcase")
    assert summary.with_suffix(".png").stat().st_size > 1000
    assert "commit `abc`" in summary.read_text()


def test_fewer_steps_are_no_full_result(monkeypatch: pytest.MonkeyPatch) -> None:
    fault: Any = object()
    whole = [CaseResult(suite.asdict(case)) for case in CASES]
    assert output._is_full(whole, [fault])
    args = command.parse(["--full", "--steps", "2"])
    short = command.chosen_cases(args)
    assert {case.steps for case in short} == {2}
    assert not output._is_full([CaseResult(suite.asdict(case)) for case in short], [fault])
    assert command.chosen_cases(command.parse(["--showcase"])) == list(SHOWCASE)


def test_an_option_that_is_given_twice_counts_twice() -> None:
    args = command.parse(["--case", "llama-lm", "--case", "qwen2-lm", "qwen3-lm", "--mutation", "a", "--mutation", "b"])
    assert (args.case, args.mutation) == (["llama-lm", "qwen2-lm", "qwen3-lm"], ["a", "b"])
