"""Families under moved sources: `python -m tests.moves`. Prints what is lost, and is 1 where a loss has no reason.

`--json FILE` writes what is served and what is lost. `--kinds` takes some moves alone; each is made in processes of its
own. `together` makes all of those at once after which everything can be served.
"""

import argparse
import json
import sys
import time
from typing import Any

from tests import conftest  # sets what must be set before the package is imported

__all__: list[str] = []


def main() -> int:
    from tests.families.tiny import families

    from .compared import compared, of_families
    from .kinds import KINDS

    parser = argparse.ArgumentParser(prog="python -m tests.moves", description=__doc__)
    parser.add_argument("only", nargs="*", help="model types; none: all")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS), help="moves; default: each")
    parser.add_argument("--json", help="writes what was found to this file")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    chosen = [family for family in families() if not options.only or family[1] in options.only]
    if unknown := set(options.only) - {kind for _, kind in chosen}:
        parser.error(f"unknown model types: {', '.join(sorted(unknown))}")

    started, failed = time.monotonic(), 0
    before = of_families("none", chosen, options.jobs)
    table: dict[str, Any] = {}
    for kind in options.kinds:
        found = compared(kind, before, of_families(kind, chosen, options.jobs))
        table[kind] = {"families": len(chosen), **found}
        counts = ", ".join(f"{len(each)} {name}" for name, each in found.items())
        print(f"{kind}: {len(chosen)} families, {counts}; {time.monotonic() - started:.0f} s", flush=True)
        for name, each in (*found["wrong"].items(), *found["lost in silence"].items()):
            failed += 1
            print(f"    FAIL {name}: {each}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"transformers": __import__("transformers").__version__, "moves": table}, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    assert conftest.DEVICE == "cpu", "the families are compared on the CPU"
    sys.exit(main())
