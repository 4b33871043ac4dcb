"""Reinforcement learning with a verifiable reward: TRL's GRPO on integer sums, with or without the fused kernels.

    python examples/grpo.py --use_npu_kernels
    python examples/grpo.py --use_npu_kernels --model_name_or_path Qwen/Qwen3-0.6B --dataset_name sums.jsonl \
        --max_completion_length 256 --learning_rate 1e-6 --bf16 True
    python examples/grpo.py --config grpo.yaml

Without a model the script creates a small Qwen3 that reads bytes, and warms it up with a few supervised steps, since a
model that never answers correctly gets no reward to learn from. Without a data set the prompts are sums such as
`12+7=`; a data set needs the columns `prompt` and `answer`. Every field of `trl.GRPOConfig` is an option.
`metrics.json` in the output folder has rewards, seconds, those of generation and of everything else (the update), peak
memory, tokens per second and the kernels' report.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from npu_trainer_kernels.support.optional import require

require("this example", "trl", "datasets")  # before the imports that need them

from _common import (
    PeakMemory,
    SourceArguments,
    byte_level_tokenizer,
    kernel_report,
    load_model,
    load_rows,
    load_tokenizer,
    parameters_in_millions,
    parsed,
    refuse,
    require_columns,
    small_qwen3,
    sum_pairs,
    write_metrics,
)
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, SFTConfig, SFTTrainer, TrlParser
from trl import GRPOTrainer as PlainGRPOTrainer

from npu_trainer_kernels import GRPOTrainer, NpuKernelsArguments

NUM_PROMPTS = 2400
LARGEST_OPERAND = 49
HELD_OUT = 64
SUPERVISED_STEPS = 600
# A right answer gets the whole reward, 1; a wrong answer in the right format gets the second part.
REWARD_WEIGHTS = [0.8, 0.2]


@dataclass
class ScriptArguments(SourceArguments):
    """The arguments that only this script has."""

    num_prompts: int | None = field(
        default=None, metadata={"help": f"How many sums to make for training (default: {NUM_PROMPTS})."}
    )
    largest_operand: int | None = field(
        default=None, metadata={"help": f"The largest number in the sums that are made (default: {LARGEST_OPERAND})."}
    )
    supervised_steps: int | None = field(
        default=None,
        metadata={
            "help": "Supervised steps before the reinforcement, at most "
            f"(default: {SUPERVISED_STEPS}, and 0 with --model_name_or_path)."
        },
    )
    supervised_accuracy: float = field(
        default=0.8,
        metadata={"help": "The supervised steps end sooner, when this part of the answers' tokens is right."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name is not None:
            refuse("num_prompts", self.num_prompts, "with --dataset_name")
            refuse("largest_operand", self.largest_operand, "with --dataset_name")
        if self.supervised_steps is None:
            self.supervised_steps = SUPERVISED_STEPS if self.model_name_or_path is None else 0
        if self.supervised_steps < 0:
            raise ValueError(f"supervised_steps must be at least 0; got {self.supervised_steps}")
        if not 0 < self.supervised_accuracy <= 1:
            raise ValueError(f"supervised_accuracy must be above 0 and at most 1; got {self.supervised_accuracy}")
        if self.largest_operand is not None and self.largest_operand < 1:
            raise ValueError(f"largest_operand must be at least 1; got {self.largest_operand}")


def make_parser() -> TrlParser:
    """Returns the parser of the command line and of `--config file.yaml`."""
    parser = TrlParser((ScriptArguments, NpuKernelsArguments, GRPOConfig))
    parser.set_defaults(
        output_dir="runs/grpo",
        num_train_epochs=3.0,
        per_device_train_batch_size=128,
        per_device_eval_batch_size=64,
        num_generations=4,
        max_completion_length=4,
        learning_rate=2e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        reward_weights=REWARD_WEIGHTS,
        logging_steps=10,
        save_strategy="no",
        # TRL's defaults are for large models: bfloat16 and activation checkpointing only slow these small ones down.
        bf16=False,
        gradient_checkpointing=False,
    )
    return parser


def sums(count: int, largest_operand: int, seed: int) -> Dataset:
    """Returns `count` different sums of two operands from 0 to `largest_operand`, with more than `HELD_OUT` of them."""
    side = largest_operand + 1
    if not HELD_OUT < count <= side**2:
        raise ValueError(
            f"num_prompts must be 1 to {side**2 - HELD_OUT}, as there are {side**2} sums of numbers up to "
            f"{largest_operand} and {HELD_OUT} are held out; got {count - HELD_OUT}"
        )
    pairs = sum_pairs(count, largest_operand, seed)
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def load_prompts(args: ScriptArguments, seed: int) -> tuple[Dataset, Dataset]:
    """Returns prompts with their answers, for training and held out."""
    if args.dataset_name is None:
        count = NUM_PROMPTS if args.num_prompts is None else args.num_prompts
        largest = LARGEST_OPERAND if args.largest_operand is None else args.largest_operand
        rows = sums(count + HELD_OUT, largest, seed)
    else:
        rows = load_rows(args).shuffle(seed=seed)
        require_columns(rows, ["prompt", "answer"], "dataset_name")
    held_out = HELD_OUT if args.dataset_name is None else min(HELD_OUT, len(rows) // 10)
    if held_out == 0:
        raise ValueError(f"dataset_name: at least 10 rows are needed, to hold one out; got {len(rows)}")
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


def text_of(completion: str | list[dict[str, str]]) -> str:
    """Returns a completion's text; for conversational prompts a completion is a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_match(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """Returns 1 if a completion is exactly the right answer, else 0."""
    return [float(text_of(c) == str(a)) for c, a in zip(completions, answer, strict=True)]


def format_reward(end: int) -> Callable[..., list[float]]:
    """Returns the reward function for the format of an answer; `end`: the token that ends an answer."""

    def answer_format(
        completions: list[Any], completion_ids: list[list[int]], answer: list[Any], **kwargs: Any
    ) -> list[float]:
        """Returns a third each for digits only, for the length of the right answer, and for the end token."""
        rewards = []
        for completion, ids, expected in zip(completions, completion_ids, answer, strict=True):
            text = text_of(completion)
            digits = text.isascii() and text.isdigit()
            rewards.append((digits + (len(text) == len(str(expected))) + (end in ids)) / 3)
        return rewards

    return answer_format


class StopWhenAccurate(TrainerCallback):
    """Ends supervised training at an accuracy: after a fixed number of steps, models of different seeds differ too
    much."""

    def __init__(self, accuracy: float) -> None:
        self._accuracy = accuracy

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stops the training when TRL's `mean_token_accuracy` reaches the accuracy."""
        if state.log_history[-1].get("mean_token_accuracy", 0.0) >= self._accuracy:
            control.should_training_stop = True
        return control


def with_completion(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer as the completion that TRL expects for this kind of prompt."""
    text = str(row["answer"])
    return {"completion": text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]}


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    args: ScriptArguments,
    config: GRPOConfig,
) -> None:
    """Trains supervised on prompts with their answers, with TRL's trainer and without the kernels."""
    print(
        f"warming up: at most {args.supervised_steps} supervised steps on prompts with their answers, until "
        f"{args.supervised_accuracy:.0%} of the answers' tokens are right"
    )
    arguments = SFTConfig(
        output_dir=str(Path(config.output_dir) / "warm_up"),
        max_steps=args.supervised_steps,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=config.bf16,
        fp16=config.fp16,
        use_cpu=config.use_cpu,
        seed=config.seed,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=config.disable_tqdm,
    )
    pairs = rows.map(with_completion, remove_columns=[c for c in rows.column_names if c != "prompt"])
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer,
        callbacks=[StopWhenAccurate(args.supervised_accuracy)],
    )
    trainer.train()
    print(f"warmed up with {trainer.state.global_step} supervised steps")


@contextmanager
def timed_generation(model: PreTrainedModel) -> Iterator[list[float]]:
    """Inside the `with` block the seconds of each call of the model's `generate` are added to the list."""
    seconds: list[float] = []
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begun)

    model.generate = timed
    try:
        yield seconds
    finally:
        del model.generate


def make_trainer(kernels: NpuKernelsArguments, **kwargs: Any) -> PlainGRPOTrainer:
    """Returns TRL's trainer, or with the flag its drop-in replacement."""
    if kernels.use_npu_kernels:
        return GRPOTrainer(npu_kernels=kernels, **kwargs)
    return PlainGRPOTrainer(**kwargs)


def main() -> None:
    """Warms up, trains with rewards, evaluates on held-out prompts before and after, saves."""
    args, kernels, training = parsed(make_parser())
    set_seed(training.seed)
    train_dataset, eval_dataset = load_prompts(args, training.seed)
    tokenizer = byte_level_tokenizer() if args.model_name_or_path is None else load_tokenizer(args.model_name_or_path)
    model = load_model(args, small_qwen3(tokenizer))
    print(
        f"{type(model).__name__}, {parameters_in_millions(model)} parameters, on {training.device}: "
        f"{len(train_dataset)} prompts such as {train_dataset[0]['prompt']!r}, {len(eval_dataset)} held out"
    )
    if args.supervised_steps:
        warm_up(model, tokenizer, train_dataset, args, training)

    trainer = make_trainer(
        kernels,
        model=model,
        reward_funcs=[exact_match, format_reward(tokenizer.eos_token_id)],
        args=training,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()
    memory = PeakMemory(training.device)
    with timed_generation(model) as generation:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    peak = memory.bytes()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    window = max(1, len(rewards) // 20)
    seconds = result.metrics["train_runtime"]
    write_metrics(
        trainer,
        {
            "first_reward": fmean(rewards[:window]) if rewards else None,
            "final_reward": fmean(rewards[-window:]) if rewards else None,
            "rewards": rewards,
            "held_out_reward_before": before["eval_reward"],
            "held_out_reward": after["eval_reward"],
            "held_out_exact_before": before["eval_rewards/exact_match/mean"],
            "held_out_exact": after["eval_rewards/exact_match/mean"],
            "steps": trainer.state.global_step,
            "seconds": seconds,
            "generation_seconds": sum(generation),
            "update_seconds": seconds - sum(generation),
            "tokens_per_second": trainer.state.num_input_tokens_seen / seconds,
            "peak_memory_bytes": peak,
            "device": str(training.device),
            "kernels": kernel_report(trainer),
        },
    )
    print(f"model, tokenizer and metrics.json are in {training.output_dir}")


if __name__ == "__main__":
    main()
