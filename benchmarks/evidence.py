"""The evidence in the package's table of ops, from a results file: `python -m benchmarks --evidence FILE`.

What the table holds of the device that the file was measured on is replaced by the file's figures of the same rows;
rows that the file lacks keep theirs, so that a run of some ops is evidence for those. No order is changed here: where
the file says that another one would be faster, nothing is written, and that is the error.
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


def _measured(whole: dict[str, Any], kind: str) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """(our provider, whether ours is the one that is used, the figures) of each measurement on a kind of device."""
    for op in whole["ops"].values():
        for choice in op["before_torch"].get(kind, ()):
            if isinstance(choice["because"], dict):
                yield f"ours-{choice['backend']}", True, choice["because"]
        last = op.get("torch", {}).get(kind)
        if isinstance(last, dict):
            yield "ours-torch", True, last
        plain = op.get("keeps_plain", {}).get(kind)
        if isinstance(plain, dict):
            # Where models keep their own code, torch is our backend.
            yield "ours-torch", False, plain


def _times(rows: list[Row], figures: dict[str, Any]) -> dict[str, Row]:
    """Forward and backward, by provider, of what the figures are of."""
    form, shape, dtype = (figures[key] for key in _KEYS)
    wanted = {"group": "ops", "op": form, "shape": shape, "dtype": dtype, "mode": "both"}
    return {row["provider"]: row for row in rows if all(row.get(key) == value for key, value in wanted.items())}


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
    said = []
    for ours, used, figures in _measured(whole, meta["device"]["kind"]):
        row = " ".join(figures[key] for key in _KEYS)
        times = _times(rows, figures)
        if not times:
            continue
        ms, plain_ms = _median(times, ours, row), _median(times, "reference", row)
        if (ms < plain_ms) != used:
            raise ValueError(
                f"{row}: {ms:g} ms against {plain_ms:g} ms of plain PyTorch, but by the table "
                f"{'ours' if used else 'plain PyTorch'} is faster: change the order in {table.name} first"
            )
        said.append(f"{row}: {figures['ms']:g} -> {ms:g} ms, plain {figures['plain_ms']:g} -> {plain_ms:g} ms")
        figures.update(file=f"benchmarks/results/{results.name}", ms=ms, plain_ms=plain_ms, on=_named(meta["device"]))
    if not said:
        raise ValueError(f"{results.name} has no row that the table has a measurement of on {meta['device']['kind']}")
    table.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return said
