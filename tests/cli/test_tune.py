"""`npu-kernels tune`: what wins, what is stored, what is never chosen. Times are made up: none is tested."""

import dataclasses
import json

import pytest
import torch

from npu_trainer_kernels import backends, tiling, timing, tuned, workloads
from npu_trainer_kernels.cli import _tune, main
from npu_trainer_kernels.device import spec
from npu_trainer_kernels.ops._launch import KernelError
from npu_trainer_kernels.timing import Summary
from npu_trainer_kernels.tuned import Variation

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "vocab_size": 331, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CPU = torch.device("cpu")
CPU_SPEC = spec(CPU)


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
    assert set(tuned.machines()["cpu"].ops) == set(backends.OPS)
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
    assert "rms_norm" not in tuned.machines()["cpu"].ops


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


def test_tiles_are_tried_one_by_one_and_the_faster_kept(device):
    """The op's time is what the tiles that it asked for say: half a block of one, twice the block of the other."""
    forward, backward = (64, 3), (64, 5)
    best_of = {forward: 32, backward: 128}
    asked = []

    def time():
        sizes = {key: tiling.swiglu_block(4, key[1], CPU_SPEC).size for key in (forward, backward)}
        asked.append(tuple(sizes.values()))
        ms = 1.0 + sum(abs(size - best_of[key]) for key, size in sizes.items())
        return Summary(ms, ms, ms, ms, 1)

    try:
        kept, best = _tune.tune_tiles(time(), time, device)
        assert kept == {("swiglu_block", (4, 3)): Variation(size=-1), ("swiglu_block", (4, 5)): Variation(size=1)}
        assert best.median == 1.0
        # No tile is tried twice, and what is kept stays for the next one.
        assert len(asked) == 2 + 2 + 2
        assert asked[-1][0] == 32
    finally:
        for moved in (3, 5):
            tiling.try_variation("swiglu_block", (4, moved, CPU_SPEC), None)


def test_a_tile_that_does_not_compile_is_passed_over(device):
    def time():
        if tiling.swiglu_block(4, 3, CPU_SPEC).size != 64:
            raise KernelError("out of registers")
        return Summary(1.0, 1.0, 1.0, 1.0, 1)

    assert _tune.tune_tiles(time(), time, device) == ({("swiglu_block", (4, 3)): Variation()}, time())


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tokens", "3"], "tokens must be at least 8; got 3"), (["--model", "nowhere.json"], "no file")],
)
def test_bad_arguments(model, capsys, options, message):
    assert main(["tune", "--model", model, *options]) == 2
    assert message in capsys.readouterr().err


def test_an_earlier_measurement_has_no_part_in_a_new_one(model, times, capsys, monkeypatch):
    tuned.store("cpu", {"rms_norm": tuned.Entry("torch", 9.0, 1.0, True, "N=8", "float32")})
    seen = []
    monkeypatch.setattr(
        _tune, "tune_op", lambda work, *args: seen.append(tuned.machines()) or _tune.Outcome(work, True)
    )
    assert main(["tune", "--model", model]) == 0
    assert seen == [{}] * len(workloads.OPS)
    assert "rms_norm" in tuned.machines()["cpu"].ops
