"""Times `model.generate`, as in TRL's trainers without vLLM and in evaluation callbacks, plain and with the flag.

    python -m benchmarks.generation --output benchmarks/results/NAME.json

A forward of one token waits for Python, so this measures whether our calls cost more than those that they replace.
Prompts of several lengths are padded on the left, weights are random, and decoding is greedy up to a fixed number of
tokens. Plain and flag alternate in one process, with `apply_npu_kernels` and `restore` in between, as in the callback.
The ids of both are compared: in bf16 nearly equal logits may round differently, and after the first difference a row
continues with other tokens, so the position of the first difference is reported, and nothing fails. The file is written
after every model.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.timing import summarise

from .measure import as_json
from .models import MODELS, build_model
from .results import Results, environment, key_of, package_version

__all__ = ["VARIANTS", "compared", "main", "measure", "prompts"]

PROGRAM = "python -m benchmarks.generation"
VARIANTS = {"plain": "transformers", "flag": "npu_trainer_kernels"}
SIZES = ("qwen3-0.6b", "llama-1b", "qwen3-moe", "gemma3-1b")
CPU_SIZES = ("demo-qwen3", "demo-llama", "demo-qwen3-moe", "demo-gemma3")
BATCH, WARM_UP = 8, 2
Row = dict[str, Any]


def prompts(size: str, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns random ids and their mask: `BATCH` prompts of half the length to the full length, padded on the left."""
    lengths = torch.linspace(length // 2, length, BATCH).long()
    mask = (torch.arange(length) >= length - lengths[:, None]).long()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, MODELS[size][1]["vocab_size"], (BATCH, length), generator=generator) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def compared(ours: torch.Tensor, theirs: torch.Tensor) -> Row:
    """Returns the fraction of equal ids, and for each row the number of tokens before the first difference."""
    same = ours == theirs
    return {"equal_share": float(same.float().mean()), "equal_before": same.cumprod(1).sum(1).tolist()}


def measure(size: str, length: int, tokens: int, repetitions: int) -> dict[str, Row]:
    """Returns the fields of a model's rows beyond their keys, by variant."""
    device = torch.device(devices.accelerator())
    model = build_model(size, length=length + tokens).eval()
    given = prompts(size, length, device)
    each_ms: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    first_ms: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    ids: dict[str, torch.Tensor] = {}
    ran: dict[str, int] = {}

    def generate(count: int) -> tuple[torch.Tensor, float]:
        """Returns the new ids, and the milliseconds that they took."""
        gc.collect()
        devices.synchronize(device)
        start = time.perf_counter()
        found: torch.Tensor = model.generate(
            **given, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True, disable_compile=True
        )
        devices.synchronize(device)
        return found[:, length:], (time.perf_counter() - start) * 1e3

    # The first two turns are warm-up. They generate as many tokens as the others, because some work is done once for
    # each length of the cache.
    for turn in range(-WARM_UP, repetitions):
        # Each variant comes first equally often.
        for variant in list(VARIANTS)[:: 1 if turn % 2 == 0 else -1]:
            handle = apply_npu_kernels(model) if variant == "flag" else None
            _, first = generate(1)
            ids[variant], taken = generate(tokens)
            if turn >= 0:
                first_ms[variant].append(first)
                each_ms[variant].append(taken)
            if handle is not None:
                ran = handle.report().ran
                handle.restore()
    rows: dict[str, Row] = {}
    for variant, found in each_ms.items():
        summary = summarise(found)
        rows[variant] = {
            "ms": as_json(summary), "each_ms": found, "first_token_ms": as_json(summarise(first_ms[variant])),
            "tokens_per_second": BATCH * tokens / summary.median * 1e3,
        }  # fmt: skip
    rows["flag"] |= {"ran": ran, **compared(ids["flag"], ids["plain"])}
    return rows


def _line(size: str, rows: dict[str, Row]) -> str:
    plain, flag = rows["plain"], rows["flag"]
    first = [rows[variant]["first_token_ms"]["median"] for variant in VARIANTS]
    return (
        f"{size}: {plain['tokens_per_second']:.0f} tokens/s plain, {flag['tokens_per_second']:.0f} with the flag "
        f"({plain['ms']['median'] / flag['ms']['median']:.2f} x); the first token after {first[0]:.1f} and "
        f"{first[1]:.1f} ms; {flag['equal_share']:.0%} of the ids are equal, "
        f"rows part after {flag['equal_before']} tokens"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a model failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = torch.device(devices.accelerator())
    sizes = CPU_SIZES if device.type == "cpu" else SIZES
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON), continued if it is there")
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=sizes, metavar="SIZE", help=", ".join(MODELS))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="that are generated (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=8, help="of each variant (%(default)s)")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    args = parser.parse_args(arguments)
    if args.repetitions < 1:
        parser.error(f"--repetitions must be at least 1; got {args.repetitions}")
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.generation"))
    console, failed = Console(highlight=False, soft_wrap=True), 0
    for size in args.sizes:
        shape = f"{size} {BATCH}x({args.prompt // 2}..{args.prompt}+{args.tokens})"
        made: list[Row] = [
            {
                "group": "generation", "op": "generate", "shape": shape, "dtype": MODELS[size][2], "provider": variant,
                "mode": "generate", "status": "ok", "version": package_version(package),
            }
            for variant, package in VARIANTS.items()
        ]  # fmt: skip
        if all(results.has(key_of(row), row["version"]) for row in made):
            continue
        try:
            found = measure(size, args.prompt, args.tokens, args.repetitions)
        except RuntimeError as error:
            # A kernel cannot be launched, or memory is exhausted: the other models are still measured.
            reason = f"{error}"[:400]
            failed, found = 1, {variant: {"status": "error", "reason": reason} for variant in VARIANTS}
            console.print(f"{size}: {reason}")
        else:
            console.print(_line(size, found))
        results.add({**row, **found[row["provider"]]} for row in made)
    return failed


if __name__ == "__main__":
    sys.exit(main())
