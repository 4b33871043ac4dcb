"""Times every op's backends beside plain PyTorch at your model's shapes on this device, and remembers the winners: from
then on the fastest backend serves each op, and an op that loses to plain PyTorch is left out of models (unless it is
asked for by name).

A backend that gives a wrong result never wins. At the LM head plain PyTorch may win only where the logits are so few
that ours, too, would hold them all at once: elsewhere it saves time with memory that a run may not have.

On an accelerator some tiles (`tiling.TUNABLE`) are tried at half and twice the size that the formula gives, with half
and twice the warps; on an NPU only at half, since the formula gives the largest that fits.

The winners are in a JSON file in your cache folder (NPU_KERNELS_CACHE, or ~/.cache/npu_trainer_kernels), by chip and by
the versions of torch, Triton and this package. NPU_KERNELS_TUNED=0 ignores it; removing it forgets it.

Exit codes: 0 done, 1 a backend is wrong or failed, 2 wrong usage.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ._model import HELP as MODEL_HELP
from ._model import shapes_of
from ._output import FINE, FOUND, Output, UsageError

if TYPE_CHECKING:
    import torch

    from ..timing import Summary
    from ..tuned import Entry, TileKey, Variation
    from ..workloads import Workload

__all__ = ["HELP", "NAME", "add_arguments", "run", "tune_op", "tune_tiles"]

NAME = "tune"
HELP = "time the backends at your model's shapes on this device, and remember the winners"
DTYPES = ("bfloat16", "float32", "float16")
# Ours is left out when it is slower by more than this: what two timings of one function differ by.
TOLERANCE = 1.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"{MODEL_HELP}; default: the shapes that doctor times")
    parser.add_argument("--tokens", type=int, help="of a micro-batch (default: 4096, on a CPU 512)")
    parser.add_argument("--dtype", choices=DTYPES,
                        help="of weights and activations (default: bfloat16, on a CPU float32)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but store nothing")


@dataclass
class Outcome:
    """What was found of an op.

    Attributes:
        work: what was measured.
        times: of each backend that is right; `plain` is PyTorch's.
        problems: what is wrong with the others, by backend.
        plain_may_win: see the module.
        tiles: those that are faster than the formula's.
    """

    work: "Workload"
    plain_may_win: bool
    times: "dict[str, Summary]" = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    tiles: "dict[TileKey, Variation]" = field(default_factory=dict)

    @property
    def entry(self) -> "Entry | None":
        """For the file; None where none of ours could be timed."""
        from ..tuned import Entry

        ours = {name: time for name, time in self.times.items() if name != "plain"}
        if not ours:
            return None
        best = min(ours, key=lambda name: ours[name].median)
        plain = self.times.get("plain")
        wins = self.plain_may_win and plain is not None and ours[best].median > TOLERANCE * plain.median
        plain_ms = None if plain is None else plain.median
        return Entry(best, ours[best].median, plain_ms, wins, self.work.shape, self.work.dtype)


def _candidates(work: "Workload", where: "torch.device") -> list[str]:
    from .. import backends

    kind = where.type if where.type in ("npu", "cuda") else "cpu"
    # On a CPU Triton's kernels and Ascend's are executed by interpreters, for tests.
    names = ("torch",) if kind == "cpu" else ("triton", "vendor", "torch")
    return [name for name in names if backends.unavailable(name, kind, work.backend_op) is None]


def _plain_may_win(work: "Workload", where: "torch.device") -> bool:
    from .. import device, tiling

    if "H" not in work.sizes or "V" not in work.sizes:
        return True
    rows = work.sizes.get("BT") or work.sizes["B"] * work.sizes["T"]
    sizes = work.sizes["V"], work.torch_dtype.itemsize
    return tiling.head_chunk(rows, *sizes, device.spec(where), work.sizes["H"]) >= rows


def tune_op(work: "Workload", checked: "Workload", where: "torch.device") -> Outcome:
    """Checks and times an op's backends.

    Args:
        work: what is timed.
        checked: the same op, small, held against its reference.
        where: the device.
    """
    import torch

    from ..ops._launch import KernelError
    from ..timing import is_accelerator
    from ._selfcheck import check

    found = Outcome(work, _plain_may_win(work, where))
    time = _timer(work, where)
    # Twice in turn, and the better of both counts: what else the machine does should hit all alike.
    for name in (*_candidates(work, where), "plain") * 2:
        if name in found.problems:
            continue
        try:
            problem = None if name == "plain" or name in found.times else check(checked, where, name)
            if problem is not None:
                found.problems[name] = problem
                continue
            now = time(name)
            found.times[name] = min(now, found.times.get(name, now), key=lambda t: t.median)
        except (KernelError, ValueError, torch.OutOfMemoryError) as error:
            # The vendor's operators cover some calls (ValueError); logits of plain PyTorch may not fit.
            found.problems[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if "triton" in found.times and is_accelerator(where):
        found.tiles, found.times["triton"] = tune_tiles(found.times["triton"], lambda: time("triton"), where)
    return found


def _timer(work: "Workload", where: "torch.device") -> "Callable[[str], Summary]":
    """Times a backend, or `plain`, always on the same inputs."""
    import torch

    from .. import timing

    torch.manual_seed(0)
    sets = [work.inputs(where)]
    sets += [work.inputs(where) for _ in range(timing.rotation(where, sets[0].bytes()) - 1)]

    def time(name: str) -> "Summary":
        fn = work.reference if name == "plain" else work.ours(name)
        return timing.measure(fn, sets, "both", where, timing.Settings(least=7), cold=True)[0]

    return time


def tune_tiles(
    best: "Summary", time: "Callable[[], Summary]", where: "torch.device"
) -> "tuple[dict[TileKey, Variation], Summary]":
    """Tries each tile that an op asks for, one after the other; keeps what is faster beyond the spread.

    Args:
        best: the op's time by the formula.
        time: times the op.
        where: the device.
    """
    from .. import device, tiling
    from ..ops._launch import KernelError
    from ..tuned import Variation

    kept: dict[TileKey, Variation] = {}
    spec = device.spec(where)
    tiling.forget_tiles()
    time()  # asks for the tiles
    for name, args in sorted(tiling.asked_tiles(), key=str):
        formula = tiling.TUNABLE[name](*args)
        tried = {str(formula)}
        chosen = Variation()
        for size, warps in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)):
            by = Variation(size, warps)
            tile = str(tiling.varied(formula, by, spec))
            if tile in tried:
                continue
            tried.add(tile)
            tiling.try_variation(name, args, by)
            try:
                now = time()
            except KernelError:  # too large for the chip
                continue
            if best.slower_than(now):
                best, chosen = now, by
        tiling.try_variation(name, args, chosen)
        # Also where it is the formula's: an earlier measurement may have said otherwise.
        kept[name, tuple(args[:-1])] = chosen
    return kept, best


def run(args: argparse.Namespace, output: Output) -> int:
    shapes = None if args.model is None else shapes_of(args.model)
    import torch

    from .. import backends, device, tuned
    from ..timing import is_accelerator
    from ..workloads import of_model
    from ._selfcheck import CHECKED, CHECKED_TOKENS, TIMED

    where = torch.device(device.accelerator())
    spec = device.spec(where)
    accelerated = is_accelerator(where)
    usual, tokens = TIMED[accelerated]
    dtype = args.dtype or ("bfloat16" if accelerated else "float32")
    try:
        works = of_model(shapes or usual, tokens if args.tokens is None else args.tokens, dtype)
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from error
    checked = {work.op: work for work in of_model(CHECKED, CHECKED_TOKENS, dtype)}
    outcomes = []
    # A kernel that fails is to be seen, not replaced.
    release = backends.require_strict()
    try:
        with tuned.ignored(), output.progress() as progress:
            task = progress.add_task("tuning", total=len(works))
            for work in works:
                progress.update(task, description=f"tuning {work.op}")
                outcomes.append(tune_op(work, checked[work.op], where))
                progress.update(task, advance=1)
    finally:
        release()
    # Of an op in two forms the first decides, also that there is no winner: it is the op alone.
    first = {outcome.work.backend_op: outcome for outcome in reversed(outcomes)}
    entries: dict[str, Entry] = {op: o.entry for op, o in first.items() if o.entry is not None}
    tiles = {key: by for o in outcomes for key, by in o.tiles.items()}
    stored = None if args.dry_run or not entries else tuned.store(spec.name, entries, tiles)
    output.show(_table(outcomes))
    for outcome in outcomes:
        for name, problem in outcome.problems.items():
            output.text(f"{outcome.work.op}, {name}: {problem}", style="red" if name != "plain" else "yellow")
    for (name, sizes), by in tiles.items():
        if by == tuned.Variation():
            continue
        output.text(f"{name}{sizes}: {_words('size', by.size)}, {_words('warps', by.warps)} as by formula")
    output.text(f"\nFor {spec.name}: " + (f"stored in {stored}" if stored else "nothing was stored"))
    output.result({
        "device": {"kind": spec.kind, "name": spec.name},
        "stored": None if stored is None else str(stored),
        "ops": {o.work.op: _as_json(o) for o in outcomes},
    })  # fmt: skip
    wrong = [name for o in outcomes for name in o.problems if name != "plain" and name in ("torch", "triton")]
    return FOUND if wrong else FINE


def _words(what: str, by: int) -> str:
    return f"{ {-1: 'half the', 0: 'the same', 1: 'twice the'}[by] } {what}"


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "shape": outcome.work.shape,
        "dtype": outcome.work.dtype,
        "times": {name: asdict(time) for name, time in outcome.times.items()},
        "problems": outcome.problems,
        "tiles": [{"function": f, "args": list(args), **asdict(by)} for (f, args), by in outcome.tiles.items()],
        "winner": None if outcome.entry is None else "plain" if outcome.entry.plain_wins else outcome.entry.backend,
    }


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="Forward and backward, median milliseconds", title_justify="left")
    names = list(dict.fromkeys(name for o in outcomes for name in o.times))
    for column in ("op", "at", *names, "from now on"):
        table.add_column(column)
    for o in outcomes:
        entry = o.entry
        verdict = "" if entry is None else "plain PyTorch" if entry.plain_wins else entry.backend
        times = [f"{o.times[name].median:.3g}" if name in o.times else "-" for name in names]
        table.add_row(o.work.op, f"{o.work.shape} {o.work.dtype}", *times, verdict)
    return table
