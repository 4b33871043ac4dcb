"""Order and threads of captured bodies: what comes gets its own code or an error, never another's memory."""

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels.capture import Refused, recording_now
from npu_trainer_kernels.patching.bodies import body_capture
from npu_trainer_kernels.patching.bodies.stand_ins import OnThisThread
from npu_trainer_kernels.patching.body import batch as batch_module
from tests.patching.captured import assert_same
from tests.patching.tiny_body import Body, Replayed, ids_of, own_output
from tests.robustness.body_attack import Layer, Pair, grads

AWAITS = "another forward awaits its backward"
ELSEWHERE = "another thread called it first, and graphs are replayed on one thread"
STATES = "its modules or parameters change: 4 states of it are captured"
TAKEN = "hooks around it take the tensors that it saves for backward (a checkpoint, or offloading)"

ORDERS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "exchanged": lambda _, step: [1, 0, 2] if step > 3 else [0, 1, 2],
    "reversed": lambda _, step: [2, 1, 0],
    "at random": lambda draw, _: draw.sample(range(3), 3),
    "skipped": lambda draw, _: sorted(draw.sample(range(3), draw.randint(1, 3))),
    "twice": lambda *_: [0, 1, 1, 2],
}


@pytest.mark.parametrize("repeated", [False, True], ids=["kept", "repeated"])
@pytest.mark.parametrize("name", ORDERS)
def test_layers_in_any_order(name: str, repeated: bool) -> None:
    """The order of layers is a state of the body."""
    pair, draw = Pair(repeated=repeated), random.Random(1)
    for step in range(8):
        pair.forward(ORDERS[name](draw, step))
        pair.backward(0)
        pair.check()
    assert pair.made.replayed > 0
    assert set(pair.made.reasons) <= {STATES}


def test_two_bodies_with_a_layer_in_common() -> None:
    def made() -> list[Body]:
        torch.manual_seed(0)
        common = Layer()
        return [Body([common, Layer()]), Body([Layer(), common])]

    bodies, plain = made(), made()
    captured = [Replayed(each) for each in bodies]
    for apart in (False, True):
        for _ in range(3):
            ids, found = ids_of(), []
            for both, runs in ((bodies, captured), (plain, [functools.partial(own_output, each) for each in plain])):
                for each in both:
                    each.zero_grad()
                losses = [run(ids).square().sum() for run in runs]
                for loss in losses if apart else [sum(losses)]:
                    loss.backward()
                found.append([grads(each) for each in both])
            for one, other in zip(*found, strict=True):
                assert_same(one, other)
    assert [each.replayed for each in captured] == [5, 5]


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
        if where == "backward":
            # A hook of the result: its gradient does not arrive at the graph.
            pair.outputs[-1][0].register_hook(fails)
            with pytest.raises(ArithmeticError):
                pair.losses[0][0].backward()
        pair.losses.clear()
        pair.outputs.clear()
        pair.reset()
    assert pair.made.replayed == 5, pair.made.reasons


def test_a_gradient_that_a_layer_computes_itself() -> None:
    class Own(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = hidden.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.linear(inner).square().sum(), inner)
            return super().forward(hidden) + grad

    pair = Pair(kind=Own)
    for _ in range(4):
        pair.forward()
        pair.backward(0)
    assert pair.made.replayed == 3, pair.made.reasons


@pytest.mark.parametrize("repeated", [False, True])
def test_two_forwards_the_first_of_which_goes_back_first(repeated: bool) -> None:
    pair = Pair(repeated=repeated)
    for _ in range(4):
        pair.forward()
        pair.forward()
        pair.backward(0)
        pair.backward(0)
    assert pair.made.replayed > 0
    assert set(pair.made.reasons) == {AWAITS}


def test_a_body_that_a_checkpoint_repeats() -> None:
    pair = Pair()
    for reentrant in (True, False):
        for _ in range(3):
            pair.forward(through=lambda run, ids, again=reentrant: checkpoint(run, ids, use_reentrant=again))
            pair.losses.clear() if reentrant else pair.backward(0)  # no input of the body has a gradient
    assert set(pair.made.reasons) == {TAKEN}


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
    """Another thread trains a layer, and lists its parameters, while the body is captured."""
    pair = Pair(layers=1, kind=Meanwhile)
    layer = pair.body.layers[0]
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
    for _ in range(3):
        meanwhile.forward()
        meanwhile.backward(0)


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
    ids = ids_of()
    expected = own_output(pair.plain, ids).detach()

    def evaluate() -> None:
        try:
            while not stop.is_set():
                with torch.set_grad_enabled(graded):
                    seen.append(torch.equal(pair.made(ids).detach(), expected))
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
    assert pair.made.replayed == 30
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
    assert pair.made.replayed == 2 + 3 + 3
    assert not pair.made.reasons


def test_a_backward_on_another_thread() -> None:
    pair = Pair()
    for _ in range(4):
        pair.forward()
        on_a_thread(lambda: pair.backward(0))
    assert pair.made.replayed == 3


def test_two_threads_with_a_body_each() -> None:
    pairs = [Pair(), Pair()]

    def train(pair: Pair) -> None:
        for _ in range(6):
            pair.forward()
            pair.backward(0)

    threads = [threading.Thread(target=on_a_thread, args=(functools.partial(train, pair),)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [pair.made.replayed for pair in pairs] == [5, 5]


def test_fault_every_thread_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_capture.Owner, "is_here", lambda _: True)
    # Either thread may meet what the other one is about to do; if none does, the report lacks the reason.
    with pytest.raises((AssertionError, RuntimeError, AttributeError, LookupError, TypeError, Refused)):
        test_a_thread_that_evaluates_beside_captured_training(True)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def test_fault_a_result_is_the_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are copies, so any alias of them may be kept."""

    def train() -> None:
        pair = Pair()
        for _ in range(4):
            pair.forward()
            pair.backward(0)
            pair.check()

    train()
    monkeypatch.setattr(batch_module, "take", lambda values, _: values)
    with pytest.raises((AssertionError, RuntimeError)):
        train()
