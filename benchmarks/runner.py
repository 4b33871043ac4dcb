"""Measures every case of the table with every provider in every mode; a provider that cannot run also gets a row."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_trainer_kernels import device as devices
from npu_trainer_kernels.descriptions import Inputs

from .cases import OPS, OpCase, work_of
from .measure import (
    Settings,
    as_json,
    bandwidth,
    errors,
    is_accelerator,
    measure,
    operations,
    peak_extra_bytes,
    product_seconds,
    rotation,
    truth_of,
    verdict,
)
from .providers import Absent, Provider, providers
from .results import Results, Row, package_version

__all__ = ["ERRORS", "Budget", "Cell", "cells", "run_case"]

# Exceptions of a provider that do not end the run: the row has the reason. Out of memory is a RuntimeError.
ERRORS = (
    RuntimeError, ValueError, TypeError, ImportError, NotImplementedError, AttributeError, OSError, AssertionError,
    LookupError, ArithmeticError,
)  # fmt: skip
FLOOR = "floor"


class DeviceLostError(RuntimeError):
    """The device is unusable in this process; a new run continues after the row that caused it."""


class Budget:
    """The time limit of a run in seconds; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()


@dataclass(frozen=True)
class Cell:
    """A case and a provider."""

    case: OpCase
    provider: Provider

    @property
    def path(self) -> str:
        return f"{self.case.key}/{self.provider.name}"

    def missing(self, results: Results) -> bool:
        """Whether any of its rows is missing."""
        version = package_version(self.provider.package)
        return any(not results.has(f"{self.path}/{mode}", version) for mode in self.case.modes)


def cells(table: list[OpCase], wanted: Callable[[str], bool]) -> list[list[Cell]]:
    """Returns the wanted cells, grouped by case."""
    found = []
    for case in table:
        of_case = [c for c in (Cell(case, p) for p in providers(case)) if wanted(c.path)]
        if of_case:
            found.append(of_case)
    return found


def _blank(case: OpCase, provider: str, version: str, mode: str) -> Row:
    return {
        "group": case.group, "op": case.op, "shape": case.shape, "sizes": dict(case.sizes), "dtype": case.dtype,
        "provider": provider, "version": version, "mode": mode, "status": "ok",
    }  # fmt: skip


def _free(device: torch.device) -> None:
    gc.collect()
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


def _inputs(case: OpCase, device: torch.device, seed: int) -> Inputs:
    torch.manual_seed(seed)
    return OPS[case.op].build(case, device).require_grad()


def floors(case: OpCase, device: torch.device, settings: Settings, bytes_per_second: float) -> list[Row]:
    """Returns a floor row for each mode."""
    work = work_of(case)
    if OPS[case.op].products is not None:
        seconds = product_seconds(case, device, settings)
    else:
        rate = operations(device, case.torch_dtype, settings) if any(w.flops for w in work.values()) else math.inf
        seconds = {mode: max(w.bytes / bytes_per_second, w.flops / rate) for mode, w in work.items()}
    rows = []
    for mode in case.modes:
        row = _blank(case, FLOOR, "", mode)
        ms = seconds[mode] * 1e3
        row["ms"] = {"median": ms, "q1": ms, "q3": ms, "least": ms, "samples": 1}
        rows.append({**row, **_rates(case, mode, ms)})
    return rows


def _rates(case: OpCase, mode: str, ms: float) -> dict[str, float]:
    work = work_of(case)[mode]
    return {"tflops": work.flops / ms / 1e9, "gbps": work.bytes / ms / 1e6}


@dataclass
class _Context:
    """Data for all providers of a case."""

    floor_ms: dict[str, float]
    truth: Mapping[str, Tensor] | None
    reference_errors: dict[str, float] | None


def _prepare(
    case: OpCase, device: torch.device, settings: Settings, results: Results, bytes_per_second: float
) -> _Context:
    rows = results.find(group=case.group, op=case.op, shape=case.shape, dtype=case.dtype, provider=FLOOR)
    if len(rows) < len(case.modes):
        rows = floors(case, device, settings, bytes_per_second)
        results.add(rows)
        _free(device)
    truth, reference = None, None
    try:
        truth = truth_of(case, _inputs(case, device, seed=0))
        reference = errors(OPS[case.op].reference, _inputs(case, device, seed=0), truth)
    except torch.OutOfMemoryError:
        # Too large for the plain reference: errors are then compared with the dtype's rounding only.
        reference = None
    _free(device)
    return _Context({r["mode"]: r["ms"]["median"] for r in rows}, truth, reference)


def _measure_cell(cell: Cell, device: torch.device, settings: Settings, context: _Context) -> list[Row]:
    case = cell.case
    fn = cell.provider.make(case, device)
    inputs = _inputs(case, device, seed=0)
    truth = context.truth if cell.provider.whole else None
    found = None if truth is None else errors(fn, inputs, truth)
    del inputs
    first = _inputs(case, device, seed=1)
    sets = [first]
    sets += [_inputs(case, device, seed=i + 2) for i in range(rotation(case, device, first.bytes()) - 1)]
    rows = []
    for mode in case.modes:
        row = _blank(case, cell.provider.name, package_version(cell.provider.package), mode)
        cold = OPS[case.op].products is None
        summary, host_us = measure(fn, sets, mode, device, settings, cold)
        row |= {"ms": as_json(summary), "host_us": host_us, **_rates(case, mode, summary.median)}
        row["extra_bytes"] = peak_extra_bytes(fn, sets[0], mode, device)
        row["floor_ratio"] = summary.median / context.floor_ms[mode]
        row["errors"] = found
        row["verdict"] = "unchecked" if found is None else verdict(found, context.reference_errors, case.dtype)
        rows.append(row)
    return rows


def _is_fatal(error: BaseException, device: torch.device) -> bool:
    """Whether the device is unusable in this process after an error."""
    if not is_accelerator(device) or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        devices.synchronize(device)
    except RuntimeError:
        return True
    return False


def failed(cell: Cell, error: BaseException, fatal: bool = False) -> list[Row]:
    """Returns the rows of a provider that is absent or has failed, with the reason."""
    status = "absent" if isinstance(error, (Absent, ImportError)) else "error"
    reason = f"{type(error).__name__}: {error}".strip().split("\n")[0][:400]
    version = package_version(cell.provider.package)
    return [
        {**_blank(cell.case, cell.provider.name, version, m), "status": status, "reason": reason, "fatal": fatal}
        for m in cell.case.modes
    ]


def run_case(
    of_case: list[Cell],
    device: torch.device,
    settings: Settings,
    results: Results,
    budget: Budget,
    bytes_per_second: float,
) -> Iterator[tuple[Cell, list[Row]]]:
    """Measures the cells of one case that are not in the results yet; yields each with its rows.

    Raises:
        DeviceLostError: a provider left the device unusable; its row is in the results.
    """
    todo = [cell for cell in of_case if cell.missing(results)]
    if not todo:
        return
    context = _prepare(todo[0].case, device, settings, results, bytes_per_second)
    for cell in todo:
        if budget.left() <= 0:
            return
        lost = False
        try:
            rows = _measure_cell(cell, device, settings, context)
        except ERRORS as error:
            lost = _is_fatal(error, device)
            rows = failed(cell, error, lost)
        results.add(rows)
        yield cell, rows
        if lost:
            raise DeviceLostError(f"{cell.path}: {rows[0]['reason']}")
        _free(device)


def measured_bandwidth(results: Results, device: torch.device, settings: Settings) -> float:
    """Returns the bytes per second of a large copy, which is measured once per results file."""
    known: Any = results.meta.get("copy_bytes_per_second")
    if known is None:
        known = bandwidth(device, settings)
        results.meta["copy_bytes_per_second"] = known
        _free(device)
    return float(known)
