"""`python -m convergence`: trains small models without and with the kernels and compares every curve.

The exit status is 1 if a case fails, a planted fault is not caught, or nothing could run.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

# Set before the libraries are imported, so that they download nothing and do not disturb the live display.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console

from npu_trainer_kernels import device as devices

from .cases import CASES, SHOWCASE, Case, find
from .mutations import MUTATIONS, MutationResult, quick, run_mutations
from .output import (
    Live,
    attach,
    case_table,
    current_commit,
    mutation_table,
    release_problem,
    write_json,
    write_results,
)
from .pool import kept_in, run_all
from .process import prepare
from .suite import CaseResult, Progress, run_cases

HERE = Path(__file__).resolve().parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m convergence", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the subset for every change (default)")
    which.add_argument("--full", action="store_true", help="every case, and the planted faults")
    which.add_argument("--showcase", action="store_true",
                       help="two runs of sizes that people know, for an accelerator")  # fmt: skip
    which.add_argument("--case", nargs="+", action="extend", metavar="NAME", help="these cases")
    which.add_argument("--check-release", action="store_true",
                       help="run nothing; status 0 if a full result for this commit is there and passed")  # fmt: skip
    parser.add_argument("--attach", type=Path, metavar="DIR",
                        help="with --check-release: pack the result that passed into DIR/convergence.zip")  # fmt: skip
    parser.add_argument(
        "--mutations", action="store_true", help="also plant faults (with --quick those in fp32); alone: only that"
    )
    parser.add_argument("--mutation", nargs="+", action="extend", metavar="NAME", help="only these faults")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--device", default=devices.accelerator(), choices=("cpu", "cuda", "npu"))
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each in a process (default: 1)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR",
                        help="with --jobs: finished runs stay here, and the same command goes on")  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="train every case for so many steps instead of its own")
    parser.add_argument("--commit", help="of the sources, where they are a copy without their history")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write this file alone, no figures, no table")
    parser.add_argument("--list", action="store_true", help="list cases and faults, run nothing")
    args = parser.parse_args(arguments)
    if args.attach and not args.check_release:
        parser.error("--attach goes with --check-release")
    if args.keep and args.jobs == 1:
        parser.error("--keep goes with --jobs 2 or more")
    for name in ("jobs", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(args, name)}")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """Returns the cases that the command line selects."""
    only_mutations = (args.mutations or args.mutation) and not args.quick
    if args.case:
        chosen = [find(name) for name in args.case]
    elif args.full or args.showcase:
        chosen = list(CASES if args.full else SHOWCASE)
    else:
        chosen = [] if only_mutations else [case for case in CASES if case.quick]
    return chosen if args.steps is None else [replace(case, steps=args.steps) for case in chosen]


def _in_workers(
    args: argparse.Namespace, cases: list[Case], faults: bool, progress: Progress
) -> tuple[list[CaseResult], list[MutationResult]]:
    with tempfile.TemporaryDirectory() as folder:
        kept = kept_in(args.keep or Path(folder), args.device)
        return run_all(cases, faults, args.mutation, args.device, progress, args.jobs, kept)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, and returns the exit status."""
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.list:
        console.print("cases:", *(case.name for case in CASES), sep="\n  ")
        console.print("showcase:", *(case.name for case in SHOWCASE), sep="\n  ")
        console.print("faults:", *(mutation.name for mutation in MUTATIONS), sep="\n  ")
        return 0
    if args.check_release:
        problem = release_problem(args.output)
        console.print(problem or "the full result for this commit passed", highlight=False)
        if args.attach and not problem:
            console.print(f"packed: {attach(args.output, args.attach)}", highlight=False)
        return 1 if problem else 0
    prepare(args.device)
    cases, commit = chosen_cases(args), args.commit or current_commit()
    faults = bool(args.mutations or args.full or args.mutation)
    if args.quick and args.mutations and not args.mutation:
        args.mutation = quick()
    with Live(console, [case.name for case in cases]) as live:
        if args.jobs > 1:
            results, caught = _in_workers(args, cases, faults, live.progress)
        else:
            results = run_cases(cases, args.device, live.progress)
            caught = run_mutations(args.device, live.progress, args.mutation) if faults else []
    if args.json:
        write_json(args.json, results, caught, args.device, commit, args.commit is not None)
    else:
        for table in (case_table(results), mutation_table(caught)):
            if table is not None:
                console.print(table)
        written = write_results(args.output, results, caught, args.device, commit, args.commit is not None)
        console.print(f"results: {written}", highlight=False)
        # Failures are printed last, since readers of a long log look at its end.
        for result in results:
            for line in result.verdict.failures():
                console.print(f"[red]{result.name}[/]: {line}", highlight=False)
        for fault in caught:
            if not fault.caught:
                console.print(f"[red]planted fault: {fault.name}[/]: {fault.outcome}", highlight=False)
    ran = [result for result in results if not result.skipped]
    good = all(result.passed for result in ran) and all(result.caught for result in caught)
    return 0 if good and (ran or caught) else 1


if __name__ == "__main__":
    sys.exit(main())
