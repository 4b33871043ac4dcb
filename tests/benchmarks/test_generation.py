"""Generation is timed plain and with the kernels in turns, and both say the same."""

import json

import torch

from benchmarks import generation
from npu_trainer_kernels.patching import handle_of


def test_both_variants_generate_in_turns(tmp_path, monkeypatch):
    patched = []

    def built(*args, **kwargs):
        model = build(*args, **kwargs)
        generate = model.generate

        def watched(**given):
            patched.append((handle_of(model) is not None, given["max_new_tokens"]))
            assert given["attention_mask"].sum(1).tolist() == [4, 4, 5, 5, 6, 6, 7, 8]
            assert given["attention_mask"][:, -1].all()
            return generate(**given)

        model.generate = watched
        return model

    build = generation.build_model
    monkeypatch.setattr(generation, "build_model", built)
    output = tmp_path / "rows.json"
    command = ["--output", str(output), "--sizes", "tiny-qwen3", "--prompt", "8", "--tokens", "3", "--repetitions", "2"]
    assert generation.main(command) == 0
    plain, flag = [(False, 1), (False, 3)], [(True, 1), (True, 3)]
    assert patched == [*plain, *flag, *flag, *plain] * 2
    plain, flag = json.loads(output.read_text())["rows"]
    assert (plain["provider"], flag["provider"]) == ("plain", "flag")
    assert plain["ms"]["samples"] == flag["ms"]["samples"] == flag["first_token_ms"]["samples"] == 2
    assert flag["equal_share"] == 1.0
    assert flag["equal_before"] == [3] * 8


def test_a_model_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def measure(size, *args):
        if size == "tiny-llama":
            raise torch.OutOfMemoryError("out of memory")
        timed = {"tokens_per_second": 1.0, "ms": {"median": 1.0}, "first_token_ms": {"median": 1.0}}
        return {"plain": timed, "flag": {**timed, "equal_share": 1.0, "equal_before": [1]}}

    monkeypatch.setattr(generation, "measure", measure)
    output = tmp_path / "rows.json"
    assert generation.main(["--output", str(output), "--sizes", "tiny-llama", "tiny-qwen3"]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert [row["status"] for row in rows] == ["error", "error", "ok", "ok"]
    assert rows[0]["reason"] == "out of memory"


def test_where_rows_part():
    ours, theirs = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([[1, 9, 3, 4], [1, 2, 3, 4]])
    assert generation.compared(ours, theirs) == {"equal_share": 0.875, "equal_before": [1, 4]}
