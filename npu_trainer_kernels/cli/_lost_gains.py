"""Finds what the installed versions cost model families, for `doctor`.

On a tested version of transformers the package's table has the answer (`evidence.families`). On others small models of
the families that people train most are looked at, in another process.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from ..evidence.families import FIRST, GAINS, Served, read_families, untested
from ._environment import WARNING, Finding
from ._process import ENDED, Lines, read

__all__ = ["looked_at", "lost_gains", "main"]

_WHY = 3  # reasons of one op that are shown


def looked_at(families: Sequence[str], seconds: float) -> dict[str, Served | str]:
    """Returns what families get on the installed versions, or why that is not known."""
    found: dict[str, Served | str] = {}
    command = [sys.executable, "-m", "npu_trainer_kernels.cli._lost_gains", *families]
    for line in read(command, seconds, environment=os.environ):
        if ENDED in line:
            return {**dict.fromkeys(families, str(line[ENDED])), **found}
        why = {what: frozenset(reasons) for what, reasons in line["why"].items()}
        found[line["family"]] = line["problem"] or Served(line["ops"], frozenset(line["gains"]), why)
    return found


def _named(families: Sequence[str]) -> str:
    few = ", ".join(families[:4])
    return few if len(families) <= 4 else f"{few} and {len(families) - 4} more"


def _findings(where: str, here: Mapping[str, Served | str]) -> Iterable[Finding]:
    """Yields a finding for each op and gain that families do without, and for families that cannot be looked at."""
    families = read_families().families
    lost: dict[str, dict[str, frozenset[str]]] = {}
    for name, served in here.items():
        if isinstance(served, Served):
            for what in served.less_than(families[name].most):
                lost.setdefault(what, {})[name] = served.reasons(what)
    for what, of in lost.items():
        reasons = sorted(frozenset().union(*of.values()))[:_WHY] or ["nothing of it is recognised"]
        version = families[next(iter(of))].serving(what)
        yield Finding(
            WARNING, "lost-gain",
            f"{where}: without {GAINS.get(what, what)} in {_named(list(of))}: {'; '.join(reasons)}",
            f"pip install transformers=={version}, where it is served",
        )  # fmt: skip
    failed = {name: served for name, served in here.items() if isinstance(served, str)}
    if failed:
        yield Finding(
            WARNING, "lost-gain", f"{where}: what it costs {_named(list(failed))} is not known: "
            f"{next(iter(failed.values()))}", f"pip install transformers=={read_families().versions[-1]}",
        )  # fmt: skip


def lost_gains(
    installed: Mapping[str, str | None], broken: Mapping[str, str], seconds: float, runs: bool = True
) -> list[Finding]:
    """Returns what families lose by the installed versions.

    Args:
        installed: versions by package.
        broken: the packages that cannot be imported.
        seconds: how long the other process may take.
        runs: whether it may be started.
    """
    if not installed.get("transformers") or not installed.get("torch") or {"torch", "transformers"} & {*broken}:
        return []
    new, families = untested(installed), read_families().families
    if not new:
        version = str(installed["transformers"])
        columns = {name: family.by_version[version] for name, family in families.items()}
        there = {name: served for name, served in columns.items() if served is not None}
        return list(_findings(f"transformers {version}", there))
    if not runs:
        return []
    return list(_findings(", ".join(new), looked_at(FIRST, seconds)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a line for each family, in a process that may import torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+")
    emit = Lines().write
    from ..gains import look_at_family  # imports torch and transformers
    from ..patching.patch import PROBE_ERRORS

    for name in parser.parse_args(arguments).families:
        family = read_families().families[name]
        line: dict[str, object] = {"family": name, "problem": None, "ops": {}, "gains": [], "why": {}}
        try:
            served = look_at_family(family.kind, family.cls)
        except PROBE_ERRORS as error:
            line["problem"] = f"{type(error).__name__}: {error}"
        else:
            why = {what: sorted(reasons) for what, reasons in served.why.items()}
            line |= {"ops": dict(served.ops), "gains": sorted(served.gains), "why": why}
        emit(**line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
