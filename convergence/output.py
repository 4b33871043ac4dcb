"""The output of the suite: progress and tables on the terminal, JSON, a summary page, one figure per case."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from npu_trainer_kernels.verify import TOP_K, WINDOW, Check, K

from .cases import CASES, NOISE_RUNS, SHOWCASE
from .suite import CaseResult

if TYPE_CHECKING:
    from .mutations import MutationResult

__all__ = [
    "Live",
    "attach",
    "case_table",
    "current_commit",
    "mutation_table",
    "release_problem",
    "showcase_figure",
    "write_json",
    "write_results",
]

UNITS = {
    "loss": "loss [nats/token]",
    "gradient norm": "gradient norm [1]",
    "held-out log-probability": "held-out log-probability [nats/token]",
}
GRPO_LOSS = "loss (GRPO objective) [1]"
UNPATCHED, PATCHED, BAND = "#4c72b0", "#dd8452", "#b8c4d9"


class Live:
    """Shows a progress line for each case on a terminal; elsewhere it prints a line when a case is done."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description:30}"), BarColumn(20), TimeElapsedColumn(),
                   TextColumn("{task.fields[note]}"))  # fmt: skip
        self._console = console
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks = {name: self._bar.add_task(name, total=1.0, start=False, note="") for name in names}

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def progress(self, name: str, note: str, part: float) -> None:
        """Updates the progress of `name`."""
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=1.0, start=False, note="")
        self._bar.start_task(self._tasks[name])
        self._bar.update(self._tasks[name], completed=part, note=note)
        if part >= 1.0:
            self._bar.stop_task(self._tasks[name])
            if not self._console.is_terminal:
                self._console.print(f"{name} done", highlight=False)


def _ratio(check: Check) -> str:
    return f"{check.ratio:.2g} / {check.k:g}"


def _row(result: CaseResult) -> tuple[str, ...]:
    """Returns the cells of a case, without markup."""
    case, verdict = result.case, result.verdict
    outcome = "skipped" if result.skipped else "pass" if result.passed else "FAIL"
    cells = (result.name, f"{case['family']} {case['task']}", case["precision"], case["backend"], str(case["steps"]))
    if not result.checks:
        return (*cells, outcome, (result.skipped or "; ".join(result.problems)).splitlines()[0][:80], "", "", "")
    worst = verdict.worst
    unpatched = f"{max(result.unpatched):.2g}" if result.unpatched else ""
    return (*cells, outcome, worst.name, _ratio(worst), unpatched, f"{result.seconds:.0f}")


CASE_COLUMNS = ("case", "model, task", "precision", "backend", "steps", "verdict", "nearest to its limit",
                "noise floors / allowed", "of an unpatched run", "seconds")  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], outcome: int) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    table.columns[0].no_wrap = True
    colours = {"pass": "green", "caught": "green", "FAIL": "bold red", "MISSED": "bold red"}
    for row in rows:
        colour = colours.get(row[outcome], "yellow")
        table.add_row(*(f"[{colour}]{cell}[/]" if i == outcome else cell for i, cell in enumerate(row)))
    return table


def case_table(results: Sequence[CaseResult]) -> Table | None:
    """Returns the table of verdicts, or None."""
    if not results:
        return None
    return _table("Unpatched against patched", CASE_COLUMNS, [_row(result) for result in results], 5)


MUTATION_COLUMNS = ("planted fault", "case", "verdict", "shows most in", "noise floors / allowed", "seconds")


def _mutation_row(result: MutationResult) -> tuple[str, ...]:
    return (result.name, result.case, result.outcome, result.shown_in, result.ratio_text, f"{result.seconds:.1f}")


def mutation_table(results: Sequence[MutationResult]) -> Table | None:
    """Returns the table of planted faults, or None."""
    if not results:
        return None
    return _table("Planted faults", MUTATION_COLUMNS, [_mutation_row(result) for result in results], 2)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def current_commit() -> str:
    """Returns the current commit, with the suffix -dirty if files differ from it; "unknown" without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()} CPU"
    return str(torch.get_device_module(device).get_device_name())


def _is_full(results: Sequence[CaseResult], mutations: Sequence[MutationResult]) -> bool:
    ran = {(result.name, result.case["steps"]) for result in results}
    return {(case.name, case.steps) for case in CASES} <= ran and bool(mutations)


def _document(
    results: Sequence[CaseResult], mutations: Sequence[MutationResult], device: str, commit: str
) -> dict[str, Any]:
    ran = [result for result in results if not result.skipped]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": device,
        "machine": _machine(device),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")},
        "rule": {"k": K, "noise_runs": NOISE_RUNS, "window": WINDOW, "top_k": TOP_K},
        "full": _is_full(results, mutations),
        "passed": bool(ran or mutations) and all(r.passed for r in ran) and all(m.caught for m in mutations),
        "cases": [result.as_dict() for result in results],
        "mutations": [mutation.as_dict() for mutation in mutations],
    }


def write_json(
    path: Path, results: Sequence[CaseResult], mutations: Sequence[MutationResult], device: str, commit: str,
    told: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes the result file atomically, and returns its content. `commit`: the commit at the beginning of the run, or,
    if `told`, the commit from the command line, for sources without git history."""
    if not told and current_commit() != commit:
        commit = f"{commit}, changed during the run"
    document = _document(results, mutations, device, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return document


def write_results(
    folder: Path, results: Sequence[CaseResult], mutations: Sequence[MutationResult], device: str, commit: str,
    told: bool = False,
) -> Path:  # fmt: skip
    """Writes JSON, summary and figures, named by date and device, and returns the summary's path. Results of a part of
    the suite have other names, as they must not replace a full result."""
    shown = [result for result in results if result.name in {case.name for case in SHOWCASE} and result.checks]
    part = "" if _is_full(results, mutations) else "-showcase" if shown else "-part"
    stem = f"{datetime.date.today().isoformat()}-{device}{part}"
    document = write_json(folder / f"{stem}.json", results, mutations, device, commit, told)
    if shown:
        showcase_figure(shown, folder / f"{stem}.png")
    for result in results:
        if result.checks:
            figure(result, folder / stem / f"{result.name}.png")
    summary = folder / f"{stem}.md"
    summary.write_text(_summary(document, results, mutations, stem), encoding="utf-8")
    return summary


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


def _summary(
    document: dict[str, Any], results: Sequence[CaseResult], mutations: Sequence[MutationResult], stem: str
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    allowed = ", ".join(f"{k:g} in {precision}" for precision, k in K.items())
    lines = [
        f"# Convergence: {'passed' if document['passed'] else 'FAILED'}",
        "",
        f"{document['date']}, {document['machine']}, commit `{document['commit']}`, {versions}.",
        "",
        f"Each case is trained without the kernels {NOISE_RUNS + 1} times, once as it is and {NOISE_RUNS} times with "
        "every product and sum added up in another order, and once with the kernels. Distances are in noise floors: "
        f"the largest distance between two of the unpatched runs within {WINDOW} steps. Allowed: {allowed}. Beside "
        "it stands the most that an unpatched run has, judged in the same way against the others. The rule is in "
        "`npu_trainer_kernels/verify.py`.",
        "",
    ]
    if results:
        rows = [_row(result) for result in results]
        linked = [(f"[{row[0]}]({stem}/{row[0]}.png)" if r.checks else row[0], *row[1:]) for r, row in
                  zip(results, rows, strict=True)]  # fmt: skip
        lines += [*_markdown_table(CASE_COLUMNS, linked), ""]
    if mutations:
        lines += [
            "## Planted faults",
            "",
            *_markdown_table(MUTATION_COLUMNS, [_mutation_row(m) for m in mutations]),
            "",
        ]
    failures = [f"- {result.name}: {line}" for result in results for line in result.verdict.failures()]
    return "\n".join(lines + (["## Failures", "", *failures, ""] if failures else []))


def release_problem(folder: Path) -> str:
    """Returns why the results in `folder` do not allow a release of the current commit, or ""."""
    commit = current_commit()
    if commit == "unknown" or commit.endswith("-dirty"):
        return f"the working tree is not a commit ({commit}): results of it would not be those of the release"
    found = list(_full_results(folder, commit))
    if not found:
        return f"{folder} holds no full result for commit {commit}: run python -m convergence --full"
    # The runs on all devices must have passed.
    failed = [path for path, document in found if not document["passed"]]
    return f"the full run failed for this commit: {failed[0]}" if failed else ""


def _full_results(folder: Path, commit: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["commit"] == commit and document["full"]:
            yield path, document


def attach(folder: Path, target: Path) -> Path:
    """Packs JSON, summary and figures of the full runs of this commit into `target`/convergence.zip, for a release."""
    target.mkdir(parents=True, exist_ok=True)
    archive = target / "convergence.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, _ in _full_results(folder, current_commit()):
            for file in (path, path.with_suffix(".md"), *sorted((folder / path.stem).glob("*.png"))):
                packed.write(file, file.relative_to(folder))
    return archive


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def figure(result: CaseResult, path: Path) -> None:
    """Draws the curves, their differences with the noise band, and the checks that have no curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if result.case.get("seeds"):
        _free_figure(result, path, plt)
        return
    checks = {check.name: check for check in result.checks}
    # Panels are below each other, so that text is readable if a figure is as wide as a phone.
    grid, axes = plt.subplots(9, 1, figsize=(5, 25), layout="constrained")
    axes = axes.reshape(3, 3)
    case = result.case
    grid.suptitle(
        f"{result.name}: {'passed' if result.passed else 'FAILED'}\n{case['family']}, {case['task']}, "
        f"{case['precision']}, backend: {case['backend']}, {NOISE_RUNS + 1} unpatched runs"
    )
    for column, (name, unit) in enumerate(UNITS.items()):
        unit = GRPO_LOSS if name == "loss" and case["task"] == "grpo" else unit
        _curves(axes[0, column], unit, result.curves[name])
        _distance(axes[1, column], f"difference of {name}", unit[unit.rindex("[") :], checks[name])
    _distance(axes[2, 0], "held-out log-probabilities by token, rms", "[nats]",
              checks["held-out log-probabilities, by token"])  # fmt: skip
    _distance(axes[2, 1], f"positions with another top {TOP_K}", "[share]", checks[f"held-out top {TOP_K}"])
    _parameters(axes[2, 2], checks["parameters at the end"])
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.savefig(path, dpi=130)
    plt.close(grid)


def showcase_figure(results: Sequence[CaseResult], path: Path) -> None:
    """Draws for each case the curves of all runs, and the distance in the held-out log-probability."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(result, *panel) for result in results for panel in enumerate(_shown(result).items())]
    grid, axes = plt.subplots(len(panels), 1, figsize=(5, 2.4 * len(panels)), layout="constrained", squeeze=False)
    for axis, (result, place, (name, title)) in zip(axes[:, 0], panels, strict=True):
        check = next((check for check in result.checks if f"difference of {check.name}" == name), None)
        if check is not None:
            _distance(axis, name, "[nats/token]", check)
        else:
            curves = result.curves[name]
            # A batch of completions is used in several steps, and has one reward.
            _curves(axis, title, curves, every=result.case["steps"] // len(curves["patched"]))
        if place == 0:
            outcome = "passed" if result.passed else "FAILED"
            axis.set_title(f"{result.name}, {result.case['precision']}: {outcome}\n{axis.get_title()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.savefig(path, dpi=130)
    plt.close(grid)


def _shown(result: CaseResult) -> dict[str, str]:
    """Returns the panels of a case in the showcase, from the top: curves with their titles, and a distance."""
    is_grpo = result.case["task"] == "grpo"
    rewards = {"reward": "mean reward of a batch, replayed in all runs [1]"} if is_grpo else {}
    held_out = "held-out log-probability"
    return {
        **rewards, "loss": GRPO_LOSS if is_grpo else UNITS["loss"], held_out: UNITS[held_out],
        f"difference of {held_out}": "",
    }  # fmt: skip


def _free_figure(result: CaseResult, path: Path, plt: Any) -> None:
    """Draws the rewards of all free runs, and their means over the second half."""
    check, runs = result.checks[0], result.curves["reward"]
    grid, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained", width_ratios=(2, 1))
    grid.suptitle(
        f"{result.name}: {'passed' if result.passed else 'FAILED'}  (free-running, "
        f"{result.case['seeds']} sampling seeds each way)"
    )
    for place, (kind, colour) in enumerate((("unpatched", UNPATCHED), ("patched", PATCHED))):
        label = "with the kernels" if place else "without the kernels"
        for i, run in enumerate(runs[kind]):
            left.plot(range(1, len(run) + 1), run, color=colour, linewidth=0.8, alpha=0.7, label=None if i else label)
        means = [sum(run[len(run) // 2 :]) / len(run[len(run) // 2 :]) for run in runs[kind]]
        right.plot([place] * len(means), means, "o", color=colour, alpha=0.7)
        right.plot([place - 0.2, place + 0.2], [sum(means) / len(means)] * 2, color=colour, linewidth=3)
    left.set(title="reward", xlabel="step", ylabel="mean reward of a batch [1]")
    left.legend(frameon=False)
    right.set(
        title=f"second half: {check.distance[0]:.3g} apart, floor {check.floor[0]:.3g}",
        ylabel="mean reward of a run [1]", xlim=(-0.6, 1.6),
    )  # fmt: skip
    right.set_xticks([0, 1], ["without the kernels", "with the kernels"])
    for axis in (left, right):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.savefig(path, dpi=80)
    plt.close(grid)


def _curves(axis: Any, unit: str, curves: dict[str, Any], every: int = 1) -> None:
    """Draws curves; `every`: the number of steps between two values."""
    steps = [1 + every * i for i in range(len(curves["patched"]))]
    for i, run in enumerate(curves["unpatched"]):
        axis.plot(steps, run, color=UNPATCHED, linewidth=1.5, alpha=0.6, label="without the kernels" if not i else None)
    axis.plot(steps, curves["patched"], color=PATCHED, linewidth=1.5, linestyle=(0, (4, 3)), label="with the kernels")
    axis.set(title=unit, xlabel="step")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)


def _distance(axis: Any, title: str, unit: str, check: Check) -> None:
    steps = range(1, len(check.distance) + 1)
    limit = [check.k * floor for floor in check.floor]
    bottom = min(check.floor) / 30
    axis.fill_between(steps, bottom, check.floor, color=BAND, label="noise floor", linewidth=0)
    axis.plot(steps, limit, color="black", linewidth=1, linestyle=":", label=f"allowed: {check.k:g} noise floors")
    # The axis is logarithmic: if both agree to the last bit, the point is drawn at the lower edge.
    shown = [max(d, bottom) if math.isfinite(d) else math.nan for d in check.distance]
    axis.plot(steps, shown, color=PATCHED, marker=".", linewidth=1, label="with the kernels")
    if not any(check.distance):
        axis.text(0.5, 0.5, "no difference at any step", transform=axis.transAxes, ha="center")
    axis.set_yscale("log")
    axis.set_ylim(bottom=bottom)
    axis.set(title=title, xlabel="step", ylabel=f"distance {unit}")
    axis.legend(loc="lower right", fontsize="small")
    axis.grid(alpha=0.3)


def _parameters(axis: Any, check: Check) -> None:
    ratios = sorted(check.ratios)
    axis.plot(range(1, len(ratios) + 1), ratios, ".", color=PATCHED)
    axis.axhline(check.k, color="black", linewidth=1, linestyle=":", label=f"allowed: {check.k:g}")
    axis.axhspan(0, 1, color=BAND, label="noise floor", linewidth=0)
    axis.set(
        title="parameters at the end, rms by tensor", xlabel="tensor, by distance", ylabel="distance [noise floors]"
    )
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize="small")
    axis.grid(alpha=0.3)
