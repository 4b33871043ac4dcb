"""The folder for files between runs: the measurements of `npu-kernels tune`, the Ascend compiler's output."""

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_dir"]

CACHE_VARIABLE = "NPU_KERNELS_CACHE"


def cache_dir() -> Path:
    """Returns `$NPU_KERNELS_CACHE`, or `npu_trainer_kernels` in the user's cache folder.

    Raises:
        RuntimeError: neither the variable nor a home folder exists.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "npu_trainer_kernels")
