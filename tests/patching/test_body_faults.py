"""Captured bodies that are not replayed, with the reason, and planted faults of captured ones."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.capture import Refused
from npu_trainer_kernels.ops.attention import Room, bounded_segments
from npu_trainer_kernels.patching.bodies import body_capture, stand_ins
from npu_trainer_kernels.patching.body import Batch as BodyBatch
from npu_trainer_kernels.patching.body import BodyForward
from tests.models import small_model
from tests.patching.captured import assert_copies_count, assert_same, rows
from tests.patching.padded import Batch, loss_of, values
from tests.patching.test_body_graphs import SHARED, in_autocast
from tests.patching.whole import STEPS, BodyTwins, llama_bodies

TAKEN = "hooks around it take the tensors that it saves for backward (a checkpoint, or offloading)"

# ---------------------------------------------------------------------------------------------------------------------
# What is not replayed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def twins() -> BodyTwins:
    """Twins that have captured, and are the same."""
    both = llama_bodies()
    both.steps(STEPS[:2])
    return both


def reasons_of(twins: BodyTwins, step: Callable[[Any, Batch], torch.Tensor] = loss_of, steps: int = 3) -> set[str]:
    """Why the body ran its own code in these steps, which have the same bits."""
    before = twins.bodies.reasons.copy()
    twins.steps(STEPS[:steps], step)
    return set(twins.bodies.reasons - before)


def test_forwards_and_backwards_in_any_order(twins: BodyTwins) -> None:
    def twice(model: Any, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch) * loss_of(model, STEPS[1])

    def first_last(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss_of(model, STEPS[2]).backward()
        return loss

    kept: list[torch.Tensor] = []

    def with_kept(model: Any, batch: Batch) -> torch.Tensor:
        first = loss_of(model, STEPS[0])
        first.backward(retain_graph=True)
        loss_of(model, STEPS[1]).backward()
        kept.append(first)
        return first + loss_of(model, batch)

    def evaluated(model: Any, batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        with torch.no_grad():
            kept.append(model(**STEPS[3]).logits)
        return loss

    awaits = {"another forward awaits its backward"}
    assert reasons_of(twins, twice) == reasons_of(twins, first_last) == reasons_of(twins, with_kept, 2) == awaits
    kept.clear()
    assert reasons_of(twins, evaluated) == set()
    assert all(map(torch.equal, kept[::2], kept[1::2]))
    before = twins.replayed
    assert reasons_of(twins) == set()
    assert twins.replayed == before + 3


def test_what_is_saved_elsewhere_and_what_other_code_asks_for(twins: BodyTwins) -> None:
    def offloaded(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, batch)

    def inferred(model: Any, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            model(**batch)
        return loss_of(model, batch)

    assert reasons_of(twins, offloaded) == {TAKEN}
    assert reasons_of(twins, inferred) == {"inference mode is on"}

    def double(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2

    double.__module__ = "trl.hooks"  # other packages' hooks may look at rows, and no row is packed then
    hooks = [model.model.layers[0].mlp.register_forward_hook(double) for model in twins.both]
    assert reasons_of(twins) == {"other code has hooked a module of it"}
    for hook in hooks:
        hook.remove()
    assert reasons_of(twins) == set()


def test_another_thread_and_a_copy(twins: BodyTwins) -> None:
    def elsewhere(model: Any, batch: Batch) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(loss_of(model, batch)))
        thread.start()
        thread.join()
        return found[0]

    (reason,) = reasons_of(twins, elsewhere)
    assert reason == "another thread called it first, and graphs are replayed on one thread"
    copied = copy.deepcopy(twins.model)
    before = twins.replayed
    loss_of(copied, STEPS[0]).backward()
    assert twins.replayed == before
    assert "it is a copy of a body that the kernels were applied to" in twins.reasons


def test_states_that_change(twins: BodyTwins) -> None:
    for at in range(2):
        for model in twins.both:
            model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(80, 48) / (50 + at))
        assert reasons_of(twins) == set()
    for model in twins.both:
        model.model.layers[1].self_attn.scaling *= 2
    assert reasons_of(twins) == set()
    for model in twins.both:
        model.model.layers[1].self_attn.scaling *= 2
    assert reasons_of(twins) == {"its modules or parameters change: 4 states of it are captured"}


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-moe", "dropout"])
def test_bodies_that_are_declined(family: str) -> None:
    overrides = {"attention_dropout": 0.1} if family == "dropout" else {}
    twins = BodyTwins(small_model("llama" if family == "dropout" else family, **overrides))
    for batch in STEPS[:3]:
        loss_of(twins.model, batch).backward()
    assert twins.replayed == 0
    (reason,) = twins.reasons
    assert reason.startswith({
        "qwen3.5": "modules with a state go by lengths on the host",
        "qwen3-moe": "it reads numbers of the device on the host (",
        "dropout": "it draws random numbers (",
    }[family])  # fmt: skip
    assert twins.kernels.report().why("capture")


class Strange(nn.Parameter):
    pass


def test_parts_of_a_body_that_are_not_captured() -> None:
    def why(prepare: Callable[[Any], Any]) -> str | None:
        body = small_model("llama").model
        prepare(body.layers[0].mlp.up_proj)
        return body_capture._why_not(body, None)

    def hooked(module: Any) -> None:
        module.weight.register_hook(lambda grad: grad)

    assert why(lambda module: None) is None
    assert why(lambda module: vars(module).update(forward=module.forward)) == "a forward was set on a module of it"
    assert why(lambda module: setattr(module, "weight", Strange(module.weight))) == "a parameter of it is a Strange"
    assert why(hooked) == "a parameter of it has a hook"
    for hook in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_hook):
        assert why(lambda module, hook=hook: hook(module, print)) == "other code has hooked a module of it"


def test_calls_that_are_not_replayed(twins: BodyTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(module: Any, args: Any, out: Any) -> None:
        pass

    def collected(model: Any, batch: Batch) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(body_capture, "collected_outputs", lambda: {"router_logits": []})
            return loss_of(model, batch)

    assert reasons_of(twins, collected) == {"outputs of its layers are asked for"}
    counted.__module__ = "torch.counts"  # of other packages' hooks no row is packed
    handle = register_module_forward_hook(counted)
    try:
        assert reasons_of(twins) == {"other code has hooked every module"}
    finally:
        handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
        assert reasons_of(twins) == {"other code is capturing a graph"}
    body = twins.model.model
    forward = BodyForward(type(body), body, "", True, None, carries=False, mixes=True)
    assert twins.bodies._why_not_now(BodyBatch.full({**STEPS[0]}), forward) == (
        "modules that mix tokens get the padded batch, whose shape is another one at each step"
    )
    for model in twins.both:
        monkeypatch.setattr(type(model.model), "get_input_embeddings", lambda _: None)
    assert reasons_of(twins) == {"it does not say which of its modules embeds ids"}


def test_parameters_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_capture, "FSDPModule", nn.Linear)
    model = small_model("llama")
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in STEPS:
        module = model.model.layers[0].mlp.up_proj
        module.weight = nn.Parameter(module.weight.detach().clone())
        loss_of(model, batch).backward()
    assert dict(kernels.settings.bodies.reasons) == {"its parameters move (FSDP2)": len(STEPS) - 1}


def test_bodies_that_embed_in_their_own_way() -> None:
    module, ids, embedded = nn.Sequential(nn.Embedding(9, 4)), torch.tensor([[1, 2]]), torch.ones(1, 2, 4)
    several = "its code embeds other ids than it is given, or does so several times"
    none = "its code does not embed the ids that it is given"
    ways: list[tuple[str, Callable[[], Any]]] = [
        (several, lambda: module(ids + 1)), (several, lambda: (module(ids), module(ids))), (none, lambda: None),
    ]  # fmt: skip
    for reason, way in ways:
        with pytest.raises(Refused, match=reason), stand_ins.without_part(module, module[0], ids, embedded):
            way()
    with stand_ins.without_part(module, module[0], ids, embedded):
        assert module(ids) is embedded
        assert module[0].weight.shape == (9, 4)
    assert torch.equal(module(ids), nn.functional.embedding(ids, module[0].weight))


def test_restore_frees_what_was_captured() -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    kernels = apply_npu_kernels(model, backend="torch", capture="on")
    for batch in STEPS[:3]:
        values(model, batch, loss_of)
    held = [weakref.ref(each) for each in kernels.settings.bodies._graphs()]
    assert len(held) == 1
    assert "body graphs: 67% of 3 calls replayed" in str(kernels.report())
    kernels.restore()
    gc.collect()
    assert held[0]() is None
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(vars(m).keys() == vars(p).keys() for m, p in zip(model.modules(), plain.modules(), strict=True))
    assert_same(values(model, STEPS[0], loss_of), values(plain, STEPS[0], loss_of))
    assert "body graphs: 67% of 3 calls replayed; 2 graphs for 1 buckets" in str(kernels.report())
    kernels.refresh()
    for batch in STEPS[:3]:
        values(model, batch, loss_of)
    assert kernels.settings.bodies.replayed == 2


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def assert_caught(
    twins: BodyTwins, batches: tuple[Batch, ...] = STEPS, step: Callable[[Any, Batch], torch.Tensor] = loss_of
) -> None:
    with pytest.raises(AssertionError):
        twins.steps(batches, step)


def test_fault_the_filling_is_outside_of_all_segments(twins: BodyTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(room: Room, lengths: list[int], *_: Any) -> np.ndarray:
        return bounded_segments._ends(lengths, room.segments)

    monkeypatch.setattr(body_capture, "table_of", without)
    found = values(twins.model, STEPS[0], loss_of)
    assert all(value is None or value.isnan().any() for name, value in found.items() if "norm" not in name)


def test_fault_a_stale_table_of_segments(twins: BodyTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = body_capture.table_of(twins.rooms[-1], [30, 30], [30, 30], None)
    monkeypatch.setattr(body_capture, "table_of", lambda *_: stale)
    assert_caught(twins)


def test_fault_a_bound_that_is_too_small(twins: BodyTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off: the table of such a row cannot be made."""
    monkeypatch.setattr(body_capture._Way, "with_room", lambda way, _: way.captured)
    with pytest.raises(ValueError, match=r"segments must be at most 16; the row needs 21"):
        loss_of(twins.model, rows(*[3] * 20))


def test_fault_one_set_of_gradients_is_read_after_the_next_replay(
    twins: BodyTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_copies_count(twins, STEPS, monkeypatch)


def test_fault_graphs_of_another_dtype(twins: BodyTwins) -> None:
    class Loose(dict[Any, Any]):
        """Keys without the dtype of autocast."""

        def __contains__(self, key: Any) -> bool:
            return super().__contains__((*key[:5], *key[6:]))

        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__((*key[:5], *key[6:]))

    assert all(key[5] is None for key in twins.bodies._ways)
    twins.bodies._ways = Loose({(*key[:5], *key[6:]): way for key, way in twins.bodies._ways.items()})
    assert_caught(twins, step=in_autocast)


def test_fault_the_keys_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = llama_bodies()
    twins.steps((*SHARED, *SHARED))
    before: list[np.ndarray] = []
    original = body_capture.table_of

    def table_of(room: Room, *given: Any) -> np.ndarray:
        table = original(room, *given)
        keys = slice(2 * room.segments + 2, 2 * room.segments + 2 + room.keys)
        before.append(table[keys].copy())
        if len(before) > 1:
            table[keys] = before[-2]
        return table

    monkeypatch.setattr(body_capture, "table_of", table_of)
    assert_caught(twins, SHARED)


def test_fault_a_second_forward_overwrites_the_first(twins: BodyTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_capture.Mode, "awaits", lambda _: None)
    with pytest.raises(RuntimeError, match="ran forward again before the backward"):
        twins.steps(STEPS[:1], lambda model, batch: loss_of(model, batch) * loss_of(model, STEPS[1]))
