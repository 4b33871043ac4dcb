"""Writes `listed.json` anew, after kernels or tiles have changed.

    python -m npu_trainer_kernels.ascend.relist

asks the compiler of every case on every chip. What keeps its rule goes from the list; what is new comes with an empty
reason, which the file is refused with until somebody writes one.
"""

from dataclasses import replace

from . import listed
from .cases import cases
from .gate import collect_all

__all__ = ["main"]


def main() -> None:
    """The command; see the module."""
    # What is moved breaks another rule, and takes the longest.
    rows = collect_all(replace(case, run_small=None) for case in cases())
    broken = [(row.op, row.kernel, row.shape, row.dtype, delay) for row in rows for delay in row.delays]
    text = listed.written(broken, listed.parse(listed.FILE.read_text()))
    listed.FILE.write_text(text)
    unexplained = text.count('"why": ""')
    print(f"{listed.FILE}: {len(set(broken))} kernels and shapes; entries without a reason: {unexplained}")


if __name__ == "__main__":
    main()
