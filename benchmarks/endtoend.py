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
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .lengths import DISTRIBUTIONS
from .models import MODELS
from .step_cases import VARIANTS, StepWorkload
from .step_clock import Clock
from .steps import TRAINERS, build_trainer, ran

__all__ = ["ROOT", "differs", "ratios", "run"]

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


# Where a child finds this module by its name, which is benchmarks.endtoend or npu_trainer_kernels.benchmarks.endtoend.
ROOT = Path(__file__).parents[__name__.count(".")]


def _child_environment() -> dict[str, str]:
    """One device: with several in sight the Trainer would spread the batch over them by itself."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    return {**one, **os.environ, "HF_HUB_OFFLINE": "1"}


def run(workload: StepWorkload, variant: str, steps: int, timeout: float | None, module: str = __name__) -> Row:
    """Runs a workload in a process of its own and returns its row; a failure is a row too, and so is one that takes
    longer than `timeout` seconds. `module`: whose command line it is."""
    sizes = {f.name: getattr(workload, f.name) for f in fields(StepWorkload) if f.name not in ("name", "size")}
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


def train(workload: StepWorkload, variant: str, steps: int, warmup: int = 3) -> Row:
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
    workload = StepWorkload(**json.loads(args.workload))
    for field, known in (("name", TRAINERS), ("size", MODELS), ("lengths", {"": "", **DISTRIBUTIONS})):
        if getattr(workload, field) not in known:
            parser.error(f"--workload: {field} must be one of {', '.join(known)}; got {getattr(workload, field)!r}")
    steps, warmup = (min(args.steps, 2), 1) if workload.is_long else (args.steps, 3)
    args.output.write_text(json.dumps(measured(workload, args.variant, steps, warmup)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
