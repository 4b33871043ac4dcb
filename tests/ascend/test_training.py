"""The backend "ascend-lowering": whole models trained on the code that an NPU would get, executed on the CPU."""

import contextlib

import pytest
import torch
from transformers import Trainer, TrainingArguments

from npu_trainer_kernels import NpuKernelsCallback, apply_npu_kernels, device, ops
from npu_trainer_kernels.ascend.launcher import lowering_launcher
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.support.rounding import SEEDS, Rounded
from tests.closeness import assert_as_close
from tests.models import assert_outcome_close, batch, loss_and_gradients, small_model

pytestmark = pytest.mark.usefixtures("kept_cache")
FAMILIES = ("llama", "qwen3")
KERNELS = {
    "_forward_kernel",
    "_backward_kernel",
    "_sum_kernel",
    "_rotate_kernel",
    "_gather_kernel",
    "_scatter_kernel",
    "_row_statistics_kernel",
    "_row_gradient_kernel",
}


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "ascend-lowering")
    monkeypatch.delenv("NPU_KERNELS_CHIP", raising=False)
    monkeypatch.setattr(lowering_launcher, "traffic", {})


def small(family):
    return small_model(family, hidden_size=192, head_dim=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_models_own(family):
    plain = small(family)
    expected = loss_and_gradients(plain, batch())
    truth = loss_and_gradients(small(family).double(), batch())
    model = small(family)
    with apply_npu_kernels(model, ops=PATCHES):
        actual = loss_and_gradients(model, batch())
    assert set(lowering_launcher.traffic) == KERNELS
    assert_outcome_close(plain, actual, expected, truth, lambda: loss_and_gradients(plain, batch()))


class _Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.data = batch(rows=8)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {key: value[i] for key, value in self.data.items()}


def train(model, tmp_path, callbacks, rounding=None):
    """The losses; `rounding` changes that of the steps alone, since the model is made before."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=1e-3, seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=_Rows(), callbacks=callbacks)
    with rounding or contextlib.nullcontext():
        trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_trains_on_the_lowering(family, tmp_path):
    expected, truth = train(small(family), tmp_path, []), train(small(family).double(), tmp_path, [])
    assert lowering_launcher.traffic == {}
    actual = train(small(family), tmp_path, [NpuKernelsCallback(ops=PATCHES)])
    assert set(lowering_launcher.traffic) == KERNELS
    assert expected[4:].mean() < expected[:4].mean()
    assert_as_close(
        actual, expected, truth, f"{family} losses",
        lambda: [train(small(family), tmp_path, [], Rounded(seed, in_place=False)) for seed in range(SEEDS)],
    )  # fmt: skip


def test_the_tiles_are_the_chips(monkeypatch):
    assert device.spec(torch.device("cpu")) == device.chip_spec("Ascend910B4")
    monkeypatch.setenv("NPU_KERNELS_CHIP", "Ascend910_9382")
    assert device.spec(torch.device("cpu")).vector_cores == 48


def test_without_a_chip_it_says_how_to_name_one(monkeypatch):
    monkeypatch.delenv("NPU_KERNELS_BACKEND")
    with pytest.raises(ValueError, match="needs a chip to lower for: set NPU_KERNELS_CHIP"):
        ops.rms_norm(torch.randn(3, 64), torch.randn(64), backend="ascend-lowering")
