"""`report().why(name)`: every attempt to serve something, with its reason."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.training import Planner
from tests.models import small_model
from tests.patching.padded import padded
from tests.training.test_changed_options import stub

OPS = [op for op in PATCHES if op != "linear_logprob"]


def bloom():
    config = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
    return BloomForCausalLM(BloomConfig(**config))


def test_both_attempts_at_padding():
    """Bloom's attention takes no packed row; its padding alone is computed. The short report says so at once."""
    report = apply_npu_kernels(bloom()).report()
    why = report.why("padding")
    assert "with one row of live tokens: its code takes no packed row: TypeError" in why
    assert "of some modules: padding is computed by BloomAttention" in why
    assert "padding is computed by BloomAttention" in str(report)
    assert report.why("varlen_attention") == why
    assert report.why("BloomModel") == why


def test_all_attempts_of_what_is_left_alone(monkeypatch):
    monkeypatch.setattr("npu_trainer_kernels.patching.body.proof._proofs", {})
    monkeypatch.setattr("npu_trainer_kernels.patching.body.proof.leave_padding_to_mixers", lambda *_: "no mixers here")
    why = apply_npu_kernels(bloom()).report().why("padding").splitlines()
    assert len(why) == 2
    assert "with one row of live tokens: its code takes no packed row" in why[0]
    assert "with the padding of its mixers alone: no mixers here" in why[1]


def test_modules_calls_and_what_was_switched_off():
    model = small_model("llama")
    model.model.layers[0].mlp.forward = lambda x: x
    kernels = apply_npu_kernels(model, ops=OPS)
    assert "forward was set on the instance" in kernels.report().why("model.layers.0.mlp")
    assert "swiglu, LlamaMLP" in kernels.report().why("LlamaMLP")
    assert "varlen_attention, LlamaModel: layers.0.mlp: its forward was set" in kernels.report().why("padding")
    site = next(site for site in kernels.report().sites if site.op == "rms_norm")
    site.off = "it differed"
    assert "switched off: it differed" in kernels.report().why("rms_norm")
    assert kernels.report().why("embedding") == "embedding is served, or nothing has asked for it yet"
    assert kernels.report().why("capture") == "capture is served, or nothing has asked for it yet"
    every = kernels.report().why()
    assert all(part in every for part in ("LlamaMLP", "layers.0.mlp: its forward was set", "it differed"))


def test_calls_that_were_declined():
    model = small_model("llama")
    kernels = apply_npu_kernels(model, ops=OPS)
    model(**padded(), output_hidden_states=True)
    assert "1 calls: its hidden_states are asked for" in kernels.report().why("padding")


def test_what_nobody_knows():
    with pytest.raises(ValueError, match=r"name must be one of add_rms_norm, audit, .*padding.*; got 'swigloo'"):
        apply_npu_kernels(small_model("llama"), ops=OPS).report().why("swigloo")


def test_plans():
    report = apply_npu_kernels(small_model("llama"), ops=OPS).report()
    planner = Planner(stub(top_entropy_quantile=0.5))
    with torch.enable_grad():
        planner.compute_loss(lambda model, inputs: None, None, {})
    planner.trainer.set(top_entropy_quantile=1.0, off_policy_mask_threshold=0.1)
    report.plans = [planner]
    why = report.why("plan").splitlines()
    assert why[0].startswith("plan, 1 calls: top_entropy_quantile=0.5 selects tokens")
    assert why[1].startswith("plan: off_policy_mask_threshold drops")


def test_capture_and_rollouts():
    report = apply_npu_kernels(small_model("llama"), ops=OPS, capture="on").report()
    report.capture.reasons["a hook of hers"] = 3
    assert "capture, 3 calls: a hook of hers" in report.why("capture")
