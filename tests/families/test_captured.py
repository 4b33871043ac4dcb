"""Captured bodies, replayed from tapes, have the bits of bodies that run their own code: here for families that differ
in what they are made of; all of them by `python -m tests.families.captured`."""

import pytest

from .captured import captured

# What is special about each.
_FAMILIES = {
    "llama": "",
    "gemma2": "two kinds of layers with masks of their own",
    "mixtral": "experts",
    "diffllama": "two attentions of a layer",
    "opt": "positions that are counted, and embedded by another table",
}
_WHY_NOT = {
    "bert": "its mask is neither causal nor a sliding window",
    "bloom": "modules that mix tokens get the padded batch, whose shape is another one at each step",
    "jetmoe": "it reads numbers of the device on the host (tolist)",
    "mamba2": "modules with a state go by lengths on the host",
}


@pytest.mark.parametrize("kind", _FAMILIES)
def test_captured_is_its_own_code_to_the_bit(kind):
    outcome = captured("causal", kind)
    assert outcome.wrong == outcome.unfit == "", str(outcome)
    assert str(outcome) == "captured: 80% of calls"


@pytest.mark.parametrize("kind", _WHY_NOT)
def test_what_cannot_be_captured_says_why(kind):
    assert str(captured("causal", kind)) == f"declined: {_WHY_NOT[kind]}"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_layers_that_a_checkpoint_repeats_are_captured_to_the_bit(kind):
    assert str(captured("causal", kind, checkpointed=True)) == "captured: 80% of calls"
