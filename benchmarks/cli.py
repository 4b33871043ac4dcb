"""`python -m benchmarks`: measures what is missing in the results file and writes JSON, Markdown and plots.

    python -m benchmarks                         everything, into benchmarks/results/
    python -m benchmarks --list                  what there is, without measuring
    python -m benchmarks --quick --only rms_norm
    python -m benchmarks --compare old.json      measures, then compares
    python -m benchmarks --compare old.json new.json

A run that is started again goes on where the one before stopped: rows in the results file are not measured again,
except where they failed or where the package's sources (for our rows) or the peer's version (for its) have changed.
"""

import argparse
import fnmatch
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from npu_trainer_kernels import device as devices

from . import endtoend, report
from .cases import table
from .measure import QUICK, Settings
from .results import Results, Row, compare, default_name, environment, package_version
from .runner import Budget, Cell, DeviceLostError, cells, measured_bandwidth, run_case

__all__ = ["main", "make_parser"]

GROUPS = ("ops", "end-to-end", "scaling")
EXIT_OK, EXIT_REGRESSION, EXIT_USAGE, EXIT_DEVICE_LOST = 0, 1, 2, 3
# A child that builds a model and compiles kernels needs some time before its first step.
LEAST_SECONDS_FOR_A_CHILD = 20.0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the rows and who is measured, and stop")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="rows whose path group/op/shape/dtype/provider contains this, or matches it where it has "
                        "* or ?; may be repeated, any of them counts")  # fmt: skip
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="the opposite of --only")
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}, in this order; default all"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, fewer steps")
    parser.add_argument(
        "--steps", type=int, default=None, help="timed training steps, end to end (default 10, quick 4)"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument("--name", default=None, help="file name without ending (default <date>-<device>)")
    parser.add_argument("--resume", action="append", type=Path, default=[], metavar="FILE",
                        help="an earlier results file whose rows are taken over")  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, default=None, help="start nothing new after this time")
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE",
                        help="OLD NEW compares two files; OLD alone measures and compares with that")  # fmt: skip
    parser.add_argument("--device", default=None, help="cuda, npu or cpu (default: what training would use)")
    return parser


def matcher(only: Sequence[str], skip: Sequence[str]) -> Callable[[str], bool]:
    """Whether a row's path is wanted."""

    def matches(path: str, pattern: str) -> bool:
        return fnmatch.fnmatch(path, f"*{pattern}*") if set(pattern) & set("*?") else pattern in path

    def wanted(path: str) -> bool:
        return (not only or any(matches(path, p) for p in only)) and not any(matches(path, p) for p in skip)

    return wanted


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    groups = [g for g in args.groups.split(",") if g]
    unknown = [g for g in groups if g not in GROUPS]
    if unknown or not groups:
        parser.error(f"--groups must name {', '.join(GROUPS)}; got {args.groups!r}")
    if args.compare is not None and len(args.compare) > 2:
        parser.error(f"--compare takes one or two files; got {len(args.compare)}")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1; got {args.steps}")
    if args.budget_seconds is not None and args.budget_seconds <= 0:
        parser.error(f"--budget-seconds must be positive; got {args.budget_seconds}")
    for path in [*args.resume, *(args.compare or [])]:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    return groups


def _print_comparison(console: Console, old: Path, new: Path) -> int:
    result = compare(old, new)
    console.print(report.comparison_table(result))
    for note in result.notes:
        console.print(note, highlight=False)
    if result.regressions:
        console.print(f"{len(result.regressions)} regressions beyond the spread:", style="red")
        for key in result.regressions:
            console.print(f"  {key}", highlight=False)
        return EXIT_REGRESSION
    console.print(f"{len(result.rows)} rows compared, no regression")
    return EXIT_OK


def _line(rows: Sequence[Row]) -> str:
    """What one cell found, in one line."""
    first = rows[0]
    name = f"{first['op']} {first['shape']} {first['provider']}"
    if first["status"] != "ok":
        return f"{name}: {first['status']}: {first['reason']}"
    if first["group"] == "end-to-end":
        peak = first["peak_bytes"] / (1 << 30)
        return f"{name}: {first['ms']['median']:.1f} ms, {first['tokens_per_second']:.0f} tokens/s, {peak:.2f} GiB"
    times = ", ".join(f"{r['mode']} {r['ms']['median']:.4g} ms ({r['floor_ratio']:.2f}x)" for r in rows)
    return f"{name}: {times}, {rows[-1]['extra_bytes'] / (1 << 20):.1f} MiB, {rows[-1]['verdict']}"


class _Run:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, groups: list[str], device: torch.device, console: Console) -> None:
        self.args, self.groups, self.device, self.console = args, groups, device, console
        self.settings: Settings = QUICK if args.quick else Settings()
        self.wanted = matcher(args.only, args.skip)
        self.budget = Budget(args.budget_seconds)

    def cases(self, group: str) -> list[list[Cell]]:
        chosen = [c for c in table(self.device.type) if c.group.split("-")[0] == group]
        return cells(chosen, self.wanted)

    def children(self) -> list[tuple[endtoend.Workload, str]]:
        pairs = [(w, v) for w in endtoend.workloads(self.device.type) for v in endtoend.VARIANTS]
        return [(w, v) for w, v in pairs if self.wanted(f"{w.key}/{v}")]

    def list(self) -> None:
        """Prints the paths that --only and --skip see."""
        for group in self.groups:
            if group == "end-to-end":
                paths = [f"{w.key}/{v}" for w, v in self.children()]
            else:
                paths = [cell.path for of_case in self.cases(group) for cell in of_case]
            for path in paths:
                self.console.print(path, highlight=False, soft_wrap=True)

    def results(self, arguments: Sequence[str]) -> Results:
        meta = environment(self.device, list(arguments))
        name = self.args.name or default_name(meta)
        return Results(self.args.output / f"{name}.json", meta, self.args.resume)

    def measure(self, results: Results, progress: Progress) -> None:
        """Everything that is wanted and not there yet."""
        for group in self.groups:
            if group == "end-to-end":
                self._measure_children(results, progress)
            else:
                self._measure_cases(group, results, progress)

    def _measure_cases(self, group: str, results: Results, progress: Progress) -> None:
        todo = self.cases(group)
        task = progress.add_task(group, total=sum(map(len, todo)))
        if not any(cell.missing(results) for of_case in todo for cell in of_case):
            progress.update(task, advance=sum(map(len, todo)))
            return
        bytes_per_second = measured_bandwidth(results, self.device, self.settings)
        for of_case in todo:
            if self.budget.left() <= 0:
                return
            progress.update(task, description=f"{group}: {of_case[0].case.op}")
            done = sum(not cell.missing(results) for cell in of_case)
            progress.update(task, advance=done)
            for _, rows in run_case(of_case, self.device, self.settings, results, self.budget, bytes_per_second):
                progress.update(task, advance=1)
                progress.console.print(_line(rows), highlight=False, markup=False, soft_wrap=True)

    def _measure_children(self, results: Results, progress: Progress) -> None:
        todo = self.children()
        task = progress.add_task("end-to-end", total=len(todo))
        steps = self.args.steps or (4 if self.args.quick else 10)
        for workload, variant in todo:
            version = package_version(endtoend.PACKAGES[variant])
            if not results.has(f"{workload.key}/{variant}/step", version):
                if self.budget.left() < LEAST_SECONDS_FOR_A_CHILD:
                    return
                progress.update(task, description=f"end-to-end: {workload.name} {variant}")
                row = {"version": version, **endtoend.run(workload, variant, steps, min(900.0, self.budget.left()))}
                results.add([row])
                progress.console.print(_line([row]), highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=1)

    def unmeasured(self, results: Results) -> int:
        """How many wanted cells have no row."""
        left = 0
        for group in self.groups:
            if group == "end-to-end":
                left += sum(
                    not results.find(group=group, op=w.name, shape=w.shape, provider=v) for w, v in self.children()
                )
                continue
            for cell in (cell for of_case in self.cases(group) for cell in of_case):
                case = cell.case
                left += not results.find(group=case.group, op=case.op, shape=case.shape, provider=cell.provider.name)
        return left


def write_reports(results: Results, console: Console) -> None:
    """Markdown and plots beside the JSON; without matplotlib no plots, which is said."""
    stem = results.path.with_suffix("")
    if not results.rows:
        console.print("nothing was measured")
        return
    stem.with_suffix(".md").write_text(report.markdown(results.meta, results.rows), encoding="utf-8")
    written = [results.path, stem.with_suffix(".md")]
    try:
        written += report.plot(results.rows, stem)
    except ImportError as error:
        console.print(f"no plots: {error} (pip install 'npu_trainer_kernels[bench]')", highlight=False)
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 after a regression, 2 wrong usage, 3 the device was lost."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    args = parser.parse_args(arguments)
    groups = _check(args, parser)
    console = Console(width=None if sys.stdout.isatty() else 170)
    if args.compare is not None and len(args.compare) == 2:
        try:
            return _print_comparison(console, *args.compare)
        except ValueError as error:
            parser.error(str(error))
    run = _Run(args, groups, torch.device(args.device or devices.accelerator()), console)
    if args.list:
        run.list()
        return EXIT_OK
    try:
        results = run.results(arguments)
    except ValueError as error:
        parser.error(str(error))
    lost = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            run.measure(results, progress)
        except DeviceLostError as error:
            lost = True
            console.print(f"the device was lost: {error}", style="red", highlight=False)
    for each in report.terminal_tables(results.rows):
        console.print(each, highlight=False, soft_wrap=isinstance(each, str))
    write_reports(results, console)
    left = run.unmeasured(results)
    if left:
        console.print(f"{left} not measured; the same command goes on with them", highlight=False)
    if lost:
        return EXIT_DEVICE_LOST
    if args.compare is not None:
        try:
            return _print_comparison(console, args.compare[0], results.path)
        except ValueError as error:
            parser.error(str(error))
    return EXIT_OK
