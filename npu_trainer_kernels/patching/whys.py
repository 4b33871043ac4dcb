"""What a report answers to `why`: all attempts to serve what is not served, or is no longer, with their reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Why", "chosen", "lines_of"]

_OTHER_NAMES = {"padding": "varlen_attention"}
_SUBJECTS = ("audit", "capture", "gone", "note", "plan", "rollouts")


@dataclass(frozen=True)
class Why:
    """One attempt to serve something, and why it failed.

    Attributes:
        what: the op, or `"audit"`, `"capture"`, `"gone"`, `"note"`, `"plan"` or `"rollouts"`.
        module, kind: the module's path and class; empty where it is about no module.
        attempt: the way that was tried, or when; empty where there is one way.
        reason: why it failed.
        calls: the number of calls (of a plan: batches) that this reason was counted for; 0 where none are counted.
        model: the name of the model of the trainer's, if it is not the one that is trained.
    """

    what: str
    module: str
    kind: str
    attempt: str
    reason: str
    calls: int = 0
    model: str = ""

    def __str__(self) -> str:
        about = self.kind + (f" ({self.module})" if self.module else "")
        counted = f"{self.calls} calls" if self.calls else ""
        said = [self.model, self.what, about, self.attempt, counted]
        return f"{', '.join(filter(None, said))}: {self.reason}"


def chosen(whys: Iterable[Why], name: str, served: Sequence[tuple[str, str, list[str]]]) -> list[Why]:
    """Returns the whys of a name, or all of them if it is empty.

    Args:
        whys: all of them.
        name: an op, a subject, a path (with all that is below it) or a class.
        served: op, class and paths of what is served, which may have no why.

    Raises:
        ValueError: neither a why nor anything served has the name.
    """
    whys, wanted = list(whys), _OTHER_NAMES.get(name, name)

    def has(what: str, kind: str, paths: Iterable[str]) -> bool:
        below = any(path == wanted or path.startswith(f"{wanted}.") for path in paths if path)
        return not wanted or wanted in (what, kind) or below

    found = [why for why in whys if has(why.what, why.kind, why.module.split(", "))]
    if not found and wanted not in _SUBJECTS and not any(has(*each) for each in served):
        known = sorted({*(why.what for why in whys), *(op for op, _, _ in served), *_OTHER_NAMES, *_SUBJECTS})
        raise ValueError(f"name must be one of {', '.join(known)}, or a module's path or class; got {name!r}")
    return found


def lines_of(whys: Sequence[Why], name: str) -> str:
    """Returns a line for each attempt; modules that differ in their path alone share one."""
    groups: dict[str, list[str]] = {}
    for why in whys:
        alike = Why(why.what, "", why.kind, why.attempt, why.reason, why.calls, why.model)
        groups.setdefault(str(alike), []).extend(why.module.split(", "))
    lines = [f"{line} [{_places(paths)}]" if any(paths) else line for line, paths in groups.items()]
    return "\n".join(lines) or f"{name or 'everything'} is served, or nothing has asked for it yet"


def _places(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths)} modules, {paths[0]} ... {paths[-1]}"
