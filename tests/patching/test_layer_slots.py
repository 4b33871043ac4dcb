"""Captured decoder layers whose parameters move, as under FSDP2: graphs read copies in buffers that layers share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels.patching.layers import layer_capture
from npu_trainer_kernels.patching.layers.device_waits import DeviceWaits
from npu_trainer_kernels.patching.layers.weight_slots import WeightSlots
from tests.patching.captured import FULL, PADDED, Events, Twins, llama_twins
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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_checkpointed_layers(batches: tuple[Batch, ...], reentrant: bool) -> None:
    twins = llama_twins(of_transformers(reentrant))
    twins.steps(batches, step)
    # The first forward and its repetition run the layers' code.
    assert twins.replayed == 2 * 2 * 3, str(twins.layers)
    assert not twins.reasons
    assert len(twins.layers._slots) == 1  # both layers share it
    with torch.no_grad():
        for model in twins.both:
            for parameter in model.parameters():
                parameter.mul_(1.5)
    twins.steps(batches, step)


@pytest.mark.parametrize("waits", [8, 7])
@pytest.mark.parametrize("how", ["kept", "checkpointed"])
def test_auto_copies_parameters_where_the_device_waits(how: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that decides for parameters that stay decides for those that move, too."""
    twins: Twins = llama_twins(of_transformers(False) if how == "checkpointed" else None)
    events = Events(lambda asked: asked % 10 < waits)
    with FakeTensorMode():
        on_device = torch.empty(1, device="cuda")

    class Waits(DeviceWaits):
        _CALLS = 20

        def seen(self, layer: int, hidden: object) -> bool:
            return super().seen(layer, on_device)

    twins.layers.on, twins.layers.waits = False, Waits()
    with monkeypatch.context() as clock:
        clock.setattr(torch, "get_device_module", lambda where: events)
        while twins.layers.waited is None:
            assert events.asked < 1000
            step(twins.model, FULL[0]).backward()
    assert twins.layers.waited == waits / 10
    assert twins.layers.on == (waits == 8)
    twins.steps(FULL, step)
    assert bool(twins.replayed) == (waits == 8)
    assert not twins.reasons


FAULTS = [
    ("kept", "not loaded"),
    ("kept", "not loaded for backward"),
    ("kept", "of another layer"),
    ("checkpointed", "not loaded"),
    ("checkpointed", "not loaded while it is repeated"),
    ("checkpointed", "of another layer"),
    ("checkpointed", "overwritten before the backward"),
]


@pytest.mark.parametrize(("how", "fault"), FAULTS)
def test_fault_weights_of_another_layer(how: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins: Twins = llama_twins(of_transformers(False) if how == "checkpointed" else None)
    twins.steps(FULL, step)
    load: Load = WeightSlots.load
    first = list(twins.model.model.layers[0].parameters())

    def faulty(slots: WeightSlots, owner: object, parameters: Any, again: bool) -> None:
        repeats = torch._C._current_graph_task_id() != -1 and not again  # a forward during a backward
        if fault == "not loaded for backward" and again:
            return
        if fault == "not loaded while it is repeated" and repeats:
            slots._owner = owner
        elif fault == "of another layer":
            load(slots, owner, first, again)
        elif fault != "not loaded":
            load(slots, owner, parameters, again)
        if fault == "overwritten before the backward" and repeats:
            torch._foreach_mul_(slots.buffers, 2.0)

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
