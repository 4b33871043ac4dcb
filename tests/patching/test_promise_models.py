"""Models with a loss of their own: promised logits give it, with TRL's head and without."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from torch.nn import functional
from transformers import LlamaForCausalLM

from tests.models import batch, small_model

from .promised import check, own_loss


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
