"""Reports which modules were replaced, by which backend, how often it ran, and which were left alone and why.

The text is short by default: a line for each op that runs, one for each thing that was left alone and would have
mattered, and the notes that apply to the trainer. `text(full=True)` names every module and every reason, and has the
evidence for the backends; `npu-kernels doctor` has this evidence for every op of the device.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..evidence.tuned import Entry
from .audit import Audited
from .patch import Attempts, Site
from .whys import Why, chosen, lines_of

__all__ = ["Declined", "LeftAlone", "Replaced", "Report"]

_IN_FULL = "report().text(full=True)"


@dataclass(frozen=True)
class Replaced:
    """A module (by its path in the model) that an op now serves, except for the calls that `measured` names."""

    module: str
    kind: str
    op: str
    backend: str
    detail: str = ""
    measured: str = ""


@dataclass(frozen=True)
class LeftAlone:
    """A module, or an op for the whole model (`module` is empty), that was not replaced. `counts`: whether the run
    would have gained by replacing it; `attempts`: the ways to serve it that have failed, where there were several."""

    module: str
    kind: str
    op: str
    reason: str
    counts: bool = True
    attempts: Attempts = ()


@dataclass(frozen=True)
class Declined:
    """Calls of replaced modules that the op did not serve, so the modules' original code ran."""

    kind: str
    op: str
    reason: str
    calls: int


_LOG_PROBS = 'torch.nn.functional.cross_entropy(rows, ids, reduction="none"), which is -log p'
_DIVERGENCE = "ops.linear_divergence of two heads"
# What is fused and has what losses take from whole logits, by the function that was given them.
_FUSED_INSTEAD = {
    "gather": [_LOG_PROBS],
    "log_softmax": [_LOG_PROBS, _DIVERGENCE],
    "softmax": [_LOG_PROBS, _DIVERGENCE],
    "logsumexp": [_LOG_PROBS, "ops.fused_linear_cross_entropy(z_loss=...)", _DIVERGENCE],
    "cross_entropy (with targets that are no ids)": [_DIVERGENCE, "ops.linear_topk_divergence"],
}
_GIVEN = "logits that were given to "


def _instead(reason: str) -> str:
    """Returns what would have been fused where a reason names a function that losses of logits begin with."""
    name, _, why = reason.removeprefix(_GIVEN).partition(" ")
    name = f"{name.rpartition('.')[2]} {why}".rstrip()
    options = _FUSED_INSTEAD.get(name, []) if reason.startswith(_GIVEN) else []
    return f"; what is fused: {', or '.join(options)}" if options else ""


def _named(names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "the model itself"
    return f"{len(names)} modules, {names[0]} ... {names[-1]}"


def _counted(kinds: list[str]) -> str:
    """Returns text like `32 LlamaMLP, LlamaForCausalLM`."""
    counts = {kind: kinds.count(kind) for kind in kinds}
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())


@dataclass(repr=False)
class Report:
    """The outcome of `apply_npu_kernels`; `str()` gives the short text, `as_dict()` the JSON form.

    Attributes:
        device: the device's name.
        sites: the replaced modules, with the counts of calls since.
        left_alone: the modules that were not replaced.
        reasons: the evidence for each op's backend.
        notes: remarks; the text omits those about ops in `unused`.
        note_ops: the op that a remark is about, where it is about one.
        unused: ops that are in the model but that its trainer does not call, each with the reason.
        gone: sentences about replaced modules that are no longer in the model.
        audits: the results of comparisons with the model's original code on batches of the run.
        capture: what captures the bodies; its string describes what was replayed.
        rollouts: what generates by captured steps; its string describes what was generated.
        plans: what plans the head's gradients (`LearnedPlan`, GRPO's `Planner`).
        beside: by name, the reports of the models that the trainer does not train (reference, teacher, reward).
    """

    device: str = ""
    sites: list[Site] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    note_ops: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    audits: list[Audited] = field(default_factory=list)
    capture: Any = None
    rollouts: Any = None
    plans: list[Any] = field(default_factory=list)
    beside: dict[str, "Report"] = field(default_factory=dict)

    @property
    def replaced(self) -> list[Replaced]:
        """The replaced modules, one by one."""
        return [
            Replaced(path, site.kind.__name__, site.op, site.served, site.detail, _described(site.measured))
            for site in self.sites
            for path in site.paths
        ]

    @property
    def used(self) -> list[Replaced]:
        """The entries of `replaced` whose ops the trainer calls."""
        return [each for each in self.replaced if each.op not in self.unused]

    @property
    def ran(self) -> dict[str, int]:
        """The number of calls that each op has served so far."""
        counts: Counter[str] = Counter()
        for site in self.sites:
            counts[site.op] += site.ran
        return dict(counts)

    @property
    def declined(self) -> list[Declined]:
        """The calls that the ops did not serve so far."""
        return [
            Declined(site.kind.__name__, site.op, reason, calls)
            for site in self.sites
            for reason, calls in site.declined.items()
        ]

    def note(self, text: str, op: str | None = None) -> None:
        """Adds a remark, once."""
        if text not in self.notes:
            self.notes.append(text)
        if op is not None:
            self.note_ops[text] = op

    def summary(self) -> str:
        """Returns in a few words which ops serve how many modules, and how many calls once there were some."""
        counts, ran = Counter(r.op for r in self.used), self.ran
        begun = any(ran.values())
        said = [f"{op} {count}" + (f" ({ran[op]} calls)" if begun else "") for op, count in counts.items()]
        return ", ".join(said) or "left as it is"

    def whys(self) -> list[Why]:
        """Returns everything that is not served, or is no longer, each attempt with its reason."""
        found: list[Why] = []
        for left in self.left_alone:
            attempts = left.attempts or (("", left.reason),)
            found += (Why(left.op, left.module, left.kind, way, reason) for way, reason in attempts)
        for site in self.sites:
            kind, path = site.kind.__name__, ", ".join(site.paths)
            found += (Why(site.op, path, kind, way, reason) for way, reason in site.attempts)
            found += (Why(site.op, path, kind, "", reason, calls) for reason, calls in site.declined.items())
            if site.off:
                found.append(Why(site.op, path, kind, "switched off", site.off))
            if site.beside:
                found.append(Why(site.op, path, kind, "of some modules", site.beside))
            found += (
                Why(site.op, path, kind, f"{low} to {high} tokens", "the modules' own code was measured to be faster")
                for low, high in (each.tokens for each in site.measured if each.plain_wins)
            )
        found += (Why(op, "", "", "by this trainer", reason) for op, reason in self.unused.items())
        found += (Why("gone", "", "", "", reason) for reason in self.gone)
        for audit in self.audits:
            found += (Why("audit", "", "", "", each) for each in (*audit.differing, audit.aside) if each)
        for name, counted in (("capture", self.capture), ("rollouts", self.rollouts)):
            reasons = {} if counted is None else counted.as_dict()["reasons"]
            found += (Why(name, "", "", "", reason, calls) for reason, calls in reasons.items())
        for plan in self.plans:
            found += (Why("plan", "", "", "", reason, calls) for reason, calls in plan.whys().items())
        found += (Why("note", "", "", "", note) for note in self.notes)
        for name, report in self.beside.items():
            found += (replace(each, model=name) for each in report.whys())
        return found

    def why(self, name: str = "") -> str:
        """Says why something is not served, or is no longer: every attempt with its reason, a line each.

        Args:
            name: an op, a module's path or class, or `"padding"`, `"capture"`, `"rollouts"`, `"plan"`, `"audit"`,
                `"note"`; empty: everything.

        Returns:
            the lines, or a sentence that says that there is nothing to say.

        Raises:
            ValueError: the report knows nothing of that name.
        """
        served = [(site.op, site.kind.__name__, site.paths) for site in self.sites]
        return lines_of(chosen(self.whys(), name, served), name)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain lists and dicts."""
        plain = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("sites", "left_alone", "audits", "capture", "rollouts", "plans", "beside")
        }
        return {
            **plain,
            "replaced": [asdict(each) for each in self.replaced],
            "left_alone": [asdict(each) for each in self.left_alone],
            "ran": self.ran,
            "declined": [asdict(each) for each in self.declined],
            "audits": [asdict(each) for each in self.audits],
            "capture": None if self.capture is None else self.capture.as_dict(),
            "rollouts": None if self.rollouts is None else self.rollouts.as_dict(),
            "beside": {name: report.as_dict() for name, report in self.beside.items()},
        }

    def text(self, *, full: bool = False, in_full: str = _IN_FULL) -> str:
        """Returns the report for people.

        Args:
            full: every module and every reason; otherwise a line for each thing that matters to this run.
            in_full: what the reader can do to get the full text, which the short text names.
        """
        lines = [f"NPU kernels on {self.device}" if self.device else "NPU kernels"]
        if full:
            lines += ["replaced:", *self._replaced_lines()] if self.replaced else ["replaced: nothing"]
            lines += ["left alone:", *self._left_lines()] if self.left_alone else []
            lines += ["not used by this trainer:", *_indented(self.unused)] if self.unused else []
            lines += ["why these backends:", *self._reason_lines()] if self.reasons else []
        else:
            runs, left = list(self._run_lines()), list(self._counting_lines())
            lines += runs or ["  nothing was replaced"]
            lines += ["left alone:", *left] if left else []
            lines += [f"(in full: {in_full})"] if self.left_alone else []
        lines += ["declined:", *self._declined_lines()] if self.declined else []
        lines += ["compared with the model's own code:", *(f"  {each}" for each in self.audits)] if self.audits else []
        lines += [str(each) for each in (self.capture, self.rollouts) if each is not None]
        for name, report in self.beside.items():
            lines += [f"{name}: {report.summary()}", *report._declined_lines()]
        shown = [note for note in self.notes if self.note_ops.get(note) not in self.unused]
        return "\n".join([*lines, *(f"note: {note}" for note in (*shown, *self.gone))])

    def __str__(self) -> str:
        return self.text()

    # Notebooks and consoles show this.
    __repr__ = __str__

    def _run_lines(self) -> Iterable[str]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for r in self.used:
            groups.setdefault((r.op, r.backend, r.measured), []).append(r.kind)
        width = max((len(op) for op, _, _ in groups), default=0)
        ran = self.ran
        begun = any(ran.values())
        for (op, backend, measured), kinds in groups.items():
            said = [f"{ran[op]} calls" if begun else "", measured]
            said += [str(site.progress) for site in self.sites if site.op == op and site.progress is not None]
            yield "; ".join([f"  {op:{width}}  {backend}: {_counted(kinds)}", *filter(None, said)])

    def _declined_lines(self) -> Iterable[str]:
        left_out = "; where padding was left out they are those of zeros" if self.ran.get("varlen_attention") else ""
        for each in self.declined:
            of_padding = left_out if each.reason.startswith("logits that were") else ""
            yield f"  {each.op}, {each.calls} calls of {each.kind}: {each.reason}{of_padding}{_instead(each.reason)}"

    def _counting_lines(self) -> Iterable[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for left in self.left_alone:
            if left.counts and left.op not in self.unused:
                groups.setdefault((left.op, left.reason), []).append(left.kind)
        for (op, reason), kinds in groups.items():
            counted = _counted(kinds)
            yield f"  {op}, {counted}: {reason}" if counted else f"  {op}: {reason}"

    def _replaced_lines(self) -> Iterable[str]:
        begun = any(site.ran for site in self.sites)
        for site in self.sites:
            calls = f"{site.ran} calls" if begun else ""
            progress = "" if site.progress is None else str(site.progress)
            said = (site.detail, _described(site.measured), calls, progress)
            detail = "; ".join(dict.fromkeys(filter(None, said)))
            yield f"  {site.op} [{site.served}]  {site.kind.__name__}: {_named(site.paths)}" + (
                f" ({detail})" if detail else ""
            )

    def _left_lines(self) -> Iterable[str]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for r in self.left_alone:
            groups.setdefault((r.op, r.kind, r.reason), []).append(r.module)
        for (op, kind, reason), names in groups.items():
            yield f"  {op}  {kind}: {_named(names)}: {reason}" if kind else f"  {op}: {reason}"

    def _reason_lines(self) -> Iterable[str]:
        groups: dict[str, list[str]] = {}
        for op, reason in self.reasons.items():
            groups.setdefault(reason, []).append(op)
        return _indented({", ".join(names): reason for reason, names in groups.items()})


def _described(entries: Iterable[Entry]) -> str:
    """Formats measurements for the report: `512 to 4096 tokens: its own code (measured)`."""

    def one(entry: Entry) -> str:
        low, high = entry.tokens
        tokens = f"{high}" if low == high else f"{low} to {high}"
        return f"{tokens} tokens: {'its own code' if entry.plain_wins else entry.backend} (measured)"

    return ", ".join(map(one, entries))


def _indented(lines: dict[str, str]) -> list[str]:
    return [f"  {name}: {text}" for name, text in lines.items()]
