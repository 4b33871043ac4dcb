"""Runs the benchmarks of ops and training steps (`benchmarks/`), with the options of their runner."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HELP", "NAME", "package", "run"]

NAME = "bench"
HELP = "time every op, and whole training steps, beside their peers"
# Results go to the working directory, not into the package, where the runner of a checkout writes.
RESULTS = Path("npu-kernels-bench")


def run(arguments: Sequence[str]) -> int:
    # This import loads torch.
    code: int = importlib.import_module(f"{package()}.cli").main(arguments, "npu-kernels bench", RESULTS)
    return code


def package() -> str:
    """Returns the name of the benchmarks' package: in a wheel a subpackage of this one, in a checkout the folder
    `benchmarks` next to it."""
    package = Path(__file__).parents[1]
    if (package / "benchmarks").is_dir():
        return "npu_trainer_kernels.benchmarks"
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    return "benchmarks"
