"""`npu-kernels compile` without the compiler: arguments, models, what it makes of the gate's rows. The compiler itself
is asked in tests/ascend/test_cli.py."""

import json

import pytest

from npu_trainer_kernels.ascend import gate
from npu_trainer_kernels.ascend.cases import model_cases
from npu_trainer_kernels.cli import _compile, main
from npu_trainer_kernels.descriptions import GATE, ModelShapes, is_rotation

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "vocab_size": 331, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


ROTATIONS = {entry.op for entry in GATE if is_rotation(entry)}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def row(op, broken=()):
    return gate.GateRow(op, "_kernel", "8 x 64 (hidden)", "bf16", "Ascend910B4", None, None, False, tuple(broken))


@pytest.fixture
def compiled(monkeypatch):
    """Stands for the compiler: every case passes, unless its op is in the list that this returns."""
    failing = []
    monkeypatch.setattr(_compile, "_ready", lambda: None)
    monkeypatch.setattr(
        gate, "collect", lambda cases, chips, workers: [row(c.op, ["broken rule"] * (c.op in failing)) for c in cases]
    )
    return failing


def test_without_the_extra_it_says_what_to_install(model, capsys):
    assert main(["compile", "--model", model, "--json"]) == 2
    captured = capsys.readouterr()
    assert "pip install '.[ascend]'" in json.loads(captured.out)["error"]
    assert "'.[ascend]'" in captured.err


def test_every_entry_of_the_table_at_the_models_sizes():
    shapes = ModelShapes(
        hidden=2304, intermediate=9216, vocabulary=256000, heads=8, kv_heads=4, head_dim=256, channels=4096, taps=4
    )
    found = model_cases(shapes, "bf16")
    assert [case.op for case in found] == [entry.op for entry in GATE if "bf16" in entry.dtypes and entry.part == 1]
    sizes = {case.op: case.shape.split(" x ")[1] for case in found}
    assert sizes["rms_norm"] == "2304 (hidden)"
    assert sizes["swiglu"] == "9216 (intermediate)"
    assert sizes["rope"] == sizes["rms_norm, of heads"] == "256 (head)"
    assert sizes["linear_cross_entropy"] == "256000 (vocabulary)"
    assert {case.dtype for case in model_cases(shapes, "fp32")} == {"fp32"}


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        (CONFIG, "rope"),
        ({**CONFIG, "model_type": "gpt_neox", "rotary_pct": 0.25}, "rope, a quarter"),
        ({**CONFIG, "model_type": "glm"}, "rope, by turns, tables of which half is read, half"),
        ({**CONFIG, "model_type": "glm4_moe"}, "rope, half"),
        ({**CONFIG, "model_type": "cohere"}, "rope, by turns"),
        ({**CONFIG, "model_type": "gpt_oss"}, "rope, tables of pairs"),
        ({**CONFIG, "model_type": "phi", "partial_rotary_factor": 0.4}, "rope, 0.4 of a head"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_a_model_is_checked_as_its_own_code_rotates(tmp_path, compiled, capsys, config, rotated):
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 128, "hidden_size": 512}))
    assert main(["compile", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {op for k in found["kernels"] if (op := k["op"]).startswith("rope")} == {rotated}
    assert {op for op in found["left_out"] if op.startswith("rope")} == ROTATIONS - {rotated}
    assert found["left_to_the_model"] == {}


def test_what_the_ops_leave_to_the_model_is_not_compiled_but_named(tmp_path, compiled, capsys):
    sizes = {"hidden_size": 768, "num_attention_heads": 8, "head_dim": 96, "intermediate_size": 18432}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **sizes, "model_type": "gpt_neox"}))
    assert main(["compile", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    left = found["left_to_the_model"]
    assert left["rope, a quarter"] == "halves of 12 elements, less than the 32 bytes of a transfer on Ascend910B4"
    assert left["swiglu, joined by turns"].startswith("gate and up by turns, of 18432 columns each: above 12288 ")
    assert not {k["op"] for k in found["kernels"]} & left.keys()
    assert main(["compile", "--model", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Left to the model's own code: rope, a quarter: {left['rope, a quarter']}" in said


def test_what_a_model_has_no_size_for_is_named(tmp_path, compiled, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 2}))
    assert main(["compile", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ops = {k["op"].partition(",")[0] for k in found["kernels"]}
    assert {"rms_norm", "rope", "linear_logprob"} <= ops
    assert not {"swiglu", "swiglu_linear"} & ops
    assert {"swiglu", "swiglu_linear"} <= set(found["left_out"])


def test_passing_and_failing_kernels(model, compiled, capsys):
    assert main(["compile", "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["shapes"]["head_dim"] == 16
    compiled.append("swiglu")
    assert main(["compile", "--model", model, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    assert [k["op"] for k in found["kernels"] if k["broken"]] == ["swiglu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "Ascend310"], "--target must be one of Ascend910B1, "),
        (["--workers", "0"], "--workers must be at least 1; got 0"),
    ],
)
def test_bad_arguments(model, compiled, capsys, arguments, message):
    assert main(["compile", "--model", model, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_models_that_are_not_there(tmp_path, compiled, capsys):
    for name, message in (
        (str(tmp_path), "has no config.json"),
        (str(tmp_path / "none.json"), "there is no file"),
        (str(tmp_path / "nowhere" / "model"), "there is no file or folder"),
    ):
        assert main(["compile", "--model", name]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "no-such-model"}, "no-such-model"), ({"vocab_size": "many"}, "vocab_size")],
)
def test_a_config_that_is_none(tmp_path, compiled, capsys, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    assert main(["compile", "--model", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_several_parts_has_the_shapes_of_its_text(tmp_path):
    from transformers import Gemma3Config, Gemma3nTextConfig

    text = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 999}
    shapes = ModelShapes.of_config(Gemma3Config(text_config=text))
    assert (shapes.hidden, shapes.head_dim, shapes.vocabulary) == (96, 32, 999)
    # A list of each layer's.
    assert ModelShapes.of_config(Gemma3nTextConfig(intermediate_size=192)).intermediate == 192
