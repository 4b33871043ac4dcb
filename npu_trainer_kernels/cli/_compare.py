"""Compares two runs by the Trainer's own logs: losses, rewards, speed and memory side by side.

A run is an output folder of the Trainer, one of its checkpoints, or a trainer_state.json.

With --noise the command also says whether the two are the same training. It takes other runs of RUN_A: the same data,
seed and options, with rounding that differs (another machine, another number of threads, atomic additions). The largest
distance between any two of these runs, RUN_A among them, is the noise floor of a step; RUN_B may be at most three
floors away from RUN_A at each step, and on average (the rule of `npu-kernels verify`). Speed and memory are not judged.

Exit codes: 0 fine, 1 not the same training, 2 wrong usage or a missing package.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import FINE, FOUND, Output, UsageError, new_table

if TYPE_CHECKING:
    from ..verify import Verdict

__all__ = ["HELP", "NAME", "Run", "add_arguments", "read", "run"]

NAME = "compare"
HELP = "show two runs side by side from the Trainer's logs, and say whether they are the same training"
STATE = "trainer_state.json"
FIGURES = (".png", ".svg", ".pdf")
# What training computes, and what it takes.
_JUDGED = ("loss", "eval_loss", "grad_norm", "reward", "reward_std", "entropy", "kl", "completions/mean_length")
_COSTS = (
    "tokens_per_second", "live_tokens_per_second", "step_time", "generation_seconds", "update_seconds",
    "waiting_seconds", "peak_memory_gib", "padding_left_out", "beginnings_left_out", "bodies_replayed",
    "graphs_saved_seconds",
)  # fmt: skip
_DECIMALS = 6
_LEAST_NOISE_RUNS = 2


@dataclass(frozen=True)
class Run:
    """The log of a run.

    Attributes:
        path: the file that was read.
        series: for each quantity its value at each step that has one.
    """

    path: Path
    series: dict[str, dict[int, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", help=f"a folder with {STATE} or with checkpoints, or that file")
    parser.add_argument("run_b", metavar="RUN_B", help="another one")
    parser.add_argument("--noise", nargs="+", action="extend", default=[], metavar="RUN",
                        help="two or more other runs of RUN_A whose rounding differs, to judge by")  # fmt: skip
    parser.add_argument("--figure", type=Path, metavar="FILE", help=f"write a figure ({', '.join(FIGURES)})")


def _state_file(name: str, argument: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(
            f"{argument}: there is no folder or file {name!r}; name the output_dir of a run, or its {STATE}"
        )
    if (path / STATE).is_file():
        return path / STATE
    found = [
        (int(number[1]), each) for each in path.glob(f"checkpoint-*/{STATE}")
        if (number := re.fullmatch(r"checkpoint-(\d+)", each.parent.name))
    ]  # fmt: skip
    if not found:
        raise UsageError(
            f"{argument}: there is no {STATE} in {name!r} or its checkpoints; the Trainer writes it with each "
            f"checkpoint (--save_strategy steps), and trainer.save_state() does at the end"
        )
    return max(found)[1]


def read(name: str, argument: str) -> Run:
    """Reads the log of a run.

    Args:
        name: a folder or a file.
        argument: the name of the argument in errors.

    Raises:
        UsageError: there is no log, or it has no numbers.
    """
    path = _state_file(name, argument)
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{argument}: {str(path)!r} is no {STATE} of the Trainer ({type(error).__name__})") from error
    series: dict[str, dict[int, float]] = {}
    for entry in history:
        for key, value in entry.items():
            if key not in ("step", "epoch") and isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(key, {})[entry["step"]] = float(value)
    if not series:
        raise UsageError(f"{argument}: {str(path)!r} has no logged numbers; --logging_steps says how often they are")
    return Run(path, series)


def _names(a: Run, b: Run) -> list[str]:
    """Returns the quantities that both runs have: the known ones in their order, then rewards by their names."""
    both = [name for name in (*_JUDGED, *_COSTS) if name in a.series and name in b.series]
    return both + sorted(name for name in a.series if name.startswith("rewards/") and name in b.series)


def _common(name: str, runs: Sequence[Run]) -> list[int]:
    """Returns the steps at which all runs have a quantity."""
    return sorted(set.intersection(*(set(each.series.get(name, ())) for each in runs)))


def _row(name: str, a: Run, b: Run) -> dict[str, Any] | None:
    steps = _common(name, (a, b))
    if not steps:
        return None
    of_a, of_b = ([each.series[name][step] for step in steps] for each in (a, b))
    distances = [abs(x - y) for x, y in zip(of_a, of_b, strict=True)]
    most = max(range(len(steps)), key=lambda i: math.inf if math.isnan(distances[i]) else distances[i])
    medians = statistics.median(of_a), statistics.median(of_b)
    return {
        "quantity": name, "steps": len(steps), "a_last": of_a[-1], "b_last": of_b[-1], "a_median": medians[0],
        "b_median": medians[1], "ratio": medians[1] / medians[0] if medians[0] else None,
        "largest_distance": distances[most], "at_step": steps[most],
    }  # fmt: skip


def _resolution(values: Sequence[float]) -> float | None:
    """Returns the last place of logged numbers that were rounded to so many decimals, or None."""
    for digits in range(_DECIMALS + 1):
        if all(round(value, digits) == value for value in values):
            return float(10.0**-digits)
    return None


def _judged(a: Run, b: Run, noise: Sequence[Run]) -> "Verdict":
    from ..verify import Verdict, judge_scalars

    checks: list[Any] = []
    problems: list[str] = []
    for name in _names(a, b):
        if name in _COSTS:
            continue
        steps = _common(name, (a, b, *noise))
        if not steps:
            problems.append(f"{name}: the runs have no step in common")
            continue
        reference, *others = ([each.series[name][step] for step in steps] for each in (a, *noise))
        found = [b.series[name][step] for step in steps]
        if not all(math.isfinite(value) for value in reference):
            problems.append(f"{name}: RUN_A itself has values that are not finite, which decides nothing")
            continue
        labels = [f"step {step}" for step in steps]
        checks += judge_scalars(name, [reference, *others], found, labels, _resolution([*reference, *found]))
    if not checks and not problems:
        problems.append("the runs have no quantity in common that says what they compute")
    return Verdict(checks, problems)


def run(args: argparse.Namespace, output: Output) -> int:
    if len(args.noise) == 1:
        raise UsageError(f"--noise needs at least {_LEAST_NOISE_RUNS} runs; got 1 ({args.noise[0]!r})")
    if args.figure is not None:
        _check_figure(args.figure)
    a, b = read(args.run_a, "RUN_A"), read(args.run_b, "RUN_B")
    noise = [read(name, "--noise") for name in args.noise]
    rows = [row for name in _names(a, b) if (row := _row(name, a, b)) is not None]
    if not rows:
        raise UsageError(
            f"RUN_A {args.run_a!r} and RUN_B {args.run_b!r} have logged no quantity at a common step "
            f"({', '.join(sorted(a.series))}; {', '.join(sorted(b.series))})"
        )
    _show(rows, output)
    verdict = _judged(a, b, noise) if noise else None
    if verdict is None:
        output.text(
            "Whether the difference is noise is not decided: --noise takes two or more other runs of RUN_A to judge by."
        )
    else:
        for check in verdict.checks:
            output.text(f"{'ok    ' if check.passed else 'FAILED'} {check}", style="" if check.passed else "red")
        for problem in verdict.problems:
            output.text(f"FAILED {problem}", style="red")
        output.text("the same training within noise" if verdict.passed else "NOT the same training")
    if args.figure is not None:
        _draw(rows, (a, b, *noise), (args.run_a, args.run_b), args.figure)
        output.text(f"{args.figure}")
    output.result({
        "a": str(a.path), "b": str(b.path), "noise": [str(each.path) for each in noise], "rows": rows,
        "passed": None if verdict is None else verdict.passed,
        "problems": [] if verdict is None else verdict.problems,
        "checks": [] if verdict is None else [
            {"name": check.name, "noise_floors": check.ratio, "allowed": check.k, "passed": check.passed}
            for check in verdict.checks
        ],
    })  # fmt: skip
    return FINE if verdict is None or verdict.passed else FOUND


def _check_figure(path: Path) -> None:
    from ..support.optional import require
    from ..support.triton import MissingDependencyError

    if path.suffix not in FIGURES:
        raise UsageError(f"--figure must end with {', '.join(FIGURES)}; got {str(path)!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--figure must be in a folder that is there; got {str(path)!r}")
    try:
        require("--figure", "matplotlib")
    except MissingDependencyError as error:
        raise UsageError(str(error)) from error


def _show(rows: Sequence[dict[str, Any]], output: Output) -> None:
    table = new_table()
    for column in ("quantity", "logs", "A last", "B last", "A median", "B median", "B / A", "largest distance"):
        table.add_column(column, justify="left" if column == "quantity" else "right")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        numbers = [f"{row[key]:.5g}" for key in ("a_last", "b_last", "a_median", "b_median")]
        table.add_row(row["quantity"], str(row["steps"]), *numbers, ratio,
                      f"{row['largest_distance']:.3g} at step {row['at_step']}")  # fmt: skip
    output.show(table)
    output.text("")


def _draw(rows: Sequence[dict[str, Any]], runs: Sequence[Run], names: tuple[str, str], path: Path) -> None:
    """Draws a panel for each quantity: RUN_A, RUN_B, and the runs of --noise behind them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(6.0, 1.0 + 1.6 * len(rows)), layout="constrained", squeeze=False
    )
    for row, (axis,) in zip(rows, axes, strict=True):
        for each, label, style in reversed(list(zip(
            runs, (f"A: {names[0]}", f"B: {names[1]}", *(None for _ in runs[2:])),
            ("C0", "C1", *("0.8" for _ in runs[2:])), strict=True,
        ))):  # fmt: skip
            line = each.series.get(row["quantity"], {})
            axis.plot(list(line), list(line.values()), color=style, label=label, linewidth=1.2)
        axis.set_title(row["quantity"], fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    axes[-1][0].set_xlabel("step", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
