"""Our GRPOTrainer beside TRL's where a batch or the loop around it is out of the ordinary: a sampler of its own,
tools, windows of accumulation that are cut short, evaluation, checkpoints, adapters, mixtures of experts."""

import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsCallback
from tests.models import small_model
from tests.training.test_grpo import difference, train
from tests.training.test_grpo_plan import both, compare


class Vllm:
    """What vLLM adds to a batch, without its server: the sampler's log-probabilities, which are not quite ours. They
    depend on the token alone, so that both trainers get the same. What TRL makes of them is its own code."""

    def _generate(self, prompts):
        self.use_vllm = False  # there is no engine to generate with, or to give weights to
        ids, completions, tools, texts, _, *rest = super()._generate(prompts)
        self.use_vllm = True
        return ids, completions, tools, texts, [[-5.8 + 0.2 * (i % 7 - 3) for i in c] for c in completions], *rest


class Tools:
    """What a tool adds to a batch: tokens in the middle of a completion that the model did not write."""

    def _generate(self, prompts):
        ids, completions, _, *rest = super()._generate(prompts)
        return ids, completions, [[int(i % 3 != 0) for i in c] for c in completions], *rest


class Both(Vllm, Tools):
    pass


class Router:
    """transformers cannot generate while a mixture of experts returns its router's logits."""

    def _generate(self, prompts):
        self.model.config.output_router_logits = False
        generated = super()._generate(prompts)
        self.model.config.output_router_logits = True
        return generated


TOKEN, SEQUENCE = ({"vllm_importance_sampling_mode": f"{level}_truncate"} for level in ("token", "sequence"))
MASKED = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 2.0}


@pytest.mark.parametrize(
    ("mixin", "options"),
    [
        (Vllm, {"loss_type": "dapo", "beta": 0.1, **TOKEN}),
        (Vllm, {"loss_type": "grpo", "importance_sampling_level": "sequence", **SEQUENCE}),
        (Vllm, {"loss_type": "luspo", "importance_sampling_level": "sequence", **TOKEN}),
        (Vllm, {"loss_type": "vespo", "num_iterations": 2, "max_steps": 3, **TOKEN}),
        (Vllm, {"loss_type": "bnpo", "num_iterations": 2, "max_steps": 3, **MASKED}),
        (Tools, {"loss_type": "dapo", "entropy_coef": 0.1}),
        (Tools, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (Tools, {"loss_type": "dr_grpo", "num_iterations": 2, "max_steps": 3}),
        (Both, {"loss_type": "cispo", "num_iterations": 2, "max_steps": 3, **SEQUENCE}),
        (Both, {"loss_type": "sapo", "importance_sampling_level": "sequence", "beta": 0.1, **TOKEN}),
        (Both, {"loss_type": "vespo", **TOKEN}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_samplers_and_tools_are_planned(tmp_path, recomputed, mixin, options):
    stock, ours, gave_up = both(tmp_path, mixin, **options)
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_off_policy_mask_of_a_sampler_is_not_planned(tmp_path, recomputed):
    stock, ours, gave_up = both(tmp_path, Both, off_policy_mask_threshold=0.01, **TOKEN)
    compare(stock, ours)
    assert len(recomputed) == 2
    assert gave_up == []
    assert "off_policy_mask_threshold" in str(ours.npu_kernels_report())


def test_last_window_of_an_epoch_is_cut_short(tmp_path, recomputed):
    """Eight micro-batches in windows of three: the last has two, and TRL divides by two."""
    stock, ours, gave_up = both(
        tmp_path, max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=3, steps_per_generation=2,
        loss_type="dapo", entropy_coef=0.1,
    )  # fmt: skip
    assert stock.state.global_step == 3
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_adaptive_entropy_switches_off_and_on(tmp_path, recomputed):
    """The target lies where the entropy of these models is, so that the bonus comes and goes."""
    stock, ours, gave_up = both(
        tmp_path, max_steps=4, use_adaptive_entropy=True, entropy_target=5.79, entropy_coef=0.5, entropy_coef_max=2.0,
        gradient_accumulation_steps=2, learning_rate=1.0,
    )  # fmt: skip
    entropies = [row["entropy"] for row in stock.state.log_history if "entropy" in row]
    assert min(entropies) < 5.79 < max(entropies)
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_evaluation_while_training(tmp_path, recomputed):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "beta": 0.1}
    held_out = Dataset.from_dict({"prompt": ["9+9=", "4+40="]})
    stock, ours, gave_up = both(tmp_path, extra={"eval_dataset": held_out}, **options)
    assert sum("eval_loss" in row for row in ours.state.log_history) == 2
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_resumed_from_a_checkpoint(tmp_path):
    """Two steps and two more are four, and a checkpoint of our trainer serves TRL's."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    stock, ours, _ = both(tmp_path, **options)
    compare(stock, ours)
    saved = tmp_path / "checkpoint-2"  # by ours, which ran last
    for cls in (GRPOTrainer, TrlGRPOTrainer):
        resumed = train(cls, tmp_path, resume=str(saved), **{**options, "save_strategy": "no"})
        assert resumed.state.global_step == 4
        assert difference(stock.model, resumed.model) < 2e-5


def test_mixture_of_experts_with_its_auxiliary_loss(tmp_path, recomputed):
    stock, ours, gave_up = both(tmp_path, Router, family="qwen3-moe", loss_type="dapo", gradient_accumulation_steps=2)
    assert any(row.get("aux_loss", 0.0) > 0.1 for row in stock.state.log_history)
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_untied_embeddings(tmp_path, recomputed):
    stock, ours, gave_up = both(tmp_path, family="llama", beta=0.1)
    compare(stock, ours)
    assert gave_up == recomputed == []


def test_the_callback_plans_in_trls_own_trainer(tmp_path, recomputed):
    trained = []
    for callbacks in ([], [NpuKernelsCallback()]):
        torch.manual_seed(0)
        trained.append(train(TrlGRPOTrainer, tmp_path, extra={"callbacks": callbacks}, beta=0.1))
    compare(*trained)
    assert recomputed == []
    assert "_compute_loss" not in vars(trained[1])


@pytest.mark.parametrize("base", [TrlGRPOTrainer, GRPOTrainer])
def test_a_loss_of_a_subclass_is_not_planned(tmp_path, recomputed, base):
    """TRL's GMPOTrainer, ms-swift's: their own `_compute_loss`, maybe of other batches. Nothing is guessed about it."""

    class Squared(base):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] ** 3})

    callback = NpuKernelsCallback()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GRPOTrainer: the gradient")
        ours = train(Squared, tmp_path, extra={} if base is GRPOTrainer else {"callbacks": [callback]})
    report = ours.npu_kernels_report() if base is GRPOTrainer else callback.report()
    assert "not planned: Squared computes a loss of its own (_compute_loss)" in str(report)
    assert len(recomputed) == 3


@pytest.mark.parametrize("options", [{}, {"loss_type": "vespo", "num_iterations": 2, "max_steps": 3, "beta": 0.1}])
def test_lora(tmp_path, recomputed, options):
    """Adapters are random at first, or the first step would have half their gradients at zero."""
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    stock, ours, gave_up = both(tmp_path, extra={"peft_config": lora}, **options)
    compare(stock, ours)
    assert difference(stock.model, ours.model) < 1e-3 * max(p.abs().max().item() for p in ours.model.parameters())
    assert gave_up == recomputed == []


def test_adapter_on_the_head_raises_as_in_trl(tmp_path):
    lora = LoraConfig(target_modules=["q_proj", "lm_head"], r=4)
    messages = []
    for cls in (TrlGRPOTrainer, GRPOTrainer):
        with pytest.raises(ValueError, match="lm_head") as caught:
            train(cls, tmp_path, small_model("llama"), extra={"peft_config": lora})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
