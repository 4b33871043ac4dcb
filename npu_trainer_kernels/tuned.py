"""What `npu-kernels tune` measured on this machine, in a small JSON file that the choice of backend reads.

    {"format": 1, "machines": {"NVIDIA H200": {"versions": {...}, "ops": {"rms_norm": {...}}, "tiles": [...]}}}

Keyed by chip, versions and op: what was measured with another torch, Triton or version of this package does not count.
The file lies in `$NPU_KERNELS_CACHE`, or in `npu_trainer_kernels` in the user's cache folder. It is input like any
other: read as JSON of a limited size, every field checked, and ignored with a warning where anything is not as it
should be. NPU_KERNELS_TUNED=0 ignores it without one.
"""

import contextlib
import functools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ._switch import switch
from .ascend.toolchain import cache_dir

__all__ = ["Entry", "Machine", "TileKey", "Variation", "file", "forget", "ignored", "machines", "store", "variation"]

FORMAT = 1
IGNORE = "NPU_KERNELS_TUNED"
MAX_BYTES = 1 << 18
_BACKENDS = ("triton", "torch", "vendor")
_PACKAGES = ("torch", "torch_npu", "triton", "triton-ascend", "npu_trainer_kernels")


@dataclass(frozen=True)
class Entry:
    """What was measured of an op, forward and backward.

    Attributes:
        backend: the fastest of ours.
        ms: its milliseconds.
        plain_ms: plain PyTorch's; None where it could not run (memory).
        plain_wins: a model keeps its own code.
        shape, dtype: of what was measured.
    """

    backend: str
    ms: float
    plain_ms: float | None
    plain_wins: bool
    shape: str
    dtype: str

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {self.backend!r}")
        for name in ("ms", "plain_ms"):
            value = getattr(self, name)
            if not (value is None and name == "plain_ms") and not _is_time(value):
                raise ValueError(f"{name} must be a positive number; got {value!r}")
        if type(self.plain_wins) is not bool or (self.plain_wins and self.plain_ms is None):
            raise ValueError(f"plain_wins must be true or false, and false without plain_ms; got {self.plain_wins!r}")
        for name in ("shape", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
                raise ValueError(f"{name} must be a short text; got {value!r:.50}")

    def __str__(self) -> str:
        plain = "" if self.plain_ms is None else f", plain PyTorch {self.plain_ms:.3g} ms"
        return f"measured here: {self.backend} {self.ms:.3g} ms{plain}, {self.shape} {self.dtype} (npu-kernels tune)"


@dataclass(frozen=True)
class Variation:
    """How a tile differs from the formula's: its size and its warps halved (-1), kept (0) or doubled (1)."""

    size: int = 0
    warps: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "warps"):
            value = getattr(self, name)
            if type(value) is not int or value not in (-1, 0, 1):
                raise ValueError(f"{name} must be -1, 0 or 1; got {value!r:.50}")


# A function of `tiling`, and its arguments but for the device.
TileKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Machine:
    """What was measured on one chip.

    Attributes:
        versions: of the packages that matter.
        ops: by name.
        tiles: those that are to differ from the formula's.
    """

    versions: Mapping[str, str]
    ops: Mapping[str, Entry]
    tiles: Mapping[TileKey, Variation]

    @classmethod
    def parse(cls, data: Any) -> "Machine":
        """Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for data of another form."""
        if not all(isinstance(version, str) for version in data["versions"].values()):
            raise ValueError("versions must be texts")
        tiles = {}
        for tile in data["tiles"]:
            function, args = tile["function"], tuple(tile["args"])
            if not isinstance(function, str) or not all(isinstance(arg, int) for arg in args):
                raise ValueError("a tile has the name of a function and whole numbers")
            tiles[function, args] = Variation(tile["size"], tile["warps"])
        return cls(dict(data["versions"]), {op: Entry(**fields) for op, fields in data["ops"].items()}, tiles)

    def as_json(self) -> dict[str, Any]:
        """What `parse` reads."""
        return {
            "versions": dict(self.versions),
            "ops": {op: asdict(measured) for op, measured in self.ops.items()},
            "tiles": [{"function": f, "args": list(args), **asdict(by)} for (f, args), by in self.tiles.items()],
        }


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def file() -> Path:
    """Where the measurements are."""
    return cache_dir() / "tuned.json"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _parse(text: str) -> dict[str, Machine]:
    """Machines by chip. Raises `ValueError` for anything that is not of this format."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("machines"), dict):
        raise ValueError(f"it is not of format {FORMAT}")
    try:
        return {chip: Machine.parse(machine) for chip, machine in data["machines"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is not as it should be ({error})") from error


def _read() -> dict[str, Machine]:
    path = file()
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        return _parse(content.decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: {error}. Run npu-kernels tune again, or remove it.", stacklevel=2)
        return {}


@functools.cache
def machines() -> Mapping[str, Machine]:
    """What the installed versions measured, by chip; read once."""
    if not switch(IGNORE, True):
        return {}
    now = _versions()
    return {chip: machine for chip, machine in _read().items() if machine.versions == now}


def variation(function: str, args: tuple[int, ...], chip: str) -> Variation | None:
    """How a tile is to differ from the formula's on a chip, or None."""
    machine = machines().get(chip)
    return None if machine is None else machine.tiles.get((function, args))


def forget() -> None:
    """Reads the file again when it is next asked for."""
    machines.cache_clear()


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Inside the `with` block nothing was measured, as with NPU_KERNELS_TUNED=0."""
    before = os.environ.get(IGNORE)
    os.environ[IGNORE] = "0"
    forget()
    try:
        yield
    finally:
        del os.environ[IGNORE]
        if before is not None:
            os.environ[IGNORE] = before
        forget()


def store(chip: str, ops: Mapping[str, Entry], tiles: Mapping[TileKey, Variation] | None = None) -> Path:
    """Writes the measurements of a chip, in place of its earlier ones of the same ops and tiles; what other chips have
    stays. The file is replaced whole: a reader never sees half of it."""
    stored, now = _read(), _versions()
    known = stored.get(chip)
    if known is None or known.versions != now:
        known = Machine(now, {}, {})
    stored[chip] = Machine(now, {**known.ops, **ops}, {**known.tiles, **(tiles or {})})
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "machines": {name: m.as_json() for name, m in stored.items()}}, indent=1)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        made = Path(folder, path.name)
        made.write_text(text, encoding="utf-8")
        os.replace(made, path)
    forget()
    return path
