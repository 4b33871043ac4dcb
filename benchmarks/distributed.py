"""Measures training steps on two or more GPUs, plain, with the kernels and with Liger's, in several wrappers.

The rows show whether the kernels add communication, and whether they are still faster: in addition to time and memory
each has the number of collective kernels in a step. The wrappers are

alone   none: every device runs the same step at once, without communication (a trainer's ranks still exchange their
        logs);
ddp     `DistributedDataParallel`;
fsdp2   `fully_shard`, a unit for each layer;
fsdp2-gathered  the same, where a layer's weights stay gathered until its backward: fewer collectives, more memory;
tp      transformers' tensor-parallel plan for the model: all ranks have one batch, and each a slice of the weights.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --output benchmarks/results/two-gpus.json

Weights and ids are random, workloads are named, and each step has its own batch, as in `endtoend.py`. Ranks have
different batches, which do not depend on the number of ranks; under tp all have the first rank's. `sft` has no Trainer,
so only model, wrapper and optimiser are timed. `grpo-trl` is TRL's trainer with given rollouts, wrapped by accelerate;
collectives of the step's preparation count. TRL's trainer does not run under tp: instead there is `sft` with prompts,
whose batches are like a GRPO update's, with layers checkpointed and the cross-entropy of the completions as its loss.

The LM head is also measured by itself: with the whole vocabulary on every rank ("alone"), and with a slice of the
vocabulary on each rank ("tp"), whose loss and gradients are compared with the former's.

The most important rows come first. The same command continues an interrupted run, and tries failed rows again.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from npu_trainer_kernels import device as devices
from npu_trainer_kernels.cli.output import Output

from .cli import matcher, write_reports
from .endtoend import STEPS
from .lengths import DISTRIBUTIONS
from .models import MODELS
from .options import ONLY
from .ranks import WAYS, WRAPPERS, free, time_head, train
from .results import Results, Row, environment, key_of, package_version
from .run_times import LEAST_STEPS
from .runner import ERRORS, Budget
from .step_cases import VARIANTS, StepWorkload

__all__ = ["HEADS", "WITH_SIZE", "main", "plan", "rows_of"]

# Options that define a custom workload.
OF_ONE = ("batch", "length", "prompt", "lengths", "group")
# Variants of a custom workload.
WITH_SIZE = ("plain", "flag", "flag-padded", "liger")
# A workload, its wrappers and its variants.
Part = tuple[StepWorkload, tuple[str, ...], tuple[str, ...]]
# If a rank waits longer than this for another, the other one has failed.
_TIMEOUT = timedelta(minutes=3)
_PEERS = ("plain", "flag", "liger")
_DATA, _TENSOR, _GATHERED = WRAPPERS[:3], WRAPPERS[3:4], WRAPPERS[4:]
# LM heads, by the kind of device.
HEADS = {
    "cpu": [{"BT": 128, "H": 64, "V": 1000}],
    "other": [{"BT": 8192, "H": 4096, "V": 128256}, {"BT": 16384, "H": 2048, "V": 128256}],
}


def plan(kind: str) -> list[Part]:
    """Returns the parts for a kind of device, the most important first. A workload's batch is that of each rank; under
    tp, of all ranks."""
    if kind == "cpu":
        return [
            (StepWorkload("sft", "demo-llama", 4, 128), _DATA, WITH_SIZE[:3]),
            (StepWorkload("sft", "demo-llama", 4, 128, lengths="exponential"), _DATA, WITH_SIZE[:3]),
            # accelerate does not support FSDP on CPUs.
            (StepWorkload("grpo-trl", "demo-qwen3", 4, 64, 32, lengths="exponential", group=2), _DATA[:2], _PEERS[:2]),
            (StepWorkload("sft", "demo-qwen3", 4, 64, 128, lengths="exponential"), WRAPPERS, WITH_SIZE[:3]),
            (StepWorkload("sft", "demo-qwen3-moe", 4, 128), (*_DATA, *_TENSOR), _PEERS[:2]),
        ]
    updates = {
        which: StepWorkload("grpo-trl", "qwen3-0.6b", 8, 4096, 128, lengths=which, group=2) for which in DISTRIBUTIONS
    }
    completions = [replace(workload, name="sft") for workload in updates.values()]
    whole_rows, experts = StepWorkload("sft", "llama-1b", 4, 2048), StepWorkload("sft", "qwen3-moe", 8, 2048)
    as_they_are = StepWorkload("sft", "llama-1b", 4, 2048, lengths="exponential")
    # One prompt for all rows of a rank.
    one_prompt = StepWorkload("grpo-trl", "qwen3-0.6b", 8, 1024, 2048, lengths="exponential", whole_prompts=True)
    # Larger batches, for which the kernels leave memory: the device, not the host, limits the step.
    with_more_rows = [
        replace(workload, batch=times * workload.batch) for workload, times in (
            (as_they_are, 4), (updates["exponential"], 4), (updates["exponential"], 8), (updates["even"], 2),
            (one_prompt, 4),
        )
    ]  # fmt: skip
    # So short that the host limits it.
    short = StepWorkload("grpo-trl", "qwen3-0.6b", 8, 512, 128, lengths="exponential")
    return [
        (short, _DATA, ("plain", "flag", "flag-eager", "flag-body")),
        (whole_rows, _DATA, _PEERS),
        (whole_rows, _TENSOR, _PEERS[:2]),
        (updates["exponential"], _DATA, _PEERS),
        (experts, (*_DATA, *_TENSOR), _PEERS[:2]),
        (updates["even"], _DATA, _PEERS),
        *((workload, _TENSOR, _PEERS[:2]) for workload in completions),
        (as_they_are, _DATA, WITH_SIZE),
        (as_they_are, _DATA, ("flag-body", "flag-eager")),
        (one_prompt, _DATA, ("flag-body", "flag-eager")),
        (updates["exponential"], _DATA[1:], ("flag-unbalanced",)),
        (experts, _DATA, _PEERS[2:]),
        (one_prompt, _DATA, _PEERS),
        *((workload, _DATA, _PEERS[:2]) for workload in with_more_rows),
        *((workload, _GATHERED, _PEERS[:2]) for workload in (as_they_are, updates["exponential"])),
        # The largest model whose optimiser state fits on one device.
        (StepWorkload("sft", "llama-8b", 3, 2048, lengths="exponential"), _DATA, _PEERS[:2]),
        # Liger's kernels do not support sliced weights, and may crash the device: these rows are last.
        *((workload, _TENSOR, _PEERS[2:]) for workload in (whole_rows, experts)),
    ]


def rows_of(parts: Sequence[Part]) -> list[tuple[StepWorkload, str, str]]:
    """Returns workload, wrapper and variant of every row: part by part, and within a part wrapper by wrapper."""
    return [(workload, wrapper, variant) for workload, wrappers, variants in parts
            for wrapper in wrappers for variant in variants]  # fmt: skip


def _row(workload: StepWorkload, wrapper: str, variant: str) -> Row:
    world = distributed.get_world_size()
    shape = f"{workload.shape} by {world}" if wrapper == "tp" else workload.shape.replace(" ", f" {world}x", 1)
    sizes = {"devices": world, "batch": workload.batch, "length": workload.length, "prompt": workload.prompt}
    return {
        "group": "end-to-end", "op": f"{workload.name}-{wrapper}", "shape": shape,
        "sizes": {**sizes, "lengths": workload.lengths, "group": workload.group, "least": 0},
        "dtype": MODELS[workload.size][2], "provider": variant,
        "version": package_version(VARIANTS[variant].package), "mode": "run", "status": "ok",
    }  # fmt: skip


def _head_row(sizes: dict[str, int], dtype: str, way: str) -> Row:
    return {
        "group": "ops", "op": "linear_cross_entropy-ranks", "shape": " ".join(f"{k}={v}" for k, v in sizes.items()),
        "sizes": {**sizes, "devices": distributed.get_world_size()}, "dtype": dtype, "provider": way,
        "version": package_version("npu_trainer_kernels"), "mode": "both", "status": "ok",
    }  # fmt: skip


def _tasks(args: argparse.Namespace, kind: str, device: torch.device) -> list[tuple[Row, Callable[[], Row]]]:
    """Returns for every row its fields, and the function that measures it."""
    found: list[tuple[Row, Callable[[], Row]]] = []
    if args.size is None:
        dtype = "float32" if kind == "cpu" else "bfloat16"
        for sizes, way in itertools.product(HEADS.get(kind, HEADS["other"]), WAYS):
            call = functools.partial(time_head, sizes, getattr(torch, dtype), way, device)
            found.append((_head_row(sizes, dtype, way), call))
    for workload, wrapper, variant in rows_of(_parts(args, kind)):
        call = functools.partial(train, workload, wrapper, variant, args.steps, device)
        found.append((_row(workload, wrapper, variant), call))
    return found


def _parts(args: argparse.Namespace, kind: str) -> list[Part]:
    if args.size is None:
        return plan(kind)
    given = {name: getattr(args, name) for name in OF_ONE if getattr(args, name) is not None}
    one = StepWorkload(**{"name": "sft", "size": args.size, "batch": 8, "length": 2048, **given})
    return [(one, WRAPPERS, WITH_SIZE)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.distributed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--size", choices=sorted(MODELS), default=None,
                        help="one workload of this model, instead of all of the device's kind")  # fmt: skip
    parser.add_argument("--batch", type=int, help="with --size: sequences of a device (default: 8)")
    parser.add_argument("--length", type=int, help="with --size: tokens after the prompt, at most (default: 2048)")
    parser.add_argument("--prompt", type=int, help="with --size: tokens of the longest prompt (default: 0)")
    parser.add_argument("--lengths", choices=sorted(DISTRIBUTIONS), help="with --size (default: all are alike)")
    parser.add_argument("--group", type=int, help="with --size: rows of one prompt (default: 8)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help=ONLY)
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="the opposite of --only")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed training steps of a run (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=None,
                        help="begin no row after so many; the next run goes on (default: no limit)")  # fmt: skip
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON), a report and plots beside it")
    return parser


def _checked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    given = [name for name in OF_ONE if getattr(args, name) is not None]
    if given and args.size is None:
        parser.error(f"--{given[0]} goes with --size")
    if args.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}; got {args.steps}")
    if args.budget_seconds is not None and args.budget_seconds <= 0:
        parser.error(f"--budget-seconds must be positive; got {args.budget_seconds}")
    return args


class _Together:
    """Exchanges values between ranks through their store: after a failure, ranks must not use collectives, in which
    others may be waiting."""

    def __init__(self, store: distributed.Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = distributed.PrefixStore("rows", store), rank, ranks
        self._asked = 0

    def everybody(self, mine: Any) -> list[Any]:
        """Returns the values of all ranks, in order; values must be JSON-serializable."""
        self._asked += 1
        self._store.set(f"{self._asked}/{self._rank}", json.dumps(mine))
        return [json.loads(self._store.get(f"{self._asked}/{rank}")) for rank in range(self._ranks)]

    def first_says(self, value: bool) -> bool:
        """Returns the first rank's value on all ranks."""
        return bool(self.everybody(value)[0])

    def failures(self, mine: str) -> list[str]:
        """Returns the error messages of all ranks that are not empty."""
        return [said for said in self.everybody(mine) if said]


def _measured(row: Row, together: _Together, step: Callable[[], Row]) -> Row:
    """Returns the row with its results, or with the first error of any rank."""
    found, reason, absent = {}, "", False
    try:
        found = step()
    except ERRORS as error:
        absent = isinstance(error, ImportError)
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0][:400]
    failures = together.failures(reason)
    if not failures:
        # The profiles of all ranks are stored: the slowest rank decides the step's time, and waiting for another rank
        # looks like work on the device.
        first, *others = together.everybody(found.get("profiled"))
        return {**row, **found, **({"profiled": first, "profiled_others": others} if first else {})}
    return {**row, "status": "absent" if absent else "error", "reason": failures[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, on every rank."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = _checked(arguments)
    kind = devices.accelerator()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    store, rank, ranks = next(rendezvous("env://"))
    store.set_timeout(2 * _TIMEOUT)
    distributed.init_process_group({"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[kind], timeout=_TIMEOUT,
                                   store=store, rank=rank, world_size=ranks)  # fmt: skip
    together, budget = _Together(store, rank, ranks), Budget(args.budget_seconds)
    is_first, wanted = rank == 0, matcher(args.only, args.skip)
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.distributed"))
    left = 0
    for row, call in _tasks(args, kind, device):
        key = key_of(row)
        if not wanted(key.rpartition("/")[0]) or together.first_says(results.has(key, row["version"])):
            continue
        if together.first_says(budget.left() <= 0):
            left += 1
            continue
        measured = _measured(row, together, call)
        free(device)
        if is_first:
            results.add([measured])
            print(_line(measured), flush=True)
    if is_first:
        with Output(as_json=False) as output:
            write_reports(results, output)
            if left:
                output.text(f"{left} not measured; the same command goes on with them")
    distributed.destroy_process_group()
    return 0


def _line(row: Row) -> str:
    start = f"{row['op']} {row['shape']} {row['provider']}:"
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason']}"
    if row["group"] == "ops":
        return f"{start} {row['ms']['median']:.2f} ms, {row['extra_bytes'] / (1 << 20):.0f} MiB, {row['errors']}"
    peak = row["peak_bytes"] / (1 << 30)
    return (f"{start} {row['mean_ms']:.1f} ms, {row['tokens_per_second']:.0f} tokens/s, {peak:.2f} GiB, "
            f"{row['live_share']:.1%} live, {row['collectives']}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
