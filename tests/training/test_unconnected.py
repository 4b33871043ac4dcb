"""Ranks that a launcher starts on a machine without an accelerator, and that nothing connects."""

from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainingArguments

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.training import unconnected_ranks
from tests.models import batch, small_model


@pytest.mark.parametrize(
    ("launched", "world_size", "named"),
    [({}, 1, False), ({"WORLD_SIZE": "1"}, 1, False), ({"WORLD_SIZE": "8", "RANK": "0"}, 8, False),
     ({"WORLD_SIZE": "8", "RANK": "0"}, 1, True), ({"WORLD_SIZE": "8", "RANK": "3"}, 1, False)],
)  # fmt: skip
def test_one_of_them_says_it(launched, world_size, named):
    said = unconnected_ranks(SimpleNamespace(world_size=world_size), launched)
    assert (said is not None) == named
    assert not named or said.startswith("8 processes were started, and each of them trains the whole model by itself")


def test_the_callback_warns_and_reports_it(tmp_path, monkeypatch):
    callback = NpuKernelsCallback(ops=["rms_norm"])
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True)
    rows = [{name: value[0] for name, value in batch(rows=1).items()}] * 8
    trainer = Trainer(small_model("llama"), args, train_dataset=rows, callbacks=[callback])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="2 processes were started, and each of them trains the whole model by itself"):
        trainer.train()
    assert "use_cpu=True" in str(callback.report())
