"""What the tests of promised logits share: the comparison of a patched model with its own loss code."""

import torch
from torch.nn import functional

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching.head import head_call
from npu_trainer_kernels.support.rounding import SEEDS
from tests.models import assert_outcome_close, batch

HEAD = ["linear_cross_entropy", "linear_logprob"]
IDS, LABELS = batch()["input_ids"], batch()["labels"]
FLAT = LABELS.flatten()


def shifted(logits: torch.Tensor, labels: torch.Tensor = LABELS) -> torch.Tensor:
    return functional.cross_entropy(logits[..., :-1, :].reshape(-1, 331), labels[..., 1:].reshape(-1))


class Counted:
    """Calls of the fused op."""

    def __init__(self, monkeypatch):
        self.fused = 0
        original = head_call.fused_linear_cross_entropy

        def fused(*args, **kwargs):
            self.fused += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(head_call, "fused_linear_cross_entropy", fused)


def formed(kernels) -> list[str]:
    """What has formed logits, as the report says it."""
    return [each.reason for each in kernels.report().declined if each.reason.startswith("logits")]


def outcome(model, loss_of) -> list[torch.Tensor]:
    """A loss and every gradient."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def check(make, loss_of, counted, fused) -> list[str]:
    """Compares a patched model's loss and gradients with the model's own; returns what the report says."""
    model = make()
    expected, truth = outcome(make(), loss_of), outcome(make().double(), loss_of)
    with apply_npu_kernels(model, ops=HEAD) as kernels:
        found = outcome(model, loss_of)
        notes = formed(kernels)
    # Each is used once, since a loss may register hooks. Made under a rounding, their weights would be changed.
    fresh = [make() for _ in range(SEEDS)]
    assert_outcome_close(model, found, expected, truth, lambda: outcome(fresh.pop(), loss_of))
    assert counted.fused == fused, f"{counted.fused} calls of the fused op, expected {fused}"
    return notes


def own_loss(model, **kwargs) -> torch.Tensor:
    return model(**{**batch(), **kwargs}).loss


def of_logits(use):
    return lambda model: use(model(input_ids=IDS).logits)
