"""Promised logits and autograd: their gradient, checkpoints, autocast, compiled losses."""

import functools

import pytest
import torch
from accelerate.utils.operations import convert_to_fp32
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.head.promise import OwedGradient
from tests.models import batch, small_model

from .promised import HEAD, IDS, check, formed, of_logits, outcome, shifted

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
    notes = check(lambda: small_model("llama"), of_logits(use), counted, fused)
    assert fused or notes == ["logits that were watched for their gradient"]


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


def test_hooks_of_the_heads_weight_are_called_once(counted):
    def use(model):
        seen = []
        model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        out = model(**batch())
        loss = out.loss + out.logits.square().mean()
        calls.append(seen)
        return loss

    calls = []
    check(lambda: small_model("llama"), use, counted, 1)
    assert len(calls) >= 3
    assert {len(seen) for seen in calls} == {1}


@pytest.mark.parametrize(
    ("use", "wanted"),
    # The gradient that squares of logits send to logits is PyTorch's own.
    [("loss", "weight"), ("squares", "weight"), ("a step", "weight"), ("loss", "logits"), ("a step", "logits")],
)
def test_second_derivatives_raise(use, wanted):
    model = small_model("llama")
    weight = model.lm_head.weight
    with apply_npu_kernels(model, ops=HEAD):
        for whole in (True, False):
            out = model(**batch())
            made = out.logits.float() * 2
            # A sum over a step of the second promise: what arrives for that depends on nothing.
            loss = {"loss": out.loss, "squares": out.logits.square().mean(), "a step": shifted(made)}[use]
            at = {"weight": weight, "logits": out.logits}[wanted]
            (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
            if whole:
                differentiate = (gradient.sum() + weight.sum()).backward
            else:
                dot = (gradient * gradient.detach()).sum() + 0 * at.sum()
                differentiate = functools.partial(torch.autograd.grad, dot, at, allow_unused=True)
            with pytest.raises(RuntimeError, match="cannot be differentiated"):
                differentiate()


@pytest.mark.parametrize("form", [functional.hvp, functional.vhp, functional.jvp])
def test_products_with_second_derivatives_raise(form):
    model = small_model("llama")
    ids = batch()["input_ids"]

    def loss(hidden):
        return shifted(model.lm_head(hidden))

    hidden = model.model(ids).last_hidden_state.detach()
    with apply_npu_kernels(model, ops=HEAD), pytest.raises(RuntimeError, match="cannot be differentiated"):
        form(loss, hidden, torch.ones_like(hidden))


def test_a_second_backward_is_as_of_ordinary_logits():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        once = model.lm_head.weight.grad.clone()
        loss.backward()
        assert torch.equal(model.lm_head.weight.grad, 2 * once)
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
# What is around a head
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss_inside", [False, True])
def test_checkpointed(reentrant, loss_inside, counted):
    def use(model):
        hidden = model.model(IDS).last_hidden_state
        if loss_inside:
            return checkpoint(lambda h: shifted(model.lm_head(h).float()), hidden, use_reentrant=reentrant)
        return shifted(checkpoint(model.lm_head, hidden, use_reentrant=reentrant).float())

    # A reentrant checkpoint runs what is inside twice, the first time without gradients, where logits are real. Another
    # one repeats it when saved tensors are read, and the head's forward has computed the gradients already.
    check(lambda: small_model("llama"), use, counted, int(loss_inside or not reentrant))


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


def test_compiled_loss_of_a_promise(counted):
    compiled = torch.compile(lambda logits: shifted(logits.float() * 2), backend="aot_eager")
    check(lambda: small_model("llama"), of_logits(compiled), counted, 1)
