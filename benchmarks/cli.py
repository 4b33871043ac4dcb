"""Measures the rows that are missing in the results file; `options.py` has the command line and the exit codes."""

import argparse
import fnmatch
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from npu_trainer_kernels import device as devices
from npu_trainer_kernels.cli.output import Output

from . import endtoend, evidence, report, step_cases, tables
from .cases import table
from .measure import QUICK, Settings
from .options import GROUPS, PROGRAM, RESULTS, make_parser
from .results import Results, Row, compare, default_name, environment, package_version
from .run_times import LEAST_STEPS
from .runner import Budget, Cell, DeviceLostError, cells, measured_bandwidth, run_case

__all__ = ["main", "matcher", "write_reports"]

EXIT_OK, EXIT_REGRESSION, EXIT_USAGE, EXIT_DEVICE_LOST = 0, 1, 2, 3
# A child that builds a model and compiles kernels needs some time before its first step.
LEAST_SECONDS_FOR_A_CHILD = 20.0
QUICK_STEPS = 12


def matches(path: str, pattern: str) -> bool:
    """Whether a row's path matches a pattern of --only or --skip."""
    return fnmatch.fnmatch(path, f"*{pattern}") if set(pattern) & set("*?") else pattern in path


def matcher(only: Sequence[str], skip: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that says whether --only and --skip select a row's path."""

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
    if args.steps is not None and args.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}; got {args.steps}")
    if args.variants is not None and not set(args.variants.split(",")) <= set(step_cases.VARIANTS):
        parser.error(f"--variants must name {', '.join(step_cases.VARIANTS)}; got {args.variants!r}")
    if args.budget_seconds is not None and args.budget_seconds <= 0:
        parser.error(f"--budget-seconds must be positive; got {args.budget_seconds}")
    for path in [*args.resume, *(args.compare or []), *filter(None, (args.evidence, args.tables))]:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    return groups


def _print_comparison(parser: argparse.ArgumentParser, output: Output, old: Path, new: Path) -> int:
    try:
        result = compare(old, new)
    except ValueError as error:
        parser.error(str(error))
    output.show(report.comparison_table(result))
    for note in result.notes:
        output.text(note)
    columns = ("key", "old_ms", "new_ms", "time_ratio", "memory_ratio", "remark")
    output.result({
        "rows": [dict(zip(columns, row, strict=True)) for row in result.rows],
        "regressions": result.regressions,
        "notes": result.notes,
    })  # fmt: skip
    if result.regressions:
        output.text(f"{len(result.regressions)} regressions beyond the spread:", style="red")
        for key in result.regressions:
            output.text(f"  {key}")
        return EXIT_REGRESSION
    output.text(f"{len(result.rows)} rows compared, no regression")
    return EXIT_OK


def _write(parser: argparse.ArgumentParser, output: Output, what: str, write: Callable[[], list[str]]) -> int:
    try:
        written = write()
    except ValueError as error:
        parser.error(str(error))
    for line in written:
        output.text(line)
    output.result({what: written})
    return EXIT_OK


def _line(rows: Sequence[Row]) -> str:
    """Returns one line with the results of a cell."""
    first = rows[0]
    name = f"{first['op']} {first['shape']} {first['provider']}"
    if first["status"] != "ok":
        return f"{name}: {first['status']}: {first['reason']}"
    if first["group"] == "end-to-end":
        peak = first["peak_bytes"] / (1 << 30)
        busy = "" if first["busy_ms"] is None else f" ({first['busy_ratio']:.2f}x busy)"
        speed = f"{first['mean_ms']:.1f} ms{busy}, median {first['ms']['median']:.1f}, all {first['mean_all_ms']:.1f}"
        live = f"{first['live_share']:.1%} of {first['positions']:.0f} positions live"
        what = f"{peak:.2f} GiB, {live}, first loss {first['losses'][0]:.4g}, {first['process_seconds']:.0f} s in all"
        return f"{name}: {speed}, {first['tokens_per_second']:.0f} tokens/s, {what}"
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

    def children(self) -> list[tuple[step_cases.StepWorkload, str]]:
        asked = list(step_cases.VARIANTS) if self.args.variants is None else self.args.variants.split(",")
        pairs = [
            (workload, variant) for workload in step_cases.workloads(self.device.type) for variant in asked
            if variant in step_cases.variants_of(workload)
        ]  # fmt: skip
        return [(w, v) for w, v in pairs if self.wanted(f"{w.key}/{v}")]

    def paths(self) -> list[str]:
        """Returns the paths of all selected rows."""
        found: list[str] = []
        for group in self.groups:
            if group == "end-to-end":
                found += [f"{w.key}/{v}" for w, v in self.children()]
            else:
                found += [cell.path for of_case in self.cases(group) for cell in of_case]
        return found

    def unknown(self) -> str | None:
        """Returns what is wrong with --only and --skip, or None. A --skip that skips nothing is allowed."""
        found = self.paths()
        beside = f" beside --skip {' '.join(self.args.skip)}" if self.args.skip else ""
        for pattern in self.args.only:
            if not any(matches(path, pattern) for path in found):
                on = self.device.type
                return f"--only {pattern!r} leaves no row{beside} on {on}; --list prints those that there are"
        return None if found else f"--skip {' '.join(self.args.skip)} leaves no row"

    def results(self, arguments: Sequence[str]) -> Results:
        meta = environment(self.device, list(arguments), self.args.commit)
        name = self.args.name or default_name(meta)
        return Results(self.args.output / f"{name}.json", meta, self.args.resume)

    def measure(self, results: Results, progress: Progress) -> None:
        """Measures every selected row that the results lack."""
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
        steps = self.args.steps or (QUICK_STEPS if self.args.quick else endtoend.STEPS)
        for workload, variant in todo:
            version = package_version(step_cases.VARIANTS[variant].package)
            if not results.has(f"{workload.key}/{variant}/run", version):
                if self.budget.left() < LEAST_SECONDS_FOR_A_CHILD:
                    return
                progress.update(task, description=f"end-to-end: {workload.name} {variant}")
                row = {"version": version, **endtoend.run(workload, variant, steps, min(900.0, self.budget.left()))}
                results.add([row])
                progress.console.print(_line([row]), highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=1)

    def unmeasured(self, results: Results) -> int:
        """Returns the number of selected cells that have no row."""
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


def write_reports(results: Results, output: Output) -> None:
    """Writes Markdown and plots next to the JSON file; without matplotlib it prints that there are no plots."""
    stem = results.path.with_suffix("")
    if not results.rows:
        output.text("nothing was measured")
        return
    stem.with_suffix(".md").write_text(report.markdown(results.meta, results.rows), encoding="utf-8")
    written = [results.path, stem.with_suffix(".md")]
    try:
        written += report.plot(results.rows, stem)
    except ImportError as error:
        output.text(f"no plots: {error} (pip install 'matplotlib>=3.8')")
    for path in written:
        output.text(str(path))


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM, folder: Path = RESULTS) -> int:
    """Runs the command; returns the exit code: 0, 1 after a regression, 2 wrong usage, 3 the device was lost.

    Args:
        arguments: the command line's arguments; None: those of this process.
        prog: the command's name.
        folder: the default folder for results.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser(prog, folder)
    args = parser.parse_args(arguments)
    groups = _check(args, parser)
    with Output(args.json) as output:
        if args.evidence is not None:
            return _write(parser, output, "evidence", lambda: evidence.write(args.evidence))
        if args.tables is not None:
            return _write(parser, output, "tables", lambda: tables.write(args.tables))
        if args.compare is not None and len(args.compare) == 2:
            return _print_comparison(parser, output, *args.compare)
        return _measure(parser, args, groups, arguments, output)


def _measure(
    parser: argparse.ArgumentParser, args: argparse.Namespace, groups: list[str], arguments: Sequence[str],
    output: Output,
) -> int:  # fmt: skip
    try:
        device = torch.device(args.device or devices.accelerator())
    except RuntimeError:
        parser.error(f"--device must be cuda, cpu, or with torch_npu npu; got {args.device!r}")
    run = _Run(args, groups, device, output.console)
    unknown = run.unknown()
    if unknown is not None:
        parser.error(unknown)
    if args.list:
        for path in run.paths():
            output.text(path)
        output.result({"paths": run.paths()})
        return EXIT_OK
    try:
        results = run.results(arguments)
    except ValueError as error:
        parser.error(str(error))
    lost = False
    with output.bar() as progress:
        try:
            run.measure(results, progress)
        except DeviceLostError as error:
            lost = True
            output.text(f"the device was lost: {error}", style="red")
    for each in report.terminal_tables(results.rows):
        output.text(each) if isinstance(each, str) else output.show(each)
    write_reports(results, output)
    left = run.unmeasured(results)
    if left:
        output.text(f"{left} not measured; the same command goes on with them")
    if args.compare is not None and not lost:
        return _print_comparison(parser, output, args.compare[0], results.path)
    output.result({"meta": results.meta, "rows": results.rows, "not_measured": left})
    return EXIT_DEVICE_LOST if lost else EXIT_OK
