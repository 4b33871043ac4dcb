"""Our GRPOTrainer beside TRL's on the same rollouts: parameters, metrics, undo."""

import re

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments
from npu_trainer_kernels.patching.classes import original_class
from npu_trainer_kernels.verify import on_one_device
from tests.models import small_model


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {c: i + 4 for i, c in enumerate("0123456789+=")}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def reward(completion_ids, **kwargs):
    """Deterministic in the ids, and different within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(cls, tmp_path, model=None, family="qwen3", extra=None, resume=None, **arguments):
    """A trained trainer. The model is one of `family`, from disk, unless given; `extra`: further arguments of the
    trainer; `resume`: a checkpoint to go on from."""
    defaults = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 7,
        "logging_steps": 1,
        # Adam divides by the gradient: rounding of a gradient near zero would become a whole step.
        "optim": "sgd",
        "learning_rate": 1e-1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    kernels = arguments.pop("npu_kernels", None)
    extra = {**(extra or {}), **({} if kernels is None else {"npu_kernels": kernels})}
    if model is None:
        # From disk: with beta > 0 TRL loads the reference model from where the model came from.
        small_model(family).save_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = cls(
        model,
        reward_funcs=reward,
        args=on_one_device(GRPOConfig(**{**defaults, **arguments})),
        train_dataset=Dataset.from_dict({"prompt": ["1+2=", "3+44=", "5+6=", "71+8="] * 4}),
        processing_class=tokenizer(),
        **extra,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def difference(a, b) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.1}, {"loss_type": "grpo", "gradient_accumulation_steps": 2}, {"temperature": 0.7}],
    ids=str,
)
def test_same_parameters_and_metrics_as_trl(tmp_path, options):
    torch.manual_seed(0)
    stock = train(TrlGRPOTrainer, tmp_path, **options)
    torch.manual_seed(0)
    ours = train(GRPOTrainer, tmp_path, **options)
    assert difference(stock.model, small_model("qwen3")) > 1e-3
    assert difference(stock.model, ours.model) < 1e-5
    for before, after in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for name in ("loss", "reward", "entropy", "kl", "grad_norm"):
            if name in before:
                assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), name


def test_patched_while_training_and_restored_after(tmp_path, capsys):
    import trl.trainer.utils as trl_utils

    before = dict(vars(trl_utils))
    trainer = train(GRPOTrainer, tmp_path)
    assert {"rms_norm", "linear_logprob"} <= {r.op for r in trainer.npu_kernels_report().replaced}
    # What is said of the other head is not for this trainer.
    printed = capsys.readouterr().out
    assert re.search(r"^  linear_logprob +torch: Qwen3ForCausalLM$", printed, re.MULTILINE)
    assert "linear_cross_entropy" not in printed
    assert "logits of width 0" not in printed
    whole = 'npu_kernels=NpuKernelsArguments(use_npu_kernels=True, npu_kernels_report="full")'
    assert f"\n(in full: {whole})\n" in printed
    assert original_class(trainer.model.model.norm) is type(trainer.model.model.norm)
    assert vars(trl_utils) == before


def test_kernels_serve_trls_head(tmp_path, monkeypatch):
    """The parity above would hold as well if the seam were never used."""
    from npu_trainer_kernels.patching.head import trl_seam

    rows = []
    original = trl_seam.planned_linear_logprob

    def spy(hidden, *args, **kwargs):
        rows.append(hidden.shape[0])
        return original(hidden, *args, **kwargs)

    monkeypatch.setattr(trl_seam, "planned_linear_logprob", spy)
    train(GRPOTrainer, tmp_path)
    assert rows
    # Prompt and padding rows are left out before the projection: 8 completions of at most 7 tokens remain.
    assert max(rows) <= 8 * 7


def test_off_is_trls_own(tmp_path):
    trainer = train(GRPOTrainer, tmp_path, npu_kernels=NpuKernelsArguments(use_npu_kernels=False))
    assert not trainer.npu_kernels_report().replaced


def test_an_exception_restores_the_model(tmp_path):
    import trl.trainer.utils as trl_utils

    before = dict(vars(trl_utils))
    model = small_model("qwen3")

    def broken(**kwargs):
        raise RuntimeError("planted")

    import tests.training.test_grpo as here

    saved, here.reward = here.reward, broken
    try:
        with pytest.raises(RuntimeError, match="planted"):
            train(GRPOTrainer, tmp_path, model)
    finally:
        here.reward = saved
    assert original_class(model.model.norm) is type(model.model.norm)
    assert vars(trl_utils) == before
