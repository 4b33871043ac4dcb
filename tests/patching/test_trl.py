"""TRL's head seam on models that TRL has given its fused head: who answers there, and when."""

import pytest
import trl.trainer.utils as trl_utils

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import _trl
from tests.closeness import assert_as_close
from tests.models import batch, loss_and_gradients, small_model


def test_ours_answers_where_trl_has_no_function(monkeypatch):
    """TRL 1.15 without Triton has the name, and None behind it."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", None)
    model, inputs = small_model("gemma2"), batch()
    expected = loss_and_gradients(model, inputs)
    truth = loss_and_gradients(small_model("gemma2").double(), inputs)
    trl_utils.add_fused_lm_head(model)
    with apply_npu_kernels(model, ops=["linear_logprob"]) as kernels:
        kernels.refresh()  # as the callback does when training begins
        patched = loss_and_gradients(model, {**inputs, "fused_lm_head": True})
    for actual, reference, exact in zip(patched, expected, truth, strict=True):
        assert_as_close(actual, reference, exact, "gemma2")
    assert trl_utils._ChunkedLogProbFunction is None


def test_only_inside_a_patched_models_forward(monkeypatch):
    calls = []
    original = _trl.planned_linear_logprob
    monkeypatch.setattr(_trl, "planned_linear_logprob", lambda *a, **k: calls.append(1) or original(*a, **k))
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


class _Another:
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setattr(trl_utils, "_ChunkedLogProbFunction", _Another), "takes hidden, weight, labels; expected"),
        (lambda m: m.delattr(trl_utils, "_ChunkedLogProbFunction"), "has no fused head to serve"),
        (lambda m: m.setattr(_trl.importlib.util, "find_spec", lambda name: None), "TRL is not installed"),
    ],
)
def test_a_trl_that_cannot_be_served_is_left_alone_and_named(monkeypatch, change, reason):
    change(monkeypatch)
    before = dict(vars(trl_utils))
    with apply_npu_kernels(small_model("qwen3"), ops=["linear_logprob"]) as kernels:
        left = {x.op: x.reason for x in kernels.report().left_alone}
        assert reason in left["linear_logprob"]
        assert vars(trl_utils) == before
