"""An attack on captured bodies: any sequence of forwards, backwards of kept and of older graphs,
evaluations, other threads, and numbers that are set in between has the bits of the body's own code."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npu_trainer_kernels.capture import Reading, Watched, captured_function
from npu_trainer_kernels.patching.bodies import body_capture
from tests.robustness.body_attack import Pair

# Two numbers, and a layer that is trained or not, are the four states that a body may have graphs of.
ACTION = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("kept")),
    st.tuples(st.just("forward")),
    st.tuples(st.just("backward"), st.booleans(), st.booleans()),
    st.tuples(st.just("evaluate"), st.booleans()),
    st.tuples(st.just("set"), st.sampled_from([2.0, 1.0])),
    st.tuples(st.just("freeze"), st.just(1), st.booleans()),
)


def play(actions: list[tuple[Any, ...]], repeated: bool) -> Pair:
    pair = Pair(repeated=repeated)
    for _ in range(3):
        pair.forward()
        pair.backward(0)
    for name, *given_ in actions:
        if name == "step":
            pair.forward()
            pair.backward(len(pair.losses) - 1)
        elif name == "kept":
            pair.forward()
            pair.backward(len(pair.losses) - 1, keep=True)
            pair.forward()
            pair.backward(len(pair.losses) - 1)
            pair.backward(len(pair.losses) - 1)
        elif name == "forward":
            pair.forward()
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


def test_any_sequence_has_the_bits_of_the_bodys_own_code() -> None:
    attack(12)


def _turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(body_capture.Mode, "awaits", lambda _: None)
    patch.setattr(Reading, "over", False)


def _kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_function, "_keeps_graph", lambda: False)
    patch.setattr(Reading, "over", False)


def _numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watched, "holds", lambda _: True)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a turn that nobody waits for": _turns,
    "a graph that is kept is taken for a finished one": _kept,
    "numbers that nobody compares": _numbers,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ExceptionGroup)):
        attack(40)
