"""Trains a variant of a case: makes models and trainers, and replays rollouts."""

import contextlib
import copy
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl import DistillationConfig, DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments, NpuKernelsCallback, device, tiling
from npu_trainer_kernels.verify import Curves, Variant, on_one_device, record
from tests.models import small_model

from . import data
from .cases import Case, Text

__all__ = ["Workshop", "run"]

SEED = 11
# Rows of logits in a chunk. By default these small runs would have one chunk, and the code between chunks would not be
# tested. A prime, so that the last chunk is smaller.
CHUNK_ROWS = 61
ASCEND_CHIP = "Ascend910B4"
# The number of held-out sequences of a real text.
HELD_OUT = 16

COMMON: dict[str, Any] = {
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
    "dataloader_num_workers": 0,
    "seed": SEED,
}
TASK_OPTIONS: dict[str, dict[str, Any]] = {
    # Two micro-batches with different numbers of labels: the loss must be normalised over both.
    "lm": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3},
    "sft": {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_length": 64, "gradient_checkpointing": False},
    "dpo": {"per_device_train_batch_size": 8, "learning_rate": 3e-4, "max_length": 32, "gradient_checkpointing": False},
    # Two passes over each rollout: in the second the importance ratio is not 1. With this learning rate six runs that
    # differ by rounding stay close, although all use the rollouts of one of them; at 3e-4, in bf16, their gradients
    # spike at random steps, and a comparison is meaningless.
    "grpo": {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "num_iterations": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-4,
        "reward_weights": [0.8, 0.2],
        "gradient_checkpointing": False,
    },
    "distillation": {
        "per_device_train_batch_size": 16,
        "max_completion_length": 6,
        "learning_rate": 3e-4,
        "gradient_checkpointing": False,
    },
}
CONFIGS: dict[str, type[TrainingArguments]] = {
    "lm": TrainingArguments, "sft": SFTConfig, "dpo": DPOConfig, "grpo": GRPOConfig,
    "distillation": DistillationConfig,
}  # fmt: skip


@dataclass
class Workshop:
    """The data that the runs of one process share: initial models on disk, recorded rollouts.

    Attributes:
        folder: the folder for models, texts, rollouts and the trainers' outputs; the caller removes it, or keeps it for
            later processes, which then reuse its files.
        device: "cpu", or None for the available accelerator.
        rollouts: case name -> the prompts and results of the reference run's generation calls, in order.
    """

    folder: Path
    device: str | None = None
    rollouts: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    def model_path(self, case: Case) -> Path:
        """Returns the path of the case's initial model, which is made once. For sums it is warmed up, since a model
        that never answers correctly learns nothing."""
        tokenizer = data.tokenizer_for(case.task)
        overrides = {
            "vocab_size": data.BYTES_VOCAB if case.task in data.SUMS else data.TEXT_VOCAB,
            "hidden_size": 64,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            **case.model,
        }
        kind = "sums" if case.task in data.SUMS else "text"
        names = [case.name] if case.is_large else [kind, *(f"{k}={v}" for k, v in sorted(case.model.items()))]
        path = self.folder / "-".join([case.family, *names])
        if not path.exists():
            model = small_model(case.family, SEED, **overrides)
            if case.task in data.SUMS:
                # The warm-up of a large model takes long, so it uses the training device.
                data.warm_up(
                    model.to(self.device or device.accelerator()) if case.is_large else model, tokenizer, case.warm_up
                )
            with _whole(path) as unfinished:
                model.cpu().save_pretrained(unfinished)
        return path

    def sequences(self, text: Text) -> torch.Tensor:
        """Returns real text as ids, which are made once."""
        path = self.folder / f"text-{text.vocabulary}-{text.length}-{text.characters}.pt"
        if not path.exists():
            with _whole(path) as unfinished:
                torch.save(data.sequences(text), unfinished)
        return torch.load(path)

    def held_out(self, case: Case) -> torch.Tensor:
        """Returns the held-out ids of a case."""
        return (data.held_out(case.task) if case.text is None else self.sequences(case.text)[:HELD_OUT])[
            : case.held_out
        ]

    def keep_rollouts(self, case: Case) -> None:
        """Writes the rollouts of the reference run to disk, for other processes."""
        if case.name in self.rollouts:
            with _whole(self._rollouts_of(case)) as unfinished:
                torch.save(self.rollouts[case.name], unfinished)

    def _rollouts_of(self, case: Case) -> Path:
        return self.folder / f"rollouts-{case.name}.pt"

    def _arguments(self, case: Case, variant: Variant) -> Any:
        options = {**COMMON, "seed": SEED + variant.sampling_seed, **TASK_OPTIONS[case.task], **case.options}
        arguments = CONFIGS[case.task](
            output_dir=str(self.folder / "output"),
            max_steps=case.steps,
            bf16=case.precision == "bf16-autocast",
            use_cpu=self.device == "cpu",
            **options,
        )
        return on_one_device(arguments)

    def _backend(self, case: Case) -> str | None:
        if case.backend != "device":
            return case.backend
        # By default some ops on a CPU keep the model's own code; with a backend by name all ops are tested.
        return "torch" if self.device == "cpu" else None

    def trainer(self, case: Case, variant: Variant) -> Trainer:
        """Returns the case's trainer, with the kernels if the variant has them."""
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        path = self.model_path(case)
        backend = self._backend(case)
        kwargs: dict[str, Any] = {
            "model": AutoModelForCausalLM.from_pretrained(path, dtype=dtype),
            "args": self._arguments(case, variant),
        }
        if case.lora:
            kwargs["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = case.steps * kwargs["args"].per_device_train_batch_size * kwargs["args"].gradient_accumulation_steps
        if case.task == "grpo":
            return self._grpo(case, variant, kwargs, backend)
        options: dict[str, Any] = {"backend": backend, "tiled_mlp": case.tiled_mlp, "capture": case.capture}
        kwargs |= {"callbacks": [NpuKernelsCallback(**options)] if variant.patched else []}
        if case.text is not None:
            train = data.of_sequences(self.sequences(case.text)[HELD_OUT:])
            return Trainer(train_dataset=train, data_collator=default_data_collator, **kwargs)
        if case.task == "lm":
            return Trainer(train_dataset=data.lm(rows), data_collator=default_data_collator, **kwargs)
        tokenizer = data.tokenizer_for(case.task)
        if case.task == "sft":
            made = data.ragged_texts if case.ragged else data.texts
            return SFTTrainer(train_dataset=made(min(rows, 400)), processing_class=tokenizer, **kwargs)
        if case.task == "distillation":
            return self._distillation(case, variant, kwargs)
        return DPOTrainer(train_dataset=data.preferences(), processing_class=tokenizer, **kwargs)

    def _grpo(self, case: Case, variant: Variant, kwargs: dict[str, Any], backend: str | None) -> Trainer:
        tokenizer = data.tokenizer_for(case.task)
        kwargs |= {
            "reward_funcs": [data.even, *data.rewards(tokenizer)[1:]] if case.ragged else data.rewards(tokenizer),
            "train_dataset": data.prompts(), "processing_class": tokenizer,
        }  # fmt: skip
        if variant.patched:
            arguments = NpuKernelsArguments(
                use_npu_kernels=True, npu_kernels_backend=backend, npu_kernels_tiled_mlp=case.tiled_mlp,
                npu_kernels_capture=case.capture, npu_kernels_rollouts=case.rollouts,
            )  # fmt: skip
            trainer: Any = GRPOTrainer(npu_kernels=arguments, **kwargs)
        else:
            trainer = trl.GRPOTrainer(**kwargs)
        if case.ragged:
            longest = kwargs["args"].max_completion_length
            trainer._generate_single_turn = lambda ids, *_, **__: (data.made_up(ids, longest, tokenizer), None)
        elif not case.seeds:
            self._replay(case, variant, trainer)
        return trainer

    def _distillation(self, case: Case, variant: Variant, kwargs: dict[str, Any]) -> Trainer:
        tokenizer = data.tokenizer_for(case.task)
        teacher = replace(case, model={**case.model, **case.teacher})
        trainer: Any = trl.DistillationTrainer(
            teacher_model=AutoModelForCausalLM.from_pretrained(self.model_path(teacher), dtype=kwargs["model"].dtype),
            train_dataset=data.prompts(), processing_class=tokenizer, **kwargs,
        )  # fmt: skip
        if case.ragged:
            longest = kwargs["args"].max_completion_length
            trainer._generate_single_turn = lambda ids, *_, **__: data.made_up(ids, longest, tokenizer)
        else:
            self._replay(case, variant, trainer)
        return trainer

    def _replay(self, case: Case, variant: Variant, trainer: Any) -> None:
        """Gives all runs of a case the completions that its reference run generates."""
        is_reference = not variant.patched and variant.noise_seed is None
        if is_reference:
            self.rollouts[case.name] = []
        elif case.name not in self.rollouts:
            self.rollouts[case.name] = torch.load(self._rollouts_of(case), weights_only=False)
        play = _recording if is_reference else _replaying
        trainer._generate_single_turn = play(trainer._generate_single_turn, self.rollouts[case.name])


def _recording(generate: Callable[..., Any], rollouts: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """Wraps generation to record its results. The random state is restored afterwards, since a replay does not advance
    it."""

    def generate_single_turn(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():
            result = generate(prompt_ids, *args, **kwargs)
        rollouts.append((copy.deepcopy(prompt_ids), copy.deepcopy(result)))
        return result

    return generate_single_turn


def _replaying(generate: Callable[..., Any], rollouts: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """Replaces generation by the results of the reference run, in order; sampling again could diverge because of the
    last bit of a probability."""
    left: Iterator[tuple[Any, Any]] = iter(rollouts)

    def generate_single_turn(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        prompts, result = next(left)
        if prompts != prompt_ids:
            raise RuntimeError("the runs of a case were given different prompts: the rollouts cannot be replayed")
        return copy.deepcopy(result)

    return generate_single_turn


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed to `path` at the end; if another process was first, its folder stays."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    yield unfinished
    if path.is_dir():
        shutil.rmtree(unfinished)
    else:
        unfinished.replace(path)


@contextlib.contextmanager
def _small_chunks() -> Iterator[None]:
    def head_chunk(n: int, *args: Any, **kwargs: Any) -> int:
        return max(1, min(n, CHUNK_ROWS))

    with mock.patch.object(tiling, "head_chunk", head_chunk):
        yield


def _tiles_for(case: Case, variant: Variant) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets the chip for the backend that executes the Ascend compiler's output on a
    CPU."""
    if case.backend == "ascend-lowering" and variant.patched:
        return device.use_chip(ASCEND_CHIP)
    return contextlib.nullcontext()


def run(workshop: Workshop, case: Case, variant: Variant) -> Curves:
    """Trains one variant of a case."""
    torch.manual_seed(SEED + variant.sampling_seed)
    # A large model is trained with the default chunks, as by a user.
    chunks = contextlib.nullcontext() if case.is_large else _small_chunks()
    with chunks, _tiles_for(case, variant):
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = workshop.trainer(case, variant)
        return record(trainer, workshop.held_out(case), variant)
