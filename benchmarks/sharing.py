"""From which share of saved tokens on it is worth while to compute once what rows begin with alike.

    python -m benchmarks.sharing --output benchmarks/results/NAME.json

A batch of eight rows, one prompt for all of them or four for two each, is trained on in one process, with sharing and
without it in turns: forward, loss and backward, layers checkpointed. Its prompts are as long as it takes for sharing to
save a given share of the tokens. The small model's step is mostly Python's time, to which sharing adds; the other
one's, with the layers of a model of 4B, is the device's. Steps are timed as `endtoend.py` does it. The first rows are
the most wanted ones, and each is in the file once it is measured; a file that is there is continued.
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

from .measure import as_json, summarise
from .models import MODELS, build_model
from .ranks import Peak, batch_of, free
from .results import Results, Row, environment, key_of, package_version
from .runner import ERRORS
from .step_cases import StepWorkload
from .step_clock import Clock
from .steps import PACKING_OP, sharing_from

__all__ = ["SHARES", "batches", "main", "measure", "saved", "with_prompts", "worth_from"]

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
WARM_UP = 2
# Shares that a batch has to save: with 0 beginnings are always shared, with 2 never.
_WAYS = {"shared": 0.0, "unshared": 2.0}


def batches(kind: str) -> list[StepWorkload]:
    """For a kind of device, without their prompts, the most wanted first."""
    if kind == "cpu":
        return [StepWorkload("sft", "demo-qwen3", 8, 128, lengths="exponential", group=group) for group in (8, 2)]
    return [
        StepWorkload("sft", "qwen3-4b-8-layers", 8, 4096, lengths="exponential", group=8),
        StepWorkload("sft", "qwen3-0.6b", 8, 1024, lengths="exponential", group=8),
        StepWorkload("sft", "qwen3-0.6b", 8, 1024, lengths="exponential", group=2),
    ]


def saved(workload: StepWorkload) -> float:
    """The share of its batch's tokens that sharing saves."""
    batch = batch_of(workload, 0, 1)
    with sharing_from(0.0):
        found = layout(np.where(batch["attention_mask"], batch["input_ids"], DEAD), share=True)
    if isinstance(found, str):
        raise ValueError(f"{workload.shape}: {found}")
    return 1 - len(found.places) / found.live


def with_prompts(workload: StepWorkload, share: float) -> StepWorkload:
    """The batch with the shortest prompts with which sharing saves such a share."""
    # Prompts are at least half as long as the longest one, in the mean; very short ones are not shared at all.
    most = 1 - 1 / workload.group
    lengths = range(1, 2 * math.ceil(share * workload.length / (most - share)) + 64)
    found = bisect.bisect_left(lengths, share, key=lambda length: saved(replace(workload, prompt=length)))
    return replace(workload, prompt=lengths[found])


def measure(model: Any, kernels: Any, workload: StepWorkload, samples: int, device: torch.device) -> Row:
    """Times steps of a model with the kernels; what a row has beyond its key.

    Raises:
        RuntimeError: padding was not left out, without which nothing is shared.
    """
    batch = {name: t.to(device) for name, t in batch_of(workload, 0, 1).items()}
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
    row: Row = {"share": saved(workload), "tokens": int(batch["attention_mask"].sum())}
    for number, way in enumerate(_WAYS):
        timed = slice(len(_WAYS) * WARM_UP + number, None, len(_WAYS))
        row[way] = {
            "ms": as_json(summarise(times[timed])), "peak_bytes": max(peaks[timed]), "loss": losses[number].item()
        }  # fmt: skip
    return {**row, "ratio": row["unshared"]["ms"]["median"] / row["shared"]["ms"]["median"]}


def worth_from(rows: Iterable[Row]) -> float | None:
    """The smallest share from which on sharing was not slower in any row; None: it was with the largest."""
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
    """Measures the rows that are missing, which are of one size of a model."""
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
    """The command line; returns 1 if a row failed."""
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
