"""Why a loss of two models' logits is left to TRL: each reason by the call or the trainer that it is about."""

import inspect
import re
import types
from collections import Counter

import pytest
import torch
from torch import nn

from npu_trainer_kernels.patching.head import head_call
from npu_trainer_kernels.training import distillation, top_tokens


class _Promise:
    """Stands for promised logits: a shape, and whether they were formed."""

    def __init__(
        self, *shape: int, settled: bool = False, reason: str | None = None, sharded: str | None = None
    ) -> None:
        self.shape, self.settled = torch.Size(shape), settled
        self.place = types.SimpleNamespace(call=types.SimpleNamespace(unlike=lambda other: reason, sharded=sharded))


def call(**changes):
    given = {"student_logits": _Promise(2, 3, 7), "teacher_logits": _Promise(2, 3, 7),
             "labels": torch.zeros(2, 3), "reduction": "batchmean"}  # fmt: skip
    return types.SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"logits_are_probs": True}, "probabilities"),
        ({"top_k": 5}, None),
        ({"top_k": 5, "student_logits": _Promise(2, 3, 7, sharded="planted")}, "planted"),
        ({"student_logits": _Promise(2, 3, 7, sharded="planted")}, None),
        ({"labels": None}, "all positions, or a mean over the vocabulary"),
        ({"reduction": "mean"}, "all positions, or a mean over the vocabulary"),
        ({"teacher_logits": torch.zeros(2, 3, 7)}, "logits that exist already"),
        ({"student_logits": _Promise(2, 3, 7, settled=True)}, "logits that exist already"),
        ({"teacher_logits": _Promise(2, 3, 9)}, "logits of two shapes"),
        ({"labels": torch.zeros(2, 4)}, "logits of two shapes"),
        ({"student_logits": _Promise(2, 3, 7, reason="planted")}, "planted"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_call(monkeypatch, changes, reason):
    monkeypatch.setattr(distillation, "PromisedLogits", _Promise)
    assert distillation._no_divergence(call(**changes)) == reason


def test_logits_of_some_tokens_that_exist_already():
    site = types.SimpleNamespace(declined=Counter(), off=None)
    logits = torch.zeros(2, 3, 7)

    def original(student_logits, teacher_logits, labels):
        return student_logits

    assert top_tokens._local(site, None, original, logits, logits, torch.zeros(2, 3)) is logits
    assert site.declined == {"logits that exist already": 1}


class _Sharded(nn.Parameter):
    """Stands for a DTensor."""

    device_mesh = "the ranks"


class _ShardedElsewhere(_Sharded):
    device_mesh = "other ranks"


def head(parameter=None, dtype=None, device="cpu"):
    made = object.__new__(head_call.HeadCall)
    made._parameters = [nn.Parameter(torch.zeros(2)) if parameter is None else parameter]
    made._autocast, made.hidden = (None, dtype), torch.zeros(1, device=device)
    return made


def test_two_heads(monkeypatch):
    unlike = head_call.HeadCall.unlike
    assert head().sharded is None
    assert top_tokens.of_whole_heads(head(), head()) is None
    assert unlike(head(), head()) is None
    with monkeypatch.context() as patch:
        patch.setattr(head_call, "DTensor", _Sharded)
        patch.setattr(head_call, "_released", lambda p: False)
        shared, elsewhere = head(_Sharded(torch.zeros(2))), head(_ShardedElsewhere(torch.zeros(2)))
        for pair in ((shared, head()), (head(), shared), (shared, shared)):
            assert top_tokens.of_whole_heads(*pair) == "a head is sharded"
        assert unlike(shared, shared) is None
        assert unlike(shared, head()) is None
        assert unlike(head(), shared) == "the teacher's head is sharded, and the student's is not"
        assert unlike(shared, elsewhere) == "the two heads are sharded over other ranks"
    other = "the two heads run under another autocast, or on other devices"
    assert unlike(head(dtype=torch.bfloat16), head()) == other
    assert unlike(head(), head(device="meta")) == other
    monkeypatch.setattr(head_call, "is_partitioned", lambda p: True)
    assert unlike(head(), head()) == "the teacher's head is sharded"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, None),
        ({"distillation_objective": "iw_opd"}, "log-probabilities of the sampled tokens, by importance weights"),
        ({"use_teacher_server": True}, None),
        ({"loss_top_k": 3}, None),
    ],
    ids=str,
)
def test_a_trainer(state, reason):
    assert distillation._other_loss(types.SimpleNamespace(**state)) == reason


def test_a_version_of_trl_with_another_function(monkeypatch):
    from trl.experimental.gkd import GKDTrainer

    made = object.__new__(GKDTrainer)
    assert callable(distillation._function_of_logits(made))
    key = ("trl.experimental.gkd.gkd_trainer", "GKDTrainer")
    monkeypatch.setitem(distillation._OF_LOGITS, key, ("student_logits",))
    said = distillation._function_of_logits(made)
    assert "computes the divergence of GKDTrainer in another way: the op linear_divergence is not used" in said


@pytest.mark.parametrize("name", ["cpo", "orpo", "tpo"])
def test_trainers_that_read_whole_logits_anyway(name):
    """docs/distillation.md: a promise of log-probabilities would save nothing where the mean of logits is logged."""
    module = pytest.importorskip(f"trl.experimental.{name}.{name}_trainer", reason="TRL 1.16 has it")
    assert re.search(r"_logits(\[.*\])?(\.detach\(\))?\.mean\(", inspect.getsource(module))


def test_an_asynchronous_trainer():
    """The loss of AsyncDistillationTrainer is left to TRL, and the report says why."""
    module = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    made = object.__new__(module.AsyncDistillationTrainer)
    said = distillation.serve_divergence(made, None, None, None)
    assert said == (
        "the loss of AsyncDistillationTrainer logs the entropy of whole distributions beside a divergence on some "
        "tokens, from chunks of fp32 logits: the op linear_divergence is not used"
    )
