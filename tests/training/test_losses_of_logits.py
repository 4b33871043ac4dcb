"""TRL's trainers whose losses take log-probabilities from whole logits: CPO, ORPO, TPO, A2PO, SDFT and SDPO.

Their logits are formed, as without the kernels: losses and parameters are the same, and the report says which function
the logits were given to, and what would have been fused in its place.
"""

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from npu_trainer_kernels import NpuKernelsCallback
from tests.models import small_model
from tests.training import test_distillation
from tests.training.test_distillation import compare, served
from tests.training.test_gkd import tokens

PROMPTS = ["12", "345", "6", "78901"] * 4
CHOSEN = {"prompt": PROMPTS, "chosen": ["45", "4545", "454", "4"] * 4, "rejected": ["7", "77", "8", "88"] * 4}
SHORT = {"max_completion_length": 6}


def rewards(completions, **_):
    return [1.0 + len(c) for c in completions]


# The trainer, its configuration, its options and data, what else it takes, and the function that is given the logits.
TRAINERS = {
    "cpo": (CPOTrainer, CPOConfig, {"max_length": 32}, CHOSEN, {}, "gather"),
    "orpo": (ORPOTrainer, ORPOConfig, {"max_length": 32}, CHOSEN, {}, "gather"),
    "tpo": (TPOTrainer, TPOConfig, {"max_length": 32}, {**CHOSEN, "reference": ["9", "99", "98", "97"] * 4}, {},
            "gather"),
    "a2po": (A2POTrainer, A2POConfig, {**SHORT, "num_value_samples": 2, "filter_all_incorrect": False},
             {"prompt": PROMPTS}, {"reward_funcs": [rewards]}, "gather"),
    "sdft": (SDFTTrainer, SDFTConfig, {**SHORT, "num_generations": 1},
             {"prompt": PROMPTS, "privileged_context": ["1", "22", "333", "4"] * 4}, {}, "logsumexp"),
    "sdpo": (SDPOTrainer, SDPOConfig, {**SHORT, "num_generations": 4}, {"prompt": PROMPTS},
             {"reward_funcs": [rewards]}, "gather"),
}  # fmt: skip


def trained(folder, name, callbacks):
    cls, config, options, data, more, _ = TRAINERS[name]
    words = tokens()
    words.padding_side = "left"
    for each in (small_model("qwen3"), words):
        each.save_pretrained(folder / "model")  # SDPO loads its teacher by name
    arguments = config(
        str(folder), per_device_train_batch_size=4, max_steps=2, report_to="none", logging_steps=1, use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    made = cls(
        Qwen3ForCausalLM.from_pretrained(folder / "model"), args=arguments, train_dataset=Dataset.from_dict(data),
        processing_class=words, callbacks=callbacks, **more,
    )  # fmt: skip
    made.train()
    return made


@pytest.mark.parametrize("name", TRAINERS)
def test_whole_logits(tmp_path, monkeypatch, name):
    # docs/padding.md: means of logits over all positions, which no loss has.
    monkeypatch.setattr(test_distillation, "NOT_COMPARED", (*test_distillation.NOT_COMPARED, "logits/"))
    stock, ours = trained(tmp_path, name, []), trained(tmp_path, name, [NpuKernelsCallback(audit="off")])
    assert stock.state.log_history[0]["grad_norm"] > 1e-4
    compare(stock, ours)
    (line,) = (each for each in str(served(ours)).splitlines() if "logits that were given to" in each)
    assert line.startswith("  linear_cross_entropy, 2 calls of Linear: ")
    assert f"logits that were given to torch.{TRAINERS[name][-1]}; " in line
    assert 'what is fused: torch.nn.functional.cross_entropy(rows, ids, reduction="none"), which is -log p' in line
