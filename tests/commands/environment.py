"""A fresh machine: a copy of the checkout, and environments in which nothing is but what README's table installs.

Nothing is downloaded: an environment gets links to the packages of the environment that runs the tests, and of those
only the ones that `pip install .` would bring. The command then runs as it is written, without an index: pip itself
says if a package is missing.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.commands.pages import ROOT

__all__ = ["Environment", "checkout", "distributions"]

# What a clone has, and these tests need of it.
_CLONE = (
    "npu_trainer_kernels", "benchmarks", "convergence", "docs", "examples", "CHANGELOG.md", "LICENSE", "MANIFEST.in",
    "Makefile", "README.md", "mkdocs.yml", "pyproject.toml", "setup.py",
)  # fmt: skip
# What pip needs to install, beside what is asked for.
_PIP = ("pip", "setuptools")


def distributions(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Returns the installed distributions that requirements name, and what these require in turn, by name."""
    found, todo, seen = {}, [Requirement(each) for each in requirements], set()
    while todo:
        asked = todo.pop()
        key = re.sub(r"[-_.]+", "-", asked.name).lower(), frozenset(asked.extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = metadata.distribution(asked.name)
        for each in map(Requirement, found[key[0]].requires or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in asked.extras or {""}):
                todo.append(each)
    return found


def checkout(folder: Path) -> Path:
    """Returns a copy of what a clone has."""
    folder.mkdir()
    for name in _CLONE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


class Environment:
    """An environment with some of the packages of this one.

    Args:
        folder: where it is made.
        requirements: of the packages that it has.
        home: the user's home, with the caches.
    """

    def __init__(self, folder: Path, requirements: Iterable[str], home: Path) -> None:
        self.bin = folder / "bin"
        self._home = home
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (packages,) = folder.glob("lib/python3*/site-packages")
        for distribution in distributions([*requirements, *_PIP]).values():
            self._link(distribution, packages)

    def _link(self, distribution: metadata.Distribution, packages: Path) -> None:
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            first, *_ = file.parts
            if first == ".." and source.parent.name == "bin" and source.is_file():
                self._script(source)
            elif first not in ("..", "__pycache__") and not (packages / first).exists():
                (packages / first).symlink_to(distribution.locate_file(first))

    def _script(self, source: Path) -> None:
        first, _, rest = source.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            script = self.bin / source.name
            script.write_bytes(f"#!{self.bin / 'python'}\n".encode() + rest)
            script.chmod(0o755)

    def run(self, command: str, folder: Path, timeout: float = 900) -> tuple[int, str]:
        """Runs a command in a shell as a user would, and returns its exit status and all that it has printed."""
        # By the last two a `make` that runs the tests would tell that of a command that it is inside of another one.
        ours = ("NPU_KERNELS_", "PYTHON", "TRITON_INTERPRET", "PYTEST", "COV_", "XDG_", "MAKE", "MFLAGS")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        given = {
            "PATH": f"{self.bin}:{kept['PATH']}", "HOME": str(self._home), "OMP_NUM_THREADS": "1",
            # There is no hub, and no index: pip finds everything, or says what is missing.
            "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=folder, env={**kept, **given}, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout
