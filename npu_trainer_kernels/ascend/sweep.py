"""Compares tiles of a kernel in the compiler's plan and in simulation, for developers of `tiling/`.

    python -m npu_trainer_kernels.ascend.sweep swiglu --kernel _forward_kernel --tile swiglu_block.size \\
        --values 10240,8192,6144 --sizes 14336,8192

Each tile is planned for one chip and traced (`trace.py`). The line of a tile shows whether it fits and is
double-buffered, the number of loads that wait for the vector unit by a fixed event, the waits of the scalar unit for
the vector unit per row, the vector instructions per element of rows x size (for a rotation this includes all heads of a
token), and the simulated cycles per KiB loaded (`pipes.py`: a ratio between tiles, never a time). The best tile is the
one with the fewest cycles of those that pass the gate's rules for plans.

    ... --name swiglu._forward_kernel --limit 8192 --unit "elements of a tile" --write

writes the limit and the results into `tiles.json`, from which the formulas of `tiling/` read it
(`tiling.limits.tile_limit`). With `--limit-of swiglu._forward_kernel` instead of `--tile`, the values are limits of
that formula.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import device, tiling
from ..descriptions import GATE, GATE_DTYPES, GateEntry, GateTensors
from ..ops.launch import use_launcher
from ..support.triton import MissingDependencyError
from ..tiling import limits
from . import gate, toolchain
from .launcher import LaunchRecorder, RecordedLaunch
from .lower import bind
from .pipes import simulate
from .plan import MemoryPlan, plan, violations
from .trace import counts, trace

__all__ = ["Found", "Sweep", "main", "sweep"]


@dataclass(frozen=True)
class Sweep:
    """The tiles to compare.

    Attributes:
        case: the `op` of an entry of `GATE`.
        kernel: the kernel's name.
        sizes: values of the entry's size, for example hidden sizes.
        values: the values of the tile's field, or of the limit.
        tile: a function of `tiling` and a field of its tiles, `"swiglu_block.size"`; None: `limit_of` is varied.
        limit_of: a kernel's name in `tiles.json`.
        dtype: a name of `cases.DTYPES`.
        chip: a chip of `rates.json`, or a chip without traces, for which only the plans are compared.
    """

    case: str
    kernel: str
    sizes: tuple[int, ...]
    values: tuple[int, ...]
    tile: str | None = None
    limit_of: str | None = None
    dtype: str = "bf16"
    chip: str = "Ascend910B4"

    def __post_init__(self) -> None:
        if (self.tile is None) == (self.limit_of is None):
            raise ValueError("exactly one of --tile and --limit-of must be given")
        if self.tile is not None and not callable(getattr(tiling, self.tile.partition(".")[0], None)):
            raise ValueError(f"--tile must be FUNCTION.FIELD with a function of tiling; got {self.tile!r}")
        device.chip_spec(self.chip)
        if self.dtype not in GATE_DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(GATE_DTYPES)}; got {self.dtype!r}")

    @property
    def entry(self) -> GateEntry:
        """The entry of the table."""
        for entry in GATE:
            if entry.op == self.case:
                return entry
        raise ValueError(f"case must be one of {'; '.join(entry.op for entry in GATE)}; got {self.case!r}")


@dataclass(frozen=True)
class Found:
    """The results for one tile, summed over all launches of the kernel.

    Attributes:
        size: the size of the case.
        value: the tile's value; None: the current tile.
        tile: the tile's compile-time numbers.
        plans: the compiler's plans.
        trial: the results in the format of `tiles.json`; None: no plan fits.
        instructions: vector instructions per element.
    """

    size: int
    value: int | None
    tile: str
    plans: tuple[MemoryPlan, ...]
    trial: limits.Trial | None
    instructions: float

    @property
    def passes(self) -> bool:
        """Whether the plans break no rule."""
        return self.trial is not None and not any(violations(found) or found.fixed_waits for found in self.plans)


@contextlib.contextmanager
def _with(what: Sweep, value: int | None) -> Iterator[None]:
    """Sets the tile's value inside the block; None: the current value stays."""
    if value is None:
        yield
    elif what.limit_of is not None:
        itemsize = GATE_DTYPES[what.dtype].itemsize
        _forget()
        with limits.trying(what.limit_of, itemsize, value):
            yield
        _forget()
    else:
        name, _, changed = str(what.tile).partition(".")
        original = getattr(tiling, name)

        def tile(*args: Any, **options: Any) -> Any:
            made = original(*args, **options)
            return made if made is None else replace(made, **{changed: value})

        setattr(tiling, name, tile)
        try:
            yield
        finally:
            setattr(tiling, name, original)


def _forget() -> None:
    """Clears the caches of tiles, whose keys do not include the limit."""
    for function in vars(tiling).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _launches(what: Sweep, size: int, value: int | None) -> list[RecordedLaunch]:
    """Returns the kernel's launches."""
    recorder, entry = LaunchRecorder(), what.entry
    tensors = GateTensors(GATE_DTYPES[what.dtype], "cpu" if entry.reads_values or entry.follows_ids else "meta")
    with _with(what, value), device.use_chip(what.chip), use_launcher(recorder):
        entry.call(tensors, _rows(what) * device.chip_spec(what.chip).vector_cores, size)
    named = [launch for launch in recorder.launches if launch.kernel.__name__ == what.kernel]
    if not named:
        launched = sorted({launch.kernel.__name__ for launch in recorder.launches})
        raise ValueError(f"--kernel must be one of {', '.join(launched)}; got {what.kernel!r}")
    return named


def _rows(what: Sweep) -> int:
    """Returns the number of rows of one program."""
    return what.entry.share or what.entry.rows // device.chip_spec(what.chip).vector_cores


def _found(what: Sweep, size: int, value: int | None) -> Found:
    launches = _launches(what, size, value)
    specs = [launch.specialize(what.chip) for launch in launches]
    plans = tuple(plan(spec) for spec in specs)
    tile = " ".join(f"{name}={number}" for name, number in specs[0].constants.items() if name in _TILE_NAMES)
    if not all(found.fits for found in plans):
        return Found(size, value, tile, plans, None, 0.0)
    rows = _rows(what)
    fixed = max(found.fixed_waits for found in plans)
    shape = f"{rows * device.chip_spec(what.chip).vector_cores} x {size} ({what.entry.label})"
    if what.chip in gate.SAMPLED_CHIPS:  # its plans cannot be traced
        return Found(size, value, tile, plans, limits.Trial(shape, value or 0, fixed, None, None), 0.0)
    cycles = waits = repeats = loaded = 0.0
    for spec, launch in zip(specs, launches, strict=True):
        events = trace(spec, launch.grid, bind(launch.kernel, launch.args, launch.constexprs)[0])
        seen = counts(events)
        waits, repeats, loaded = waits + seen.waits, repeats + seen.instructions_per_element(1), loaded + seen.bytes_in
        cycles += simulate(events, what.chip).cycles
    # If loads depend on data, a trace of zeros may have no loads.
    per_kib = round(cycles / (loaded / 1024), 1) if loaded else None
    trial = limits.Trial(shape, value or 0, fixed, round(waits / rows, 2), per_kib)
    return Found(size, value, tile, plans, trial, repeats / (rows * size))


# The names of the kernels' tile parameters.
_TILE_NAMES = frozenset(("ROWS", "COLS", "BLOCK", "FOLD", "WIDTH", "REST_COLS"))


def sweep(what: Sweep) -> list[Found]:
    """Returns the results of the current tile and of every value, size by size.

    Raises:
        ValueError: `what` names something that does not exist.
        MissingDependencyError, ToolchainError: as `plan` and `trace`.
    """
    return [_found(what, size, value) for size in what.sizes for value in (None, *what.values)]


def _best(found: Sequence[Found]) -> Found | None:
    """Returns the tile with the fewest cycles of those that pass; all are of one size."""
    passing = [one for one in found if one.passes]
    return min(passing, key=lambda one: one.trial.cycles_per_kib or 0.0 if one.trial else 0.0, default=None)


_HEAD = "       tile  fits two buffers fixed waits/row instr/el cycles/KiB  compiled with"


def _line(one: Found, best: Found | None) -> str:
    mark = "*" if one is best else ""
    name = "today" if one.value is None else str(one.value)
    if one.trial is None:
        return f"{mark:2}{name:>9}  no, {one.plans[0].buffer_used} of {one.plans[0].buffer_size} bytes: {one.tile}"
    buffers = "yes" if all(found.double_buffered for found in one.plans) else "no"
    trial = one.trial
    waits, cycles = ("-" if number is None else f"{number:.{digits}f}"
                     for number, digits in ((trial.waits_per_row, 2), (trial.cycles_per_kib, 1)))  # fmt: skip
    broken = "; ".join(rule.partition(":")[0] for found in one.plans for rule in violations(found))
    return (
        f"{mark:2}{name:>9}  {'yes':4} {buffers:11} {trial.fixed_waits:5} {waits:>9} "
        f"{one.instructions:8.2f} {cycles:>10}  {one.tile}{f' ({broken})' if broken else ''}"
    )


def _evidence(what: Sweep, found: Sequence[Found]) -> limits.Evidence:
    """Returns the results in the format of `tiles.json`. The current tile has the value 0, as a formula computes it."""
    trials = tuple(one.trial for one in found if one.trial is not None)
    varied = what.tile if what.tile is not None else f"limit of {what.limit_of}"
    return limits.Evidence(what.case, what.dtype, what.chip, toolchain.versions(), str(varied), trials)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m npu_trainer_kernels.ascend.sweep", description=__doc__.splitlines()[0]
    )
    parser.add_argument("case", help="the op of an entry of GATE")
    parser.add_argument("--kernel", required=True, help="the kernel's name")
    parser.add_argument("--tile", help="a function of tiling and a field of its tiles: swiglu_block.size")
    parser.add_argument("--limit-of", help="a kernel's name in tiles.json, whose limit is varied instead")
    parser.add_argument("--values", type=_numbers, required=True, help="what to try, with commas")
    parser.add_argument("--sizes", type=_numbers, help="sizes of the case, with commas; the entry's own if not given")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument(
        "--chip", default="Ascend910B4", help="a chip of rates.json; of the 950 the plans are shown alone"
    )
    parser.add_argument("--write", action="store_true", help="write --limit and the trials into tiles.json")
    parser.add_argument("--name", help="the kernel's stable name there; --limit-of if not given")
    parser.add_argument("--limit", type=int, help="the limit; the best value if not given and the sizes agree")
    parser.add_argument("--unit", help="what the limit counts")
    parser.add_argument("--add", action="store_true", help="keep the evidence that tiles.json has of this limit")
    given = parser.parse_args(argv)
    try:
        what = Sweep(given.case, given.kernel, given.sizes or (), given.values, given.tile, given.limit_of,
                     given.dtype, given.chip)  # fmt: skip
        what = replace(what, sizes=given.sizes or what.entry.sizes)
        print(
            f"{what.case} {what.kernel} {what.dtype} {what.chip}. Simulated cycles are ratios between tiles, not times."
        )
        found: list[Found] = []
        bests: set[int | None] = set()
        for size in what.sizes:
            of_size = sweep(replace(what, sizes=(size,)))
            best = _best(of_size)
            bests.add(best.value if best else None)
            print(f"\n{what.entry.label} {size}\n{_HEAD}", *(_line(one, best) for one in of_size), sep="\n", flush=True)
            found += of_size
        if given.write:
            _write(given, what, found, bests)
    except (ValueError, MissingDependencyError, toolchain.ToolchainError) as error:
        parser.error(str(error))


def _write(given: argparse.Namespace, what: Sweep, found: list[Found], bests: set[int | None]) -> None:
    chosen = given.limit or (next(iter(bests)) if len(bests) == 1 else None)
    name = given.name or what.limit_of
    if chosen is None or name is None or given.unit is None:
        raise ValueError("--write needs --name, --unit, and --limit where the sizes' bests differ or are today's tile")
    itemsize = GATE_DTYPES[what.dtype].itemsize
    kib = device.chip_spec(what.chip).on_chip_bytes // device.KIB
    new = limits.Limit(name, itemsize, kib, chosen, given.unit, (_evidence(what, found),))
    known = [limit for limit in limits.limits() if limit.key == new.key]
    if given.add and known:
        new = replace(new, evidence=(*known[0].evidence, *new.evidence))
    limits.store(new)
    print(f"\ntiles.json: {name}, {itemsize} bytes, {kib} KiB: {chosen} {given.unit}")


if __name__ == "__main__":
    main(sys.argv[1:])
