"""Writes the gate's report, a page of the documentation with the compiler's results for every kernel.

The compile time is the only column that a rerun would change. It is shown in coarse steps and ignored when reports are
compared, so the file changes only with the kernels or the compiler.

    python -m npu_trainer_kernels.ascend.gate_report

rewrites `listed.json` after running the gate again for all kernels that break a rule about waiting. Entries of kernels
that keep their rule are removed. A new entry has an empty reason; `listed.parse` rejects the file until a maintainer
has written one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .cases import cases
from .gate import A3_CHIPS, GateRow, collect_all, reason
from .listed import FILE, listed, parse, written

__all__ = ["main", "not_reported", "render", "report_is_current", "write_report"]

_TIME_STEPS = ((1.0, "< 1"), (10.0, "< 10"), (60.0, "< 60"))
_COLUMNS = (
    "op",
    "kernel",
    "shape",
    "dtype",
    "chips",
    "buffer",
    "double-buffered",
    "fixed waits",
    "switches",
    "waits per row",
    "instructions",
    "traffic",
    "verdict",
    "seconds",
)
_HEADER = """# What the Ascend compiler says of every kernel

Written by the gate (`make test-ascend`) from the real compiler's output; no chip was used, and nothing here is a time
on one. Chips that differ in the number of cores alone share a plan; the gate's tests compile every kernel for both and
compare. *buffer*: KiB of a core's unified buffer used / available. *fixed waits*: waits of the next tile's loads for
the vector unit, which two buffers do not spare. *switches*: waits between the vector and the scalar unit per row or
tile of rows, as the plan shows them. *waits per row*: those of the scalar unit for the vector unit as executed, with
those inside the device library, counted in a trace. *instructions*: vector instructions per element of the rows
(rotation: for all heads of a token), and the fewest that would do where those were counted. *traffic*: bytes that the
kernel moved between HBM and the chip over the fewest possible, counted when the lowering of one core's share is
executed; the worst of the chips. *In blocks*: a row does not fit on the chip and is read twice; read once it would
leave no room for two buffers, which took 1.01 to 1.08 times the simulated cycles (1.15 with a gradient of the sum). A
row of class weights is read beside each row of logits; the fewest possible does not count it. fp16 moves what bf16
moves. *seconds*: what the compiler took, in steps (not compared). A3: all of its chips. Of the 950 every third
shape is compiled in bf16 and every sixth in fp32, by a compiler of its own; its plans are not traced.
"""


def render(rows: Iterable[GateRow]) -> str:
    """Returns the report as Markdown. Chips with the same facts share a line; lines are in the order of `rows`."""
    rows = list(rows)
    header = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "\n".join([_HEADER, *header, *_lines(rows), "", *_minima(rows), *_listed()]) + "\n"


def _lines(rows: Iterable[GateRow]) -> list[str]:
    """Returns the lines of the table."""
    lines: dict[tuple[str, ...], list[GateRow]] = {}
    for row in rows:
        lines.setdefault(_facts(row), []).append(row)
    table = []
    for (*where, buffer, buffered, fixed, switches, waits, instructions, verdict), alike in lines.items():
        chips = _chips([row.chip for row in alike])
        seconds = max(row.plan.seconds if row.plan else 0.0 for row in alike)
        slowest = next((label for limit, label in _TIME_STEPS if seconds < limit), ">= 60")
        traffic = _worst_traffic(alike)
        table.append(
            _line([*where, chips, buffer, buffered, fixed, switches, waits, instructions, traffic, verdict, slowest])
        )
    return table


def _minima(rows: Sequence[GateRow]) -> list[str]:
    """Returns the table of kernels with a minimum of instructions."""
    worst: dict[tuple[str, str], GateRow] = {}
    for row in rows:
        if row.minimum is not None and row.instructions is not None:
            known = worst.get((row.op, row.kernel))
            if known is None or (known.instructions or 0.0) < row.instructions:
                worst[row.op, row.kernel] = row
    if not worst:
        return []
    lines = [_line((op, kernel, f"{row.instructions:.1f}", f"{row.minimum.count:g}", row.minimum.formula))
             for (op, kernel), row in worst.items() if row.minimum is not None]  # fmt: skip
    return [
        "## Vector instructions per element",
        "",
        "The worst of the shapes in 16-bit dtypes, and the fewest that would do, by hand; the gate allows 10% more.",
        "",
        _line(("op", "kernel", "instructions", "fewest", "which")),
        _line(["---"] * 5),
        *lines,
        "",
    ]


def _listed() -> list[str]:
    """Returns the table of kernels that may break a rule about waiting."""
    if not listed():
        return []
    lines = []
    for entry in listed():
        dtypes, sizes = ", ".join(entry.dtypes), ", ".join(map(str, entry.sizes))
        lines.append(_line((entry.op, entry.kernel, entry.rule, dtypes, sizes, entry.why)))
    return [
        "## What need not keep a rule about waiting",
        "",
        _line(("op", "kernel", "rule", "dtypes", "sizes", "why")),
        _line(["---"] * 6),
        *lines,
    ]


def _chips(names: Iterable[str]) -> str:
    """Returns the chips' names without "Ascend"; if all chips of the A3 are there, "A3" stands for them."""
    shown = dict.fromkeys(names)
    if set(A3_CHIPS) <= set(shown):
        shown = dict.fromkeys([*(name for name in shown if name not in A3_CHIPS), "A3"])
    return ", ".join(name.removeprefix("Ascend") for name in shown)


def _facts(row: GateRow) -> tuple[str, ...]:
    verdict = "; ".join((*row.broken, *(_verdict(row, delay) for delay in row.delays))) or "passes"
    where = (row.op, row.kernel, row.shape, row.dtype)
    if row.plan is None:
        return (*where, "", "", "", "", "", "", verdict)
    used, size = row.plan.buffer_used / 1024, row.plan.buffer_size / 1024
    buffered = "yes" if row.plan.double_buffered else "no"
    waits = "" if row.waits is None else f"{row.waits:.1f}"
    instructions = "" if row.instructions is None else f"{row.instructions:.1f}"
    fewest = "" if row.minimum is None else f" / {row.minimum.count:g}"
    counted = str(row.plan.fixed_waits), str(row.plan.vector_scalar_switches), waits, instructions + fewest
    return (*where, f"{used:.1f} / {size:.0f}", buffered, *counted, verdict)


def _verdict(row: GateRow, delay: str) -> str:
    if reason(row, delay, listed()) is None:
        return delay
    return "listed: " + delay.partition(":")[0]


def _worst_traffic(rows: Iterable[GateRow]) -> str:
    found = [(row.traffic, row.in_blocks) for row in rows if row.traffic is not None]
    if not found:
        return ""
    traffic, in_blocks = max(found)
    return f"{traffic:.3f}" + (" (in blocks)" if in_blocks else "")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def write_report(rows: Iterable[GateRow], path: Path) -> None:
    """Writes `render(rows)` to `path`, unless the report there is current."""
    rows = list(rows)
    if not report_is_current(rows, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(rows))


def report_is_current(rows: Iterable[GateRow], path: Path) -> bool:
    """Whether the file is the report for `rows`, apart from compile times."""
    return path.exists() and _without_times(path.read_text()) == _without_times(render(rows))


def not_reported(rows: Iterable[GateRow], path: Path) -> list[str]:
    """Returns the lines for the rows of some cases, on all their chips, that are not in the report, apart from compile
    times."""
    reported = set(_without_times(path.read_text()).splitlines())
    return [line for line in map(_without_times, _lines(rows)) if line not in reported]


def _without_times(report: str) -> str:
    return re.sub(r" \| [^|]* \|$", " |", report, flags=re.MULTILINE)


def main() -> None:
    """Runs the command; see the module."""
    # Traffic is not a rule about waiting, and takes the longest to measure.
    rows = collect_all(replace(case, run_small=None) for case in cases())
    broken = [(row.op, row.kernel, row.shape, row.dtype, delay) for row in rows for delay in row.delays]
    known = parse(FILE.read_text()) if FILE.exists() else ()
    FILE.write_text(written(broken, known))
    print(f"{FILE}: {len(set(broken))} plans listed")


if __name__ == "__main__":
    main()
