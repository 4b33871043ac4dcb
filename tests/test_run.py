"""What `npu-kernels run` does in a process: which Trainers get a callback, which do not, what goes wrong quietly."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, trainer
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.run import RunCallback, put_into
from npu_trainer_kernels.verify import Variant, record
from tests.models import small_model
from tests.test_callback import losses, make_trainer, patched
from tests.training.conftest import recomputed  # noqa: F401
from tests.training.test_grpo import difference, train


@pytest.fixture
def built(monkeypatch):
    """As in a process of `npu-kernels run`; the Trainers that were built."""
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", list(trainer.DEFAULT_CALLBACKS))
    monkeypatch.setattr(Trainer, "__init__", Trainer.__init__)
    for name in ("OPS", "BACKEND", "WARM_UP", "REPORT"):
        monkeypatch.delenv(f"NPU_KERNELS_{name}", raising=False)
    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    found = []
    put_into(trainer, lambda: found.append(1))
    return found


def ours(made) -> list[NpuKernelsCallback]:
    return [each for each in made.callback_handler.callbacks if isinstance(each, NpuKernelsCallback)]


class Look(TrainerCallback):
    """Whether the model was patched at each step, and with what."""

    def __init__(self):
        self.ops = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.ops.append(patched(model))


def test_a_plain_trainer_gets_it(tmp_path, capsys, built):
    plain = losses(trained(make_trainer(tmp_path)))
    line = [text for text in capsys.readouterr().out.splitlines() if text.startswith("npu-kernels run: ")]
    (text,) = line
    assert text == (
        "npu-kernels run: rms_norm, add_rms_norm, varlen_attention, linear_cross_entropy put into LlamaForCausalLM; "
        "NPU_KERNELS_RUN=0 leaves it out"
    )
    assert built == [1]
    assert len(plain) == 3


def trained(made):
    made.train()
    return made


def test_same_losses_and_restored_after(tmp_path, monkeypatch):
    plain = losses(trained(make_trainer(tmp_path)))
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, RunCallback])
    look = Look()
    made = trained(make_trainer(tmp_path, callbacks=[look]))
    assert look.ops == [True] * 3
    assert losses(made) == pytest.approx(plain, rel=1e-5)
    assert not patched(made.model)


def test_a_run_to_compare_with_that_has_the_kernels_is_refused(tmp_path, built):
    with pytest.raises(ValueError, match="under npu-kernels run, set NPU_KERNELS_RUN=0"):
        record(make_trainer(tmp_path), torch.zeros(1, 4, dtype=torch.long), Variant())


def test_every_trainer_has_one_of_its_own(tmp_path, built):
    first, second = make_trainer(tmp_path), make_trainer(tmp_path)
    assert [type(each) for each in ours(first) + ours(second)] == [RunCallback] * 2
    assert ours(first) != ours(second)
    assert built == [1, 1]


def test_a_list_that_a_framework_has_put_in_place_gets_it_too(tmp_path, monkeypatch, built):
    """As ms-swift does when it is imported."""
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [trainer.DefaultFlowCallback])
    (callback,) = ours(make_trainer(tmp_path))
    assert isinstance(callback, RunCallback)


@pytest.mark.parametrize("way", ["given", "attached", "added"])
def test_a_callback_of_the_script_is_the_only_one_that_acts(tmp_path, capsys, built, way):
    given, look = NpuKernelsCallback(ops=["rms_norm"]), Look()
    made = make_trainer(tmp_path, callbacks=[look, *([given] if way == "given" else [])])
    if way != "given":
        made.add_callback(given)
    if way == "attached":
        given.attach(made)
    made.train()
    (run,) = (each for each in ours(made) if each is not given)
    assert {each.op for each in given.report().replaced} == {"rms_norm"}
    assert look.ops == [True] * 3
    assert not patched(made.model)
    assert "log" not in vars(made)
    out = capsys.readouterr().out
    assert out.count("NPU kernels on") == 1
    assert "npu-kernels run" not in out
    assert run.report().replaced == [] or way != "given"


def test_a_flag_that_is_off_is_no_callback(tmp_path, built):
    callbacks = NpuKernelsArguments().callbacks()
    assert [type(each) for each in ours(make_trainer(tmp_path, callbacks=callbacks))] == [RunCallback]


@pytest.mark.parametrize("cls", [TrlGRPOTrainer, GRPOTrainer])
def test_grpo_is_planned_once_with_and_without_our_subclass(tmp_path, capsys, recomputed, built, cls):  # noqa: F811
    torch.manual_seed(0)
    made = train(cls, tmp_path)
    assert recomputed == []
    out = capsys.readouterr().out
    assert out.count("NPU kernels on") == 1
    # Of both heads the one that TRL calls.
    says = [line.partition(" put into ")[0] for line in out.splitlines() if line.startswith("npu-kernels run: ")]
    assert [("linear_logprob" in line, "linear_cross_entropy" in line) for line in says] == [(True, False)] * len(says)
    assert len(says) == (cls is TrlGRPOTrainer)
    assert "_compute_loss" not in vars(made)
    torch.manual_seed(0)
    plain = train(TrlGRPOTrainer, tmp_path, extra={"callbacks": [Nothing()]})
    assert difference(made.model, plain.model) < 1e-5


class Nothing(NpuKernelsCallback):
    """For a plain run: one of the script's own, which does nothing."""

    def on_init_end(self, *args, **kwargs):
        pass

    def on_train_begin(self, *args, **kwargs):
        pass


def test_options_come_from_the_environment(tmp_path, monkeypatch, capsys, built):
    monkeypatch.setenv("NPU_KERNELS_OPS", "rms_norm,swiglu")
    monkeypatch.setenv("NPU_KERNELS_REPORT", "full")
    made = trained(make_trainer(tmp_path))
    assert {each.op for each in ours(made)[0].report().replaced} == {"rms_norm", "swiglu"}
    assert "why these backends" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OPS", "norm", "npu_kernels_ops must be a list of rms_norm"),
        ("STRICT", "x", "NPU_KERNELS_STRICT must be one of"),
    ],
)
def test_options_that_do_not_exist_are_refused_when_the_trainer_is_imported(monkeypatch, variable, value, message):
    monkeypatch.setenv(f"NPU_KERNELS_{variable}", value)
    with pytest.raises(ValueError, match=message):
        put_into(trainer, lambda: None)


def test_a_model_that_cannot_be_patched_trains_without(tmp_path, capsys, built):
    """The script has patched it, with other options."""
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        made = trained(make_trainer(tmp_path, model))
        assert kernels.active
    error = capsys.readouterr().err
    assert (
        error.count("npu-kernels run: this Trainer trains without the kernels (ValueError: this model is patched") == 1
    )
    assert len(losses(made)) == 3


def test_strict_stops(tmp_path, monkeypatch, built):
    monkeypatch.setenv("NPU_KERNELS_STRICT", "1")
    model = small_model("llama")
    with apply_npu_kernels(model, ops=["rms_norm"]), pytest.raises(ValueError, match="patched already with"):
        make_trainer(tmp_path, model)


def test_an_error_of_the_training_stays_the_users(tmp_path, built):
    class Broken(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise RuntimeError("planted")

    made = make_trainer(tmp_path, callbacks=[Broken()])
    with pytest.raises(RuntimeError, match="planted"):
        made.train()
    assert not patched(made.model)
