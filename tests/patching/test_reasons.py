"""Guards of calls and modules: each leaves something to the model's own code, and says why."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

from npu_trainer_kernels import apply_npu_kernels, device
from tests.models import small_model

from .padded import declined, padded, ran
from .promised import HEAD, IDS, LABELS, formed, outcome, shifted
from .test_settings import Around


def left_alone(kernels: Any, op: str) -> str:
    return "; ".join(each.reason for each in kernels.report().left_alone if each.op == op)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_embeddings_that_do_more(options, later):
    (name, value), ids = next(iter(options.items())), torch.tensor([[1, 1, 1, 2]])

    def made() -> Around:
        torch.manual_seed(0)
        return Around(nn.Embedding(7, 8, **({} if later else options)))

    def outcome(model: Around) -> list[torch.Tensor]:
        result = model(ids)
        result.sum().backward()
        gradient = model.inner.weight.grad
        return [result.detach(), gradient.to_dense() if gradient.is_sparse else gradient]

    model, plain = made(), made()
    with apply_npu_kernels(model, ops=["embedding"]) as kernels:
        for each in (model, plain):
            setattr(each.inner, name, value)
        assert all(map(torch.equal, outcome(model), outcome(plain)))
        if later:
            said, reason = "; ".join(each.reason for each in kernels.report().declined), f"its {name} has been changed"
        else:
            said, reason = left_alone(kernels, "embedding"), "it uses max_norm, scale_grad_by_freq or sparse gradients"
        assert said == reason


# ---------------------------------------------------------------------------------------------------------------------
# Heads, and what is done to logits
# ---------------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def by_name(model: Any) -> torch.Tensor:
    return shifted(model.lm_head(input=model.model(IDS).last_hidden_state))


def as_ever(model: Any) -> torch.Tensor:
    return shifted(model(input_ids=IDS).logits)


def with_twice(model: Any) -> Any:
    parametrize.register_parametrization(model.lm_head, "weight", Twice())
    return model


HEADS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], torch.Tensor]]] = {
    "by name": ("it is given more than hidden states", lambda model: model, by_name),
    "in fp64": ("float64 values", lambda model: model.double(), as_ever),
    "of another weight": ("its weight is computed anew whenever it is read (a parametrization)", with_twice, as_ever),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_called_otherwise(name):
    reason, prepare, step = HEADS[name]
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(prepare(model), step)
        assert reason in {each.reason for each in kernels.report().declined}
    assert all(map(torch.equal, found, outcome(prepare(small_model("llama")), step)))


def test_a_head_of_another_dtype_says_so_as_ever():
    model = small_model("llama")
    hidden = model.model(IDS).last_hidden_state.bfloat16()
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        with pytest.raises(RuntimeError, match="dtype"):
            model.lm_head(hidden)
        (each,) = kernels.report().declined
        assert each.reason == "hidden states of torch.bfloat16 for a weight of torch.float32"


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, **options)


TARGETS = LABELS[:, 1:].flatten()
STEPS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a factor that overflows": ("by a factor out of range", lambda t: shifted((t * 1e200) * 1e200 * 0.0 + t)),
    "a factor of infinity": ("with something that is no finite number", lambda t: shifted((t / torch.inf) + t)),
    "a divisor of nothing": ("with something that is no finite number", lambda t: shifted(t / 0.0)),
    "a cap of nothing": ("by a factor out of range", lambda t: shifted(torch.tanh(t) * 0.0 + t)),
    "two caps": ("a second time", lambda t: shifted(torch.tanh(torch.tanh(t)))),
    "an old argument": ("with other arguments", lambda t: cross_entropy(t, TARGETS, size_average=False)),
    "probabilities": (
        "with targets that are no ids",
        lambda t: cross_entropy(t, torch.full((TARGETS.shape[0], 331), 1 / 331)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", STEPS)
def test_logits_that_are_formed(name):
    reason, use = STEPS[name]

    def loss_of(model: Any) -> torch.Tensor:
        return use(model(input_ids=IDS).logits)

    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(model, loss_of)
        said = formed(kernels)
    expected = outcome(small_model("llama"), loss_of)
    assert any(reason in each for each in said), said
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_class_weights_of_another_dtype_raise_as_ever():
    model = small_model("llama")
    weights = torch.ones(331, dtype=torch.float64)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        logits = model(input_ids=IDS).logits
        with pytest.raises(RuntimeError, match="expected scalar type"):
            cross_entropy(logits, TARGETS, weight=weights)
        assert any("with class weights of another kind" in each for each in formed(kernels))


# ---------------------------------------------------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------------------------------------------------


def test_a_body_with_an_encoder():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        assert not kernels.report().sites
        assert "its forward takes no ids, mask and positions" in left_alone(kernels, "varlen_attention")


def test_copies_in_threads_share_a_configuration():
    model, batch = small_model("llama"), padded()
    with apply_npu_kernels(model, ops=["varlen_attention"]) as kernels:
        model.model._is_replica = True
        model(**batch).loss.backward()
        assert ran(kernels) == 0
        assert "threads run copies of it" in declined(kernels)


# ---------------------------------------------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "hip"), itertools.product(("cuda", "npu", "cpu"), (None, "6.4")))
def test_where_compiled_kernels_are_kept(monkeypatch, kind, hip):
    """On AMD's devices, which are cuda's by name, Triton compiles by the size of a storage, too."""
    monkeypatch.setattr(torch.version, "hip", hip)
    where = torch.device("meta") if kind == "npu" else torch.device(kind)
    assert device.keeps_compiled.__wrapped__(where) == (kind == "cuda" and hip is None)
