"""Kahneman-Tversky optimisation with TRL's `KTOTrainer`; `callbacks` is the only thing to add.

    python examples/trl_kto.py --use_npu_kernels

A small Qwen3 learns from answers to sums that are labelled right or wrong.
Every field of `trl.KTOConfig` is an option.
"""

from _trl import train_and_save, trl_example
from datasets import Dataset
from trl import KTOConfig, KTOTrainer


def main() -> None:
    """Trains and saves."""
    kernels, training, tokenizer, model, sums = trl_example(KTOConfig)
    rows = [
        {"prompt": prompt, "completion": completion, "label": completion == answer}
        for prompt, answer in sums
        for completion in (answer, answer[::-1] + "0")
    ]
    train_and_save(
        KTOTrainer(
            model=model,
            args=training,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=kernels.callbacks(),
        )
    )


if __name__ == "__main__":
    main()
