"""Trains a causal language model with `transformers.Trainer`; `--use_npu_kernels` is the only thing to add.

    python examples/sft.py --use_npu_kernels
    python examples/sft.py --use_npu_kernels --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my_corpus.jsonl --bf16
    python examples/sft.py --config sft.yaml

Without a model the script creates a small Llama, without a data set it reads the sources of the Python standard
library, so it needs no download. Every field of `transformers.TrainingArguments` is an option. `metrics.json` in the
output folder has losses, seconds, peak memory, tokens per second and the kernels' report.
"""

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from _common import (
    SMALLEST_VOCAB,
    ConfigParser,
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
    write_metrics,
)
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from npu_trainer_kernels import NpuKernelsArguments

# A prime, since real vocabularies may have awkward sizes; so large that logits are most of a step's memory.
VOCAB_SIZE = 8009
CHARACTERS = 500_000


@dataclass
class ScriptArguments(SourceArguments):
    """The arguments that only this script has."""

    dataset_text_field: str | None = field(
        default=None, metadata={"help": "The column of --dataset_name that holds the text (default: text)."}
    )
    vocab_size: int | None = field(
        default=None, metadata={"help": f"Vocabulary of the tokenizer that is made (default: {VOCAB_SIZE})."}
    )
    text_characters: int | None = field(
        default=None,
        metadata={"help": f"How much of the standard library's sources to read (default: {CHARACTERS:,} characters)."},
    )
    sequence_length: int = field(default=256, metadata={"help": "Tokens per packed sequence."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Part of the documents that is held out."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path is not None:
            refuse("vocab_size", self.vocab_size, "with --model_name_or_path, which brings its tokenizer")
        if self.vocab_size is not None and self.vocab_size < SMALLEST_VOCAB:
            raise ValueError(f"vocab_size must be at least {SMALLEST_VOCAB}; got {self.vocab_size}")
        if self.dataset_name is None:
            refuse("dataset_text_field", self.dataset_text_field, "without --dataset_name")
        else:
            refuse("text_characters", self.text_characters, "with --dataset_name")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2; got {self.sequence_length}")
        if not 0 < self.eval_fraction < 1:
            raise ValueError(f"eval_fraction must be between 0 and 1, both excluded; got {self.eval_fraction}")


def make_parser() -> ConfigParser:
    """Returns the parser of the command line and of `--config file.yaml`."""
    parser = ConfigParser((ScriptArguments, NpuKernelsArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/sft",
        num_train_epochs=1.0,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
    )
    return parser


def standard_library_texts(characters: int, seed: int) -> list[str]:
    """Returns the sources of Python's own modules in a random order, up to this many characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts))
    random.Random(seed).shuffle(files)
    texts: list[str] = []
    for file in files:
        if characters <= 0:
            break
        text = file.read_text(encoding="utf-8", errors="replace")[:characters]
        characters -= len(text)
        texts.append(text)
    return [text for text in texts if text]


def load_texts(args: ScriptArguments, seed: int) -> list[str]:
    """Returns all documents, for training and held out, in a random order."""
    if args.dataset_name is None:
        return standard_library_texts(CHARACTERS if args.text_characters is None else args.text_characters, seed)
    rows, column = load_rows(args), args.dataset_text_field or "text"
    require_columns(rows, [column], "dataset_text_field")
    texts = [text for text in rows[column] if text]
    random.Random(seed).shuffle(texts)
    return texts


def make_tokenizer(args: ScriptArguments, texts: Sequence[str], output_dir: str) -> PreTrainedTokenizerBase:
    """Returns the model's tokenizer, or a byte-level one trained on the texts, which is saved in the output folder."""
    if args.model_name_or_path is not None:
        return load_tokenizer(args.model_name_or_path)
    tokenizer = byte_level_tokenizer(texts, VOCAB_SIZE if args.vocab_size is None else args.vocab_size)
    tokenizer.save_pretrained(output_dir)
    return tokenizer


def pack(documents: Sequence[Sequence[int]], length: int, end: int) -> Iterator[list[int]]:
    """Cuts documents, each followed by the token `end`, into sequences of `length`; a shorter rest is dropped."""
    stream = list(chain.from_iterable((*document, end) for document in documents))
    return (stream[start : start + length] for start in range(0, len(stream) - length + 1, length))


def packed_dataset(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[dict[str, list[int]]]:
    """Returns texts as sequences of one length whose labels are the tokens themselves."""
    documents = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    sequences = list(pack(documents, length, tokenizer.eos_token_id))
    if not sequences:
        raise ValueError(f"sequence_length={length} is more than the {sum(map(len, documents))} tokens of the text")
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def small_llama(tokenizer: PreTrainedTokenizerBase, length: int) -> LlamaConfig:
    """Returns the config of a Llama that two CPU cores train in half a minute."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main() -> None:
    """Trains, evaluates on the held-out documents, saves."""
    args, kernels, training = parsed(make_parser())
    set_seed(training.seed)
    texts = load_texts(args, training.seed)
    if len(texts) < 2:
        raise ValueError(f"at least 2 documents are needed, one of them to hold out; got {len(texts)}")
    held_out = min(len(texts) - 1, max(1, round(len(texts) * args.eval_fraction)))
    tokenizer = make_tokenizer(args, texts[held_out:], training.output_dir)
    train_dataset = packed_dataset(texts[held_out:], tokenizer, args.sequence_length)
    eval_dataset = packed_dataset(texts[:held_out], tokenizer, args.sequence_length)
    model = load_model(args, small_llama(tokenizer, args.sequence_length))
    print(
        f"{type(model).__name__}, {parameters_in_millions(model)} parameters, vocabulary {len(tokenizer)}, "
        f"on {training.device}: {len(train_dataset)} sequences of {args.sequence_length} tokens, "
        f"{len(eval_dataset)} held out"
    )

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=kernels.callbacks(),
    )
    memory = PeakMemory(training.device)
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    peak = memory.bytes()
    trainer.save_model()
    trainer.save_state()

    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    write_metrics(
        trainer,
        {
            "first_loss": losses[0] if losses else result.training_loss,
            "final_loss": losses[-1] if losses else result.training_loss,
            "eval_loss": trainer.evaluate()["eval_loss"],
            "steps": trainer.state.global_step,
            "seconds": result.metrics["train_runtime"],
            "tokens_per_second": result.metrics["train_samples_per_second"] * args.sequence_length,
            "peak_memory_bytes": peak,
            "device": str(training.device),
            "kernels": kernel_report(trainer),
        },
    )
    print(f"model, tokenizer and metrics.json are in {training.output_dir}")


if __name__ == "__main__":
    main()
