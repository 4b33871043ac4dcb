"""TRL's DistillationTrainer, option by option, with its own divergence and with `ops.linear_divergence`.

For every case the losses, the logged metrics and the parameters must agree, each step's loss must have been computed by
the op, and the trainer must be as it was when training has ended.
"""

import copy
import math
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer
from trl import DistillationConfig, DistillationTrainer, DPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.gkd import GKDTrainer
from trl.trainer import distillation_trainer

from npu_trainer_kernels import NpuKernelsCallback, callback
from npu_trainer_kernels.training import distillation
from tests.models import small_model
from tests.patching.test_padding import live_and_distinct, progress
from tests.training.test_grpo import difference, tokenizer

NOT_COMPARED = ("_seconds", "time", "runtime", "per_second", "peak_memory", "num_tokens")
TEACHERS = {"llama": {"hidden_size": 48, "intermediate_size": 40}, "gemma2": {"final_logit_softcapping": 5.0},
            "cohere": {"logit_scale": 0.25}}  # fmt: skip


class Given(DistillationTrainer):
    """Its rollouts are given: completions of different lengths."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [[4 + (i * 7 + j * 3) % 12 for j in range(1 + i % 4)] for i in range(len(prompt_ids))]


def trained(folder, callbacks, *, student="qwen3", teacher="llama", steps=2, trainer=Given,
            prompts=("12", "345", "6", "78901"), **options):  # fmt: skip
    """A trained DistillationTrainer."""
    lora = options.pop("lora", None)
    models = small_model(student), small_model(teacher, **TEACHERS.get(teacher, {}))
    with torch.no_grad():
        for model in models:
            model.get_output_embeddings().weight.mul_(20)  # distributions that differ
    arguments = DistillationConfig(
        str(folder), per_device_train_batch_size=4, max_steps=steps, max_completion_length=6, report_to="none",
        logging_steps=1, use_cpu=True, bf16=options.pop("bf16", False), save_strategy="no", learning_rate=1.0,
        optim="sgd",  # Adam divides by the gradient: rounding of one near zero would become a whole step
        disable_tqdm=True, **options,
    )  # fmt: skip
    made = trainer(
        *models, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [*prompts] * 4}), processing_class=tokenizer(),
        callbacks=callbacks, peft_config=lora,
    )  # fmt: skip
    made.train()
    assert "_compute_loss" not in vars(made)
    return made


def served(trainer):
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, NpuKernelsCallback))
    return callback.report()


def compare(stock, ours):
    assert difference(stock.model, ours.model) < 1e-5
    for before, after in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for name, value in before.items():
            if not any(part in name for part in NOT_COMPARED) and isinstance(value, float):
                assert after[name] == pytest.approx(value, rel=2e-3, abs=1e-7, nan_ok=True), name


CASES = {
    "forward KL": {"beta": 0.0},
    "Jensen-Shannon": {"beta": 0.5},
    "beta of a quarter": {"beta": 0.25, "temperature": 1.5},
    "reverse KL": {"beta": 1.0},
    "a temperature": {"beta": 1.0, "temperature": 2.5},
    "micro-batches": {"beta": 0.5, "gradient_accumulation_steps": 2},
    "a softcap": {"beta": 0.5, "teacher": "gemma2"},
    "scaled logits": {"beta": 0.5, "student": "cohere", "teacher": "cohere"},
    "tied heads": {"beta": 0.5, "student": "gemma2", "teacher": "gemma2"},
    "checkpointed": {"beta": 0.5, "gradient_checkpointing": True},
    "an adapter": {"beta": 0.5, "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_as_trls(tmp_path, case):
    stock = trained(tmp_path / "stock", [], **copy.deepcopy(CASES[case]))
    ours = trained(tmp_path / "ours", [NpuKernelsCallback(audit="off")], **copy.deepcopy(CASES[case]))
    assert stock.state.log_history[0]["grad_norm"] > 1e-3
    assert stock.state.log_history[0]["loss"] > 1e-5
    compare(stock, ours)
    assert served(ours).ran["linear_divergence"] == 2 * CASES[case].get("gradient_accumulation_steps", 1)
    assert not [each for each in served(ours).declined if each.op == "linear_divergence"]


def test_the_report_speaks_of_what_runs(tmp_path):
    ours = trained(tmp_path, [NpuKernelsCallback()], beta=0.5)
    text = str(served(ours))
    assert "linear_divergence  torch: Given; 2 calls" in text
    assert "linear_logprob" not in text.replace("linear_logprob, linear_cross_entropy", "")
    assert served(ours).unused.keys() == {"linear_logprob", "linear_cross_entropy"}
    # The teacher's body is served as well, and leaves padding out.
    assert "teacher_model (LlamaForCausalLM)" in text
    assert served(ours).ran["varlen_attention"] == 2


BEGUN = [f"3456789+{i}=" for i in range(4)]
ALIKE = {
    "a prompt that is there again": (["3456789+12", "12", "3456789+12", "3456789+12"], 1),
    "prompts that begin alike": ([*BEGUN[:3], "9876543+12"], 1),
    "micro-batches": ([*BEGUN, *(f"9876543={i}" for i in range(4))], 2),
    "nothing in common": (["1", "23", "456", "7890"], 1),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_prompts_have_in_common_is_computed_once_in_both(tmp_path, case):
    """TRL generates one completion for a prompt, but prompts of a batch may begin alike, and one may be there again."""
    prompts, micro = ALIKE[case]
    seen = {}

    class Seen(Given):
        def _get_last_hidden_state(self, model, ids, mask, *args, **kwargs):
            seen.setdefault(model, []).append({"input_ids": ids, "attention_mask": mask})
            return super()._get_last_hidden_state(model, ids, mask, *args, **kwargs)

    options = {"beta": 0.5, "prompts": prompts, "gradient_accumulation_steps": micro, "shuffle_dataset": False}
    stock = trained(tmp_path / "stock", [], **options)
    ours = trained(tmp_path / "ours", [NpuKernelsCallback(audit="off")], trainer=Seen, **options)
    compare(stock, ours)
    (teacher,) = served(ours).beside.values()
    assert seen.keys() == {ours.model, ours.teacher_model}
    for model, report in ((ours.model, served(ours)), (ours.teacher_model, teacher)):
        counts = [live_and_distinct(batch) for batch in seen[model]]
        assert len(counts) == 2 * micro
        live, distinct = map(sum, zip(*counts, strict=True))
        saved = progress(report)
        assert (saved.live, saved.computed) == (live, distinct)
        assert (distinct < live) == (case != "nothing in common")


def test_the_first_batch_is_compared(tmp_path, monkeypatch):
    original = distillation.linear_divergence

    def wrong(*args, **kwargs):
        return original(*args, **{**kwargs, "temperature": 1.1})

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found = served(trained(tmp_path / "fine", [NpuKernelsCallback()], beta=0.5))
    assert found.ran["linear_divergence"] == 2
    monkeypatch.setattr(distillation, "linear_divergence", wrong)
    with pytest.warns(UserWarning, match="linear_divergence in Given differs"):
        ours = trained(tmp_path / "ours", [NpuKernelsCallback()], beta=0.5)
    assert served(ours).ran["linear_divergence"] == 0
    compare(trained(tmp_path / "stock", [], beta=0.5), ours)


FAULTS = {
    "a temperature without its factor": {"temperature": 1.0},
    "beta on the wrong side": {"beta": 0.75},
    "padding counted": {"mask": None},
    "the other model's scale": {"teacher_logit_scale": 2.0},
}


@pytest.mark.parametrize("fault", [*FAULTS, "the teacher shifted by one"])
def test_faults(tmp_path, monkeypatch, fault):
    options = {"beta": 0.25, "temperature": 0.7}
    original = distillation.linear_divergence

    def faulty(x, weight, teacher_x, *args, **kwargs):
        if fault not in FAULTS:
            teacher_x = teacher_x.roll(1, 1)
        return original(x, weight, teacher_x, *args, **{**kwargs, **FAULTS.get(fault, {})})

    stock = trained(tmp_path / "stock", [], **options)
    monkeypatch.setattr(distillation, "linear_divergence", faulty)
    ours = trained(tmp_path / "ours", [NpuKernelsCallback(audit="off")], **options)
    with pytest.raises(AssertionError):
        compare(stock, ours)


def test_a_loss_of_ones_own_is_left_alone(tmp_path):
    class Own(Given):
        def _compute_loss(self, *args, **kwargs):
            loss, *rest = super()._compute_loss(*args, **kwargs)
            return (2 * loss, *rest)

    ours = trained(tmp_path, [NpuKernelsCallback()], beta=0.5, trainer=Own)
    assert "note: Own has a _compute_loss of its own: the op linear_divergence is not used" in str(served(ours))
    assert "linear_divergence" not in served(ours).ran


def test_another_version_of_trl_is_left_alone(tmp_path, monkeypatch):
    original = distillation_trainer._chunked_divergence_loss
    monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", lambda *a, **k: original(*a, **k))
    ours = trained(tmp_path, [NpuKernelsCallback()], beta=0.5)
    assert "computes the divergence of DistillationTrainer in another way" in str(served(ours))


def test_ops_that_leave_heads_out(tmp_path):
    ours = trained(tmp_path, [NpuKernelsCallback(ops=["rms_norm"])], beta=0.5)
    assert "linear_divergence" not in served(ours).ran


def test_values_that_the_op_does_not_take(tmp_path):
    ours = trained(tmp_path / "a", [NpuKernelsCallback(audit="off")], beta=0.5, steps=1)
    loss = ours.state.log_history[0]["loss"]
    assert math.isfinite(loss)
    site = distillation.Site("linear_divergence", DistillationTrainer, (), None)
    x, weight = torch.randn(1, 3, 8, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64)
    ones = torch.ones(1, 3)
    found = distillation._divergence_loss(
        site, distillation_trainer._chunked_divergence_loss, x, x + 1, weight, weight, ones, 0.5
    )
    expected = distillation_trainer._chunked_divergence_loss(x, x + 1, weight, weight, ones, 0.5)
    assert torch.equal(found[0], expected[0])
    assert site.declined == {"float64 values": 1}


class OwnSFT(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("trainer", "other"),
    [(SFTTrainer, None), (DPOTrainer, None), (KTOTrainer, None), (RLOOTrainer, None), (OwnSFT, None), (Trainer, None),
     (GKDTrainer, "GKDTrainer")],
)  # fmt: skip
def test_whose_loss_is_not_made_of_trls_head(trainer, other):
    """A report must not say that a head is used which no loss asks for."""
    found = callback._loss_without_head(object.__new__(trainer))
    assert (None if found is None else found.__name__) == other
    unused = callback._unused_head(small_model("qwen3"), object.__new__(trainer))
    if other is not None:
        assert unused == {"linear_logprob": "the loss of GKDTrainer is not made of TRL's head"}
