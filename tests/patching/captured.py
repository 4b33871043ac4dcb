"""What the tests of captured bodies have in common: batches, and when outcomes are equal.

On a CPU tapes take the place of a device's graphs. Their replays write to the same addresses, so a buffer that was not
filled, and a result that a later replay overwrites, show here, too.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from npu_trainer_kernels.capture import captured_function
from tests.models import SMALL
from tests.patching.padded import Batch, loss_of

Outcome = dict[str, torch.Tensor | None]


def rows(*lengths: int, width: int = 30, seed: int = 0) -> Batch:
    """A padded batch with rows of these lengths."""
    ids = torch.randint(3, SMALL["vocab_size"], (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = ids.masked_fill(mask == 0, SMALL["pad_token_id"])
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def full(count: int = 2, length: int = 12, seed: int = 0) -> Batch:
    """A batch without padding and without a mask."""
    ids = torch.randint(3, SMALL["vocab_size"], (count, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


FULL = tuple(full(seed=seed) for seed in range(4))


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Two outcomes are equal to the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        other = expected[name]
        assert (value is None) == (other is None), f"{name} has a gradient in one of them"
        if value is not None and other is not None:
            assert torch.equal(value, other), f"{name} differs by {(value - other).abs().max()}"


def assert_copies_count(twins: Any, batches: Sequence[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the gradients of batches after all of them, as autograd has them (`.grad` may be a copy). Handed out as
    the memory that the next replay writes, they must differ."""

    def outcomes(model: Any) -> list[Outcome]:
        made = []
        for batch in batches:
            grads = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
            made.append({str(i): grad for i, grad in enumerate(grads)})
        return made

    def compare() -> None:
        for found, expected in zip(*map(outcomes, twins.both), strict=True):
            assert_same(found, expected)

    compare()
    monkeypatch.setattr(captured_function, "_copies", lambda tensors: tensors)
    with pytest.raises(AssertionError):
        compare()
