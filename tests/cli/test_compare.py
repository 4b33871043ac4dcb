"""`npu-kernels compare`: what it reads, shows and judges."""

import json
import random

import pytest

from npu_trainer_kernels.cli import main
from npu_trainer_kernels.verify import judge_scalars
from tests.models import small_model
from tests.test_callback import make_trainer


def log(seed: int, scale: float = 1.0, steps: int = 20, noise: float = 1e-6) -> list[dict[str, float]]:
    """The log of a run whose loss falls, with rounding by a seed; `scale` is a fault of the loss."""
    drawn = random.Random(seed)
    return [
        {"step": step, "epoch": step / 10, "loss": scale * 2.0 / step * (1 + noise * drawn.gauss(0, 1)),
         "grad_norm": 1.0 + noise * drawn.gauss(0, 1), "tokens_per_second": 100.0 * scale,
         "update_seconds": 0.5 / scale, "waiting_seconds": 0.1}
        for step in range(1, steps + 1)
    ]  # fmt: skip


def saved(folder, entries, where="trainer_state.json"):
    path = folder / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"log_history": entries}))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    made = {name: saved(tmp_path / name, log(seed)) for seed, name in enumerate(("a", "b", "c", "d", "e"))}
    return {**made, "wrong": saved(tmp_path / "wrong", log(9, scale=1.01))}


def test_two_runs_side_by_side(runs, tmp_path, capsys):
    figure = tmp_path / "runs.png"
    assert main(["compare", runs["a"], runs["wrong"], "--figure", str(figure), "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["passed"] is None
    assert "not decided" in shown.err
    by_name = {row["quantity"]: row for row in found["rows"]}
    assert list(by_name) == ["loss", "grad_norm", "tokens_per_second", "update_seconds", "waiting_seconds"]
    assert by_name["tokens_per_second"]["ratio"] == pytest.approx(1.01)
    assert by_name["update_seconds"]["ratio"] == pytest.approx(1 / 1.01)
    assert by_name["loss"]["at_step"] == 1
    assert by_name["loss"]["largest_distance"] == pytest.approx(0.02, rel=0.01)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("other", "code"), [("b", 0), ("wrong", 1)])
def test_the_same_training_or_not(runs, other, code, capsys):
    noise = [runs[name] for name in ("c", "d", "e")]
    assert main(["compare", runs["a"], runs[other], "--noise", *noise, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is (code == 0)
    failed = {check["name"] for check in found["checks"] if not check["passed"]}
    assert failed == (set() if code == 0 else {"loss", "drift of loss"})


def test_rounded_logs_are_equal_up_to_their_last_place(tmp_path, capsys):
    """Older Trainers log four decimals: equal noise runs must not make the next decimal a fault."""

    def rounded(seed):
        return [{**entry, "loss": round(entry["loss"], 4), "grad_norm": 1.0} for entry in log(seed, noise=1e-5)]

    names = {name: saved(tmp_path / name, rounded(0 if name != "b" else 5)) for name in ("a", "b", "c", "d")}
    assert main(["compare", names["a"], names["b"], "--noise", names["c"], names["d"]]) == 0
    wrong = [{**entry, "loss": entry["loss"] + 4e-4} for entry in rounded(0)]
    assert main(["compare", names["a"], saved(tmp_path / "w", wrong), "--noise", names["c"], names["d"]]) == 1


def test_the_last_checkpoint_is_read(runs, tmp_path, capsys):
    folder = tmp_path / "saved"
    saved(folder, log(1, steps=4), "checkpoint-4/trainer_state.json")
    saved(folder, log(1, steps=12), "checkpoint-12/trainer_state.json")
    saved(folder, log(1, steps=2), "checkpoint-old/trainer_state.json")
    assert main(["compare", runs["a"], str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["steps"] for row in found["rows"]} == {12}


def test_values_that_are_not_finite(runs, tmp_path, capsys):
    entries = log(1)
    entries[3]["loss"] = float("nan")
    other = saved(tmp_path / "nan", entries)
    noise = ["--noise", runs["c"], runs["d"]]
    assert main(["compare", runs["a"], other, *noise]) == 1
    assert main(["compare", other, runs["a"], *noise]) == 1
    assert "RUN_A itself has values that are not finite" in capsys.readouterr().out


def test_what_a_trainer_writes(tmp_path, capsys):
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, small_model("llama"), max_steps=2, logging_steps=1)
        trainer.train()
        trainer.save_state()
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loss = next(row for row in found["rows"] if row["quantity"] == "loss")
    assert loss["steps"] == 2
    assert loss["largest_distance"] == 0


def test_two_noisy_runs_at_least():
    with pytest.raises(ValueError, match="at least two noisy runs; got 2 runs"):
        judge_scalars("loss", [[1.0], [1.0]], [1.0], ["step 1"], None)
