"""Functions that the examples share: arguments, data and models from the hub or from scratch, peak memory, metrics.

Everything here works without TRL and datasets; `_trl.py` has what the scripts with a trainer of TRL share besides.
"""

import json
import os
import random
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Trainer,
)

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.support.optional import require

if TYPE_CHECKING:
    from datasets import Dataset

DTYPES = ("float32", "bfloat16", "float16", "auto")
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
PAD, EOS = "<pad>", "<eos>"
SMALLEST_VOCAB = 256 + 2


@dataclass
class SourceArguments:
    """The sources of the model and the data: arguments of both scripts."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or local path of a causal LM; without it a small one is made."}
    )
    dtype: str = field(
        default="float32",
        metadata={"help": f"Dtype of the weights, one of {', '.join(DTYPES)} (--bf16 computes in bfloat16 with any)."},
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, local folder, or .json, .jsonl, .csv, .parquet, .txt file; without it one is made."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of --dataset_name."})
    dataset_split: str | None = field(
        default=None, metadata={"help": "The split of --dataset_name to train on (default: train)."}
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.dataset_name is None:
            refuse("dataset_config", self.dataset_config, "without --dataset_name")
            refuse("dataset_split", self.dataset_split, "without --dataset_name")


def refuse(name: str, value: object, reason: str) -> None:
    """Raises `ValueError` if an argument that has no effect is set (is not None)."""
    if value is not None:
        raise ValueError(f"{name}={value!r} has no effect {reason}; leave it out")


class ConfigParser(HfArgumentParser):
    """`HfArgumentParser` with `--config FILE`: a YAML file whose values are the options' defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument("--config", metavar="FILE", help="YAML file with options; the command line replaces them.")

    def parse_args_and_config(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Returns one object for each dataclass. Raises `ValueError` if a value or a name is wrong."""
        given = sys.argv[1:] if args is None else list(args)
        file = self.parse_known_args(given)[0].config
        if file is not None:
            defaults = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
            unknown = sorted(defaults.keys() - {action.dest for action in self._actions})
            if unknown:
                raise ValueError(f"--config: {file} has unknown options: {', '.join(unknown)}")
            self.set_defaults(**defaults)
        return self.parse_args_into_dataclasses(given)[: len(self.dataclass_types)]


def load_rows(args: SourceArguments) -> "Dataset":
    """Loads the split of `args.dataset_name` from the hub, a data file, a folder of them or a `save_to_disk` folder."""
    require("--dataset_name", "datasets")
    from datasets import DatasetDict, load_dataset, load_from_disk

    assert args.dataset_name is not None
    path, split = Path(args.dataset_name), args.dataset_split or "train"
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise ValueError(f"dataset_name: a file must end with one of {', '.join(BUILDERS)}; got {path.name!r}")
        refuse("dataset_config", args.dataset_config, "with a single file")
        refuse("dataset_split", args.dataset_split, "with a single file")
        return load_dataset(BUILDERS[path.suffix], data_files=str(path), split=split)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        refuse("dataset_config", args.dataset_config, "with a folder written by save_to_disk")
        saved = load_from_disk(str(path))
        if not isinstance(saved, DatasetDict):
            refuse("dataset_split", args.dataset_split, "with a saved data set that has no splits")
            return saved
        if split not in saved:
            raise ValueError(f"dataset_split must be one of {', '.join(saved)}; got {split!r}")
        return saved[split]
    return load_dataset(args.dataset_name, args.dataset_config, split=split)


def require_columns(rows: "Dataset", names: Iterable[str], argument: str) -> None:
    """Raises `ValueError` if the data set lacks a column."""
    for name in names:
        if name not in rows.column_names:
            raise ValueError(f"{argument}: the data set has no column {name!r}; it has {', '.join(rows.column_names)}")


def load_model(args: SourceArguments, small: PretrainedConfig) -> PreTrainedModel:
    """Loads the model of `args.model_name_or_path`, or creates one with random weights from `small`."""
    if args.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    return AutoModelForCausalLM.from_config(small).to(dtype)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_level_tokenizer(texts: Iterable[str] = (), vocab_size: int = SMALLEST_VOCAB) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer trained on `texts`; without texts it has the 256 bytes, padding and an end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def small_qwen3(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """Returns the config of a Qwen3 with 0.8 million parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def sum_pairs(count: int, largest_operand: int, seed: int) -> list[tuple[int, int]]:
    """Returns `count` different pairs of numbers from 0 to `largest_operand`."""
    side = largest_operand + 1
    return [divmod(pair, side) for pair in random.Random(seed).sample(range(side**2), count)]


def parsed(parser: Any) -> Any:
    """Parses the command line and `--config file.yaml`. A wrong value ends the script: a message, exit code 2."""
    try:
        return parser.parse_args_and_config()
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def parameters_in_millions(model: PreTrainedModel) -> str:
    """Returns the number of parameters as text, for example `4.05M`."""
    return f"{model.num_parameters() / 1e6:.2f}M"


class PeakMemory:
    """The peak memory of a run.

    On an accelerator this is the allocator's peak, including memory that was allocated before, as users quote it. On a
    CPU it is the increase of the process's peak resident set since this object was created.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cpu":
            self._reset_resident_peak()
            self._before = self._resident_peak()
        else:
            torch.get_device_module(device).reset_peak_memory_stats(device)

    def bytes(self) -> int:
        """Returns the peak so far."""
        if self._device.type == "cpu":
            return self._resident_peak() - self._before
        return torch.get_device_module(self._device).max_memory_allocated(self._device)

    @staticmethod
    def _reset_resident_peak() -> None:
        # Works on Linux only. Elsewhere the peak is that of the whole process, and a run below it measures 0.
        clear_refs = Path("/proc/self/clear_refs")
        if clear_refs.exists() and os.access(clear_refs, os.W_OK):
            clear_refs.write_text("5")

    @staticmethod
    def _resident_peak() -> int:
        # On Linux `ru_maxrss` cannot be reset, and a child starts with its parent's value.
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def kernel_report(trainer: Trainer) -> str | None:
    """Returns the kernels' report of this run, or None for a run without them."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, NpuKernelsCallback):
            return callback.report().text(in_full=callback.in_full)
    return None


def write_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Writes `metrics.json` in the output folder atomically, on one process only."""
    if not trainer.is_world_process_zero():
        return
    target = Path(trainer.args.output_dir) / "metrics.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(target)
