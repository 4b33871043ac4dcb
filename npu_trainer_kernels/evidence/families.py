"""What each model family gets on the versions of transformers that were tested, `families.json`.

`python -m tests.families --sets` writes the file, one version a call. Its keys:

    beside      the newest versions of other packages that the columns were made with
    worth       for each of `GAINS` a measurement: a workload's milliseconds without it and with it, and the file of it
    families    for each family its class, and what the version with the most serves: by op the number of kinds of
                modules (classes) in which it is put, if asked for by name, and the gains; `default` is false where
                the small model of its default configuration does not show that
    lacks       by tested version of transformers and family, what this version is known to serve less, with the
                reasons; null: it has no such family

The module reads the file once and does not import torch, because `npu-kernels doctor` reads it if torch is broken.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..support.foreign import is_newer

__all__ = ["FIRST", "GAINS", "PROMISES", "Family", "GainMeasured", "Served", "read_families", "untested"]

PROMISES = Path(__file__).with_name("families.json")
GAINS = {
    "padding": "padding left out",
    "prompts": "shared beginnings of rows computed once",
    "capture": "a captured body",
    "rollouts": "completions by captured steps",
}
"""What a model can get besides ops, by name and in words."""

FIRST = (
    "llama", "qwen3", "gemma3_text", "mistral", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text",
    "granitemoehybrid",
)  # fmt: skip
"""Families that people train most: those that `doctor` looks at on versions that have no column."""


@dataclass(frozen=True)
class Served:
    """What a model gets.

    Attributes:
        ops: by op, in how many kinds of modules it is put.
        gains: those of `GAINS` that it gets.
        why: by op or gain, the reasons why modules or the model do without.
    """

    ops: Mapping[str, int]
    gains: frozenset[str]
    why: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def count(self, what: str) -> int:
        """Returns in how many kinds of modules an op is put; for a gain 1 or 0."""
        return int(what in self.gains) if what in GAINS else self.ops.get(what, 0)

    def reasons(self, what: str) -> frozenset[str]:
        """Returns the reasons for what is not served of an op or a gain."""
        return self.why.get(what, frozenset())

    def knows(self, what: str) -> bool:
        """Whether it was looked at. Each gain that was looked at is there, or has reasons."""
        return what not in GAINS or what in self.gains or what in self.why

    def less_than(self, other: "Served") -> list[str]:
        """Returns the ops and gains of which the other one has more."""
        return [what for what in (*other.ops, *GAINS) if self.knows(what) and self.count(what) < other.count(what)]


@dataclass(frozen=True)
class GainMeasured:
    """A measurement of one of `GAINS`.

    Attributes:
        file: the results file, relative to the root of the repository.
        op, shape: the rows of the file.
        without, provider: the providers of the rows without the gain and with it.
        without_ms, ms: their medians.
        on: the device, with its article.
    """

    file: str
    op: str
    shape: str
    without: str
    provider: str
    without_ms: float
    ms: float
    on: str

    def __str__(self) -> str:
        return f"{self.ms:g} ms instead of {self.without_ms:g}, {self.op} {self.shape} on {self.on} ({self.file})"


@dataclass(frozen=True)
class Family:
    """A family's line.

    Attributes:
        name: the model type, with the task if it is that of images and text.
        cls: the name of the class.
        most: what the version with the most serves.
        by_version: what each version serves, or None if it has no such family.
        default: whether the small model of its default configuration shows what a version serves.
    """

    name: str
    cls: str
    most: Served
    by_version: Mapping[str, Served | None]
    default: bool

    @property
    def kind(self) -> str:
        """The model type."""
        return self.name.partition(" ")[0]

    def serving(self, what: str) -> str | None:
        """Returns the newest version that serves an op or a gain as the best one does."""
        full = [
            version for version, served in self.by_version.items()
            if served is not None and served.count(what) >= self.most.count(what)
        ]  # fmt: skip
        return max(full, key=Version, default=None)


@dataclass(frozen=True)
class Promises:
    """The whole file: the tested versions of transformers, `beside` and `worth` as there, and the families by name."""

    versions: tuple[str, ...]
    beside: Mapping[str, str]
    worth: Mapping[str, GainMeasured]
    families: Mapping[str, Family]

    def family_of(self, cls: str, kind: str) -> Family | None:
        """Returns the family of a model of transformers by the name of its class and its model type. A class that has
        no line (a classifier) belongs to the line of its model type."""
        same = [family for family in self.families.values() if family.cls == cls]
        exact = [family for family in same if family.kind == kind]
        return next(iter([*exact, *same]), self.families.get(kind))


def _served(row: Mapping[str, Any], lacking: Mapping[str, Any]) -> Served:
    """Returns what a line says, less what is lacking of it."""
    counts = {**row["ops"], **{what: of["kinds"] for what, of in lacking.items()}}
    return Served(
        {op: counts[op] for op in row["ops"] if counts[op]},
        frozenset(gain for gain in row["gains"] if counts.get(gain, 1)),
        {what: frozenset(of["why"]) for what, of in lacking.items()},
    )


def _family(name: str, row: Mapping[str, Any], lacks: Mapping[str, Mapping[str, Any]]) -> Family:
    of = {version: lacking.get(name, {}) for version, lacking in lacks.items()}
    columns = {version: None if lacking is None else _served(row, lacking) for version, lacking in of.items()}
    return Family(name, row["class"], _served(row, {}), columns, row.get("default", True))


@functools.cache
def read_families(file: Path = PROMISES) -> Promises:
    """Reads the file."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    return Promises(
        tuple(whole["lacks"]),
        whole["beside"],
        {gain: GainMeasured(**row) for gain, row in whole["worth"].items()},
        {name: _family(name, row, whole["lacks"]) for name, row in whole["families"].items()},
    )


def untested(installed: Mapping[str, str | None], names: Iterable[str] = ("transformers", "torch", "trl")) -> list[str]:
    """Returns those of the installed packages, with their versions, of which the file cannot say what they serve: a
    transformers without a column, and others that are newer than those that the columns were made with."""
    promises = read_families()
    found = []
    for name, version in ((name, installed.get(name)) for name in names):
        if name == "transformers":
            known = version is None or version in promises.versions
        else:
            known = version is None or not is_newer(version, promises.beside[name])
        if not known:
            found.append(f"{name} {version}")
    return found
