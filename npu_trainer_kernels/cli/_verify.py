"""Trains your model with and without the kernels on this machine, and says whether it is the same training.

The distance between the two runs is compared with the machine's noise, the distance between runs without the kernels
whose sums are added in a different order. The model is trained seven times from the same weights on the same batches
(two more than --noise-runs); nothing is saved.

Exit codes: 0 the same training, 1 not the same, 2 wrong usage.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._model import config_of
from .output import FINE, FOUND, Output, UsageError, first_line, new_table

if TYPE_CHECKING:
    from ..verify import Variant, Verdict

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "train your model both ways, and say whether the kernels change the training"
PRECISIONS = ("fp32", "bf16", "bf16-autocast")
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model, with a tokenizer")
    parser.add_argument("--dataset", help=f"a text file, a {', '.join(BUILDERS)} file, or a hub id; default: the "
                        "sources of Python's standard library")  # fmt: skip
    parser.add_argument("--split", help="of a dataset from the hub (default train)")
    parser.add_argument("--text-column", default="text", help="the dataset's column of texts (default text)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run (default 50)")
    parser.add_argument("--batch-size", type=int, default=2, help="default 2")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a row (default 256)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="default 1e-4")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32")
    parser.add_argument("--ops", nargs="+", action="extend", help="which ops to use (default: all that apply)")
    parser.add_argument("--backend", help="overrides the choice of backend, as 'torch' or 'rms_norm=torch'")
    parser.add_argument(
        "--capture", choices=("auto", "on", "off"), default="auto", help="when layers are captured (default auto)"
    )
    parser.add_argument("--noise-runs", type=int, default=5, help="runs that measure the noise (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of batches (default 0)")


def _texts(args: argparse.Namespace) -> Any:
    """Returns the dataset for `verify`."""
    if args.dataset is None:
        if args.split is not None or args.text_column != "text":
            raise UsageError("--split and --text-column do nothing without --dataset")
        return None
    path = Path(args.dataset)
    if path.is_file() and args.split is not None:
        raise UsageError("--split does nothing with a file")
    if path.is_file() and path.suffix not in BUILDERS:
        return [path.read_text(encoding="utf-8", errors="replace")]
    if not path.is_file() and path.suffix in (*BUILDERS, ".txt"):
        raise UsageError(f"--dataset: there is no file {args.dataset!r}")
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
    if args.text_column not in data.column_names:
        raise UsageError(f"--text-column must be one of {', '.join(data.column_names)}; got {args.text_column!r}")
    return data


def _check_kernels(args: argparse.Namespace) -> None:
    """Checks the options of the kernels before the first run, since only the last one uses the kernels."""
    from .. import backends
    from ..patching import PATCHES

    if args.ops is not None:
        args.ops = ",".join(args.ops).split(",")  # commas are allowed, as in `run --ops`
    for op in args.ops or ():
        if op not in PATCHES:
            raise UsageError(f"--ops must be of {', '.join(PATCHES)}; got {op!r}")
    try:
        backends.parse_override(args.backend or "", "--backend")
    except ValueError as error:
        raise UsageError(str(error)) from error


def run(args: argparse.Namespace, output: Output) -> int:
    config_of(args.model)
    _check_kernels(args)
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
                args.model, texts, args.steps, text_column=args.text_column, batch_size=args.batch_size,
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
