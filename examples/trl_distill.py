"""On-policy distillation with TRL's `DistillationTrainer`; `callbacks` is the only thing to add.

    python examples/trl_distill.py --use_npu_kernels

A small Qwen3 learns the distributions of another one, whose weights are random, on completions that it generates.
Every field of `trl.DistillationConfig` is an option.
"""

from _common import small_qwen3
from _trl import train_and_save, trl_example
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer


def main() -> None:
    """Trains and saves."""
    kernels, training, tokenizer, model, sums = trl_example(DistillationConfig, max_completion_length=4)
    train_and_save(
        DistillationTrainer(
            model=model,
            teacher_model=AutoModelForCausalLM.from_config(small_qwen3(tokenizer)),
            args=training,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt, _ in sums]),
            processing_class=tokenizer,
            callbacks=kernels.callbacks(),
        )
    )


if __name__ == "__main__":
    main()
