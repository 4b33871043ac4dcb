"""`npu-kernels compile` with the real compiler."""

import json

import pytest

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ascend import cases
from npu_trainer_kernels.cli import main

CONFIG = {
    "model_type": "llama", "hidden_size": 1152, "intermediate_size": 3072, "vocab_size": 32001,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of sizes that the gate's own table does not have; norm, SwiGLU and its rotation alone, for time."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(cases, "GATE", [entry for entry in cases.GATE if entry.op in ("rms_norm", "swiglu")])
    return str(tmp_path)


def test_kernels_at_a_models_shapes_pass(model, capsys):
    assert main(["compile", "--model", model, "--all-targets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shapes = {"rms_norm": "1152 (hidden)", "swiglu": "3072 (intermediate)", "rope": "128 (head)"}
    assert {(k["op"], k["shape"]) for k in found["kernels"]} == {(op, f"4096 x {size}") for op, size in shapes.items()}
    assert len({k["target"] for k in found["kernels"]}) == len(found["targets"]) > 1
    assert all(0 < k["buffer_used_bytes"] <= k["buffer_bytes"] for k in found["kernels"])


def test_a_tile_that_does_not_fit_fails(model, monkeypatch, capsys):
    monkeypatch.setattr(tiling, "swiglu_block", lambda *args: tiling.Block(1 << 16))
    assert main(["compile", "--model", model, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {k["op"] for k in found["kernels"] if k["broken"]} == {"swiglu"}
