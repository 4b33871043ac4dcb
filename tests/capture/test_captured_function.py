"""Functions as one graph forward and one backward: both have the same bits as without."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels.capture import (
    CapturedFunction,
    Refused,
    capture,
    captured_function,
    recorder_for,
    recording_now,
)
from tests.capture.graphs import Graphs

Function = Callable[..., Any]


def layer(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Every weight has a gradient, one of them two, and so has the input."""
    hidden = x @ weights[0]
    x = x + (hidden.cumsum(0) * hidden * weights[1]).tanh()
    return x + (x @ weights[2]).relu()


@dataclass
class Captured:
    """A captured function of one input, with the same function run eagerly."""

    function: Function
    weights: list[nn.Parameter]
    graphs: CapturedFunction

    @property
    def place(self) -> torch.Tensor:
        return self.graphs.inputs[0]

    def replayed(self, x: torch.Tensor, reading: Any = None) -> torch.Tensor:
        with torch.no_grad():
            self.place.copy_(x)
        return self.graphs.run([x], reading)[0]

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weights)

    def gradients(self, run: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        x = x.detach().requires_grad_(self.place.requires_grad)
        for weight in self.weights:
            weight.grad = None
        out = run(x)
        if out.requires_grad:
            out.backward(torch.randn(out.shape, generator=generator))
        return [out.detach().clone(), x.grad, *(w.grad for w in self.weights)]

    def assert_same(self, x: torch.Tensor) -> None:
        self.assert_equal(self.gradients(self.replayed, x), self.gradients(self.eager, x))

    @staticmethod
    def assert_equal(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None), i
            assert one is None or torch.equal(one, other), i


def captured(
    function: Function = layer, trained: Sequence[bool] = (True, True, True), differs: bool = True,
    recorder: Any = None,
) -> Captured:  # fmt: skip
    weights = [nn.Parameter(torch.randn(*shape) / 2, requires_grad=train)
               for shape, train in zip(((4, 4), (4,), (4, 4)), trained, strict=True)]  # fmt: skip
    leaves = [nn.Parameter(w.detach(), w.requires_grad) for w in weights]

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert recording_now()
        return (function(x, leaves),)

    recorder = recorder or recorder_for(torch.device("cpu"))
    x = torch.randn(6, 4).requires_grad_(differs)
    graphs = capture(run, [x], dict(zip(leaves, weights, strict=True)), (), recorder)
    assert not recording_now()
    return Captured(function, weights, graphs)


def test_replays_have_the_bits_of_eager_code() -> None:
    made = captured()
    for _ in range(3):
        made.assert_same(torch.randn(6, 4))
    assert made.graphs.graphs == 2


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("trained", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_frozen_inputs_and_parameters(trained: tuple[int, ...], differs: bool) -> None:
    made = captured(trained=[bool(t) for t in trained], differs=differs)
    for _ in range(2):
        made.assert_same(torch.randn(6, 4))
    assert made.graphs.graphs == 1 + (differs or any(trained))


def test_without_gradients() -> None:
    with torch.no_grad():
        made = captured()
        assert made.graphs.graphs == 1
        for _ in range(2):
            x = torch.randn(6, 4)
            found = made.replayed(x)
            assert torch.equal(found, made.eager(x))
            assert not found.requires_grad


def test_values_of_parameters_are_those_of_the_replay() -> None:
    made = captured()
    for _ in range(2):
        with torch.no_grad():
            for weight in made.weights:
                weight.normal_()
        made.assert_same(torch.randn(6, 4))


def test_functions_with_one_recorder_share_no_result() -> None:
    recorder = recorder_for(torch.device("cpu"))
    one, two = captured(recorder=recorder), captured(recorder=recorder)
    x, y = torch.randn(2, 6, 4)
    first, second = one.replayed(x), two.replayed(y)
    assert torch.equal(first, one.eager(x))
    (first.square().sum() + second.square().sum()).backward()
    found = [w.grad for w in (*one.weights, *two.weights)]
    for weight in (*one.weights, *two.weights):
        weight.grad = None
    (one.eager(x).square().sum() + two.eager(y).square().sum()).backward()
    Captured.assert_equal(found, [w.grad for w in (*one.weights, *two.weights)])


def test_gradients_are_nobody_elses_memory() -> None:
    made = captured()
    x = torch.randn(6, 4, requires_grad=True)
    wanted = [x, *made.weights]
    first = torch.autograd.grad(made.replayed(x).sum(), wanted)
    kept = [g.clone() for g in first]
    torch.autograd.grad(made.replayed(x * 2).sum(), wanted)
    Captured.assert_equal(first, kept)


def test_two_backwards_of_one_forward() -> None:
    made = captured()
    x = torch.randn(6, 4)
    out = made.replayed(x)
    first = torch.autograd.grad(out.sum(), made.weights, retain_graph=True)
    second = torch.autograd.grad(out.sum(), made.weights)
    Captured.assert_equal(first, second)
    Captured.assert_equal(first, torch.autograd.grad(made.eager(x).sum(), made.weights))


def test_a_backward_after_its_turn_raises() -> None:
    class Turn:
        over = False

    made, turn = captured(), Turn()
    out = made.replayed(torch.randn(6, 4), turn)
    turn.over = True
    with pytest.raises(RuntimeError, match="ran forward again before the backward of an earlier forward"):
        out.sum().backward()


def test_what_autograd_has_saved_of_a_result_shows_that_it_was_overwritten() -> None:
    made = captured()
    loss = made.replayed(torch.randn(6, 4)).square().sum()
    made.replayed(torch.randn(6, 4))
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("wanted", ["input", "weight", "last weight"])
def test_second_derivatives_raise(wanted: str) -> None:
    made = captured()
    x = torch.randn(6, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(made.replayed(x).sum(), x, create_graph=True)
    leaf = {"input": x, "weight": made.weights[0], "last weight": made.weights[2]}[wanted]
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.square().sum(), leaf)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_replays(reentrant: bool) -> None:
    made = captured()

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(made.replayed, x, use_reentrant=reentrant).clone()

    for _ in range(2):
        x = torch.randn(6, 4)
        made.assert_equal(made.gradients(run, x), made.gradients(made.eager, x))


def test_unused_parameters_and_results_without_gradients() -> None:
    unused = nn.Parameter(torch.ones(4))
    weight = nn.Parameter(torch.randn(4, 4))
    leaves = {nn.Parameter(p.detach()): p for p in (unused, weight)}
    x = torch.randn(6, 4, requires_grad=True)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ list(leaves)[1]
        return hidden, hidden.argmax(-1), hidden.detach() * 2

    graphs = capture(run, [x], leaves, (), recorder_for(torch.device("cpu")))
    new = torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        x.copy_(new)
    hidden, best, double = graphs.run([new])
    assert torch.equal(best, (new @ weight).argmax(-1))
    assert torch.equal(double, (new @ weight) * 2)
    assert (hidden.requires_grad, best.requires_grad, double.requires_grad) == (True, False, False)
    hidden.sum().backward()
    assert unused.grad is None
    # A graph is given its gradients in storages of their own, which a sum's expanded one is not.
    (expected,) = torch.autograd.grad(new @ weight, weight, torch.ones(6, 4))
    assert torch.equal(weight.grad, expected)


def test_a_function_that_is_refused_leaves_nothing_behind() -> None:
    recorder = recorder_for(torch.device("cpu"))
    cached = torch.is_autocast_cache_enabled()
    with pytest.raises(Refused, match="it reads numbers of the device on the host"):
        captured(lambda x, weights: x * x.sum().item() + weights[0][0], recorder=recorder)
    with pytest.raises(Refused, match="it writes to a parameter or a buffer"):
        captured(lambda x, weights: x + weights[0].detach().add_(1)[0], recorder=recorder)
    with pytest.raises(ZeroDivisionError):
        captured(lambda x, weights: x * (1 / 0), recorder=recorder)
    assert not recording_now()
    assert torch.is_autocast_cache_enabled() == cached
    made = captured(recorder=recorder)
    made.assert_same(torch.randn(6, 4))


def test_capturing_leaves_no_tensor_to_pythons_collector() -> None:
    """Otherwise each function's graphs take memory of their own, although graphs share a pool."""
    gc.collect()
    gc.disable()
    try:
        recorder = Graphs()
        made = captured(recorder=recorder)
        assert len(recorder.seen) > 20
        assert not all(each.expired() for each in recorder.seen)  # what backward reads
        made.graphs.release()
        inputs = {t.untyped_storage()._cdata for t in (made.place, *made.weights)}
        assert all(each.expired() or each.cdata in inputs for each in recorder.seen)
    finally:
        gc.enable()


def test_a_dropped_function_frees_what_it_holds() -> None:
    made = captured()
    made.assert_same(torch.randn(6, 4))
    held = [weakref.ref(each) for each in (made.graphs, made.graphs.backward, *made.graphs.outputs)]
    del made
    gc.collect()
    assert all(each() is None for each in held)


def test_fault_the_gradient_of_the_result_is_not_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = captured()

    def compare(factor: float) -> None:
        x = torch.randn(6, 4)
        given = torch.full((6, 4), factor)
        found, expected = (torch.autograd.grad(each(x), made.weights, given) for each in (made.replayed, made.eager))
        made.assert_equal(found, expected)

    compare(1.0)
    monkeypatch.setattr(captured_function, "_fill", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(2.0)


def test_fault_gradients_are_handed_out_as_static_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_function, "_copies", lambda tensors: tensors)
    with pytest.raises(AssertionError):
        test_gradients_are_nobody_elses_memory()


def test_the_gradient_of_an_input_behind_one_without_gradient() -> None:
    x, factor = torch.randn(3, requires_grad=True), torch.tensor(2)
    places = [torch.tensor(0), torch.zeros(3, requires_grad=True)]
    graphs = capture(lambda n, x: (x * n,), places, {}, [], recorder_for(torch.device("cpu")))
    with torch.no_grad():
        places[0].copy_(factor)
        places[1].copy_(x)
    graphs.run([factor, x])[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
