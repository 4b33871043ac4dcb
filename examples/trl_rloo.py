"""Reinforcement learning with TRL's `RLOOTrainer`; `callbacks` is the only thing to add.

    python examples/trl_rloo.py --use_npu_kernels

A small Qwen3 is rewarded for answering sums with digits.
Every field of `trl.RLOOConfig` is an option.
"""

from _trl import train_and_save, trl_example
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer


def digits(completions: list[str], **kwargs: object) -> list[float]:
    """Returns the fraction of digits in each completion."""
    return [sum(c.isdigit() for c in completion) / max(len(completion), 1) for completion in completions]


def main() -> None:
    """Trains and saves."""
    kernels, training, tokenizer, model, sums = trl_example(RLOOConfig, num_generations=4, max_completion_length=4)
    train_and_save(
        RLOOTrainer(
            model=model,
            reward_funcs=digits,
            args=training,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt, _ in sums]),
            processing_class=tokenizer,
            callbacks=kernels.callbacks(),
        )
    )


if __name__ == "__main__":
    main()
