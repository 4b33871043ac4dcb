"""The promise of a head's logits: right whatever is done with it, and fused where loss code leaves it a choice."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import trl.trainer.utils as trl_utils
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from npu_trainer_kernels import apply_npu_kernels, tiling
from npu_trainer_kernels.ops import _head_chunks
from npu_trainer_kernels.patching import _head_call
from npu_trainer_kernels.patching._promise import OwedGradient, PromisedLogits
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


# ---------------------------------------------------------------------------------------------------------------------
# What loss code does with logits
# ---------------------------------------------------------------------------------------------------------------------

IDS, LABELS = batch()["input_ids"], batch()["labels"]
FLAT = LABELS.flatten()


def shifted(logits: torch.Tensor, labels: torch.Tensor = LABELS) -> torch.Tensor:
    return functional.cross_entropy(logits[..., :-1, :].reshape(-1, 331), labels[..., 1:].reshape(-1))


def class_weights(logits: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.1, 2, 331, dtype=logits.dtype)


def selected(logits):
    rows = LABELS != -100
    return functional.cross_entropy(logits[rows], LABELS[rows]) + functional.cross_entropy(logits[0], LABELS[0])


def by_numbers(logits):
    chosen = torch.tensor([1, 0, 1])
    return shifted(logits[chosen], LABELS[chosen]) + functional.cross_entropy(logits[1, 5], LABELS[1, 5])


def reshaped(logits):
    logits = logits.unsqueeze(0).squeeze(0).view(2, 17, -1).contiguous().clone().to(logits.device).type_as(logits)
    return shifted(logits)


def every_option(logits):
    total = functional.cross_entropy(
        logits.flatten(0, 1), FLAT, weight=class_weights(logits), reduction="sum", label_smoothing=0.2
    )
    return total / 7


def per_token(logits):
    loss = functional.cross_entropy(logits.flatten(0, 1), FLAT, reduction="none")
    return (loss * torch.linspace(0, 1, len(loss), dtype=loss.dtype)).sum()


def without_gradients(logits):
    with torch.no_grad():
        value = shifted(logits)
    return shifted(logits) + value


def of_their_shape(logits):
    return shifted(logits) + torch.zeros_like(logits).sum() + logits.new_ones(3).sum()


def view_refused(logits):
    with pytest.raises(RuntimeError, match=r"view size is not compatible"):
        logits[:, :-1].view(-1, 331)
    return shifted(logits)


# What is fused: what is done with logits, and how many losses that is.
FUSED = {
    "shifted": (shifted, 1),
    "two losses": (lambda logits: shifted(logits) + 2 * functional.cross_entropy(logits[:, 0], LABELS[:, 4]), 2),
    "label smoothing": (lambda logits: functional.cross_entropy(logits.flatten(0, 1), FLAT, label_smoothing=0.1), 1),
    "class weights": (
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), FLAT, weight=class_weights(logits)), 1
    ),
    "every option": (every_option, 1),
    "per token": (per_token, 1),
    "selected": (selected, 2),
    "by numbers": (by_numbers, 2),
    "reshaped": (reshaped, 1),
    "temperature": (lambda logits: shifted(2 * logits / 0.7 * torch.tensor(3.0)), 1),
    "soft cap": (lambda logits: shifted(torch.tanh(logits * 0.5 / 3) * 3 / 0.7), 1),
    "soft cap with signs": (lambda logits: shifted(torch.tanh(logits / -3) * -3), 1),
    "without gradients": (without_gradients, 2),
    "of their shape": (of_their_shape, 1),
    "a view that cannot be": (view_refused, 1),
    "detached": (lambda logits: shifted(logits) + shifted(logits.detach()), 2),
    "module": (lambda logits: nn.CrossEntropyLoss(ignore_index=3)(logits.flatten(0, 1), IDS.flatten()), 1),
}  # fmt: skip


def of_logits(use):
    return lambda model: use(model(input_ids=IDS).logits)


@pytest.mark.parametrize("name", FUSED)
def test_what_is_recorded_is_fused(name, counted):
    use, fused = FUSED[name]
    assert check(lambda: small_model("llama"), of_logits(use), counted, fused) == []


def soft_targets(logits):
    return functional.cross_entropy(logits.flatten(0, 1), torch.softmax(logits.detach().flatten(0, 1), -1))


def in_place(logits):
    logits /= 2
    return shifted(logits)


def through_a_view(logits):
    view, copied = logits[:, :-1], logits.mul(1.5)
    view.mul_(3)
    return (
        functional.cross_entropy(view.reshape(-1, 331), LABELS[:, 1:].reshape(-1)) + shifted(logits) + shifted(copied)
    )


def below_a_view(logits):
    view, copied = logits[:, :-1], logits.mul(1.5)
    logits.mul_(3)
    loss = functional.cross_entropy(view.reshape(-1, 331), LABELS[:, 1:].reshape(-1)) + shifted(logits)
    return loss + copied.logsumexp(-1).mean()  # of what was copied before


def through_detached(logits):
    logits.detach().mul_(2)
    return shifted(logits)


def through_data(logits):
    logits.data.mul_(2)
    return shifted(logits)


def metric(logits):
    with torch.no_grad():
        best = logits.argmax(-1)
    return shifted(logits) + 1e-3 * (logits[..., 0] * best).mean()


def beside_a_loss(logits):
    return shifted(logits) + logits.logsumexp(-1).square().mean()


def below_functions(logits):
    """As something in C++ uses its arguments."""
    with torch._C.DisableTorchFunction():
        return (logits.exp() + logits).mean()


def below_functions_in_place(logits):
    with torch._C.DisableTorchFunction():
        logits.mul_(2)
        return functional.cross_entropy(logits.flatten(0, 1), FLAT)


class Gather(torch.autograd.Function):
    """As `DataParallel` does."""

    @staticmethod
    def forward(ctx, *parts):
        return torch._C._VariableFunctions.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:2], gradient[2:]


def gathered(logits):
    return functional.cross_entropy(Gather.apply(logits, logits).flatten(0, 1), FLAT.repeat(2))


# What needs the logits themselves: what is done with them, how many losses are fused all the same, and who is named.
REAL = {
    "soft targets": (soft_targets, 0, "torch.softmax"),
    "classes first": (lambda logits: functional.cross_entropy(logits.transpose(1, 2), LABELS), 0, "transpose"),
    "log softmax": (lambda logits: functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), FLAT), 0, "log_softmax"),
    "capped twice": (lambda logits: shifted(logits.tanh().tanh()), 0, "a second time"),
    "part of the vocabulary": (
        lambda logits: functional.cross_entropy(logits[..., :300].flatten(0, 1), FLAT.clamp(max=299)), 0, "vocabulary"
    ),
    "stacked": (lambda logits: torch.stack([logits, logits]).square().mean(), 0, "torch.stack"),
    "with themselves": (lambda logits: (logits * logits.detach()).mean(), 0, "together with others"),
    "row by row": (lambda logits: sum(shifted(row, y) for row, y in zip(logits, LABELS, strict=True)), 0, "unbind"),
    "in place": (in_place, 0, "div_"),
    "through a view": (through_a_view, 1, "mul_"),
    "below a view": (below_a_view, 0, "mul_"),
    "through detached": (through_detached, 0, "mul_"),
    "through data": (through_data, 0, "data"),
    "a metric": (metric, 0, "argmax"),
    "beside a loss": (beside_a_loss, 1, "logsumexp"),
    "below functions": (below_functions, 0, "aten.exp"),
    "below functions, in place": (below_functions_in_place, 0, "aten.mul_"),
    "gathered": (gathered, 0, "torch.cat"),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_what_needs_logits_gets_them_and_is_named(name, counted):
    use, fused, named = REAL[name]
    notes = check(lambda: small_model("llama"), of_logits(use), counted, fused)
    assert any(named in note for note in notes), notes


def test_what_forms_logits_is_reported_once():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        for _ in range(3):
            model(input_ids=IDS).logits.argmax(-1)
        assert formed(kernels) == ["logits that were given to torch.Tensor.argmax"]


# ---------------------------------------------------------------------------------------------------------------------
# A sum that is going to be divided
# ---------------------------------------------------------------------------------------------------------------------


# In fp32 41 times a 41st is not one.
@pytest.mark.parametrize("items", [41, torch.tensor(41), torch.tensor(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_divided_before_they_are_rounded(monkeypatch, items, dtype):
    """What `transformers.Trainer` tells a model is planned for, so that nothing is left to scale in backward."""
    factors = []
    original = _head_chunks.Gradients.scaled

    def scaled(self, factor, backend):
        factors.append(float(factor))
        return original(self, factor, backend)

    monkeypatch.setattr(_head_chunks.Gradients, "scaled", scaled)
    model = small_model("llama").to(dtype)
    with apply_npu_kernels(model, ops=HEAD):
        model(**batch(), num_items_in_batch=items).loss.backward()
    assert factors == [1.0 if items >= 1 else 2.0]


def divided_otherwise(total, items):
    return total / (3 * items) + total.detach() * 0.1


def not_divided(total, items):
    return total


def used_twice(total, items):
    return total / items + (total / 100).square()


def divided_in_place(total, items):
    total /= items
    return total * 2


def guarded(total, items):
    return torch.where(total.isnan(), 0.0, total) / items.clamp(min=1)


# How a sum is used, and what the model is told of.
SUMS = {
    "as told": (lambda total, items: total / items, torch.tensor(29)),
    "divided otherwise": (divided_otherwise, torch.tensor(29)),
    "not divided": (not_divided, 29),
    "used twice": (used_twice, torch.tensor(29.0)),
    "in place": (divided_in_place, torch.tensor(29)),
    "told otherwise": (lambda total, items: total / items, torch.tensor([29])),
    "no items": (guarded, torch.tensor(0)),
    "no items, as a number": (lambda total, items: total / max(items, 1), 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_one_whatever_is_done_with_it(name, counted):
    use, items = SUMS[name]

    def loss_function(logits, labels, vocab_size, num_items_in_batch, **kwargs):
        return use(functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), items).sum()

    def make():
        model = small_model("llama")
        model.loss_function = loss_function
        return model

    assert check(make, lambda model: own_loss(model, num_items_in_batch=items), counted, 1) == []


# ---------------------------------------------------------------------------------------------------------------------
# Their gradient
# ---------------------------------------------------------------------------------------------------------------------


def clamped(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def hooked(before=(), after=(), derived=False, beside=False):
    def use(logits):
        logits = logits * 2 if derived else logits
        for hook in before:
            logits.register_hook(hook)
        loss = shifted(logits)
        loss = loss + logits.logsumexp(-1).mean() if beside else loss
        for hook in after:
            logits.register_hook(hook)
        return loss

    return use


def retained(logits, derived=False):
    logits = logits * 2 if derived else logits
    logits.retain_grad()
    loss = shifted(logits)
    loss.backward(retain_graph=True)
    return loss + logits.grad.detach().square().sum()


def asked_for(logits, derived=False):
    logits = logits * 2 if derived else logits
    loss = shifted(logits)
    (gradient,) = torch.autograd.grad(loss, [logits], retain_graph=True)
    return loss + (logits * gradient).sum()


GRADIENTS = {
    "hook": (hooked([clamped]), 1),
    "hook after the loss": (hooked(after=[clamped]), 1),
    "hook on what was made of them": (hooked([clamped], derived=True), 0),
    "the same after the loss": (hooked(after=[clamped], derived=True), 1),
    "hook on two uses": (hooked(after=[clamped], beside=True), 1),
    "retained": (retained, 1),
    "retained of what was made of them": (lambda logits: retained(logits, derived=True), 0),
    "asked for": (asked_for, 1),
    "asked for of what was made of them": (lambda logits: asked_for(logits, derived=True), 1),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_logits_is_what_it_would_have_been(name, counted):
    use, fused = GRADIENTS[name]
    check(lambda: small_model("llama"), of_logits(use), counted, fused)


def test_hooks_of_what_wraps_models_form_nothing(counted):
    class State:
        __module__ = "torch.distributed.fsdp"

        def __call__(self, gradient):
            seen.append(type(gradient))
            return gradient

    seen = []

    def use(logits):
        logits.register_hook(State())
        made = logits.float() * 2
        made.register_hook(State())
        return shifted(made)

    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        outcome(model, of_logits(use))
        assert formed(kernels) == []
    assert seen == [OwedGradient, OwedGradient]


def test_hooks_of_the_heads_weight_are_called_once():
    def use(model):
        model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        out = model(**batch())
        return out.loss + out.logits.square().mean()

    seen = []
    expected = outcome(small_model("llama"), use)
    assert len(seen) == 1
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        found = outcome(model, use)
    assert len(seen) == 2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_raise():
    model = small_model("llama")
    weight = model.lm_head.weight
    with apply_npu_kernels(model, ops=HEAD):
        for loss in (model(**batch()).loss, model(**batch()).logits.square().mean()):
            (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
            with pytest.raises(RuntimeError, match="logits are promised cannot be differentiated"):
                (gradient.sum() + weight.sum()).backward()


def test_a_second_backward_is_as_of_ordinary_logits():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        once = model.lm_head.weight.grad.clone()
        loss.backward()
        torch.testing.assert_close(model.lm_head.weight.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_parts(frozen, counted):
    def make():
        model = small_model("llama")
        getattr(model, frozen).requires_grad_(False)
        return model

    def both(model):
        out = model(**batch())
        return out.loss + out.logits.square().mean()

    check(make, both, counted, 1)


# ---------------------------------------------------------------------------------------------------------------------
# As a tensor
# ---------------------------------------------------------------------------------------------------------------------

ASKED = {
    "shape": lambda t: t.shape, "size": lambda t: t.size(-1), "dim": lambda t: t.dim(), "ndim": lambda t: t.ndim,
    "dtype": lambda t: t.dtype, "device": lambda t: t.device, "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf, "len": len, "numel": lambda t: t.numel(), "stride": lambda t: t.stride(),
    "is_floating_point": lambda t: (t.is_floating_point(), torch.is_floating_point(t)), "nbytes": lambda t: t.nbytes,
    "is_contiguous": lambda t: t.is_contiguous(), "is_cuda": lambda t: (t.is_cuda, t.is_meta, t.is_sparse),
    "layout": lambda t: t.layout, "tensor": lambda t: isinstance(t, torch.Tensor), "type": lambda t: t.type(),
    "grad_fn": lambda t: t.grad_fn is not None, "grad": lambda t: t.retains_grad, "view": lambda t: t._base is None,
    "same": lambda t: (t.float() is t, t.contiguous() is t), "hash": lambda t: {t: 1}[t],
    "no_grad": lambda t: torch.no_grad()(lambda: (t * 2).requires_grad)(), "detach": lambda t: t.detach().is_leaf,
    "slice": lambda t: (t[:, :-1].shape, t[:, :-1].stride(), t[:, :-1].is_contiguous()),
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_is_no_value_forms_nothing(family):
    model, plain = small_model(family), small_model(family)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        promised, logits = model(**batch()).logits, plain(**batch()).logits
        assert type(promised) is PromisedLogits
        for name, ask in ASKED.items():
            assert ask(promised) == ask(logits), name
        assert formed(kernels) == []


@pytest.mark.parametrize("cls", [PromisedLogits, OwedGradient])
def test_no_name_of_a_tensor_means_something_else(cls):
    """`logits.real` is an attribute of every tensor."""
    special = {"__new__", "__module__", "__doc__", "__dict__", "__annotations__", "__torch_function__"}
    assert set(vars(cls)) & set(dir(torch.Tensor)) <= special | {"__torch_dispatch__", "__static_attributes__"}


def test_copies_and_files_hold_ordinary_tensors():
    model, expected = small_model("llama"), small_model("llama")(input_ids=IDS).logits
    with apply_npu_kernels(model, ops=HEAD):
        logits = model(input_ids=IDS).logits
        for copied in (
            copy.deepcopy(model(input_ids=IDS).logits.detach()),
            pickle.loads(pickle.dumps(model(input_ids=IDS).logits)),
            _saved(model(input_ids=IDS).logits),
            torch.from_numpy(model(input_ids=IDS).logits.detach().numpy()),
            torch.tensor(model(input_ids=IDS).logits.tolist()),
        ):
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, expected)
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(logits)
        assert str(logits) == str(expected).replace("UnsafeViewBackward0", "_RealBackward")


def _saved(logits):
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file)


def test_evaluation_and_calls_without_gradients_have_logits():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        with torch.no_grad():
            assert type(model(**batch()).logits) is torch.Tensor
        with torch.inference_mode():
            assert type(model(**batch()).logits) is torch.Tensor
        assert type(model.eval()(**batch()).logits) is torch.Tensor


# ---------------------------------------------------------------------------------------------------------------------
# What is around a head
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss_inside", [False, True])
def test_checkpointed(reentrant, loss_inside):
    def use(model):
        hidden = model.model(IDS).last_hidden_state
        if loss_inside:
            return checkpoint(lambda h: shifted(model.lm_head(h).float()), hidden, use_reentrant=reentrant)
        return shifted(checkpoint(model.lm_head, hidden, use_reentrant=reentrant).float())

    expected = outcome(small_model("llama"), use)
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        found = outcome(model, use)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outside", [False, True])
def test_autocast(dtype, outside, counted):
    """As accelerate does: the forward under autocast, its outputs in fp32, the loss outside or inside."""

    def use(model):
        # The truth is one without autocast.
        enabled = model.lm_head.weight.dtype != torch.float64
        with torch.autocast("cpu", dtype, enabled=enabled):
            out = model(**batch())
        assert out.logits.dtype == (dtype if enabled else torch.float64)
        out = convert_to_fp32(out)
        assert out.logits.dtype == (torch.float32 if enabled else torch.float64)
        return shifted(out.logits) if outside else out.loss

    assert check(lambda: small_model("gemma2"), use, counted, 1 + outside) == []


def test_logits_that_are_formed_after_autocast_are_those_under_it():
    def logits_of(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=IDS).logits

    model, expected = small_model("llama"), logits_of(small_model("llama"))
    with apply_npu_kernels(model, ops=HEAD):
        found = logits_of(model).clamp(-1e9)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_has_the_dtype_that_it_would_have(dtype):
    model = small_model("llama").to(dtype)
    with apply_npu_kernels(model, ops=HEAD):
        logits = model(input_ids=IDS).logits
        assert logits.dtype == dtype
        assert shifted(logits).dtype == dtype
        assert shifted(logits.float()).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert shifted(logits).dtype == torch.float32


def test_saved_tensors_elsewhere(counted):
    def use(model):
        with torch.autograd.graph.save_on_cpu():
            return model(**batch()).loss

    check(lambda: small_model("llama"), use, counted, 1)


def test_compiled_loss_of_a_promise():
    compiled = torch.compile(lambda logits: shifted(logits.float() * 2), backend="aot_eager")
    expected = outcome(small_model("llama"), of_logits(lambda logits: shifted(logits.float() * 2)))
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        found = outcome(model, of_logits(compiled))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# How long what is held is held
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def uncollected():
    """Nothing may need the collector of garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_nothing_is_left_of_a_step():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        out = model(**batch())
        logits, call = weakref.ref(out.logits), weakref.ref(out.logits.place.call)
        out.loss.backward()
        loss = out.loss
        del out
        # A loss that is kept keeps no hidden states, once backward has run.
        assert (logits(), call()) == (None, None)
        assert loss.grad_fn is not None
        out = model(**batch())
        call = weakref.ref(out.logits.place.call)
        del out
        assert call() is None


@pytest.mark.usefixtures("uncollected")
def test_what_is_kept_of_logits_keeps_no_graph():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        out = model(**batch())
        graph = weakref.ref(out.logits.grad_fn), weakref.ref(out.loss.grad_fn)
        with torch.no_grad():
            kept = [out.logits.detach(), out.logits.float() * 2, out.logits[:, :-1].clone()]
        del out
        assert [node() for node in graph] == [None, None]
        assert torch.equal(kept[0] * 2, kept[1])


def test_logits_that_could_not_be_what_they_were_raise():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        used, unused = model(**batch()), model(**batch())
        (used.loss + unused.loss).backward()
        before = used.logits.sum()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert torch.equal(used.logits.sum(), before)
        with pytest.raises(RuntimeError, match="weight or its input has been written to"):
            unused.logits.sum()
