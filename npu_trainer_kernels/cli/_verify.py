"""Trains your model with and without the kernels on this machine, and says whether it is the same training.

The distance between the two runs is compared with the machine's noise, the distance between runs without the kernels
whose sums are added in a different order. The model is trained seven times from the same weights on the same batches
(two more than --noise-runs); nothing is saved.

Exit codes: 0 the same training, 1 not the same, 2 wrong usage.
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import CAPTURE_MODES, check_ops, parse_override
from ._model import config_of
from .output import FINE, FOUND, Output, UsageError, first_line, new_table

if TYPE_CHECKING:
    from ..verify import Variant, Verdict

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "train your model both ways, and say whether the kernels change the training"
PRECISIONS = ("fp32", "bf16", "bf16-autocast")
_COLUMN = "text"
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model, with a tokenizer")
    parser.add_argument("--dataset", help=f"a text file, a {', '.join(BUILDERS)} file, or a hub id; default: the "
                        "sources of Python's standard library")  # fmt: skip
    parser.add_argument("--split", help="of a dataset from the hub (default train)")
    parser.add_argument("--text-column", help="the dataset's column of texts (default text)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run (default 50)")
    parser.add_argument("--batch-size", type=int, default=2, help="default 2")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a row (default 256)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="default 1e-4")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32")
    parser.add_argument("--ops", nargs="+", action="extend", help="which ops to use (default: all that apply)")
    parser.add_argument("--backend", help="overrides the choice of backend, as 'torch' or 'rms_norm=torch'")
    parser.add_argument(
        "--capture", choices=CAPTURE_MODES, default="auto", help="when bodies are captured (default auto)"
    )
    parser.add_argument("--noise-runs", type=int, default=5, help="runs that measure the noise (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of batches (default 0)")


def _texts(args: argparse.Namespace) -> Any:
    """Returns the dataset for `verify`."""
    if args.dataset is None:
        return None
    path = Path(args.dataset)
    if path.is_file() and path.suffix not in BUILDERS:
        return [path.read_text(encoding="utf-8", errors="replace")]
    if not path.is_file() and path.suffix in (*BUILDERS, ".txt"):
        raise UsageError(f"--dataset must be a file that is there, or a hub id; got {args.dataset!r}")
    from ..support.optional import require
    from ..support.triton import MissingDependencyError

    try:
        require(f"--dataset {args.dataset}", "datasets")
    except MissingDependencyError as error:
        raise UsageError(f"{error}; a text file needs nothing") from error
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if path.is_file():
            data = load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train")
        else:
            data = load_dataset(args.dataset, split=args.split or "train")
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise UsageError(f"--dataset {args.dataset!r}: {first_line(error)}") from error
    if (column := args.text_column or _COLUMN) not in data.column_names:
        raise UsageError(f"--text-column must be one of {', '.join(data.column_names)}; got {column!r}")
    return data


def _check(args: argparse.Namespace) -> None:
    """Checks the options before anything slow begins; only the last run uses the kernels.

    Raises:
        UsageError: an option has an invalid value.
    """
    for name, least in (("steps", 1), ("batch_size", 1), ("sequence_length", 2), ("noise_runs", 2)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be at least {least}; got {getattr(args, name)}")
    if not (math.isfinite(args.learning_rate) and args.learning_rate > 0):
        raise UsageError(f"--learning-rate must be a positive number; got {args.learning_rate:g}")
    if not 0 <= args.seed < 1 << 32:
        raise UsageError(f"--seed must be at least 0 and less than 2^32; got {args.seed}")
    if args.ops is not None:
        args.ops = ",".join(args.ops).split(",")  # commas are allowed, as in `run --ops`
    try:
        check_ops(args.ops, "--ops", "list")
        parse_override(args.backend or "", "--backend")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.dataset is None:
        given = [f"--split {args.split}"] if args.split is not None else []
        given += [f"--text-column {args.text_column}"] if args.text_column is not None else []
        if given:
            raise UsageError(f"{given[0]} does nothing without --dataset; leave it out, or name a dataset")
    elif args.split is not None and Path(args.dataset).is_file():
        raise UsageError(f"--split {args.split} does nothing with a file; leave it out")


def run(args: argparse.Namespace, output: Output) -> int:
    _check(args)
    config_of(args.model)
    texts = _texts(args)
    import transformers

    from ..verify import variants, verify

    transformers.logging.disable_progress_bar()
    with output.progress(args.noise_runs + 2) as progress:
        order = variants(args.noise_runs)

        def on_run(variant: "Variant") -> None:
            if variant != order[0]:
                progress.advance()
            progress.begin(f"training: {variant}")

        try:
            verdict = verify(
                args.model, texts, args.steps, text_column=args.text_column or _COLUMN, batch_size=args.batch_size,
                sequence_length=args.sequence_length, learning_rate=args.learning_rate, precision=args.precision,
                ops=args.ops, backend=args.backend, capture=args.capture, noise_runs=args.noise_runs, seed=args.seed,
                on_run=on_run,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise UsageError(str(error).strip()) from error
    _show(verdict, output)
    output.result(_as_json(args, verdict))
    return FINE if verdict.passed else FOUND


def _show(verdict: "Verdict", output: Output) -> None:
    table = new_table()
    for column in ("quantity", "worst", "verdict"):
        table.add_column(column, justify="right" if column == "worst" else "left")
    for check in verdict.checks:
        table.add_row(check.name, f"{check.ratio:.3g}", "ok" if check.passed else "FAILED")
    if verdict.checks:
        output.paragraph("Distance between the runs with and without the kernels, in noise floors; "
                         f"{verdict.checks[0].k:g} are allowed", 0)  # fmt: skip
        output.show(table)
        output.text("")
    if verdict.report is not None:
        output.text(verdict.report.text(in_full="--json"))
    for problem in (*(check for check in verdict.checks if not check.passed), *verdict.problems):
        output.text(f"FAILED {problem}", style="red")
    output.text(str(verdict).splitlines()[0], style="" if verdict.passed else "red")


def _as_json(args: argparse.Namespace, verdict: "Verdict") -> dict[str, Any]:
    return {
        "model": args.model,
        "steps": args.steps,
        "precision": args.precision,
        "passed": verdict.passed,
        "problems": verdict.problems,
        "checks": [
            {"name": check.name, "noise_floors": check.ratio, "allowed": check.k, "passed": check.passed}
            for check in verdict.checks
        ],
        "report": None if verdict.report is None else verdict.report.as_dict(),
    }
