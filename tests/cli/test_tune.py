"""`npu-kernels tune`: what wins, what is stored, what is never chosen. Times are made up: none is tested."""

import dataclasses
import json

import pytest
import torch

from npu_trainer_kernels import backends, timing, tuned, workloads
from npu_trainer_kernels.cli import main
from npu_trainer_kernels.timing import Summary

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "vocab_size": 331, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NPU_KERNELS_TUNED")
    tuned.forget()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    yield str(tmp_path)
    tuned.forget()


@pytest.fixture
def times(monkeypatch):
    """Milliseconds that every measurement of ours, and of plain PyTorch, gives."""
    made_up = {"ours": 1.0, "plain": 2.0}
    references = {op.reference for op in workloads.OPS.values()}

    def measure(fn, sets, mode, where, settings, cold):
        ms = made_up["plain" if fn in references else "ours"]
        sets[0].backward(fn(sets[0].tensors))
        return Summary(ms, ms, ms, ms, 1), None

    monkeypatch.setattr(timing, "measure", measure)
    return made_up


def run(model, capsys, *options):
    code = main(["tune", "--model", model, "--tokens", "16", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_winners_are_stored_for_the_models_shapes(model, times, capsys):
    code, found = run(model, capsys)
    assert code == 0
    assert set(found["ops"]) == set(workloads.OPS)
    assert found["ops"]["swiglu"]["shape"] == "N=16 I=176"
    assert {op["winner"] for op in found["ops"].values()} == {"torch"}
    assert set(tuned.machines()["cpu"]) == set(backends.OPS)
    assert backends.keeps_plain("swiglu", CPU) is None


def test_an_op_that_loses_is_left_out_with_both_times(model, times, capsys):
    times["ours"] = 3.0
    _, found = run(model, capsys)
    assert found["ops"]["rms_norm"]["winner"] == "plain"
    assert "torch 3 ms, plain PyTorch 2 ms" in backends.keeps_plain("rms_norm", CPU)
    times["ours"] = 2.02
    _, found = run(model, capsys)
    assert found["ops"]["rms_norm"]["winner"] == "torch"


def test_the_head_keeps_its_memory(model, times, capsys, monkeypatch):
    """Where ours holds a part of the logits and plain PyTorch all of them, time does not decide."""
    times["ours"] = 3.0
    _, found = run(model, capsys)
    assert found["ops"]["linear_cross_entropy"]["winner"] == "plain"
    monkeypatch.setattr("npu_trainer_kernels.tiling.head_chunk", lambda rows, *args: rows - 1)
    _, found = run(model, capsys)
    winners = {op: found["ops"][op]["winner"] for op in found["ops"]}
    assert winners["linear_cross_entropy"] == winners["fused_linear_grpo_loss"] == "torch"
    assert winners["rms_norm"] == "plain"


def test_a_wrong_backend_never_wins(model, times, capsys, monkeypatch):
    op = workloads.OPS["rms_norm"]
    wrong = dataclasses.replace(op, ours=lambda backend: lambda t: 1.01 * op.ours(backend)(t))
    monkeypatch.setitem(workloads.OPS, "rms_norm", wrong)
    code, found = run(model, capsys)
    assert code == 1
    assert "result 0" in found["ops"]["rms_norm"]["problems"]["torch"]
    assert found["ops"]["rms_norm"]["winner"] is None
    assert "rms_norm" not in tuned.machines()["cpu"]


def test_plain_pytorch_out_of_memory_is_no_failure(model, times, capsys, monkeypatch):
    reference = workloads.Workload.reference.fget

    def of(work):
        # The small check still has its reference, the measurement none.
        return too_large if work.op == "linear_logprob" and work.sizes["V"] == 331 else reference(work)

    def too_large(tensors):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(workloads.Workload, "reference", property(of))
    code, found = run(model, capsys)
    assert code == 0
    assert found["ops"]["linear_logprob"]["winner"] == "torch"
    assert "OutOfMemoryError" in found["ops"]["linear_logprob"]["problems"]["plain"]


def test_a_dry_run_stores_nothing(model, times, capsys):
    code, found = run(model, capsys, "--dry-run")
    assert code == 0
    assert found["stored"] is None
    assert tuned.machines() == {}


def test_it_measures_for_real(model, capsys):
    assert main(["tune", "--model", model, "--tokens", "16", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "from now on" in out
    assert "nothing was stored" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tokens", "3"], "tokens must be at least 8; got 3"), (["--model", "nowhere.json"], "no file")],
)
def test_bad_arguments(model, capsys, options, message):
    assert main(["tune", "--model", model, *options]) == 2
    assert message in capsys.readouterr().err
