"""Families in processes of their own, whose model files are moved, and what of theirs is lost."""

import functools
import multiprocessing
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from npu_trainer_kernels.patching import PATCHES

from .faults import FAULTS
from .kinds import KINDS, SAME_GRADIENTS
from .served import Facts, different, lost, served
from .sources import install

__all__ = ["Family", "as_faulty", "compared", "of_families"]

Family = tuple[str, str]


def _install(kind: str) -> None:
    """Has a process that has just begun import moved files, or faulty ones."""
    install((FAULTS[kind][2],) if kind in FAULTS else KINDS.get(kind, ()))


def _one(beside: Collection[str], ops: tuple[str, ...], own: bool, family: Family) -> Facts:
    return served(*family, ops=ops, beside=family[1] in beside, own=own)


def of_families(
    kind: str, families: Sequence[Family], jobs: int, beside: Collection[str] = (), ops: tuple[str, ...] = PATCHES,
    own: bool = False,
) -> dict[Family, Facts]:  # fmt: skip
    """What is served of families under a kind of moves, or a fault (`"none"`: as installed); of those in `beside` also
    a captured body and rollouts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(jobs, len(families)), context, _install, (kind,)) as pool:
        each = pool.map(functools.partial(_one, tuple(beside), ops, own), families)
        return dict(zip(families, each, strict=True))


def compared(kind: str, before: dict[Family, Facts], after: dict[Family, Facts]) -> dict[str, dict[str, Any]]:
    """What a kind of moves loses, by family: with a reason in the report, without one; and what is wrong otherwise."""
    row: dict[str, dict[str, Any]] = {"lost by name": {}, "lost in silence": {}, "wrong": {}}
    for family, facts in after.items():
        name = " ".join(family)
        if wrong := different(before[family], facts, kind in SAME_GRADIENTS):
            row["wrong"][name] = wrong
            continue
        found = lost(before[family], facts) if "modules" in facts else {}
        for key, reasons in found.items():
            row["lost by name" if reasons else "lost in silence"].setdefault(name, {})[key] = reasons
    return row


def as_faulty(name: str, sound: Facts) -> dict[str, Any]:
    """What becomes of a family whose file has a fault, by what is served of it without: `served` must be empty,
    `reasons` must not, and `wrong` is what else is not as it must be."""
    kind, op, _ = FAULTS[name]
    faulty = of_families(name, [("causal", kind)], 1, ops=(op,), own=True)["causal", kind]
    if "modules" not in sound or "modules" not in faulty:
        return {"served": {}, "reasons": [], "wrong": "it does not run"}
    without = any(key.startswith(f"{op} ") for key in sound["modules"])
    wrong = "" if without else f"{op} serves nothing there without the fault either"
    wrong = wrong or ("the fault changes nothing" if sound["plain"][0] == faulty["plain"][0] else "")
    wrong = wrong or ("other results than its own" if faulty["plain"] != faulty["patched"] else "")
    reasons = [each for each in (*faulty["left"], *faulty["declined"]) if each.startswith(f"{op} ")]
    return {"served": faulty["ran"], "reasons": reasons, "wrong": wrong}
