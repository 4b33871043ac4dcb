"""Order, owner and thread of captured layers: what comes gets its own code or an error, never another's memory."""

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.capture import Outlets, recording_now
from npu_trainer_kernels.patching.layers import layer_capture
from npu_trainer_kernels.patching.layers.stand_ins import OnThisThread
from tests.models import small_model
from tests.patching.captured import FULL, Twins, assert_same
from tests.patching.padded import of_transformers
from tests.robustness.layer_attack import Body, Layer, Pair, grads

ELSEWHERE = "another thread called its layers first, and graphs are replayed on one thread"
ANOTHER_ORDER = "layers come in another order than they were captured in"
AWAITS = "another forward awaits its backward"
KEPT = "other code keeps a result of a layer beyond the forward"

ORDERS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "exchanged": lambda _, step: [1, 0, 2] if step > 3 else [0, 1, 2],
    "reversed": lambda _, step: [2, 1, 0],
    "at random": lambda draw, _: draw.sample(range(3), 3),
    "skipped": lambda draw, _: sorted(draw.sample(range(3), draw.randint(1, 3))),
    "twice": lambda *_: [0, 1, 1, 2],
    "in a circle": lambda *_: [0, 1, 2, 0, 1, 2],
}


@pytest.mark.parametrize("repeated", [False, True], ids=["kept", "repeated"])
@pytest.mark.parametrize("name", ORDERS)
def test_layers_in_any_order(name: str, repeated: bool) -> None:
    pair, draw = Pair(repeated=repeated), random.Random(1)
    for step in range(10):
        order = ORDERS[name](draw, step)
        pair.forward(order)
        pair.backward(0)
    assert pair.made.replayed > 0
    assert set(pair.made.reasons) <= {AWAITS, ANOTHER_ORDER, KEPT, "it gets other arguments than the layers before it"}


def test_an_order_that_stays_is_captured_anew() -> None:
    pair = Pair()
    for order in 4 * ([0, 1, 2],) + 6 * ([2, 0, 1],):
        before = pair.made.replayed
        pair.forward(order)
        pair.backward(0)
    assert pair.made.replayed == before + 3


def test_fault_an_order_that_nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anywhere(layer_capture.Turn):
        last = property(lambda _: -1, lambda *_: None)  # type: ignore[assignment]

    monkeypatch.setattr(layer_capture, "Turn", Anywhere)
    with pytest.raises((AssertionError, RuntimeError)):
        test_layers_in_any_order("exchanged", False)


def test_layers_of_two_models() -> None:
    def made() -> list[Any]:
        one, other = small_model("llama"), small_model("llama", seed=3)
        other.model.layers[0] = one.model.layers[0]
        return [one, other]

    models, eager = made(), made()
    for each in models:
        apply_npu_kernels(each, backend="torch", capture="on")
    for each in eager:
        apply_npu_kernels(each, backend="torch", capture="on").settings.layers._ready = lambda *_: ""
    for apart in (False, True):
        for batch in FULL:
            found = []
            for both in (models, eager):
                for each in both:
                    each.zero_grad()
                losses = [each(**batch).loss for each in both]
                for loss in losses if apart else [sum(losses)]:
                    loss.backward()
                found.append([grads(each) for each in both])
            for one, other in zip(*found, strict=True):
                assert_same(one, other)


def test_a_graph_that_is_kept_is_differentiated_twice_and_after_others() -> None:
    pair = Pair()
    for _ in range(3):
        pair.forward()
        pair.backward(0)
    pair.forward()
    pair.backward(0, keep=True)
    pair.backward(0, keep=True)
    pair.forward()
    pair.backward(1)
    pair.backward(0)
    assert set(pair.made.reasons) == {AWAITS}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error(where: str) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError

    pair = Pair()
    for step in range(6):
        pair.forward()
        if step % 2:
            pair.backward(0)
            continue
        hook = pair.model.layers[1].linear.weight.register_hook(fails) if where == "backward" else None
        if hook is not None:
            with pytest.raises(ArithmeticError):
                pair.losses[0][0].backward()
            hook.remove()
        pair.losses.clear()
        pair.reset()
    assert pair.made.replayed > 0


def test_a_gradient_that_a_layer_computes_itself() -> None:
    class Own(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = hidden.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.linear(inner).square().sum(), inner)
            return super().forward(hidden) + grad

    pair = Pair(kind=Own)
    for _ in range(5):
        pair.forward()
        pair.backward(0)


def test_repetitions_in_another_order() -> None:
    """Two checkpointed forwards, the first of which goes back first."""
    twins = Twins(small_model("llama"), of_transformers(False))

    def step(model: Any, batch: Any) -> torch.Tensor:
        first, second = model(**FULL[1]).loss, model(**batch).loss
        first.backward()
        return second

    twins.steps(FULL, step)
    twins.steps(FULL, lambda model, batch: model(**FULL[2]).loss * model(**batch).loss)
    assert twins.replayed > 0


def test_groups_of_layers_that_a_checkpoint_repeats() -> None:
    pair = Pair()
    for reentrant in (True, False):
        for _ in range(4):
            pair.forward(through=functools.partial(checkpoint, use_reentrant=reentrant))
            pair.backward(0)


# ---------------------------------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------------------------------


def on_a_thread(work: Callable[[], None]) -> None:
    """Runs a function on another thread, and raises its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  an assertion that fails on a thread fails nothing
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Meanwhile(Layer):
    """Calls a function while it is being captured."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if recording_now() and HERE:
            HERE[0]()
        return super().forward(hidden)


HERE: list[Callable[[], None]] = []


@pytest.fixture
def meanwhile() -> Any:
    """Another thread trains a layer, and lists its parameters, while the layer is captured."""
    pair = Pair(layers=1, kind=Meanwhile)
    layer = pair.model.layers[0]
    known = set(map(id, layer.parameters()))
    seen: list[int] = []

    def other() -> None:
        assert set(map(id, layer.parameters())) == known
        parameters = dict(layer.named_parameters())
        out = layer(torch.ones(2, 4))
        found = torch.autograd.grad(out.sum(), list(parameters.values()), allow_unused=True)
        assert all(each is not None for each in found)
        seen.append(1)

    HERE[:] = [lambda: on_a_thread(other)]
    yield pair
    HERE.clear()
    assert seen


def test_another_thread_sees_the_parameters_themselves_during_a_capture(meanwhile: Pair) -> None:
    for _ in range(4):
        meanwhile.forward()
        meanwhile.backward(0)
    assert ELSEWHERE in meanwhile.made.reasons


def test_fault_a_capture_exchanges_parameters_for_every_thread(
    meanwhile: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnThisThread, "_seen", lambda parameters: parameters._others)
    original = HERE[0]
    failed: list[str] = []

    def caught() -> None:
        try:
            original()
        except AssertionError:
            failed.append("seen")
            monkeypatch.undo()
            original()

    HERE[:] = [caught]
    for _ in range(3):
        meanwhile.forward()
        meanwhile.backward(0)
    assert failed


@pytest.mark.parametrize("graded", [False, True])
def test_a_thread_that_evaluates_beside_captured_training(graded: bool) -> None:
    pair, stop, seen = Pair(), threading.Event(), []
    errors: list[BaseException] = []
    hidden = torch.randn(2, 4)
    expected = pair.plain(hidden).detach()

    def evaluate() -> None:
        try:
            while not stop.is_set():
                with torch.set_grad_enabled(graded):
                    seen.append(torch.equal(pair.model(hidden).detach(), expected))
        except BaseException as error:  # noqa: BLE001  see above
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    pair.forward()
    pair.backward(0)
    thread.start()
    try:
        for _ in range(30):
            pair.forward()
            pair.backward(0)
    finally:
        stop.set()
        thread.join()
    assert not errors, errors
    assert seen
    assert all(seen)
    assert pair.made.replayed == 30 * 3
    assert ELSEWHERE in pair.made.reasons


def test_a_thread_whose_predecessor_is_gone_is_served() -> None:
    pair = Pair()

    def train() -> None:
        for _ in range(3):
            pair.forward()
            pair.backward(0)

    for _ in range(2):
        on_a_thread(train)
    train()
    assert pair.made.replayed == (2 + 3 + 3) * 3
    assert not pair.made.reasons


def test_a_backward_on_another_thread() -> None:
    pair = Pair()
    for _ in range(5):
        pair.forward()
        on_a_thread(lambda: pair.backward(0))
    assert pair.made.replayed == 4 * 3


def test_fault_every_thread_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Owner, "is_here", lambda _: True)
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        test_a_thread_that_evaluates_beside_captured_training(True)


def test_a_result_that_is_kept_is_nobody_elses_memory() -> None:
    """Also where another layer than the last one of the list has made it."""
    pair = Pair()
    for order in 4 * ([0, 1, 2],) + 4 * ([0, 1],) + 4 * ([2, 1, 0],):
        pair.forward(order)
        pair.backward(0)
        pair.check()
    assert KEPT in pair.made.reasons
    pair.outputs.clear()
    before = pair.made.replayed
    pair.forward([2, 1, 0], keep=False)
    assert pair.made.replayed > before


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": torch.Tensor.detach,
    "data": lambda t: t.data,
    "a view of detach": lambda t: t.detach()[:, 1:],
    "detach of a view": lambda t: t.transpose(0, 1).detach(),
    "numpy": lambda t: t.detach().numpy(),
    "a slice of numpy's": lambda t: t.detach().numpy()[1:],
    "memoryview": lambda t: memoryview(t.detach().numpy()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "storage": lambda t: torch.empty(0).set_(t.detach().untyped_storage(), 0, t.shape),
    "another dtype": lambda t: t.detach().view(torch.int32),
    "parameter": lambda t: torch.nn.Parameter(t.detach()),
    "what another function saves": lambda t: t.detach().requires_grad_().square(),
}


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_of_a_result_that_is_kept(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code between layers keeps the last results of one, without their graph."""
    kept: list[tuple[Any, torch.Tensor]] = []

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            hidden = self.layers[i](hidden)
            if i == 1:
                kept.append((ALIASES[name](hidden), hidden.detach().clone()))
        return hidden

    monkeypatch.setattr(Body, "forward", forward)
    pair = Pair()
    for _ in range(9):
        pair.forward(keep=False)
        pair.backward(0)
        for alias, value in kept:
            expected = ALIASES[name](value)
            if isinstance(alias, torch.Tensor) and alias.grad_fn is not None:
                saved, is_saved = alias.grad_fn._saved_self, expected.grad_fn._saved_self
                alias, expected = saved.detach(), is_saved.detach()
            if isinstance(alias, torch.nn.Parameter):
                alias, expected = alias.detach(), expected.detach()
            assert np.array_equal(alias, expected), "a result was written to"
        del alias, expected, kept[: -2 * most]
    # Copies are kept from then on. Layers are captured anew, and replayed again.
    assert set(pair.made.reasons) == {KEPT, "it gets other arguments than the layers before it"}
    before = pair.made.replayed
    pair.forward(keep=False)
    assert pair.made.replayed == before + 3, pair.made.reasons


def test_an_attention_that_keeps_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be given memory of graphs, and be called once more for a look."""
    kept = []

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        kept.append(key.detach())
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "keeps_keys", attention)
    model = small_model("llama", attn_implementation="keeps_keys")
    layers = apply_npu_kernels(model, backend="torch", capture="on").settings.layers
    for _ in range(4):
        model(**FULL[0]).loss.backward()
    assert len(kept) == 4 * len(model.model.layers)
    (reason,) = layers.reasons
    assert "of its attention a run of its code may leave a trace" in reason
    assert "calls append" in reason


@pytest.mark.parametrize("name", ["detach", "numpy"])
def test_fault_nobody_looks_whether_an_alias_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outlets, "kept", lambda *_: False)
    with pytest.raises(AssertionError, match="a result was written to"):
        test_an_alias_of_a_result_that_is_kept(name, 1, monkeypatch)


def test_fault_nobody_looks_whether_a_result_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_capture.Mode, "is_kept", lambda *_: False)
    with pytest.raises(AssertionError, match="a result was written to"):
        test_a_result_that_is_kept_is_nobody_elses_memory()
