"""The gate: every kernel that an op would launch, on every chip, against the rules; and the table that says so.

A `Case` is an op at one production shape and dtype. Its host code runs on `meta` tensors as if on the chip, so that
the grid and the block sizes are those that `tiling.py` chooses there; each launch is then planned by the real compiler.
Where the case can also be run small, the launches are executed and their HBM traffic is held against the least that
would do.

    rows = collect(cases, CHIPS)
    failures(rows)                        what fails, by kernel and rule: empty for a gate that passes
    write_report(rows, path), report_is_current(rows, path)

The report's compile time is the one column that a rerun would change: it is shown in coarse steps and left out when the
report is compared, so that the file changes only with the kernels or the compiler.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .. import device
from ..ops._launch import use_launcher
from .launcher import LoweringLauncher, Recorder
from .lower import Specialization, lower
from .plan import MemoryPlan, plan_lowered, target_facts, violations
from .toolchain import ToolchainError

__all__ = [
    "CHIPS",
    "REPORTED_CHIPS",
    "Case",
    "Row",
    "collect",
    "collect_all",
    "failures",
    "render",
    "report_is_current",
    "write_report",
]

CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910_9382")
REPORTED_CHIPS = ("Ascend950PR_9589",)  # in the table, but not gating: no kernel is tuned for it yet


@dataclass(frozen=True)
class Case:
    """An op at one shape.

    Attributes:
        op: the op's name, for example `"rms_norm"`.
        shape: a label, for example `"4096 x 8192"`.
        dtype: a label, for example `"bf16"`.
        run: calls the op (forward, and backward where it has one) on meta tensors of that shape.
        run_small: calls the op on CPU tensors of a small shape, and returns the fewest bytes that each kernel, by name,
            could have moved between HBM and the chip; None where the traffic is not measured.
        max_traffic: the most bytes moved, over the fewest possible, that passes where rows fit on the chip; None: any.
    """

    op: str
    shape: str
    dtype: str
    run: Callable[[], object]
    run_small: Callable[[], Mapping[str, int]] | None = None
    max_traffic: float | None = 1.05


@dataclass(frozen=True)
class Row:
    """One kernel of one case on one chip. `plan` is None where the compiler failed, which `broken` then tells.

    Attributes:
        op, kernel, shape, dtype, chip: what.
        plan: the compiler's plan.
        traffic: bytes moved over the fewest possible, None where it is not measured.
        in_blocks: a row goes in column blocks, because it does not fit on the chip: then it is read more than once.
        broken: the rules that it breaks.
    """

    op: str
    kernel: str
    shape: str
    dtype: str
    chip: str
    plan: MemoryPlan | None
    traffic: float | None
    in_blocks: bool
    broken: tuple[str, ...]


_Job = tuple[str, str]  # a specialization's content, and the facts of a target


def collect(cases: Iterable[Case], chips: Sequence[str] = CHIPS, workers: int = 2) -> list[Row]:
    """Records, plans and measures the cases; rows in the order of cases, chips and launches.

    Chips of which the compiler knows the same, but for the number of cores (`plan.target_facts`), share a plan.

    Args:
        cases: the cases.
        chips: names of `device.ASCEND_CHIPS`.
        workers: compilers that run at once. Each is a process of its own, which a thread waits for.

    Raises:
        MissingDependencyError: a tool is not installed.
        RuntimeError: a case launches nothing on a chip, so that passing it would mean nothing.
    """
    with ThreadPoolExecutor(workers) as pool:
        plans = _Plans(pool)
        rows: list[Callable[[], Row]] = []
        for case in cases:
            # Chips of one size have the same tiles, and with the same number of cores the same grid.
            measured: dict[tuple[int, int], Future[Mapping[str, float]]] = {}
            for chip in chips:
                spec = device.chip_spec(chip)
                like = spec.vector_cores, spec.on_chip_bytes
                if like not in measured:
                    measured[like] = pool.submit(_traffic, case, chip)
                for launched, in_blocks in _launched(case, chip):
                    planned = plans.of(launched)
                    rows.append(partial(_row, case, launched.name, chip, planned, measured[like], in_blocks))
        return [row() for row in rows]


class _Plans:
    """Plans under way: each specialization once for each kind of target."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lowered: dict[str, str | ToolchainError] = {}
        self._facts: dict[str, str] = {}
        self._plans: dict[_Job, Future[MemoryPlan | ToolchainError]] = {}

    def of(self, spec: Specialization) -> Future[MemoryPlan | ToolchainError]:
        lowered = self._lower(spec)
        if isinstance(lowered, ToolchainError):
            failed: Future[MemoryPlan | ToolchainError] = Future()
            failed.set_result(lowered)
            return failed
        key = spec.content, self._facts_of(spec, lowered)
        if key not in self._plans:
            self._plans[key] = self._pool.submit(_plan, spec, lowered)
        return self._plans[key]

    def _lower(self, spec: Specialization) -> str | ToolchainError:
        if spec.content not in self._lowered:
            try:
                self._lowered[spec.content] = lower(spec)
            except ToolchainError as error:
                self._lowered[spec.content] = error
        return self._lowered[spec.content]

    def _facts_of(self, spec: Specialization, lowered: str) -> str:
        if spec.chip not in self._facts:
            try:
                self._facts[spec.chip] = target_facts(spec.name, lowered, spec.chip)
            except ToolchainError:  # this kernel has no plan to read them from; the next may
                return spec.chip
        return self._facts[spec.chip]


def _plan(spec: Specialization, lowered: str) -> MemoryPlan | ToolchainError:
    try:
        return plan_lowered(spec.name, lowered, spec.chip, multi_buffer=bool(spec.options.get("multibuffer", True)))
    except ToolchainError as error:
        return error


def _launched(case: Case, chip: str) -> list[tuple[Specialization, bool]]:
    """The distinct specializations that a case launches on a chip, in order, and whether each goes in column blocks."""
    recorder = Recorder()
    with device.use_chip(chip), use_launcher(recorder):
        case.run()
    if not recorder.launches:
        raise RuntimeError(f"{case.op} {case.shape} {case.dtype} launches no kernel on {chip}")
    specs = [(launch.specialize(chip), len(launch.grid) > 1 and launch.grid[1] > 1) for launch in recorder.launches]
    return list({spec.content: (spec, in_blocks) for spec, in_blocks in specs}.values())


def _traffic(case: Case, chip: str) -> Mapping[str, float]:
    """Bytes moved by each kernel over the fewest possible, executed with the tiles of `chip`."""
    if case.run_small is None or chip in REPORTED_CHIPS:
        return {}
    launcher = LoweringLauncher(chip)
    with device.use_chip(chip), use_launcher(launcher):
        least = case.run_small()
    return {name: moved.bytes / least[name] for name, moved in launcher.traffic.items()}


def _row(
    case: Case,
    kernel: str,
    chip: str,
    planned: Future[MemoryPlan | ToolchainError],
    measured: Future[Mapping[str, float]],
    in_blocks: bool,
) -> Row:
    plan, traffic = planned.result(), None
    if isinstance(plan, MemoryPlan):
        plan = replace(plan, chip=chip)  # it may have been planned for another chip of the kind
    broken: list[str] = []
    try:
        traffic = measured.result().get(kernel)
    except ToolchainError as error:
        broken.append(f"cannot be executed: {error.stage}: {' | '.join(error.diagnostics)}")
    if isinstance(plan, ToolchainError):
        broken.insert(0, f"does not compile: {plan.stage}: {' | '.join(plan.diagnostics)}")
        return Row(case.op, kernel, case.shape, case.dtype, chip, None, traffic, in_blocks, tuple(broken))
    broken = violations(plan) + broken
    if traffic is not None and case.max_traffic is not None and not in_blocks and traffic > case.max_traffic:
        broken.append(f"traffic: {traffic:.3f} of the fewest bytes possible, at most {case.max_traffic:.3f}")
    return Row(case.op, kernel, case.shape, case.dtype, chip, plan, traffic, in_blocks, tuple(broken))


def collect_all(cases: Iterable[Case], workers: int = 2) -> list[Row]:
    """`collect` for all `CHIPS`, then for `REPORTED_CHIPS` every third shape in bf16: their compiler takes four times
    as long, and they do not gate."""
    cases = list(cases)
    reported = [case for case in cases if case.dtype == "bf16"][::3]
    return collect(cases, CHIPS, workers) + collect(reported, REPORTED_CHIPS, workers)


def failures(rows: Iterable[Row]) -> list[str]:
    """What breaks the gate, a line each: `op kernel shape dtype chip: rule: fact`. `REPORTED_CHIPS` never do."""
    return [
        f"{row.op} {row.kernel} {row.shape} {row.dtype} {row.chip}: {rule}"
        for row in rows
        if row.chip not in REPORTED_CHIPS
        for rule in row.broken
    ]


# ----------------------------------------------------------------------------------------------------------- the report
_TIME_STEPS = ((1.0, "< 1"), (10.0, "< 10"), (60.0, "< 60"))
_COLUMNS = (
    "op",
    "kernel",
    "shape",
    "dtype",
    "chips",
    "buffer",
    "double-buffered",
    "switches",
    "traffic",
    "verdict",
    "seconds",
)
_HEADER = """# What the Ascend compiler says of every kernel

Written by the gate (`make test-ascend`) from the real compiler's output; no chip was used, and nothing here is a time
on one. Chips that differ in the number of cores alone share a plan; the gate's tests compile every kernel for both and
compare. *buffer*: KiB of a core's unified buffer used / available. *switches*: waits between the vector and the scalar
unit per row or tile of rows. *traffic*: bytes that the kernel moved between HBM and the chip over the fewest possible,
counted when the lowering of one core's share is executed; the worst of the chips. *In blocks*: a row does not fit on
the chip and is read twice. A row of class weights is read beside each row of logits; the fewest possible does not count
it. fp16 moves what bf16 moves. *seconds*: seconds to compile, in steps (not compared). The 950 does not gate: no kernel
is tuned for it, and every third shape is shown.
"""


def render(rows: Iterable[Row]) -> str:
    """The report as Markdown: chips with the same facts share a line; the order is that of `rows`."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(_facts(row), []).append(row)
    table = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for (*where, buffer, buffered, switches, verdict), alike in lines.items():
        chips = ", ".join(dict.fromkeys(row.chip.removeprefix("Ascend") for row in alike))
        seconds = max(row.plan.seconds if row.plan else 0.0 for row in alike)
        slowest = next((label for limit, label in _TIME_STEPS if seconds < limit), ">= 60")
        table.append(_line([*where, chips, buffer, buffered, switches, _worst_traffic(alike), verdict, slowest]))
    return _HEADER + "\n" + "\n".join(table) + "\n"


def _facts(row: Row) -> tuple[str, ...]:
    verdict = "; ".join(row.broken) or "passes"
    where = (row.op, row.kernel, row.shape, row.dtype)
    if row.plan is None:
        return (*where, "", "", "", verdict)
    used, size = row.plan.buffer_used / 1024, row.plan.buffer_size / 1024
    buffered = "yes" if row.plan.double_buffered else "no"
    return (*where, f"{used:.1f} / {size:.0f}", buffered, str(row.plan.vector_scalar_switches), verdict)


def _worst_traffic(rows: Iterable[Row]) -> str:
    found = [(row.traffic, row.in_blocks) for row in rows if row.traffic is not None]
    if not found:
        return ""
    traffic, in_blocks = max(found)
    return f"{traffic:.3f}" + (" (in blocks)" if in_blocks else "")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def write_report(rows: Iterable[Row], path: Path) -> None:
    """Writes `render(rows)` to `path`; a report that is current is left as it is, compile times included."""
    rows = list(rows)
    if not report_is_current(rows, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(rows))


def report_is_current(rows: Iterable[Row], path: Path) -> bool:
    """Whether the file says what `rows` say, compile times aside."""
    return path.exists() and _without_times(path.read_text()) == _without_times(render(rows))


def _without_times(report: str) -> str:
    return re.sub(r" \| [^|]* \|$", " |", report, flags=re.MULTILINE)
