"""An attack on rollouts: what users do around `generate` (`tests.rollouts.members`), one thing after another in any
order with the same model. Whatever a user can see must be as without captured steps, and each planted fault must be
found."""

import random
import sys

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.models import small_model
from tests.rollouts import members, test_members
from tests.rollouts.common import served
from tests.rollouts.members import SIZE, generated

from .test_fuzz import FUZZ

ATTACK = settings(FUZZ, phases=[Phase.generate])


LEFT = ("has hooked", "has gaps", "gradient checkpointing is on")
"""The reasons for which actions are left to `generate`."""


class User:
    """A user of one model: what he has put into it, and what he sees."""

    def __init__(self, model):
        self.model, self.calls = model, 0
        layer = model.model.layers[0]
        layer.mlp = members.Scaled(layer.mlp, lambda module: members.FACTOR)
        members.FACTOR = 1.0
        torch.manual_seed(0)
        random.seed(0)

    def counts(self, module, args, out):
        self.calls += 1

    def does(self, name):
        return ACTIONS[name](self), self.calls, torch.rand(1).item(), random.random()


def _hook(user):
    handle = user.model.lm_head.register_forward_hook(user.counts)
    found = generated(user.model, 2)
    handle.remove()
    return found


def _factor(user):
    found = generated(user.model, 2)
    members.FACTOR *= -2.0
    return found, generated(user.model, 2)


def _checkpointing(user):
    user.model.train()
    user.model.gradient_checkpointing_enable()
    found = generated(user.model, 3)
    user.model.gradient_checkpointing_disable()
    user.model.eval()
    return found


def _cache(user):
    found, length, _ = members._cache_that_is_handed_in(user.model)
    return found, length


ACTIONS = {
    "draw": lambda user: generated(user.model, 4, 20, 3, **members._ENDS),
    "draw one": lambda user: generated(user.model, 5, 20, 1, **members._ENDS),
    "hook": _hook,
    "factor": _factor,
    "greedy": lambda user: generated(user.model, 2),
    "gaps": lambda user: members._with_gaps(user.model),
    "checkpointing": _checkpointing,
    "cache": _cache,
    "threads": lambda user: members._two_generate(user.model),
}


def seen_by_a_user(model, names):
    user = User(model)
    found = [user.does(name) for name in names]
    members.FACTOR = 1.0
    return found


def attack(examples):
    """Returns the number of rollouts that were made."""
    made = []

    @settings(ATTACK, max_examples=examples)
    @given(st.permutations(list(ACTIONS)))
    def run(names):
        expected = seen_by_a_user(small_model("mistral", sliding_window=4, **SIZE).eval(), names)
        model, _, rollouts = served("mistral", keep=True, sliding_window=4, **SIZE)
        found = seen_by_a_user(model, names)
        for name, ours, plain in zip(names, found, expected, strict=True):
            assert ours == plain, (name, names, str(rollouts))
        # A rollout that goes wrong may be seen to, and is then left to `generate`.
        assert all(any(map(reason.__contains__, LEFT)) for reason in rollouts.engine.reasons), str(rollouts)
        made.append(rollouts.engine.rollouts)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        run()
    finally:
        sys.setswitchinterval(before)
    return sum(made)


def test_a_user_sees_what_generate_does():
    assert attack(2) > 20


@pytest.mark.parametrize("plant", test_members.PLANTED)
def test_a_planted_fault_is_found(plant, monkeypatch):
    if plant is test_members._shown_to_all:
        monkeypatch.setitem(ACTIONS, "threads", lambda user: members._one_trains(user.model))
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, LookupError, AttributeError, TypeError, ExceptionGroup)):
        attack(2)
