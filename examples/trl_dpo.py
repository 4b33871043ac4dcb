"""Preference optimisation with TRL's `DPOTrainer`; `callbacks` is the only thing to add.

    python examples/trl_dpo.py --use_npu_kernels

A small Qwen3 learns to prefer the answer of a sum to the answer read backwards.
Every field of `trl.DPOConfig` is an option.
"""

from _trl import train_and_save, trl_example
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def main() -> None:
    """Trains and saves."""
    kernels, training, tokenizer, model, sums = trl_example(DPOConfig)
    rows = [{"prompt": prompt, "chosen": answer, "rejected": answer[::-1] + "0"} for prompt, answer in sums]
    train_and_save(
        DPOTrainer(
            model=model,
            args=training,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=kernels.callbacks(),
        )
    )


if __name__ == "__main__":
    main()
