"""Runs cases, in this process or in a separate one, and returns their results as plain data."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from npu_trainer_kernels import backends
from npu_trainer_kernels.support import triton
from npu_trainer_kernels.verify import Check, Curves, Variant, Verdict, judge, judge_samples, variants

from .cases import NOISE_RUNS, Case
from .runs import Workshop, run

__all__ = [
    "CaseResult",
    "Progress",
    "in_own_process",
    "is_in_own_process",
    "result_of",
    "rule_itself",
    "run_case",
    "run_cases",
    "unavailable",
    "variants_of",
]

# Called with the case's name, the current step, and the fraction that is done.
Progress = Callable[[str, str, float], None]


@dataclass
class CaseResult:
    """The result of a case as plain data.

    Attributes:
        case: the fields of the case.
        skipped: why it could not run here, or "".
        problems: reasons to fail that are not distances.
        checks: the checks of the verdict, with distances and floors per step.
        curves: scalar name -> {"unpatched": one list per run, "patched": list}.
        replaced: op -> the number of modules that it serves, from the kernels' report.
        unpatched: for each unpatched run its largest distance from the other unpatched runs, in their noise floors, as
            if it were the patched one. If these exceed the limit, the rule does not fit the training.
        seconds: the wall-clock time of the whole case.
        train_seconds: the training times of the reference run and the patched run.
    """

    case: dict[str, Any]
    skipped: str = ""
    problems: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    unpatched: list[float] = field(default_factory=list)
    seconds: float = 0.0
    train_seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        """The case's name."""
        return self.case["name"]

    @property
    def verdict(self) -> Verdict:
        """The checks with their rule."""
        return Verdict(self.checks, self.problems)

    @property
    def passed(self) -> bool:
        """Whether the case ran and no check failed."""
        return not self.skipped and bool(self.checks) and self.verdict.passed

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON, with the verdict."""
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CaseResult":
        """Creates a result from the value of `as_dict`."""
        known = {name: value for name, value in fields.items() if name != "passed"}
        known["checks"] = [Check(**check) for check in fields["checks"]]
        return cls(**known)


def unavailable(case: Case, device: str) -> str:
    """Returns why a case cannot run on this machine, or ""."""
    if case.backend == "triton" and triton.IMPORT_ERROR is not None:
        return f"Triton cannot be imported ({triton.IMPORT_ERROR})"
    if case.backend == "triton" and device != "cpu":
        return f"the interpreter is for the CPU; on {device} every case runs Triton"
    if case.backend == "ascend-lowering":
        reason = backends.unavailable(case.backend, device)
        if reason is not None:
            return reason
        from npu_trainer_kernels.ascend import launcher, toolchain  # noqa: F401  the launcher executes kernels

        try:
            toolchain.require_all()
        except (ImportError, toolchain.ToolchainError) as error:
            return str(error).splitlines()[0]
    return ""


def variants_of(case: Case) -> list[Variant]:
    """Returns the runs of a case, the reference first."""
    if not case.seeds:
        return variants(NOISE_RUNS)
    # All runs have different seeds: with equal seeds rounding would hardly ever change a sample.
    return [
        Variant(patched=patched, sampling_seed=seed + patched * case.seeds)
        for seed in range(case.seeds)
        for patched in (False, True)
    ]


def rule_itself(case: Case, runs: Sequence[tuple[Variant, Curves]]) -> list[float]:
    """Returns `CaseResult.unpatched`; empty if runs sample freely, or if there are too few runs."""
    curves = [curves for variant, curves in runs if not variant.patched]
    if case.seeds or len(curves) < 4:
        return []
    return [judge([*curves[:i], *curves[i + 1 :]], run, case.precision).worst.ratio for i, run in enumerate(curves)]


def result_of(case: Case, runs: Sequence[tuple[Variant, Curves]], seconds: float) -> CaseResult:
    """Judges all the runs of a case."""
    unpatched, patched = ([curves for variant, curves in runs if variant.patched == which] for which in (False, True))
    if not case.seeds:
        return _result(case, unpatched, patched[0], judge(unpatched, patched[0], case.precision), seconds)
    # The runs sample freely: their mean rewards in the second half of training are compared.
    rewards = [[curves.scalars["reward"] for curves in side] for side in (unpatched, patched)]
    means = [[fmean(reward[len(reward) // 2 :]) for reward in side] for side in rewards]
    check = judge_samples("reward, second half", *means, case.precision)
    result = _result(case, unpatched, patched[0], Verdict([check]), seconds)
    result.curves = {"reward": {"unpatched": rewards[0], "patched": rewards[1]}}
    return result


def run_case(case: Case, workshop: Workshop, progress: Progress, unpatched: list[Curves] | None = None) -> CaseResult:
    """Runs all variants of a case in this process.

    Args:
        case: the case.
        workshop: the data that its runs share.
        progress: called with the progress of the case.
        unpatched: the unpatched runs, if they exist already; an empty list is filled with them.
    """
    start = time.perf_counter()
    all_of = variants_of(case)
    runs = list(zip((v for v in all_of if not v.patched), unpatched or (), strict=False))
    todo = all_of if not unpatched else [variant for variant in all_of if variant.patched]
    for i, variant in enumerate(todo):
        progress(case.name, str(variant), i / len(todo))
        runs.append((variant, run(workshop, case, variant)))
    progress(case.name, "", 1.0)
    result = result_of(case, runs, time.perf_counter() - start)
    if not unpatched:
        result.unpatched = rule_itself(case, runs)
    if unpatched is not None and not unpatched:
        unpatched.extend(curves for variant, curves in runs if not variant.patched)
    return result


def _result(case: Case, unpatched: Sequence[Curves], patched: Curves, verdict: Verdict, seconds: float) -> CaseResult:
    curves = {
        name: {"unpatched": [run.scalars[name] for run in unpatched], "patched": patched.scalars.get(name, [])}
        for name in unpatched[0].scalars
    }
    train_seconds = (round(unpatched[0].seconds, 3), round(patched.seconds, 3))
    return CaseResult(
        asdict(case),
        problems=verdict.problems,
        checks=verdict.checks,
        curves=curves,
        replaced=patched.replaced or {},
        seconds=round(seconds, 1),
        train_seconds=train_seconds,
    )


def is_in_own_process(case: Case) -> bool:
    """Whether a case needs Triton's interpreter, and this process has none."""
    return case.backend == "triton" and not triton.INTERPRETED


def in_own_process(case: Case, folder: Path, progress: Progress) -> CaseResult:
    """Runs a case in a process with Triton's interpreter, which an environment variable enables before Triton's
    import."""
    progress(case.name, "in a process with Triton's interpreter", 0.0)
    output = folder / f"{case.name}.json"
    command = [sys.executable, "-m", "convergence", "--case", case.name, "--device", "cpu", "--json", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    progress(case.name, "", 1.0)
    if not output.exists():
        tail = "\n".join(process.stderr.splitlines()[-15:])
        return CaseResult(asdict(case), problems=[f"its process ended with status {process.returncode}:\n{tail}"])
    return CaseResult.from_dict(json.loads(output.read_text(encoding="utf-8"))["cases"][0])


def run_cases(cases: Sequence[Case], device: str, progress: Progress) -> list[CaseResult]:
    """Runs cases one after the other. If one cannot run, its result has the reason."""
    results = []
    with TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), device)
        for case in cases:
            reason = unavailable(case, device)
            if reason:
                progress(case.name, "", 1.0)
                results.append(CaseResult(asdict(case), skipped=reason))
            elif is_in_own_process(case):
                results.append(in_own_process(case, Path(folder), progress))
            else:
                results.append(_attempt(case, workshop, progress))
    return results


def _attempt(case: Case, workshop: Workshop, progress: Progress) -> CaseResult:
    """Calls `run_case`. An exception is a failure of this case, and the other cases still run."""
    try:
        return run_case(case, workshop, progress)
    except Exception as error:  # noqa: BLE001  whatever a kernel, a model or a trainer may raise
        progress(case.name, "", 1.0)
        trace = traceback.format_tb(error.__traceback__)[-1].strip()
        return CaseResult(asdict(case), problems=[f"{type(error).__name__}: {error}\n{trace}"])
