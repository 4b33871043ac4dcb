"""TRL's trainers with padded batches whose bodies compute live tokens only, beside the same trainers without kernels.

Three runs of some steps each: the plain trainer in fp64, which is the truth, the plain one in fp32, and ours.
Parameters are compared by the closeness rule, losses and gradient norms with what fp32 leaves of them, and the report
must say that every batch was served. Completions are made up, so that all three train on the same, and their lengths
vary as much as real ones do.
"""

import contextlib
import functools
import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.support.rounding import SEEDS, Rounded
from tests.closeness import assert_as_close
from tests.families.compare import in_double
from tests.models import small_model
from tests.training.test_grpo import reward, tokenizer

OP = "varlen_attention"
SYSTEM = "1234567890+"
COMMON = {
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 3e-2,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 3,
}
PROMPTS = ["1+2=", "3+44=", "512+6666=", "71+8=", "90+1=", "2+33="] * 4
ROLLOUTS = {"num_generations": 4, "max_completion_length": 40}


def digits(generator: random.Random, longest: int = 40) -> str:
    """Of a length from an exponential distribution."""
    length = min(1 + int(generator.expovariate(1 / 8)), longest)
    return "".join(generator.choices("0123456789", k=length))


def texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [digits(generator) for _ in range(count)]


class MadeUp:
    """Completions of made-up tokens."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not hasattr(self, "dice"):
            self.dice = random.Random(5)
        lengths = [min(1 + int(self.dice.expovariate(1 / 8)), 39) for _ in prompt_ids]
        # 2 is the end of a sequence.
        completions = [[self.dice.randrange(4, 16) for _ in range(n)] + [2] for n in lengths]
        return completions if isinstance(self, RLOOTrainer) else (completions, None)


def with_made_up(cls):
    return type(cls.__name__, (MadeUp, cls), {})


def train(folder, cls, config, data, *, ours, double=False, rounding=None, family="qwen3", **options):
    """A trained trainer, and the callback that served it, or None. `rounding` changes that of the steps alone."""
    extra = options.pop("extra", {})
    loader = AutoModelForSequenceClassification if cls is RewardTrainer else AutoModelForCausalLM
    if double:
        # The same numbers, and what is recomputed would be recomputed in fp32.
        options["gradient_checkpointing"] = False
    callback = NpuKernelsCallback(warm_up=False) if ours else None
    truth = in_double if double else contextlib.nullcontext
    with truth():
        trainer = cls(
            # From disk: reference models are loaded from where the model came from.
            loader.from_pretrained(folder, dtype=torch.float64 if double else torch.float32),
            args=config(output_dir=str(folder), **{**COMMON, **options}),
            train_dataset=Dataset.from_dict(data),
            processing_class=tokenizer(),
            callbacks=[callback] if callback is not None else [],
            **extra,
        )
    set_adapters(trainer.model)
    if double:
        trainer.model.config._experts_implementation = "eager"  # grouped products take no fp64
    if double and getattr(trainer, "ref_model", None) is not None:
        trainer.ref_model.double()  # TRL 1.15 loads it in fp32, whatever the trained model is
    with rounding or truth():
        trainer.train()
    return trainer, callback


def set_adapters(model):
    """Fresh adapters would be drawn anew for each dtype."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def savings(callback):
    """What became of the positions of the trained model's batches."""
    (site,) = (site for site in callback.report().sites if site.op == OP)
    return site.progress


def curves(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def assert_same_training(folder, cls, config, data, *, model=None, **options):
    """The savings of the trainer with the kernels, whose training was that of the one without."""
    start = small_model(options.get("family", "qwen3"), **(model or {}))
    start.save_pretrained(folder)
    if cls is RewardTrainer:
        torch.manual_seed(0)
        start = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        start.save_pretrained(folder)
    truth, _ = train(folder, cls, config, data, ours=False, double=True, **options)
    stock, _ = train(folder, cls, config, data, ours=False, **options)
    ours, callback = train(folder, cls, config, data, ours=True, **options)
    exact, plain = dict(truth.model.named_parameters()), dict(stock.model.named_parameters())
    before = dict(start.named_parameters())
    trained = [name for name, p in exact.items() if p.requires_grad]
    assert not any(torch.equal(exact[name].float(), before[name]) for name in trained if name in before)

    # Not in place: there the optimizer would change what it adds zero to.
    @functools.cache
    def moved():
        again = (
            train(folder, cls, config, data, ours=False, rounding=Rounded(seed, in_place=False), **options)[0]
            for seed in range(SEEDS)
        )
        return [dict(trainer.model.named_parameters()) for trainer in again]

    for name, parameter in ours.model.named_parameters():
        assert_as_close(parameter, plain[name], exact[name], name, lambda name=name: [m[name] for m in moved()])
    for name in ("loss", "grad_norm"):
        assert curves(ours, name) == pytest.approx(curves(truth, name), rel=1e-4, abs=1e-5), name
        assert curves(ours, name)
    report = callback.report()
    assert report.ran[OP] >= COMMON["max_steps"]
    assert not [declined for declined in report.declined if declined.op == OP]
    return savings(callback)


def test_sft(tmp_path):
    found = assert_same_training(tmp_path, SFTTrainer, SFTConfig, {"text": texts(24, 1)})
    assert found.live < 0.6 * found.positions
    assert found.computed == found.live


def test_sft_of_completions_alone_behind_a_system_prompt(tmp_path):
    data = {"prompt": [SYSTEM * 2 + p for p in PROMPTS], "completion": texts(24, 2)}
    found = assert_same_training(
        tmp_path, SFTTrainer, SFTConfig, data, completion_only_loss=True, gradient_accumulation_steps=2
    )
    assert found.live < 0.8 * found.positions
    assert found.computed < 0.7 * found.live


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sft_of_a_model_with_a_sliding_window(tmp_path, family):
    found = assert_same_training(
        tmp_path, SFTTrainer, SFTConfig, {"text": texts(24, 3)}, family=family, model={"sliding_window": 7}
    )
    assert found.live < 0.6 * found.positions


def test_sft_of_experts_with_the_auxiliary_loss_that_trl_adds_by_itself(tmp_path):
    model = {"output_router_logits": False, "router_aux_loss_coef": 0.1}
    found = assert_same_training(
        tmp_path, SFTTrainer, SFTConfig, {"text": texts(24, 8)}, family="qwen3-moe", model=model
    )
    assert found.live < 0.6 * found.positions


def preferences():
    return {"prompt": [SYSTEM + p for p in PROMPTS], "chosen": texts(24, 4), "rejected": texts(24, 5)}


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "ipo"}, {"gradient_checkpointing": True}, {"precompute_ref_log_probs": True}], ids=str
)
def test_dpo_computes_the_prompt_of_both_answers_once(tmp_path, options):
    found = assert_same_training(tmp_path, DPOTrainer, DPOConfig, preferences(), **options)
    assert found.live < 0.8 * found.positions
    assert found.computed < 0.8 * found.live


def test_kto(tmp_path):
    data = {"prompt": PROMPTS, "completion": texts(24, 6), "label": [i % 3 != 0 for i in range(24)]}
    found = assert_same_training(tmp_path, KTOTrainer, KTOConfig, data)
    assert found.live < 0.7 * found.positions


def test_reward_model(tmp_path):
    found = assert_same_training(tmp_path, RewardTrainer, RewardConfig, preferences())
    assert found.live < 0.8 * found.positions
    assert found.computed < 0.9 * found.live


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "num_iterations": 2}, {"gradient_checkpointing": True}], ids=str)
def test_rloo(tmp_path, options):
    found = assert_same_training(
        tmp_path, with_made_up(RLOOTrainer), RLOOConfig, {"prompt": [SYSTEM + p for p in PROMPTS]},
        extra={"reward_funcs": reward}, **ROLLOUTS, **options,
    )  # fmt: skip
    assert found.live < 0.8 * found.positions
    assert found.computed < 0.7 * found.live


def assert_same_grpo(tmp_path, **options):
    extra = {"reward_funcs": reward, **options.pop("extra", {})}
    found = assert_same_training(
        tmp_path, with_made_up(GRPOTrainer), GRPOConfig, {"prompt": [SYSTEM + p for p in PROMPTS]},
        extra=extra, **ROLLOUTS, **options,
    )  # fmt: skip
    assert found.live < 0.8 * found.positions
    assert found.computed < 0.7 * found.live


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_grpo(tmp_path, loss_type):
    # Two passes over each generation batch, so that old log-probabilities are scored without a gradient.
    assert_same_grpo(tmp_path, loss_type=loss_type, num_iterations=2)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": True},
        {"temperature": 0.7},
        {"gradient_checkpointing": True, "beta": 0.1},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"entropy_coef": 0.1},
        {"top_entropy_quantile": 0.5},
        {"mask_truncated_completions": True},
        {"cast_lm_head_to_fp32": True},  # a hook of TRL's on the embedding
    ],
    ids=str,
)
def test_grpo_options(tmp_path, options):
    assert_same_grpo(tmp_path, **options)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "beta": 0.1}], ids=str)
def test_grpo_with_adapters(tmp_path, options):
    lora = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
    assert_same_grpo(tmp_path, extra={"peft_config": lora}, **options)
