"""The Ascend gate checks the rules for every kernel that an op would launch, on every chip.

A `GateCase` is an op at one production shape and dtype. The op's host code runs on `meta` tensors as if on the chip, so
`tiling/` chooses the grid and the block sizes for that chip; then the compiler plans each launch. If a case has a small
version, its launches are executed, and their HBM traffic is compared with the minimum.

    rows = collect(cases, CHIPS)
    failures(rows)                        one line per kernel and broken rule; empty if the gate passes

Some rules concern speed, not correctness: loads that wait for the vector unit by a fixed event, waits of the scalar
unit executed per row, vector instructions per element over a minimum that was counted by hand. The last two are counted
in a trace of a few rows. A kernel that cannot keep one of these rules is listed with the reason (`listed.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from .. import device
from ..ops.launch import use_launcher
from .launcher import LaunchRecorder, LoweringLauncher
from .listed import Listed, listed
from .lower import Specialization, bind, lower
from .plan import MemoryPlan, delays, plan_lowered, target_facts, violations
from .toolchain import ToolchainError
from .trace import counts, trace

__all__ = [
    "A3_CHIPS",
    "CHIPS",
    "MAX_OVER_MINIMUM",
    "MAX_WAITS_PER_ROW",
    "SAMPLED_CHIPS",
    "FewRows",
    "GateCase",
    "GateRow",
    "Minimum",
    "collect",
    "collect_all",
    "failures",
    "no_longer_needed",
    "reason",
]

A3_CHIPS = tuple(name for name in device.ASCEND_CHIPS if name.startswith("Ascend910_93"))
CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", *A3_CHIPS)
SAMPLED_CHIPS = ("Ascend950PR_9589",)  # only some shapes are compiled, as its compiler takes four times as long


MAX_WAITS_PER_ROW = 8
MAX_OVER_MINIMUM = 1.10


@dataclass(frozen=True)
class FewRows:
    """A case with few rows, which one core computes.

    Attributes:
        run: calls the op; nothing is computed.
        rows: the number of rows.
        elements: the number of elements of all rows.
    """

    run: Callable[[], object]
    rows: int
    elements: int


@dataclass(frozen=True)
class Minimum:
    """The minimum of vector instructions per element that a kernel needs, counted by hand in 16-bit dtypes.

    Attributes:
        count: the number of instructions.
        formula: a list of the instructions, for the report.
    """

    count: float
    formula: str


@dataclass(frozen=True)
class GateCase:
    """An op at one shape.

    Attributes:
        op: the op's name, for example `"rms_norm"`.
        shape: a label, for example `"4096 x 8192"`.
        dtype: a label, for example `"bf16"`.
        run: calls the op (forward, and backward where it has one) on meta tensors of that shape.
        run_small: calls the op on CPU tensors of a small shape, and returns the minimum of bytes that each kernel, by
            name, has to move between HBM and the chip; None: the traffic is not measured.
        max_traffic: the limit of bytes moved / minimum of bytes for rows that fit on the chip; None: no limit.
        few: the case that is traced; None: there is no trace.
        minima: the minimum of instructions, by kernel name, where it was counted.
        unserved: returns why the op does not serve these calls on a device, or None; None: the op has no such rule.
    """

    op: str
    shape: str
    dtype: str
    run: Callable[[], object]
    run_small: Callable[[], Mapping[str, int]] | None = None
    max_traffic: float | None = 1.05
    few: FewRows | None = None
    minima: Mapping[str, Minimum] = field(default_factory=dict)
    unserved: Callable[[device.DeviceSpec], str | None] | None = None


@dataclass(frozen=True)
class GateRow:
    """The results for one kernel of one case on one chip.

    Attributes:
        op, kernel, shape, dtype, chip: the names of the kernel, its case and the chip.
        plan: the compiler's plan; None: the compiler failed, and `broken` has the error.
        traffic: bytes moved / minimum of bytes; None: not measured.
        in_blocks: whether a row does not fit on the chip and is computed in column blocks, which reads it repeatedly.
        broken: the rules that the kernel breaks.
        waits: waits of the scalar unit for the vector unit, executed per row; None: not traced.
        instructions: vector instructions per element; None: not traced.
        minimum: the minimum of these instructions; None: not counted.
        delays: the rules about waiting that the kernel breaks.
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
    waits: float | None = None
    instructions: float | None = None
    minimum: Minimum | None = None
    delays: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Traced:
    """Waits per row and vector instructions per element of one kernel of a case."""

    waits: float
    instructions: float


# The key is the kernel's name and the index of its specialization, in the order of launches.
_Traces = Mapping[tuple[str, int], _Traced]
_Job = tuple[str, str]  # a specialization's content, and the facts of a target


def collect(cases: Iterable[GateCase], chips: Sequence[str] = CHIPS, workers: int = 2) -> list[GateRow]:
    """Records, plans and measures the cases; returns rows in the order of cases, chips and launches.

    Chips whose descriptions in the compiler differ only in the number of cores (`plan.target_facts`) share a plan.

    Args:
        cases: the cases.
        chips: names of `device.ASCEND_CHIPS`.
        workers: the number of compiler processes that run at once; a thread waits for each.

    Raises:
        MissingDependencyError: a tool is not installed.
        RuntimeError: a case launches no kernel on a chip, so it would pass without a check.
    """
    with ThreadPoolExecutor(workers) as pool:
        plans = _Plans(pool)
        rows: list[Callable[[], GateRow]] = []
        for case in cases:
            # Chips with equal on-chip memory have the same tiles, and with equal core counts the same grid.
            measured: dict[tuple[int, int], Future[Mapping[str, float]]] = {}
            traced: dict[int, Future[_Traces]] = {}
            recorded: dict[tuple[int, int], list[tuple[Specialization, bool]]] = {}
            for chip in chips:
                spec = device.chip_spec(chip)
                like = spec.vector_cores, spec.on_chip_bytes
                if like not in measured:
                    measured[like] = pool.submit(_traffic, case, chip)
                    recorded[like] = _launched(case, chip)
                launches = [(replace(launched, chip=chip), in_blocks) for launched, in_blocks in recorded[like]]
                planned = [plans.of(launched) for launched, _ in launches]
                if spec.on_chip_bytes not in traced:
                    traced[spec.on_chip_bytes] = pool.submit(_traced, case, chip)
                seen: Counter[str] = Counter()
                for (launched, in_blocks), its_plan in zip(launches, planned, strict=True):
                    key = launched.name, seen[launched.name]
                    seen[launched.name] += 1
                    found = measured[like], traced[spec.on_chip_bytes]
                    rows.append(partial(_row, case, key, chip, its_plan, *found, in_blocks))
        return [row() for row in rows]


class _Plans:
    """Futures of plans: each specialization is planned once for each kind of target."""

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
            except ToolchainError:  # this kernel has no plan with the facts; another kernel may have one
                return spec.chip
        return self._facts[spec.chip]


def _plan(spec: Specialization, lowered: str) -> MemoryPlan | ToolchainError:
    try:
        return plan_lowered(spec.name, lowered, spec.chip, multi_buffer=bool(spec.options.get("multibuffer", True)))
    except ToolchainError as error:
        return error


def _launched(case: GateCase, chip: str) -> list[tuple[Specialization, bool]]:
    """Returns the distinct specializations that a case launches on a chip, each with whether its rows are computed in
    column blocks."""
    recorder = LaunchRecorder()
    with device.use_chip(chip), use_launcher(recorder):
        case.run()
    if not recorder.launches:
        raise RuntimeError(f"{case.op} {case.shape} {case.dtype} launches no kernel on {chip}")
    specs = [(launch.specialize(chip), len(launch.grid) > 1 and launch.grid[1] > 1) for launch in recorder.launches]
    return list({spec.content: (spec, in_blocks) for spec, in_blocks in specs}.values())


def _traffic(case: GateCase, chip: str) -> Mapping[str, float]:
    """Returns bytes moved / minimum of bytes for each kernel, executed with the tiles of `chip`."""
    if case.run_small is None or chip in SAMPLED_CHIPS:
        return {}
    launcher = LoweringLauncher(chip)
    with device.use_chip(chip), use_launcher(launcher):
        least = case.run_small()
    return {name: moved.bytes / least[name] for name, moved in launcher.traffic.items()}


def _traced(case: GateCase, chip: str) -> _Traces:
    """Traces the kernels of a case. One core computes all of the few rows; the compiler's plan depends on the number of
    cores only through the tiles."""
    if case.few is None or chip in SAMPLED_CHIPS:  # their plans have no loops, and there is no library for them
        return {}
    recorder = LaunchRecorder()
    with device.use_spec(replace(device.chip_spec(chip), vector_cores=1)), use_launcher(recorder):
        case.few.run()
    launches = {launch.specialize(chip).content: launch for launch in recorder.launches}
    found: dict[tuple[str, int], _Traced] = {}
    seen: Counter[str] = Counter()
    for launch in launches.values():
        key = launch.kernel.__name__, seen[launch.kernel.__name__]
        seen[key[0]] += 1
        try:
            events = trace(launch.specialize(chip), launch.grid, bind(launch.kernel, launch.args, launch.constexprs)[0])
        except ToolchainError:
            # The plan's own error is reported by `_row`, and so is a valid plan that cannot be traced.
            continue
        did = counts(events)
        # One program computes one column block of each row.
        blocks = launch.grid[1] if len(launch.grid) > 1 else 1
        elements = case.few.elements / blocks
        found[key] = _Traced(did.waits / case.few.rows, did.instructions_per_element(elements))
    return found


def _row(
    case: GateCase,
    key: tuple[str, int],
    chip: str,
    planned: Future[MemoryPlan | ToolchainError],
    measured: Future[Mapping[str, float]],
    traces: Future[_Traces],
    in_blocks: bool,
) -> GateRow:
    plan, traffic, kernel = planned.result(), None, key[0]
    if isinstance(plan, MemoryPlan):
        plan = replace(plan, chip=chip)  # the plan may have been made for another chip with the same facts
    broken: list[str] = []
    try:
        traffic = measured.result().get(kernel)
    except ToolchainError as error:
        if error.kernel == kernel:
            broken.append(f"cannot be executed: {error.stage}: {' | '.join(error.diagnostics)}")
        else:
            broken.append(f"traffic not counted: {error.kernel} of the same case cannot be executed")
    if isinstance(plan, ToolchainError):
        broken.insert(0, f"does not compile: {plan.stage}: {' | '.join(plan.diagnostics)}")
        return GateRow(case.op, kernel, case.shape, case.dtype, chip, None, traffic, in_blocks, tuple(broken))
    broken = violations(plan) + broken
    if traffic is not None and case.max_traffic is not None and not in_blocks and traffic > case.max_traffic:
        broken.append(f"traffic: {traffic:.3f} of the fewest bytes possible, at most {case.max_traffic:.3f}")
    row = GateRow(case.op, kernel, case.shape, case.dtype, chip, plan, traffic, in_blocks, tuple(broken))
    found = traces.result().get(key)
    if found is None:
        if case.few is not None and plan.fits and chip not in SAMPLED_CHIPS:
            row = replace(
                row, broken=(*broken, "cannot be traced: its plan has something that the trace does not know")
            )
        return replace(row, delays=tuple(delays(plan)))
    minimum = None if case.dtype == "fp32" else case.minima.get(kernel)
    row = replace(row, waits=found.waits, instructions=found.instructions, minimum=minimum)
    return replace(row, delays=(*delays(plan), *_delays(row)))


def _delays(row: GateRow) -> list[str]:
    """Returns the broken rules about waiting that a trace checks."""
    broken = []
    if row.waits is not None and row.waits > MAX_WAITS_PER_ROW:
        broken.append(f"waits per row: {row.waits:.1f} executed, at most {MAX_WAITS_PER_ROW}")
    if row.minimum is not None and row.instructions is not None:
        most = MAX_OVER_MINIMUM * row.minimum.count
        if row.instructions > most:
            broken.append(f"instructions per element: {row.instructions:.1f}, at most {most:.1f}")
    return broken


def collect_all(
    cases: Iterable[GateCase], workers: int = 2, keep: Callable[[GateCase], bool] = lambda case: True
) -> list[GateRow]:
    """Calls `collect` for all `CHIPS`, then for `SAMPLED_CHIPS` with every third bf16 and every sixth fp32 case, less
    those that the op leaves to the model there.

    Args:
        cases: the cases of the whole gate.
        workers: compilers at once.
        keep: whether a case is gated.
    """
    cases = list(cases)
    sampled = [case for case in cases if case.dtype == "bf16"][::3]
    sampled += [case for case in cases if case.dtype == "fp32"][::6]
    specs = [device.chip_spec(chip) for chip in SAMPLED_CHIPS]
    sampled = [case for case in sampled if case.unserved is None or not any(map(case.unserved, specs))]
    return collect(filter(keep, cases), CHIPS, workers) + collect(filter(keep, sampled), SAMPLED_CHIPS, workers)


def failures(rows: Iterable[GateRow], known: Sequence[Listed] | None = None) -> list[str]:
    """Returns a line for each broken rule: `op kernel shape dtype chip: rule: fact`.

    Args:
        rows: the rows of the gate.
        known: the exceptions to rules about waiting; None: those of `listed.json`.
    """
    known = listed() if known is None else known
    return [
        f"{row.op} {row.kernel} {row.shape} {row.dtype} {row.chip}: {rule}"
        for row in rows
        for rule in (*row.broken, *(delay for delay in row.delays if reason(row, delay, known) is None))
    ]


def reason(row: GateRow, delay: str, known: Sequence[Listed]) -> str | None:
    """Returns the reason why a row may break a rule about waiting; None: it must keep the rule."""
    return next((entry.why for entry in known if entry.covers(row.op, row.kernel, row.shape, row.dtype, delay)), None)


def no_longer_needed(rows: Sequence[GateRow], known: Sequence[Listed] | None = None) -> list[str]:
    """Returns a line for each listed exception whose kernel keeps the rule, and which must therefore be removed. `rows`
    are those of the whole gate."""
    known = listed() if known is None else known
    broken = [(row, delay) for row in rows for delay in row.delays]
    return [
        f"{part}: listed, but it keeps the rule"
        for entry in known
        for part in entry.parts()
        if not any(part.covers(row.op, row.kernel, row.shape, row.dtype, delay) for row, delay in broken)
    ]
