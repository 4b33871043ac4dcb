"""When few rows of a rollout go on, a step of fewer rows makes the rest; tokens are the same in every kind of model."""

import pytest
import torch

from npu_trainer_kernels import apply_npu_kernels, completions, serve_rollouts
from npu_trainer_kernels.rollouts import decode, turns
from npu_trainer_kernels.rollouts import rollout_cache as cache_module
from npu_trainer_kernels.rollouts import rollout_engine as engine
from tests.families.captured import _OPS, _own_experts
from tests.families.tiny import tiny_model
from tests.models import small_model

from .common import alone, greedy, prompts, sampled, served

LENGTHS = (5, 3, 9, 6, 4, 8, 7, 2)


@pytest.fixture
def steps(monkeypatch):
    """The numbers of rows of the steps of fewer rows, which are taken as early as there are half as many."""
    found = []
    original = engine.Engine.step_of_fewer

    def fewer_rows(self, rows, going_on, made, left):
        fewer = 1 << max(going_on - 1, 0).bit_length()
        return fewer if 2 * fewer <= rows else None

    def step_of_fewer(self, model, rollout, rows):
        found.append(rows)
        return original(self, model, rollout, rows)

    monkeypatch.setattr(turns, "_LOOKS", 2)
    monkeypatch.setattr(engine.Engine, "fewer_rows", fewer_rows)
    monkeypatch.setattr(engine.Engine, "step_of_fewer", step_of_fewer)
    return found


def _model(family):
    """A small model, or the tiny one of a family that has layers with states or experts."""
    if family in ("llama", "qwen3", "gemma2"):
        return small_model(family).eval()
    model = tiny_model("causal", family).eval()
    _own_experts(model)
    return model


def _served(family, keep=False):
    model = _model(family)
    rollouts = serve_rollouts(apply_npu_kernels(model, ops=_OPS, backend="torch"), keep=keep)
    return model, rollouts


def _ends(model, tokens=24, **options):
    """Ids that end the rows at different tokens, each of which some row makes there."""
    rows = alone(model, prompts(LENGTHS), greedy(tokens, **options))
    return [row[at] for row, at in zip(rows[:6], (2, 4, 5, 8, 10, 14), strict=True)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "qwen3_5_text", "falcon_h1"])
def test_tokens_of_each_prompt_alone(steps, family, keep):
    plain = _model(family)
    config = greedy(24, eos_token_id=_ends(plain))
    expected = alone(plain, prompts(LENGTHS), config)
    assert len({len(row) for row in expected}) > 2, expected
    model, rollouts = _served(family, keep)
    for _ in range(2):
        assert completions(model, prompts(LENGTHS), config)[0] == expected, str(rollouts)
    assert len(steps) > 1, steps


def test_a_row_draws_the_same_tokens(steps):
    config = sampled(40, eos_token_id=list(range(3, 40)))
    found = []
    for fewer in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not fewer:
                patch.setattr(engine.Engine, "fewer_rows", lambda *args: None)
            torch.manual_seed(5)
            model, _, _ = served("llama")
            found.append(completions(model, prompts(LENGTHS), config, logprobs=True))
    assert steps, found
    (rows, logprobs), (expected, theirs) = found
    assert rows == expected
    for each, other in zip(logprobs, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(each), torch.tensor(other))


def test_rows_that_waited(steps):
    model, _, _ = served("llama", most_rows=4)
    plain = _model("llama")
    config = greedy(24, eos_token_id=_ends(plain))
    assert completions(model, prompts(LENGTHS), config)[0] == alone(plain, prompts(LENGTHS), config)
    assert steps


def test_penalties_and_last_ids_move_with_their_rows(steps):
    options = {"repetition_penalty": 1.3, "bad_words_ids": [[5, 6], [7]]}
    model, plain = _served("llama")[0], _model("llama")
    ends = _ends(plain, **options)
    config = greedy(24, eos_token_id=ends, **options)
    assert completions(model, prompts(LENGTHS), config)[0] == alone(plain, prompts(LENGTHS), config)
    assert steps


# ---------------------------------------------------------------------------------------------------------------------
# When
# ---------------------------------------------------------------------------------------------------------------------


def test_when_a_step_of_fewer_rows_pays():
    """By the seconds of a token, and of a capture."""
    of = served("llama")[2].engine
    assert of.fewer_rows(64, 3, 500, 500) is None  # nothing is known of the pace
    of.paced(64, 0.004)
    # Half of what the share of rows says: 0.004 * (1 - 8 / 64) / 2 seconds of a token; twice a capture takes 0.6.
    assert of.fewer_rows(64, 3, 342, 500) is None
    assert of.fewer_rows(64, 3, 343, 500) == 8
    assert of.fewer_rows(64, 3, 500, 342) is None
    assert of.fewer_rows(64, 9, 500, 500) == 16
    assert of.fewer_rows(64, 33, 500, 500) is None
    assert of.fewer_rows(15, 1, 500, 500) is None
    of.paced(8, 0.0039)
    assert of.fewer_rows(64, 3, 5900, 5900) is None
    assert of.fewer_rows(64, 3, 6100, 6100) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------


def _reason(family="llama"):
    model, _ = _served(family)
    with pytest.raises(ValueError, match="captured steps") as error:
        completions(model, prompts(LENGTHS), greedy(24, eos_token_id=_ends(_model(family))))
    return str(error.value)


def _within(monkeypatch, owner, name, kind, method, fault):
    """While a method of one class runs, another class's method is exchanged."""
    original = getattr(owner, name)

    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, method, fault)
            return original(*args)

    monkeypatch.setattr(owner, name, call)


DIFFERS = "its logits differ from those of its own forward"


def test_a_cache_that_is_not_moved_is_seen(steps, monkeypatch):
    own = cache_module.RolloutCache.tensors
    _within(monkeypatch, turns.Turns, "_go_on_with", cache_module.RolloutCache, "tensors", lambda self: [])
    _within(monkeypatch, engine.Engine, "step_of_fewer", cache_module.RolloutCache, "tensors", own)
    assert DIFFERS in _reason()


def test_a_state_that_the_capture_has_changed_is_seen(steps, monkeypatch):
    """A captured step is computed while it is looked at, which changes the states of all rows."""
    own = cache_module.RolloutCache.states
    _within(monkeypatch, engine.Engine, "step_of_fewer", cache_module.RolloutCache, "states", lambda self: [])
    _within(monkeypatch, engine.Engine, "_captured", cache_module.RolloutCache, "states", own)
    assert DIFFERS in _reason("qwen3_5_text")


def test_the_length_of_a_row_that_is_not_moved_is_seen(steps, monkeypatch):
    own = decode.Rows.of_rows
    _within(
        monkeypatch, turns.Turns, "_go_on_with", decode.Rows, "of_rows",
        lambda self: [t for t in own(self) if t is not self.written],
    )  # fmt: skip
    _within(monkeypatch, engine.Engine, "step_of_fewer", decode.Rows, "of_rows", own)
    assert DIFFERS in _reason()


def test_noise_that_is_not_the_rows_own_is_seen(steps, monkeypatch):
    replay = decode.Step.replay
    monkeypatch.setattr(
        decode.Step, "replay",
        lambda self, noise=None, order=None: replay(self, noise, None if order is None else torch.arange(len(order))),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        test_a_row_draws_the_same_tokens(steps)
