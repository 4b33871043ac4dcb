"""Checks for the tools and headers, besides packages, that triton-ascend needs to launch a kernel on an NPU.

triton-ascend asks `bisheng`, the chip's compiler, whether it supports NPUs (if not, Triton says "0 active drivers"),
compiles kernels with `bishengir-compile`, and builds a C++ launcher for each signature with the headers of Python, CANN
and torch_npu.
"""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._environment import ERROR, WARNING, Finding

__all__ = ["Need", "findings", "needs"]

_SECONDS = 30.0
_SET_ENV = (
    "run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` in this shell (where CANN is installed elsewhere: its)"
)


@dataclass(frozen=True)
class Need:
    """A tool, header or setting that the launcher needs.

    Attributes:
        name: its name.
        found: its path; None: it was not found.
        lacking: a description of the problem if it was not found.
        do: the remedy.
    """

    name: str
    found: str | None
    lacking: str
    do: str


def _compiler(environment: Mapping[str, str]) -> Need:
    install = "apt-get install g++ (or clang++ of your distribution)"
    named = environment.get("CC")
    if named is not None:
        # triton-ascend compiles C++ with CC, whatever language it is for, and takes its value as one program's name.
        found = shutil.which(named, path=environment.get("PATH"))
        return Need("C++ compiler", found, f"CC is {named!r}, which is no program on PATH",
                    f"unset CC, or let it name a C++ compiler alone; {install}")  # fmt: skip
    found = next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in ("clang++", "g++"))), None)
    return Need("C++ compiler", found, "neither clang++ nor g++ is on PATH", install)


def _python_headers() -> Need:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme has no headers; triton-ascend also uses posix_prefix instead.
    folder = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    found = str(folder) if (folder / "Python.h").is_file() else None
    return Need("Python's headers", found, f"there is no Python.h in {folder}",
                "apt-get install python3-dev (that of this Python's version)")  # fmt: skip


def _pybind11() -> Need:
    spec = importlib.util.find_spec("pybind11")
    return Need("pybind11", None if spec is None else spec.origin, "pybind11 is not installed", "pip install pybind11")


def _cann(environment: Mapping[str, str]) -> list[Need]:
    home = environment.get("ASCEND_HOME_PATH", "")
    there = bool(home) and Path(home).is_dir()
    lacking = f"there is no folder {home}" if home else "it is not set"
    needs = [Need("ASCEND_HOME_PATH", home if there else None, lacking, _SET_ENV)]
    if not there:
        return needs  # the other needs are in this folder, and have the same remedy
    install = "install CANN's toolkit (its runtime alone has no headers), and source its set_env.sh"
    folders = ("include", "include/experiment", "pkg_inc")
    runtime = next((folder for folder in folders if Path(home, folder, "runtime/runtime/rt.h").is_file()), None)
    acl = Path(home, "include/acl/acl.h").is_file()
    needs.append(Need(
        "CANN's headers", str(Path(home, runtime)) if runtime and acl else None,
        f"{home} has no {'include/acl/acl.h' if runtime else 'runtime/runtime/rt.h'}", install,
    ))  # fmt: skip
    missing = [name for name in ("libruntime.so", "libascendcl.so") if not Path(home, "lib64", name).is_file()]
    needs.append(Need(
        "CANN's libraries", None if missing else str(Path(home, "lib64")),
        f"{Path(home, 'lib64')} has no {' and no '.join(missing)}", install,
    ))  # fmt: skip
    return needs


def _tool(name: str, instead: str, environment: Mapping[str, str]) -> str | None:
    """Returns the path of a tool on PATH, or of `instead` in `TRITON_NPU_COMPILER_PATH`, as triton-ascend looks it
    up."""
    folder = environment.get("TRITON_NPU_COMPILER_PATH", "")
    return shutil.which(name, path=environment.get("PATH")) or (
        shutil.which(str(Path(folder, instead))) if folder else None
    )


def _bisheng(environment: Mapping[str, str]) -> Need:
    path = _tool("bisheng", "ccec", environment)
    if path is None:
        return Need("bisheng", None, 'it is not on PATH; Triton says "0 active drivers" then', _SET_ENV)
    mend = "install the CANN that belongs to this chip and driver, and source its set_env.sh"
    try:
        done = subprocess.run([path, "-print-targets"], capture_output=True, text=True, timeout=_SECONDS,
                              env=dict(environment))  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Need("bisheng", None, f"{path} -print-targets: {type(error).__name__}: {error}", mend)
    knows = done.returncode == 0 and "hiipu64" in done.stdout.split()
    said = f"exit code {done.returncode}" if done.returncode else "no hiipu64 among its targets"
    return Need("bisheng", path if knows else None, f"{path} -print-targets: {said}", mend)


def needs(environment: Mapping[str, str] | None = None) -> list[Need]:
    """Returns everything that the launcher needs, in the order in which it uses it."""
    environment = os.environ if environment is None else environment
    compiler = _tool("bishengir-compile", "npuc", environment)
    return [
        _pybind11(),
        _bisheng(environment),
        _compiler(environment),
        _python_headers(),
        *_cann(environment),
        Need(
            "bishengir-compile",
            compiler,
            "it is not on PATH",
            f"{_SET_ENV}; a CANN without it is too old for triton-ascend",
        ),
    ]


def findings(needs: Sequence[Need], installed: Mapping[str, str | None]) -> list[Finding]:
    """Returns a finding for each need that is not met: warnings if there is no driver, and therefore no NPU to launch
    on, else errors."""
    level = ERROR if installed.get("Ascend driver") else WARNING
    return [
        Finding(level, "launcher", f"triton-ascend launches no kernel without {need.name}: {need.lacking}", need.do)
        for need in needs
        if need.found is None
    ]
