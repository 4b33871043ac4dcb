"""Writes the figures of a results file into the package's table of ops: `python -m benchmarks --evidence FILE`.

The file's figures replace those of the same rows and the same device in the table; rows that the file lacks keep
theirs, so a run may cover only some ops. If the table's evidence is a sentence, as for a device that was not measured
before, the figures replace it. The order of backends does not change: if the file contradicts it, nothing is written
and an error is raised.

A results file is made by `python -m benchmarks`, or is the prove.json of an archive of `npu-kernels prove`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npu_trainer_kernels.evidence.table import FILE

from .measure import verdict
from .results import Row, read

__all__ = ["write"]

_KEYS = ("form", "shape", "dtype")
# Digits after the decimal point, as in the reports.
_DIGITS = 3


def _places(op: dict[str, Any], kind: str) -> Iterator[tuple[str, bool, dict[str, Any], str]]:
    """Returns (our provider, whether it is used, the dictionary with the evidence, its key there) for each piece of
    evidence on a kind of device."""
    for choice in op["before_torch"].get(kind, ()):
        yield f"ours-{choice['backend']}", True, choice, "because"
    # If models keep their own code, our backend is torch.
    for name, used in (("torch", True), ("keeps_plain", False)):
        if isinstance(op.get(name, {}).get(kind), dict):
            yield "ours-torch", used, op[name], kind


def _figures(op: dict[str, Any], evidence: Any) -> dict[str, Any] | None:
    """Returns the evidence if it is a measurement; for a sentence, the row that was measured on another kind of
    device."""
    if isinstance(evidence, dict):
        return evidence
    others = (choice["because"] for choices in op["before_torch"].values() for choice in choices)
    row = next((other for other in others if isinstance(other, dict)), None)
    return None if row is None else {key: row[key] for key in _KEYS}


def _times(rows: list[Row], figures: dict[str, Any]) -> dict[str, Row]:
    """Returns the rows of the figures' case, by provider."""
    form, shape, dtype = (figures[key] for key in _KEYS)
    wanted = {"group": "ops", "op": form, "shape": shape, "dtype": dtype, "mode": figures.get("mode", "both")}
    return {row["provider"]: row for row in rows if all(row.get(key) == value for key, value in wanted.items())}


def _has_both(times: dict[str, Row], ours: str, plain: str) -> bool:
    return all("ms" in times.get(provider, {}) for provider in (ours, plain))


def _median(times: dict[str, Row], provider: str, row: str) -> float:
    if "ms" not in times.get(provider, {}):
        raise ValueError(f"no time of {provider}, {row}")
    return round(times[provider]["ms"]["median"], _DIGITS)


def _named(device: dict[str, Any]) -> str:
    """Returns a device's name with its article."""
    if device["kind"] == "cpu":
        return "a CPU"
    name = device["name"].removeprefix("NVIDIA ").removeprefix("Ascend")
    return f"{'an' if name[0] in 'AEFHILMNORSX8' else 'a'} {name}"


def write(results: Path, table: Path = FILE) -> list[str]:
    """Writes a results file's figures into the table; returns a line for each.

    Args:
        results: a file in `benchmarks/results/` of the repository, since the evidence names it.
        table: the file of the table.

    Raises:
        ValueError: the file is in another folder, has no row of the table, has a row without our time or that of plain
            PyTorch, has wrong numbers of ours, or its figures contradict the table.
    """
    folder = Path(__file__).parent / "results"
    if results.resolve().parent != folder:
        raise ValueError(f"evidence must be a file in benchmarks/results/ of this checkout; got {results}")
    meta, rows = read(results)
    whole = json.loads(table.read_text(encoding="utf-8"))
    kind, on = meta["device"]["kind"], _named(meta["device"])
    said = []
    for op in whole["ops"].values():
        for ours, used, holder, key in _places(op, kind):
            figures = _figures(op, holder[key])
            times = _times(rows, figures) if figures else {}
            is_sentence = holder[key] is not figures
            plain = (figures or {}).get("plain", "reference")
            # A sentence stays unless both times are there.
            if figures is None or not times or (is_sentence and not _has_both(times, ours, plain)):
                continue
            row = " ".join(figures[name] for name in _KEYS)
            ms, plain_ms = _median(times, ours, row), _median(times, plain, row)
            if verdict(times[ours].get("errors", {}), None, figures["dtype"]) == "wrong":
                raise ValueError(f"{row}: {ours} gives wrong numbers there: {times[ours]['errors']}")
            if (ms < plain_ms) != used:
                raise ValueError(
                    f"{row}: {ms:g} ms against {plain_ms:g} ms of plain PyTorch, but by the table "
                    f"{'ours' if used else 'plain PyTorch'} is faster: change the order in {table.name} first"
                )
            old, old_plain = ("a sentence",) * 2 if is_sentence else (f"{figures[n]:g}" for n in ("ms", "plain_ms"))
            said.append(f"{row}: {old} -> {ms:g} ms, plain {old_plain} -> {plain_ms:g} ms")
            # The keys are in the order of the file's other entries.
            holder[key] = {"file": f"benchmarks/results/{results.name}", **{name: figures[name] for name in _KEYS},
                           "ms": ms, "plain_ms": plain_ms, "on": on,
                           **({} if plain == "reference" else {"plain": plain}),
                           **{name: figures[name] for name in ("mode",) if name in figures}}  # fmt: skip
    if not said:
        raise ValueError(f"{results.name} has no row that the table has a measurement of, or could have, on {kind}")
    table.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return said
