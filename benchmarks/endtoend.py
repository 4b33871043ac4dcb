"""End to end: tokens per second and peak memory of real training steps, plain, with the flag and with Liger's patch.

Each run is a process of its own, so that its peak memory is its own, and all variants of a workload are children of one
parent, one after the other. Models have random weights and data are random ids: what is measured does not depend on
them. A step is timed from the end of the one before to its own end, so that data loading and the Trainer count, on the
device's own clock: nothing here waits for it where training would not. Loss and gradient norm are logged after the
first step and the last. The optimiser is the Trainer's default. In the GRPO update the rollouts are given: a trainer
whose generation returns fixed ids, and whose step is timed without the preparation of the batch (rewards, decoding),
which no kernel here touches. DPO's reference is a second model with the weights that the policy starts with: the first
loss is log 2, 0.6931, where both compute alike.

    python -m benchmarks.endtoend --workload sft-trainer --variant flag --size tiny --output out.json
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import MODELS, build_model

__all__ = ["VARIANTS", "Workload", "differs", "ratios", "run", "workloads"]

VARIANTS = ("plain", "flag", "liger")
PACKAGES = {"plain": "transformers", "flag": "npu_trainer_kernels", "liger": "liger-kernel"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        name: `"sft-trainer"` (transformers), `"sft-trl"`, `"grpo-trl"` or `"dpo-trl"`.
        size: a key of `MODELS`.
        batch: sequences of a step; pairs of them in DPO.
        length: tokens of a sequence; of its completion in GRPO, of the longest possible one in DPO.
        prompt: prompt tokens (GRPO and DPO).
        least: tokens of the shortest completion, whose lengths are drawn from here up to `length` (DPO alone).
    """

    name: str
    size: str
    batch: int
    length: int
    prompt: int = 0
    least: int = 0

    @property
    def shape(self) -> str:
        if self.least:
            return f"{self.size} {self.batch}x2x({self.prompt}+{self.least}..{self.length})"
        length = f"({self.prompt}+{self.length})" if self.prompt else str(self.length)
        return f"{self.size} {self.batch}x{length}"

    @property
    def tokens(self) -> int:
        """Of a step, without padding; where lengths are drawn, what is to be expected."""
        if self.least:
            return self.batch * (2 * self.prompt + self.least + self.length)
        return self.batch * (self.prompt + self.length)

    @property
    def key(self) -> str:
        return f"end-to-end/{self.name}/{self.shape}/{MODELS[self.size][2]}"


def workloads(kind: str) -> list[Workload]:
    """For a kind of device, the most wanted first."""
    if kind == "cpu":
        return [
            Workload("sft-trainer", "demo-llama", 8, 256),
            Workload("grpo-trl", "demo-qwen3", 128, 4, 8),
            Workload("sft-trl", "demo-llama", 8, 256),
            Workload("sft-trainer", "demo-gemma3", 8, 256),
            Workload("dpo-trl", "demo-llama", 4, length=240, prompt=16, least=14),
        ]
    return [
        Workload("sft-trainer", "llama-1b", 8, 2048),
        Workload("grpo-trl", "qwen3-0.6b", 8, 4096, 128),
        Workload("sft-trl", "llama-1b", 8, 2048),
        Workload("sft-trainer", "gemma3-1b", 4, 2048),
        # Sequences of 30 to 900 tokens.
        Workload("dpo-trl", "llama-1b", 8, length=884, prompt=16, least=14),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


# Where a child finds this module by its name, which is benchmarks.endtoend or npu_trainer_kernels.benchmarks.endtoend.
_ROOT = Path(__file__).parents[__name__.count(".")]


def _child_environment() -> dict[str, str]:
    """One device: with several in sight the Trainer would spread the batch over them by itself."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    return {**one, **os.environ, "HF_HUB_OFFLINE": "1"}


def run(workload: Workload, variant: str, steps: int, timeout: float) -> Row:
    """Runs a workload in a process of its own and returns its row; a failure is a row too."""
    row: Row = {
        "group": "end-to-end", "op": workload.name, "shape": workload.shape,
        "sizes": {
            "batch": workload.batch, "prompt": workload.prompt, "length": workload.length, "least": workload.least,
        },
        "dtype": MODELS[workload.size][2], "provider": variant, "mode": "step", "status": "ok",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [
            sys.executable, "-m", __name__, "--workload", workload.name, "--size", workload.size,
            "--batch", str(workload.batch), "--length", str(workload.length), "--prompt", str(workload.prompt),
            "--least", str(workload.least), "--variant", variant, "--steps", str(steps), "--output", str(output),
        ]  # fmt: skip
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, cwd=_ROOT,
                env=_child_environment(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**row, "status": "error", "reason": f"not finished after {timeout:.0f} s"}
        if finished.returncode != 0 or not output.exists():
            reason = (finished.stderr.strip() or f"exit code {finished.returncode}").splitlines()[-1][:400]
            absent = "ModuleNotFoundError" in reason
            return {**row, "status": "absent" if absent else "error", "reason": reason, "log": finished.stderr[-4000:]}
        return {**row, **json.loads(output.read_text(encoding="utf-8"))}


def ratios(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """For each patched variant of one workload: (speed over plain, peak memory over plain)."""
    done = {r["provider"]: r for r in rows if r["status"] == "ok"}
    plain = done.get("plain")
    if plain is None:
        return {}
    return {
        name: (plain["ms"]["median"] / r["ms"]["median"], r["peak_bytes"] / max(1, plain["peak_bytes"]))
        for name, r in done.items()
        if name != "plain"
    }


def differs(row: Row, plain: Row) -> bool:
    """Whether a run's first loss or gradient norm is not the unpatched one's, within the rounding of its dtype."""
    tolerance = {"bfloat16": 0.02, "float32": 1e-3}[row["dtype"]]
    return any(
        abs(row[name][0] - plain[name][0]) > tolerance * max(abs(plain[name][0]), 1e-3)
        for name in ("losses", "grad_norms")
    )


# ---------------------------------------------------------------------------------------------------------------------
# The child
# ---------------------------------------------------------------------------------------------------------------------


class _PeakMemory:
    """Peak memory of this process: the allocator's on an accelerator, else resident memory beyond what was resident
    when this was made."""

    def __init__(self, device: Any) -> None:
        import torch

        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._before = 0
        if self._module is None:
            clear = Path("/proc/self/clear_refs")
            if clear.exists() and os.access(clear, os.W_OK):
                clear.write_text("5")
            self._before = self._resident()

    def bytes(self) -> int:
        return self._resident() - self._before if self._module is None else self._module.max_memory_allocated()

    @staticmethod
    def _resident() -> int:
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class _Clock:
    """When the steps ended, and what of them was preparation; by events that an accelerator passes in its own time."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._ends: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._pauses: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        import torch

        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1e3

    def tick(self) -> None:
        """A step has ended."""
        self._ends.append((self._now(), self._pauses))
        self._pauses = []

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """What happens inside does not count."""
        start = self._now()
        try:
            yield
        finally:
            self._pauses.append((start, self._now()))

    def seconds(self) -> list[float]:
        """Of every step but the first, which has no beginning. Waits for the device."""
        from npu_trainer_kernels import device as devices

        devices.synchronize(self.device)
        return [
            self._between(before, end) - sum(self._between(*pause) for pause in pauses)
            for (before, _), (end, pauses) in itertools.pairwise(self._ends)
        ]


def _clock_callback(clock: _Clock) -> Any:
    from transformers import TrainerCallback

    class ClockCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick()

    return ClockCallback()


def _tokenizer() -> Any:
    """Reads digits: a prompt of n characters is n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate("0123456789")}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _arguments(workload: Workload, steps: int, folder: str) -> dict[str, Any]:
    import torch

    from npu_trainer_kernels import device as devices

    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": workload.batch,
        "learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_first_step": True, "logging_steps": steps,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1,
        "use_cpu": devices.accelerator() == "cpu" or not torch.accelerator.is_available(),
    }  # fmt: skip


def _random_ids(workload: Workload, count: int) -> list[list[int]]:
    import torch

    vocab = MODELS[workload.size][1]["vocab_size"]
    ids = torch.randint(3, vocab, (count, workload.length), generator=torch.Generator().manual_seed(2))
    return ids.tolist()


def _patch_with_liger(model: Any, own_head: bool) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # TRL's own fused head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=own_head, cross_entropy=False)


def _callbacks(variant: str) -> list[Any]:
    from npu_trainer_kernels import NpuKernelsArguments

    return list(NpuKernelsArguments(use_npu_kernels=variant == "flag").callbacks())


def _sft_trainer(workload: Workload, variant: str, model: Any, clock: _Clock, arguments: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments, default_data_collator

    rows = _random_ids(workload, workload.batch * arguments["max_steps"])
    data: Any = [{"input_ids": ids, "labels": ids} for ids in rows]
    return Trainer(
        model, TrainingArguments(**arguments), train_dataset=data, data_collator=default_data_collator,
        callbacks=[*_callbacks(variant), _clock_callback(clock)],
    )  # fmt: skip


def _sft_trl(workload: Workload, variant: str, model: Any, clock: _Clock, arguments: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": _random_ids(workload, workload.batch * arguments["max_steps"])})
    settings = SFTConfig(**arguments, max_length=workload.length, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(
        model, settings, train_dataset=data, processing_class=_tokenizer(),
        callbacks=[*_callbacks(variant), _clock_callback(clock)],
    )  # fmt: skip


def _grpo_trl(workload: Workload, variant: str, model: Any, clock: _Clock, arguments: dict[str, Any]) -> Any:
    import trl
    from datasets import Dataset

    import npu_trainer_kernels

    base: Any = npu_trainer_kernels.GRPOTrainer if variant == "flag" else trl.GRPOTrainer
    completions = _random_ids(workload, workload.batch)

    class GivenRollouts(base):
        """Generation returns fixed ids, and the preparation of the batch is not timed."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return completions[: len(prompt_ids)], None

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            with clock.prepare():
                return super()._prepare_inputs(generation_batch)

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    prompts = ["0123456789"[i % 10] * workload.prompt for i in range(16)]
    settings = trl.GRPOConfig(
        **arguments, num_generations=min(8, workload.batch), max_completion_length=workload.length,
        bf16=MODELS[workload.size][2] == "bfloat16", gradient_checkpointing=MODELS[workload.size][2] == "bfloat16",
    )  # fmt: skip
    return GivenRollouts(
        model, reward_funcs=reward, args=settings, train_dataset=Dataset.from_dict({"prompt": prompts * 8}),
        processing_class=_tokenizer(), callbacks=[_clock_callback(clock)],
    )  # fmt: skip


def _preferences(workload: Workload, count: int) -> list[dict[str, list[int]]]:
    """Pairs of random ids, each completion of a length of its own."""
    import torch

    drawn = torch.Generator().manual_seed(2)
    vocab = MODELS[workload.size][1]["vocab_size"]

    def ids(length: int) -> list[int]:
        return torch.randint(3, vocab, (length,), generator=drawn).tolist()

    lengths = torch.randint(workload.least, workload.length + 1, (count, 2), generator=drawn).tolist()
    return [
        {"prompt_ids": ids(workload.prompt), "chosen_ids": ids(chosen), "rejected_ids": ids(rejected)}
        for chosen, rejected in lengths
    ]


def _dpo_trl(workload: Workload, variant: str, model: Any, clock: _Clock, arguments: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class GivenIds(DPOTrainer):
        """The data are ids already, of the whole vocabulary."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    # Liger's layers are copied with the model. TRL's own `use_liger_kernel` would put them into the policy alone.
    reference = copy.deepcopy(model)
    pairs = _preferences(workload, workload.batch * arguments["max_steps"])
    settings = DPOConfig(**arguments, bf16=False, gradient_checkpointing=False)
    return GivenIds(
        model, reference, args=settings, train_dataset=Dataset.from_list(pairs), processing_class=_tokenizer(),
        callbacks=[*_callbacks(variant), _clock_callback(clock)],
    )  # fmt: skip


_TRAINERS = {"sft-trainer": _sft_trainer, "sft-trl": _sft_trl, "grpo-trl": _grpo_trl, "dpo-trl": _dpo_trl}


def train(workload: Workload, variant: str, steps: int, warmup: int = 3) -> Row:
    """Trains in this process and returns what a row needs beyond its key.

    Raises:
        ImportError: the variant's package is not installed.
        RuntimeError: the loss is not finite.
    """
    import torch

    from npu_trainer_kernels import device as devices

    from .measure import as_json, summarise
    from .results import package_version

    device = torch.device(devices.accelerator())
    model, clock = build_model(workload.size), _Clock(device)
    if variant == "liger":
        _patch_with_liger(model, own_head=workload.name == "sft-trainer")
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(workload, warmup + steps, folder)
        trainer = _TRAINERS[workload.name](workload, variant, model, clock, arguments)
        peak = _PeakMemory(device)
        trainer.train()
        peak_bytes = peak.bytes()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = [entry["loss"] for entry in logged], [float(entry["grad_norm"]) for entry in logged]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise RuntimeError(f"not finite: losses {losses}, gradient norms {norms}")
    summary = summarise([seconds * 1e3 for seconds in clock.seconds()[warmup - 1 :]])
    return {
        "ms": as_json(summary), "peak_bytes": peak_bytes, "tokens_per_second": workload.tokens / summary.median * 1e3,
        "losses": losses, "grad_norms": norms, "version": package_version(PACKAGES[variant]),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The child's command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend", description="One workload, one variant.")
    parser.add_argument("--workload", choices=sorted(_TRAINERS), required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--size", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--least", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    workload = Workload(args.workload, args.size, args.batch, args.length, args.prompt, args.least)
    args.output.write_text(json.dumps(train(workload, args.variant, args.steps)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
