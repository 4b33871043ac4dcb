"""What a model loses by the installed versions, said before training.

The family's line of `evidence/families.json` promises ops and gains. What a user's model lacks of it may be the user's
own choice (ops, adapters, quantised weights, an activation of another kind), which is no loss. So the small model of
the family's default configuration is asked, too: only what it lacks on the installed versions for the same reason as
the user's model is lost. On a tested version the file has the answer; on others the small model is made and looked at.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import Version

from ..evidence.families import GAINS, Family, Served, read_families, untested
from ..evidence.table import TABLE
from ..patching import NpuKernels
from ..patching.classes import original_class
from ..patching.head import causal_lm
from ..patching.patch import PROBE_ERRORS
from ..support.errors import one_line
from .look import RUN, look_at_family, served_of

__all__ = ["Losses", "advice", "installed_versions", "losses_of", "lost_between", "worth_of"]

_HEADS = ("linear_cross_entropy", "linear_logprob")
_BODY = "varlen_attention"


def worth_of(what: str) -> str:
    """Returns what an op or a gain has brought where it was measured."""
    if what in GAINS:
        return str(read_families().worth[what])
    choices = [choice for order in TABLE[what].order.values() for choice in order if choice.measured is not None]
    cards = [choice for choice in choices if choice.measured is not None and "CPU" not in choice.measured.on]
    return next((choice.evidence for choice in cards or choices), "not measured")


def installed_versions() -> dict[str, str | None]:
    """Returns the installed versions of the packages that decide what is served."""
    found: dict[str, str | None] = {}
    for name in ("transformers", "torch", "trl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@dataclass(frozen=True)
class Losses:
    """What a family gets on tested versions and a model of it does not get on the installed ones.

    Attributes:
        family: the family.
        installed: the installed versions that cost it, for example `transformers 5.30.0`.
        why: by op or gain the reasons; empty: nothing is lost.
        unknown: why it cannot be said whether something is lost, or empty.
    """

    family: Family
    installed: Sequence[str]
    why: dict[str, tuple[str, ...]]
    unknown: str = ""

    def __str__(self) -> str:
        where, name = ", ".join(self.installed), self.family.name
        if self.unknown:
            return f"whether {where} costs this model ({name}) anything is not known: {self.unknown}"
        lines = [f"{where} costs this model what tested versions serve of its family, {name}:"]
        lines += [
            f"- {GAINS.get(what, what)}: {'; '.join(why)}. Measured where it is served: {worth_of(what)}."
            for what, why in self.why.items()
        ]
        return "\n".join([*lines, f"To have it back: {advice(self.family, self.why)}"])


def advice(family: Family, whats: Collection[str]) -> str:
    """Returns which version to install for ops and gains of a family."""
    promises = read_families()
    serving = {version for what in whats if (version := family.serving(what)) is not None}
    beside = ", ".join(f"{name} {version}" for name, version in promises.beside.items())
    return f"pip install transformers=={max(serving, key=Version)} (tested with {beside})"


def _family(kernels: NpuKernels) -> tuple[Family | None, bool]:
    """Returns the family of a patched model, and whether its class is the one of the family's line."""
    owner: Any = None if kernels.model is None else causal_lm(kernels.model)[1]
    # Code that is not transformers' own promises nothing.
    if owner is None or not original_class(owner).__module__.startswith("transformers.models."):
        return None, False
    name = original_class(owner).__name__
    family = read_families().family_of(name, owner.config.model_type)
    return family, family is not None and family.cls == name


def _looked_for(kernels: NpuKernels, exact: bool, generates: bool) -> set[str]:
    """Returns the ops and gains that this run could have: the same call would be given them on another version."""
    report, ops = kernels.report(), set(kernels.options[0])
    found = ops - set(report.unused) - (set() if exact else set(_HEADS))
    found |= {"padding", "prompts"} if _BODY in ops else set()
    found |= {"capture"} if report.capture is not None else set()
    return found | ({"rollouts"} if exact and generates and report.rollouts is not None else set())


def lost_between(most: Served, here: Served, own: Served, whats: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns what is lost, with the reasons.

    Args:
        most: what the table promises.
        here: what the family's small model gets on the installed versions.
        own: what the user's model gets. What is captured and generated shows while it runs: there `here` decides.
        whats: the ops and gains that are looked for.
    """
    found = {}
    for what in here.less_than(most):
        reasons, same = here.reasons(what), own.reasons(what)
        lacks = what in RUN or (own.count(what) < most.count(what) and (same & reasons or not (same or reasons)))
        if what in whats and lacks:
            found[what] = tuple(sorted(reasons)) or ("nothing of it is recognised",)
    return found


def losses_of(kernels: NpuKernels, *, generates: bool = False) -> Losses | None:
    """Returns what a patched model loses by the installed versions, or None: nothing is known to be lost.

    Args:
        kernels: what `apply_npu_kernels` returned.
        generates: whether the run generates completions with this model.
    """
    family, exact = _family(kernels)
    if family is None:
        return None
    versions, whats, own = installed_versions(), _looked_for(kernels, exact, generates), served_of(kernels)
    new = untested(versions)
    if not new:
        here = family.by_version[versions["transformers"] or ""]
        new = [f"transformers {versions['transformers']}"]
    else:
        ran = tuple(gain for gain in RUN if gain in whats and gain in family.most.gains)
        if not ran and not any(what in whats for what in own.less_than(family.most)):
            return None
        if not family.default:
            return Losses(family, new, {}, "its default configuration makes no small model that shows it")
        try:
            here = look_at_family(family.kind, family.cls, ran)
        except PROBE_ERRORS as error:
            return Losses(family, new, {}, f"its small model raises {one_line(error, 120)}")
    lost = {} if here is None else lost_between(family.most, here, own, whats)
    return Losses(family, new, lost) if lost else None
