"""Measures runs of real trainers, plain, with the flag and with its peers: time, memory, and what the device did.

Each run is a separate process with its own peak memory; one parent runs all variants of a workload, one after the
other. Models have random weights and data are random ids, on which the results do not depend. They do depend on
lengths: each step of a run has its own (`draws.py`), the same for all variants. Tokens and positions are counted in the
batches that ran.

A step is timed from the end of the previous step to its own end, with data loading and the Trainer, on the device's
clock: the measurement does not wait for the device where training would not. Compiling and capturing count in the step
in which they happen. After the timed steps four more run, on CUDA, the last two of them under a profiler of the device
alone: how long it was busy, and when the host had asked for all work. Their lengths are typical: as many tokens as the
distribution's mean.
`run_times.py` has the figures. The optimiser is the Trainer's default. In the GRPO update generation returns given ids,
and the step is timed without the preparation of the batch (rewards, decoding), which uses no kernels. DPO's reference
is a second model with the policy's initial weights: the first loss is log 2, 0.6931, if both compute the same.

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
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from .lengths import DISTRIBUTIONS
from .models import MODELS
from .step_cases import VARIANTS, StepWorkload
from .step_clock import Clock
from .steps import TRAINERS, bodies_replayed, build_trainer, captured, ran, reports_of

__all__ = ["ROOT", "STEPS", "differs", "ratios", "run"]

Row = dict[str, Any]
# The timed steps of a run by default; of steps that take seconds, at most; those that are profiled after them, and as
# many like them ahead of these, so that a graph for their lengths is not captured in the profile.
STEPS, _LONG_STEPS, _PROFILED = 50, 4, 2


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


# The folder in which a child can import this module: as benchmarks.endtoend or npu_trainer_kernels.benchmarks.endtoend.
ROOT = Path(__file__).parents[__name__.count(".")]


def _child_environment() -> dict[str, str]:
    """Returns an environment with one visible device: with several the Trainer would distribute the batch over them."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    return {**one, **os.environ, "HF_HUB_OFFLINE": "1"}


def run(workload: StepWorkload, variant: str, steps: int, timeout: float | None) -> Row:
    """Runs a workload in a separate process; returns its row, also after a failure or more than `timeout` seconds."""
    sizes = {f.name: getattr(workload, f.name) for f in fields(StepWorkload) if f.name not in ("name", "size")}
    row: Row = {
        "group": "end-to-end", "op": workload.name, "shape": workload.shape, "sizes": sizes,
        "dtype": MODELS[workload.size][2], "provider": variant, "mode": "run", "status": "ok",
    }  # fmt: skip
    needed = VARIANTS[variant].module
    if needed and importlib.util.find_spec(needed) is None:
        return {**row, "status": "absent", "reason": f"ModuleNotFoundError: No module named {needed!r}"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [
            sys.executable, "-m", __name__, "--workload", json.dumps(asdict(workload)), "--variant", variant,
            "--steps", str(steps), "--output", str(output),
        ]  # fmt: skip
        begun = time.perf_counter()
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
        found = json.loads(output.read_text(encoding="utf-8"))
        return {**row, **found, "process_seconds": round(time.perf_counter() - begun, 1)}


def ratios(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Returns (speed / plain, peak memory / plain) for each patched variant of one workload. The tokens per second of
    older rows are those of a median step."""
    done = {r["provider"]: r for r in rows if r["status"] == "ok"}
    plain = done.get("plain")
    if plain is None:
        return {}
    return {
        name: (r["tokens_per_second"] / plain["tokens_per_second"], r["peak_bytes"] / max(1, plain["peak_bytes"]))
        for name, r in done.items()
        if name != "plain"
    }


def differs(row: Row, plain: Row) -> bool:
    """Whether a run's first loss or gradient norm differs from the unpatched run's by more than rounding in its
    dtype."""
    tolerance = {"bfloat16": 0.02, "float32": 1e-3}[row["dtype"]]
    return any(
        abs(row[name][0] - plain[name][0]) > tolerance * max(abs(plain[name][0]), 1e-3)
        for name in ("losses", "grad_norms")
    )


# ---------------------------------------------------------------------------------------------------------------------
# The child
# ---------------------------------------------------------------------------------------------------------------------


class _PeakMemory:
    """The peak memory of this process: on an accelerator the allocator's, else the increase of resident memory since
    this object was created."""

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

    def reserved(self) -> dict[str, int]:
        """Returns the most that the allocator held: graphs keep memory in which no tensor is known to it."""
        return {} if self._module is None else {"reserved_bytes": self._module.max_memory_reserved()}

    @staticmethod
    def _resident() -> int:
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def profiled_steps(device: Any) -> int:
    """Returns how many steps are profiled after the timed ones: of CUDA alone is it known what the device did."""
    return _PROFILED if device.type == "cuda" else 0


def train(workload: StepWorkload, variant: str, steps: int) -> Row:
    """Trains in this process and returns the fields of a row beyond its key.

    Args:
        workload: the workload.
        variant: a key of `VARIANTS`.
        steps: the number of timed steps, at least `LEAST_STEPS`.

    Raises:
        ImportError: the variant's package is not installed.
        RuntimeError: the loss is not finite.
    """
    import torch

    from npu_trainer_kernels import device as devices

    from .ranks import last_steps_profiled
    from .results import package_version
    from .run_times import figures

    device = torch.device(devices.accelerator())
    clock, profiled = Clock(device), profiled_steps(device)
    total = steps + 2 * profiled
    with tempfile.TemporaryDirectory() as folder:
        trainer, seen = build_trainer(workload, VARIANTS[variant], total, folder, clock, typical=2 * profiled)
        peak = _PeakMemory(device)
        with last_steps_profiled(trainer, total, device, profiled) as found:
            trainer.train()
        memory = {"peak_bytes": peak.bytes(), **peak.reserved()}
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = [entry["loss"] for entry in logged], [float(entry["grad_norm"]) for entry in logged]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise RuntimeError(f"not finite: losses {losses}, gradient norms {norms}")
    busy = None
    if "profiled" in found:
        busy = found["profiled"]["device_busy_ms"]
        found["profiled"]["preparation_ms"] = 1e3 * fmean(clock.prepared[-profiled:])
    return {
        **figures(clock.seconds()[: steps - 1], seen.live, seen.all, busy), **memory, **found,
        "losses": losses, "grad_norms": norms, "ran": ran(trainer), **captured(reports_of(trainer)),
        "bodies_replayed": bodies_replayed(logged), "version": package_version(VARIANTS[variant].package),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the child's command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend", description="One workload, one variant.")
    parser.add_argument("--workload", required=True, metavar="JSON", help="the fields of Workload")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    workload = StepWorkload(**json.loads(args.workload))
    for field, known in (("name", TRAINERS), ("size", MODELS), ("lengths", {"": "", **DISTRIBUTIONS})):
        if getattr(workload, field) not in known:
            parser.error(f"--workload: {field} must be one of {', '.join(known)}; got {getattr(workload, field)!r}")
    steps = min(args.steps, _LONG_STEPS) if workload.is_long else args.steps
    args.output.write_text(json.dumps(train(workload, args.variant, steps)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
