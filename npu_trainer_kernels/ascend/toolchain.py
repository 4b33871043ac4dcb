"""Finds and runs the Ascend compiler's tools, and caches their output.

The compiler is `ascendnpu-ir` (bishengir-compile, bishengir-opt) behind `triton-ascend` (the Triton frontend). Running
its output on a CPU also needs LLVM 19: the compiler is built on LLVM 19, and other versions cannot read its output.
Triton is imported only when a tool is requested.
"""

import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from ..support.cache import cache_dir

__all__ = [
    "INSTALL_PACKAGES",
    "INSTALL_TOOLS",
    "ToolchainError",
    "ascend_compiler",
    "bishengir",
    "cached",
    "digest",
    "host_tool",
    "invoke",
    "llvm_libraries",
    "require_all",
    "stand_in_hivmc",
    "versions",
]

INSTALL_PACKAGES = "pip install '.[ascend]' (in a checkout of npu_trainer_kernels)"
INSTALL_TOOLS = "apt-get install mlir-19-tools llvm-19 libmlir-19-dev gcc"
HOST_TOOLS = ("mlir-translate-19", "opt-19", "llc-19", "llvm-extract-19", "llvm-config-19", "gcc")

_TELLING = re.compile(r"error|\[NOTE\]|assertion|unreachable|overflow|not supported|timed out", re.IGNORECASE)
_TIMEOUT_S = 600


class ToolchainError(RuntimeError):
    """A stage of the compiler failed on a kernel.

    Attributes:
        kernel: the kernel's name.
        stage: the stage that failed, for example `"plan on-chip memory"`.
        diagnostics: the lines of the tool's output that say what went wrong.
    """

    def __init__(self, kernel: str, stage: str, diagnostics: Sequence[str]) -> None:
        self.kernel, self.stage, self.diagnostics = kernel, stage, tuple(diagnostics)
        super().__init__("\n  ".join([f"{kernel}: {stage} failed", *diagnostics]))


def telling_lines(output: str, limit: int = 6) -> list[str]:
    """Returns the distinct lines of a tool's output that have a diagnosis, or the end of the output."""
    lines = [line.strip()[:300] for line in output.splitlines() if line.strip()]
    telling = dict.fromkeys(line for line in lines if _TELLING.search(line))
    return list(telling)[:limit] or lines[-limit:]


# ------------------------------------------------------------------------------------------------------------ the tools
def _missing(what: str, install: str) -> ImportError:
    # Imported here because `support.triton` imports Triton, which is not needed to find a tool.
    from ..support.triton import MissingDependencyError

    return MissingDependencyError(f"{what} is missing; install it with: {install}")


@cache
def ascend_compiler() -> ModuleType:
    """Returns `triton.backends.ascend.compiler`. Raises `MissingDependencyError` if triton-ascend is not installed."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.ascend") is None:
        raise _missing("triton-ascend (a `triton` with the ascend backend)", INSTALL_PACKAGES)
    return importlib.import_module("triton.backends.ascend.compiler")


def bishengir(tool: str, chip: str) -> Path:
    """Returns the path of `bishengir-compile` or `bishengir-opt` for a chip (the 950 has separate builds).

    Raises:
        MissingDependencyError: ascendnpu-ir is not installed, or lacks this tool.
    """
    found = importlib.util.find_spec("ascendnpuir")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder, "bin", tool + ("-a5" if chip.startswith("Ascend950") else ""))
        if path.exists():
            return path
    raise _missing(f"{tool} (ascendnpu-ir)", INSTALL_PACKAGES)


def host_tool(name: str) -> Path:
    """Returns the path of one of `HOST_TOOLS`. Raises `MissingDependencyError` with the command that installs it."""
    found = shutil.which(name)
    if found is None:
        raise _missing(name, INSTALL_TOOLS)
    return Path(found)


@cache
def llvm_libraries() -> Path:
    """Returns LLVM 19's library folder. Raises `MissingDependencyError` if MLIR's C runtime is not in it."""
    text = subprocess.run([host_tool("llvm-config-19"), "--libdir"], capture_output=True, text=True, check=True).stdout
    folder = Path(text.strip())
    if not (folder / "libmlir_c_runner_utils.so").exists():
        raise _missing("libmlir_c_runner_utils.so", INSTALL_TOOLS)
    return folder


def require_all() -> None:
    """Raises `MissingDependencyError` for the first tool that lowering, planning or executing needs and that is not
    installed."""
    ascend_compiler()
    bishengir("bishengir-compile", "")
    bishengir("bishengir-opt", "")
    for name in HOST_TOOLS:
        host_tool(name)
    llvm_libraries()


@cache
def versions() -> str:
    """Returns the versions of the compiler's two packages, which are part of every cache key."""
    ascend_compiler()
    bishengir("bishengir-compile", "")
    return " ".join(f"{name}={metadata.version(name)}" for name in ("triton-ascend", "ascendnpu-ir"))


def invoke(
    kernel: str, stage: str, command: Sequence[str | Path], *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a tool.

    Args:
        kernel: the kernel's name, for the error.
        stage: the stage that the tool is run for, for the error.
        command: the program and its arguments.
        check: whether to raise if the tool fails (else the caller reads `returncode`).
        **environment: variables that are added to the environment.

    Raises:
        ToolchainError: the tool failed (and `check`), or did not end within ten minutes.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(kernel, stage, [f"timed out after {_TIMEOUT_S} s"]) from None
    if check and done.returncode != 0:
        raise ToolchainError(kernel, stage, telling_lines(done.stderr + done.stdout))
    return done


# ------------------------------------------------------------------------------------------------------------ the cache
def digest(*parts: str) -> str:
    """Returns a hash of 32 hexadecimal digits that differs if any part differs."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cached(name: str, produce: Callable[[Path], None]) -> Path:
    """Returns the path of the cached file `name`, which has to identify the inputs of its content (see `digest`).

    If the file does not exist, `produce(path)` writes it into a temporary folder, and a rename moves it into place: two
    processes may do the same work, but no process reads an incomplete file.
    """
    path = cache_dir() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            made = Path(folder, path.name)
            produce(made)
            made.replace(path)
    return path


# `bishengir-compile` passes the planned IR to `hivmc`, Huawei's closed code generator, which is in no package. Only the
# planned IR is needed, so this script replaces `hivmc`: it prints a version and copies its input.
_HIVMC = """#!/bin/sh
if [ "$1" = --version ]; then echo "hivmc 0.1.0"; exit 0; fi
cp "$1" "$NPU_KERNELS_PLANNED_IR"
"""


def stand_in_hivmc() -> Path:
    """Returns a folder to put first on PATH: its `hivmc` copies the planned IR to `$NPU_KERNELS_PLANNED_IR`."""

    def write(path: Path) -> None:
        path.write_text(_HIVMC)
        path.chmod(0o755)

    programs = [cached(f"hivmc-{digest(_HIVMC)}/{name}", write) for name in ("hivmc", "hivmc-a5")]
    return programs[0].parent
