"""Calls of captured bodies: what other code does between forwards and backwards, and to the model in between."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.capture.graph import TapeRecorder
from npu_trainer_kernels.options import MODEL_OPS, check_capture
from npu_trainer_kernels.patching.bodies import body_capture
from npu_trainer_kernels.patching.bodies.body_state import BodyState
from npu_trainer_kernels.patching.body import batch as batch_module
from tests.capture.graphs import Graphs
from tests.closeness import assert_as_close, rounded
from tests.models import small_model
from tests.patching.captured import FULL, assert_same, rows
from tests.patching.padded import Batch, loss_of, of_transformers, values
from tests.patching.whole import STEPS, BodyTwins, llama_bodies


@pytest.fixture
def twins() -> BodyTwins:
    """Twins that have captured, and are the same."""
    both = llama_bodies()
    both.steps(STEPS[:2])
    return both


# ---------------------------------------------------------------------------------------------------------------------
# Between forwards and backwards
# ---------------------------------------------------------------------------------------------------------------------


def test_micro_batches_and_an_optimizer(twins: BodyTwins) -> None:
    def accumulated(model: Any, batch: Batch) -> torch.Tensor:
        for each in STEPS[:2]:
            loss_of(model, each).backward()
        return loss_of(model, batch)

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins.both]
    for batch in STEPS[2:5]:
        twins.steps([batch], accumulated)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(*(dict(model.named_parameters()) for model in twins.both))
    assert twins.replayed == 1 + 3 * 3


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.q_proj"])
def test_a_forward_after_a_part_of_a_backward(name: str, twins: BodyTwins) -> None:
    """The gradient of the last layer alone is asked for, which must stay as it is until the rest of the backward."""

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        weight = model.model.layers[1].get_submodule(name).weight
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        return loss + loss_of(model, STEPS[1]) * grad.norm()

    twins.steps(STEPS[:3], step)
    assert twins.reasons == {"another forward awaits its backward"}


def test_a_loss_that_is_kept_after_its_backward(twins: BodyTwins) -> None:
    kept = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        kept.append(loss)
        return loss_of(model, STEPS[0])

    twins.steps(STEPS[:3], step)
    assert twins.replayed == 1 + 2 * 3
    assert not twins.reasons


def test_generation_and_evaluation_between_steps(twins: BodyTwins) -> None:
    prompt = {"input_ids": FULL[0]["input_ids"], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(model.generate(**prompt) for model in twins.both))
    for model in twins.both:
        model.eval()
    with torch.no_grad():
        for batch in STEPS[:3]:
            assert torch.equal(*(model(**{**batch, "use_cache": True}).logits for model in twins.both))
        before = twins.replayed
        for batch in STEPS[:3]:
            assert torch.equal(*(model(**batch).logits for model in twins.both))
        assert twins.replayed == before + 2
    for model in twins.both:
        model.train()
    before = twins.replayed
    twins.steps(STEPS)
    assert twins.replayed == before + len(STEPS)


def test_second_derivatives_raise(twins: BodyTwins) -> None:
    for wanted in (twins.model.model.layers[0].mlp.up_proj.weight, twins.model.model.embed_tokens.weight):
        logits = twins.model(**{name: v for name, v in STEPS[0].items() if name != "labels"}).logits
        (grad,) = torch.autograd.grad(logits.square().sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            grad.square().sum().backward()
        del logits, grad
    assert twins.replayed == 3


def test_functional_calls_have_the_gradients_of_what_they_are_given(twins: BodyTwins) -> None:
    batch = {name: value for name, value in STEPS[0].items() if name != "labels"}
    name = "model.layers.0.mlp.up_proj.weight"

    def computed(model: Any) -> torch.Tensor:
        given = {name: (p.detach() * 1.01).requires_grad_() for name, p in model.named_parameters()}
        for _ in range(3):
            out = torch.func.functional_call(model, given, (), batch).logits.square().sum()
        return torch.autograd.grad(out, given[name])[0]

    assert torch.equal(*(computed(model) for model in twins.both))

    def transformed(model: Any) -> torch.Tensor:
        own = dict(model.named_parameters())

        def of(weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, {**own, name: weight}, (), batch).logits.square().sum()

        return torch.func.grad(of)(own[name].detach())

    assert torch.equal(*(transformed(model) for model in twins.both))
    assert twins.replayed < 4


# ---------------------------------------------------------------------------------------------------------------------
# Outputs, checkpoints, memory
# ---------------------------------------------------------------------------------------------------------------------


# The op of experts reads numbers on the host on a CPU.
WITHOUT_EXPERTS = [op for op in MODEL_OPS if op != "moe_experts"]


def test_router_logits_stay_after_later_replays() -> None:
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        kept.append(out.router_logits)
        return out.loss

    model = small_model("qwen3-moe", experts_implementation="batched_mm", router_aux_loss_coef=1.0)
    twins = BodyTwins(model, ops=WITHOUT_EXPERTS)
    twins.steps(STEPS[:4], step)
    assert twins.replayed == 3, str(twins.bodies)
    for found, expected in zip(kept[::2], kept[1::2], strict=True):
        assert len(found) == len(expected) == 2
        assert all(map(torch.equal, found, expected))


def test_fault_the_routers_logits_of_what_fills_a_bucket_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both twins have the same fault, so it shows beside the plain model alone."""
    options: dict[str, Any] = {"experts_implementation": "batched_mm", "router_aux_loss_coef": 1.0}
    model, plain = (small_model("qwen3-moe", **options) for _ in range(2))
    truth = copy.deepcopy(plain).double()
    kernels = apply_npu_kernels(model, backend="torch", ops=WITHOUT_EXPERTS, capture="on")

    def compare() -> None:
        found, expected, exact = (values(each, STEPS[0], loss_of) for each in (model, plain, truth))
        moved = rounded(lambda: values(plain, STEPS[0], loss_of))
        for name, value in found.items():
            if value is not None:
                assert_as_close(value, expected[name], exact[name], name, [m[name] for m in moved])

    for batch in STEPS[:2]:
        values(model, batch, loss_of)
    compare()
    assert kernels.settings.bodies.replayed == 2
    original = batch_module._padded_logits
    monkeypatch.setattr(batch_module, "_padded_logits", lambda logits, *given: original(logits.flip(0), *given))
    with pytest.raises(AssertionError):
        compare()


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize("kind", CheckpointImpl)
def test_layers_inside_of_torchs_checkpoint_wrapper(kind: CheckpointImpl, keeps_state: bool) -> None:
    twins = llama_bodies(lambda model: model.enable_input_require_grads())
    for model in twins.both:  # a body with such layers takes no packed row, unless they are put into it later
        layers = model.model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, kind, preserve_rng_state=keeps_state)
    twins.steps(STEPS[:4])
    if keeps_state:
        assert twins.reasons == {"its code calls get_state of a generator of random numbers"}
    elif kind is CheckpointImpl.NO_REENTRANT:
        assert twins.replayed == 3
    else:
        (reason,) = twins.reasons
        assert reason.startswith("it could not be captured: RuntimeError: When use_reentrant=True, ")


def test_a_bucket_is_close_to_the_plain_model() -> None:
    model = small_model("gemma3", layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in STEPS[:3]:
        found = values(model, batch, loss_of)
    assert kernels.settings.bodies.replayed == 2
    exact, expected = values(truth, batch, loss_of), values(plain, batch, loss_of)
    moved = rounded(lambda: values(plain, batch, loss_of))
    for name, value in found.items():
        assert_as_close(value, expected[name], exact[name], name, [m[name] for m in moved])


def test_capturing_leaves_no_tensor_to_pythons_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the graphs of each bucket take memory of their own, although graphs share a pool."""
    model, graphs = small_model("llama"), Graphs()
    of_transformers(False)(model)
    monkeypatch.setattr(body_capture, "recorder_for", lambda device: graphs)
    bodies = apply_npu_kernels(model, backend="torch", capture="on").settings.bodies
    gc.collect()
    gc.disable()
    try:
        for batch in (*STEPS[:2], rows(30, 30, 30, 30)):
            values(model, batch, loss_of)
        one, two = bodies._graphs()
        two.release()
        stay = [*model.parameters(), *model.buffers(), *one.inputs, *two.inputs]
        known = {t.untyped_storage()._cdata for t in stay}
        assert len(graphs.seen) > 100
        assert all(each.expired() or each.cdata in known for each in graphs.seen)
    finally:
        gc.enable()


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TapeRecorder, "no_room", lambda _: "memory is short")
    twins = llama_bodies()
    twins.steps(STEPS[:3])
    assert twins.replayed == 0
    assert twins.reasons == {"memory is short"}


def test_code_that_fails_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if body_capture.recording_now():
            raise RuntimeError("no stream")
        return own(module, hidden)

    twins = llama_bodies()
    own = type(twins.model.model.norm).forward
    monkeypatch.setattr(type(twins.model.model.norm), "forward", failing)
    monkeypatch.setattr(type(twins.eager.model.norm), "forward", failing)
    twins.steps(STEPS[:3])
    assert twins.reasons == {"it could not be captured: RuntimeError: no stream"}


# ---------------------------------------------------------------------------------------------------------------------
# Weights and modules
# ---------------------------------------------------------------------------------------------------------------------


def test_weights_that_are_loaded_in_place_and_those_that_move(twins: BodyTwins) -> None:
    state = small_model("llama", seed=1).state_dict()
    for model in twins.both:
        model.load_state_dict(state)
    captured = twins.bodies.captured
    twins.steps(STEPS[:2])
    assert twins.bodies.captured == captured
    for model in twins.both:
        weight = model.model.layers[1].self_attn.o_proj.weight
        weight.data = torch.ones_like(weight) / 50  # the same parameter elsewhere
    twins.steps(STEPS[:2])
    assert twins.bodies.captured == captured + 2
    for model in twins.both:
        model.model.layers[1].mlp = nn.Linear(48, 48, bias=False)
        nn.init.eye_(model.model.layers[1].mlp.weight)
    twins.steps(STEPS[:2])
    assert twins.bodies.captured == captured + 4


def test_another_attention_after_the_capture(twins: BodyTwins) -> None:
    captured = twins.bodies.captured
    for model in twins.both:
        model.set_attn_implementation("eager")
    twins.steps(STEPS[:2])
    assert twins.bodies.captured == captured + 2
    for model in twins.both:
        model.set_attn_implementation("sdpa")
    twins.steps(STEPS[:2])
    assert twins.bodies.captured == captured + 2
    assert not twins.reasons


def lora_bodies() -> BodyTwins:
    config = LoraConfig(target_modules=["down_proj"], r=4, init_lora_weights=False)
    return BodyTwins(get_peft_model(small_model("llama"), config).train())


def test_adapters_that_are_merged_after_the_capture() -> None:
    twins = lora_bodies()
    twins.steps(STEPS[:2])
    for model in twins.both:
        model.merge_adapter()
    with torch.no_grad():
        for batch in STEPS[:3]:
            assert torch.equal(*(loss_of(model, batch) for model in twins.both))
    for model in twins.both:
        model.unmerge_adapter()
    before = twins.replayed
    twins.steps(STEPS[:2])
    assert twins.replayed == before + 2


CHANGES = {
    "weight": lambda proj: setattr(
        proj.base_layer, "weight", nn.Parameter(proj.base_layer.weight * 2, requires_grad=False)
    ),
    "adapter": lambda proj: proj.scaling.update(default=proj.scaling["default"] * 3),
    "trained": lambda proj: proj.base_layer.weight.requires_grad_(True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_fault_a_change_that_nobody_looks_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = lora_bodies()
    twins.steps(STEPS[:2])
    monkeypatch.setattr(BodyState, "holds", lambda _: True)
    for model in twins.both:
        CHANGES[what](model.base_model.model.model.layers[0].mlp.down_proj)
    with pytest.raises(AssertionError):
        twins.steps(STEPS[:2])


@pytest.mark.parametrize("which", ["positions", "embedded tokens"])
def test_fault_an_input_that_is_not_copied(which: str, twins: BodyTwins) -> None:
    (graphs,) = twins.bodies._graphs()
    *_, positions, embedded, _ = range(len(graphs.inputs))
    at = positions if which == "positions" else embedded
    assert graphs.inputs[at].is_floating_point() == (which != "positions")
    graphs.inputs[at] = graphs.inputs[at].detach().clone()
    with pytest.raises(AssertionError):
        twins.steps(STEPS[2:3])


# ---------------------------------------------------------------------------------------------------------------------
# Copies, other models, and the end
# ---------------------------------------------------------------------------------------------------------------------


def test_pickles(twins: BodyTwins) -> None:
    stored = io.BytesIO()
    torch.save(twins.model, stored)
    stored.seek(0)
    plain = small_model("llama")
    for each in (torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(twins.model))):
        assert not any("npu" in type(module).__module__ for module in each.modules())
        assert_same(values(each, FULL[0], loss_of), values(plain, FULL[0], loss_of))


def test_other_models_alike_in_the_same_process(twins: BodyTwins) -> None:
    others = BodyTwins(small_model("llama", seed=3))
    for batch in STEPS[:3]:
        models = (*twins.both, *others.both)
        losses = [loss_of(model, batch) for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = [{name: p.grad for name, p in model.named_parameters()} for model in models]
        assert_same(grads[0], grads[1])
        assert_same(grads[2], grads[3])
    assert (twins.replayed, others.replayed) == (1 + 3, 2)


def test_a_second_handle_of_the_same_model(twins: BodyTwins) -> None:
    again = apply_npu_kernels(twins.model, backend="torch", capture="on")
    twins.steps(STEPS[:2])
    assert twins.replayed == 1 + 2
    again.restore()
    twins.kernels.restore()
    assert not any("npu" in type(module).__module__ for module in twins.model.modules())


def test_a_model_that_is_dropped_takes_what_was_captured_along() -> None:
    model = small_model("llama")
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in STEPS[:3]:
        values(model, batch, loss_of)
    held = [weakref.ref(kernels.settings.bodies._graphs()[0]), weakref.ref(model)]
    del model, kernels
    gc.collect()
    assert not any(each() is not None for each in held)


def test_modes() -> None:
    for unknown in ("yes", "body"):
        with pytest.raises(ValueError, match=f"capture must be one of auto, on, off; got '{unknown}'"):
            check_capture("capture", unknown)
    for mode in ("off", "auto"):  # on a CPU
        kernels = apply_npu_kernels(small_model("llama"), backend="torch", capture=mode)
        assert kernels.settings.bodies is None
        assert kernels.report().capture is None
