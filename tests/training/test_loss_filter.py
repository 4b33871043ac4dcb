"""Losses that are no numbers are logged as the Trainer logs them, and nobody waits for the device to find them."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.verify import on_one_device
from tests.models import batch, small_model


class Reads(TorchDispatchMode):
    """Counts, while `on`, the values that the host asks for."""

    on, count = False, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.on and function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Spiked(Trainer):
    """The value of the loss, and not its gradient, is another one in some micro-batches."""

    def __init__(self, *args, spikes=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.spikes, self.losses, self.reads = spikes or {}, 0, Reads()

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if not self.model.training:
            return loss
        self.losses += 1
        return loss + self.spikes.get(self.losses, 0.0)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.reads.on = True
        return loss


class Seen(TrainerCallback):
    """What other callbacks find while it trains, and where the loss has been added."""

    def __init__(self):
        self.filters = []

    def look(self, args, *_, **__):
        self.filters.append(args.logging_nan_inf_filter)

    on_step_begin = on_substep_end = on_optimizer_step = on_step_end = on_evaluate = on_log = look

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.look(args)
        self.trainer.reads.on = False


def trainer_of(tmp_path, *callbacks, spikes=None, **arguments):
    defaults = {
        "output_dir": str(tmp_path), "max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    data = batch(rows=8)
    rows = [{name: t[i] for name, t in data.items()} for i in range(8)]
    arguments = on_one_device(TrainingArguments(**{**defaults, **arguments}))
    return Spiked(small_model("llama"), arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks),
                  spikes=spikes)  # fmt: skip


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("filters", [True, False])
def test_what_is_logged_is_what_the_trainer_logs(tmp_path, steps, accumulation, filters):
    """The average so far, which is 0 where there is none yet."""
    arguments = {
        "logging_steps": steps, "gradient_accumulation_steps": accumulation, "logging_nan_inf_filter": filters,
    }  # fmt: skip
    spikes = {1: math.nan, 3: math.inf, 6: -math.inf}
    plain = logged(trainer_of(tmp_path, spikes=spikes, **arguments))
    ours = logged(trainer_of(tmp_path, NpuKernelsCallback(warm_up=False), spikes=spikes, **arguments))
    assert all(map(math.isfinite, plain)) == filters
    assert ours == pytest.approx(plain, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("callbacks", [True, False])
def test_nothing_is_read_between_backward_and_the_optimizer(tmp_path, callbacks):
    seen = Seen()
    trainer = trainer_of(tmp_path, *[NpuKernelsCallback(warm_up=False)] * callbacks, seen, max_steps=2)
    seen.trainer = trainer
    with trainer.reads:
        trainer.train()
    assert trainer.reads.count == (0 if callbacks else 4)


@pytest.mark.parametrize("filters", [True, False])
def test_everybody_else_finds_the_argument_as_it_was(tmp_path, filters):
    seen = Seen()
    trainer = trainer_of(
        tmp_path, NpuKernelsCallback(warm_up=False), seen, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=1, logging_nan_inf_filter=filters, max_steps=2,
    )  # fmt: skip
    seen.trainer = trainer
    trainer.train()
    assert len(seen.filters) >= 12
    assert set(seen.filters) == {filters}
    assert trainer.args.logging_nan_inf_filter is filters
    assert "training_step" not in vars(trainer)


def test_the_argument_is_as_it_was_after_a_failure(tmp_path):
    trainer = trainer_of(tmp_path, NpuKernelsCallback(warm_up=False))
    found = []

    def clip(model):
        found.append(trainer.args.logging_nan_inf_filter)
        raise RuntimeError("planted")

    trainer._clip_grad_norm = clip
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert found == [False]
    assert trainer.args.logging_nan_inf_filter is True


def test_a_filter_that_is_switched_off_while_it_trains_is_off(tmp_path):
    class Off(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.logging_nan_inf_filter = state.global_step < 2

    trainer = trainer_of(tmp_path, NpuKernelsCallback(warm_up=False), Off(), spikes={2: math.nan, 4: math.nan})
    # The Trainer takes what is logged off its sum, and a nan does not go by that.
    assert [math.isfinite(loss) for loss in logged(trainer)] == [True, True, True, False, False, False]
    assert trainer.args.logging_nan_inf_filter is False
