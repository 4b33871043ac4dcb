"""Stand-ins for the libraries of Ascend's driver and toolkit under torch_npu, so that it imports without them.

Every symbol that torch_npu's own libraries leave undefined, and that neither torch nor the C and C++ runtimes define,
gets a function that returns 0 (type information: zeroed data) in one library; the other libraries that it names are
empty. Once they are loaded into a process, `import torch_npu` finds them there by their names: no search path is set,
and a process that does not load them has torch_npu with its libraries missing.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["compile_library", "load"]

_TOOLS = ("gcc", "nm", "readelf")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_TYPE_INFORMATION = ("_ZTV", "_ZTI", "_ZTS")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{package} is not installed; `make test-npu-contract` installs it")
    return Path(spec.origin).parent


def _undefined(libraries: list[Path]) -> set[str]:
    """Symbols that the libraries need and none of them defines."""
    undefined: set[str] = set()
    defined: set[str] = set()
    for line in _output("nm", "-D", *libraries).splitlines():
        *_, kind, name = ["", "", *line.split()]
        if kind == "U":
            undefined.add(name)
        elif kind not in ("w", "v"):
            defined.add(name.partition("@")[0])
    # Versioned symbols are the C and C++ runtimes'.
    return {name for name in undefined - defined if "@" not in name}


def _missing(libraries: list[Path], known: set[str]) -> set[str]:
    """Libraries that they are linked to and that are neither among `known` nor found by the loader."""
    named = {match for match in _NEEDED.findall(_output("readelf", "-d", *libraries)) if match not in known}
    missing = set()
    for name in named:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.add(name)
    return missing


def compile_library(source: str, target: Path) -> None:
    """Makes a shared library of C source, found by the name of its file."""
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target)]
    subprocess.run([*command, "-x", "c", "-"], check=True, input=source, text=True)


def _build(folder: Path) -> None:
    libraries = sorted(_folder("torch_npu").rglob("*.so"))
    torch_libraries = sorted((_folder("torch") / "lib").glob("*.so*"))
    # A look-up in it goes through everything that it is linked to: all of torch, and the runtimes.
    torch_python = ctypes.CDLL(str(_folder("torch") / "lib" / "libtorch_python.so"))
    symbols = sorted(name for name in _undefined(libraries) if not hasattr(torch_python, name))
    source = "".join(
        f"char {name}[256];\n" if name.startswith(_TYPE_INFORMATION) else f"long {name}(void) {{ return 0; }}\n"
        for name in symbols
    )
    missing = sorted(_missing(libraries, {path.name for path in libraries + torch_libraries}))
    for i, name in enumerate(missing):
        compile_library(source if i == 0 else "", folder / name)


@functools.cache
def load() -> Path:
    """Builds the stand-ins, or finds those of the same torch_npu and torch, and loads them into this process. Returns
    their folder. Raises `RuntimeError` where torch_npu or a tool is missing."""
    _folder("torch_npu")
    import torch  # noqa: F401  its libraries first

    key = hashlib.sha256(Path(__file__).read_bytes())
    for package in ("torch_npu", "torch"):
        # RECORD holds the hash of every file of a wheel.
        key.update((importlib.metadata.distribution(package).read_text("RECORD") or "").encode())
    cache = Path(sys.prefix) / "torch_npu_stubs"
    folder = cache / key.hexdigest()[:16]
    if not folder.is_dir():
        lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if lacking:
            raise RuntimeError(
                f"{', '.join(lacking)} not found; install with `make npu-contract-tools` (gcc and binutils)"
            )
        cache.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache))
        _build(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
            shutil.rmtree(fresh)
    for library in sorted(folder.iterdir()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return folder
