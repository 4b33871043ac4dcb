"""What the tests of captured layers have in common: two models alike, one replayed and one run eagerly.

On a CPU tapes take the place of a device's graphs. Their replays write to the same addresses, so a buffer that was not
filled, and a result that a later replay overwrites, show here, too.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from npu_trainer_kernels import NpuKernels, apply_npu_kernels
from npu_trainer_kernels.capture import pieces
from tests.models import SMALL, small_model
from tests.patching.padded import Batch, Step, loss_of, values

Outcome = dict[str, torch.Tensor | None]


def rows(*lengths: int, width: int = 30, seed: int = 0) -> Batch:
    """A padded batch with rows of these lengths. Four rows of 49 to 64 tokens together fill the same bucket."""
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


PADDED = (
    rows(30, 10, 15, 5),
    rows(8, 24, 11, 13, seed=1),
    rows(20, 17, 1, 22, seed=2),
    rows(9, 12, 25, 4, seed=3),
)
FULL = tuple(full(seed=seed) for seed in range(4))


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Two outcomes are equal to the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        other = expected[name]
        assert (value is None) == (other is None), f"{name} has a gradient in one of them"
        if value is not None and other is not None:
            assert torch.equal(value, other), f"{name} differs by {(value - other).abs().max()}"


class Twins:
    """A model with captured layers, and the same model whose layers run eagerly with the same numbers of tokens."""

    def __init__(self, model: Any, prepare: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.options = {"backend": "torch", "capture": "on", **options}
        self.model, self.eager = model, copy.deepcopy(model)
        self.kernels = self._applied(self.model, prepare)
        other = self._applied(self.eager, prepare)
        self._eager(other)
        self.eager_kernels = other
        self._kept: list[tuple[Outcome, Outcome]] = []

    def _eager(self, kernels: NpuKernels) -> None:
        """Lets the layers of a model run eagerly."""
        kernels.settings.layers._ready = lambda *_: ""

    def _applied(self, model: Any, prepare: Callable[[Any], Any] | None) -> NpuKernels:
        if prepare is not None:
            prepare(model)
        return apply_npu_kernels(model, **self.options)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.eager

    @property
    def layers(self) -> Any:
        return self.kernels.settings.layers

    @property
    def replayed(self) -> int:
        return self.layers.replayed

    @property
    def reasons(self) -> set[str]:
        """Why layers ran their own code."""
        return set(self.layers.reasons)

    def steps(self, batches: Any, step: Step = loss_of) -> None:
        """The loss and each gradient of each batch are equal to the bit."""
        for batch in batches:
            found, expected = (values(model, batch, step) for model in self.both)
            assert_same(found, expected)
            self._kept.append((found, {k: None if v is None else v.clone() for k, v in expected.items()}))
        for kept, before in self._kept:
            assert_same(kept, before)  # a later replay has not written to what an earlier one has returned


def llama_twins(prepare: Callable[[Any], Any] | None = None, **overrides: Any) -> Twins:
    return Twins(small_model("llama", **overrides), prepare)


def lora_twins(targets: list[str], **options: Any) -> Twins:
    config = LoraConfig(target_modules=targets, r=4, init_lora_weights=False, **options)
    return Twins(get_peft_model(small_model("llama"), config).train())


class Events:
    """Events of a device that begins what it is asked for at once (`waits`), or later."""

    def __init__(self, waits: Callable[[int], bool]) -> None:
        self.asked, self._waits = 0, waits

    def Event(self) -> Any:
        return self

    def current_stream(self, where: torch.device) -> None:
        assert where.type == "cuda"

    def record(self, stream: None) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self._waits(self.asked)


def assert_copies_count(twins: Twins, batches: Sequence[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(pieces, "_copies", lambda tensors: tensors)
    with pytest.raises(AssertionError):
        compare()
