"""Makes the report of `npu-kernels prove` from the archive's document. No line has more than 60 columns, since phones
and issues show no more."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..evidence.table import TABLE
from ..support.summary import Summary

__all__ = ["WIDTH", "losses", "text"]

WIDTH = 60
Row = Mapping[str, Any]
MODES = ("forward", "backward", "both")
# Memory counts as larger if it is larger by more than the allocator's granularity and by more than a hundredth.
_BYTES, _SHARE = 1 << 20, 1.01
_MIB, _GIB = 1 << 20, 1 << 30
TITLES = {
    "checks": "ops against their references",
    "kernels": "kernels",
    "steps": "training steps",
    "convergence": "short trainings",
    "ranks": "two ranks",
    "table": "the table of backends",
}
_NAMES = {"reference": "eager", "ours-triton": "triton", "ours-vendor": "vendor", "ours-torch": "torch"}


# --------------------------------------------------------------------------------------------------------------- losses
def _ok(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok"


def _slower(row: Row, other: Row) -> bool:
    return Summary(**row["ms"]).slower_than(Summary(**other["ms"]))


def _times(row: Row, other: Row) -> str:
    return _factor(row["ms"]["median"], other["ms"]["median"])


def _factor(ours: float, theirs: float) -> str:
    return f"{ours:.3g} ms against {theirs:.3g} ({ours / theirs:.2f} x)"


def _larger(ours: float, theirs: float) -> bool:
    return ours > theirs + _BYTES and ours > _SHARE * theirs


def _by_case(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[tuple[str, str], Row]]:
    """Groups the kernels' rows by (op, shape, dtype), and within that by (provider, mode)."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["group"] == "ops":
            of_case = found.setdefault((row["op"], row["shape"], row["dtype"]), {})
            of_case[row["provider"], row["mode"]] = row
    return found


def _kernel_losses(found: Row) -> list[tuple[str, str]]:
    """Returns (op, line) for each case and provider that is faster there, and for each case with more memory."""
    lines = []
    for (op, shape, dtype), rows in _by_case(found["rows"]).items():
        if op not in found["choices"]:
            continue
        used, case = f"ours-{found['choices'][op]['backend']}", f"{op} {shape} {dtype}"
        for other in dict.fromkeys(provider for provider, _ in rows if provider != used):
            slower = []
            for mode in MODES:
                row, theirs = rows.get((used, mode)), rows.get((other, mode))
                if mode != "both" and row is not None and {"H", "V"} <= row["sizes"].keys():
                    continue  # providers of the head divide the work between forward and backward differently
                if row is not None and theirs is not None and _ok(row) and _ok(theirs) and _slower(row, theirs):
                    slower.append(f"{mode} {_times(row, theirs)}")
            if slower:
                lines.append((op, f"{case}, {_NAMES[used]} and {_NAMES.get(other, other)}: {', '.join(slower)}"))
        row, eager = rows.get((used, "both")), rows.get(("reference", "both"))
        if row is not None and eager is not None and _ok(row) and _ok(eager):
            ours, plain = row["extra_bytes"], eager["extra_bytes"]
            if _larger(ours, plain):
                lines.append((op, f"{case}: {_NAMES[used]} needs {ours / _MIB:.1f} MiB, eager {plain / _MIB:.1f}"))
    return lines


def _step_pairs(found: Row) -> list[tuple[Row, Row]]:
    """Returns (plain, with the kernels) for the training steps, including those of two ranks."""
    of: dict[tuple[str, str], dict[str, Row]] = {}
    for row in found["rows"]:
        if row["group"] == "end-to-end":
            of.setdefault((row["op"], row["shape"]), {})[row["provider"]] = row
    return [(rows["plain"], rows["flag"]) for rows in of.values() if {"plain", "flag"} <= rows.keys()]


def _step_losses(found: Row) -> list[str]:
    lines = []
    for plain, flag in _step_pairs(found):
        if not (_ok(plain) and _ok(flag)):
            continue
        name = f"{flag['op']} {flag['shape']}"
        if _slower(flag, plain):
            lines.append(f"a step of {name}: {_times(flag, plain)} plain")
        if _larger(flag["peak_bytes"], plain["peak_bytes"]):
            lines.append(f"a step of {name}: {flag['peak_bytes'] / _GIB:.2f} GiB, plain "
                         f"{plain['peak_bytes'] / _GIB:.2f}")  # fmt: skip
    return lines


def _tuning_losses(found: Row) -> list[tuple[str, str]]:
    """Compares with plain PyTorch at the shapes of `tune`; the table of backends shows which of ours is the fastest."""
    lines, known = [], _by_case(found["rows"])
    for op, outcomes in found["tuning"].items():
        # The first form was timed.
        form = TABLE[op].forms[0]
        for outcome in outcomes if form in found["choices"] else ():
            backend, times = found["choices"][form]["backend"], outcome["times"]
            if not {backend, "plain"} <= times.keys() or (form, outcome["shape"], outcome["dtype"]) in known:
                continue
            ours, plain = Summary(**times[backend]), Summary(**times["plain"])
            if ours.slower_than(plain):
                case = f"{form} {outcome['shape']} {outcome['dtype']}, {backend} and eager"
                lines.append((form, f"{case}: both {_factor(ours.median, plain.median)}"))
    return lines


def losses(found: Row) -> tuple[list[str], list[str]]:
    """Returns lines for the cases in which the backend in use is slower, beyond the spread, or needs more memory than
    another provider; then the same for ops that models use on this device only by request."""
    of_ops = [*_kernel_losses(found), *_tuning_losses(found)]
    unused = {op for op, choice in found["choices"].items() if choice["plain"]}
    used = [line for op, line in of_ops if op not in unused]
    return [*_step_losses(found), *used], [line for op, line in of_ops if op in unused]


# ----------------------------------------------------------------------------------------------------------------- text
def _item(line: str) -> str:
    return textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _paragraph(line: str) -> str:
    return textwrap.fill(line, WIDTH, break_on_hyphens=False)


def _columns(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Aligns the first column to the left, and the others to the right."""
    return [
        "".join(f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _place(item: Row) -> str:
    """Returns the names of an item's part and of the item; the part that finds the device has one of the same name."""
    return ", ".join(dict.fromkeys((item["part"], item["item"])))


def _head(found: Row) -> list[str]:
    device, packages = found["meta"]["device"], found["environment"].get("versions", {})
    # A checkout that is not installed has no version.
    sources = found["meta"].get("sources")
    facts = [device["kind"]]
    facts += [f"{device['memory_bytes'] / _GIB:.1f} GiB"] if device["memory_bytes"] else []
    facts += [f"{found['meta']['devices']} of them"] if found["meta"]["devices"] > 1 else []
    return [
        f"# {found['meta']['command']}", "",
        _paragraph(f"{device['name']} ({', '.join(facts)}); {found['written'][:10]}"), "",
        *(_item(f"{name} {version}") for name, version in packages.items() if version),
        *([_item(f"this package's sources {sources}")] if sources else []),
    ]  # fmt: skip


def _coverage(found: Row) -> list[str]:
    lines = ["## How far it came", ""]
    for part, state in found["parts"].items():
        left, absent = len(state["left"]), sum(item["part"] == part for item in found["absent"])
        said = [f"{state['done'] - absent} done" if state["begun"] else "not begun"]
        said += [f"{absent} not possible here"] if absent else []
        said += [f"{left} left for another run"] if left else []
        lines.append(_item(f"{TITLES[part]}: {', '.join(said)}"))
    return lines


def _list(title: str, items: Sequence[str], none: str) -> list[str]:
    return [f"## {title}", "", *([_item(item) for item in items] if items else [_paragraph(none)])]


def _findings(found: Row) -> list[str]:
    findings = found["environment"].get("findings", [])
    return [_item(f"{f['level']}: {f['what']} -> {f['do']}") for f in findings]


def _checks(found: Row) -> list[str]:
    by_op: dict[tuple[str, str], list[str]] = {}
    for check in found["checks"]:
        by_op.setdefault((check["backend"], check["op"]), []).append(
            {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[check["dtype"]]
            + {"ok": "", "wrong": " WRONG", "failed": " FAILED", "absent": " not covered"}[check["status"]]
        )
    # Ops with the same outcome share a paragraph.
    ops: dict[tuple[str, str], list[str]] = {}
    for (backend, op), said in by_op.items():
        ops.setdefault((backend, ", ".join(said)), []).append(op)
    lines = [_item(f"{backend}, {said}: {', '.join(names)}") for (backend, said), names in ops.items()]
    return ["## Ops against their references", "", *lines] if lines else []


def _median(row: Row | None) -> str:
    return f"{row['ms']['median']:.3g}" if row is not None and _ok(row) else "-"


def _kernels(found: Row) -> list[str]:
    cases = _by_case(found["rows"])
    if not cases:
        return []
    lines = ["## Kernels", "",
             _paragraph("Median milliseconds, and MiB beyond inputs and results; * is what is used here. Every call "
                        "is warm; on an accelerator its inputs are not in the cache. The LM head may form its "
                        "gradient in forward: there both counts.")]  # fmt: skip
    for (op, shape, dtype), rows in cases.items():
        used = found["choices"].get(op, {}).get("backend")
        cells: list[tuple[str, ...]] = [("", "forward", "backward", "both", "MiB", "")]
        notes = []
        for provider in dict.fromkeys(provider for provider, _ in rows):
            name = _NAMES.get(provider, provider)
            if name not in ("triton", "vendor", "torch", "eager"):
                continue  # the provider "floor"
            first = rows[provider, "both"]
            if not _ok(first):
                if first["status"] != "absent":
                    notes.append(f"{name}: {first['reason']}")
                continue
            times = [_median(rows.get((provider, mode))) for mode in MODES]
            verdict = "" if first["verdict"] in ("ok", "unchecked") else first["verdict"].upper()
            mark = "*" if name == used and provider != "reference" else ""
            cells.append((name + mark, *times, f"{first['extra_bytes'] / _MIB:.1f}", verdict))
        lines += ["", *textwrap.wrap(f"{op} {shape} {dtype}", WIDTH), "```",
                  *_columns(cells, (9, 10, 10, 10, 9, 11)), "```", *map(_item, notes)]  # fmt: skip
    return lines


def _steps(found: Row) -> list[str]:
    pairs = _step_pairs(found)
    if not pairs:
        return []
    lines = ["## Training steps", ""]
    for plain, flag in pairs:
        lines.append(_item(f"{flag['op']} {flag['shape']} {flag['dtype']}"))
        for name, row in (("plain", plain), ("kernels", flag)):
            if not _ok(row):
                lines.append(textwrap.fill(f"{name}: {row.get('reason', row['status'])}", WIDTH,
                                           initial_indent="  ", subsequent_indent="    "))  # fmt: skip
                continue
            peak = f"{row['peak_bytes'] / _GIB:6.2f} GiB" if row["peak_bytes"] else "  memory not measured"
            lines.append(f"  {name:<8}{row['ms']['median']:10.1f} ms {peak}  loss {row['losses'][0]:.5g}")
    return lines


def _floors(check: Row) -> float:
    """Returns a check's distance in noise floors: infinity for null, since JSON has no infinity."""
    return float("inf") if check["noise_floors"] is None else float(check["noise_floors"])


def _convergence(found: Row) -> list[str]:
    if not found["convergence"]:
        return []
    lines = ["## Short trainings, with and without the kernels", "",
             _paragraph("The largest distance between the two. A noise floor is how far runs without the kernels are "
                        "apart when their sums are added up in another order."), ""]  # fmt: skip
    for case in found["convergence"]:
        if case["checks"]:
            worst = max(case["checks"], key=lambda check: _floors(check) / check["allowed"])
            curve = case["losses"]["with"]
            floors = f"{_floors(worst):.2g}"
            # GRPO's loss does not change as long as the policy is the one that generated the completions.
            moved = f"; loss {curve[0]:.4g} to {curve[-1]:.4g}" if f"{curve[0]:.4g}" != f"{curve[-1]:.4g}" else ""
            said = f"{floors} noise floors of {worst['allowed']:g} allowed ({worst['name']}){moved}"
        else:
            said = case["reason"] or case["status"]
        lines.append(_item(f"{case['case']}: {'NOT the same, ' if case['status'] == 'wrong' else ''}{said}"))
    return lines


def _table(found: Row) -> list[str]:
    machines = found["tuned"]["machines"].values()
    entries = [(op, entry) for machine in machines for op, of_op in machine["ops"].items() for entry in of_op]
    if not entries:
        return []
    lines = ["## The table that `npu-kernels tune` would write", ""]
    for op, entry in entries:
        low, high = entry["tokens"]
        sizes = " ".join(f"{name}={size}" for name, size in entry["sizes"].items())
        winner = "the model's own code" if entry["plain_wins"] else entry["backend"]
        plain = "not measured" if entry["plain_ms"] is None else f"{entry['plain_ms']:.3g}"
        tokens = f"{low}" if low == high else f"{low} to {high}"
        lines.append(_item(f"{op}: {winner} ({entry['backend']} {entry['ms']:.3g} ms, eager {plain}; "
                           f"{tokens} tokens, {sizes} {entry['dtype']})"))  # fmt: skip
    return lines


def text(found: Row) -> str:
    """Returns the report."""
    failures = [f"{_place(f)}: {f['status']}: {f['reason']}" for f in found["failures"]]
    absent = [f"{_place(a)}: {a['reason']}" for a in found["absent"]
              if a["part"] not in ("checks", "kernels")]  # fmt: skip
    nothing = not (_by_case(found["rows"]) or _step_pairs(found) or found["tuning"])
    lost, unused = losses(found)
    sections = [
        _head(found),
        _coverage(found),
        ["## Found in the installation", "", *_findings(found)] if _findings(found) else [],
        _list("Wrong or failed", failures, "Nothing, of what was done."),
        _list("Where we lose", lost,
              "Nothing was measured." if nothing else "Nowhere, of what was measured."),
        _list("Where we would lose, and are not used", unused, "") if unused else [],
        _list("Left out", absent, "") if absent else [],
        _checks(found),
        _kernels(found),
        _steps(found),
        _convergence(found),
        _table(found),
    ]  # fmt: skip
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"
