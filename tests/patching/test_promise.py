"""The promise of a head's logits: right whatever is done with it, and fused where loss code leaves it a choice."""

import pytest
import torch
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_trainer_kernels import apply_npu_kernels, tiling
from npu_trainer_kernels.ops.head import chunks
from npu_trainer_kernels.patching.head import promise_records
from tests.models import batch, small_model

from .promised import FLAT, HEAD, IDS, LABELS, check, formed, of_logits, own_loss, shifted

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
# What loss code does with logits
# ---------------------------------------------------------------------------------------------------------------------


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
        lambda logits: functional.cross_entropy(logits[..., :300].flatten(0, 1), FLAT.clamp(max=299)), 0,
        "by an index into the vocabulary",
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
    "below functions": (below_functions, 0, "given to aten.exp"),
    "below functions, in place": (below_functions_in_place, 0, "aten.mul_"),
    "gathered": (gathered, 0, "torch.cat"),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_what_needs_logits_gets_them_and_is_named(name, counted):
    use, fused, named = REAL[name]
    notes = check(lambda: small_model("llama"), of_logits(use), counted, fused)
    assert any(named in note for note in notes), notes


@pytest.mark.parametrize("use", [torch.argmax, lambda logits: logits[0].mul_(3)], ids=["formed", "written to"])
def test_of_what_is_formed_nothing_more_is_recorded(use):
    """The report has the first reason of a head's call alone, so nobody reads this one there."""
    model, plain = small_model("llama"), small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        logits, expected = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
        for each in (logits, expected):
            use(each)
        assert promise_records._alone(logits) == "they have been written to, or are formed already"
        assert torch.equal(shifted(logits), shifted(expected))
        assert kernels.report().ran["linear_cross_entropy"] == 0


def test_what_forms_logits_is_reported_once():
    model = small_model("llama")
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        for _ in range(3):
            # Each of these steps is a promise.
            model(input_ids=IDS).logits[..., :-1, :].float().contiguous().argmax(-1)
        assert formed(kernels) == ["logits that were given to torch.Tensor.argmax"]
        assert [each.calls for each in kernels.report().declined] == [3]


# ---------------------------------------------------------------------------------------------------------------------
# A sum that is going to be divided
# ---------------------------------------------------------------------------------------------------------------------


# In fp32 41 times a 41st is not one.
@pytest.mark.parametrize("items", [41, torch.tensor(41), torch.tensor(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_divided_before_they_are_rounded(monkeypatch, items, dtype):
    """What `transformers.Trainer` tells a model is planned for, so that nothing is left to scale in backward."""
    factors = []
    original = chunks.Gradients.scaled

    def scaled(self, factor, backend):
        factors.append(float(factor))
        return original(self, factor, backend)

    monkeypatch.setattr(chunks.Gradients, "scaled", scaled)
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


def test_logits_that_are_formed_beside_each_fused_loss_are_promised_no_more() -> None:
    """Both cost six products of the vocabulary's size, plain PyTorch three. One call without such a use counts anew."""
    model, inputs = small_model("llama"), {"input_ids": torch.randint(3, 90, (2, 9))}

    def call(reads: bool) -> None:
        out = model(**inputs, labels=inputs["input_ids"])
        more = out.logits.log_softmax(-1).mean() if reads else 0.0
        (out.loss + more).backward()

    with apply_npu_kernels(model, ops=("linear_cross_entropy",)) as kernels:
        (site,) = kernels.report().sites
        for reads in (True, True, True, False, True, True, True, True):
            call(reads)
        assert site.ran == 8
        for _ in range(3):
            call(True)
        assert site.ran == 8
        reason = "the last 4 calls formed their logits beside the fused loss, which costs twice as much"
        assert site.declined[reason] == 3
