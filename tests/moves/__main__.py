"""Families under moved sources: `python -m tests.moves`. Prints what is lost, and is 1 where a loss has no reason.

Each kind of moves is made in processes of its own; `together` makes all of those at once after which everything can be
served. Then files with faults are tried: what they change must not be served.
"""

import argparse
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests import conftest  # sets what must be set before the package is imported

__all__: list[str] = []

_BATCH = 40  # so many families are tried under all moves before the next ones are, and what was found is written


def main() -> int:
    from tests.families.tiny import families

    from .compared import Family, as_faulty, compared, of_families
    from .faults import FAULTS
    from .kinds import KINDS, QUICK

    parser = argparse.ArgumentParser(prog="python -m tests.moves", description=__doc__)
    parser.add_argument("only", nargs="*", help="model types; none: all")
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS, *FAULTS], help="moves and faults; default: each")
    parser.add_argument("--quick", action="store_true", help="ten families together, and each kind on one of them")
    parser.add_argument("--json", type=Path, help="writes what was found to this file")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    known = list(QUICK) if options.quick else list(families())
    chosen = [family for family in known if not options.only or family[1] in options.only]
    if unknown := set(options.only) - {kind for _, kind in chosen}:
        parser.error(f"unknown model types: {', '.join(sorted(unknown))}")

    def some(kind: str, batch: list[Family]) -> list[Family]:
        """The families of a batch that a kind is tried on."""
        if not options.quick or kind == "together":
            return batch
        return [family for i, family in enumerate(batch) if i == list(KINDS).index(kind) % len(batch)]

    kinds = [*KINDS, *FAULTS] if options.kinds is None else options.kinds
    said = ["--quick"] * options.quick + (["--kinds", *options.kinds] if options.kinds else [])
    command = " ".join(["python -m tests.moves", *options.only, *said])
    moves, faults = ([kind for kind in kinds if kind in known] for known in (KINDS, FAULTS))
    beside = {"llama"} if options.quick else set()
    started, failed, table = time.monotonic(), 0, dict[str, Any]()

    def say(kind: str, what: str, wrong: dict[str, Any]) -> None:
        nonlocal failed
        failed += len(wrong)
        print(f"{kind}: {what}; {time.monotonic() - started:.0f} s", flush=True)
        for name, each in wrong.items():
            print(f"    FAIL {name}: {each}", flush=True)
        if options.json:
            facts = {"command": command, "transformers": metadata.version("transformers"), "found": table}
            options.json.write_text(json.dumps(facts, indent=1) + "\n")

    for at in range(0, len(chosen) if moves else 0, _BATCH):
        batch = chosen[at : at + _BATCH]
        before = of_families("none", batch, options.jobs, beside)
        for kind in moves:
            found = compared(kind, before, of_families(kind, some(kind, batch), options.jobs, beside))
            row = table.setdefault(kind, {"families": 0, **{name: {} for name in found}})
            row["families"] += len(some(kind, batch))
            for name, each in found.items():
                row[name].update(each)
            counts = ", ".join(f"{len(each)} {name}" for name, each in found.items())
            say(kind, f"{len(some(kind, batch))} families, {counts}", {**found["wrong"], **found["lost in silence"]})
    files = sorted({("causal", FAULTS[kind][0]) for kind in faults})
    sound = of_families("none", files, options.jobs, own=True) if files else {}
    for kind in faults:
        table[kind] = fault = as_faulty(kind, sound["causal", FAULTS[kind][0]])
        bad = fault["served"] or not fault["reasons"] or fault["wrong"]
        say(kind, f"not served: {'; '.join(fault['reasons'])}", {kind: fault} if bad else {})
    return 1 if failed else 0


if __name__ == "__main__":
    assert conftest.DEVICE == "cpu", "the families are compared on the CPU"
    sys.exit(main())
