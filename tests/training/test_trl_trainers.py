"""TRL's other trainers with the callback beside the same trainer without: SFT (nll and dft), DPO, KTO, RLOO."""

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from npu_trainer_kernels import NpuKernelsCallback
from tests.models import small_model
from tests.training.test_grpo import difference, reward, tokenizer

SUMS = [f"{a}+{b}={a + b}" for a, b in ((1, 2), (30, 4), (5, 66), (7, 8), (90, 1), (2, 33), (4, 5), (16, 7))]
PROMPTS = [s.split("=")[0] + "=" for s in SUMS]
ANSWERS = [s.split("=")[1] for s in SUMS]
WRONG = [a[::-1] + "0" for a in ANSWERS]

COMMON = {
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 1e-1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 4,
}


def both(tmp_path, trainer, config, data, **options):
    """The trainer without and with the callback, trained; reward functions and the like come in `extra`."""
    extra = options.pop("extra", {})
    trained = []
    for callbacks in ([], [NpuKernelsCallback()]):
        small_model("qwen3").save_pretrained(tmp_path / "model")
        torch.manual_seed(0)
        made = trainer(
            Qwen3ForCausalLM.from_pretrained(tmp_path / "model"),
            args=config(output_dir=str(tmp_path), **{**COMMON, **options}),
            train_dataset=Dataset.from_dict(data),
            processing_class=tokenizer(),
            callbacks=callbacks,
            **extra,
        )
        made.train()
        trained.append(made)
    return trained


def compare(tmp_path, plain, ours):
    start = Qwen3ForCausalLM.from_pretrained(tmp_path / "model")
    moved = difference(plain.model, start)
    assert moved > 1e-4
    # A gradient that is off by one percent fails this by a factor of ten.
    assert difference(plain.model, ours.model) < 1e-3 * moved
    for before, after in zip(plain.state.log_history, ours.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "kl", "reward"):
            if name in before:
                assert after[name] == pytest.approx(before[name], rel=2e-3, abs=2e-5), name


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_is_planned_after_two_backward_passes(tmp_path, rows, loss_type):
    plain, ours = both(tmp_path, SFTTrainer, SFTConfig, {"text": SUMS}, loss_type=loss_type)
    compare(tmp_path, plain, ours)
    # Steps one and two form the logits twice, three and four once.
    assert len(rows) == 2 + 2 + 1 + 1


def test_sft_with_completion_only_loss_and_accumulation(tmp_path):
    data = {"prompt": PROMPTS, "completion": ANSWERS}
    plain, ours = both(tmp_path, SFTTrainer, SFTConfig, data, gradient_accumulation_steps=2)
    compare(tmp_path, plain, ours)


def test_sft_padding_free_packing(tmp_path):
    plain, ours = both(tmp_path, SFTTrainer, SFTConfig, {"text": SUMS * 4}, packing=True, max_length=24)
    compare(tmp_path, plain, ours)


def test_dpo(tmp_path, rows):
    data = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": WRONG}
    plain, ours = both(tmp_path, DPOTrainer, DPOConfig, data)
    compare(tmp_path, plain, ours)
    assert rows


def test_kto(tmp_path, rows):
    data = {"prompt": PROMPTS * 2, "completion": ANSWERS + WRONG, "label": [True] * 8 + [False] * 8}
    plain, ours = both(tmp_path, KTOTrainer, KTOConfig, data)
    compare(tmp_path, plain, ours)
    assert rows


def test_rloo(tmp_path, rows):
    plain, ours = both(
        tmp_path, RLOOTrainer, RLOOConfig, {"prompt": PROMPTS}, num_generations=2, max_completion_length=6,
        beta=0.05, extra={"reward_funcs": reward},
    )  # fmt: skip
    compare(tmp_path, plain, ours)
    assert rows


@pytest.mark.parametrize("bf16", [False, True])
def test_the_report_has_the_head_that_is_used(tmp_path, bf16):
    """In mixed precision accelerate wraps the forward that has TRL's head."""
    small_model("qwen3").save_pretrained(tmp_path / "model")
    callback = NpuKernelsCallback(warm_up=False)
    trainer = DPOTrainer(
        Qwen3ForCausalLM.from_pretrained(tmp_path / "model"),
        args=DPOConfig(output_dir=str(tmp_path), **{**COMMON, "bf16": bf16, "max_steps": 1}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": WRONG}),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    report = callback.report()
    assert report.unused.keys() == {"linear_cross_entropy"}
    assert report.ran["linear_logprob"] == 1
    assert "linear_logprob" in str(report)
    (beside,) = (line for line in str(report).splitlines() if line.startswith("ref_model (Qwen3ForCausalLM): "))
    assert "linear_logprob 1 (1 calls)" in beside
    assert "linear_cross_entropy" not in beside
    assert {type(module) for module in trainer.ref_model.modules()} == {
        type(module) for module in small_model("qwen3").modules()
    }
