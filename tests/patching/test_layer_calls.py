"""Calls of captured decoder layers: any order of forwards and backwards, hooks, outputs, copies, threads, undo."""

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointError
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.options import check_capture
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.layers import layer_capture
from npu_trainer_kernels.patching.layers.device_waits import DeviceWaits
from npu_trainer_kernels.support.foreign import CACHES
from tests.models import small_model
from tests.patching.captured import FULL, PADDED, Events, Twins, assert_same, full, llama_twins, rows
from tests.patching.padded import Batch, loss_of, of_transformers, values
from tests.test_callback import make_trainer

MORE_LIVE, FEW_LIVE = rows(30, 10, 15, 9), rows(12, 12, 13, 12, seed=4)

# ---------------------------------------------------------------------------------------------------------------------
# Forwards and backwards in any order
# ---------------------------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_micro_batches() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        for each in PADDED[:3]:
            loss_of(model, each).backward()
        return loss_of(model, batch)

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.replayed == 2 * 15


def test_two_forwards_before_a_backward() -> None:
    twins = llama_twins()
    twins.steps(PADDED, lambda model, batch: loss_of(model, batch) * loss_of(model, PADDED[1]))
    twins.steps(PADDED, lambda model, batch: loss_of(model, batch) + loss_of(model, rows(30, 30, 30)))
    assert twins.reasons == {"another forward awaits its backward"}
    assert twins.replayed > 0


def test_the_first_of_two_forwards_goes_back_last() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss_of(model, PADDED[1]).backward()
        return loss

    twins = llama_twins()
    twins.steps(PADDED, step)


def test_two_backwards_of_one_forward() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        return loss

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.replayed == 6


def test_a_graph_that_is_kept_is_differentiated_after_another_forward() -> None:
    kept: list[torch.Tensor] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        first = loss_of(model, PADDED[0])
        first.backward(retain_graph=True)
        loss_of(model, PADDED[1]).backward()
        kept.append(first)
        return first + loss_of(model, batch)

    twins = llama_twins()
    twins.steps(PADDED[:2])
    twins.steps(PADDED, step)
    assert twins.reasons == {"another forward awaits its backward"}
    kept.clear()
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 8


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.q_proj"])
def test_a_forward_after_a_part_of_a_backward(name: str) -> None:
    """The gradient of the last layer alone is asked for, which must stay as it is until the rest of the backward."""

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        weight = model.model.layers[1].get_submodule(name).weight
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        other = loss_of(model, PADDED[1])
        return loss + other * grad.norm()

    twins = llama_twins()
    twins.steps(PADDED, step)
    assert twins.reasons == {"another forward awaits its backward"}


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_evaluation_between_forward_and_backward(batches: tuple[Batch, ...]) -> None:
    seen: list[torch.Tensor] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        with torch.no_grad():
            seen.append(model(**batches[0]).logits)
        return loss

    twins = llama_twins()
    twins.steps(batches, step)
    assert twins.replayed == 12
    for found, expected in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(found, expected)


def test_inference_mode() -> None:
    twins = llama_twins()
    twins.steps(FULL[:2])
    for batch in FULL:
        with torch.inference_mode():
            found, expected = (model(**batch).logits for model in twins.both)
        assert torch.equal(found, expected)
    assert twins.reasons == {"inference mode is on"}
    with torch.no_grad():
        for batch in FULL:
            assert torch.equal(*(model(**batch).logits for model in twins.both))
    twins.steps(FULL)


def test_generation_between_steps() -> None:
    twins = llama_twins()
    twins.steps(FULL[:2])
    prompt = {"input_ids": FULL[0]["input_ids"], "max_new_tokens": 4, "do_sample": False}
    found, expected = (model.generate(**prompt) for model in twins.both)
    assert torch.equal(found, expected)
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 8


def test_evaluation_mode_and_cached_forwards() -> None:
    twins = llama_twins()
    twins.steps(FULL)
    for model in twins.both:
        model.eval()
    with torch.no_grad():
        for batch in FULL:
            assert torch.equal(*(model(**{**batch, "use_cache": True}).logits for model in twins.both))
    name = next(name for name in CACHES if name in inspect.signature(LlamaDecoderLayer.forward).parameters)
    assert twins.reasons == {f"it is given {name} of type DynamicCache"}
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 6
    for model in twins.both:
        model.train()
    twins.steps(FULL)
    assert twins.replayed == before + 14


def test_steps_of_an_optimizer() -> None:
    twins = llama_twins()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins.both]
    for batch in (*PADDED, *PADDED):
        twins.steps([batch])
        for optimizer in optimizers:
            optimizer.step()
    found, expected = (dict(model.named_parameters()) for model in twins.both)
    assert_same(found, expected)
    assert twins.replayed == 14


def test_embeddings_as_inputs() -> None:
    grads: list[torch.Tensor] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        loss = model(**{**batch, "input_ids": None, "inputs_embeds": embedded}).loss
        grads.append(torch.autograd.grad(loss, embedded, retain_graph=True)[0])
        return loss

    twins = llama_twins()
    twins.steps(FULL, step)
    twins.steps(PADDED, step)
    for found, expected in zip(grads[::2], grads[1::2], strict=True):
        assert torch.equal(found, expected)
    assert twins.replayed == 12


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
def test_second_derivatives_raise(batches: tuple[Batch, ...]) -> None:
    twins = Twins(small_model("llama"), ops=["rms_norm"])
    twins.steps(batches)
    for wanted in (twins.model.model.layers[0].mlp.up_proj.weight, twins.model.model.embed_tokens.weight):
        loss = loss_of(twins.model, batches[0])
        (grad,) = torch.autograd.grad(loss, wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            grad.square().sum().backward()


def test_second_derivatives_of_a_layer_alone_raise() -> None:
    twins = Twins(small_model("llama"), ops=["rms_norm"])
    body = twins.model.model
    for _ in range(3):
        out = grad = None  # as long as a graph is kept, its layers run their own code
        hidden = torch.randn(2, 12, 48, requires_grad=True)
        places = body.rotary_emb(hidden, torch.arange(12)[None])
        out = body.layers[0](hidden, position_embeddings=places, attention_mask=None, position_ids=None)
        (grad,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    assert twins.replayed == 2
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.square().sum(), body.layers[0].mlp.up_proj.weight)


def test_functional_calls_have_the_gradients_of_what_they_are_given() -> None:
    twins = llama_twins()
    twins.steps(FULL)
    batch = {k: v for k, v in FULL[0].items() if k != "labels"}

    def computed(model: Any) -> torch.Tensor:
        given = {name: (p.detach() * 1.01).requires_grad_() for name, p in model.named_parameters()}
        for _ in range(3):
            out = torch.func.functional_call(model, given, (), batch).logits.square().sum()
        name = "model.layers.0.mlp.up_proj.weight"
        return torch.autograd.grad(out, given[name])[0]

    assert torch.equal(*(computed(model) for model in twins.both))

    def transformed(model: Any) -> torch.Tensor:
        own = dict(model.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"

        def of(weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, {**own, name: weight}, (), batch).logits.square().sum()

        return torch.func.grad(of)(own[name].detach())

    assert torch.equal(*(transformed(model) for model in twins.both))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and outputs
# ---------------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_asked_for() -> None:
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch, output_hidden_states=True)
        kept.append(out.hidden_states)
        return out.loss + sum(h.mean() for h in out.hidden_states)

    twins = llama_twins()
    twins.steps(FULL)
    twins.steps(FULL, step)
    assert twins.reasons == {"hidden states are asked for"}
    for found, expected in zip(kept[::2], kept[1::2], strict=True):
        assert all(map(torch.equal, found, expected))
    before = twins.replayed
    twins.steps((*FULL, *FULL))
    assert twins.replayed > before + 4  # with the hooks of transformers, which do nothing now


def test_hidden_states_that_a_model_collects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_twins()
    twins.steps(FULL)
    monkeypatch.setattr(layer_capture, "collected_outputs", lambda: None)
    before = twins.replayed
    twins.steps(FULL, lambda model, batch: model(**batch, output_hidden_states=True).loss)
    assert twins.replayed == before
    assert twins.reasons == {"hidden states are asked for"}
    monkeypatch.setattr(twins.model.config, "output_hidden_states", True)
    twins.model(**FULL[0])
    assert twins.replayed == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_hidden_states_are_asked_for_of_checkpointed_layers(reentrant: bool) -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        return model(**batch, output_hidden_states=True).loss

    twins = llama_twins(of_transformers(reentrant))
    twins.steps(FULL)
    twins.steps(FULL, step)
    assert "hidden states are asked for" in twins.reasons
    twins.steps(FULL)


# The op of experts reads numbers on the host on a CPU.
WITHOUT_EXPERTS = [op for op in PATCHES if op != "moe_experts"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads add up the gradient of batched experts in any order: two runs without captured layers differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batched_mixture() -> Any:
    """Returns a mixture whose experts are products of all tokens, with a loss of its router."""
    return small_model("qwen3-moe", experts_implementation="batched_mm", router_aux_loss_coef=1.0)


@pytest.mark.parametrize("batches", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize(
    "prepare", [None, of_transformers(True), of_transformers(False)], ids=["kept", "reentrant", "repeated"]
)
def test_a_mixtures_router_logits(prepare: Any, batches: tuple[Batch, ...]) -> None:
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        kept.append(out.router_logits)
        return out.loss

    twins = Twins(batched_mixture(), prepare, ops=WITHOUT_EXPERTS)
    twins.steps(batches, step)
    assert twins.replayed == (1 if prepare is None else 2) * 2 * 3, str(twins.layers)
    for found, expected in zip(kept[::2], kept[1::2], strict=True):
        assert len(found) == len(expected) == 2
        assert all(map(torch.equal, found, expected))  # also after later replays
    # Without them the same layers have other graphs.
    twins.steps(batches, lambda model, batch: model(**batch, output_router_logits=False).loss)
    assert not twins.reasons


def test_router_logits_are_asked_for_between_a_forward_and_its_backward() -> None:
    def step(model: Any, batch: Batch) -> torch.Tensor:
        loss = model(**batch, output_router_logits=False).loss
        return loss + model(**batch).loss

    twins = Twins(batched_mixture(), of_transformers(False), ops=WITHOUT_EXPERTS)
    twins.steps(PADDED, step)
    twins.steps(PADDED)
    assert twins.replayed > 12


@pytest.mark.parametrize("fault", ["not copied", "without a gradient", "of other graphs"])
def test_fault_router_logits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = of_transformers(False) if fault == "of other graphs" else None
    twins = Twins(batched_mixture(), prepare, ops=WITHOUT_EXPERTS)
    kept: list[tuple[torch.Tensor, ...]] = []

    def step(model: Any, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        kept.append(out.router_logits)
        return out.loss

    def compare() -> None:
        kept.clear()
        twins.steps(PADDED, step)
        for found, expected in zip(kept[::2], kept[1::2], strict=True):
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))

    compare()
    if fault == "not copied":
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **_: tensor.view_as(tensor))
    elif fault == "without a gradient":
        clone = torch.Tensor.clone
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **options: clone(tensor.detach(), **options))
    else:
        # What was collected is not remembered for the repetition of the call.
        monkeypatch.setattr(layer_capture.Repeated, "collects", property(lambda _: (), lambda *_: None))
    with pytest.raises((AssertionError, CheckpointError)):
        compare()


def test_hooks_that_are_set_after_the_capture() -> None:
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)

    twins = llama_twins()
    twins.steps(PADDED)
    handles = [model.model.layers[0].mlp.down_proj.register_forward_hook(hook) for model in twins.both]
    twins.steps(PADDED)
    assert len(calls) == 8
    assert twins.reasons == {"other code has hooked it or a module of it"}
    for handle in handles:
        handle.remove()
    before = twins.replayed
    twins.steps(PADDED)
    assert twins.replayed == before + 8
    for model in twins.both:
        model.model.layers[1].register_full_backward_hook(hook)
    calls.clear()
    twins.steps(PADDED)
    assert len(calls) == 8


def test_hooks_of_every_module() -> None:
    calls: list[int] = []
    twins = llama_twins()
    twins.steps(FULL)
    handle = register_module_forward_hook(lambda *_: calls.append(1))
    try:
        values(twins.model, FULL[0], loss_of)
    finally:
        handle.remove()
    assert len(calls) == sum(1 for _ in twins.model.modules() if type(_) is not nn.ModuleList)
    assert twins.reasons == {"other code has hooked every module"}
    before = twins.replayed
    twins.steps(FULL)
    assert twins.replayed == before + 8


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.input_layernorm", "model.norm"])
def test_what_hooks_have_kept_of_the_next_layer_stays(path: str) -> None:
    """The results of all but the last layer are where the next replay writes."""
    twins = llama_twins()
    twins.steps(FULL)
    kept: list[torch.Tensor] = []
    twins.model.get_submodule(path).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    before = []
    for batch in FULL:
        values(twins.model, batch, loss_of)
        before.append(kept[-1].detach().clone())
    assert all(map(torch.equal, kept, before))


# ---------------------------------------------------------------------------------------------------------------------
# Copies, other models, threads, and the end
# ---------------------------------------------------------------------------------------------------------------------


def test_copies_and_pickles() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    copied = copy.deepcopy(twins.model)
    stored = io.BytesIO()
    torch.save(twins.model, stored)
    stored.seek(0)
    loaded = [torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(twins.model))]
    plain = small_model("llama")
    for each in loaded:
        assert not any("npu" in type(module).__module__ for module in each.modules())
        assert_same(values(each, FULL[0], loss_of), values(plain, FULL[0], loss_of))
    for batch in PADDED:
        losses = [loss_of(model, batch) for model in (copied, *twins.both)]
        for model, loss in zip((copied, *twins.both), losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = [{name: p.grad for name, p in model.named_parameters()} for model in (copied, *twins.both)]
        assert_same(grads[0], grads[2])
        assert_same(grads[1], grads[2])
    assert twins.reasons <= {"it is a copy of a layer that the kernels were applied to"}
    del copied
    twins.steps(PADDED)


def test_other_models_alike_in_the_same_process() -> None:
    twins, others = llama_twins(), Twins(small_model("llama", seed=3))

    def together(batch: Batch) -> None:
        models = (*twins.both, *others.both)
        losses = [loss_of(model, batch) for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = [{name: p.grad for name, p in model.named_parameters()} for model in models]
        assert_same(grads[0], grads[1])
        assert_same(grads[2], grads[3])

    for batch in PADDED:
        together(batch)
    assert twins.replayed == others.replayed == 6


def test_a_second_handle_of_the_same_model() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    again = apply_npu_kernels(twins.model, backend="torch", capture="on")
    twins.steps(PADDED)
    again.restore()
    twins.kernels.restore()
    assert not any("npu" in type(module).__module__ for module in twins.model.modules())


def test_two_threads_with_a_model_each() -> None:
    pairs = [llama_twins(), Twins(small_model("llama", seed=3))]
    errors: list[BaseException] = []

    def work(twins: Twins) -> None:
        try:
            for _ in range(2):
                twins.steps(PADDED)
                twins.steps(FULL)
        except BaseException as error:  # noqa: BLE001  an assertion that fails on a thread fails nothing
            errors.append(error)

    # `values` seeds the process's generator, which nothing here draws from.
    threads = [threading.Thread(target=work, args=(twins,)) for twins in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [twins.replayed for twins in pairs] == [28, 28]


def test_restore_puts_everything_back_and_frees_what_was_captured() -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in PADDED:
        values(model, batch, loss_of)
    layers = kernels.settings.layers
    held = [
        weakref.ref(each)
        for mode in layers._modes.values() for spot in mode.buckets.values() for variants in spot.layers.values()
        for captured in variants for each in (captured.pieces, captured.pieces.pieces[0].outputs[0])
    ]  # fmt: skip
    assert held
    report = str(kernels.report())
    assert "captured layers: 75% of 8 calls replayed" in report
    del layers
    kernels.restore()
    gc.collect()
    assert not any(each() is not None for each in held)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(vars(m).keys() == vars(p).keys() for m, p in zip(model.modules(), plain.modules(), strict=True))
    assert_same(values(model, PADDED[0], loss_of), values(plain, PADDED[0], loss_of))
    assert "captured layers: " in str(kernels.report())
    kernels.refresh()
    for batch in PADDED:
        values(model, batch, loss_of)
    assert kernels.settings.layers.replayed == 6


def test_a_model_that_is_dropped_takes_what_was_captured_along() -> None:
    twins = llama_twins()
    twins.steps(PADDED)
    held = [weakref.ref(twins.layers), weakref.ref(twins.model)]
    del twins
    gc.collect()
    assert not any(each() is not None for each in held)


def test_logs_the_share_of_replayed_layers_where_they_are_captured(tmp_path: Path) -> None:
    model = small_model("llama", use_cache=False)  # older Trainers leave the cache on
    callback = NpuKernelsCallback(backend="torch", capture="on")
    trainer = make_trainer(tmp_path, model, [callback], max_steps=3, logging_steps=1)
    trainer.train()
    shares = [entry["layers_replayed"] for entry in trainer.state.log_history if "loss" in entry]
    assert shares == [0, 1, 1]  # of each step, not of all before
    trainer = make_trainer(tmp_path, callbacks=[NpuKernelsCallback(backend="torch")])
    trainer.train()
    assert not any("layers_replayed" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize(("waits", "for_host"), [(10, True), (8, True), (7, False), (0, False)])
def test_auto_captures_where_the_device_waits_at_nearly_all_layers(
    waits: int, for_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(lambda asked: asked % 10 < waits)
    monkeypatch.setattr(torch, "get_device_module", lambda where: events)
    with FakeTensorMode():
        hidden = torch.empty(2, 3, device="cuda")
    found = DeviceWaits()
    for layer in 4 * (0, 1):
        assert not found.seen(layer, hidden)
    assert events.asked == 1  # the first three forwards are not looked at
    while not found.seen(0, hidden):
        assert events.asked < 1000
    assert found.share == waits / 10
    assert found.for_host == for_host


def test_where_batches_have_many_numbers_of_tokens_auto_captures_those_that_come_often() -> None:
    """Each of the numbers that have graphs already makes the next one wait for half a call more."""
    twins = llama_twins()
    twins.layers.waited = 1.0  # as `auto` has found
    widths = [20, 36, 52, 68, 84]
    captured = []
    for _ in range(5):
        for width in widths:
            before = twins.layers.captured
            twins.steps([full(2, width)])
            captured.append(twins.layers.captured > before)
    rounds = [captured[i : i + len(widths)] for i in range(0, len(captured), len(widths))]
    assert rounds == [
        [False] * 5,
        [True, True, False, False, False],
        [False, False, True, True, False],
        [False, False, False, False, True],
        [False] * 5,
    ]


def test_on_captures_each_number_of_tokens_the_second_time() -> None:
    twins = llama_twins()
    for _ in range(2):
        before = twins.layers.captured
        for width in (20, 36, 52, 68):
            twins.steps([full(2, width)])
    graphs = twins.layers.captured - before
    assert before == 0
    assert graphs == 4 * 2 * 4  # numbers of tokens, layers, and graphs of a layer


def test_unknown_modes() -> None:
    with pytest.raises(ValueError, match="capture must be one of auto, on, off, body; got 'yes'"):
        check_capture("capture", "yes")
    kernels = apply_npu_kernels(small_model("llama"), backend="torch", capture="off")
    assert kernels.settings.layers is None
