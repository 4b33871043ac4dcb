"""The report as text: short by default, and what notebooks show."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trl.trainer.utils import selective_log_softmax

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import LeftAlone, Report
from npu_trainer_kernels.patching.patch import Site
from tests.models import batch, small_model
from tests.patching.padded import padded


def site(op: str, kind: str, paths: list[str], **more) -> Site:
    return Site(op, type(kind, (nn.Module,), {}), (), None, served="triton", paths=paths, **more)


@pytest.fixture
def report():
    made = Report(
        "a chip",
        [site("swiglu", "MLP", [f"layers.{i}.mlp" for i in range(3)], detail="gelu"),
         site("linear_cross_entropy", "Model", [""])],
        [LeftAlone("", "", "rope", "as fast", counts=False), LeftAlone("norm", "OddNorm", "rms_norm", "it is odd")],
        {"swiglu": "measured somewhere"},
    )  # fmt: skip
    made.note("logits have width 0", "linear_cross_entropy")
    made.note("a remark")
    made.note("a remark")
    return made


def test_short_has_a_line_for_what_runs_and_for_what_would_have_counted(report):
    assert str(report).splitlines() == [
        "NPU kernels on a chip",
        "  swiglu                triton: 3 MLP",
        "  linear_cross_entropy  triton: Model",
        "left alone:",
        "  rms_norm, OddNorm: it is odd",
        "(in full: report().text(full=True))",
        "note: logits have width 0",
        "note: a remark",
    ]


def test_full_names_every_module_and_every_reason(report):
    text = report.text(full=True)
    for part in ("layers.0.mlp ... layers.2.mlp", "gelu", "rope: as fast", "norm: it is odd",
                 "swiglu: measured somewhere", "note: a remark"):  # fmt: skip
        assert part in text
    assert text.splitlines()[1] == "replaced:"


def test_what_the_trainer_does_not_use_is_not_in_the_short_one(report):
    report.unused = {"linear_cross_entropy": "another head", "rms_norm": "none"}
    assert str(report).splitlines() == [
        "NPU kernels on a chip",
        "  swiglu  triton: 3 MLP",
        "(in full: report().text(full=True))",
        "note: a remark",
    ]
    assert "linear_cross_entropy: another head" in report.text(full=True)
    assert "width 0" not in report.text(full=True)


def test_what_ran_is_counted_and_what_was_declined_is_named(report):
    swiglu, head = report.sites
    swiglu.ran = 6
    head.declined["logits that were given to torch.Tensor.argmax"] = 2
    lines = str(report).splitlines()
    assert "  swiglu                triton: 3 MLP; 6 calls" in lines
    # Never called, and said so once anything was.
    assert "  linear_cross_entropy  triton: Model; 0 calls" in lines
    assert "  linear_cross_entropy, 2 calls of Model: logits that were given to torch.Tensor.argmax" in lines
    assert report.as_dict()["ran"] == {"swiglu": 6, "linear_cross_entropy": 0}


def test_who_reads_logits_of_padding_that_was_left_out_is_told():
    """Metrics of a trainer do (a mean over all places), and nothing arrives in backward that would tell."""
    model = small_model("llama")
    inputs = padded()
    with apply_npu_kernels(model) as kernels:
        outputs = model(**inputs)
        outputs.logits.mean()
        outputs.loss.backward()
        told = "logits that were given to torch.Tensor.mean; where padding was left out they are those of zeros"
        assert told in str(kernels.report())
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        outputs = model(**inputs)
        outputs.logits.mean()
        assert "logits that were given to torch.Tensor.mean" in str(kernels.report())
        assert "left out" not in str(kernels.report())


LOG_PROBS = 'torch.nn.functional.cross_entropy(rows, ids, reduction="none"), which is -log p'
BOTH = "ops.linear_divergence of two heads"
LOSSES = {
    "log-probabilities": (lambda z, ids: -z.log_softmax(-1).gather(-1, ids).mean(), f"{LOG_PROBS}, or {BOTH}"),
    "by TRL's function": (lambda z, ids: selective_log_softmax(z, ids.squeeze(-1)).mean(), LOG_PROBS),
    "focal": (lambda z, ids: ((1 - z.softmax(-1).gather(-1, ids)) ** 2).mean(), f"{LOG_PROBS}, or {BOTH}"),
    "z-loss": (
        lambda z, ids: torch.logsumexp(z, -1).square().mean(),
        f"{LOG_PROBS}, or ops.fused_linear_cross_entropy(z_loss=...), or {BOTH}",
    ),
    "soft targets": (
        lambda z, ids: cross_entropy(z.flatten(0, 1), torch.ones_like(z).flatten(0, 1) / z.shape[-1]),
        f"{BOTH}, or ops.linear_topk_divergence",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_would_have_been_fused(case):
    """Losses that are written on whole logits: they are formed, and the report says what is not."""
    loss, instead = LOSSES[case]
    model = small_model("llama")
    ids = torch.arange(10).view(2, 5)
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as kernels:
        loss(model(input_ids=ids).logits, ids.unsqueeze(-1)).backward()
        (line,) = (each for each in str(kernels.report()).splitlines() if "logits that were given to" in each)
        assert line.endswith(f"; what is fused: {instead}")
        assert kernels.report().ran["linear_cross_entropy"] == 0
        # So it is.
        rows = model(input_ids=ids).logits.flatten(0, 1)
        cross_entropy(rows, ids.flatten(), reduction="none").mean().backward()
        assert kernels.report().ran["linear_cross_entropy"] == 1


def test_nothing_at_all():
    assert str(Report("a chip")) == "NPU kernels on a chip\n  nothing was replaced"
    assert Report("a chip").summary() == "left as it is"


def test_it_is_text_and_json(report):
    assert repr(report) == str(report)
    assert json.loads(json.dumps(report.as_dict()))["left_alone"][1]["reason"] == "it is odd"


def test_a_notebook_shows_the_handle_as_its_report():
    with apply_npu_kernels(small_model("llama")) as kernels:
        assert repr(kernels) == str(kernels.report())
        assert "rms_norm" in repr(kernels)


class Two(nn.Module):
    """Two language models in one, as a policy beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_model("llama"), small_model("llama-tied")


def test_the_head_of_a_second_language_model_is_reported():
    with apply_npu_kernels(Two(), ops=["linear_cross_entropy"]) as kernels:
        report = kernels.report()
        assert [each.module for each in report.replaced] == ["first.lm_head"]
        assert [each.module for each in report.left_alone] == ["second.lm_head"]
        assert "it is the head of a second language model; that of the first is served" in str(report)


def another_head(model: nn.Module) -> None:
    model.set_output_embeddings(nn.Linear(48, 331, bias=False))


def more_tokens(model: nn.Module) -> None:
    model.resize_token_embeddings(340)


@pytest.mark.parametrize("change", [another_head, more_tokens])
def test_a_head_that_has_come_since_is_reported_until_the_refresh(change):
    model = small_model("llama")
    with apply_npu_kernels(model) as kernels:
        assert "no longer" not in str(kernels.report())
        change(model)
        model(**batch())
        assert (
            "note: 1 Linear that linear_cross_entropy served is no longer in the model; what is in its place runs its "
            "own code until refresh() is called"
        ) in str(kernels.report())
        assert kernels.report().ran["linear_cross_entropy"] == 0
        kernels.refresh()
        model(**batch())
        assert "no longer" not in str(kernels.report())
        assert kernels.report().ran["linear_cross_entropy"] == 1
    assert "no longer" not in str(kernels.report())
