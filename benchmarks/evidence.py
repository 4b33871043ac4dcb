"""The evidence in the package's table of ops, from a results file: `python -m benchmarks --evidence FILE`.

What the table holds of the device that the file was measured on is replaced by the file's figures of the same rows;
rows that the file lacks keep theirs, so that a run of some ops is evidence for those. Where a backend is chosen by a
sentence, as on a device that nobody had measured, the figures take its place. No order is changed here: where the file
says that another one would be faster, nothing is written, and that is the error.

A results file is one of `python -m benchmarks`, or the prove.json of an archive that `npu-kernels prove` has made.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npu_trainer_kernels.table import FILE

from .results import Row, read

__all__ = ["write"]

_KEYS = ("form", "shape", "dtype")
# Behind the point, as the reports print them.
_DIGITS = 3


def _places(op: dict[str, Any], kind: str) -> Iterator[tuple[str, bool, dict[str, Any], str]]:
    """(our provider, whether ours is the one that is used, what holds the evidence, its key there) for a kind of
    device."""
    for choice in op["before_torch"].get(kind, ()):
        yield f"ours-{choice['backend']}", True, choice, "because"
    # Where models keep their own code, torch is our backend.
    for name, used in (("torch", True), ("keeps_plain", False)):
        if isinstance(op.get(name, {}).get(kind), dict):
            yield "ours-torch", used, op[name], kind


def _figures(op: dict[str, Any], evidence: Any) -> dict[str, Any] | None:
    """What was measured; in the place of a sentence the row that was measured on another kind of device."""
    if isinstance(evidence, dict):
        return evidence
    others = (choice["because"] for choices in op["before_torch"].values() for choice in choices)
    row = next((other for other in others if isinstance(other, dict)), None)
    return None if row is None else {key: row[key] for key in _KEYS}


def _times(rows: list[Row], figures: dict[str, Any]) -> dict[str, Row]:
    """Forward and backward, by provider, of what the figures are of."""
    form, shape, dtype = (figures[key] for key in _KEYS)
    wanted = {"group": "ops", "op": form, "shape": shape, "dtype": dtype, "mode": "both"}
    return {row["provider"]: row for row in rows if all(row.get(key) == value for key, value in wanted.items())}


def _has_both(times: dict[str, Row], ours: str, plain: str) -> bool:
    return all("ms" in times.get(provider, {}) for provider in (ours, plain))


def _median(times: dict[str, Row], provider: str, row: str) -> float:
    if "ms" not in times.get(provider, {}):
        raise ValueError(f"no time of {provider} forward and backward, {row}")
    return round(times[provider]["ms"]["median"], _DIGITS)


def _named(device: dict[str, Any]) -> str:
    """With its article, as it is spoken."""
    if device["kind"] == "cpu":
        return "a CPU"
    name = device["name"].removeprefix("NVIDIA ").removeprefix("Ascend")
    return f"{'an' if name[0] in 'AEFHILMNORSX8' else 'a'} {name}"


def write(results: Path, table: Path = FILE) -> list[str]:
    """Puts a results file's figures into the table; returns a line for each.

    Args:
        results: in `benchmarks/results/` of the repository, since the evidence names it.
        table: the file that is changed.

    Raises:
        ValueError: the file lies elsewhere, has no row of the table, has one without ours or plain PyTorch, or its
            figures contradict the table.
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
            # A sentence stays where there are not both times.
            if figures is None or not times or (is_sentence and not _has_both(times, ours, plain)):
                continue
            row = " ".join(figures[name] for name in _KEYS)
            ms, plain_ms = _median(times, ours, row), _median(times, plain, row)
            if (ms < plain_ms) != used:
                raise ValueError(
                    f"{row}: {ms:g} ms against {plain_ms:g} ms of plain PyTorch, but by the table "
                    f"{'ours' if used else 'plain PyTorch'} is faster: change the order in {table.name} first"
                )
            old, old_plain = ("a sentence",) * 2 if is_sentence else (f"{figures[n]:g}" for n in ("ms", "plain_ms"))
            said.append(f"{row}: {old} -> {ms:g} ms, plain {old_plain} -> {plain_ms:g} ms")
            # In the order of the file's other entries.
            holder[key] = {"file": f"benchmarks/results/{results.name}", **{name: figures[name] for name in _KEYS},
                           "ms": ms, "plain_ms": plain_ms, "on": on,
                           **({} if plain == "reference" else {"plain": plain})}  # fmt: skip
    if not said:
        raise ValueError(f"{results.name} has no row that the table has a measurement of, or could have, on {kind}")
    table.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return said
