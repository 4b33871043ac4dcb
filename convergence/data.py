"""Makes texts, sums and tokenizers with the example scripts, once per process."""

import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

# The scripts are run by path, and import each other by module name.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import _common as common
import grpo as sums_script
import sft as text_script

from .cases import Text, WarmUp

__all__ = [
    "BYTES_VOCAB",
    "SUMS",
    "TEXT_VOCAB",
    "even",
    "held_out",
    "lm",
    "made_up",
    "of_sequences",
    "preferences",
    "prompts",
    "ragged_texts",
    "rewards",
    "sequences",
    "texts",
    "tokenizer_for",
    "warm_up",
]

# The tasks that train on sums; the others train on text.
SUMS = ("dpo", "grpo", "distillation")
# Primes, which are no multiples of a block size.
TEXT_VOCAB, BYTES_VOCAB = 1009, 263
LENGTH = 48
IGNORED = -100
PREAMBLE = '"""Read the following, and go on in the same way."""'


@functools.cache
def _documents() -> list[str]:
    return text_script.standard_library_texts(400_000, seed=0)


@functools.cache
def tokenizer_for(task: str) -> Any:
    """Returns the tokenizer of a task: bytes for sums, for texts a byte-level BPE trained on them."""
    return common.byte_level_tokenizer() if task in SUMS else common.byte_level_tokenizer(_documents(), TEXT_VOCAB)


@functools.cache
def _packed() -> Dataset:
    return Dataset.from_list(text_script.packed_dataset(_documents(), tokenizer_for("lm"), LENGTH))


def lm(rows: int) -> Dataset:
    """Returns packed sequences whose first labels, a random number of them, are ignored, as those of a prompt."""
    generator = random.Random(1)
    sequences = _packed().select(range(16, 16 + rows))["input_ids"]
    starts = [generator.randrange(LENGTH // 2) for _ in sequences]
    labels = [[IGNORED] * start + list(row[start:]) for row, start in zip(sequences, starts, strict=True)]
    return Dataset.from_dict({"input_ids": list(sequences), "labels": labels})


def held_out(task: str) -> torch.Tensor:
    """Returns `[rows, length]` held-out ids: text, or sums with their answers."""
    if task not in SUMS:
        return torch.tensor(_packed().select(range(8))["input_ids"])
    tokenizer = tokenizer_for(task)
    rows = sums(1200).select(range(64))
    ids = [tokenizer(r["prompt"] + r["answer"].zfill(3))["input_ids"] for r in rows if len(r["prompt"]) == 6]
    return torch.tensor(ids)


def sequences(text: Text) -> torch.Tensor:
    """Returns `[rows, length]` ids of real text, with a tokenizer that is trained on it; takes tens of seconds."""
    documents = text_script.standard_library_texts(text.characters, seed=0)
    tokenizer = common.byte_level_tokenizer(documents, text.vocabulary)
    return torch.tensor([row["input_ids"] for row in text_script.packed_dataset(documents, tokenizer, text.length)])


def of_sequences(ids: torch.Tensor) -> Dataset:
    """Returns a dataset in which every token is a label."""
    rows = ids.tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def texts(rows: int) -> Dataset:
    """Returns pieces of source code as documents of different lengths, for TRL's SFT."""
    lines = [line for text in _documents() for line in text.split("\n\n") if 20 < len(line) < 200]
    return Dataset.from_dict({"text": lines[:rows]})


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Returns lengths like those of completions: exponential with a mean of 0.4 of the longest, clipped to 0.05 to 1 of
    it."""
    generator = random.Random(seed)
    drawn = (generator.expovariate(1 / (0.4 * longest)) for _ in range(count))
    return [min(max(round(length), longest // 20, 1), longest) for length in drawn]


def ragged_texts(rows: int) -> Dataset:
    """Returns texts of strongly varying lengths with a common prefix, as with a system prompt."""
    cut = zip(
        (text for text in _documents() if len(text) > 200), itertools.cycle(lengths(997, 200, seed=4)), strict=False
    )
    return Dataset.from_dict({"text": [PREAMBLE + text[:length] for text, length in itertools.islice(cut, rows)]})


def made_up(prompts: list[list[int]], longest: int, tokenizer: Any) -> list[list[int]]:
    """Returns random completions of strongly varying lengths, which do not answer the prompts."""
    count = len(prompts)
    generator = random.Random(str(prompts))
    chosen = lengths(count, longest, generator.randrange(1 << 30))
    letters = tokenizer("0123456789+=")["input_ids"]
    return [[*generator.choices(letters, k=length - 1), tokenizer.eos_token_id] for length in chosen]


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Returns the fraction of even ids, a reward in which random completions differ."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def preferences() -> Dataset:
    """Returns sums with the right answer as chosen, and one that is too large by up to nine as rejected."""
    generator, rows = random.Random(3), prompts()
    wrong = [str(int(answer) + generator.randint(1, 9)) for answer in rows["answer"]]
    return Dataset.from_dict({"prompt": list(rows["prompt"]), "chosen": list(rows["answer"]), "rejected": wrong})


@functools.cache
def sums(rows: int) -> Dataset:
    """Returns prompts such as `12+7=` with their answers; the first 64 are held out."""
    return sums_script.sums(rows, sums_script.LARGEST_OPERAND, seed=0)


def prompts() -> Dataset:
    """Returns the sums for training."""
    rows = sums(1200)
    return rows.select(range(64, len(rows)))


def rewards(tokenizer: Any) -> list[Any]:
    """Returns the reward functions: exact match, and a graded reward for the format of an answer."""
    return [sums_script.exact_match, sums_script.format_reward(tokenizer.eos_token_id)]


def warm_up(model: Any, tokenizer: Any, how: WarmUp) -> None:
    """Trains on sums with their answers: a model that never answers correctly gets no reward to learn from."""
    tokenizer.padding_side = "right"
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate)
    rows, generator = prompts(), random.Random(2)
    for _ in range(how.steps):
        chosen = [rows[generator.randrange(len(rows))] for _ in range(64)]
        texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in chosen]
        batch = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        model(**batch, labels=labels).loss.backward()
        if how.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        optimizer.step()
        optimizer.zero_grad()
