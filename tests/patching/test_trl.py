"""TRL's head seam on models that TRL has given its fused head: who answers there, and when."""

import copy
import gc

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import PromptTuningConfig, TaskType, get_peft_model

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.head import trl_seam
from tests.closeness import assert_as_close, rounded_if_needed
from tests.models import assert_outcome_close, batch, loss_and_gradients, small_model
from tests.patching.padded import padded


@pytest.fixture(autouse=True)
def without_other_tests_models(monkeypatch):
    """TRL's own names. A model that another test has not restored has the dispatchers in their place while it lives."""
    gc.collect()
    for name, own in trl_seam.seam._originals.items():
        monkeypatch.setattr(trl_utils, name, own)
    monkeypatch.setattr(trl_seam, "seam", trl_seam.TrlSeam())


def test_ours_answers_where_trl_has_no_function(monkeypatch):
    """TRL 1.15 without Triton has the name, and None behind it."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", None)
    model, plain, inputs = small_model("gemma2"), small_model("gemma2"), batch()
    expected = loss_and_gradients(plain, inputs)
    truth = loss_and_gradients(small_model("gemma2").double(), inputs)
    trl_utils.add_fused_lm_head(model)
    with apply_npu_kernels(model, ops=["linear_logprob"]) as kernels:
        kernels.refresh()  # as the callback does when training begins
        patched = loss_and_gradients(model, {**inputs, "fused_lm_head": True})
    assert_outcome_close(plain, patched, expected, truth, lambda: loss_and_gradients(plain, inputs))
    assert trl_utils._ChunkedLogProbFunction is None


def test_only_inside_a_patched_models_forward(monkeypatch):
    calls = []
    original = trl_seam.planned_linear_logprob
    monkeypatch.setattr(trl_seam, "planned_linear_logprob", lambda *a, **k: calls.append(1) or original(*a, **k))
    inputs = {**batch(), "fused_lm_head": True}
    patched, other = small_model("qwen3"), small_model("qwen3")
    for model in (patched, other):
        trl_utils.add_fused_lm_head(model)
    with apply_npu_kernels(patched):
        patched(**inputs)
        assert len(calls) == 1
        other(**inputs)
    patched(**inputs)
    assert len(calls) == 1


def test_values_that_the_op_does_not_take_are_trls():
    """With float64 the head is TRL's own, and the report says so."""
    model, inputs = small_model("qwen3").double(), {**batch(), "fused_lm_head": True}
    trl_utils.add_fused_lm_head(model)
    expected = loss_and_gradients(model, inputs)
    with apply_npu_kernels(model, ops=["linear_logprob"]) as kernels:
        found = loss_and_gradients(model, inputs)
        assert "linear_logprob, 1 calls of Qwen3ForCausalLM: float64 values" in kernels.report().text()
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.equal(wanted)


def _without_cache():
    given = padded()
    del given["use_cache"]  # TRL's head says that itself
    return given


def _shifted():
    given = _without_cache()
    labels = given.pop("labels")
    given["shift_labels"] = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], 1)
    return given


def _lone_label():
    """Of one row alone, and a label at padding, which the body then computes."""
    given = _without_cache()
    given["labels"][1:] = -100
    given["labels"][1, 18] = 5
    return given


def _relabelled(to):
    given = batch()
    given["labels"] = to(given["input_ids"])
    return given


LABELS = {
    "padding": (_without_cache, 1),
    "shifted": (_shifted, 1),
    # The body is not packed.
    "no padding": (batch, 1),
    "a label at padding": (_lone_label, 2),
    "none": (lambda: _relabelled(lambda ids: torch.full_like(ids, -100)), 1),
    "all": (lambda: _relabelled(torch.clone), 1),
}


def _scored(model, inputs):
    """Log-probabilities and entropies, and gradients of sums with another weight for each."""
    model.zero_grad()
    out = model(**inputs, fused_lm_head=True)
    draws = torch.Generator().manual_seed(3)
    parts = [out.log_probs, out.entropy]
    weights = [torch.rand(part.shape, generator=draws).to(part.dtype) for part in parts]
    sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [*(part.detach() for part in parts), *(torch.zeros(()) if g is None else g.clone() for g in gradients)]


@pytest.fixture
def scored_rows(monkeypatch):
    """Of each call of our head."""
    seen, original = [], trl_seam.planned_linear_logprob
    monkeypatch.setattr(
        trl_seam, "planned_linear_logprob", lambda x, *a, **k: seen.append(len(x)) or original(x, *a, **k)
    )
    return seen


def _with_heads(model):
    """The model, an unpatched one like it and the one in fp64, each with TRL's head."""
    models = model, copy.deepcopy(model), copy.deepcopy(model).double()
    for each in models:
        trl_utils.add_fused_lm_head(each, outputs=("log_probs", "entropy"))
    return models


def _assert_scores_close(found, plain, exact, inputs, what):
    """Compares what `_scored` returns with that of the unpatched model and of the one in fp64."""
    expected, truth = _scored(plain, inputs), _scored(exact, inputs)
    moved = rounded_if_needed(lambda: _scored(plain, inputs))
    for i, (actual, reference, exact_value) in enumerate(zip(found, expected, truth, strict=True)):
        assert_as_close(actual, reference, exact_value, what, moved(i))


@pytest.mark.parametrize("name", LABELS)
def test_rows_without_a_label_are_left_out_and_read_once(monkeypatch, scored_rows, name):
    """TRL's masks would be waited for three times."""
    make, reads = LABELS[name]
    inputs = make()
    model, plain, exact = _with_heads(small_model("qwen3"))
    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self, *a: copies.append(self.shape) or cpu(self, *a))
    with apply_npu_kernels(model) as kernels:
        copies.clear()
        found = _scored(model, inputs)
        if hasattr(trl_utils, "_use_triton"):  # TRL 1.15 always goes by its masks
            assert len(copies) == reads
        assert kernels.report().ran["linear_logprob"] == 1
        assert kernels.report().ran.get("varlen_attention", 0) == (name in ("padding", "shifted"))
    labels = inputs["labels"][:, 1:] if "labels" in inputs else inputs["shift_labels"]
    assert scored_rows == [int((labels != -100).sum())]
    _assert_scores_close(found, plain, exact, inputs, name)


def test_prompt_tuning_makes_labels_longer(scored_rows):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3, token_dim=48, num_layers=2,
                                num_attention_heads=4)  # fmt: skip
    inputs = batch()
    model, plain, exact = (get_peft_model(each, copy.deepcopy(config)) for each in _with_heads(small_model("qwen3")))
    for each in (plain, exact):
        each.load_state_dict(model.state_dict())
    with apply_npu_kernels(model):
        found = _scored(model, inputs)
    assert scored_rows == [int((inputs["labels"] != -100).sum())]
    _assert_scores_close(found, plain, exact.double(), inputs, "prompt tuning")


def test_labels_that_a_forward_of_its_own_makes_longer(scored_rows):
    """The labels of the call are not those of the head: every row is scored."""
    inputs = batch()

    def longer(each):
        fused = each.forward

        def forward(input_ids, labels, **kwargs):
            ids, ignored = input_ids[:, :2], labels.new_full((len(labels), 2), -100)
            return fused(input_ids=torch.cat([ids, input_ids], 1), labels=torch.cat([ignored, labels], 1), **kwargs)

        each.forward = forward

    model, plain, exact = _with_heads(small_model("qwen3"))
    for each in (model, plain, exact):
        longer(each)
    with apply_npu_kernels(model):
        found = _scored(model, inputs)
    rows = inputs["labels"].shape[0] * (inputs["labels"].shape[1] + 2 - 1)
    if not hasattr(trl_utils, "_use_triton"):  # TRL 1.15 leaves those without a label out by itself
        rows = int((inputs["labels"] != -100).sum())
    assert scored_rows == [rows]
    _assert_scores_close(found, plain, exact, inputs, "longer")


class _Another:
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setattr(trl_utils, "_ChunkedLogProbFunction", _Another), "takes hidden, weight, labels; expected"),
        (lambda m: m.delattr(trl_utils, "_ChunkedLogProbFunction"), "has no fused head to serve"),
        (lambda m: m.setattr(trl_seam.importlib.util, "find_spec", lambda name: None), "TRL is not installed"),
    ],
)
def test_a_trl_that_cannot_be_served_is_left_alone_and_named(monkeypatch, change, reason):
    change(monkeypatch)
    before = dict(vars(trl_utils))
    with apply_npu_kernels(small_model("qwen3"), ops=["linear_logprob"]) as kernels:
        left = {x.op: x.reason for x in kernels.report().left_alone}
        assert reason in left["linear_logprob"]
        assert vars(trl_utils) == before
