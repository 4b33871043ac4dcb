"""Two or more GPUs: a training step plain and with the kernels, alone, under DDP and under FSDP2.

What is asked: does the kernel path add communication, and does it keep its gain? So beside time and memory every row
says how often each collective kernel ran in a step. "Alone" is the same step on every device at once, without wrapping:
what the devices would do if they had nothing to say to each other.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --output benchmarks/results/two-gpus.json

Random weights and ids, as in `endtoend.py`; no Trainer, so that nothing but model, wrapper and optimiser is timed.
"""

import argparse
import collections
import contextlib
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.cli._output import Output

from .cli import write_reports
from .endtoend import PACKAGES
from .measure import as_json, summarise
from .models import MODELS, build_model
from .results import Results, Row, environment, package_version

__all__ = ["WRAPPERS", "collectives", "main", "train"]

WRAPPERS = ("alone", "ddp", "fsdp2")
WARMUP = 3


def _wrap(model: Any, wrapper: str, device: torch.device) -> Any:
    if wrapper == "ddp":
        ids = None if device.type == "cpu" else [device.index]
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if wrapper == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def collectives(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """How often each collective runs on the device during `step`; on a CPU, is called."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        devices.synchronize(device)
    pattern = r"ncclDevKernel_(\w+?)_" if device.type == "cuda" else r"c10d::(\w+)"
    names = (match[1] for event in profile.events() if (match := re.match(pattern, event.name)))
    return dict(sorted(collections.Counter(names).items()))


def train(size: str, wrapper: str, kernels: bool, batch: int, length: int, steps: int, device: torch.device) -> Row:
    """Times `steps` steps on every rank; what this rank saw, beyond the row's key.

    Args:
        size: a key of `models.MODELS`.
        wrapper: one of `WRAPPERS`.
        kernels: whether the model is patched, before it is wrapped.
        batch, length: sequences of a rank and their tokens.
        steps: timed ones.
        device: of this rank.
    """
    model = build_model(size).to(device)
    with apply_npu_kernels(model) if kernels else contextlib.nullcontext():
        return _train(_wrap(model, wrapper, device), size, batch, length, steps, device)


def _train(model: Any, size: str, batch: int, length: int, steps: int, device: torch.device) -> Row:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(2 + distributed.get_rank())
    ids = torch.randint(3, MODELS[size][1]["vocab_size"], (batch, length), generator=generator).to(device)
    losses, norms, times = [], [], []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())

    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)
    for number in range(WARMUP + steps):
        start = time.perf_counter()
        step()
        devices.synchronize(device)
        if number >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
    peak = 0 if module is None else module.max_memory_allocated(device)
    summary = summarise(times)
    tokens = batch * length * distributed.get_world_size()
    return {
        "ms": as_json(summary), "tokens_per_second": tokens / summary.median * 1e3, "peak_bytes": peak,
        "losses": losses, "grad_norms": norms, "collectives": collectives(step, device),
    }  # fmt: skip


def _row(args: argparse.Namespace, wrapper: str, variant: str) -> Row:
    world = distributed.get_world_size()
    return {
        "group": "end-to-end", "op": f"sft-{wrapper}", "shape": f"{args.size} {world}x{args.batch}x{args.length}",
        "sizes": {"devices": world, "batch": args.batch, "length": args.length}, "dtype": MODELS[args.size][2],
        "provider": variant, "version": package_version(PACKAGES[variant]), "mode": "step", "status": "ok",
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, on every rank."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="benchmarks.distributed", description=__doc__)
    parser.add_argument("--size", choices=sorted(MODELS), default="llama-1b")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a device")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON), a report and plots beside it")
    args = parser.parse_args(arguments)
    kind = devices.accelerator()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    distributed.init_process_group({"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[kind])
    is_first = distributed.get_rank() == 0
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.distributed"))
    for wrapper in WRAPPERS:
        for variant in ("plain", "flag"):
            found = train(args.size, wrapper, variant == "flag", args.batch, args.length, args.steps, device)
            gc.collect()
            if kind != "cpu":
                torch.get_device_module(device).empty_cache()
            if is_first:
                results.add([{**_row(args, wrapper, variant), **found}])
                peak = found["peak_bytes"] / (1 << 30)
                print(f"{wrapper} {variant}: {found['ms']['median']:.1f} ms, {peak:.2f} GiB, {found['collectives']}")
    if is_first:
        with Output(as_json=False) as output:
            write_reports(results, output)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
