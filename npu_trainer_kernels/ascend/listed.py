"""Reads and writes `listed.json`, which lists the kernels that may break a rule about waiting, with reasons.

`python -m npu_trainer_kernels.ascend.gate_report` writes the file.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

__all__ = ["FILE", "RULES", "Listed", "listed", "parse", "written"]

FILE = Path(__file__).with_name("listed.json")
RULES = ("fixed waits", "waits per row", "instructions per element")


@dataclass(frozen=True)
class Listed:
    """A rule about waiting, and the cases in which a kernel may break it.

    Attributes:
        op: the op of the gate's cases.
        kernel: the kernel's name.
        rule: one of `RULES`.
        dtypes: the dtypes of the cases.
        sizes: the sizes of the cases.
        why: the reason, for readers of the report.
    """

    op: str
    kernel: str
    rule: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    why: str

    def covers(self, op: str, kernel: str, shape: str, dtype: str, delay: str) -> bool:
        """Whether the entry allows a row of the gate to break the rule of `delay`."""
        return (
            (self.op, self.kernel, self.rule) == (op, kernel, delay.partition(":")[0])
            and dtype in self.dtypes
            and _size(shape) in self.sizes
        )

    def parts(self) -> Iterable["Listed"]:
        """Returns an entry for each dtype and size."""
        for dtype in self.dtypes:
            for size in self.sizes:
                yield replace(self, dtypes=(dtype,), sizes=(size,))

    def __str__(self) -> str:
        return f"{self.op} {self.kernel} {self.rule} {', '.join(self.dtypes)} {', '.join(map(str, self.sizes))}"


def _size(shape: str) -> int:
    """Returns the size in a case's shape: 14336 for `"4096 x 14336 (intermediate)"`."""
    return int(shape.split(" x ")[1].split(" ")[0])


def parse(text: str) -> tuple[Listed, ...]:
    """Returns the entries in the text of `listed.json`.

    Raises:
        ValueError: an entry has other fields than `Listed`, an unknown rule, no dtypes, no sizes, or no reason.
    """
    found = []
    for fields in json.loads(text):
        if set(fields) != set(Listed.__dataclass_fields__):
            raise ValueError(f"listed.json: an entry must have the fields of Listed; got {sorted(fields)}")
        entry = Listed(**{**fields, "dtypes": tuple(fields["dtypes"]), "sizes": tuple(fields["sizes"])})
        if entry.rule not in RULES:
            raise ValueError(f"listed.json: {entry}: rule must be one of {', '.join(RULES)}; got {entry.rule!r}")
        if not entry.dtypes or not entry.sizes or not entry.why:
            raise ValueError(f"listed.json: {entry}: dtypes, sizes and why must not be empty")
        found.append(entry)
    return tuple(found)


@cache
def listed() -> tuple[Listed, ...]:
    """Returns the entries of the package's `listed.json`. Raises as `parse`."""
    return parse(FILE.read_text())


def written(broken: Iterable[tuple[str, str, str, str, str]], known: Sequence[Listed]) -> str:
    """Returns the text of a `listed.json` for broken rules, with the reasons of existing entries.

    Args:
        broken: op, kernel, shape, dtype and rule of each broken rule.
        known: the existing entries.
    """
    sizes: dict[tuple[str, str, str, str, str], dict[int, None]] = {}
    for op, kernel, shape, dtype, delay in broken:
        why = next((entry.why for entry in known if entry.covers(op, kernel, shape, dtype, delay)), "")
        sizes.setdefault((op, kernel, delay.partition(":")[0], dtype, why), {})[_size(shape)] = None
    dtypes: dict[tuple[str, str, str, str, tuple[int, ...]], list[str]] = {}
    for (op, kernel, rule, dtype, why), of in sizes.items():
        dtypes.setdefault((op, kernel, rule, why, tuple(sorted(of))), []).append(dtype)
    entries = [
        {"op": op, "kernel": kernel, "rule": rule, "dtypes": names, "sizes": of, "why": why}
        for (op, kernel, rule, why, of), names in dtypes.items()
    ]
    return "[\n" + ",\n".join(" " + json.dumps(entry) for entry in entries) + "\n" * bool(entries) + "]\n"
