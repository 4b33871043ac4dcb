"""Every family of transformers, plain and patched: here one for each distinct piece of code, all of them by
`make test-families`."""

import functools
import json
import types

import pytest
import transformers

from npu_trainer_kernels.patching import PATCHES, Report

from . import page
from .compare import Result, compare
from .pieces import representatives
from .tiny import LEFT_OUT, families, model_class, tiny_config


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
# Which families have every piece of code between them differs by version, and may not be all of the quick ones.
_COMPARED = dict.fromkeys([*representatives(), *sorted(_QUICK)])


@pytest.mark.parametrize(
    ("task", "kind"),
    [pytest.param(*each, marks=() if each in _QUICK else pytest.mark.full) for each in _COMPARED],
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
    assert set(families()) >= _QUICK


def test_the_page_has_every_family_and_every_op():
    text = page.PAGE.read_text()
    if page.version_of(text) == transformers.__version__:
        assert page.families_of(text) == page.names(), "python -m tests.families --write"
    assert all(f"`{op}`" in text for op in PATCHES), "python -m tests.families --write"


@pytest.mark.parametrize("file", [page.PAGE, page.README], ids=lambda file: file.name)
def test_the_overview_is_that_of_the_lines_and_of_the_results(file):
    text = file.read_text()
    table = page.overview(page.rows_of(page.PAGE.read_text()))
    assert text == page.with_overview(text, table), "python -m tests.families --overview"


LINE = "| f | FForCausalLM | {} | {} |"


@pytest.mark.parametrize(
    ("served", "left", "cells"),
    [
        ("rms_norm 5, add_rms_norm 2, swiglu 2, rope 2, varlen_attention 1, linear_cross_entropy 1, linear_logprob 1",
         "nothing", ["yes", "yes", "yes", "left out", "Trainer, TRL"]),
        ("layer_norm 5, moe_experts 1, linear_cross_entropy 1",
         "add_rms_norm: L: why: so<br>swiglu: M: a \\| b<br>varlen_attention: D: it takes no ids",
         ["in part", "in part", "none", "computed", "Trainer"]),
        ("gated_rms_norm 5", "swiglu: M: why<br>rope: R: why<br>varlen_attention: D: padding is computed by A, S",
         ["yes", "no", "no", "computed in attention and state layers alone", "no"]),
    ],
)  # fmt: skip
def test_what_the_overview_says_of_a_line(served, left, cells):
    assert page._cells(LINE.format(served, left)) == cells


def test_families_in_one_line_of_the_overview_are_alike(monkeypatch):
    rows = page.rows_of(page.PAGE.read_text())
    monkeypatch.setattr(page, "_KNOWN", {"two": (("llama", "phi3"), ())})
    with pytest.raises(ValueError, match="must be alike; two has"):
        page.overview(rows)


def test_gains_are_the_least_and_the_most_of_what_was_measured(monkeypatch, tmp_path):
    def row(op, shape, provider, ms):
        measured = {"status": "ok", "ms": {"median": ms}} if ms else {"status": "error", "ms": {}}
        return {"op": op, "shape": shape, "provider": provider, **measured}

    rows = [
        row("sft-trl", "m 1", "plain", 300.0), row("sft-trl", "m 1", "flag", 100.0),
        row("sft-trl", "m 1", "liger", 1.0),
        row("sft-trainer", "m 2", "plain", 200.0), row("sft-trainer", "m 2", "flag", 100.0),
        row("dpo-trl", "m 1", "plain", 150.0), row("dpo-trl", "m 1", "flag", 100.0),
        row("grpo-trl", "m 1", "flag", 100.0), row("grpo-trl", "m 1", "plain", None),
        row("grpo-trl", "other 1", "plain", 900.0), row("grpo-trl", "other 1", "flag", 100.0),
    ]  # fmt: skip
    (tmp_path / "f.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(page, "_RESULTS", tmp_path)
    monkeypatch.setattr(page, "MEASURED", ("f.json",))
    assert page._gain(["m"]) == "SFT 2.00 to 3.00 x, DPO 1.50 x"
    assert page._gain(["n"]) == ""


@pytest.mark.parametrize(
    ("mixes", "carried", "said"),
    [(False, False, "nothing"), (True, False, "varlen_attention: LlamaModel: as it is"),
     (False, True, "varlen_attention: LlamaModel: as it is")],
)  # fmt: skip
def test_the_page_says_what_becomes_of_states(mixes, carried, said):
    class Form(types.SimpleNamespace):
        def __str__(self):
            return "as it is"

    form = Form(proof=types.SimpleNamespace(mixes=mixes, carried=carried))
    site = types.SimpleNamespace(op="varlen_attention", form=form, kind=transformers.LlamaModel)
    result = Result("causal", "llama", "all", report=types.SimpleNamespace(sites=[site], left_alone=[]))
    assert page.row([result]).endswith(f"| {said} |")


def test_the_page_says_what_was_not_compared():
    left_out = {"checkpointing": "ValueError: It has none. [modeling_llama.py:7]"}
    result = Result("causal", "llama", "all", report=Report(), left_out=left_out)
    assert page.row([result]).endswith("| not compared: checkpointing: ValueError: It has none. |")
