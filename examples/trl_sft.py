"""Supervised fine-tuning with TRL's `SFTTrainer`; `callbacks` is the only thing to add.

    python examples/trl_sft.py --use_npu_kernels

A small Qwen3 learns sums such as `12+7=`, with a loss on the answers only. The kernels also serve `--loss_type dft`.
Every field of `trl.SFTConfig` is an option.
"""

from _trl import train_and_save, trl_example
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Trains and saves."""
    kernels, training, tokenizer, model, sums = trl_example(SFTConfig)
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in sums]
    train_and_save(
        SFTTrainer(
            model=model,
            args=training,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=kernels.callbacks(),
        )
    )


if __name__ == "__main__":
    main()
