"""Two gloo ranks on the CPU, which share out a vocabulary, heads, columns and experts by transformers' plans."""

import json

import pytest

from tests.distributed.test_distributed import on_two_ranks

# Live tokens of a batch, and ids of the first rank.
ROWS, SLICE, HIDDEN = 60, 166, 48


@pytest.mark.full("all")
@pytest.mark.parametrize("names", [["llama labels 1"], []], ids=["one", "all"])
def test_same_parameters_as_by_the_plans_alone(tmp_path, names):
    """All in one start of the ranks. Three steps, and one forward without gradients; two layers."""
    found = on_two_ranks("tensor_parallel", tmp_path / "found.json", *names, interpreted=True)
    assert json.loads((tmp_path / "unseen.json").read_text()) == []
    layers = {"rms_norm": 9, "add_rms_norm": 6, "swiglu": 8, "rope": 8, "varlen_attention": 3}
    with_head_norms = layers | {"rms_norm": 21}
    experts = {**{op: n for op, n in with_head_norms.items() if op != "swiglu"}, "moe_experts": 8}
    loss = {"linear_cross_entropy": 3, "linear_logprob": 0}
    ran = {
        "llama labels 1": layers | loss,
        "llama-tied trl 1": layers | {"linear_cross_entropy": 0, "linear_logprob": 3},
        "qwen3 labels 1": with_head_norms | loss,
        "qwen3-moe labels 1": experts | loss,
        "qwen3-moe labels 2": experts | loss,
        "gemma2 logits 1": with_head_norms | loss,
        "sft": {"rms_norm": 21, "add_rms_norm": 6, "varlen_attention": 0} | loss,
        "grpo": {"rms_norm": 21, "add_rms_norm": 6, "varlen_attention": 3,
                 "linear_cross_entropy": 0, "linear_logprob": 3},
    }  # fmt: skip
    assert {name: case["ran"] for name, case in found.items()} == {name: ran[name] for name in names or ran}
    if not names:
        read = found.pop("gemma2 logits 1")
        assert read["declined"] == ["linear_cross_entropy: logits that were given to torch.Tensor.square"]
        # What GRPO sends back was planned, and a loss of labels is: logits are formed once.
        assert [found.pop(name)["again"] for name in ("sft", "grpo")] == [0, 0]
    for name, case in found.items():
        assert case["declined"] == [], name
        # In the place of logits, or of the weight, a few numbers; what else is gathered is experts' tokens.
        assert case["gathers"][0] == case["gathers"][1], name
        assert case["largest"][0] >= SLICE * HIDDEN > ROWS * HIDDEN * 2 > case["largest"][1], name
