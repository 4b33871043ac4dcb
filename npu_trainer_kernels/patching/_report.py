"""What was replaced, by what, and what was left alone and why."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["LeftAlone", "Replaced", "Report"]


@dataclass(frozen=True)
class Replaced:
    """A module (by its path in the model) whose work an op now does."""

    module: str
    kind: str
    op: str
    backend: str
    detail: str = ""


@dataclass(frozen=True)
class LeftAlone:
    """A module, or an op for the whole model (`module` empty), that stays as it was."""

    module: str
    kind: str
    op: str
    reason: str


def _count(names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "the model itself"
    return f"{len(names)} modules, {names[0]} ... {names[-1]}"


@dataclass
class Report:
    """The outcome of `apply_npu_kernels`; `str()` gives the text, `as_dict()` the JSON form."""

    device: str = ""
    replaced: list[Replaced] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def summary(self) -> str:
        """In a few words, which ops serve how many modules."""
        counts = Counter(r.op for r in self.replaced)
        return ", ".join(f"{op} {count}" for op, count in counts.items()) or "left as it is"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts."""
        return asdict(self)

    def _replaced_lines(self) -> Iterable[str]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for r in self.replaced:
            groups.setdefault((r.op, r.backend, r.kind, r.detail), []).append(r.module)
        for (op, backend, kind, detail), names in groups.items():
            yield f"  {op} [{backend}]  {kind}: {_count(names)}" + (f" ({detail})" if detail else "")

    def _left_lines(self) -> Iterable[str]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for r in self.left_alone:
            groups.setdefault((r.op, r.kind, r.reason), []).append(r.module)
        for (op, kind, reason), names in groups.items():
            yield f"  {op}  {kind}: {_count(names)}: {reason}" if kind else f"  {op}: {reason}"

    def _reason_lines(self) -> Iterable[str]:
        groups: dict[str, list[str]] = {}
        for op, reason in self.reasons.items():
            groups.setdefault(reason, []).append(op)
        for reason, names in groups.items():
            yield f"  {', '.join(names)}: {reason}"

    def __str__(self) -> str:
        lines = [f"NPU kernels on {self.device}"]
        lines += ["replaced:", *self._replaced_lines()] if self.replaced else ["replaced: nothing"]
        if self.left_alone:
            lines += ["left alone:", *self._left_lines()]
        if self.reasons:
            lines += ["why these backends:", *self._reason_lines()]
        return "\n".join(lines + [f"note: {text}" for text in self.notes])
