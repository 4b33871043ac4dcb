"""Families in processes of their own, whose model files are moved, and what of theirs is lost."""

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from .kinds import KINDS, SAME_GRADIENTS
from .served import Facts, different, lost, served
from .sources import install

__all__ = ["compared", "of_families"]

Family = tuple[str, str]


def _install(kind: str) -> None:
    install(KINDS.get(kind, ()))


def of_families(kind: str, families: Iterable[Family], jobs: int) -> dict[Family, Facts]:
    """What is served of families under a kind of moves (`"none"`: as installed)."""
    chosen = list(families)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, context, _install, (kind,)) as pool:
        return dict(zip(chosen, pool.map(served, *zip(*chosen, strict=True)), strict=True))


def compared(kind: str, before: dict[Family, Facts], after: dict[Family, Facts]) -> dict[str, dict[str, Any]]:
    """What a kind of moves loses, by family: with a reason in the report, without one; and what is wrong otherwise."""
    row: dict[str, dict[str, Any]] = {"lost by name": {}, "lost in silence": {}, "wrong": {}}
    for family, facts in before.items():
        name = " ".join(family)
        if wrong := different(facts, after[family], kind in SAME_GRADIENTS):
            row["wrong"][name] = wrong
            continue
        found = lost(facts, after[family]) if "modules" in facts else {}
        for key, reasons in found.items():
            row["lost by name" if reasons else "lost in silence"].setdefault(name, {})[key] = reasons
    return row
