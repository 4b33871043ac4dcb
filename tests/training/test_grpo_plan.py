"""Planned gradients: TRL's own trainer, option by option, beside ours on the same rollouts.

For every case the loss, every logged metric and every parameter must agree, and where a plan is possible the head must
have projected each row once; where it is not, the fallback must have run and said why.
"""

import itertools
import warnings

import pytest
import torch
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer
from tests.training.test_grpo import difference, train

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# What differs between two runs for other reasons than the loss.
NOT_COMPARED = ("_seconds", "step_time", "runtime", "per_second", "peak_memory", "tokens_per_second")


def both(tmp_path, mixin=None, **options):
    """TRL's trainer and ours with the same seed, both trained; `mixin` is what both of them are given besides."""
    options = {"max_steps": 2, **options}
    classes = [cls if mixin is None else type(cls.__name__, (mixin, cls), {}) for cls in (TrlGRPOTrainer, GRPOTrainer)]
    torch.manual_seed(0)
    stock = train(classes[0], tmp_path, **options)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(classes[1], tmp_path, **options)
    gave_up = [str(w.message) for w in caught if "GRPOTrainer: the gradient" in str(w.message)]
    return stock, ours, gave_up


def compare(stock, ours):
    assert difference(stock.model, ours.model) < 2e-5
    for before, after in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for name, value in before.items():
            if any(part in name for part in NOT_COMPARED) or not isinstance(value, float):
                continue
            assert after[name] == pytest.approx(value, rel=2e-3, abs=2e-5, nan_ok=True), name


@pytest.mark.parametrize(("loss_type", "level"), itertools.product(LOSS_TYPES, ("token", "sequence")))
def test_on_policy_is_planned(tmp_path, rows, loss_type, level):
    stock, ours, gave_up = both(tmp_path, loss_type=loss_type, importance_sampling_level=level)
    compare(stock, ours)
    assert gave_up == []
    assert "not planned" not in str(ours.npu_kernels_report())
    # Two steps, one projection each: none in backward.
    assert len(rows) == 2


@pytest.mark.parametrize(("loss_type", "level"), itertools.product(LOSS_TYPES, ("token", "sequence")))
def test_off_policy_is_planned(tmp_path, rows, loss_type, level):
    stock, ours, gave_up = both(
        tmp_path, loss_type=loss_type, importance_sampling_level=level, num_iterations=2, max_steps=4, beta=0.05
    )
    compare(stock, ours)
    assert gave_up == []
    # Old log-probabilities (two generations), the reference's, and one projection for each of four steps.
    assert len(rows) <= 2 + 2 + 4


OPTIONS = [
    {"delta": 1.1, "num_iterations": 2},
    {"epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 2, "max_steps": 4},
    {"beta": 0.1},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"beta": 0.1, "use_bias_correction_kl": True, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    {"entropy_coef": 0.1},
    {"entropy_coef": 0.1, "loss_type": "dapo", "gradient_accumulation_steps": 2},
    {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.05, "entropy_coef_max": 0.2},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "dapo"},
    {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "loss_type": "grpo"},
    {"temperature": 0.6},
    {"scale_rewards": "batch", "mask_truncated_completions": True},
    {"gradient_checkpointing": True},
    {"bf16": True},
    {"cast_lm_head_to_fp32": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_planned(tmp_path, recomputed, options):
    stock, ours, gave_up = both(tmp_path, **options)
    if options.get("bf16"):
        # Two roundings of a bf16 run: compared by what its own steps move.
        moved = difference(stock.model, train_start(tmp_path))
        assert difference(stock.model, ours.model) < 0.02 * moved
    else:
        compare(stock, ours)
    assert gave_up == recomputed == []
    assert "not planned" not in str(ours.npu_kernels_report())


class Rounded:
    """As FSDP2 with accelerate's `output_dtype` in bf16: what the model gives is rounded, and what arrives for it."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return tuple(
            None if t is None else t.bfloat16() for t in super()._get_per_token_logps_and_entropies(*args, **kwargs)
        )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_the_model_gives_may_be_rounded(tmp_path, recomputed, loss_type):
    stock, ours, gave_up = both(tmp_path, mixin=Rounded, loss_type=loss_type)
    moved = difference(stock.model, train_start(tmp_path))
    assert difference(stock.model, ours.model) < 0.02 * moved
    assert gave_up == []
    # cispo rounds twice on the way: rows of which that makes another number are formed again.
    assert recomputed == [] or loss_type == "cispo"


def train_start(tmp_path):
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"top_entropy_quantile": 0.5},
            "top_entropy_quantile=0.5 selects tokens by the whole batch's entropies",
        ),
        (
            {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
            "off_policy_mask_threshold drops completions by the whole completion's log-probabilities",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_right_and_reported(tmp_path, rows, options, reason):
    stock, ours, gave_up = both(tmp_path, **options)
    compare(stock, ours)
    assert gave_up == []
    assert reason in str(ours.npu_kernels_report())
    # Forward and backward each project the rows of both steps.
    assert len(rows) >= 4


def test_a_formula_of_trls_that_changed_costs_time_not_correctness(tmp_path, rows, monkeypatch):
    """TRL's loss is replaced by another one under the plan's feet: same result as TRL, one warning, planning off."""
    original = TrlGRPOTrainer._compute_loss

    def changed(self, model, inputs):
        advantages = inputs["advantages"]
        return original(self, model, {**inputs, "advantages": advantages.sign() * advantages.abs().sqrt()})

    monkeypatch.setattr(TrlGRPOTrainer, "_compute_loss", changed)
    stock, ours, gave_up = both(tmp_path, max_steps=3)
    compare(stock, ours)
    assert len(gave_up) == 1
    assert "loss_type='dapo'" in gave_up[0]
    assert "not the planned one" in str(ours.npu_kernels_report())


def test_lora_has_no_projection_in_backward(tmp_path, rows):
    from peft import LoraConfig, get_peft_model

    from tests.models import small_model

    torch.manual_seed(0)
    model = get_peft_model(small_model("qwen3", tie_word_embeddings=False), LoraConfig(target_modules=["q_proj"], r=4))
    train(GRPOTrainer, tmp_path, model, max_steps=2)
    assert len(rows) == 2
