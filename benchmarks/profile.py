"""Shows whether the time of a training step is the device's work or waiting for the host.

    python -m benchmarks.profile --only grpo-trl/qwen3-moe --output benchmarks/results/NAME.json

The workloads are those of `endtoend.py`, each variant in a separate process. Steps are timed without a profiler; then,
on CUDA only, one more step is profiled: the host's time until all work was enqueued (with the preparation of the batch,
which is also listed separately), the time that the device was busy, the numbers of kernels and copies and of our
launches among them, and the kernels that took longest. The host's calls are not recorded, since that would slow it
down.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from npu_trainer_kernels import device as devices

from . import endtoend
from .cli import matcher
from .measure import as_json, summarise
from .options import ONLY
from .ranks import last_step_profiled
from .results import Results, Row, environment, package_version
from .step_cases import VARIANTS, StepWorkload, variants_of, workloads
from .step_clock import Clock
from .steps import build_trainer

__all__ = ["main", "measure"]

PROGRAM = "python -m benchmarks.profile"


class _Clock(Clock):
    """A clock that records how long the host prepared the last step's batch."""

    prepared = 0.0

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        start = time.perf_counter()
        with super().prepare():
            yield
        self.prepared = time.perf_counter() - start


def measure(workload: StepWorkload, variant: str, steps: int, warmup: int = 3) -> Row:
    """Returns the fields of a row beyond its key, from steps without a profiler and one with it."""
    device = torch.device(devices.accelerator())
    clock, total = _Clock(device), warmup + steps + 1
    with tempfile.TemporaryDirectory() as folder:
        trainer, seen = build_trainer(workload, VARIANTS[variant], total, folder, clock)
        with last_step_profiled(trainer, total, device) as found:
            trainer.train()
    times = [seconds * 1e3 for seconds in clock.seconds()[warmup - 1 : -1]]
    if "profiled" in found:
        found["profiled"]["preparation_ms"] = clock.prepared * 1e3
    return {
        "ms": as_json(summarise(times)), "each_ms": times, "tokens": seen.live / seen.batches, **found,
        "version": package_version(VARIANTS[variant].package),
    }  # fmt: skip


def _line(row: Row) -> str:
    """Returns a line for a row."""
    title = f"{row['op']} {row['shape']} {row['provider']}"
    if row["status"] != "ok":
        return f"{title}: {row['reason']}"
    step = f"{title}: {row['ms']['median']:.1f} ms"
    if "profiled" not in row:
        return f"{step}; what the device did is recorded on CUDA alone"
    found = row["profiled"]
    return (
        f"{step}; in one with the profiler ({found['step_ms']:.1f} ms, {found['preparation_ms']:.1f} of them to "
        f"prepare its batch) the host asks for work for {found['host_ms']:.1f} ms and the device is busy for "
        f"{found['device_busy_ms']:.1f}, with {found['events']} kernels and copies, {found['launches_of_ours']} of ours"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--workload" in arguments:
        return endtoend.main(arguments, measure)
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="results file (JSON); rows of one that is there are replaced"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help=ONLY)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["plain", "flag"], metavar="VARIANT",
                        help=", ".join(VARIANTS) + " (default: plain flag)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="timed ones, without the profiler (%(default)s)")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1; got {args.steps}")
    device, wanted = torch.device(devices.accelerator()), matcher(args.only, [])
    pairs = [
        (workload, variant) for workload in workloads(device.type) for variant in args.variants
        if variant in variants_of(workload) and wanted(f"{workload.key}/{variant}")
    ]  # fmt: skip
    if not pairs:
        parser.error(f"--only {' '.join(args.only)} leaves no row of {', '.join(args.variants)} on {device.type}")
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.profile"))
    for workload, variant in pairs:
        row = endtoend.run(workload, variant, args.steps, None, f"{endtoend.__package__}.profile")
        row = {"version": package_version(VARIANTS[variant].package), **row, "group": "profile"}
        results.add([row])
        print(_line(row), flush=True)
    return 1 if results.find(group="profile", status="error") else 0


if __name__ == "__main__":
    sys.exit(main())
