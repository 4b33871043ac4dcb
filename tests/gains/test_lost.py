"""What a run loses by a release is said before training; what its user has chosen is no loss."""

import random
import warnings

import peft
import pytest
import torch
import transformers
import trl.trainer.utils as trl_utils
from transformers.models.llama import modeling_llama

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.evidence.families import Served, read_families, untested
from npu_trainer_kernels.gains import look, look_at_family, losses_of, lost, lost_between, worth_of
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.body import proof
from npu_trainer_kernels.rollouts import serve_rollouts
from tests.models import small_model
from tests.test_callback import make_trainer

NEXT = {"transformers": "5.99.0", "torch": torch.__version__, "trl": None}
OPS = tuple(PATCHES)


@pytest.fixture
def release(monkeypatch):
    """The next release of transformers."""
    monkeypatch.setattr(lost, "installed_versions", lambda: NEXT)


@pytest.fixture
def other_mlp(release, monkeypatch):
    """A release whose MLPs compute something else."""
    own = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * own(self, x))
    monkeypatch.setattr(proof, "_proofs", {})  # which know the forward that was there before


def losses(model=None, ops=OPS, generates=False, rollouts=False, **options):
    model = small_model("llama") if model is None else model  # which the kernels do not keep alive
    with apply_npu_kernels(model, ops=ops, **options) as kernels:
        if rollouts:
            serve_rollouts(kernels)
        return losses_of(kernels, generates=generates)


@pytest.mark.usefixtures("other_mlp")
def test_a_lost_op_is_said_with_reason_worth_and_version():
    found = losses()
    assert list(found.why) == ["swiglu"]
    assert "transformers 5.99.0 costs this model what tested versions serve of its family, llama:" in str(found)
    assert "- swiglu: it does not compute down(act(gate(x)) * up(x))" in str(found)
    assert worth_of("swiglu") in str(found)
    assert f"pip install transformers=={read_families().families['llama'].serving('swiglu')} (" in str(found)


@pytest.mark.usefixtures("other_mlp")
@pytest.mark.parametrize(
    "choice",
    [{"ops": ("rms_norm", "linear_cross_entropy")}, {"ops": None}],
    ids=["other ops", "not on by default on a CPU"],
)
def test_what_the_same_call_would_not_be_given_on_any_version_is_no_loss(choice):
    assert losses(**choice) is None


@pytest.mark.usefixtures("release")
def test_what_a_user_has_configured_is_no_loss():
    """The small model of the default configuration gets it, so the release is not the reason."""
    assert losses(small_model("llama", hidden_act="relu")) is None


@pytest.mark.usefixtures("release")
def test_adapters_are_no_loss():
    settings = peft.LoraConfig(r=2, target_modules=["gate_proj", "embed_tokens"])
    assert losses(peft.get_peft_model(small_model("llama"), settings)) is None


@pytest.mark.usefixtures("release")
def test_code_of_others_is_promised_nothing(monkeypatch):
    class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
        pass

    monkeypatch.setattr(lost, "look_at_family", None)
    assert losses(LlamaForCausalLM(small_model("llama", hidden_act="relu").config)) is None


def test_a_tested_version_makes_no_small_model(monkeypatch):
    monkeypatch.setattr(lost, "installed_versions", lambda: {**NEXT, "transformers": read_families().versions[-1]})
    monkeypatch.setattr(lost, "look_at_family", None)
    assert losses(small_model("llama", hidden_act="relu"), capture="on") is None


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("gain", ["capture", "rollouts"])
def test_what_shows_while_a_model_runs_is_seen_in_the_small_one(gain, monkeypatch):
    assert losses(capture="on", rollouts=True, generates=True) is None
    monkeypatch.setitem(look.RUN, gain, lambda model: {"it is given cache"})
    found = losses(capture="on", rollouts=True, generates=True)
    assert found.why == {gain: ("it is given cache",)}
    assert str(read_families().worth[gain]) in str(found)
    assert losses() is None  # neither was asked for


@pytest.mark.usefixtures("release")
def test_a_family_that_cannot_be_looked_at_is_a_note_and_no_warning(monkeypatch):
    def raises(*args):
        raise AttributeError("no such name")

    monkeypatch.setattr(lost, "look_at_family", raises)
    found = losses(small_model("llama", hidden_act="relu"))
    assert not found.why
    assert "is not known: its small model raises AttributeError: no such name" in str(found)


def test_other_reasons_are_no_loss():
    def of(count, *why):
        return Served({"rope": count} if count else {}, frozenset(), {"rope": frozenset(why)} if why else {})

    assert lost_between(of(2), of(1, "a", "b"), of(1, "a"), {"rope"}) == {"rope": ("a", "b")}
    assert lost_between(of(2), of(1, "a"), of(1, "b"), {"rope"}) == {}
    assert lost_between(of(2), of(0), of(0), {"rope"}) == {"rope": ("nothing of it is recognised",)}
    assert lost_between(of(2), of(0), of(2), {"rope"}) == {}
    assert lost_between(of(2), of(0), of(0), set()) == {}
    assert lost_between(of(1), of(2), of(0), {"rope"}) == {}


@pytest.mark.parametrize(
    ("installed", "new"),
    [({"transformers": "5.99.0"}, ["transformers 5.99.0"]), ({"torch": "2.99.1"}, ["torch 2.99.1"]),
     ({"torch": "2.7.1+cpu"}, []), ({"trl": None}, []), ({"trl": "1.16.9"}, []), ({"trl": "9.0"}, ["trl 9.0"])],
)  # fmt: skip
def test_versions_that_the_file_knows(installed, new):
    assert untested({"transformers": read_families().versions[0], **installed}) == new


def test_a_look_leaves_no_trace():
    level = transformers.utils.logging.get_verbosity()
    names, states = dict(vars(trl_utils)), (random.getstate(), torch.get_rng_state())
    family = read_families().families["llama"]
    look_at_family(family.kind, family.cls)
    assert dict(vars(trl_utils)) == names
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert transformers.utils.logging.get_verbosity() == level


@pytest.mark.usefixtures("other_mlp")
def test_training_begins_with_one_warning(tmp_path):
    callback = NpuKernelsCallback(ops=OPS)
    trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    (said,) = [str(each.message) for each in told if "costs this model" in str(each.message)]
    assert said in callback.report().notes


def test_training_on_a_tested_version_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lost, "installed_versions", lambda: {**NEXT, "transformers": read_families().versions[-1]})
    callback = NpuKernelsCallback(ops=OPS)
    make_trainer(tmp_path, callbacks=[callback], max_steps=1).train()
    assert not [note for note in callback.report().notes if "costs this model" in note]
