"""What users do around `generate` (`members`): captured steps do the same as `generate`, or leave it to `generate` and
say why. Each check that a kind depends on is taken out once, and the members must then be seen to differ."""

import contextlib
import gc
import sys
import time

import pytest
import torch
from torch.utils._pytree import tree_flatten

from npu_trainer_kernels import apply_npu_kernels, serve_rollouts
from npu_trainer_kernels.capture import Watched
from npu_trainer_kernels.rollouts import rollout_engine, serve
from npu_trainer_kernels.rollouts.generators import Draws
from npu_trainer_kernels.rollouts.turns import Turns
from npu_trainer_kernels.rollouts.weights import Weights
from tests.closeness import assert_as_close, rounded_if_needed
from tests.families.tiny import tiny_model
from tests.models import FAMILIES, small_model

from .members import KINDS, SIZE

CASES = [(kind, name) for kind, members in KINDS.items() for name in members]


@pytest.fixture(autouse=True)
def _threads_take_turns():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def _plain(member):
    if member.family not in FAMILIES:
        return tiny_model("causal", member.family).eval()
    return small_model(member.family, **SIZE, **(member.options or {})).eval()


def _outcome(member):
    """Returns what a user sees with captured steps, and the engine."""
    model = _plain(member)
    rollouts = serve_rollouts(apply_npu_kernels(model, backend="torch"), keep=member.keep)
    return member.run(model), rollouts.engine


def _differs(found, expected):
    """Whether anything but the rounding of floats differs."""
    (a, shape), (b, other) = tree_flatten(found), tree_flatten(expected)
    if shape != other:
        return True
    return not all(map(_same, a, b))


def _same(x, y):
    if not isinstance(x, torch.Tensor):
        return x == y
    return x.shape == y.shape if x.is_floating_point() and x.numel() > 1 else torch.equal(x, y)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_is_as_without_captured_steps(kind, name):
    member = KINDS[kind][name]
    expected = member.run(_plain(member))
    found, engine = _outcome(member)
    assert not _differs(found, expected), (found, expected, str(engine))
    assert engine.rollouts == member.rollouts or member.rollouts is None, str(engine)
    if member.reason is None:
        assert not engine.reasons, str(engine)
    else:
        assert all(member.reason in reason for reason in engine.reasons), str(engine)
        assert engine.reasons, str(engine)


_collections = 0


def _counts_collections(phase, info):
    global _collections
    _collections += 1


def test_a_collection_of_garbage_is_no_code_of_the_model():
    """Libraries have functions in `gc.callbacks`, which Python calls at any place of any code."""
    threshold = gc.get_threshold()
    gc.callbacks.append(_counts_collections)
    gc.set_threshold(1)
    try:
        _, engine = _outcome(KINDS["python"]["a global"])
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(_counts_collections)
    assert _collections
    assert (engine.rollouts, engine.reasons) == (3, {}), str(engine)


@pytest.mark.parametrize(
    "name", [name for name in KINDS["outputs"] if name.startswith("a cache") and "tokens" not in name]
)
def test_the_numbers_of_a_cache(name):
    member = KINDS["outputs"][name]
    (*_, found), _ = _outcome(member)
    *_, expected = member.run(_plain(member))
    *_, exact = member.run(_plain(member).double())
    for at, each in enumerate(found):
        moved = rounded_if_needed(lambda at=at: member.run(_plain(member))[-1][at])
        assert_as_close(each, expected[at], exact[at], "keys and values", moved)


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults
# ---------------------------------------------------------------------------------------------------------------------


def _unseen_code(patch):
    patch.setattr(serve, "other_code", lambda model, shared: None)
    patch.setattr(rollout_engine, "trace_of_all", lambda model: None)


def _unwatched_code(patch):
    patch.setattr(rollout_engine, "trace_of_all", lambda model: None)
    patch.setattr(Watched, "holds", lambda self: True)


def _gaps_left_out(patch):
    own = serve._prompts

    def prompts(ids, given):
        mask = given.get("attention_mask")
        if mask is None:
            return own(ids, given)
        return [tuple(row[keep].tolist()) for row, keep in zip(ids, mask != 0, strict=True)]

    patch.setattr(serve, "_prompts", prompts)


def _noise_ahead(patch):
    patch.setattr(Draws, "go_back_to", lambda self, count: None)


def _empty_caches(patch):
    patch.setattr(serve, "output_of", lambda model, sequences, given, config: sequences)


def _together(patch):
    own = Turns._replay

    def replay(self):
        time.sleep(0.005)  # the other thread comes in between
        return own(self)

    patch.setattr(rollout_engine.Engine, "alone", lambda self: contextlib.nullcontext())
    patch.setattr(Turns, "_replay", replay)


def _shown_to_all(patch):
    @contextlib.contextmanager
    def on(self):
        for module, name, _, copied in self._copies:
            module._parameters[name] = copied
        time.sleep(0.05)  # the other thread comes in between
        try:
            yield
        finally:
            for module, name, p, _ in self._copies:
                module._parameters[name] = p

    patch.setattr(Weights, "on", on)


PLANTED = {
    _unseen_code: [("hooks", "forward"), ("hooks", "pre"), ("hooks", "always called"), ("hooks", "every module"),
                   ("hooks", "between rollouts"), ("hooks", "a function that appends"),
                   ("hooks", "a mode of functions"), ("hooks", "prepares each token")],
    _unwatched_code: [("python", "a global"), ("python", "a class"), ("python", "a global that a function reads")],
    _gaps_left_out: [("gaps", "a window")],
    _noise_ahead: [("outputs", "random state, three rollouts"), ("outputs", "random state, one is declined")],
    _empty_caches: [("outputs", "a cache that is handed in")],
    _together: [("threads", "two generate")],
    _shown_to_all: [("threads", "one trains")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "kind", "name"), [(plant, *each) for plant, members in PLANTED.items() for each in members]
)
def test_a_planted_fault_is_seen(plant, kind, name, monkeypatch):
    member = KINDS[kind][name]
    expected = member.run(_plain(member))
    plant(monkeypatch)
    try:
        found, engine = _outcome(member)
    except (RuntimeError, AssertionError, LookupError, AttributeError, TypeError):
        return
    # What goes wrong in a rollout may be seen there, and is then left to `generate`.
    assert _differs(found, expected) or (kind == "threads" and engine.rollouts != member.rollouts)


@pytest.mark.parametrize("name", ["gradient checkpointing", "a module with dropout"])
def test_a_refusal_for_good_is_seen(name, monkeypatch):
    own = rollout_engine.Engine.why_refused

    def why_refused(self, model, moves):
        return own(self, model, moves) if self.reasons.total() == 0 else next(iter(self.reasons))

    monkeypatch.setattr(rollout_engine.Engine, "why_refused", why_refused)
    member = KINDS["states"][name]
    assert _outcome(member)[1].rollouts != member.rollouts
