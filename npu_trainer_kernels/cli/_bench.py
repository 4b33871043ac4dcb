"""Runs the benchmarks of ops and training steps (`benchmarks/`), with the options of their runner."""

import errno
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from .output import FOUND, STOPPED, Output, unwritten

__all__ = ["HELP", "NAME", "package", "run"]

NAME = "bench"
HELP = "time every op, and whole training steps, beside their peers"
# Results go to the working directory, not into the package, where the runner of a checkout writes.
RESULTS = Path("npu-kernels-bench")


# The errors of a file or folder that cannot be written. Others are not about --output, and are raised.
_UNWRITTEN = frozenset((
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EEXIST,
    errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
))  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Runs the benchmarks, and returns the exit code of their runner.

    Raises:
        OSError: an error that is not about writing the results.
    """
    name = f"npu-kernels {NAME}"
    # --help and wrong options end here, before the next import loads torch.
    importlib.import_module(f"{package()}.options").make_parser(name, RESULTS).parse_args(arguments)
    runner = importlib.import_module(f"{package()}.cli")
    try:
        code: int = runner.main(arguments, name, RESULTS)
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        what = f"{unwritten(error)}, or name another folder with --output; the same command goes on from the rows " \
               "that are written"  # fmt: skip
        code = FOUND
    except KeyboardInterrupt:
        what, code = "stopped; the same command goes on from the rows that are written", STOPPED
    else:
        return code
    with Output("--json" in arguments) as output:
        output.fail(f"npu-kernels {NAME}: {what}")
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
