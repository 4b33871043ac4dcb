"""Options that callbacks change while training goes on: each is read where TRL reads it, so every step stays TRL's."""

import contextlib
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.grpo_trainer  # noqa: F401  (the arranger looks TRL's functions up there)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer
from npu_trainer_kernels.patching.undo import Undo
from npu_trainer_kernels.training import LossFilter, Planner, grpo_groups, grpo_plan
from npu_trainer_kernels.training.grpo_groups import Arranger, compares_rows
from npu_trainer_kernels.training.grpo_plan import loss_options
from tests.training.test_grpo_groups import ONLY, assert_same_step, seen, trained  # noqa: F401
from tests.training.test_top_tokens import Served, both, compare
from tests.training.test_top_tokens import served as report_of

# Each option of a GRPO loss: a first and a second value, and whether rows may be arranged and batches planned with it.
OPTIONS = {
    "loss_type": ("grpo", "bnpo", False, True),
    "importance_sampling_level": ("token", "sequence", True, True),
    "epsilon_low": (0.2, 0.01, True, True),
    "epsilon_high": (0.2, 0.01, True, True),
    "beta": (0.02, 0.3, True, True),
    "temperature": (1.0, 0.7, True, True),
    "top_entropy_quantile": (1.0, 0.3, False, False),
    "off_policy_mask_threshold": (None, 0.5, True, False),
    "_entropy_bonus_enabled": (False, True, False, True),
    "aux_loss_enabled": (False, True, False, True),
    "max_completion_length": (8, 6, True, True),
    "use_vllm": (False, True, True, True),
    "vllm_importance_sampling_correction": (True, False, True, True),
    "delta": (None, 1.5, True, True),
    "use_bias_correction_kl": (False, True, True, True),
    "sapo_temperature_pos": (1.0, 1.3, True, True),
    "sapo_temperature_neg": (1.05, 1.3, True, True),
    "vespo_k_pos": (2.0, 1.0, True, True),
    "vespo_lambda_pos": (3.0, 1.0, True, True),
    "vespo_k_neg": (3.0, 1.0, True, True),
    "vespo_lambda_neg": (2.0, 1.0, True, True),
}
SLICES, WINDOW, SIZE = 4, 2, 4


class Stub(TrlGRPOTrainer):
    """As much of a GRPOTrainer as the arranging of rows asks for; a generation batch is numbered rows, shuffled."""

    def __init__(self, **options):
        values = {name: value for name, (value, *_) in OPTIONS.items()}
        of_arguments = {name: values.pop(name) for name in grpo_plan._OF_ARGUMENTS}
        self.args = SimpleNamespace(gradient_accumulation_steps=WINDOW, steps_per_generation=SLICES, **of_arguments)
        vars(self).update(values)
        self.set(**options)
        self.model = SimpleNamespace(training=True)
        self.state = SimpleNamespace(global_step=0)
        self.num_iterations, self._step, self._buffered_inputs = 1, 0, None
        self._dice = torch.Generator().manual_seed(1)

    def set(self, **options):
        for name, value in options.items():
            setattr(self.args if name in grpo_plan._OF_ARGUMENTS else self, name, value)

    def _prepare_inputs(self, batch):
        if self._step % (SLICES * self.num_iterations) == 0:
            rows = torch.randperm(SLICES * SIZE, generator=self._dice)
            whole = {
                "prompt_ids": (rows // SIZE)[:, None], "prompt_mask": torch.ones(len(rows), 1, dtype=torch.int64),
                "completion_ids": rows[:, None], "completion_mask": torch.ones(len(rows), 1, dtype=torch.int64),
            }  # fmt: skip
            self._buffered_inputs = [
                {name: value[i : i + SIZE] for name, value in whole.items()} for i in range(0, len(rows), SIZE)
            ]
        return self._buffered_inputs[self._step % SLICES]


def stub(**options):
    trainer = object.__new__(Stub)
    Stub.__init__(trainer, **options)
    return trainer


def rows_of(batch):
    return batch["completion_ids"].flatten().tolist()


@contextlib.contextmanager
def arranging(trainer):
    undo, notes = Undo(), []
    Arranger(trainer, balance=False, across=False, note=notes.append).start(undo)
    try:
        yield notes
    finally:
        undo.restore()


def micro_batches(trainer, change, count=3 * SLICES):
    """The rows of TRL's micro-batches, those that training got, and whether the step might be arranged."""
    for i in range(count):
        trainer._step, trainer.state.global_step = i, i // WINDOW
        change(i)
        got = trainer._prepare_inputs({})
        yield rows_of(trainer._buffered_inputs[i % SLICES]), rows_of(got), compares_rows(trainer) is None


def assert_trls_steps(found):
    """A step whose loss is a sum over its rows has TRL's rows, in any of its micro-batches; any other has TRL's own
    micro-batches."""
    for i in range(0, len(found), WINDOW):
        window = found[i : i + WINDOW]
        theirs, ours = (list(itertools.chain(*(each[k] for each in window))) for k in (0, 1))
        assert sorted(theirs) == sorted(ours)
        if not window[0][2]:
            assert all(trls == got for trls, got, _ in window)


def test_the_table_has_every_option():
    assert OPTIONS.keys() == loss_options(stub()).keys()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("back", [False, True], ids=["", "and back"])
def test_rows_of_each_option(name, back):
    first, second, arranged, _ = OPTIONS[name]
    trainer = stub()

    def change(i):
        if i in (WINDOW, SLICES + WINDOW):  # within a generation batch, where a step begins
            trainer.set(**{name: second if i == WINDOW or not back else first})

    with arranging(trainer) as notes, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(micro_batches(trainer, change))
    assert_trls_steps(found)
    assert [trls != got for trls, got, _ in found][:WINDOW] == [True] * WINDOW
    assert bool(notes) is not arranged
    if not arranged:
        assert all(trls == got for trls, got, _ in found[WINDOW:SLICES])
    # Those of the last generation batch are arranged again if the option is what it was.
    assert any(trls != got for trls, got, _ in found[2 * SLICES :]) == (arranged or back)
    assert "_prepare_inputs" not in vars(trainer)


@settings(max_examples=40, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(sorted(OPTIONS)), st.booleans()), max_size=6))
def test_any_changes_at_the_beginnings_of_steps(changes):
    trainer = stub()

    def change(i):
        for when, name, second in changes:
            if i == when - when % WINDOW:
                trainer.set(**{name: OPTIONS[name][1 if second else 0]})

    with arranging(trainer):
        assert_trls_steps(list(micro_batches(trainer, change)))


def test_a_change_within_a_step_is_told():
    trainer = stub()
    with arranging(trainer), pytest.warns(UserWarning, match="epsilon_low was changed between two micro-batches"):
        list(micro_batches(trainer, lambda i: trainer.set(epsilon_low=0.1) if i == 1 else None))


@pytest.mark.parametrize("what", ["_compute_loss", "args", "draws"])
def test_what_else_may_change(what):
    trainer, drawn = stub(), []

    def change(i):
        if i != SLICES:
            return
        if what == "_compute_loss":
            trainer._compute_loss = lambda *_: None
        elif what == "args":
            trainer.args = SimpleNamespace(**{**vars(trainer.args), "gradient_accumulation_steps": 4})
        else:
            drawn.append(True)

    undo, notes = Undo(), []
    Arranger(trainer, False, False, notes.append, lambda: bool(drawn)).start(undo)
    found = list(micro_batches(trainer, change))
    assert any(trls != got for trls, got, _ in found[:SLICES])
    assert all(trls == got for trls, got, _ in found[SLICES:])
    (note,) = notes
    why = "something is dropped out", "the sizes of steps, or the methods of the loss, have been changed since"
    assert why[what != "draws"] in note
    undo.restore()


def test_evaluation_between_micro_batches_keeps_its_rows():
    trainer = stub()
    with arranging(trainer):
        trainer._prepare_inputs({})
        trainer.model.training = False
        assert trainer._prepare_inputs({}) is trainer._buffered_inputs[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_plans_ask_each_time(name):
    first, second, _, planned = OPTIONS[name]
    trainer = stub()
    planner = Planner(trainer)
    assert planner.why_not() is None
    trainer.set(**{name: second})
    assert (planner.why_not() is None) == planned
    planner.compute_loss(lambda model, inputs: None, None, {})
    assert bool(planner.unplanned) is not planned
    trainer.set(**{name: first})
    assert planner.why_not() is None


@pytest.mark.parametrize("change", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}], ids=str)
def test_a_run_whose_option_changes(tmp_path, seen, change):  # noqa: F811
    class Curriculum(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                for name, value in change.items():
                    setattr(self.trainer, name, value)

    def run(cls, kernels):
        class Noted(cls):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                curriculum = Curriculum()
                curriculum.trainer = self
                self.add_callback(curriculum)

        options = {"loss_type": "grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 4}
        return trained(Noted, tmp_path, seen, kernels, **options)

    stock, shuffled = run(TrlGRPOTrainer, None)
    ours, rows = run(GRPOTrainer, ONLY)
    assert rows[:2] != shuffled[:2]
    assert rows[2:] == shuffled[2:]
    assert_same_step(stock, ours)
    assert "from step 2 on the rows of a prompt stay spread" in str(ours.npu_kernels_report())


@pytest.mark.parametrize("betas", [(0.5, 0.0), (0.0, 0.5)], ids=str)
def test_the_loss_of_a_server_whose_beta_changes(tmp_path, betas):
    """TRL calls another method then; without it, promised logits would be taken for log-probabilities."""

    class Turned(Served):
        def training_step(self, *args, **kwargs):
            self.beta = betas[min(self.state.global_step, 1)]
            return super().training_step(*args, **kwargs)

    stock, ours = both(tmp_path, {"beta": betas[0], "loss_top_k": 1}, trainer=Turned)
    compare(stock, ours)
    assert report_of(ours).ran["linear_divergence"] == 2


def test_arguments_that_are_replaced_while_a_loss_is_filtered(tmp_path):
    old, new = (TrainingArguments(str(tmp_path), use_cpu=True, report_to="none") for _ in range(2))
    trainer = SimpleNamespace(
        args=old, _tr_loss=torch.zeros(()), state=SimpleNamespace(global_step=1), _globalstep_last_logged=0
    )
    filters = LossFilter(trainer)
    filters._filtered(torch.ones(()))
    assert not old.logging_nan_inf_filter
    new.logging_nan_inf_filter = False
    trainer.args = new
    filters.ask_again()
    assert old.logging_nan_inf_filter is True
    assert new.logging_nan_inf_filter is False


def test_a_filter_that_a_callback_switches_off_stays_off(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = SimpleNamespace(
        args=args, _tr_loss=torch.zeros(()), state=SimpleNamespace(global_step=1), _globalstep_last_logged=0
    )
    filters = LossFilter(trainer)
    filters._filtered(torch.ones(()))
    args.logging_nan_inf_filter = False
    filters.ask_again()
    assert args.logging_nan_inf_filter is False


def test_for_the_changed_option_the_step_would_be_another(monkeypatch):
    """Planted: the options are asked when training begins alone."""
    trainer = stub()
    monkeypatch.setattr(grpo_groups, "compares_rows", lambda trainer: None)
    with arranging(trainer):
        found = list(micro_batches(trainer, lambda i: trainer.set(loss_type="bnpo") if i == WINDOW else None))
    with pytest.raises(AssertionError):
        assert_trls_steps(found)
