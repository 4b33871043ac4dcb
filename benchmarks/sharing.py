"""Measures from which fraction of saved tokens on it is faster to compute common prefixes of rows once.

    python -m benchmarks.sharing --output benchmarks/results/NAME.json

One process runs steps (forward, loss, backward, with layers checkpointed) on a batch of eight rows with one prompt for
all of them, or four prompts for two rows each, alternately with and without sharing. The length of the prompts is
chosen so that sharing saves a certain fraction of the tokens. The small model's step is mostly Python's time, to which
sharing adds; the step of the other one, with the layers of a 4B model, is the device's time. Steps are timed as in
`endtoend.py`. The most important rows come first, and each is written once it is measured; an existing file is
continued.
"""

import argparse
import bisect
import itertools
import math
import operator
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.patching.body.layout import DEAD, layout

from .draws import Draws, live_tokens
from .measure import as_json, summarise
from .models import MODELS, build_model
from .ranks import Peak, free
from .results import Results, Row, environment, key_of, package_version
from .runner import ERRORS
from .step_cases import StepWorkload
from .step_clock import Clock
from .steps import PACKING_OP, sharing_from

__all__ = ["SHARES", "batches", "main", "measure", "saved", "with_prompts", "worth_from"]

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
WARM_UP = 2
# The fraction that sharing has to save: with 0 prefixes are always shared, with 2 never.
_WAYS = {"shared": 0.0, "unshared": 2.0}


def batches(kind: str) -> list[StepWorkload]:
    """Returns the batches for a kind of device, without prompts, the most important first."""
    if kind == "cpu":
        return [StepWorkload("sft", "demo-qwen3", 8, 128, lengths="exponential", group=group) for group in (8, 2)]
    return [
        StepWorkload("sft", "qwen3-4b-8-layers", 8, 4096, lengths="exponential", group=8),
        StepWorkload("sft", "qwen3-0.6b", 8, 1024, lengths="exponential", group=8),
        StepWorkload("sft", "qwen3-0.6b", 8, 1024, lengths="exponential", group=2),
    ]


def _batch(workload: StepWorkload) -> dict[str, torch.Tensor]:
    """Returns the workload's batch of typical lengths."""
    return Draws(workload, typical_from=0).batch(0)


def saved(workload: StepWorkload) -> float:
    """Returns the fraction of its batch's tokens that sharing saves."""
    batch = _batch(workload)
    with sharing_from(0.0):
        found = layout(np.where(batch["attention_mask"], batch["input_ids"], DEAD), share=True)
    if isinstance(found, str):
        raise ValueError(f"{workload.shape}: {found}")
    return 1 - len(found.places) / found.live


def with_prompts(workload: StepWorkload, share: float) -> StepWorkload:
    """Returns the workload with the shortest prompts with which sharing saves at least this fraction."""
    # The mean length of prompts is at least half of the longest one's; very short prompts are not shared at all.
    most = 1 - 1 / workload.group
    lengths = range(1, 2 * math.ceil(share * workload.length / (most - share)) + 64)
    found = bisect.bisect_left(lengths, share, key=lambda length: saved(replace(workload, prompt=length)))
    return replace(workload, prompt=lengths[found])


def measure(model: Any, kernels: Any, workload: StepWorkload, samples: int, device: torch.device) -> Row:
    """Times steps of a model with the kernels; returns the fields of a row beyond its key.

    Raises:
        RuntimeError: batches were not packed, without which nothing is shared.
    """
    batch = {name: t.to(device) for name, t in _batch(workload).items()}
    clock, losses, peaks, packed = Clock(device), [], [], kernels.report().ran.get(PACKING_OP, 0)
    clock.tick()
    for _ in range(WARM_UP + samples):
        for least in _WAYS.values():
            peak = Peak(device)
            with sharing_from(least):
                loss = model(**batch, use_cache=False).loss
                loss.backward()
            model.zero_grad()
            clock.tick()
            peaks.append(peak.bytes())
            losses.append(loss.detach())
    report = kernels.report()
    if report.ran.get(PACKING_OP, 0) - packed < len(losses):
        raise RuntimeError(f"{PACKING_OP} has not served every step: {report.text(full=True)}")
    times = [seconds * 1e3 for seconds in clock.seconds()]
    row: Row = {"share": saved(workload), "tokens": live_tokens(batch)}
    for number, way in enumerate(_WAYS):
        timed = slice(len(_WAYS) * WARM_UP + number, None, len(_WAYS))
        row[way] = {
            "ms": as_json(summarise(times[timed])), "peak_bytes": max(peaks[timed]), "loss": losses[number].item()
        }  # fmt: skip
    return {**row, "ratio": row["unshared"]["ms"]["median"] / row["shared"]["ms"]["median"]}


def worth_from(rows: Iterable[Row]) -> float | None:
    """Returns the smallest fraction from which on sharing was not slower in any row; None: it was slower even with the
    largest."""
    found = None
    for row in sorted(rows, key=lambda row: row["share"], reverse=True):
        if row["ratio"] < 1:
            break
        found = row["share"]
    return found


def _line(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['shape']}: {row['reason']}"
    shared, unshared = row["shared"], row["unshared"]
    return (
        f"{row['shape']}: saves {row['share']:.1%} of {row['tokens']} tokens; {shared['ms']['median']:.1f} ms, without "
        f"sharing {unshared['ms']['median']:.1f} ({row['ratio']:.3f} x); {shared['peak_bytes'] / (1 << 30):.2f} GiB, "
        f"{unshared['peak_bytes'] / (1 << 30):.2f}"
    )


def _measure_all(workloads: Sequence[StepWorkload], samples: int, deadline: float, results: Results) -> None:
    """Measures the missing rows of workloads with the same model."""
    size, device = workloads[0].size, torch.device(devices.accelerator())
    model = build_model(size, length=max(w.prompt + w.length for w in workloads))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with apply_npu_kernels(model) as kernels:
        for workload in workloads:
            row: Row = {
                "group": "sharing", "op": workload.name, "shape": workload.shape, "dtype": MODELS[size][2],
                "provider": "flag", "mode": "step", "version": package_version("npu_trainer_kernels"), "status": "ok",
                "batch": f"{size}, {workload.group} rows a prompt",
            }  # fmt: skip
            if results.has(key_of(row), row["version"]):
                continue
            if time.monotonic() > deadline:
                return
            try:
                row.update(measure(model, kernels, workload, samples, device))
            except ERRORS as error:
                row.update(status="error", reason=f"{type(error).__name__}: {error}"[:400])
            results.add([row])
            print(_line(row), flush=True)
            model.zero_grad()
            free(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON)")
    parser.add_argument("--samples", type=int, default=5, help="timed steps of each way in a row (default 5)")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    args = parser.parse_args(arguments)
    if args.samples < 1:
        parser.error(f"--samples must be at least 1; got {args.samples}")
    deadline = time.monotonic() + args.budget_seconds
    kind = devices.accelerator()
    device = torch.device(kind)
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.sharing"))
    for _, found in itertools.groupby(batches(kind), key=lambda workload: workload.size):
        workloads = [with_prompts(workload, share) for workload in found for share in SHARES]
        if time.monotonic() < deadline:
            _measure_all(workloads, args.samples, deadline, results)
            free(device)
    rows = results.find(group="sharing", status="ok")
    batch = operator.itemgetter("batch")
    worth = {name: worth_from(found) for name, found in itertools.groupby(sorted(rows, key=batch), key=batch)}
    results.meta["worth_from"] = worth
    results.add([])
    for name, share in worth.items():
        print(f"{name}: " + ("slower with the largest share" if share is None else f"not slower from {share:.1%} on"))
    return 1 if results.find(status="error") else 0


if __name__ == "__main__":
    sys.exit(main())
