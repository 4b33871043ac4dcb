"""Every family of transformers, plain and patched: here one for each distinct piece of code, all of them by
`make test-families`."""

import functools

import pytest
import transformers

from npu_trainer_kernels.patching import PATCHES, Report

from . import page
from .compare import Result, compare
from .pieces import representatives
from .tiny import LEFT_OUT, model_class, tiny_config


@functools.cache
def _results(task: str, kind: str) -> list[Result]:
    return compare(task, kind)


# One for each kind of layer that people train most.
_QUICK = {
    ("causal", "cohere"), ("causal", "deepseek_v3 rope_interleave=False"), ("causal", "falcon_h1"),
    ("causal", "gemma4_text"), ("causal", "glm4_moe"), ("causal", "gpt_oss"), ("causal", "granite"),
    ("causal", "lfm2_moe"), ("causal", "llama biases, tied"), ("causal", "mixtral output_router_logits"),
    ("causal", "phi3"), ("causal", "qwen3_5_moe"), ("causal", "starcoder2"), ("image-text", "paligemma"),
    ("image-text", "qwen3_omni_moe_thinker"), ("image-text", "video_llama_3"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "kind"),
    [pytest.param(*each, marks=() if each in _QUICK else pytest.mark.full) for each in representatives()],
)
def test_patched_is_the_model_itself(task, kind):
    wrong = [f"{result.op_set} ops: {finding}" for result in _results(task, kind) for finding in result.findings]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_left_out_cannot_be_trained_by_itself(kind):
    task = "image-text" if kind == "pi0" else "causal"
    with pytest.raises((ValueError, TypeError)):
        model_class(task, kind)(tiny_config(task, kind))(input_ids=None, labels=None)


def test_the_quick_ones_are_families():
    assert set(representatives()) >= _QUICK


def test_the_page_has_every_family_and_every_op():
    text = page.PAGE.read_text()
    if page.version_of(text) == transformers.__version__:
        assert page.families_of(text) == page.names(), "python -m tests.families --write"
    assert all(f"`{op}`" in text for op in PATCHES), "python -m tests.families --write"


def test_the_page_says_what_was_not_compared():
    left_out = {"checkpointing": "ValueError: It has none. [modeling_llama.py:7]"}
    result = Result("causal", "llama", "all", report=Report(), left_out=left_out)
    assert page.row([result]).endswith("| not compared: checkpointing: ValueError: It has none. |")
