"""Writes `listed.json` anew: asks the compiler again which kernels break a rule about waiting.

    python -m npu_trainer_kernels.ascend.relist

What keeps its rule goes; what is new comes with an empty reason, which the file is refused with until somebody writes
one.
"""

from dataclasses import replace

from . import cases, gate
from .listed import FILE, parse, written

__all__ = ["main"]


def main() -> None:
    """The command; see the module."""
    # The bytes moved break another rule, and take the longest.
    rows = gate.collect([replace(case, run_small=None) for case in cases.cases()], gate.CHIPS)
    broken = [(row.op, row.kernel, row.shape, row.dtype, delay) for row in rows for delay in row.delays]
    known = parse(FILE.read_text()) if FILE.exists() else ()
    FILE.write_text(written(broken, known))
    print(f"{FILE}: {len(set(broken))} plans listed")


if __name__ == "__main__":
    main()
