"""End to end: tokens per second and peak memory of real training steps, plain, with the flag and with its peers.

Each run is a process of its own, so that its peak memory is its own, and all variants of a workload are children of one
parent, one after the other. Models have random weights and data are random ids: what is measured does not depend on
them. It does depend on lengths: beside batches without padding there are some with lengths as users have them
(`lengths.py`). Tokens are counted in the batches that ran, and so is the share of positions that they are.

A step is timed from the end of the one before to its own end, so that data loading and the Trainer count, on the
device's own clock: nothing here waits for it where training would not. Loss and gradient norm are logged after the
first step and the last. The optimiser is the Trainer's default. In the GRPO update the rollouts are given: a trainer
whose generation returns fixed ids, and whose step is timed without the preparation of the batch (rewards, decoding),
which no kernel here touches. DPO's reference is a second model with the weights that the policy starts with: the first
loss is log 2, 0.6931, where both compute alike.

    python -m benchmarks --groups end-to-end --only exponential --only even
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .lengths import DISTRIBUTIONS
from .models import MODELS
from .steps import TRAINERS, build_trainer, ran

__all__ = ["ROOT", "VARIANTS", "Clock", "Variant", "Workload", "differs", "ratios", "run", "variants_of", "workloads"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """How a step is run.

    Attributes:
        package: the distribution that makes the difference, whose version belongs to a row.
        packs: ours leaves padding out.
        shares: ours computes once what rows begin with alike.
        attention: transformers' name for the attention that is asked for; None: its default.
        module: what has to be importable beside the package, or "".
        compiled: under the Trainer's `torch_compile`.
        options: of `NpuKernelsArguments`, beside the flag.
    """

    package: str
    packs: bool = True
    shares: bool = True
    attention: str | None = None
    module: str = ""
    compiled: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.package == "npu_trainer_kernels"


VARIANTS = {
    "plain": Variant("transformers"),
    "flag": Variant("npu_trainer_kernels"),
    "flag-padded": Variant("npu_trainer_kernels", packs=False),
    "flag-unshared": Variant("npu_trainer_kernels", shares=False),
    # For rows so long that a layer's MLP is what a step cannot hold.
    "flag-tiled": Variant("npu_trainer_kernels", options=(("npu_kernels_tiled_mlp", 8192),)),
    # Rows stay on the rank that generated them.
    "flag-unbalanced": Variant("npu_trainer_kernels", options=(("npu_kernels_balance", False),)),
    "liger": Variant("liger-kernel", module="liger_kernel"),
    # A library of its own around TRL's trainer: it leaves padding out and computes a shared prompt once.
    "unsloth": Variant("unsloth", module="unsloth"),
    # transformers' attention that leaves padding out, layer by layer, where somebody has installed it.
    "plain-flash": Variant("transformers", attention="flash_attention_2", module="flash_attn"),
    "liger-flash": Variant("liger-kernel", attention="flash_attention_2", module="flash_attn"),
    "plain-compiled": Variant("transformers", compiled=True),
    "flag-compiled": Variant("npu_trainer_kernels", compiled=True),
}


# Tokens of a step.
_LONG = 1 << 16


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
        lengths: a key of `DISTRIBUTIONS`, for sequences (in GRPO completions) of at most `length` tokens; "": all are
            that long.
        group: completions of one prompt (GRPO). With `lengths` the prompts of a batch differ in length as well, up to
            `prompt`, and are padded on the left.
        lora: the rank of an adapter that is trained instead of the model; 0: the model.
        checkpointing: layers are computed again in backward (SFT with the Trainer; GRPO does it wherever it is bf16).
    """

    name: str
    size: str
    batch: int
    length: int
    prompt: int = 0
    least: int = 0
    lengths: str = ""
    group: int = 8
    lora: int = 0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.checkpointing and self.name not in ("sft", "sft-trainer"):
            raise ValueError(f"checkpointing is a choice of 'sft' and 'sft-trainer' alone; got it with {self.name!r}")

    @property
    def shape(self) -> str:
        adapter = (f" lora {self.lora}" if self.lora else "") + (" checkpointed" if self.checkpointing else "")
        if self.least:
            return f"{self.size} {self.batch}x2x({self.prompt}+{self.least}..{self.length}){adapter}"
        longest = f"..{self.length} {self.lengths}" if self.lengths else str(self.length)
        if not self.prompt:
            return f"{self.size} {self.batch}x{longest}{adapter}"
        prompts = f", {self.group} a prompt" if self.lengths else ""
        return f"{self.size} {self.batch}x({self.prompt}+{longest}){prompts}{adapter}"

    @property
    def is_long(self) -> bool:
        """A step takes seconds, so that few are enough; what counts is the memory."""
        return self.batch * (self.prompt + self.length) >= _LONG

    @property
    def key(self) -> str:
        return f"end-to-end/{self.name}/{self.shape}/{MODELS[self.size][2]}"


# What a mixture of experts is run with: what differs there is what is done to the experts' rows.
_OF_EXPERTS = ("plain", "flag", "flag-padded", "liger")
_OF_LONG = ("plain", "flag", "flag-tiled", "liger")


def variants_of(workload: Workload) -> list[str]:
    """The variants that differ for a workload: no two sequences of a batch begin alike but in GRPO and DPO."""
    if workload.is_long:
        return list(_OF_LONG)
    if "num_experts" in MODELS[workload.size][1]:
        return list(_OF_EXPERTS)
    without = {"flag-tiled", "flag-unbalanced"}
    # What its row is for; elsewhere it was not tried.
    if workload.name != "grpo-trl" or workload.size not in ("qwen3-0.6b", "qwen3-4b"):
        without.add("unsloth")
    return [
        name for name in VARIANTS
        if name not in without and (name != "flag-unshared" or workload.name in ("grpo-trl", "dpo-trl"))
    ]  # fmt: skip


def workloads(kind: str) -> list[Workload]:
    """For a kind of device, the most wanted first."""
    if kind == "cpu":
        return [
            Workload("sft-trainer", "demo-llama", 8, 256),
            Workload("grpo-trl", "demo-qwen3", 128, 4, 8),
            Workload("grpo-trl", "demo-qwen3", 8, 256, 32, lengths="exponential", group=2),
            Workload("grpo-trl", "demo-qwen3", 8, 256, 32, lengths="even", group=2),
            Workload("grpo-trl", "demo-qwen3", 8, 64, 256, lengths="exponential"),
            Workload("grpo-trl", "demo-qwen3", 8, 64, 256, lengths="exponential", lora=8),
            Workload("sft-trainer", "demo-llama", 8, 256, lengths="exponential"),
            Workload("sft-trl", "demo-llama", 8, 256),
            Workload("sft-trainer", "demo-gemma3", 8, 256),
            Workload("sft-trainer", "demo-qwen3-moe", 8, 256),
            Workload("dpo-trl", "demo-llama", 4, length=240, prompt=16, least=14),
        ]
    return [
        Workload("sft-trainer", "llama-1b", 8, 2048),
        Workload("grpo-trl", "qwen3-0.6b", 8, 4096, 128),
        Workload("grpo-trl", "qwen3-0.6b", 8, 4096, 128, lengths="exponential", group=2),
        Workload("grpo-trl", "qwen3-0.6b", 8, 4096, 128, lengths="even", group=2),
        # One prompt for all rows.
        Workload("grpo-trl", "qwen3-0.6b", 8, 1024, 2048, lengths="exponential"),
        Workload("grpo-trl", "qwen3-4b", 8, 1024, 2048, lengths="exponential", lora=16),
        Workload("sft-trainer", "llama-1b", 8, 2048, lengths="exponential"),
        Workload("sft-trainer", "qwen3-moe", 8, 2048),
        Workload("sft-trainer", "qwen3-moe", 8, 2048, lengths="exponential"),
        Workload("grpo-trl", "qwen3-moe", 8, 1024, 128),
        # Long enough that plain and the kernels' step alike should be the device's time.
        Workload("grpo-trl", "qwen3-moe", 8, 4096, 128),
        Workload("sft-trl", "llama-1b", 8, 2048),
        Workload("sft-trainer", "gemma3-1b", 4, 2048),
        # Sequences of 30 to 900 tokens.
        Workload("dpo-trl", "llama-1b", 8, length=884, prompt=16, least=14),
        # Logits alone are 63 GiB in fp32 where a step forms them; those of half as many tokens leave room for the rest.
        Workload("sft-trainer", "llama-1b", 1, 131072, checkpointing=True),
        Workload("sft-trainer", "llama-1b", 1, 65536, checkpointing=True),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


# Where a child finds this module by its name, which is benchmarks.endtoend or npu_trainer_kernels.benchmarks.endtoend.
ROOT = Path(__file__).parents[__name__.count(".")]


def _child_environment() -> dict[str, str]:
    """One device: with several in sight the Trainer would spread the batch over them by itself."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    return {**one, **os.environ, "HF_HUB_OFFLINE": "1"}


def run(workload: Workload, variant: str, steps: int, timeout: float | None, module: str = __name__) -> Row:
    """Runs a workload in a process of its own and returns its row; a failure is a row too, and so is one that takes
    longer than `timeout` seconds. `module`: whose command line it is."""
    sizes = {f.name: getattr(workload, f.name) for f in fields(Workload) if f.name not in ("name", "size")}
    row: Row = {
        "group": "end-to-end", "op": workload.name, "shape": workload.shape, "sizes": sizes,
        "dtype": MODELS[workload.size][2], "provider": variant, "mode": "step", "status": "ok",
    }  # fmt: skip
    needed = VARIANTS[variant].module
    if needed and importlib.util.find_spec(needed) is None:
        return {**row, "status": "absent", "reason": f"ModuleNotFoundError: No module named {needed!r}"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [
            sys.executable, "-m", module, "--workload", json.dumps(asdict(workload)), "--variant", variant,
            "--steps", str(steps), "--output", str(output),
        ]  # fmt: skip
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, cwd=ROOT,
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


class Clock:
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
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer, seen = build_trainer(workload, VARIANTS[variant], warmup + steps, folder, clock)
        peak = _PeakMemory(device)
        trainer.train()
        peak_bytes = peak.bytes()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = [entry["loss"] for entry in logged], [float(entry["grad_norm"]) for entry in logged]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise RuntimeError(f"not finite: losses {losses}, gradient norms {norms}")
    summary = summarise([seconds * 1e3 for seconds in clock.seconds()[warmup - 1 :]])
    tokens = seen.live / seen.batches
    return {
        "ms": as_json(summary), "peak_bytes": peak_bytes, "tokens": tokens, "positions": seen.all / seen.batches,
        "live_share": seen.live / seen.all, "tokens_per_second": tokens / summary.median * 1e3,
        "losses": losses, "grad_norms": norms, "ran": ran(trainer),
        "version": package_version(VARIANTS[variant].package),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None, measured: Callable[..., Row] = train) -> int:
    """The child's command line. `measured`: what is done with the workload, see `train`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend", description="One workload, one variant.")
    parser.add_argument("--workload", required=True, metavar="JSON", help="the fields of Workload")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    workload = Workload(**json.loads(args.workload))
    for field, known in (("name", TRAINERS), ("size", MODELS), ("lengths", {"": "", **DISTRIBUTIONS})):
        if getattr(workload, field) not in known:
            parser.error(f"--workload: {field} must be one of {', '.join(known)}; got {getattr(workload, field)!r}")
    steps, warmup = (min(args.steps, 2), 1) if workload.is_long else (args.steps, 3)
    args.output.write_text(json.dumps(measured(workload, args.variant, steps, warmup)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
