"""The gradients of a gated delta rule's gate parameters, `A_log` and `dt_bias`, of a model as transformers makes it.

Its states are forgotten within tokens, so these gradients are small beside what is summed for them. transformers'
formula differentiates differences of cumulated logs, which leaves a part of the rounding of large sums; the op sums the
logs between two tokens from one to the other. A model in fp64 is not the truth by itself: transformers' function casts
its arguments to fp32, and has there the error of the model in fp32. `in_double` computes all of it in fp64.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.ops import gated_delta_rule_reference
from tests.closeness import assert_as_close, rounded_if_needed
from tests.families.tiny import model_class, tiny_config
from tests.models import in_double

MODULES = {"qwen3_5_text": modeling_qwen3_5, "qwen3_next": modeling_qwen3_next}
LENGTHS = (47, 31, 12, 40, 5)


def small(kind: str) -> Any:
    """A model with transformers' own first values: rates from 0.01 to 16, and steps of 1.3."""
    torch.manual_seed(0)
    config = tiny_config("causal", kind)
    config._experts_implementation = "eager"  # the default has no product in fp64
    return model_class("causal", kind)(config).train()


def five_rows(model: Any, side: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    width = max(LENGTHS)
    ids = torch.randint(3, model.config.vocab_size, (len(LENGTHS), width), generator=generator)
    at, lengths = torch.arange(width), torch.tensor(LENGTHS).unsqueeze(1)
    live = at < lengths if side == "right" else at >= width - lengths
    labels = ids.masked_fill(~live, -100)
    labels[torch.arange(len(ids)), live.int().argmax(1)] = -100  # padding predicts nothing
    return {
        "input_ids": ids.masked_fill(~live, 0), "attention_mask": live.long(), "labels": labels, "use_cache": False,
    }  # fmt: skip


def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of the parameters of gates."""
    model.zero_grad()
    model(**inputs).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias"))}


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def token_by_token(query: Any, key: Any, value: Any, g: Any, beta: Any, **options: Any) -> tuple[Any, None]:
    """Takes the place of transformers' function: the op's reference, which has no differences of sums."""
    normalize = options["use_qk_l2norm_in_kernel"]
    return gated_delta_rule_reference(query, key, value, g, beta, normalize=normalize), None


@pytest.mark.parametrize(("kind", "side"), [("qwen3_5_text", "left"), ("qwen3_next", "right")])
def test_gradients_of_gates_are_those_of_fp64(kind: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(kind)
    inputs = five_rows(model, side)
    plain = gradients(model, inputs)
    double = gradients(copy.deepcopy(model).double(), inputs)
    with in_double():
        truth = gradients(copy.deepcopy(model).double(), inputs)
    bare = copy.deepcopy(model)
    kernels = apply_npu_kernels(model, ops=["varlen_attention"], backend="torch")
    found = gradients(model, inputs)
    assert "states by segments" in kernels.report().text(full=True)
    monkeypatch.setattr(MODULES[kind], "torch_chunk_gated_delta_rule", token_by_token)
    with in_double():
        again = gradients(copy.deepcopy(bare).double(), inputs)
    expected = gradients(bare, inputs)
    moved = rounded_if_needed(functools.partial(gradients, bare, inputs))
    assert len(found) == 2
    for name, exact in truth.items():
        assert error(again[name], exact) < 1e-9, "two formulas in fp64 differ"
        assert error(double[name], exact) > 1e-6, "transformers' function no longer computes in fp32"
        assert error(found[name], exact) <= 4 * error(plain[name], exact)
        assert_as_close(found[name], expected[name], exact, name, moved(name))
