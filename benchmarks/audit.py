"""Measures the time and memory of the audit before the first step, and how close served calls are to its limit.

    python -m benchmarks.audit --output benchmarks/results/NAME.json

Each model is trained for three steps (forward, loss, backward) on one padded batch, in bf16 and in fp32, in one
process; only the first step has the audit (`NpuKernels.audit`). A row has the audit's report, and the time and peak
memory of each step. The first step of a model also compiles kernels, so every model runs twice, and the second run
counts.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels import device as devices

from .draws import Draws
from .models import build_model
from .ranks import free
from .results import Results, Row, environment
from .step_cases import StepWorkload

__all__ = ["main", "measure", "workloads"]

_STEPS = 3


def workloads(kind: str) -> list[StepWorkload]:
    """Returns the workloads for a kind of device."""
    if kind == "cpu":
        return [StepWorkload("sft", name, 8, 128, lengths="exponential") for name in ("demo-llama", "demo-qwen3-moe")]
    names = ("qwen3-0.6b", "llama-1b", "gemma3-1b", "qwen3-moe")
    return [StepWorkload("sft", name, 8, 1024, lengths="exponential") for name in names]


def measure(workload: StepWorkload, dtype: torch.dtype, device: torch.device) -> Row:
    """Measures one row."""
    on_card = device.type != "cpu"
    memory: Any = getattr(torch, device.type)
    model = build_model(workload.size).to(dtype)
    batch = {name: value.to(device) for name, value in Draws(workload, typical_from=0).batch(0).items()}
    seconds, peaks = [], []
    with apply_npu_kernels(model) as kernels:
        kernels.audit(lambda sentence: print(sentence, file=sys.stderr))
        for _ in range(_STEPS):
            if on_card:
                memory.synchronize()
                memory.reset_peak_memory_stats()
            begun = time.perf_counter()
            model(**batch, use_cache=False).loss.backward()
            model.zero_grad()
            if on_card:
                memory.synchronize()
                peaks.append(round(memory.max_memory_allocated() / 2**20))
            seconds.append(round(time.perf_counter() - begun, 4))
        (found,) = kernels.report().as_dict()["audits"]
    return {
        "group": "audit", "op": workload.name, "shape": workload.shape, "dtype": str(dtype).removeprefix("torch."),
        "provider": "flag", "mode": "both", "status": "ok", **found, "step_seconds": seconds, "peak_mib": peaks,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the results file; returns 1 if a served call differed by more than the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON)")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser.parse_args(arguments)
    kind = devices.accelerator()
    device = torch.device(kind)
    results = Results(
        args.output,
        environment(device, arguments, args.commit, "benchmarks.audit"),
    )
    differing = []
    for workload in workloads(kind):
        for dtype in (torch.bfloat16, torch.float32):
            measure(workload, dtype, device)
            row = measure(workload, dtype, device)
            free(device)
            results.add([row])
            differing += row["differing"]
            print(
                f"{row['shape']} {row['dtype']}: {row['calls']} calls, {row['farthest']:.0%} of the limit, "
                f"{row['seconds']:.2f} s; steps {row['step_seconds']} s, peaks {row['peak_mib']} MiB",
                flush=True,
            )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
