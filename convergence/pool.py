"""Several runs at a time, each in a worker process of its own, on one device.

Small models leave an accelerator idle and a processor busy, so that many runs fit beside each other. What has finished
stays in a folder, by the digest of the sources: a command that was stopped goes on where it was.
"""

import gc
import hashlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import npu_trainer_kernels
from npu_trainer_kernels.verify import Curves, Variant

from .cases import Case
from .mutations import MutationResult, run_mutations
from .runs import Workshop, run
from .suite import CaseResult, Progress, in_own_process, is_in_own_process, result_of, unavailable, variants_of

__all__ = ["kept_in", "run_all"]

_workshop: Workshop | None = None


def kept_in(folder: Path, device: str) -> Path:
    """Where the runs of these sources on a device are kept."""
    digest = hashlib.sha256()
    for root in (Path(npu_trainer_kernels.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    found = folder / f"{device}-{digest.hexdigest()[:12]}"
    found.mkdir(parents=True, exist_ok=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A worker
# ---------------------------------------------------------------------------------------------------------------------


def _start(folder: Path, device: str) -> None:
    from .__main__ import prepare  # which imports this module

    global _workshop
    prepare(device)
    _workshop = Workshop(folder, device)


def _file_of(folder: Path, case: Case, variant: Variant) -> Path:
    # A case that is run with another number of steps is another one.
    return folder / "runs" / f"{case.name}-{case.steps}" / f"{variant} {variant.sampling_seed}.pt"


def _one(case: Case, variant: Variant) -> None:
    """One run; what it leaves is on disk."""
    assert _workshop is not None
    curves = run(_workshop, case, variant)
    if variant == variants_of(case)[0]:
        _workshop.keep_rollouts(case)
    curves.report = None  # names classes that were made for it, which no other process has
    file = _file_of(_workshop.folder, case, variant)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(curves, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)
    del curves
    gc.collect()
    if _workshop.device not in (None, "cpu"):
        torch.get_device_module(_workshop.device).empty_cache()


def _silent(name: str, note: str, part: float) -> None:
    pass


def _apart(case: Case) -> CaseResult:
    assert _workshop is not None
    return in_own_process(case, _workshop.folder, _silent)


def _faults(names: Sequence[str] | None) -> list[MutationResult]:
    assert _workshop is not None
    return run_mutations(_workshop.device or "cpu", _silent, names)


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


class _Cases:
    """What has been asked of the workers, and what came of it."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path, progress: Progress) -> None:
        self._pool, self._folder, self._progress = pool, folder, progress
        self.pending: dict[Future[Any], tuple[Case, Variant | None]] = {}
        self.problems: dict[str, list[str]] = {}
        self.whole: dict[str, CaseResult] = {}

    def begin(self, case: Case, device: str) -> None:
        reason = unavailable(case, device)
        if reason:
            self.whole[case.name] = CaseResult(asdict(case), skipped=reason)
            self._progress(case.name, "", 1.0)
        elif is_in_own_process(case):
            self.pending[self._pool.submit(_apart, case)] = case, None
        elif _file_of(self._folder, case, variants_of(case)[0]).exists():
            self._rest(case)
        else:
            # The others need its model, its text and its rollouts.
            self._submit(case, variants_of(case)[0])

    def end(self, future: Future[Any]) -> None:
        case, variant = self.pending.pop(future)
        error = future.exception()
        if error is not None:
            self.problems.setdefault(case.name, []).append(f"{variant}: {type(error).__name__}: {error}")
        elif variant is None:
            self.whole[case.name] = future.result()
        elif variant == variants_of(case)[0]:
            self._rest(case)
        left = sum(of is case for of, _ in self.pending.values())
        self._progress(case.name, f"{left} runs to go", 1 - left / len(variants_of(case)))

    def result(self, case: Case) -> CaseResult:
        if case.name in self.whole:
            return self.whole[case.name]
        if case.name in self.problems:
            return CaseResult(asdict(case), problems=self.problems[case.name])
        runs: list[tuple[Variant, Curves]] = [
            (variant, torch.load(_file_of(self._folder, case, variant), weights_only=False))
            for variant in variants_of(case)
        ]
        return result_of(case, runs, sum(curves.seconds for _, curves in runs))

    def _rest(self, case: Case) -> None:
        for variant in variants_of(case)[1:]:
            if not _file_of(self._folder, case, variant).exists():
                self._submit(case, variant)

    def _submit(self, case: Case, variant: Variant) -> None:
        self.pending[self._pool.submit(_one, case, variant)] = case, variant


def run_all(
    cases: Sequence[Case], faults: bool, names: Sequence[str] | None, device: str, progress: Progress, jobs: int,
    folder: Path,
) -> tuple[list[CaseResult], list[MutationResult]]:  # fmt: skip
    """Runs cases and planted faults, `jobs` runs at a time.

    Args:
        cases: the rows.
        faults: whether faults are planted as well; they take turns in one worker.
        names: of the faults; None: all.
        device: "cpu", "cuda" or "npu".
        progress: is told what is being done.
        jobs: workers.
        folder: where finished runs are kept, by `kept_in`.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(folder, device)) as pool:
        planted = pool.submit(_faults, names) if faults else None
        todo = _Cases(pool, folder, progress)
        for case in cases:
            todo.begin(case, device)
        while todo.pending:
            for future in wait(todo.pending, return_when=FIRST_COMPLETED).done:
                todo.end(future)
        return [todo.result(case) for case in cases], planted.result() if planted is not None else []
