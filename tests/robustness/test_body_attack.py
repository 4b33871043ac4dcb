"""An attack on captured layers: any sequence of forwards in any order, backwards of kept and of older graphs,
evaluations, other threads, and numbers that are set in between has the bits of the layers' own code."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npu_trainer_kernels.capture import Reading, Watched
from npu_trainer_kernels.capture import pieces as pieces_module
from npu_trainer_kernels.patching.layers import layer_capture
from tests.robustness.layer_attack import Pair

ORDER = st.sampled_from([[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2], [0, 1, 1, 2]])
ACTION = st.one_of(
    st.tuples(st.just("step"), ORDER),
    st.tuples(st.just("kept"), ORDER),
    st.tuples(st.just("forward"), ORDER),
    st.tuples(st.just("backward"), st.booleans(), st.booleans()),
    st.tuples(st.just("evaluate"), st.booleans()),
    st.tuples(st.just("set"), st.sampled_from([2.0, 1.0])),
    st.tuples(st.just("freeze"), st.integers(0, 2), st.booleans()),
)


def play(actions: list[tuple[Any, ...]], repeated: bool) -> Pair:
    pair = Pair(repeated=repeated)
    for _ in range(3):
        pair.forward()
        pair.backward(0)
    for name, *given_ in actions:
        if name == "step":
            pair.forward(given_[0])
            pair.backward(len(pair.losses) - 1)
        elif name == "kept":
            pair.forward()
            pair.backward(len(pair.losses) - 1, keep=True)
            pair.forward(given_[0])
            pair.backward(len(pair.losses) - 1)
            pair.backward(len(pair.losses) - 1)
        elif name == "forward":
            pair.forward(given_[0])
        elif name == "backward":
            if pair.losses:
                pair.backward(0 if given_[0] else len(pair.losses) - 1, keep=given_[1])
        else:
            getattr(pair, name)(*given_)
        pair.check()
    return pair


def attack(examples: int) -> None:
    quick = settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                     suppress_health_check=list(HealthCheck))  # fmt: skip

    @quick
    @given(st.lists(ACTION, min_size=6, max_size=10), st.booleans())
    def run(actions: list[tuple[Any, ...]], repeated: bool) -> None:
        play(actions, repeated)

    run()


def test_any_sequence_has_the_bits_of_the_layers_own_code() -> None:
    attack(12)


def _order(patch: pytest.MonkeyPatch) -> None:
    class Anywhere(layer_capture.Turn):
        last = property(lambda _: -1, lambda *_: None)  # type: ignore[assignment]

    patch.setattr(layer_capture, "Turn", Anywhere)


def _turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_capture.Mode, "awaits", lambda _: None)
    patch.setattr(Reading, "over", False)
    patch.setattr(pieces_module, "increment_version", lambda _: None)


def _kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pieces_module, "_keeps_graph", lambda: False)
    patch.setattr(layer_capture.Mode, "is_kept", lambda *_: False)  # what a graph saves is kept, too
    patch.setattr(Reading, "over", False)
    patch.setattr(pieces_module, "increment_version", lambda _: None)


def _numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watched, "holds", lambda _: True)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an order that nobody checks": _order,
    "a turn that nobody waits for": _turns,
    "a graph that is kept is taken for a finished one": _kept,
    "numbers that nobody compares": _numbers,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ExceptionGroup)):
        attack(40)
