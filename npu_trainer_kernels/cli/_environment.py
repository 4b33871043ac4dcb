"""Finds the installed versions and their conflicts, without importing the packages into this process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ..support.tested import newer_torch

__all__ = ["ERROR", "IMPORTS", "TORCH_NPU_CANN", "TRITON_ASCEND", "WARNING", "Finding", "MadeFor", "broken_imports",
           "findings", "versions"]  # fmt: skip

ERROR, WARNING = "error", "warning"

PACKAGES = (
    "npu_trainer_kernels", "torch", "torch_npu", "triton", "triton-ascend", "ascendnpu-ir", "transformers", "trl",
    "accelerate", "datasets", "peft", "numpy", "fla-core",
)  # fmt: skip

# The code that tests whether a package can be imported; for Triton it includes names that a damaged one lacks.
IMPORTS = {
    "torch": "import torch",
    "torch_npu": "import torch_npu",
    "triton": "import triton, triton.language; triton.jit, triton.language.load, triton.runtime.JITFunction",
    "transformers": "import transformers; transformers.Trainer",
    "trl": "import trl; trl.GRPOTrainer",
}
# The extras whose packages a training run may use (`npu` is one version of `npu-any`). The others are for developers.
_EXTRAS = ("cuda", "npu-any", "trl")
_IMPORT_SECONDS = 180.0
_SLOW = "it does not come back within"
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_REINSTALL_TRITON = (
    "pip uninstall -y triton triton-ascend, then install one of them again: triton-ascend on an NPU, triton elsewhere"
)


@dataclass(frozen=True)
class MadeFor:
    """The platform that a version of triton-ascend was built for.

    Attributes:
        cann: CANN's version.
        pythons: the first and the last Python for which the package index has a wheel.
    """

    cann: str
    pythons: tuple[str, str]


# Sources: triton-ascend's installation guide, and the wheels on the package index.
TRITON_ASCEND = {"3.2.0": MadeFor("8.5.0", ("3.9", "3.11"))}
# The CANN of each torch_npu, from the table in the description of its wheels, which lacks 2.13.
TORCH_NPU_CANN = {
    "2.7.1": "8.3.RC1", "2.7.1.post2": "8.5.0", "2.8.0": "8.3.RC1", "2.8.0.post2": "8.5.0", "2.9.0": "8.5.0",
    "2.10.0rc2": "8.5.0", "2.11.0rc1": "8.5.0", "2.12.0rc1": "8.5.0",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A problem that the user should know about.

    Attributes:
        level: `ERROR` (it does not work) or `WARNING` (it works, less well than it could).
        code: the kind of finding, for programs and for the documentation.
        what: a description of the problem.
        do: the remedy.
    """

    level: str
    code: str
    what: str
    do: str


# ------------------------------------------------------------------------------------------------------------- versions
def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _found_in(pattern: str, paths: Iterable[Path]) -> str | None:
    """Returns the first group of the pattern, from the first file that exists and matches."""
    for path in paths:
        if path.is_file():
            found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.IGNORECASE | re.MULTILINE)
            if found is not None:
                return found[1].strip()
    return None


def _cann(environment: Mapping[str, str]) -> str | None:
    """Returns CANN's version, from the folder that its `set_env.sh` names or from its default folders."""
    homes = [environment[name] for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if environment.get(name)]
    homes += ["/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"]
    for home in map(Path, homes):
        infos = [*sorted(home.glob("*-linux/ascend_toolkit_install.info")), home / "compiler" / "version.info"]
        version = _found_in(r"^version\s*=\s*(.+)$", infos)
        if version is not None:
            return version
    return None


def _drivers(root: Path = Path("/")) -> dict[str, str | None]:
    # NVIDIA's open kernel module prints the architecture before its version: "Kernel Module for x86_64  580.159.04".
    nvidia = r"Kernel Module(?:\s+for\s+\S+)?\s+([\d.]+)"
    return {
        "Ascend driver": _found_in(r"^version\s*=\s*(.+)$", [root / "usr/local/Ascend/driver/version.info"]),
        "NVIDIA driver": _found_in(nvidia, [root / "proc/driver/nvidia/version"]),
    }


def versions(environment: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Returns versions by name; None: not installed."""
    environment = os.environ if environment is None else environment
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    found.update({name: _installed(name) for name in PACKAGES})
    return {**found, "CANN": _cann(environment), **_drivers()}


# -------------------------------------------------------------------------------------------------------------- imports
def _import_error(code: str, environment: Mapping[str, str]) -> str | None:
    """Runs `code` in a separate Python process, and returns why it fails, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace",
            timeout=_IMPORT_SECONDS, env=dict(environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{_SLOW} {_IMPORT_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"it is killed by {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return f"it ends with exit code {done.returncode}"
    # Python prints a chain of exceptions with the first cause first.
    cause = next((line for line in lines if _EXCEPTION.match(line)), lines[-1])
    last = lines[-1] if lines[-1] != cause else ""
    return f"{cause[:400]} ({last[:400]})" if last else cause[:400]


def broken_imports(installed: Mapping[str, str | None], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the installed packages of `IMPORTS` that cannot be imported, with the reasons. Each is imported in a
    separate process, so a package that crashes or hangs only causes a finding."""
    environment = os.environ if environment is None else environment
    names = [name for name in IMPORTS if installed.get(name) or (name == "triton" and installed.get("triton-ascend"))]
    with ThreadPoolExecutor(len(names) or 1) as pool:
        errors = pool.map(lambda name: _import_error(IMPORTS[name], environment), names)
        return {name: error for name, error in zip(names, errors, strict=True) if error is not None}


# ------------------------------------------------------------------------------------------------------------- findings
def _files(name: str) -> dict[str, Path]:
    """Returns the Python files and libraries of a distribution, by their names in it."""
    files = metadata.distribution(name).files or []
    return {str(file): Path(str(file.locate())) for file in files if file.suffix in (".py", ".so")}


def _triton_findings(installed: Mapping[str, str | None], broken: Mapping[str, str]) -> list[Finding]:
    found = []
    present = [name for name in ("triton", "triton-ascend") if installed.get(name)]
    if len(present) == 2:
        shared = len(_files("triton").keys() & _files("triton-ascend").keys())
        found.append(Finding(
            ERROR, "triton-overlap",
            f"triton {installed['triton']} and triton-ascend {installed['triton-ascend']} are both installed: they own "
            f"the same folder ({shared} files of the same name), and which one's file is there is chance",
            _REINSTALL_TRITON,
        ))  # fmt: skip
    else:
        for name in present:
            missing = [file for file, path in _files(name).items() if not path.exists()]
            if missing:
                found.append(Finding(
                    ERROR, "triton-damaged",
                    f"{name} {installed[name]} lacks {len(missing)} of its files, {missing[0]} for one: another "
                    "package that owned them was removed",
                    _REINSTALL_TRITON,
                ))  # fmt: skip
    if "triton" in broken:
        found.append(Finding(ERROR, "triton-broken", f"triton cannot be imported: {broken['triton']}",
                             _REINSTALL_TRITON))  # fmt: skip
    return found


def _interpreter_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    """The interpreter of Triton before 3.7, and of triton-ascend 3.2, which is based on 3.2, uses an array of one
    element as a number, which numpy 2.4 rejects."""
    name = next((name for name in ("triton-ascend", "triton") if installed.get(name)), "")
    triton, numpy = installed.get(name), installed.get("numpy")
    if not triton or not numpy or Version(triton) >= Version("3.7") or Version(numpy) < Version("2.4"):
        return []
    return [Finding(
        WARNING, "numpy-interpreter",
        f"the interpreter of {name} {triton} (TRITON_INTERPRET=1) fails with numpy {numpy}; compiled kernels do not",
        "pip install 'numpy<2.4'" + (", or 'triton>=3.7'" if name == "triton" else ""),
    )]  # fmt: skip


def _release(version: str) -> str:
    """Returns `2.7.1` for `2.7.1.post2+cpu`."""
    return ".".join(re.split(r"[^\d.]", version)[0].split(".")[:3])


def _newer_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    newer = newer_torch(installed.get("torch") or "")
    if newer is None:
        return []
    return [Finding(
        WARNING, "torch-newer", newer,
        "nothing, if the ops below are right; npu-kernels verify --model YOUR_MODEL compares whole trainings",
    )]  # fmt: skip


def _torch_npu_findings(installed: Mapping[str, str | None], broken: Mapping[str, str]) -> list[Finding]:
    torch, torch_npu, driver = (installed.get(name) for name in ("torch", "torch_npu", "Ascend driver"))
    if driver and not torch_npu:
        return [Finding(
            WARNING, "no-torch_npu",
            f"there is an Ascend driver here ({driver}), but no torch_npu: nothing runs on the NPU",
            "pip install '.[npu]' in a checkout, which takes the CPU build of torch, or the torch_npu of your torch",
        )]  # fmt: skip
    if not torch or not torch_npu:
        return []
    found = []
    if _release(torch) != _release(torch_npu):
        found.append(Finding(
            ERROR, "torch_npu-mismatch",
            f"torch_npu {torch_npu} is made for torch {_release(torch_npu)}; torch is {torch}",
            f"pip install torch_npu of version {_release(torch)}, or torch=={_release(torch_npu)}",
        ))  # fmt: skip
    if "torch_npu" in broken:
        reason = broken["torch_npu"]
        if driver is None:
            cause, do = "; there is no Ascend driver here", "install the Ascend driver and CANN"
        elif re.search(r"\.so", reason):
            cause, do = "", "run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`, or install CANN"
        else:
            cause, do = "", "install the torch_npu that belongs to this torch and CANN"
        found.append(Finding(
            ERROR, "torch_npu-broken", f"torch_npu cannot be imported: {reason}{cause}",
            f"{do}; on a machine without an NPU: pip uninstall torch_npu (for one run: {_AUTOLOAD}=0)",
        ))  # fmt: skip
    return found


FLA_TRITON_ASCEND = "3.6.0"
"""The triton-ascend that the extra `npu` of fla-core 0.6.0 asks for."""


def _fla_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    fla, triton_ascend = installed.get("fla-core"), installed.get("triton-ascend")
    if not fla or not triton_ascend or triton_ascend == FLA_TRITON_ASCEND:
        return []
    return [Finding(
        WARNING, "fla-triton-ascend",
        f"fla-core {fla} is made for triton-ascend {FLA_TRITON_ASCEND} on an NPU; here is triton-ascend "
        f"{triton_ascend}. Its first call is compared with this package's own operators, which take over if it fails",
        "nothing; or pip uninstall fla-core, which saves the comparison",
    )]  # fmt: skip


def _is_older(version: str, than: str) -> bool:
    """Whether a version of CANN is older; False if it cannot be parsed."""
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


def _platform_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    """Checks Python and CANN, if there is an NPU or torch_npu is installed."""
    if not installed.get("Ascend driver") and not installed.get("torch_npu"):
        return []
    python, triton_ascend, torch_npu, cann = (
        installed.get(name) for name in ("python", "triton-ascend", "torch_npu", "CANN")
    )
    found = []
    if python and not triton_ascend:
        name, newest = max(TRITON_ASCEND.items(), key=lambda item: Version(item[0]))
        first, last = newest.pythons
        if not Version(first) <= Version(".".join(python.split(".")[:2])) <= Version(last):
            found.append(Finding(
                WARNING, "python",
                f"triton-ascend {name} has wheels for Python {first} to {last}, and this is Python {python}: pip finds "
                "none, and no kernel of ours runs on the NPU",
                f"make an environment with Python {last}",
            ))  # fmt: skip
    wanted = {
        f"triton-ascend {triton_ascend}": TRITON_ASCEND[triton_ascend].cann if triton_ascend in TRITON_ASCEND else None,
        f"torch_npu {torch_npu}": TORCH_NPU_CANN.get(torch_npu or ""),
    }
    for who, version in wanted.items():
        if cann and version and _is_older(cann, version):
            found.append(Finding(WARNING, "cann", f"{who} is made for CANN {version}; here is CANN {cann}",
                                 f"install CANN {version} or later, and source its set_env.sh"))  # fmt: skip
    return found


def _import_findings(broken: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in ("torch", "transformers", "trl"):
        if name not in broken:
            continue
        do = f"pip install --force-reinstall {name}"
        if broken[name].startswith(_SLOW):
            do = f"python -X importtime -c 'import {name}' shows what takes so long; on a busy machine try again"
        for cause in ("torch_npu", "triton", "torch", "transformers"):
            # The first exception of both chains is the same.
            if cause != name and cause in broken and broken[cause].partition(" (")[0] in broken[name]:
                do = f"mend {cause} (above), which it imports"
                break
        found.append(Finding(ERROR, f"{name}-broken", f"{name} cannot be imported: {broken[name]}", do))
    return found


def _requirement_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    """Returns the requirements of this package that are not met."""
    try:
        required = metadata.requires("npu_trainer_kernels") or []
    except metadata.PackageNotFoundError:
        return []  # run from a checkout
    found = []
    for requirement in map(Requirement, required):
        version = installed.get(requirement.name) or _installed(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            wanted = any(requirement.marker.evaluate({"extra": extra}) for extra in _EXTRAS)
            if wanted and version and not requirement.specifier.contains(version, prereleases=True):
                bounds = f"{requirement.name}{requirement.specifier}"
                found.append(Finding(WARNING, "optional", f"{bounds} is what is served in full; {version} is installed",
                                     f"pip install '{bounds}'"))  # fmt: skip
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            have = "it is not installed" if version is None else f"{version} is installed"
            found.append(Finding(ERROR, "requirement", f"{requirement} is needed; {have}",
                                 f"pip install '{requirement}'"))  # fmt: skip
    return found


def findings(installed: Mapping[str, str | None], broken: Mapping[str, str]) -> list[Finding]:
    """Returns all findings; causes come before their effects.

    Args:
        installed: the result of `versions`.
        broken: the result of `broken_imports`.
    """
    return [
        *_requirement_findings(installed),
        *_newer_findings(installed),
        *_fla_findings(installed),
        *_torch_npu_findings(installed, broken),
        *_platform_findings(installed),
        *_triton_findings(installed, broken),
        *_interpreter_findings(installed),
        *_import_findings(broken),
    ]
