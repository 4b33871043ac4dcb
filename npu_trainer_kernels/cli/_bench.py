"""Every op, and whole training steps, beside their peers: the runner of `benchmarks/`, with its own options."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HELP", "NAME", "package", "run"]

NAME = "bench"
HELP = "time every op, and whole training steps, beside their peers"
# Not into the package, where the runner of a checkout writes.
RESULTS = Path("npu-kernels-bench")


def run(arguments: Sequence[str]) -> int:
    # This import brings torch.
    code: int = importlib.import_module(f"{package()}.cli").main(arguments, "npu-kernels bench", RESULTS)
    return code


def package() -> str:
    """The runner is a part of this package in a wheel, and the folder beside it in a checkout."""
    package = Path(__file__).parents[1]
    if (package / "benchmarks").is_dir():
        return "npu_trainer_kernels.benchmarks"
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    return "benchmarks"
