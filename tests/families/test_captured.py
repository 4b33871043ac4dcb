"""Captured layers, replayed from tapes, have the bits of layers that run their own code: here for families that differ
in what a layer is given, does and returns; all of them by `python -m tests.families.captured`."""

import pytest

from npu_trainer_kernels.support.foreign import at_least

from .captured import captured

# What is special about each, in the order of the test.
_FAMILIES = {
    ("causal", "llama"): "a packed row, one seam",
    ("causal", "gpt2"): "a packed row without rotations",
    ("causal", "gemma2"): "two kinds of layers with masks of their own",
    ("causal", "bert"): "the mask is given by position",
    ("causal", "bloom"): "attention is its own, and reads the mask",
    ("causal", "mixtral"): "experts",
    ("causal", "qwen3_5_text"): "recurrent layers without a seam between others",
    ("causal", "diffllama"): "two seams with the same queries",
    ("causal", "deepseek_v32"): "the layer makes its mask, and asks for the name of its attention",
    ("causal", "gemma4_text num_kv_shared_layers"): "layers write keys and values to a dict that others read",
    ("causal", "zaya"): "a dict of masks",
    ("causal", "mamba2"): "seams that are no attention, one of which has sums over tokens of its own",
    ("image-text", "idefics"): "a module whose `config` is a number",
    ("image-text", "blip-2"): "several bodies with other numbers of tokens in one forward",
}


@pytest.mark.parametrize(("task", "kind"), _FAMILIES)
def test_captured_is_its_own_code_to_the_bit(task, kind):
    outcome = captured(task, kind)
    assert outcome.wrong == outcome.unfit == "", str(outcome)
    assert outcome.share > 0, str(outcome)


def test_a_body_that_reads_the_input_of_a_layer_adds_its_gradient_in_another_order():
    there = at_least("transformers", "5.23")
    found = "captured, within rounding: " if there else "not compared: KeyError: 'inkling2_text'"
    assert str(captured("causal", "inkling2_text")).startswith(found)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("falcon", "it reads a tensor that is no input, parameter or buffer of it (lift_fresh)"),
        ("jetmoe", "it reads numbers of the device on the host (tolist)"),
    ],
)
def test_what_cannot_be_captured_says_why(kind, reason):
    assert str(captured("causal", kind)) == f"declined: {reason}"


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_layers_that_a_checkpoint_repeats_are_captured_to_the_bit(kind):
    outcome = captured("causal", kind, checkpointed=True)
    assert outcome.wrong == outcome.unfit == "", str(outcome)
    assert outcome.share > 0, str(outcome)


def test_a_layer_with_a_checkpointed_layer_inside_of_it_is_not_captured():
    outcome = captured("causal", "zamba2", checkpointed=True)
    assert outcome.wrong == outcome.unfit == "", str(outcome)
    assert outcome.share > 0, str(outcome)
    assert "a checkpoint repeats a module of it" in outcome.reasons


def test_layers_that_share_a_dict_are_not_captured_where_a_checkpoint_repeats_them():
    reason = "a checkpoint repeats it, by when other layers may have written to the dict that it is given"
    assert str(captured("causal", "zaya", checkpointed=True)) == f"declined: {reason}"
