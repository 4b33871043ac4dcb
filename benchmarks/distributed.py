"""Two or more GPUs: training steps plain and with the kernels, alone, under DDP and under FSDP2.

What is asked: does the kernel path add communication, and does it keep its gain? So beside time and memory every row
says how often each collective kernel ran in a step. "Alone" is the same step on every device at once, without wrapping:
what the devices would do if they had nothing to say to each other.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --output benchmarks/results/two-gpus.json

Random weights and ids, as in `endtoend.py`; no Trainer, so that nothing but model, wrapper and optimiser is timed. The
batches are those of `endtoend.py`, in its words: a workload without padding, some with lengths as users have them, and
one whose rows all begin with one prompt. What a rank gets differs from what the others get. Batches with prompts are
those of a GRPO update, and layers are checkpointed there, but the loss is the cross-entropy of the completions.
"""

import argparse
import collections
import contextlib
import gc
import itertools
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
from .endtoend import VARIANTS, Workload
from .lengths import DISTRIBUTIONS, lengths, prompt_lengths
from .measure import as_json, summarise
from .models import MODELS, build_model
from .results import Results, Row, environment, key_of, package_version
from .steps import kernels_of

__all__ = ["WRAPPERS", "batch_of", "collectives", "main", "train", "workloads"]

WRAPPERS = ("alone", "ddp", "fsdp2")
STEPS_OF = ("plain", "flag", "flag-padded")
WARMUP = 3
# Options that make a workload of one's own.
OF_ONE = ("batch", "length", "prompt", "lengths", "group")
_IGNORED = -100


def workloads(kind: str) -> list[Workload]:
    """Of each rank, by the kind of device."""
    if kind == "cpu":
        return [
            Workload("sft", "demo-llama", 4, 128),
            Workload("sft", "demo-llama", 4, 128, lengths="exponential"),
            Workload("sft", "demo-qwen3", 4, 64, 128, lengths="exponential"),
        ]
    return [
        Workload("sft", "llama-1b", 4, 2048),
        Workload("sft", "llama-1b", 4, 2048, lengths="exponential"),
        Workload("sft", "qwen3-0.6b", 8, 4096, 128, lengths="exponential", group=2),
        Workload("sft", "qwen3-0.6b", 8, 4096, 128, lengths="even", group=2),
        Workload("sft", "qwen3-0.6b", 8, 1024, 2048, lengths="exponential"),
    ]


def batch_of(workload: Workload, rank: int, world: int) -> dict[str, torch.Tensor]:
    """What a rank trains on at every step: ids and labels `[batch, length]`, and a mask where lengths differ."""
    drawn = torch.Generator().manual_seed(2 + rank)
    vocab, rows = MODELS[workload.size][1]["vocab_size"], workload.batch

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(3, vocab, shape, generator=drawn)

    if not workload.lengths:
        whole = ids(rows, workload.prompt + workload.length)
        return {"input_ids": whole, "labels": whole}
    # The ranks share the quantiles out: their counts of tokens differ, and are the distribution's together.
    mine = lengths(workload.lengths, rows * world, workload.length)[rank::world]
    columns = torch.arange(workload.prompt + max(mine))
    end = workload.prompt + torch.tensor(mine)
    groups = max(1, rows // workload.group)
    begin = workload.prompt - torch.tensor(prompt_lengths(groups, workload.prompt) if workload.prompt else [0] * groups)
    of_row = torch.arange(rows) * groups // rows
    live = (columns >= begin[of_row].unsqueeze(1)) & (columns < end.unsqueeze(1))
    prompts, completions = ids(groups, workload.prompt), ids(rows, max(mine))
    found = torch.cat((prompts[of_row], completions), 1).masked_fill(~live, 0)
    labels = found.masked_fill(~live | (columns < workload.prompt), _IGNORED)
    return {"input_ids": found, "attention_mask": live.long(), "labels": labels}


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


def train(workload: Workload, wrapper: str, variant: str, steps: int, device: torch.device) -> Row:
    """Times `steps` steps on every rank; what this rank saw, beyond the row's key.

    Args:
        workload: of each rank.
        wrapper: one of `WRAPPERS`.
        variant: one of `STEPS_OF`; the kernels are put in before the model is wrapped.
        steps: timed ones.
        device: of this rank.
    """
    model = build_model(workload.size).to(device)
    if workload.prompt:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    asked = kernels_of(VARIANTS[variant])
    patched = apply_npu_kernels(model, ops=asked.npu_kernels_ops) if asked.use_npu_kernels else contextlib.nullcontext()
    with patched:
        return _train(_wrap(model, wrapper, device), workload, steps, device)


def _train(model: Any, workload: Workload, steps: int, device: torch.device) -> Row:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    world = distributed.get_world_size()
    batch = {name: t.to(device) for name, t in batch_of(workload, distributed.get_rank(), world).items()}
    losses, norms, times = [], [], []

    def step() -> None:
        loss = model(**batch, use_cache=False).loss
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
    ids = batch["input_ids"]
    counts = torch.stack((batch.get("attention_mask", torch.ones_like(ids)).sum(), ids.new_tensor(ids.numel())))
    distributed.all_reduce(counts)
    live, positions = counts.tolist()
    return {
        "ms": as_json(summary), "tokens": live, "positions": positions, "live_share": live / positions,
        "tokens_per_second": live / summary.median * 1e3, "peak_bytes": peak,
        "losses": losses, "grad_norms": norms, "collectives": collectives(step, device),
    }  # fmt: skip


def _row(workload: Workload, wrapper: str, variant: str) -> Row:
    world = distributed.get_world_size()
    shape = workload.shape.replace(" ", f" {world}x", 1)
    sizes = {"devices": world, "batch": workload.batch, "length": workload.length, "prompt": workload.prompt}
    return {
        "group": "end-to-end", "op": f"{workload.name}-{wrapper}", "shape": shape,
        "sizes": {**sizes, "lengths": workload.lengths, "group": workload.group}, "dtype": MODELS[workload.size][2],
        "provider": variant, "version": package_version(VARIANTS[variant].package), "mode": "step", "status": "ok",
    }  # fmt: skip


def _wanted(args: argparse.Namespace, kind: str) -> list[Workload]:
    if args.size is None:
        return workloads(kind)
    given = {name: getattr(args, name) for name in OF_ONE if getattr(args, name) is not None}
    return [Workload(**{"name": "sft", "size": args.size, "batch": 8, "length": 2048, **given})]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, on every rank."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="benchmarks.distributed", description=__doc__)
    parser.add_argument("--size", choices=sorted(MODELS), default=None,
                        help="one workload of this model, instead of all of the device's kind")  # fmt: skip
    parser.add_argument("--batch", type=int, help="with --size: sequences of a device (default: 8)")
    parser.add_argument("--length", type=int, help="with --size: tokens after the prompt, at most (default: 2048)")
    parser.add_argument("--prompt", type=int, help="with --size: tokens of the longest prompt (default: 0)")
    parser.add_argument("--lengths", choices=sorted(DISTRIBUTIONS), help="with --size (default: all are alike)")
    parser.add_argument("--group", type=int, help="with --size: rows of one prompt (default: 8)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON), a report and plots beside it")
    args = parser.parse_args(arguments)
    given = [name for name in OF_ONE if getattr(args, name) is not None]
    if given and args.size is None:
        parser.error(f"--{given[0]} goes with --size")
    kind = devices.accelerator()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    distributed.init_process_group({"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[kind])
    is_first = distributed.get_rank() == 0
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.distributed"))
    for workload, wrapper, variant in itertools.product(_wanted(args, kind), WRAPPERS, STEPS_OF):
        row = _row(workload, wrapper, variant)
        # Asked of one rank, for all: a step that some do not take would leave the others waiting.
        known = torch.tensor(int(is_first and results.has(key_of(row), row["version"])), device=device)
        distributed.broadcast(known, 0)
        if known.item():
            continue
        found = train(workload, wrapper, variant, args.steps, device)
        gc.collect()
        if kind != "cpu":
            torch.get_device_module(device).empty_cache()
        if is_first:
            results.add([{**row, **found}])
            peak = found["peak_bytes"] / (1 << 30)
            print(f"{row['op']} {row['shape']} {variant}: {found['ms']['median']:.1f} ms, {peak:.2f} GiB, "
                  f"{found['live_share']:.1%} live, {found['collectives']}", flush=True)  # fmt: skip
    if is_first:
        with Output(as_json=False) as output:
            write_reports(results, output)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
