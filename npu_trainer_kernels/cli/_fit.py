"""Predicts whether a training step fits into memory, and which options it needs for that, before it is started.

The command shows the peak memory of a step and its parts, plain, with the kernels, and with the kernels and MLPs that
compute slices of the tokens (tiled_mlp=8192), each with checkpointing on and off, and the largest micro-batch of each.
It tries no more rows than have half a million tokens in all (at most 1024, at least 16): a + after the largest
micro-batch says that more may fit.

It runs a step on tensors without memory, and needs neither an accelerator nor weights. It assumes that every row of a
batch is as long as --seq.

Exit codes: 0 a step of --batch fits in at least one way, 1 it does not, or the figure could not be written, 2 wrong
usage or a missing package.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._model import DTYPES, config_of, zero_sizes
from ._model import HELP as MODEL_HELP
from .output import FINE, FOUND, Output, UsageError, first_line, new_table, unwritten

if TYPE_CHECKING:
    from ..fit import Setup

__all__ = ["HELP", "NAME", "add_arguments", "advice", "run"]

NAME = "fit"
HELP = "say whether a training step fits into memory, and what must be switched on"
TRAINERS = ("trainer", "sft", "grpo", "dpo")
SHARDINGS = ("ddp", "fsdp2", "zero3")
# GiB that are kept free unless --reserve says otherwise.
RESERVE = 2.0
FIGURES = (".png", ".svg", ".pdf")
GIB = 1 << 30
# Readable names for the values in JSON.
_CALLED = {"none": "one device", "ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}
Row = dict[str, Any]


def _gib(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of GiB without a unit, like 80; got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--memory", type=_gib, required=True, metavar="GIB", help="of a device")
    parser.add_argument("--devices", type=int, default=1, help="default 1")
    parser.add_argument("--seq", type=int, default=1024, metavar="TOKENS", help="of a row (default 1024)")
    parser.add_argument("--trainer", choices=TRAINERS, default="sft",
                        help="transformers' Trainer, or TRL's for SFT, GRPO, DPO (default sft)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=1,
                        help="of a device: rows, in dpo pairs; what the parts are of (default 1)")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=0, metavar="TOKENS",
                        help="of --seq those that grpo and dpo do not score (default 0)")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default bf16)")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction,
                        help="the Trainer's bf16 (default: on with TRL's trainers, as theirs is)")  # fmt: skip
    parser.add_argument("--lora", type=int, default=0, metavar="RANK",
                        help="train an adapter on all linear layers instead of the model")  # fmt: skip
    parser.add_argument("--sharding", choices=SHARDINGS, nargs="+", action="extend",
                        help="with several devices (default: ddp fsdp2)")  # fmt: skip
    parser.add_argument("--reserve", type=_gib, metavar="GIB",
                        help=f"of --memory, kept free for CUDA, NCCL and fragments (default {RESERVE:g})")  # fmt: skip
    parser.add_argument("--figure", type=Path, metavar="FILE", help=f"write a figure ({', '.join(FIGURES)})")


def _check(args: argparse.Namespace) -> None:
    for name, least in (("devices", 1), ("seq", 2), ("batch", 1), ("prompt", 0), ("lora", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name} must be at least {least}; got {getattr(args, name)}")
    if not (math.isfinite(args.memory) and args.memory > 0):
        raise UsageError(f"--memory must be a positive number of GiB; got {args.memory:g}")
    if args.reserve is None:
        if args.memory <= RESERVE:
            raise UsageError(f"--memory must be more than the {RESERVE:g} GiB that are kept free by default, which "
                             f"--reserve changes; got {args.memory:g}")  # fmt: skip
        args.reserve = RESERVE
    if not 0 <= args.reserve < args.memory:
        raise UsageError(f"--reserve must be at least 0 and less than --memory {args.memory:g}; got {args.reserve:g}")
    if args.sharding and args.devices == 1:
        given = " ".join(args.sharding)
        raise UsageError(f"--sharding {given} does nothing on one device; leave it out, or say with --devices how many "
                         "there are")  # fmt: skip
    if args.prompt and args.trainer not in ("grpo", "dpo"):
        raise UsageError(f"--prompt {args.prompt} does nothing with --trainer {args.trainer}, which scores all tokens; "
                         "leave it out")  # fmt: skip
    if args.prompt >= args.seq:
        raise UsageError(f"--prompt must be less than --seq {args.seq}; got {args.prompt}")
    if args.figure is not None and args.figure.suffix not in FIGURES:
        raise UsageError(f"--figure must end with {', '.join(FIGURES)}; got {str(args.figure)!r}")
    if args.figure is not None and not args.figure.parent.is_dir():
        raise UsageError(f"--figure must be in a folder that is there; got {str(args.figure)!r}")
    from ..support import triton
    from ..support.optional import require

    try:
        if args.trainer != "trainer":
            require(f"--trainer {args.trainer} (--trainer trainer does without)", "trl")
        if args.lora:
            require("--lora", "peft")
        if args.figure is not None:
            require("--figure", "matplotlib")
    except triton.MissingDependencyError as error:
        raise UsageError(str(error)) from error
    if triton.IMPORT_ERROR is not None:
        raise UsageError(
            f"what the kernels take is asked of them, and they need Triton, which cannot be imported here "
            f"({type(triton.IMPORT_ERROR).__name__}: {triton.IMPORT_ERROR}): pip install triton"
        )


def _setups(args: argparse.Namespace) -> "list[Setup]":
    """Returns every way to run the step, those that need the fewest options first."""
    import torch

    from ..fit import VARIANTS, Setup

    autocast = args.trainer != "trainer" if args.autocast is None else args.autocast
    ways = tuple(dict.fromkeys(args.sharding or ("ddp", "fsdp2"))) if args.devices > 1 else ("none",)
    return [
        Setup(
            args.trainer, args.batch, args.seq, args.prompt, getattr(torch, DTYPES[args.dtype]), autocast, variant,
            checkpointing, args.lora, sharding, args.devices, int(args.memory * GIB),
        )
        for sharding, checkpointing, variant in itertools.product(ways, (False, True), VARIANTS)
    ]  # fmt: skip


def _row(config: Any, setup: "Setup", usable: int) -> Row:
    from dataclasses import replace

    from ..fit import largest_batch, most_tried, predict

    @functools.cache
    def at(batch: int) -> Any:
        return predict(config, replace(setup, batch=batch))

    found = at(setup.batch)
    most = max(most_tried(setup.rows // setup.batch * setup.length), setup.batch)
    largest = largest_batch(lambda batch: at(batch).peak_bytes, usable, most)
    return {
        "variant": setup.variant, "checkpointing": setup.checkpointing, "sharding": setup.sharding,
        "parts": found.parts, "peak_bytes": found.peak_bytes, "fits": found.peak_bytes <= usable,
        "largest_batch": largest, "more_may_fit": largest == most,
    }  # fmt: skip


def advice(rows: Sequence[Row], batch: int) -> str:
    """Returns a sentence with the first row that fits, and with the row of the largest micro-batch."""
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        least = min(rows, key=lambda row: row["peak_bytes"])
        text = f"a micro-batch of {batch} takes at least {least['peak_bytes'] / GIB:.1f} GiB ({_named(least)})"
        if largest := max(row["largest_batch"] for row in rows):
            return f"Does not fit: {text}; the largest that fits is one of {largest}."
        return f"Does not fit: {text}" + ("." if batch == 1 else ", and one of 1 does not fit either.")
    first, best = fitting[0], max(fitting, key=lambda row: row["largest_batch"])
    how_many = f"{first['largest_batch']} and more" if first["more_may_fit"] else f"up to {first['largest_batch']}"
    text = f"Fits: {_named(first)}, at micro-batches of {how_many}."
    if best["largest_batch"] > first["largest_batch"]:
        end = "at least " if best["more_may_fit"] else ""
        text += f" The most is {end}{best['largest_batch']}, {_named(best)}."
    return text


def _largest(row: Row) -> str:
    return f"{row['largest_batch']}{'+' if row['more_may_fit'] else ''}"


def _named(row: Row) -> str:
    what = [row["variant"], "with checkpointing" if row["checkpointing"] else "without checkpointing"]
    return ", ".join([" ".join(what), *([] if row["sharding"] == "none" else [_CALLED[row["sharding"]]])])


def run(args: argparse.Namespace, output: Output) -> int:
    _check(args)
    config = config_of(args.model)
    text = config.get_text_config()
    if not hasattr(text, "vocab_size"):
        raise UsageError(f"--model {args.model!r}: {type(config).__name__} is of no language model; name one that is")
    for name in ("hidden_size", "vocab_size"):
        if type(size := getattr(text, name, 1)) is int and size < 1:
            raise UsageError(f"--model {args.model!r}: {name} of its config must be at least 1; got {size}")
    from ..fit import PARTS

    usable = int((args.memory - args.reserve) * GIB)
    rows: list[Row] = []
    setups = _setups(args)
    with output.progress(len(setups)) as progress:
        for setup in setups:
            way = {"variant": setup.variant, "checkpointing": setup.checkpointing, "sharding": setup.sharding}
            progress.begin(_named(way))
            try:
                rows.append(_row(config, setup, usable))
            except ValueError as error:
                divides = isinstance(error.__cause__, ZeroDivisionError)
                reason = zero_sizes(args.model) if divides else first_line(error)
                raise UsageError(f"--model {args.model!r}: {reason}") from error
            progress.advance()
    verdict = advice(rows, args.batch)
    _show(rows, args, PARTS, output)
    output.text(verdict)
    problem = None
    if args.figure is not None:
        try:
            _draw(rows, args, PARTS)
        except OSError as error:
            problem = f"--figure: {unwritten(error)}, or name another file"
            output.text(problem, style="red")
    output.result({
        "model": args.model, "trainer": args.trainer, "dtype": args.dtype, "autocast": setups[0].autocast,
        "devices": args.devices, "lora": args.lora, "seq": args.seq, "prompt": args.prompt, "batch": args.batch,
        "memory_bytes": int(args.memory * GIB), "usable_bytes": usable, "rows": rows,
        "fits": any(row["fits"] for row in rows), "verdict": verdict, "problem": problem,
    })  # fmt: skip
    return FINE if any(row["fits"] for row in rows) and problem is None else FOUND


def _title(args: argparse.Namespace) -> str:
    adapter = f", LoRA of rank {args.lora}" if args.lora else ""
    where = f"{args.devices} devices" if args.devices > 1 else "one device"
    return (f"{Path(args.model).name}, {args.trainer}{adapter}, {args.batch} x {args.seq} tokens, {args.dtype}, "
            f"{where} of {args.memory:g} GiB")  # fmt: skip


def _show(rows: Sequence[Row], args: argparse.Namespace, parts: Sequence[str], output: Output) -> None:
    output.text(f"{_title(args)}: GiB at the peak, and the largest micro-batch")
    table = new_table()
    several = args.devices > 1
    columns = ["run", "checkpointing", *(["sharding"] if several else []), *parts, "peak", "fits", "largest"]
    for column in columns:
        left = column in ("run", "checkpointing", "sharding", "fits")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            row["variant"], "on" if row["checkpointing"] else "off",
            *([_CALLED[row["sharding"]]] if several else []),
            *(f"{row['parts'][part] / GIB:.2f}" for part in parts), f"{row['peak_bytes'] / GIB:.2f}",
            "yes" if row["fits"] else "no", _largest(row),
        )  # fmt: skip
    output.show(table)


def _draw(rows: Sequence[Row], args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Draws a bar for each row, divided into parts, and a line at the limit of memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.0, 1.6 + 0.45 * len(rows)), layout="constrained")
    names = [f"{_named(row)}\n(up to {_largest(row)})" for row in rows]
    ends = [0.0] * len(rows)
    for part in parts:
        sizes = [row["parts"][part] / GIB for row in rows]
        axis.barh(names, sizes, left=ends, label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axis.axvline(args.memory - args.reserve, color="black", linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel(f"GiB at the peak (dashed: {args.memory:g} less {args.reserve:g})", fontsize=9)
    axis.set_title(_title(args), fontsize=9, loc="left")
    figure.legend(fontsize=8, ncols=len(parts), loc="outside lower center", frameon=False, handlelength=1)
    figure.savefig(args.figure, dpi=150)
    pyplot.close(figure)
