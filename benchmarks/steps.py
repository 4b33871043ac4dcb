"""The trainers whose steps `endtoend.py` times: model and data of a workload, put together as a user does it.

Every batch is counted on its way into a step: how many positions it has, and how many of them are tokens.
"""

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from .lengths import lengths, prompt_lengths
from .models import MODELS, build_model
from .step_cases import StepVariant, StepWorkload
from .step_clock import Clock

__all__ = [
    "PACKING_OP", "TRAINERS", "Positions", "build_trainer", "kernels_of", "patch_with_liger", "ran", "sharing_from",
]  # fmt: skip

# The op that leaves padding out, and stores once what rows begin with alike.
PACKING_OP = "varlen_attention"


@dataclass
class Positions:
    """What went into the steps: positions, and those of them that are tokens and no padding."""

    live: int = 0
    all: int = 0
    batches: int = 0

    def count(self, *masks: Any) -> None:
        """A batch, by its masks, which may be of different widths."""
        self.batches += 1
        self.all += sum(mask.numel() for mask in masks)
        self.live += sum(int(mask.sum()) for mask in masks)

    def counted(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, whose batches are counted."""

        def call(features: Any) -> Any:
            batch = collate(features)
            mask = batch.get("attention_mask")
            self.count(batch["input_ids"].new_ones(batch["input_ids"].shape) if mask is None else mask)
            return batch

        return call


def _clock_callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class ClockCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    return ClockCallback()


def _tokenizer() -> Any:
    """Reads digits: a prompt of n characters is n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate("0123456789")}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _arguments(variant: StepVariant, batch: int, steps: int, folder: str) -> dict[str, Any]:
    import torch

    from npu_trainer_kernels import device as devices

    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": batch,
        "learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_first_step": True, "logging_steps": steps,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1, "torch_compile": variant.compiled,
        "use_cpu": devices.accelerator() == "cpu" or not torch.accelerator.is_available(),
    }  # fmt: skip


def _random_ids(workload: StepWorkload, count: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """Sequences as long as the workload says. Ranks share the quantiles of the lengths out."""
    import torch

    vocab, drawn = MODELS[workload.size][1]["vocab_size"], torch.Generator().manual_seed(2 + rank)
    if not workload.lengths:
        return torch.randint(3, vocab, (count, workload.length), generator=drawn).tolist()
    found = lengths(workload.lengths, count * ranks, workload.length)[rank::ranks]
    return [torch.randint(3, vocab, (length,), generator=drawn).tolist() for length in found]


def patch_with_liger(model: Any, own_head: bool) -> None:
    """Liger's layers, and with `own_head` its loss.

    Raises:
        ImportError: it is not installed.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # TRL's own fused head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=own_head, cross_entropy=False)


def sharing_from(share: float) -> Any:
    """A patch of the share of its tokens that a batch has to save for its beginnings to be shared."""
    layout = importlib.import_module("npu_trainer_kernels.patching.body.layout")
    return mock.patch.object(layout, "MIN_SAVED", share)


def _model_of_unsloth(workload: StepWorkload, folder: str) -> Any:
    """The model as Unsloth loads it: from a folder, by a function that has changed TRL's trainers before.

    Raises:
        ImportError: Unsloth is not installed.
        RuntimeError: it does not serve packed rows.
    """
    import torch

    # It writes code there, by default into the current folder.
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(Path(folder) / "unsloth")
    from unsloth import FastLanguageModel

    saved = str(Path(folder) / "model")
    length = workload.prompt + workload.length
    build_model(workload.size, None, length).save_pretrained(saved)
    _tokenizer().save_pretrained(saved)
    model = FastLanguageModel.from_pretrained(
        saved, max_seq_length=length, dtype=getattr(torch, MODELS[workload.size][2]), load_in_4bit=False,
        full_finetuning=not workload.lora, local_files_only=True,
    )[0]  # fmt: skip
    if workload.lora:
        return FastLanguageModel.get_peft_model(model, r=workload.lora, lora_alpha=2 * workload.lora)
    # A whole model runs transformers' layers there. Its GRPO packs the rows, but only its SFT puts the attention in
    # that knows them: without it they are attended to under a mask of all tokens by all tokens.
    packed = importlib.import_module("unsloth.utils.hf_packed_attention")
    if not packed.enable_hf_packed_attention():
        raise RuntimeError("Unsloth does not put its attention for packed rows in")
    return model


def kernels_of(variant: StepVariant) -> Any:
    """The package's options of a variant."""
    import torch

    from npu_trainer_kernels import NpuKernelsArguments, backends
    from npu_trainer_kernels import device as devices
    from npu_trainer_kernels.patching import PATCHES

    if not variant.is_ours:
        return NpuKernelsArguments()
    if not variant.shares:
        # Nothing saves more than all tokens. For good: this process trains nothing else.
        sharing_from(2.0).start()
    if variant.packs:
        return NpuKernelsArguments(use_npu_kernels=True, **dict(variant.options))
    # What is asked for by name is used even where a model had better keep its own code: so not all of the others.
    device = torch.device(devices.accelerator())
    ops = [op for op in PATCHES if op != PACKING_OP and backends.keeps_plain(op, device) is None]
    return NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=ops)


def ran(trainer: Any) -> dict[str, int]:
    """How often each of our ops ran in a trainer's model; with Unsloth, how its attention served packed rows."""
    from npu_trainer_kernels import NpuKernelsCallback

    packed = sys.modules.get("unsloth.utils.hf_packed_attention")
    if packed is not None:
        return dict(packed.HF_PACKED_ATTENTION_STATS)
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, NpuKernelsCallback)]
    return {op: calls for callback in ours for op, calls in callback.report().ran.items()}


def _adapter(workload: StepWorkload) -> Any:
    """What TRL's trainers put around the model, or None."""
    if not workload.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=workload.lora, lora_alpha=2 * workload.lora, target_modules="all-linear", task_type="CAUSAL_LM")


def _sft_trainer(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], seen: Positions
) -> Any:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, default_data_collator

    rows = _random_ids(workload, workload.batch * arguments["max_steps"])
    data: Any = [{"input_ids": ids, "labels": ids} for ids in rows]
    collate = DataCollatorForSeq2Seq(_tokenizer()) if workload.lengths else default_data_collator
    settings = TrainingArguments(**arguments, gradient_checkpointing=workload.checkpointing)
    return Trainer(
        model, settings, train_dataset=data, data_collator=seen.counted(collate),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip


def _sft_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], seen: Positions
) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": _random_ids(workload, workload.batch * arguments["max_steps"])})
    settings = SFTConfig(**arguments, max_length=workload.length, bf16=False, gradient_checkpointing=False)
    trainer = SFTTrainer(
        model, settings, train_dataset=data, processing_class=_tokenizer(), peft_config=_adapter(workload),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    trainer.data_collator = seen.counted(trainer.data_collator)
    return trainer


def _prompts(workload: StepWorkload) -> list[str]:
    """Different prompts, in the order in which batches take them."""
    if not workload.lengths:
        return ["0123456789"[i % 10] * workload.prompt for i in range(16)] * 8
    in_batch = max(1, workload.batch // workload.group)
    found = prompt_lengths(in_batch, workload.prompt)
    return ["0123456789"[i % 10] * found[i % in_batch] for i in range(128)]


def _grpo_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], seen: Positions
) -> Any:
    import trl
    from datasets import Dataset

    import npu_trainer_kernels

    base: Any = npu_trainer_kernels.GRPOTrainer if variant.is_ours else trl.GRPOTrainer
    in_16_bits = MODELS[workload.size][2] == "bfloat16"
    settings = trl.GRPOConfig(
        **arguments, num_generations=min(workload.group, workload.batch), max_completion_length=workload.length,
        bf16=in_16_bits, gradient_checkpointing=in_16_bits,
        # Prompts of a batch differ in length only if they come in their order.
        shuffle_dataset=not workload.lengths,
    )  # fmt: skip
    completions = _random_ids(workload, workload.batch, settings.process_index, settings.world_size)

    class GivenRollouts(base):
        """Generation returns fixed ids."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return completions[: len(prompt_ids)], None

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    options = {"npu_kernels": kernels_of(variant)} if variant.is_ours else {}
    trainer = GivenRollouts(
        model, reward_funcs=reward, args=settings, train_dataset=Dataset.from_dict({"prompt": _prompts(workload)}),
        processing_class=_tokenizer(), callbacks=[_clock_callback(clock)],
        # Unsloth has put its own in.
        peft_config=None if variant.package == "unsloth" else _adapter(workload), **options,
    )  # fmt: skip
    prepare = trainer._prepare_inputs

    # It wraps TRL's: a trainer with a preparation of its own keeps its rows as they come.
    @functools.wraps(prepare)
    def prepared(generation_batch: Any) -> Any:
        with clock.prepare():
            inputs = prepare(generation_batch)
            seen.count(inputs["prompt_mask"], inputs["completion_mask"])
            # Otherwise a step would begin with waiting for what the other ranks have left to prepare.
            trainer.accelerator.wait_for_everyone()
        return inputs

    # What the kernels do to arrange rows is done around this, and is timed.
    trainer._prepare_inputs = prepared
    return trainer


def _preferences(workload: StepWorkload, count: int) -> list[dict[str, list[int]]]:
    """Pairs of random ids, each completion of a length of its own."""
    import torch

    drawn = torch.Generator().manual_seed(2)
    vocab = MODELS[workload.size][1]["vocab_size"]

    def ids(length: int) -> list[int]:
        return torch.randint(3, vocab, (length,), generator=drawn).tolist()

    found = torch.randint(workload.least, workload.length + 1, (count, 2), generator=drawn).tolist()
    return [
        {"prompt_ids": ids(workload.prompt), "chosen_ids": ids(chosen), "rejected_ids": ids(rejected)}
        for chosen, rejected in found
    ]


def _dpo_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], seen: Positions
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class GivenIds(DPOTrainer):
        """The data are ids already, of the whole vocabulary."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    # Liger's layers are copied with the model. TRL's own `use_liger_kernel` would put them into the policy alone.
    reference = copy.deepcopy(model)
    pairs = _preferences(workload, workload.batch * arguments["max_steps"])
    settings = DPOConfig(**arguments, bf16=False, gradient_checkpointing=False)
    trainer = GivenIds(
        model, reference, args=settings, train_dataset=Dataset.from_list(pairs), processing_class=_tokenizer(),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    trainer.data_collator = seen.counted(trainer.data_collator)
    return trainer


TRAINERS = {"sft-trainer": _sft_trainer, "sft-trl": _sft_trl, "grpo-trl": _grpo_trl, "dpo-trl": _dpo_trl}


def build_trainer(
    workload: StepWorkload, variant: StepVariant, steps: int, folder: str, clock: Clock, **options: Any
) -> tuple[Any, Positions]:
    """A trainer that is ready to train, and what will count its batches.

    Args:
        workload: model and data.
        variant: how the step is run.
        steps: of the training.
        folder: for the trainer's output.
        clock: is told when steps end.
        options: of the trainer's arguments, those that differ.

    Raises:
        ImportError: the variant's package is not installed.
    """
    if variant.package == "unsloth":
        model = _model_of_unsloth(workload, folder)
        # Its own defaults are two micro-batches a step and an optimiser in 8 bits.
        options = {"gradient_accumulation_steps": 1, "optim": "adamw_torch_fused", **options}
    else:
        model = build_model(workload.size, variant.attention, workload.prompt + workload.length)
    seen = Positions()
    if variant.package == "liger-kernel":
        patch_with_liger(model, own_head=workload.name == "sft-trainer")
    arguments = {**_arguments(variant, workload.batch, steps, folder), **options}
    return TRAINERS[workload.name](workload, variant, model, clock, arguments, seen), seen
