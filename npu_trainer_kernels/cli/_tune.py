"""Times every op's backends and plain PyTorch at your model's shapes on this device, and stores the winners: from then
on the fastest backend serves each op, and a model runs its own code where that is faster (unless the op is requested by
name).

A result applies only to the sizes that were measured: to models of this hidden size, vocabulary and so on, in this
dtype, and to calls with an eighth of --tokens up to --tokens, both of which are timed. Results of several models and of
several values of --tokens are kept.

A backend with a wrong result never wins, and plain PyTorch never wins for the LM head, whose purpose is to save memory,
not time.

On an accelerator some tiles (`tiling.TUNABLE`) are also timed at half and twice the size of the formula, and with half
and twice the warps where there are any. A tile that does not fit, as larger ones may not on an NPU, is skipped and
listed. The tiles of the head's statistics and gradient, of rotation, of the embedding and of experts are varied only on
NPUs.

The winners are in a JSON file in your cache folder (NPU_KERNELS_CACHE, or ~/.cache/npu_trainer_kernels), by chip and by
the versions of torch, Triton and this package. After Ctrl-C the results so far are stored. NPU_KERNELS_TUNED=0 ignores
the file; delete it to discard all results.

Exit codes: 0 done, 1 a backend is wrong or failed, or nothing could be stored, 2 wrong usage, 130 stopped by Ctrl-C.
"""

import argparse
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..support.cache import CACHE_VARIABLE
from ..support.errors import one_line
from ._model import DTYPES, shapes_of
from ._model import HELP as MODEL_HELP
from .output import FINE, FOUND, STOPPED, Output, UsageError, new_table, unwritten

if TYPE_CHECKING:
    import torch

    from ..descriptions import ModelShapes, Workload
    from ..evidence.tuned import Entry, TileKey, Variation
    from ..timing import Settings, Summary

__all__ = [
    "HELP",
    "NAME",
    "add_arguments",
    "as_json",
    "candidates",
    "pairs",
    "results",
    "run",
    "tiles_of",
    "tune_op",
    "tune_tiles",
]

NAME = "tune"
HELP = "time the backends at your model's shapes on this device, and remember the winners"
# Plain PyTorch wins only if it is faster by more than this, the difference between two timings of one function.
TOLERANCE = 1.02
# The largest number of tokens that is timed, divided by the smallest.
SHARE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"{MODEL_HELP}; default: the shapes that doctor times")
    parser.add_argument("--tokens", type=int, help="most of a micro-batch (default: 4096, on a CPU 512)")
    parser.add_argument("--dtype", choices=DTYPES,
                        help="of weights and activations (default: bf16, on a CPU fp32)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="measure and print, but store nothing")


@dataclass
class Outcome:
    """The results for an op.

    Attributes:
        work: the workload that was measured.
        times: the time of each correct backend; `plain` is PyTorch.
        problems: the problems of the other backends.
        tiles: the chosen variation of each tile that was tried.
        too_large: tiles that could not be compiled or launched, with the reasons.
    """

    work: "Workload"
    times: "dict[str, Summary]" = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    tiles: "dict[TileKey, Variation]" = field(default_factory=dict)
    too_large: list[str] = field(default_factory=list)

    @property
    def entry(self) -> "Entry | None":
        """The entry for the file; None: none of our backends could be timed."""
        from ..evidence.tuned import Entry

        ours = {name: time for name, time in self.times.items() if name != "plain"}
        if not ours:
            return None
        best = min(ours, key=lambda name: ours[name].median)
        plain = self.times.get("plain")
        wins = not self.at_head and plain is not None and ours[best].median > TOLERANCE * plain.median
        return Entry(
            best, ours[best].median, None if plain is None else plain.median, wins,
            self.work.dtype, self.work.model_sizes, (self.work.tokens, self.work.tokens),
        )  # fmt: skip

    @property
    def at_head(self) -> bool:
        """Whether the op is the LM head, where plain PyTorch never wins."""
        return {"H", "V"} <= self.work.sizes.keys()


def _deciding(outcomes: list[Outcome]) -> list[Outcome]:
    """Returns the outcomes that decide: for an op in several forms those of the first, which is the op alone, even if
    it has no winner."""
    first: dict[str, str] = {}
    return [o for o in outcomes if first.setdefault(o.work.backend_op, o.work.op) == o.work.op]


def results(outcomes: list[Outcome]) -> "dict[str, list[Entry]]":
    """Returns the entries to store, by the ops of `backends`: one for a range of tokens if both ends have the same
    winner, else one for each end."""
    found: dict[str, list[Entry]] = {}
    for outcome in _deciding(outcomes):
        if outcome.entry is not None:
            found.setdefault(outcome.work.backend_op, []).append(outcome.entry)
    for op, entries in found.items():
        least, most = (pick(entries, key=lambda e: e.tokens) for pick in (min, max))
        if (least.backend, least.plain_wins) == (most.backend, most.plain_wins):
            found[op] = [replace(most, tokens=(least.tokens[0], most.tokens[1]))]
    return found


def candidates(work: "Workload", where: "torch.device") -> list[str]:
    """Returns the backends that can serve an op on a device."""
    from .. import backends, device

    kind = device.kind_of(where)
    # On a CPU the kernels of Triton and Ascend run in interpreters, for tests.
    names = ("torch",) if kind == "cpu" else ("triton", "vendor", "torch")
    return [name for name in names if backends.unavailable(name, kind, work.backend_op) is None]


def tune_op(
    work: "Workload", checked: "Workload", where: "torch.device", settings: "Settings | None" = None,
    settled: "Collection[TileKey]" = (),
) -> Outcome:  # fmt: skip
    """Checks and times an op's backends.

    Args:
        work: the workload that is timed.
        checked: a small workload of the same op, which is compared with its reference.
        where: the device.
        settings: how long each backend is timed; None: as `npu-kernels tune` does.
        settled: tiles that keep their variation, and are not tried again.
    """
    import torch

    from .. import backends
    from ..ops.launch import KernelError
    from ..timing import Settings, is_accelerator
    from ._selfcheck import check

    found = Outcome(work)
    try:
        time = _timer(work, where, settings or Settings(least=7))
    except torch.OutOfMemoryError as error:
        # The inputs may be all experts of a large model, which training distributes over several devices.
        found.problems["inputs"] = one_line(error)
        return found
    # All are timed in two rounds, and the better time counts, so that other load on the machine affects all equally.
    for name in (*candidates(work, where), "plain") * 2:
        if name in found.problems:
            continue
        try:
            # In strict mode a kernel that fails raises, and is not replaced.
            strict = backends.strict_override(name)
            problem = None if name == "plain" or name in found.times else check(checked, where, strict)
            if problem is not None:
                found.problems[name] = problem
                continue
            now = time(name)
            found.times[name] = min(now, found.times.get(name, now), key=lambda t: t.median)
        except (KernelError, ValueError, torch.OutOfMemoryError) as error:
            # The vendor's operators cover only some calls (ValueError); the logits of plain PyTorch may not fit.
            found.problems[name] = one_line(error)
    if "triton" in found.times and is_accelerator(where):
        tried = tune_tiles(found.times["triton"], lambda: time("triton"), where, settled)
        found.tiles, found.times["triton"], found.too_large = tried
    return found


def _timer(work: "Workload", where: "torch.device", settings: "Settings") -> "Callable[[str], Summary]":
    """Returns a function that times a backend, or `plain`, always on the same inputs."""
    import torch

    from .. import backends, timing

    torch.manual_seed(0)
    sets = [work.inputs(where)]
    sets += [work.inputs(where) for _ in range(timing.rotation(where, sets[0].bytes()) - 1)]

    def time(name: str) -> "Summary":
        fn = work.reference if name == "plain" else work.ours(backends.strict_override(name))
        return timing.measure(fn, sets, "both", where, settings, cold=True)[0]

    return time


def tune_tiles(
    best: "Summary", time: "Callable[[], Summary]", where: "torch.device", settled: "Collection[TileKey]" = ()
) -> "tuple[dict[TileKey, Variation], Summary, list[str]]":
    """Varies each tile that an op requests, in turn, and keeps variations that are faster beyond the spread.

    Returns the chosen variations, the op's time with them, and a line for each tile that fails.

    Args:
        best: the op's time with the formula's tiles.
        time: times the op.
        where: the device.
        settled: tiles that keep their variation, and are not tried again.
    """
    import torch

    from .. import tiling
    from ..evidence.tuned import Variation
    from ..ops.launch import KernelError

    kept: dict[TileKey, Variation] = {}
    too_large: list[str] = []
    tiling.forget_tiles()
    time()  # requests the tiles
    for name, args in sorted(tiling.asked_tiles(), key=str):
        if (name, args[:-1]) in settled:
            continue
        formula = tiling.TUNABLE[name](*args)
        tried = {str(formula)}
        chosen = Variation()
        for size, warps in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)):
            by = Variation(size, warps)
            tile = str(tiling.varied(formula, by))
            if tile in tried:
                continue
            tried.add(tile)
            tiling.try_variation(name, args, by)
            try:
                now = time()
            except (KernelError, torch.OutOfMemoryError) as error:
                too_large.append(f"{name}{args[:-1]}, {_described(by)}: {str(error).strip().partition(chr(10))[0]}")
                continue
            if best.slower_than(now):
                best, chosen = now, by
        tiling.try_variation(name, args, chosen)
        # Stored also if the formula's tile wins, to replace an earlier result.
        kept[name, args[:-1]] = chosen
    return kept, best, too_large


def tiles_of(outcomes: list[Outcome]) -> "dict[TileKey, Variation]":
    """Returns the tiles tried so far. A tile that several ops or numbers of tokens request is tried for the first."""
    return {key: by for outcome in outcomes for key, by in outcome.tiles.items()}


def pairs(shapes: "ModelShapes", tokens: int, dtype: str) -> "list[Workload]":
    """Returns every op at the largest and then at the smallest number of tokens, so that a run that is stopped has
    complete ranges. Tiles are varied at the largest; the smallest is timed with the chosen tiles."""
    from ..descriptions import of_model

    ends = dict.fromkeys((tokens, max(8, tokens // SHARE)))
    return [work for pair in zip(*(of_model(shapes, end, dtype) for end in ends), strict=True) for work in pair]


def _writable(dry_run: bool) -> None:
    """Raises `UsageError` if the results could not be stored."""
    from ..evidence import tuned

    try:
        if not dry_run:
            tuned.check_writable()
    except OSError as error:
        raise UsageError(
            f"nothing could be stored: {error}; set {CACHE_VARIABLE} to a folder that can be written, or measure "
            "without storing (--dry-run)"
        ) from error


def run(args: argparse.Namespace, output: Output) -> int:
    if args.tokens is not None and args.tokens < 8:
        raise UsageError(f"--tokens must be at least 8; got {args.tokens}")
    _writable(args.dry_run)
    shapes = None if args.model is None else shapes_of(args.model)
    import torch

    from .. import descriptions, device
    from ..timing import is_accelerator
    from ._selfcheck import TIMED

    where = torch.device(device.accelerator())
    spec = device.spec(where)
    accelerated = is_accelerator(where)
    usual, tokens = TIMED[accelerated]
    dtype = DTYPES[args.dtype or ("bf16" if accelerated else "fp32")]
    for_shapes = shapes or usual
    output.text(f"Tuning for {', '.join(f'{name} {size}' for name, size in asdict(for_shapes).items())}, {dtype}")
    works = pairs(for_shapes, args.tokens or tokens, dtype)
    left_out = [form for form in descriptions.FORM_NAMES if all(work.op != form for work in works)]
    if left_out:
        output.text(f"Left out, as the model has no such sizes: {', '.join(left_out)}")
    outcomes: list[Outcome] = []
    stopped, code = False, FOUND
    try:
        _measure(works, where, outcomes, output)
    except KeyboardInterrupt:
        stopped = True
    finally:
        # The results so far are shown and stored in any case.
        code = _finish(outcomes, left_out, spec.kind, spec.name, stopped, args.dry_run, output)
    return STOPPED if stopped else code


def _measure(works: "list[Workload]", where: "torch.device", outcomes: list[Outcome], output: Output) -> None:
    """Measures each workload, and appends to `outcomes`."""
    from ..descriptions import of_model
    from ..evidence import tuned
    from ._selfcheck import CHECKED, CHECKED_TOKENS

    checked = {work.op: work for work in of_model(CHECKED, CHECKED_TOKENS, works[0].dtype)}
    with tuned.ignored(), output.progress(len(works)) as progress:
        for work in works:
            progress.begin(f"tuning {work.op}, {work.tokens} tokens")
            outcomes.append(tune_op(work, checked[work.op], where, None, tiles_of(outcomes)))
            progress.advance()


def _finish(
    outcomes: list[Outcome], left_out: list[str], kind: str, chip: str, stopped: bool, dry_run: bool, output: Output
) -> int:
    """Shows and stores the results; returns the exit code."""
    from ..evidence import tuned

    entries = results(outcomes)
    tiles = tiles_of(outcomes)
    _show(outcomes, tiles, output)
    stored = problem = None
    if entries and not dry_run:
        try:
            stored = tuned.store(chip, entries, tiles)
        except OSError as error:
            problem = f"{unwritten(error)}, or set {CACHE_VARIABLE} to another folder, and tune again"
    if stopped:
        output.text("Stopped: the ops that are not above were not measured.", style="yellow")
    output.text(f"For {chip}: " + (f"stored in {stored}" if stored else "nothing was stored"))
    if problem is not None:
        output.text(problem, style="red")
    output.result({
        "device": {"kind": kind, "name": chip},
        "stored": None if stored is None else str(stored),
        "problem": problem,
        "stopped": stopped,
        "left_out": left_out,
        "ops": {op: [as_json(o) for o in outcomes if o.work.op == op] for op in {o.work.op: None for o in outcomes}},
        "results": {op: [entry.as_json() for entry in of_op] for op, of_op in entries.items()},
    })  # fmt: skip
    wrong = [name for o in outcomes for name in o.problems if name in ("torch", "triton")]
    return FOUND if wrong or problem is not None else FINE


def _show(outcomes: list[Outcome], tiles: "dict[TileKey, Variation]", output: Output) -> None:
    from ..evidence.tuned import Variation

    if outcomes:
        output.text("\nForward and backward, median milliseconds; * is used from now on")
        output.show(_table(outcomes))
        output.text("")
    for o in outcomes:
        for name, problem in o.problems.items():
            output.text(f"{o.work.op}, {o.work.tokens} tokens, {name}: {problem}",
                        style="red" if name != "plain" else "yellow")  # fmt: skip
    for (name, args), by in tiles.items():
        if by != Variation():
            output.text(f"{name}{args}: {_described(by)} as by formula")
    for line in (line for o in outcomes for line in o.too_large):
        output.text(f"passed over: {line}", style="dim")


def _described(by: "Variation") -> str:
    return f"{_words('size', by.size)}, {_words('warps', by.warps)}"


def _words(what: str, by: int) -> str:
    return f"{ {-1: 'half the', 0: 'the same', 1: 'twice the'}[by] } {what}"


def _winner(outcome: Outcome) -> str | None:
    entry = outcome.entry
    return None if entry is None else "plain" if entry.plain_wins else entry.backend


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the outcome for the command's JSON result."""
    return {
        "shape": outcome.work.shape,
        "tokens": outcome.work.tokens,
        "dtype": outcome.work.dtype,
        "times": {name: asdict(time) for name, time in outcome.times.items()},
        "problems": outcome.problems,
        "tiles": [{"function": f, "args": list(args), **asdict(by)} for (f, args), by in outcome.tiles.items()],
        "too_large": outcome.too_large,
        "winner": _winner(outcome),
    }


def _table(outcomes: list[Outcome]) -> Table:
    table = new_table()
    names = list(dict.fromkeys(name for o in outcomes for name in o.times))
    table.add_column("op")
    for column in ("tokens", *names):
        table.add_column(column, justify="right")
    deciding = _deciding(outcomes)
    for o in outcomes:
        marks = {_winner(o): "*"} if o in deciding else {}
        times = [f"{o.times[name].median:.3g}{marks.get(name, '')}" if name in o.times else "-" for name in names]
        table.add_row(o.work.op, str(o.work.tokens), *times)
    return table
