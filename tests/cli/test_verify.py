"""`npu-kernels verify`: verdict, exit code, datasets. The rule itself is tested in tests/convergence."""

import json

import pytest

from convergence import mutations
from convergence.data import tokenizer_for
from npu_trainer_kernels.cli import main
from tests.models import small_model

FEW = ["--steps", "3", "--sequence-length", "32", "--noise-runs", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A Llama with its tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("model")
    small_model("llama", vocab_size=263).save_pretrained(folder)
    tokenizer_for("grpo").save_pretrained(folder)
    return str(folder)


def test_the_same_training(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("What is 17 + 25? It is 42. " * 40)
    assert main(["verify", "--model", model, "--dataset", str(text), *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert {"loss", "gradient norm", "parameters at the end"} <= {check["name"] for check in found["checks"]}
    assert all(check["noise_floors"] <= check["allowed"] for check in found["checks"])
    assert found["report"]["replaced"]


def test_a_captured_body_is_verified(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("What is 17 + 25? It is 42. " * 40)
    assert main(["verify", "--model", model, "--dataset", str(text), *FEW, "--capture", "on", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["report"]["capture"]["replayed"]


def test_a_planted_fault_is_exit_code_1(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"words": f"row {i} of many, " * 20}) + "\n" for i in range(20)))
    fault = next(m for m in mutations.MUTATIONS if m.name == "logit gradient x 1.01")
    with fault.planted():
        code = main(["verify", "--model", model, "--dataset", str(rows), "--text-column", "words", *FEW])
    assert code == 1
    out = capsys.readouterr().out
    assert "NOT the same training" in out
    assert "FAILED" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps must be at least 1; got 0"),
        (["--ops", "nonsense"], "--ops must be a list of rms_norm, "),
        (["--ops", "rms_norm,nonsense"], "--ops must be a list of rms_norm, "),
        (["--backend", "cudnn"], "--backend must be one of"),
        (["--dataset", "nowhere.jsonl"], "--dataset must be a file that is there, or a hub id; got 'nowhere.jsonl'"),
        (["--text-column", "words"], "--text-column words does nothing without --dataset"),
        (["--model", "nowhere/model"], "nowhere/model"),
    ],
)
def test_wrong_usage_is_exit_code_2(model, capsys, arguments, message):
    assert main(["verify", "--model", model, *FEW, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err


def test_a_data_set_that_says_nothing(model, tmp_path, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError

    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    monkeypatch.setattr("datasets.load_dataset", refuse)
    assert main(["verify", "--model", model, "--dataset", str(rows), *FEW, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].endswith(": ValueError")


def test_a_column_that_is_not_there(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"words": "a"}\n')
    assert main(["verify", "--model", model, "--dataset", str(rows), *FEW, "--json"]) == 2
    assert "--text-column must be one of words; got 'text'" in json.loads(capsys.readouterr().out)["error"]
