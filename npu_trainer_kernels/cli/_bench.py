"""Every op, and whole training steps, beside their peers: the runner of `benchmarks/`, with its own options."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["HELP", "NAME", "run"]

NAME = "bench"
HELP = "time every op, and whole training steps, beside their peers"
# Not into the package, where the runner of a checkout writes.
RESULTS = Path("npu-kernels-bench")


def run(arguments: Sequence[str]) -> int:
    # The folder benchmarks/ of the repository, by a link: this import brings torch.
    from ..benchmarks.cli import main

    return main(arguments, "npu-kernels bench", RESULTS)
