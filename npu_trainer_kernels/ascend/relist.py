"""Rewrites `listed.json` after running the gate again for all kernels that break a rule about waiting.

    python -m npu_trainer_kernels.ascend.relist

Entries of kernels that keep their rule are removed. A new entry has an empty reason; `listed.parse` rejects the file
until a maintainer has written one.
"""

from dataclasses import replace

from . import cases, gate
from .listed import FILE, parse, written

__all__ = ["main"]


def main() -> None:
    """Runs the command; see the module."""
    # Traffic is not a rule about waiting, and takes the longest to measure.
    rows = gate.collect_all(replace(case, run_small=None) for case in cases.cases())
    broken = [(row.op, row.kernel, row.shape, row.dtype, delay) for row in rows for delay in row.delays]
    known = parse(FILE.read_text()) if FILE.exists() else ()
    FILE.write_text(written(broken, known))
    print(f"{FILE}: {len(set(broken))} plans listed")


if __name__ == "__main__":
    main()
