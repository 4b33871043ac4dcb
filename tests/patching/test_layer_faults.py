"""Decoder layers that are not captured, with the reason, and planted faults of captured ones."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from npu_trainer_kernels.capture import pieces as pieces_module
from npu_trainer_kernels.capture import recording_now
from npu_trainer_kernels.patching.body import batch as batch_module
from npu_trainer_kernels.patching.layers import LayerCapture, buckets, layer_capture, layer_state
from npu_trainer_kernels.patching.undo import Undo
from tests.closeness import assert_as_close, rounded
from tests.models import small_model
from tests.patching.captured import FULL, PADDED, Twins, assert_copies_count, llama_twins, lora_twins, rows
from tests.patching.padded import Batch, loss_of, of_torch, values

MORE_LIVE, FEW_LIVE = rows(30, 10, 15, 9), rows(12, 12, 13, 12, seed=4)

# ---------------------------------------------------------------------------------------------------------------------
# Layers that are left alone
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attends as layers of transformers do, after what a test changes."""

    def __init__(self, change: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.change = change
        self.config = LlamaConfig(attn_implementation="sdpa")

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        given = {"attention_mask": mask, **self.change(hidden, mask)}
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        states = hidden.view(2, 1, 6, 4)
        return function(self, states, states, states, **given)[0].view(2, 6, 4)


class Layer(GradientCheckpointingLayer):
    def __init__(self, own: Callable[..., Any], change: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.linear, self.attention, self.own = nn.Linear(4, 4), Attention(change), own

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return self.own(self, hidden, attention_mask, **kwargs)


def attends(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden + layer.attention(layer.linear(hidden), mask)


def of_layer(
    own: Callable[..., Any] = attends, prepare: Callable[[Any], None] | None = None,
    change: Callable[..., dict[str, Any]] = lambda *_: {}, **kwargs: Any,
) -> LayerCapture:  # fmt: skip
    """Calls a layer some times beside the same layer that is not captured."""
    layer = Layer(own, change)
    if prepare is not None:
        prepare(layer)
    plain = copy.deepcopy(layer)
    made = LayerCapture(Undo(), list, lambda: False)
    made.install(nn.ModuleList([layer]), "on")
    for _ in range(4):
        hidden = torch.randn(2, 6, 4)
        made_by = [tree_leaves(each(hidden, **kwargs)) for each in (layer, plain)]
        for found, expected in zip(*made_by, strict=True):
            if found is None:
                continue
            assert torch.equal(found, expected)
            if found.requires_grad:
                found.sum().backward()
    return made


def test_a_layer_of_any_family_is_replayed() -> None:
    for mask in (None, torch.ones(2, 1, 6, 6).tril().bool()):
        made = of_layer(attention_mask=mask)
        assert made.replayed == 3
        assert not made.reasons
    both = of_layer(lambda *args: (attends(*args), None))
    assert both.replayed == 3


class Strange(nn.Parameter):
    pass


def set_strange(layer: Any) -> None:
    layer.linear.weight = Strange(layer.linear.weight.detach())


def set_forward(layer: Any) -> None:
    layer.linear.forward = functools.partial(nn.Linear.forward, layer.linear)


class Sharded(nn.Linear):
    """Stands for FSDP2's modules."""


def set_sharded(layer: Any) -> None:
    layer.linear.__class__ = Sharded


def failing(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if recording_now():
        raise RuntimeError("no stream")
    return attends(layer, hidden, mask)


def changing(layer: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return attends(layer, hidden, mask)


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "parameters of a module of it move (FSDP)": {"prepare": set_sharded},
    "a parameter of it is a Strange": {"prepare": set_strange},
    "a forward was set on a module of it": {"prepare": set_forward},
    "it could not be captured: RuntimeError: no stream": {"own": failing},
    "it returns one of its arguments": {"own": lambda layer, hidden, mask: hidden[:]},
    "it is given settings of type object": {
        "own": lambda layer, hidden, mask, settings: attends(layer, hidden, mask),
        "settings": object(),
    },
    "its attention returns weights": {},
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_layers_that_are_left_alone(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_weights(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query.transpose(1, 2), query

    monkeypatch.setattr(layer_capture, "FSDPModule", Sharded)
    if reason == "its attention returns weights":
        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {"sdpa": with_weights})
        made = of_layer()
    else:
        made = of_layer(**LEFT_ALONE[reason])
    assert made.replayed == 0
    assert set(made.reasons) == {reason}


def test_a_call_without_a_tensor() -> None:
    made = LayerCapture(Undo(), list, lambda: False)
    layer = Layer(lambda *_: None, lambda *_: {})
    made.install(nn.ModuleList([layer]), "on")
    layer(None)
    assert dict(made.reasons) == {"it is given no tensor": 1}


def test_a_layer_whose_state_changes_at_each_call() -> None:
    made = of_layer(changing)
    assert made.replayed == 0
    layer = Layer(changing, lambda *_: {})
    made.install(nn.ModuleList([layer]), "on")
    for _ in range(12):
        layer(torch.randn(2, 6, 4))
    assert set(made.reasons) == {
        "a call of it changes Layer.calls",
        "its modules or parameters change: 4 states of it are captured",
    }


def test_a_forward_that_a_checkpoint_repeats_without_the_call_of_it() -> None:
    layer = Layer(attends, lambda *_: {})
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    made = LayerCapture(Undo(), list, lambda: False)
    made.install(nn.ModuleList([layer]), "on")
    for call in (layer.forward, layer):
        made.reasons.clear()
        for _ in range(3):
            call(torch.randn(2, 6, 4, requires_grad=True)).sum().backward()
        if call is layer:
            assert made.replayed == 2 * 2
            assert not made.reasons
        else:
            assert made.replayed == 0
            assert set(made.reasons) == {"a checkpoint repeats its forward instead of its call"}


TAKEN = "hooks around it take the tensors that it saves for backward (a checkpoint, or offloading)"


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("kind", CheckpointImpl)
def test_layers_inside_of_torchs_checkpoint_wrapper(kind: CheckpointImpl, batches: tuple[Batch, ...]) -> None:
    def prepare(model: Any) -> None:
        model.enable_input_require_grads()
        of_torch(kind, "DecoderLayer")(model)

    twins = llama_twins(prepare)
    twins.steps(batches)
    with torch.no_grad():
        for _ in range(3):
            twins.model(**batches[0])
    if kind is CheckpointImpl.NO_REENTRANT:
        assert twins.replayed == 2 * 2  # of the calls without gradients
        assert twins.reasons == {TAKEN}
    else:
        assert twins.replayed > 2 * 2
        assert not twins.reasons


def test_what_is_offloaded_is_not_kept_by_graphs() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, batch)

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.replayed == 0
    assert twins.reasons == {TAKEN}


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def captured_twins() -> Twins:
    """Returns twins that have captured, and are the same."""
    both = llama_twins()
    both.steps(PADDED)
    return both


@pytest.fixture
def twins() -> Twins:
    return captured_twins()


def assert_caught(
    twins: Twins, step: Callable[[Any, Batch], torch.Tensor] = loss_of, batches: tuple[Batch, ...] = PADDED
) -> None:
    with pytest.raises(AssertionError):
        twins.steps(batches, step)


def test_fault_a_stale_static_input(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Input, "load", lambda *_: None)
    assert_caught(twins)


def test_fault_an_input_that_is_not_copied(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Input, "holds", lambda place, _: place.path != 0)
    assert_caught(twins)


@pytest.mark.parametrize("path", [("position_embeddings", 0), ("position_embeddings", 1)])
def test_fault_positions_that_are_not_copied(path: Any, twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = layer_capture.Input.holds
    monkeypatch.setattr(layer_capture.Input, "holds", lambda p, t: p.path == path or original(p, t))
    assert_caught(twins)


def test_fault_the_gradient_of_a_residual_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from a piece to the next one beside attention has its gradient in the joint backward."""
    original = pieces_module._copies

    def lost(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(t) if t.dim() == 3 else t for t in original(tensors)]

    both = llama_twins()
    both.steps(PADDED)
    monkeypatch.setattr(pieces_module, "_copies", lost)
    assert_caught(both)


def test_fault_the_gradient_of_attention_is_lost(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pieces_module._fill

    def fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
        original(buffer, None if dim == 2 else value, dim)

    monkeypatch.setattr(pieces_module, "_fill", fill)
    assert_caught(twins)


def test_fault_a_tail_that_is_not_cleared(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pieces_module._fill

    def fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
        original(buffer, value, dim)
        if value is not None and dim is not None and value.shape[dim] != buffer.shape[dim]:
            buffer.narrow(dim, value.shape[dim], buffer.shape[dim] - value.shape[dim]).fill_(3)

    monkeypatch.setattr(pieces_module, "_fill", fill)
    assert_caught(twins)


def test_fault_another_layers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    both = llama_twins()
    original = layer_capture.LayerCapture._ready

    def ready(by: Any, layer: Any, *args: Any) -> Any:
        return original(by, both.model.model.layers[0] if layer is both.model.model.layers[1] else layer, *args)

    monkeypatch.setattr(layer_capture.LayerCapture, "_ready", ready)
    assert_caught(both)


def test_fault_a_second_forward_overwrites_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch) * loss_of(model, same_rows)

    same_rows = rows(30, 10, 15, 5, seed=5)

    class Never(set):
        def add(self, _: object) -> None:
            pass

    # Twins of a step that has raised are not used again: their layers may run their own code for a while.
    guarded, unguarded, unseen = (captured_twins() for _ in range(3))
    # Neither of the two guards, nor the one that sees who keeps a result (autograd has saved some), nor autograd's own,
    # which sees that what it has saved was written to.
    monkeypatch.setattr(buckets.Mode, "is_kept", lambda *_: False)
    monkeypatch.setattr(layer_capture, "Turn", lambda rows: layer_capture_turn(rows, Never()))
    with pytest.raises(RuntimeError, match="ran forward again before the backward"):
        guarded.steps(PADDED[:1], step)
    monkeypatch.setattr(pieces_module, "_may_go_back", lambda turn: None)
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        unguarded.steps(PADDED[:1], step)
    monkeypatch.setattr(pieces_module, "increment_version", lambda tensors: None)
    assert_caught(unseen, step, PADDED[:1])


layer_capture_turn = layer_capture.Turn


def test_fault_a_frozen_parameter_that_is_trained_later(monkeypatch: pytest.MonkeyPatch) -> None:
    both = llama_twins(lambda model: model.model.layers[0].mlp.requires_grad_(False) and None)
    both.steps(PADDED)
    monkeypatch.setattr(layer_state.LayerState, "holds", lambda _: True)
    for model in both.both:
        model.model.layers[0].mlp.requires_grad_(True)
    assert_caught(both)


@pytest.mark.parametrize("what", ["weight", "adapter", "hook"])
def test_fault_a_change_that_nobody_looks_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = lora_twins(["down_proj"])
    both.steps(FULL)
    monkeypatch.setattr(layer_state.LayerState, "holds", lambda _: True)
    for model in both.both:
        proj = model.base_model.model.model.layers[0].mlp.down_proj
        if what == "weight":
            proj.base_layer.weight = nn.Parameter(proj.base_layer.weight * 2, requires_grad=False)
        elif what == "adapter":
            proj.scaling["default"] *= 3
        else:
            proj.register_forward_hook(lambda module, args, out: out * 2)
    assert_caught(both, batches=FULL)


def test_fault_gradients_are_handed_out_as_static_buffers(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_copies_count(twins, PADDED, monkeypatch)


def test_fault_padding_of_a_bucket_in_a_routers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_model("qwen3-moe", router_aux_loss_coef=1.0))
    plain = small_model("qwen3-moe", router_aux_loss_coef=1.0)
    truth = copy.deepcopy(plain).double()

    def compare() -> None:
        found, expected, exact = (values(model, PADDED[0], loss_of) for model in (twins.model, plain, truth))
        moved = rounded(lambda: values(plain, PADDED[0], loss_of))
        for name, value in found.items():
            if value is not None:
                assert_as_close(value, expected[name], exact[name], name, [m[name] for m in moved])

    compare()
    original = batch_module._padded_logits
    monkeypatch.setattr(batch_module, "_padded_logits", lambda logits, *a: original(logits.flip(0), *a))
    with pytest.raises(AssertionError):
        compare()
