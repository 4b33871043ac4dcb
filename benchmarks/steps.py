"""Builds the trainers whose steps `endtoend.py` times, as a user would, with the model and data of a workload.

Each step has the batch that `draws.py` draws for its number. The positions of every batch, and the tokens among them,
are counted before the step.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from . import flash
from .draws import Draws
from .models import MODELS, build_model
from .step_cases import StepVariant, StepWorkload
from .step_clock import Clock

__all__ = [
    "PACKING_OP", "TRAINERS", "Positions", "bodies_replayed", "build_trainer", "captured", "kernels_of",
    "patch_with_liger", "ran", "reports_of", "sharing_from",
]  # fmt: skip

# The op that skips padding and computes common prefixes once.
PACKING_OP = "varlen_attention"
# The steps between two entries of the Trainer's log, of which one is after the first step.
LOGGED = 10


@dataclass
class Positions:
    """Counts of the positions of each batch, and of those that are tokens, not padding."""

    live: list[int] = field(default_factory=list)
    all: list[int] = field(default_factory=list)

    def count(self, *masks: Any) -> None:
        """Counts a batch by its masks, which may have different widths."""
        self.all.append(sum(mask.numel() for mask in masks))
        self.live.append(sum(int(mask.sum()) for mask in masks))

    def counted(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a collator that counts its batches."""

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


def _tokenizer(size: str) -> Any:
    """Returns a tokenizer of a model's vocabulary, in which the word of an id is its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>", "<unk>")
    words = [*special, *map(str, range(len(special), MODELS[size][1]["vocab_size"]))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _arguments(variant: StepVariant, batch: int, steps: int, folder: str) -> dict[str, Any]:
    import torch

    from npu_trainer_kernels import device as devices

    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": batch,
        "learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_first_step": True,
        "logging_steps": min(LOGGED, steps), "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1,
        "torch_compile": variant.compiled,
        "use_cpu": devices.accelerator() == "cpu" or not torch.accelerator.is_available(),
    }  # fmt: skip


def patch_with_liger(model: Any, own_head: bool) -> None:
    """Applies Liger's layers to a model, and with `own_head` its loss.

    Raises:
        ImportError: Liger is not installed.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # TRL's own fused head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=own_head, cross_entropy=False)


def sharing_from(share: float) -> Any:
    """Returns a mock patch of the fraction of tokens that sharing has to save to be used."""
    layout = importlib.import_module("npu_trainer_kernels.patching.body.layout")
    return mock.patch.object(layout, "MIN_SAVED", share)


def _model_of_unsloth(workload: StepWorkload, folder: str) -> Any:
    """Returns the model that Unsloth loads from a folder. Importing Unsloth changes TRL's trainers.

    Raises:
        ImportError: Unsloth is not installed.
        RuntimeError: Unsloth does not support packed rows.
    """
    import torch

    # The folder for the code that it writes, by default the current one.
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(Path(folder) / "unsloth")
    from unsloth import FastLanguageModel

    saved = str(Path(folder) / "model")
    length = workload.prompt + workload.length
    build_model(workload.size, None, length).save_pretrained(saved)
    _tokenizer(workload.size).save_pretrained(saved)
    model = FastLanguageModel.from_pretrained(
        saved, max_seq_length=length, dtype=getattr(torch, MODELS[workload.size][2]), load_in_4bit=False,
        full_finetuning=not workload.lora, local_files_only=True,
    )[0]  # fmt: skip
    if workload.lora:
        return FastLanguageModel.get_peft_model(model, r=workload.lora, lora_alpha=2 * workload.lora)
    # Without an adapter Unsloth runs transformers' layers. Its GRPO packs the rows, but only its SFT enables attention
    # for packed rows: without it a mask of all tokens by all tokens is used.
    packed = importlib.import_module("unsloth.utils.hf_packed_attention")
    if not packed.enable_hf_packed_attention():
        raise RuntimeError("Unsloth does not put its attention for packed rows in")
    return model


def kernels_of(variant: StepVariant) -> Any:
    """Returns the package's options for a variant."""
    import torch

    from npu_trainer_kernels import NpuKernelsArguments, backends
    from npu_trainer_kernels import device as devices
    from npu_trainer_kernels.patching import PATCHES

    if not variant.is_ours:
        return NpuKernelsArguments()
    if not variant.shares:
        # No batch saves twice its tokens. The patch stays, since this process trains nothing else.
        sharing_from(2.0).start()
    if variant.packs:
        return NpuKernelsArguments(use_npu_kernels=True, **dict(variant.options))
    # An op that is requested by name is used even if the model's own code is faster, so only some are requested.
    device = torch.device(devices.accelerator())
    ops = [op for op in PATCHES if op != PACKING_OP and backends.keeps_plain(op, device) is None]
    return NpuKernelsArguments(use_npu_kernels=True, npu_kernels_ops=ops)


def ran(trainer: Any) -> dict[str, int]:
    """Returns the calls of each of our ops in a trainer's model; of flash attention in this process, where a variant
    runs by it; with Unsloth, its statistics of packed rows."""
    packed = sys.modules.get("unsloth.utils.hf_packed_attention")
    if packed is not None:
        return dict(packed.HF_PACKED_ATTENTION_STATS)
    if flash.CALLS:
        return dict(flash.CALLS)
    return {op: calls for report in reports_of(trainer) for op, calls in report.ran.items()}


def reports_of(trainer: Any) -> list[Any]:
    """Returns the reports of our callbacks in a trainer."""
    from npu_trainer_kernels import NpuKernelsCallback

    return [c.report() for c in trainer.callback_handler.callbacks if isinstance(c, NpuKernelsCallback)]


def captured(reports: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of a row about graphs by a model's reports: "captured", the counts, if something may be
    captured; and "capture_seconds", the time that capturing took."""
    found = [report.capture.as_dict() for report in reports if report.capture is not None]
    return {"captured": found[0], "capture_seconds": found[0]["seconds"]} if found else {"capture_seconds": 0.0}


def bodies_replayed(logged: Sequence[dict[str, Any]]) -> float | None:
    """Returns the share of the calls of bodies that were replayed, by the entries of a log about the steps after the
    first `LOGGED`, or else by the last entry; None: bodies are not captured."""
    found = [entry["bodies_replayed"] for entry in logged if "bodies_replayed" in entry and entry["step"] > LOGGED]
    found = found or [entry["bodies_replayed"] for entry in logged[-1:] if "bodies_replayed" in entry]
    return fmean(found) if found else None


def _adapter(workload: StepWorkload) -> Any:
    """Returns the adapter for TRL's trainers, or None."""
    if not workload.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=workload.lora, lora_alpha=2 * workload.lora, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class _Run:
    """The batches of a run: `steps` of a workload, the last `typical` of them with typical lengths."""

    workload: StepWorkload
    steps: int
    typical: int
    seen: Positions = field(default_factory=Positions)

    def draws(self) -> Draws:
        """Returns the draws of the batches."""
        return Draws(self.workload, self.steps - self.typical)

    def of_all_ranks(self, settings: Any, draw: Callable[[Draws, int, int], list[Any]]) -> list[Any]:
        """Returns the examples of all steps, as a sampler in order gives them to batches and ranks."""
        draws = self.draws()
        places = itertools.product(range(self.steps), range(settings.world_size))
        return [example for step, rank in places for example in draw(draws, step, rank)]

    def prompts(self, settings: Any) -> Any:
        """Returns a data set with the prompts of all steps, as text."""
        from datasets import Dataset

        prompts = self.of_all_ranks(settings, Draws.prompts)
        return Dataset.from_dict({"prompt": [" ".join(map(str, ids)) for ids in prompts]})


def _in_order(trainer: Any) -> Any:
    """Returns the trainer, whose batches are taken from its data in order."""
    from torch.utils.data import SequentialSampler

    trainer._get_train_sampler = lambda data=None: SequentialSampler(trainer.train_dataset if data is None else data)
    return trainer


def _sft_trainer(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], run: _Run
) -> Any:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, default_data_collator

    collate = DataCollatorForSeq2Seq(_tokenizer(workload.size)) if workload.lengths else default_data_collator
    settings = TrainingArguments(**arguments, gradient_checkpointing=workload.checkpointing)
    data: Any = [{"input_ids": ids, "labels": ids} for ids in run.of_all_ranks(settings, Draws.rows)]
    trainer = Trainer(
        model, settings, train_dataset=data, data_collator=run.seen.counted(collate),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    return _in_order(trainer)


def _sft_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], run: _Run
) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(**arguments, max_length=workload.length, bf16=False, gradient_checkpointing=False)
    data = Dataset.from_dict({"input_ids": run.of_all_ranks(settings, Draws.rows)})
    trainer = SFTTrainer(
        model, settings, train_dataset=data, processing_class=_tokenizer(workload.size),
        peft_config=_adapter(workload), callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    trainer.data_collator = run.seen.counted(trainer.data_collator)
    return _in_order(trainer)


def _grpo_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], run: _Run
) -> Any:
    import trl

    import npu_trainer_kernels

    base: Any = npu_trainer_kernels.GRPOTrainer if variant.is_ours else trl.GRPOTrainer
    in_16_bits = MODELS[workload.size][2] == "bfloat16"
    settings = trl.GRPOConfig(
        **arguments, num_generations=min(workload.group, workload.batch), max_completion_length=workload.length,
        bf16=in_16_bits, gradient_checkpointing=in_16_bits, shuffle_dataset=False,
    )  # fmt: skip
    if workload.float32_weights:
        model = model.float()
    draws = run.draws()

    class GivenRollouts(base):
        """A trainer whose generation returns the ids of the step, unless the workload generates."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if workload.generates:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return draws.rows(self.state.global_step, settings.process_index)[: len(prompt_ids)], None

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    options = {"npu_kernels": kernels_of(variant)} if variant.is_ours else {}
    trainer = GivenRollouts(
        model, reward_funcs=reward, args=settings, train_dataset=run.prompts(settings),
        processing_class=_tokenizer(workload.size), callbacks=[_clock_callback(clock)],
        # Unsloth has added its own adapter.
        peft_config=None if variant.package == "unsloth" else _adapter(workload), **options,
    )  # fmt: skip
    prepare = trainer._prepare_inputs

    # `wraps` marks it as TRL's: our package does not rearrange the rows of a trainer that overrides this method.
    @functools.wraps(prepare)
    def prepared(generation_batch: Any) -> Any:
        with contextlib.nullcontext() if workload.generates else clock.prepare():
            inputs = prepare(generation_batch)
            run.seen.count(inputs["prompt_mask"], inputs["completion_mask"])
            # Otherwise the step would include waiting for the preparation of other ranks.
            trainer.accelerator.wait_for_everyone()
        return inputs

    # The arranging of rows by our package wraps this method, so it is timed.
    trainer._prepare_inputs = prepared
    return trainer


def _dpo_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], run: _Run
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class GivenIds(DPOTrainer):
        """A trainer whose data are ids of the whole vocabulary already."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    # Liger's layers are copied with the model. TRL's own `use_liger_kernel` would apply them only to the policy.
    reference = copy.deepcopy(model)
    settings = DPOConfig(**arguments, bf16=False, gradient_checkpointing=False)
    pairs = Dataset.from_list(run.of_all_ranks(settings, Draws.pairs))
    trainer = GivenIds(
        model, reference, args=settings, train_dataset=pairs, processing_class=_tokenizer(workload.size),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    trainer.data_collator = run.seen.counted(trainer.data_collator)
    return _in_order(trainer)


def _distil_trl(
    workload: StepWorkload, variant: StepVariant, model: Any, clock: Clock, arguments: dict[str, Any], run: _Run
) -> Any:
    from trl import DistillationConfig, DistillationTrainer

    in_16_bits = MODELS[workload.size][2] == "bfloat16"
    settings = DistillationConfig(
        **arguments, max_completion_length=workload.length, bf16=in_16_bits, gradient_checkpointing=in_16_bits,
        shuffle_dataset=False, beta=0.5,
    )  # fmt: skip
    # Two models with equal weights have no divergence.
    teacher = build_model(workload.teacher, variant.attention, workload.prompt + workload.length, seed=1)
    if variant.package == "liger-kernel":
        patch_with_liger(teacher, own_head=False)
    draws = run.draws()

    class GivenCompletions(DistillationTrainer):
        """A trainer whose generation returns the ids of the step."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return draws.rows(self.state.global_step, settings.process_index)[: len(prompt_ids)]

    trainer: Any = GivenCompletions(
        model, teacher, args=settings, train_dataset=run.prompts(settings),
        processing_class=_tokenizer(workload.size), peft_config=_adapter(workload),
        callbacks=[*kernels_of(variant).callbacks(), _clock_callback(clock)],
    )  # fmt: skip
    prepare = trainer._prepare_inputs

    def prepared(generation_batch: Any) -> Any:
        with clock.prepare():
            inputs = prepare(generation_batch)
            run.seen.count(inputs["prompt_mask"], inputs["completion_mask"])
        return inputs

    trainer._prepare_inputs = prepared
    return trainer


TRAINERS = {
    "sft-trainer": _sft_trainer, "sft-trl": _sft_trl, "grpo-trl": _grpo_trl, "dpo-trl": _dpo_trl,
    "distil-trl": _distil_trl,
}  # fmt: skip


def build_trainer(
    workload: StepWorkload,
    variant: StepVariant,
    steps: int,
    folder: str,
    clock: Clock,
    typical: int = 0,
    **options: Any,
) -> tuple[Any, Positions]:
    """Returns a trainer that is ready to train, and the counts of its batches.

    Args:
        workload: the model and the data.
        variant: the way to run a step.
        steps: the number of steps.
        folder: the folder for the trainer's output.
        clock: the clock that records the ends of steps.
        typical: the number of the last steps whose lengths are typical, see `Draws`.
        options: overrides of the trainer's arguments.

    Raises:
        ImportError: the variant's package is not installed.
    """
    if variant.package == "unsloth":
        model = _model_of_unsloth(workload, folder)
        # Unsloth's defaults are two micro-batches per step and an 8-bit optimiser.
        options = {"gradient_accumulation_steps": 1, "optim": "adamw_torch_fused", **options}
    else:
        model = build_model(workload.size, variant.attention, workload.prompt + workload.length)
    run = _Run(workload, steps, typical)
    if variant.package == "liger-kernel":
        patch_with_liger(model, own_head=workload.name == "sft-trainer")
    arguments = {**_arguments(variant, workload.batch, steps, folder), **options}
    return TRAINERS[workload.name](workload, variant, model, clock, arguments, run), run.seen
