"""Functions that the scripts with a trainer of TRL share (`trl_*.py`)."""

import sys
from pathlib import Path
from typing import Any

from npu_trainer_kernels.support.optional import require

require("this example", "trl", "datasets")  # before the imports that need them

from _common import byte_level_tokenizer, kernel_report, parsed, small_qwen3, sum_pairs, write_metrics
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed
from trl import TrlParser

from npu_trainer_kernels import NpuKernelsArguments


def trl_example(
    config: type[TrainingArguments], **defaults: Any
) -> tuple[NpuKernelsArguments, TrainingArguments, PreTrainedTokenizerBase, str, list[tuple[str, str]]]:
    """Returns what the scripts `trl_*.py` need: the flag, the trainer's arguments from the command line, a tokenizer,
    the path of a small model, and sums with their answers. TRL loads a reference model from the model's path."""
    parser = TrlParser((NpuKernelsArguments, config))
    parser.set_defaults(
        output_dir=f"runs/{Path(sys.argv[0]).stem}",
        max_steps=100,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        # TRL's defaults are for large models: bfloat16 and activation checkpointing only slow this one down.
        bf16=False,
        gradient_checkpointing=False,
        **defaults,
    )
    kernels, training = parsed(parser)
    set_seed(training.seed)
    tokenizer, start = byte_level_tokenizer(), str(Path(training.output_dir) / "start")
    AutoModelForCausalLM.from_config(small_qwen3(tokenizer)).save_pretrained(start)
    tokenizer.save_pretrained(start)
    return (
        kernels,
        training,
        tokenizer,
        start,
        [(f"{a}+{b}=", str(a + b)) for a, b in sum_pairs(512, 49, training.seed)],
    )


def train_and_save(trainer: Trainer) -> None:
    """Trains, saves the model, and writes its losses and the kernels' report to `metrics.json`."""
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    write_metrics(trainer, {"losses": losses, "steps": trainer.state.global_step, "kernels": kernel_report(trainer)})
