"""Completions by captured steps have the tokens of `generate`: here for families that differ in what a step needs; all
of them by `python -m tests.families.rollouts`."""

import pytest

from .rollouts import generated

# What is special about each.
_SERVED = {
    "gpt2": "positions are embedded",
    "gemma2": "windows and soft caps",
    "gpt_oss": "sinks",
    "deepseek_v3": "keys and values of different sizes",
    "mixtral": "experts",
    "opt": "positions with an offset",
    "gemma3": "a multimodal model without images",
    "qwen3_5_text": "linear attention between attentions",
    "lfm2": "convolutions with a window of their own",
    "falcon_h1": "a state and attention in one layer",
    "mamba2": "no attention, and a cache by another name",
    "moshi": "its own cache gives other tokens than its forward",
    "gemma3n": "constants made on the host",
    "llama4_text": "attention in chunks",
    "bloom": "biases by the positions of keys",
    "mpt": "biases by the number of keys",
    "falcon": "one head of keys, selected by a list",
    "gptj": "its mask is added to scores by its own code",
    "git": "it asks the cache whether there are keys",
    "bert": "a decoder if its configuration says so",
}


@pytest.mark.parametrize("kind", _SERVED)
def test_tokens_of_each_prompt_alone(kind):
    assert str(generated(kind)) == "served"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jetmoe", "it reads numbers of the device on the host (tolist)"),
        ("deepseek_v32", "it cuts its mask"),
        ("doge", "it selects among its keys"),
        ("openai-gpt", "it writes nothing to its cache"),
    ],
)
def test_what_is_left_to_generate_says_why(kind, reason):
    assert str(generated(kind)) == f"left to generate: {reason}"


@pytest.mark.parametrize("kind", ["bart", "roberta", "gpt_neo", "inkling_text"])
def test_what_differs_is_left_to_generate(kind):
    """Positions of the host, or from the padding id on; windows and biases by the host's distances."""
    assert "left to generate: its logits differ from those of its own forward" in str(generated(kind))
