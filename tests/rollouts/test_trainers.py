"""TRL's trainers that generate: the same completions, losses and parameters with captured steps as with `generate`.

Prompts have one length, so that `generate` draws the same noise for the same probabilities.
"""

import functools
import sys
import time

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import npu_trainer_kernels
from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback
from npu_trainer_kernels.rollouts.rollout_engine import Engine
from tests.models import small_model
from tests.training.test_grpo import difference, tokenizer

PROMPTS = {"prompt": ["123", "456", "789", "012"] * 4}
COMMON = {"per_device_train_batch_size": 4, "max_steps": 3, "report_to": "none", "logging_steps": 1, "use_cpu": True,
          "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1.0, "optim": "sgd"}  # fmt: skip


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def pair_reward(prompts, completions, **kwargs):
    return [float(len(each) % 5 + sum(map(ord, each)) % 3) for each in completions]


def _grpo(folder, model, callbacks, **options):
    return GRPOTrainer(
        model, reward_funcs=reward, train_dataset=Dataset.from_dict(PROMPTS), processing_class=tokenizer(),
        callbacks=callbacks, peft_config=options.pop("peft_config", None),
        args=GRPOConfig(
            folder, num_generations=4, max_completion_length=6, bf16=options.pop("bf16", False), **COMMON, **options
        ),
    )  # fmt: skip


def _rloo(folder, model, callbacks, **options):
    return RLOOTrainer(
        model, reward_funcs=reward, train_dataset=Dataset.from_dict(PROMPTS), processing_class=tokenizer(),
        callbacks=callbacks,
        args=RLOOConfig(folder, beta=0.0, num_generations=4, max_completion_length=6, bf16=False, **COMMON, **options),
    )  # fmt: skip


def _distillation(folder, model, callbacks, **options):
    return DistillationTrainer(
        model, small_model("llama"), train_dataset=Dataset.from_dict(PROMPTS), processing_class=tokenizer(),
        callbacks=callbacks, args=DistillationConfig(folder, max_completion_length=6, bf16=False, **COMMON, **options),
    )  # fmt: skip


def _online_dpo(folder, model, callbacks, **options):
    return OnlineDPOTrainer(
        model=model, ref_model=small_model("qwen3"), reward_funcs=pair_reward, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(PROMPTS), callbacks=callbacks,
        args=OnlineDPOConfig(folder, max_new_tokens=6, max_length=32, bf16=False, **COMMON, **options),
    )  # fmt: skip


TRAINERS = {"grpo": _grpo, "rloo": _rloo, "distillation": _distillation, "online_dpo": _online_dpo}
OPTIONS = {
    "": {}, "adapter": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])},
    "checkpointing": {"gradient_checkpointing": True}, "top_p": {"top_p": 0.8, "temperature": 0.7},
    "bf16": {"bf16": True}, "iterations": {"num_iterations": 2},
}  # fmt: skip


def _trained(folder, make, rollouts, **options):
    callback = NpuKernelsCallback(backend="torch", rollouts=rollouts)
    trainer = make(str(folder), small_model("qwen3"), [callback], **options)
    torch.manual_seed(0)
    trainer.train()
    return trainer, callback.report()


@pytest.mark.parametrize(
    ("name", "option"),
    [*((name, "") for name in TRAINERS), *(("grpo", option) for option in OPTIONS if option)],
)
def test_the_same_training(tmp_path, name, option):
    trainer, report = _trained(tmp_path / "on", TRAINERS[name], "on", **OPTIONS[option])
    other, without = _trained(tmp_path / "off", TRAINERS[name], "off", **OPTIONS[option])
    assert report.rollouts.engine.rollouts >= 1, str(report.rollouts)
    assert not report.rollouts.engine.reasons
    assert without.rollouts is None
    if option != "bf16":  # there a probability may round differently, and a row goes on with other tokens
        for ours, theirs in zip(trainer.state.log_history[:-1], other.state.log_history[:-1], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert difference(trainer.model, other.model) < 1e-4
    assert trainer.state.log_history[0]["generation_seconds"] > 0
    assert "_sample" not in vars(type(trainer.model))  # restored


def test_generation_is_no_part_of_the_update(tmp_path, monkeypatch):
    """On a clock that stands still, but for 7 s in which completions are generated and 5 s of their rewards."""
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def takes(seconds, function):
        def slow(*args, **kwargs):
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return functools.wraps(function)(slow)

    monkeypatch.setattr(Engine, "run", takes(7.0, Engine.run))
    monkeypatch.setattr(sys.modules[__name__], "reward", takes(5.0, reward))
    trainer, _ = _trained(tmp_path, _grpo, "on", num_iterations=2)
    entries = trainer.state.log_history[:-1]
    # Every second step trains on the completions of the step before.
    assert [entry.get("generation_seconds") for entry in entries] == [7.0, None, 7.0]
    assert [entry["update_seconds"] for entry in entries] == [5.0, 0.0, 5.0]
    assert [entry["waiting_seconds"] for entry in entries] == [0.0] * 3


def test_gkd(tmp_path):
    """Its completions are sampled with a generator that batches share; at least it generates by captured steps."""
    tokens = tokenizer()
    tokens.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    callback = NpuKernelsCallback(backend="torch", rollouts="on")
    messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": "45"}] for p in PROMPTS["prompt"]]
    trainer = GKDTrainer(
        small_model("qwen3"), small_model("llama"), train_dataset=Dataset.from_dict({"messages": messages}),
        processing_class=tokens, callbacks=[callback],
        args=GKDConfig(str(tmp_path), lmbda=1.0, max_new_tokens=6, max_length=32, bf16=False, **COMMON),
    )  # fmt: skip
    trainer.train()
    assert callback.report().rollouts.engine.rollouts == 3, str(callback.report().rollouts)


def test_the_drop_in_trainer_and_its_options(tmp_path):
    trainer = npu_trainer_kernels.GRPOTrainer(
        small_model("qwen3"), reward_funcs=reward, train_dataset=Dataset.from_dict(PROMPTS),
        processing_class=tokenizer(),
        args=GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=6, bf16=False, **COMMON),
        npu_kernels=NpuKernelsArguments(use_npu_kernels=True, npu_kernels_backend="torch", npu_kernels_rollouts="on"),
    )  # fmt: skip
    trainer.train()
    assert trainer.npu_kernels_report().rollouts.engine.rollouts == 3
    with pytest.raises(ValueError, match="npu_kernels_rollouts must be one of auto, on, off; got 'yes'"):
        NpuKernelsArguments(use_npu_kernels=True, npu_kernels_rollouts="yes")
    with pytest.raises(ValueError, match="npu_kernels_rollouts does nothing without --use_npu_kernels"):
        NpuKernelsArguments(npu_kernels_rollouts="on")


def test_auto_leaves_a_cpu_alone(tmp_path):
    _, report = _trained(tmp_path, _grpo, "auto")
    assert report.rollouts is None
    assert "rollouts" not in str(report)


@pytest.mark.parametrize(("options", "said"), [({"bf16": True}, True), ({}, False)], ids=str)
def test_continuous_batching_casts_for_good(tmp_path, options, said):
    """TRL's way without a second engine is told, since it changes the weights that are trained."""
    callback = NpuKernelsCallback(backend="torch")
    trainer = _grpo(str(tmp_path), small_model("qwen3"), [callback], **options)
    trainer.args.use_transformers_continuous_batching = True
    trainer.train()
    assert any("TRL casts the trained model to bf16" in note for note in callback.report().notes) is said
