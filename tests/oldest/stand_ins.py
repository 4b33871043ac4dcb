"""`python -m tests.oldest.stand_ins`: lets a CUDA build of torch run on the CPU without gigabytes of CUDA's libraries.

The index has torch 2.7.1 for Linux on x86 as a CUDA build alone, and that imports only where every library of CUDA's
is found to which it is linked. Here each of them becomes a library whose functions all return an error, beside torch's
own. A torch that sees no GPU calls none of them: on the CPU it computes with what is in its own wheel, as ever.

CUDA's runtime is not among them: torch asks it whether there is a GPU, and so the real one is needed
(nvidia-cuda-runtime-cu12, a megabyte).
"""

import importlib.util
import re
import subprocess
from pathlib import Path

__all__ = ["build"]

_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
# What every library of CUDA's takes for a failure: in all of them 0 alone is success.
_FAILURE = 999


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _absent(libraries: list[Path]) -> set[str]:
    """Of what they are linked to, what neither torch nor the system has."""
    names = set(_NEEDED.findall(_output("readelf", "-d", *libraries)))
    return {name for name in names if re.match(r"lib(cu|nccl)", name) and not name.startswith("libcudart")}


def _symbols(libraries: list[Path]) -> dict[str | None, set[str]]:
    """Undefined symbols by the version that they must have, which for CUDA's libraries is the name of the library."""
    undefined: dict[str | None, set[str]] = {}
    defined: set[str] = set()
    for line in _output("nm", "-D", *libraries).splitlines():
        *_, kind, name = ["", "", *line.split()]
        name, _, version = name.partition("@")
        if kind == "U":
            undefined.setdefault(version or None, set()).add(name)
        else:
            defined.add(name)
    return {version: names - defined for version, names in undefined.items()}


def build(folder: Path) -> list[str]:
    """Puts a stand-in for every library of CUDA's that torch lacks beside torch's own in `folder`; returns the names.

    `torch` looks there first.
    """
    # Not the one that is linked to the driver: it is loaded for a GPU alone.
    libraries = sorted([*folder.glob("libtorch*.so"), *folder.glob("libc10*.so")])
    symbols = _symbols(libraries)
    built = sorted(name for name in _absent(libraries) if not (folder / name).exists())
    for name in built:
        # Those of some libraries have no version: there the name tells.
        stem = name.removeprefix("lib").partition(".")[0].lower()
        unversioned = {symbol for symbol in symbols.get(None, set()) if symbol.lower().startswith(stem)}
        wanted = symbols.get(name, set()) | unversioned
        source = "".join(f"int {symbol}(void) {{ return {_FAILURE}; }}\n" for symbol in sorted(wanted))
        script = folder / f"{name}.map"
        script.write_text(f"{name} {{ *; }};\n")
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}",
                   f"-Wl,--version-script={script}", "-o", str(folder / name), "-x", "c", "-"]  # fmt: skip
        subprocess.run(command, check=True, input=source, text=True)
        script.unlink()
    return built


if __name__ == "__main__":
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed")
    print("stand-ins for", *build(Path(spec.origin).parent / "lib"))
