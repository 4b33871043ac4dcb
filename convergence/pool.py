"""Runs several trainings at a time, each in a worker process, distributed over the visible cards.

Small models leave an accelerator idle and a processor busy, so several runs can share a card. Finished runs are stored
in a folder whose name has the hash of the sources: a command that was interrupted continues from there.
"""

import gc
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

import npu_trainer_kernels
from npu_trainer_kernels.verify import Curves, Variant

from .cases import Case
from .mutations import Mutation, MutationResult, cases_of, chosen, control, plant
from .process import prepare
from .runs import Workshop, run
from .suite import (
    CaseResult,
    Progress,
    in_own_process,
    is_in_own_process,
    result_of,
    rule_itself,
    unavailable,
    variants_of,
)

__all__ = ["kept_in", "run_all"]

_workshop: Workshop | None = None


def kept_in(folder: Path, device: str) -> Path:
    """Returns the folder for the runs of these sources on a device."""
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


# The environment variables that limit a process to some of a machine's cards.
_IN_SIGHT = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def cards_of(device: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the visible cards; none for the CPU."""
    if device not in _IN_SIGHT:
        return []
    named = environment.get(_IN_SIGHT[device])
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(i) for i in range(torch.get_device_module(device).device_count())]


def _start(folder: Path, device: str, cards: SimpleQueue[str]) -> None:
    global _workshop
    if device in _IN_SIGHT:
        # Set before a card is used here; later it would have no effect, and all workers would use the first card.
        os.environ[_IN_SIGHT[device]] = cards.get()
        in_sight = torch.get_device_module(device).device_count()
        if in_sight != 1:
            raise RuntimeError(f"a worker is to see one card; it sees {in_sight}")
    prepare(device)
    _workshop = Workshop(folder, device)


def _file_of(folder: Path, case: Case, variant: Variant) -> Path:
    # The number of steps, which an option can change, is part of the name.
    return folder / "runs" / f"{case.name}-{case.steps}" / f"{variant} {variant.sampling_seed}.pt"


def _one(case: Case, variant: Variant) -> None:
    """Runs one variant, and stores its result on disk."""
    assert _workshop is not None
    curves = run(_workshop, case, variant)
    if variant == variants_of(case)[0]:
        _workshop.keep_rollouts(case)
    curves.report = None  # it refers to generated classes, which other processes do not have
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


def _runs(folder: Path, case: Case) -> list[tuple[Variant, Curves]]:
    """Loads all runs of a case from disk."""
    return [(variant, torch.load(_file_of(folder, case, variant), weights_only=False)) for variant in variants_of(case)]


def _unpatched(folder: Path, case: Case) -> list[Curves]:
    return [curves for variant, curves in _runs(folder, case) if not variant.patched]


def _fault(mutation: str) -> MutationResult:
    assert _workshop is not None
    (planted,) = chosen([mutation])
    return plant(planted, _workshop, partial(_unpatched, _workshop.folder))


# ---------------------------------------------------------------------------------------------------------------------
# The parent
# ---------------------------------------------------------------------------------------------------------------------


class _Cases:
    """The submitted runs, and the results of cases."""

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
            # The other variants need the first one's model, text and rollouts.
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
        runs = _runs(self._folder, case)
        result = result_of(case, runs, sum(curves.seconds for _, curves in runs))
        result.unpatched = rule_itself(case, runs)
        return result

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
        cases: the cases.
        faults: whether faults are planted as well.
        names: the names of the faults; None: all.
        device: "cpu", "cuda" or "npu".
        progress: called with the progress of each case.
        jobs: the number of workers.
        folder: the folder for finished runs, see `kept_in`.
    """
    context = get_context("spawn")
    cards: SimpleQueue[str] = context.SimpleQueue()
    in_sight = cards_of(device, os.environ)
    for i in range(jobs if in_sight else 0):
        cards.put(in_sight[i % len(in_sight)])
    mutations = chosen(names) if faults else []
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(folder, device, cards)) as pool:
        todo = _Cases(pool, folder, progress)
        controls = cases_of(mutations, device)
        for case in (*controls, *cases):
            todo.begin(case, device)
        while todo.pending:
            for future in wait(todo.pending, return_when=FIRST_COMPLETED).done:
                todo.end(future)
        caught = [control(todo.result(case)) for case in controls]
        broken = {row.case: row.shown_in for row in caught if not row.caught}
        return [todo.result(case) for case in cases], [*caught, *_planted(pool, mutations, broken, progress)]


def _planted(
    pool: ProcessPoolExecutor, mutations: Sequence[Mutation], broken: Mapping[str, str], progress: Progress
) -> list[MutationResult]:
    """Plants every fault, except into a case that fails without a fault, whose failure would prove nothing."""
    asked: list[Future[MutationResult] | MutationResult] = []
    for mutation in mutations:
        failed = next((case.name for case in cases_of([mutation]) if case.name in broken), None)
        asked.append(
            pool.submit(_fault, mutation.name) if failed is None else
            MutationResult(mutation.name, failed, "not planted", False, broken[failed])
        )  # fmt: skip
    rows = []
    for i, (mutation, row) in enumerate(zip(mutations, asked, strict=True)):
        progress("planted faults", mutation.name, i / len(mutations))
        rows.append(row if isinstance(row, MutationResult) else row.result())
    progress("planted faults", "", 1.0)
    return rows
