"""Every family, plain and patched: `python -m tests.families`. Prints what is wrong, and is 1 where anything is.

`--write` writes docs/models.md and the overview in README.md. `--overview` runs no family, and writes both from the
lines that docs/models.md has. `--sets` compares nothing, and writes what each family gets on the installed version of
transformers into npu_trainer_kernels/evidence/families.json.
"""

import argparse
import multiprocessing
import sys
import time

from tests import conftest  # sets what must be set before the package is imported

__all__: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("only", nargs="*", help="model types; none: all")
    parser.add_argument("--write", action="store_true", help="writes the pages, also where something is wrong")
    parser.add_argument("--overview", action="store_true", help="runs nothing; writes the pages' overview anew")
    parser.add_argument("--sets", action="store_true", help="compares nothing; writes what each family gets")
    parser.add_argument("--no-steps", action="store_true", help="with --sets: not what is captured and generated")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()

    if options.overview:
        if options.only or options.write:
            parser.error("--overview runs no family: leave out --write and model types")
        from . import page as pages

        pages.write(pages.rows_of(pages.PAGE.read_text()))
        return 0

    if options.sets:
        from . import sets

        sets.write(options.only, options.jobs, not options.no_steps)
        return 0

    from .page import write
    from .sweep import one
    from .tiny import families

    started = time.monotonic()
    chosen = [family for family in families() if not options.only or family[1] in options.only]
    unknown = set(options.only) - {kind for _, kind in chosen}
    if unknown or (options.only and options.write):
        parser.error(f"unknown model types: {', '.join(sorted(unknown))}" if unknown else "--write wants all families")
    rows, failed = [], 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for family, wrong, line in pool.imap(one, chosen):
            rows.append(line)
            failed += bool(wrong)
            print(f"{'FAIL' if wrong else 'ok  '} {family[0]} {family[1]}", *wrong, sep="\n       ", flush=True)
    print(f"{len(chosen)} families, {failed} with something wrong; {time.monotonic() - started:.0f} s")
    if options.write:
        write(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    assert conftest.DEVICE == "cpu", "the families are compared on the CPU"
    sys.exit(main())
