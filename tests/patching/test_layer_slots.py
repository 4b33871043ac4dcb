"""Captured decoder layers whose parameters move, as under FSDP2: graphs read copies in buffers that layers share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels.patching.layers import layer_capture
from npu_trainer_kernels.patching.layers.weight_slots import WeightSlots
from tests.patching.captured import FULL, PADDED, Twins, llama_twins
from tests.patching.padded import Batch, of_transformers

Load = Callable[..., None]


@pytest.fixture(autouse=True)
def layers_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture, "FSDPModule", LlamaDecoderLayer)


def moved(model: Any) -> None:
    """Moves the parameters of all layers as FSDP2 does, which gives the same storage other memory."""
    for layer in model.model.layers:
        for parameter in layer.parameters():
            storage = parameter.untyped_storage()
            before = storage.data_ptr()
            storage.resize_(storage.nbytes() + 64)
            assert storage.data_ptr() != before


def step(model: Any, batch: Batch) -> torch.Tensor:
    moved(model)
    loss: torch.Tensor = model(**batch).loss
    loss.register_hook(lambda _: moved(model))
    return loss


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_parameters_that_move_before_forward_and_backward(batches: tuple[Batch, ...]) -> None:
    twins = llama_twins()
    twins.steps(batches, step)
    assert twins.replayed == 2 * 3, str(twins.layers)
    assert not twins.reasons
    (slots,) = twins.layers._slots.values()  # both layers share it
    assert len(slots.buffers) == len(list(twins.model.model.layers[0].parameters()))
    with torch.no_grad():
        for model in twins.both:
            for parameter in model.parameters():
                parameter.mul_(1.5)
    twins.steps(batches, step)


def test_evaluation_has_slots_too() -> None:
    twins = llama_twins()
    with torch.no_grad():
        for batch in FULL:
            first, second = (step_of(model, batch) for model in twins.both)
            assert torch.equal(first, second)
    assert twins.replayed == 2 * 3


def step_of(model: Any, batch: Batch) -> torch.Tensor:
    moved(model)
    return model(**batch).logits  # type: ignore[no-any-return]


def test_checkpointed_layers_are_declined() -> None:
    twins = llama_twins(of_transformers(False))
    twins.steps(FULL, step)
    assert twins.replayed == 0
    assert twins.reasons == {"its parameters move (FSDP), and a checkpoint repeats it"}


def test_they_are_captured_only_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_twins()
    twins.layers._asked = False
    twins.steps(FULL, step)
    assert twins.replayed == 0
    (reason,) = twins.reasons
    assert reason == "its parameters move (FSDP), and only capture='on' copies them to where graphs read"


@pytest.mark.parametrize("fault", ["not loaded", "not loaded for backward"])
def test_fault_weights_of_another_layer(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins: Twins = llama_twins()
    twins.steps(FULL, step)
    load: Load = WeightSlots.load

    def faulty(slots: WeightSlots, owner: object, parameters: Any, again: bool) -> None:
        if fault == "not loaded for backward" and not again:
            load(slots, owner, parameters, again)

    monkeypatch.setattr(WeightSlots, "load", faulty)
    for made in (each for mode in twins.layers._modes.values() for spot in mode.buckets.values()
                 for variants in spot.layers.values() for each in variants):  # fmt: skip
        made.pieces.prepare = _again(made.pieces.prepare)
    with pytest.raises(AssertionError, match="differs by"):
        twins.steps(FULL, step)


def _again(prepare: Any) -> Any:
    """The same call of the method that the class has now."""
    slots, args = prepare.func.__self__, prepare.args
    return lambda again: slots.load(*args, again)
