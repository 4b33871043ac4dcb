"""The promise of a head's logits: right whatever is done with it, and fused where loss code leaves it a choice."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from accelerate.utils.operations import convert_to_fp32
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from npu_trainer_kernels import apply_npu_kernels, tiling
from npu_trainer_kernels.patching import _head_call
from tests.closeness import assert_as_close
from tests.models import batch, small_model

HEAD = ["linear_cross_entropy", "linear_logprob"]


class Counted:
    """Calls of the fused op."""

    def __init__(self, monkeypatch):
        self.fused = 0
        original = _head_call.fused_linear_cross_entropy

        def fused(*args, **kwargs):
            self.fused += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(_head_call, "fused_linear_cross_entropy", fused)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def formed(kernels) -> list[str]:
    """What has formed logits, as the report says it."""
    return [each.reason for each in kernels.report().declined if each.reason.startswith("logits")]


def outcome(model, loss_of) -> list[torch.Tensor]:
    """A loss and every gradient."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def check(make, loss_of, counted, fused, **cast) -> list[str]:
    """Compares a patched model's loss and gradients with the model's own; returns what the report says."""
    expected, truth = outcome(make(), loss_of), outcome(make().double(), loss_of)
    model = make()
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(model, loss_of)
        notes = formed(kernels)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, actual, reference, exact in zip(names, found, expected, truth, strict=True):
        assert_as_close(actual, reference, exact, name)
    assert counted.fused == fused
    return notes


def own_loss(model, **kwargs) -> torch.Tensor:
    return model(**{**batch(), **kwargs}).loss


# ---------------------------------------------------------------------------------------------------------------------
# Families: fused, and nothing as large as logits
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "granite", "cohere", "qwen3-moe"])
def test_a_family_is_fused(family, counted):
    assert check(lambda: small_model(family), own_loss, counted, fused=1) == []


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        real = (t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.device.type != "meta")
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            self.elements = max([self.elements, *(t.numel() for t in real if type(t) is torch.Tensor)])
        return out


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_nothing_as_large_as_logits_is_formed(monkeypatch, family):
    monkeypatch.setattr(tiling, "head_chunk", lambda *args, **kwargs: 8)
    inputs = batch(rows=8, length=16)
    model = small_model(family)

    def largest() -> int:
        with Largest() as mode:
            convert_to_fp32(model(**inputs)).loss.backward()
        return mode.elements

    assert largest() >= 8 * 16 * 331
    with apply_npu_kernels(model, ops=HEAD):
        assert largest() < 8 * 16 * 331


# ---------------------------------------------------------------------------------------------------------------------
# Wrong losses of heads that read labels from calls and replace the loss function
# ---------------------------------------------------------------------------------------------------------------------


def with_loss_function():
    model = small_model("llama")

    def weighted(logits, labels, vocab_size, **kwargs):
        per_token = functional.cross_entropy(
            logits[:, :-1].float().reshape(-1, vocab_size), labels[:, 1:].reshape(-1), reduction="none"
        )
        return (per_token * torch.linspace(0.5, 1.5, per_token.numel()).to(per_token)).mean()

    model.loss_function = weighted
    return model


def with_hook():
    model = small_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
    return model


def with_hook_that_sees():
    model = small_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out - out.mean(-1, keepdim=True).relu())
    return model


def with_pre_hook():
    def masks(module, args, kwargs):
        labels = kwargs["labels"].clone()
        labels[:, ::3] = -100
        return args, {**kwargs, "labels": labels}

    model = small_model("llama")
    model.register_forward_pre_hook(masks, with_kwargs=True)
    return model


class Masks(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        labels = labels.clone()
        labels[:, ::3] = -100
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Entropy(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if out.get("logits") is not None:
            out.loss = out.loss - 0.1 * torch.distributions.Categorical(logits=out.logits.float()).entropy().mean()
        return out


class ZLoss(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if out.get("logits") is not None:
            out.loss = out.loss + 1e-2 * out.logits.float().logsumexp(-1).square().mean()
        return out


class Filled(LlamaForCausalLM):
    """Its vocabulary is padded."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits[..., -31:] = -1e4
        loss = self.loss_function(logits=out.logits, labels=labels.clamp(max=299), vocab_size=self.config.vocab_size)
        return type(out)(loss=loss, logits=out.logits)


class HeadTwice(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        prior = self.lm_head(self.model.embed_tokens(input_ids))
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        out.loss = out.loss + 0.1 * functional.cross_entropy(prior.flatten(0, 1), input_ids.flatten())
        return out


def subclass(cls):
    def make():
        model = small_model("llama")
        model.__class__ = cls
        return model

    make.__name__ = cls.__name__
    return make


# How it is made, what it is called with, calls of the fused op, and whether logits are formed.
WRONG = [
    (with_loss_function, {}, 1, False),
    (lambda: small_model("llama"), {"ignore_index": 7, "labels": batch(ignored=0)["labels"] % 9}, 1, False),
    (with_hook, {}, 0, False),
    (with_hook_that_sees, {}, 0, False),
    (with_pre_hook, {}, 1, False),
    (subclass(Masks), {}, 1, False),
    (subclass(Entropy), {}, 1, True),
    (subclass(ZLoss), {}, 1, True),
    (subclass(Filled), {}, 0, True),
    (subclass(HeadTwice), {}, 2, False),
]
NAMES = [make.__name__.replace("<lambda>", "ignore_index") for make, *_ in WRONG]


@pytest.mark.parametrize(("make", "kwargs", "fused", "real"), WRONG, ids=NAMES)
def test_the_loss_is_what_the_model_says(make, kwargs, fused, real, counted):
    notes = check(make, lambda model: own_loss(model, **kwargs), counted, fused)
    assert bool(notes) == real


@pytest.mark.parametrize(("make", "kwargs", "fused", "real"), WRONG, ids=NAMES)
def test_the_same_with_the_head_that_trl_gives(make, kwargs, fused, real, counted):
    """It forms neither logits nor a promise; without `fused_lm_head` the model is as it was before."""

    def with_head():
        model = make()
        trl_utils.add_fused_lm_head(model)
        return model

    kwargs = {name: value for name, value in kwargs.items() if name != "ignore_index"}  # TRL's head knows -100 alone
    if not isinstance(make(), (Filled, HeadTwice)):  # these call the head themselves, with what TRL's head has not
        check(with_head, lambda model: own_loss(model, fused_lm_head=True, **kwargs), counted, 0)
    notes = check(with_head, lambda model: own_loss(model, **kwargs), counted, fused)
    assert bool(notes) == real
