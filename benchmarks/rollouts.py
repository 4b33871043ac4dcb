"""Times completions as TRL's trainers generate them, by every way that needs no second engine.

    python -m benchmarks.rollouts --output benchmarks/results/NAME.json

Prompts of several lengths (half of `--prompt` to all of it) get `--tokens` tokens each, drawn with temperature 1.
With `--ends MEAN` so
many ids end a row that it makes MEAN tokens on average, and lengths differ as those of completions do. Weights are
random and in bf16. The ways, one after the other in one process:

- `generate`: transformers' loop, as TRL calls it by default;
- `steps`: this package's captured steps (`npu_trainer_kernels.rollouts`);
- `continuous`: transformers' continuous batching (TRL's `use_transformers_continuous_batching`), with its graphs;
- `static`: `generate` with a static cache, whose step transformers compiles with Inductor.

A way runs once as warm-up, which compiles and captures, and then `--repetitions` times. `bytes_ms` is the time that the
weights and the live keys and values of a token need at the bandwidth of a copy of 2 GiB in the same run. The file is
written after every way.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig

from npu_trainer_kernels import apply_npu_kernels, serve_rollouts
from npu_trainer_kernels import device as devices
from npu_trainer_kernels.timing import summarise

from .measure import as_json
from .models import MODELS, build_model
from .results import Results, environment, key_of, package_version

__all__ = ["WAYS", "main", "measure", "prompts"]

PROGRAM = "python -m benchmarks.rollouts"
WAYS = {
    "generate": "transformers",
    "steps": "npu_trainer_kernels",
    "continuous": "transformers",
    "static": "transformers",
}
# Model and rows.
CASES = (("qwen3-0.6b", 8), ("qwen3-0.6b", 64), ("llama-1b", 8), ("llama-1b", 64), ("qwen3-4b", 32))
CPU_CASES = (("demo-qwen3", 8),)
Row = dict[str, Any]


def prompts(size: str, rows: int, length: int) -> list[list[int]]:
    """Returns random ids: prompts of half the length to the full length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(length // 2, length, rows).long().tolist()
    return [torch.randint(2, MODELS[size][1]["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def _bandwidth(device: torch.device) -> float:
    """Returns the bytes per second of a copy, read and written."""
    size = 1 << (30 if device.type != "cpu" else 26)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(8):
        devices.synchronize(device)
        begun = time.perf_counter()
        target.copy_(source)
        devices.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return 2 * size / sorted(taken)[4]


def _bytes_of_a_token(model: Any, given: list[list[int]], tokens: int) -> float:
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = model.dtype.itemsize
    places = sum(len(prompt) + tokens / 2 for prompt in given)
    cache = places * 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize
    return float(sum(p.nbytes for p in model.parameters()) + cache)


def _ends(vocabulary: int, mean: int | None) -> list[int]:
    """Returns the ids that end a row. Logits of random weights are nearly uniform, so lengths are geometric."""
    return list(range(1, 2 + (0 if mean is None else vocabulary // mean)))


def _made(completions: torch.Tensor, ends: list[int]) -> int:
    """Returns the number of tokens of completions [B, N]: an end counts, and what follows it does not."""
    ended = torch.isin(completions, torch.tensor(ends, device=completions.device)).cumsum(1)
    return int(((ended == 0).sum(1) + (ended[:, -1] > 0)).sum())


def _ways(
    model: Any, given: list[list[int]], tokens: int, mean: int | None, device: torch.device
) -> dict[str, Callable[[], Any]]:
    width = max(map(len, given))
    ids, mask = (torch.zeros(len(given), width, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(given):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    padded = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    ends = _ends(model.config.get_text_config().vocab_size, mean)
    options = {"max_new_tokens": tokens, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": ends,
               **({"min_new_tokens": tokens} if mean is None else {})}  # fmt: skip
    config = GenerationConfig(**options, disable_compile=True)

    def continuous() -> int:
        found = model.generate_batch(given, generation_config=GenerationConfig(**options), progress_bar=False)
        return sum(len(output.generated_tokens) for output in found.values())

    def made(sequences: torch.Tensor) -> int:
        return _made(sequences[:, width:], ends)

    return {
        "generate": lambda: made(model.generate(**padded, generation_config=config)),
        "steps": lambda: made(model.generate(**padded, generation_config=config)),
        "continuous": continuous,
        "static": lambda: made(
            model.generate(**padded, generation_config=GenerationConfig(**options, cache_implementation="static"))
        ),
    }


def measure(size: str, rows: int, way: str, length: int, tokens: int, mean: int | None, repetitions: int) -> Row:
    """Returns the fields of a row beyond its key."""
    device = torch.device(devices.accelerator())
    model = build_model(size, length=length + tokens).eval()
    given = prompts(size, rows, length)
    bandwidth, needed = _bandwidth(device), _bytes_of_a_token(model, given, tokens)
    kernels = apply_npu_kernels(model) if way == "steps" else None
    served = None if kernels is None else serve_rollouts(kernels)
    run = _ways(model, given, tokens, mean, device)[way]
    on_card = device.type != "cpu"
    if on_card:
        torch.get_device_module(device).reset_peak_memory_stats()
    each: list[float] = []
    counts: list[int] = []
    # The second warm-up keeps what the first has captured.
    for turn in range(-2 if way == "steps" else -1, repetitions):
        devices.synchronize(device)
        begun = time.perf_counter()
        with torch.no_grad():
            count = run()
        devices.synchronize(device)
        if turn >= 0:
            each.append((time.perf_counter() - begun) * 1e3)
            counts.append(count)
    summary, count = summarise(each), sum(counts) / len(counts)
    bytes_ms = needed / bandwidth * 1e3
    row: Row = {
        "ms": as_json(summary), "each_ms": each, "tokens": count, "tokens_per_second": sum(counts) / sum(each) * 1e3,
        "token_ms": summary.median / tokens, "bytes": needed, "bandwidth": bandwidth, "bytes_ms": bytes_ms,
        "peak_bytes": torch.get_device_module(device).max_memory_allocated() if on_card else 0,
    }  # fmt: skip
    if served is not None and kernels is not None:
        row["rollouts"] = served.as_dict()
        kernels.restore()
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a way failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = torch.device(devices.accelerator())
    cases = CPU_CASES if device.type == "cpu" else CASES
    named = [f"{size}:{rows}" for size, rows in cases]
    parser.add_argument("--output", type=Path, required=True, help="results file (JSON), continued if it is there")
    parser.add_argument("--cases", nargs="+", default=named, metavar="SIZE:ROWS", help="default: " + " ".join(named))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="that are generated (%(default)s)")
    parser.add_argument("--ends", type=int, metavar="MEAN", help="tokens of a row, on average; default: all of them")
    parser.add_argument("--repetitions", type=int, default=3, help="of each way (%(default)s)")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    args = parser.parse_args(arguments)
    chosen = []
    for case in args.cases:
        size, _, rows = case.partition(":")
        if size not in MODELS or not rows.isdecimal() or int(rows) < 1:
            parser.error(f"--cases must be of the form SIZE:ROWS, SIZE one of {', '.join(MODELS)}; got {case!r}")
        chosen.append((size, int(rows)))
    if args.ends is not None and args.ends < 1:
        parser.error(f"--ends must be at least 1; got {args.ends}")
    if args.repetitions < 1:
        parser.error(f"--repetitions must be at least 1; got {args.repetitions}")
    results = Results(args.output, environment(device, arguments, args.commit, "benchmarks.rollouts"))
    console, failed = Console(highlight=False, soft_wrap=True), 0
    for size, rows in chosen:
        for way in args.ways:
            made = args.tokens if args.ends is None else f"1..{args.tokens}, {args.ends} on average"
            shape = f"{size} {rows}x({args.prompt // 2}..{args.prompt}+{made})"
            row: Row = {
                "group": "rollouts", "op": "completions", "shape": shape, "dtype": MODELS[size][2], "provider": way,
                "mode": "generate", "status": "ok", "version": package_version(WAYS[way]),
            }  # fmt: skip
            if results.has(key_of(row), row["version"]):
                continue
            try:
                found = measure(size, rows, way, args.prompt, args.tokens, args.ends, args.repetitions)
            except Exception as error:  # noqa: BLE001  another package's way may fail in any manner; the others go on
                failed, found = 1, {"status": "error", "reason": f"{type(error).__name__}: {error}"[:400]}
                console.print(f"{row['shape']} {way}: {found['reason']}")
            else:
                console.print(
                    f"{shape} {way}: {found['tokens_per_second']:.0f} tokens/s, {found['token_ms']:.2f} ms a token, "
                    f"{found['token_ms'] / found['bytes_ms']:.1f} x its bytes, "
                    f"{found['peak_bytes'] / (1 << 30):.2f} GiB"
                )
            results.add([{**row, **found}])
            gc.collect()
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
