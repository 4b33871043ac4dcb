"""Functions as captured pieces with eager code between them: forward and backward have the same bits as without."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from npu_trainer_kernels.capture import Pieces, Refused, capture, recorder_for, recording_now
from npu_trainer_kernels.capture import pieces as pieces_module
from tests.capture.graphs import Graphs

Seam = Callable[..., torch.Tensor]
Function = Callable[..., Any]


def attend(tensors: Sequence[torch.Tensor], now: Any) -> torch.Tensor:
    """Depends on every token before, and on what it is given now."""
    assert not recording_now()
    q, k = tensors
    return (q.cumsum(0) * k).tanh() * now


def layer(seam: Seam, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    hidden = x @ weights[0]
    x = x + seam((hidden, hidden * weights[1]))
    return x + (x @ weights[2]).relu()


def two_seams(seam: Seam, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return layer(seam, layer(seam, x, weights), weights)


def no_seam(seam: Seam, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return (x @ weights[0] * weights[1]).tanh() @ weights[2]


FUNCTIONS = {"one": layer, "two": two_seams, "none": no_seam}


@dataclass
class Captured:
    """A captured function of one input, with the same function run eagerly."""

    function: Function
    weights: list[nn.Parameter]
    pieces: Pieces
    places: list[torch.Tensor]

    def replayed(self, x: torch.Tensor, now: Any, turn: Any = None, tokens: int | None = None) -> torch.Tensor:
        with torch.no_grad():
            self.places[0].copy_(x)
        return self.pieces.run([x], now, turn, tokens)[0]

    def eager(self, x: torch.Tensor, now: Any, tokens: int | None = None) -> torch.Tensor:
        def seam(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            out = attend([t[:tokens] for t in tensors], now)
            return out if tokens is None else torch.cat([out, out.new_zeros(len(x) - tokens, out.shape[1])])

        return self.function(seam, x, self.weights)

    def gradients(self, run: Callable[..., torch.Tensor], *args: Any) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        x = args[0].detach().requires_grad_(self.places[0].requires_grad)
        for weight in self.weights:
            weight.grad = None
        out = run(x, *args[1:])
        if out.requires_grad:
            out.backward(torch.randn(out.shape, generator=generator))
        return [out.detach().clone(), x.grad, *(w.grad for w in self.weights)]

    def assert_same(self, *args: Any) -> None:
        found = self.gradients(self.replayed, *args[:2], None, *args[2:])
        expected = self.gradients(self.eager, *args)
        self.assert_equal(found, expected)

    @staticmethod
    def assert_equal(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None), i
            assert one is None or torch.equal(one, other), i


def captured(
    function: Function = layer, trained: Sequence[bool] = (True, True, True), differs: bool = True,
    dims: list[int] | None = None, recorder: Any = None, keeps: bool = True,
) -> Captured:  # fmt: skip
    weights = [nn.Parameter(torch.randn(*shape) / 2, requires_grad=train)
               for shape, train in zip(((4, 4), (4,), (4, 4)), trained, strict=True)]  # fmt: skip
    leaves = [nn.Parameter(w.detach(), w.requires_grad) for w in weights]
    x = torch.randn(6, 4).requires_grad_(differs)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert recording_now()

        def seam(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return pieces_module.seam(attend, tensors, 2.0, dims, None if dims is None else 0)

        return (function(seam, x, leaves),)

    recorder = recorder or recorder_for(torch.device("cpu"))
    pieces = capture(run, [x], dict(zip(leaves, weights, strict=True)), (), recorder, keeps=keeps)
    assert not recording_now()
    return Captured(function, weights, pieces, [x])


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_replays_have_the_bits_of_eager_code(function: Function) -> None:
    made = captured(function)
    for now in (2.0, 3.0, 0.5):
        made.assert_same(torch.randn(6, 4), now)
    assert made.pieces.graphs == 2 * len(made.pieces.pieces)


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("trained", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_frozen_inputs_and_parameters(trained: tuple[int, ...], differs: bool) -> None:
    made = captured(trained=[bool(t) for t in trained], differs=differs)
    for now in (2.0, 3.0):
        made.assert_same(torch.randn(6, 4), now)
    backwards = sum(piece.backward is not None for piece in made.pieces.pieces)
    first = differs or any(trained[:2])
    assert backwards == first + (first or trained[2])


@pytest.mark.parametrize("function", [layer, two_seams])
def test_seams_are_given_live_tokens_alone(function: Function) -> None:
    made = captured(function, dims=[0, 0])
    for tokens in (6, 3, 1, 5, 2, 6):
        made.assert_same(torch.randn(6, 4), 2.0, tokens)


def test_without_gradients() -> None:
    with torch.no_grad():
        made = captured()
        assert made.pieces.graphs == 2
        for now in (2.0, 3.0):
            x = torch.randn(6, 4)
            found = made.replayed(x, now)
            assert torch.equal(found, made.eager(x, now))
            assert not found.requires_grad


def test_values_of_parameters_are_those_of_the_replay() -> None:
    made = captured()
    for _ in range(2):
        with torch.no_grad():
            for weight in made.weights:
                weight.normal_()
        made.assert_same(torch.randn(6, 4), 2.0)


def test_functions_with_one_recorder_share_no_result() -> None:
    recorder = recorder_for(torch.device("cpu"))
    one, two = captured(recorder=recorder), captured(recorder=recorder)
    x, y = torch.randn(2, 6, 4)
    first, second = one.replayed(x, 2.0), two.replayed(y, 3.0)
    assert torch.equal(first, one.eager(x, 2.0))
    (first.square().sum() + second.square().sum()).backward()
    found = [w.grad for w in (*one.weights, *two.weights)]
    for weight in (*one.weights, *two.weights):
        weight.grad = None
    (one.eager(x, 2.0).square().sum() + two.eager(y, 3.0).square().sum()).backward()
    Captured.assert_equal(found, [w.grad for w in (*one.weights, *two.weights)])


def test_gradients_are_nobody_elses_memory() -> None:
    made = captured()
    x = torch.randn(6, 4, requires_grad=True)
    wanted = [x, *made.weights]
    first = torch.autograd.grad(made.replayed(x, 2.0).sum(), wanted)
    kept = [g.clone() for g in first]
    torch.autograd.grad(made.replayed(x * 2, 3.0).sum(), wanted)
    Captured.assert_equal(first, kept)


def test_gradients_of_the_last_piece_arrive_before_those_of_the_first() -> None:
    made = captured()
    arrived: list[int] = []
    for i, weight in enumerate(made.weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: arrived.append(i))
    made.replayed(torch.randn(6, 4), 2.0).sum().backward()
    assert arrived[0] == 2
    assert sorted(arrived) == [0, 1, 2]


def test_two_backwards_of_one_forward() -> None:
    made = captured()
    x = torch.randn(6, 4)
    out = made.replayed(x, 2.0)
    first = torch.autograd.grad(out.sum(), made.weights, retain_graph=True)
    second = torch.autograd.grad(out.sum(), made.weights)
    Captured.assert_equal(first, second)
    Captured.assert_equal(first, torch.autograd.grad(made.eager(x, 2.0).sum(), made.weights))


def test_a_backward_after_its_turn_raises() -> None:
    class Turn:
        over = False

    made, turn = captured(), Turn()
    out = made.replayed(torch.randn(6, 4), 2.0, turn)
    turn.over = True
    with pytest.raises(RuntimeError, match="ran forward again before the backward of an earlier forward"):
        out.sum().backward()


def test_what_autograd_has_saved_of_a_result_shows_that_it_was_overwritten() -> None:
    made = captured()
    loss = made.replayed(torch.randn(6, 4), 2.0).square().sum()
    made.replayed(torch.randn(6, 4), 2.0)
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("wanted", ["input", "weight", "last weight"])
def test_second_derivatives_raise(wanted: str) -> None:
    made = captured()
    x = torch.randn(6, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(made.replayed(x, 2.0).sum(), x, create_graph=True)
    leaf = {"input": x, "weight": made.weights[0], "last weight": made.weights[2]}[wanted]
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.square().sum(), leaf)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_replays(reentrant: bool) -> None:
    made = captured(keeps=False)

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return checkpoint(made.replayed, x, *args, use_reentrant=reentrant).clone()

    if reentrant:
        with torch.no_grad():
            made.replayed(torch.randn(6, 4), 1.0)  # as its first forward
    for now in (2.0, 3.0):
        x = torch.randn(6, 4)
        made.assert_equal(made.gradients(run, x, now), made.gradients(made.eager, x, now))


def test_unused_parameters_and_results_without_gradients() -> None:
    unused = nn.Parameter(torch.ones(4))
    weight = nn.Parameter(torch.randn(4, 4))
    leaves = {nn.Parameter(p.detach()): p for p in (unused, weight)}
    x = torch.randn(6, 4, requires_grad=True)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ list(leaves)[1]
        return hidden, hidden.argmax(-1), hidden.detach() * 2

    pieces = capture(run, [x], leaves, (), recorder_for(torch.device("cpu")))
    new = torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        x.copy_(new)
    hidden, best, double = pieces.run([new], None)
    assert torch.equal(best, (new @ weight).argmax(-1))
    assert torch.equal(double, (new @ weight) * 2)
    assert (hidden.requires_grad, best.requires_grad, double.requires_grad) == (True, False, False)
    hidden.sum().backward()
    assert unused.grad is None
    # A piece is given its gradients in storages of their own, which a sum's expanded one is not.
    (expected,) = torch.autograd.grad(new @ weight, weight, torch.ones(6, 4))
    assert torch.equal(weight.grad, expected)


def test_a_function_that_is_refused_leaves_nothing_behind() -> None:
    recorder = recorder_for(torch.device("cpu"))
    cached = torch.is_autocast_cache_enabled()
    with pytest.raises(Refused, match="it reads numbers of the device on the host"):
        captured(lambda seam, x, weights: x * x.sum().item() + weights[0][0], recorder=recorder)
    with pytest.raises(Refused, match="it writes to a parameter or a buffer"):
        captured(lambda seam, x, weights: x + weights[0].detach().add_(1)[0], recorder=recorder)
    with pytest.raises(ZeroDivisionError):
        captured(lambda seam, x, weights: x * (1 / 0), recorder=recorder)
    assert not recording_now()
    assert torch.is_autocast_cache_enabled() == cached
    made = captured(recorder=recorder)
    made.assert_same(torch.randn(6, 4), 3.0)


def test_a_seam_that_fails_in_a_replay() -> None:
    made = captured()
    with pytest.raises(TypeError):
        made.replayed(torch.randn(6, 4), "no number")
    made.assert_same(torch.randn(6, 4), 3.0)


@pytest.mark.parametrize("keeps", [False, True], ids=["repeated", "kept"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_capturing_leaves_no_tensor_to_pythons_collector(function: Function, keeps: bool) -> None:
    """Otherwise each layer's graphs take memory of their own, although graphs share a pool."""
    gc.collect()
    gc.disable()
    try:
        recorder = Graphs()
        made = captured(function, recorder=recorder, keeps=keeps)
        assert len(recorder.seen) > 20
        if keeps:
            assert not all(each.expired() for each in recorder.seen)  # what backward reads
            made.pieces.release()
        inputs = {t.untyped_storage()._cdata for t in (*made.places, *made.weights)}
        assert all(each.expired() or each.cdata in inputs for each in recorder.seen)
    finally:
        gc.enable()


def test_dropped_pieces_free_what_they_hold() -> None:
    made = captured()
    made.assert_same(torch.randn(6, 4), 3.0)
    held = [weakref.ref(each) for each in (made.pieces, *made.pieces.pieces, *made.pieces.pieces[0].outputs)]
    del made
    gc.collect()
    assert all(each() is None for each in held)


def test_fault_an_entry_that_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = captured()
    made.assert_same(torch.randn(6, 4), 3.0)
    monkeypatch.setattr(pieces_module, "_fill", lambda *_: None)
    with pytest.raises(AssertionError):
        made.assert_same(torch.randn(6, 4), 2.0)


def test_fault_the_gradient_of_a_residual_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the result, which goes around attention, is no part of attention's."""
    made = captured()
    first = made.pieces.pieces[0]
    assert first.leaf_grads
    original = pieces_module._copies

    def lost(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        at = first.leaves.index(0) if tensors is first.leaf_grads else None
        return [torch.zeros_like(t) if i == at else t for i, t in enumerate(original(tensors))]

    monkeypatch.setattr(pieces_module, "_copies", lost)
    with pytest.raises(AssertionError):
        made.assert_same(torch.randn(6, 4), 2.0)


def test_fault_a_tail_that_keeps_the_tokens_of_the_replay_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
        if value is None:
            buffer.zero_()
        else:
            buffer.narrow(dim or 0, 0, value.shape[dim or 0]).copy_(value)

    made = captured(dims=[0, 0])
    made.assert_same(torch.randn(6, 4), 2.0, 6)
    monkeypatch.setattr(pieces_module, "_fill", fill)
    made.assert_same(torch.randn(6, 4), 2.0, 6)
    with pytest.raises(AssertionError):
        made.assert_same(torch.randn(6, 4), 2.0, 3)


def test_fault_gradients_are_handed_out_as_static_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "_copies", lambda tensors: tensors)
    with pytest.raises(AssertionError):
        test_gradients_are_nobody_elses_memory()


def test_gradients_of_a_leaf_that_is_a_result_itself_are_counted():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert pieces_module._uses([x, x * y, x + 1]) == {x: 3, y: 1}


def test_the_gradient_of_an_input_behind_one_without_gradient() -> None:
    x, factor = torch.randn(3, requires_grad=True), torch.tensor(2)
    places = [torch.tensor(0), torch.zeros(3, requires_grad=True)]
    pieces = capture(lambda n, x: (x * n,), places, {}, [], recorder_for(torch.device("cpu")))
    with torch.no_grad():
        places[0].copy_(factor)
        places[1].copy_(x)
    pieces.run([factor, x], None)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
