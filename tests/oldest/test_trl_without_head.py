"""A TRL without a head to serve: its trainers get the layers' kernels, train as without, and the report says so."""

import pytest
import torch
from packaging.version import Version
from trl import DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer
from tests.models import HAS_TRL_HEAD, TRL, small_model
from tests.training.test_grpo import difference, train
from tests.training.test_trl_trainers import ANSWERS, PROMPTS, SUMS, WRONG, both, compare

assert not HAS_TRL_HEAD
LAYERS = {"rms_norm", "add_rms_norm"}


def check_report(report):
    """What a model on a CPU has of ours, without a head."""
    replaced = {each.op for each in report.replaced}
    # What the head returns is a promise: whoever reads logits gets them.
    assert replaced >= {*LAYERS, "linear_cross_entropy"}
    assert "linear_logprob" not in replaced
    left = {each.op: each.reason for each in report.left_alone}
    assert left["linear_logprob"] == f"TRL {TRL} has no fused head to serve (1.15 and later have)"


@pytest.mark.parametrize("data", [{"text": SUMS}, {"prompt": PROMPTS, "completion": ANSWERS}], ids=["text", "pairs"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft(tmp_path, data, accumulation):
    # TRL 1 computes in chunks of its own unless it is asked for the model's loss; before, that is all there is.
    options = {"gradient_accumulation_steps": accumulation, **({"loss_type": "nll"} if Version("1") <= TRL else {})}
    plain, ours = both(tmp_path, SFTTrainer, SFTConfig, data, **options)
    compare(tmp_path, plain, ours)
    (callback,) = (each for each in ours.callback_handler.callbacks if hasattr(each, "handle"))
    check_report(callback.report())
    logged = next(entry for entry in ours.state.log_history if "loss" in entry)
    assert logged["entropy"] > 0
    assert "mean_token_accuracy" in logged


def test_dpo(tmp_path):
    plain, ours = both(
        tmp_path, DPOTrainer, DPOConfig, {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": WRONG}
    )  # fmt: skip
    compare(tmp_path, plain, ours)


def test_grpo_drop_in(tmp_path):
    torch.manual_seed(0)
    stock = train(TrlGRPOTrainer, tmp_path)
    torch.manual_seed(0)
    ours = train(GRPOTrainer, tmp_path)
    assert difference(stock.model, small_model("qwen3")) > 1e-3
    assert difference(stock.model, ours.model) < 1e-5
    check_report(ours.npu_kernels_report())
    assert isinstance(ours.args, GRPOConfig)
