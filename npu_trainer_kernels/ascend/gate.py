"""The gate: every kernel that an op would launch, on every chip, against the rules; and the table that says so.

A `GateCase` is an op at one production shape and dtype. Its host code runs on `meta` tensors as if on the chip, so that
the grid and the block sizes are those that `tiling/` chooses there; each launch is then planned by the real compiler.
Where the case can also be run small, the launches are executed and their HBM traffic is held against the least that
would do.

    rows = collect(cases, CHIPS)
    failures(rows)                        what fails, by kernel and rule: empty for a gate that passes

Some rules are about waiting, not about right or wrong: loads that wait for the vector unit by a fixed event, waits of
the scalar unit executed per row, vector instructions per element over a minimum that was counted by hand. The last two
are counted in a trace of a few rows. What cannot keep such a rule is listed with its reason (`listed.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from .. import device
from ..ops.launch import use_launcher
from .launcher import LoweringLauncher, Recorder
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
SAMPLED_CHIPS = ("Ascend950PR_9589",)  # some shapes: its compiler takes four times as long


MAX_WAITS_PER_ROW = 8
MAX_OVER_MINIMUM = 1.10


@dataclass(frozen=True)
class FewRows:
    """A case with few rows, as one core gets them.

    Attributes:
        run: calls the op; nothing is computed.
        rows: how many.
        elements: of all of them.
    """

    run: Callable[[], object]
    rows: int
    elements: int


@dataclass(frozen=True)
class Minimum:
    """The fewest vector instructions per element that a kernel can do with, counted by hand in 16-bit dtypes.

    Attributes:
        count: how many.
        formula: what they are.
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
        run_small: calls the op on CPU tensors of a small shape, and returns the fewest bytes that each kernel, by name,
            could have moved between HBM and the chip; None where the traffic is not measured.
        max_traffic: the most bytes moved, over the fewest possible, that passes where rows fit on the chip; None: any.
        few: what is traced; None: nothing is.
        minima: of each kernel, by name, that has one.
        unserved: why the op leaves such calls to the model on a device; None: it serves them, or always does.
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
    """One kernel of one case on one chip. `plan` is None where the compiler failed, which `broken` then tells.

    Attributes:
        op, kernel, shape, dtype, chip: what.
        plan: the compiler's plan.
        traffic: bytes moved over the fewest possible, None where it is not measured.
        in_blocks: a row goes in column blocks, because it does not fit on the chip: then it is read more than once.
        broken: the rules that it breaks.
        waits: waits of the scalar unit for the vector unit, executed per row; None where it is not traced.
        instructions: vector instructions per element; None where it is not traced.
        minimum: the fewest that would do; None: nobody counted.
        delays: the rules about waiting that it breaks.
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
    """Of one kernel of a case: waits per row and vector instructions per element."""

    waits: float
    instructions: float


# By the kernel's name and which of its specializations it is, in the order of launches.
_Traces = Mapping[tuple[str, int], _Traced]
_Job = tuple[str, str]  # a specialization's content, and the facts of a target


def collect(cases: Iterable[GateCase], chips: Sequence[str] = CHIPS, workers: int = 2) -> list[GateRow]:
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
        rows: list[Callable[[], GateRow]] = []
        for case in cases:
            # Chips of one size have the same tiles, and with the same number of cores the same grid.
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


def _launched(case: GateCase, chip: str) -> list[tuple[Specialization, bool]]:
    """The distinct specializations that a case launches on a chip, in order, and whether each goes in column blocks."""
    recorder = Recorder()
    with device.use_chip(chip), use_launcher(recorder):
        case.run()
    if not recorder.launches:
        raise RuntimeError(f"{case.op} {case.shape} {case.dtype} launches no kernel on {chip}")
    specs = [(launch.specialize(chip), len(launch.grid) > 1 and launch.grid[1] > 1) for launch in recorder.launches]
    return list({spec.content: (spec, in_blocks) for spec, in_blocks in specs}.values())


def _traffic(case: GateCase, chip: str) -> Mapping[str, float]:
    """Bytes moved by each kernel over the fewest possible, executed with the tiles of `chip`."""
    if case.run_small is None or chip in SAMPLED_CHIPS:
        return {}
    launcher = LoweringLauncher(chip)
    with device.use_chip(chip), use_launcher(launcher):
        least = case.run_small()
    return {name: moved.bytes / least[name] for name, moved in launcher.traffic.items()}


def _traced(case: GateCase, chip: str) -> _Traces:
    """What the kernels of a case issue for each row and element. One core does all of the few rows, so that the tiles
    are those of one core; the compiler's plan has no more to do with the number of cores."""
    if case.few is None or chip in SAMPLED_CHIPS:  # a trace needs loops, and the library of its own generation
        return {}
    recorder = Recorder()
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
            # Its plan says what is wrong with it; a plan that is right and cannot be followed is named by `_row`.
            continue
        did = counts(events)
        # One program has one of the column blocks of each row.
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
        plan = replace(plan, chip=chip)  # it may have been planned for another chip of the kind
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
    """The rules about waiting that only a trace can show."""
    broken = []
    if row.waits is not None and row.waits > MAX_WAITS_PER_ROW:
        broken.append(f"waits per row: {row.waits:.1f} executed, at most {MAX_WAITS_PER_ROW}")
    if row.minimum is not None and row.instructions is not None:
        most = MAX_OVER_MINIMUM * row.minimum.count
        if row.instructions > most:
            broken.append(f"instructions per element: {row.instructions:.1f}, at most {most:.1f}")
    return broken


def collect_all(cases: Iterable[GateCase], workers: int = 2) -> list[GateRow]:
    """`collect` for all `CHIPS`, then for `SAMPLED_CHIPS` every third shape in bf16, and every sixth in fp32."""
    cases = list(cases)
    sampled = [case for case in cases if case.dtype == "bf16"][::3]
    sampled += [case for case in cases if case.dtype == "fp32"][::6]
    return collect(cases, CHIPS, workers) + collect(sampled, SAMPLED_CHIPS, workers)


def failures(rows: Iterable[GateRow], known: Sequence[Listed] | None = None) -> list[str]:
    """What breaks the gate, a line each: `op kernel shape dtype chip: rule: fact`.

    Args:
        rows: of the gate.
        known: what need not keep a rule about waiting; None: `listed.json`.
    """
    known = listed() if known is None else known
    return [
        f"{row.op} {row.kernel} {row.shape} {row.dtype} {row.chip}: {rule}"
        for row in rows
        for rule in (*row.broken, *(delay for delay in row.delays if reason(row, delay, known) is None))
    ]


def reason(row: GateRow, delay: str, known: Sequence[Listed]) -> str | None:
    """Why a row need not keep a rule; None: it must."""
    return next((entry.why for entry in known if entry.covers(row.op, row.kernel, row.shape, row.dtype, delay)), None)


def no_longer_needed(rows: Sequence[GateRow], known: Sequence[Listed] | None = None) -> list[str]:
    """What is listed and breaks no rule: the list must not outlive its reasons. `rows` are those of the whole gate."""
    known = listed() if known is None else known
    broken = [(row, delay) for row in rows for delay in row.delays]
    return [
        f"{part}: listed, but it keeps the rule"
        for entry in known
        for part in entry.parts()
        if not any(part.covers(row.op, row.kernel, row.shape, row.dtype, delay) for row, delay in broken)
    ]
