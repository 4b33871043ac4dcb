"""`python -m benchmarks`: measures the rows that are missing in the results file; writes JSON, Markdown and plots.

    python -m benchmarks                         measures everything, into benchmarks/results/
    python -m benchmarks --list                  lists all rows, without measuring
    python -m benchmarks --quick --only rms_norm
    python -m benchmarks --compare old.json      measures, then compares
    python -m benchmarks --compare old.json new.json
    python -m benchmarks --evidence results.json    writes the file's figures into the package's table of ops

A new run continues an interrupted one: it measures a row of the results file again only if the row failed, or if the
package's sources (for our rows) or the peer's version (for its rows) have changed.

Exit codes: 0 fine, 1 a regression, 2 wrong usage, 3 the device was lost.
"""

import argparse
from pathlib import Path

__all__ = ["GROUPS", "ONLY", "PROGRAM", "RESULTS", "make_parser"]

PROGRAM, RESULTS = "python -m benchmarks", Path(__file__).parent / "results"
GROUPS = ("ops", "end-to-end", "scaling")
ONLY = ("rows whose path group/op/shape/dtype/provider contains this or, with a * or ? in it, ends as it says: */flag "
        "is not flag-tiled; may be repeated, any of them counts")  # fmt: skip


def make_parser(prog: str = PROGRAM, output: Path = RESULTS) -> argparse.ArgumentParser:
    """Returns the parser of the command line, for a program name and a default output folder."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the rows and who is measured, and stop")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help=ONLY)
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="the opposite of --only")
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}, in this order; default all"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, fewer steps")
    parser.add_argument("--steps", type=int, default=None,
                        help="timed training steps of a run, end to end (default 50, quick 12)")  # fmt: skip
    parser.add_argument("--variants", default=None, metavar="NAMES",
                        help="end to end, these variants in this order, as plain,flag (default: all)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=output, help=f"folder for the results (default {output})")
    parser.add_argument("--name", default=None, help="file name without ending (default <date>-<device>)")
    parser.add_argument("--resume", action="append", type=Path, default=[], metavar="FILE",
                        help="an earlier results file whose rows are taken over")  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, default=None, help="start nothing new after this time")
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE",
                        help="OLD NEW compares two files; OLD alone measures and compares with that")  # fmt: skip
    parser.add_argument("--evidence", type=Path, metavar="FILE",
                        help="put a file's figures, of benchmarks/results/, into the table of ops")  # fmt: skip
    parser.add_argument("--tables", type=Path, metavar="FILE",
                        help="write a file's training steps into the first table of docs/performance.md")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.add_argument("--device", default=None, help="cuda, npu or cpu (default: what training would use)")
    parser.add_argument("--commit", default=None, help="of the sources, where they are a copy without their history")
    return parser
