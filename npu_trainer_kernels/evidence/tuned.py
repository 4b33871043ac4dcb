"""The measurements of `npu-kernels tune` on this machine, in a small JSON file that the choice of backend reads.

    {"format": 2, "machines": {"NVIDIA H200": {"versions": {...}, "ops": {"rms_norm": [{...}]}, "tiles": [...]}}}

The keys are chip, versions and op: measurements with another version of torch, Triton or this package are ignored with
a warning. Each result applies only to the range that was measured (`Entry`): for a model of other sizes, another dtype,
or a call with more or fewer tokens the table of `backends` decides.

The file is in `$NPU_KERNELS_CACHE`, or in `npu_trainer_kernels` in the user's cache folder. It is untrusted input: the
module reads it as JSON of a limited size, checks every field, and ignores the file with a warning if anything is
invalid. NPU_KERNELS_TUNED=0 ignores it without a warning.
"""

import contextlib
import fcntl
import functools
import json
import math
import os
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..support.cache import CACHE_VARIABLE, cache_dir
from ..support.switch import switch

__all__ = [
    "Entry",
    "Machine",
    "TileKey",
    "Variation",
    "check_writable",
    "document",
    "file",
    "forget",
    "ignored",
    "machine",
    "machine_of",
    "machines",
    "store",
    "variation",
]

FORMAT = 2
IGNORE = "NPU_KERNELS_TUNED"
MAX_BYTES = 1 << 18
_BACKENDS = ("triton", "torch", "vendor")
_PACKAGES = ("torch", "torch_npu", "triton", "triton-ascend", "npu_trainer_kernels")
_LOCK = ".tuned.lock"


@dataclass(frozen=True)
class Entry:
    """The measurement of an op, forward and backward, and the calls that it applies to.

    Attributes:
        backend: the fastest backend.
        ms: its milliseconds, at the larger number of tokens.
        plain_ms: milliseconds of plain PyTorch; None if it could not run (memory).
        plain_wins: whether a model should keep its own code for these calls.
        dtype: the measured dtype.
        sizes: names and sizes that a call must have exactly, for example `(("H", 2048),)`.
        tokens: the smallest and largest measured numbers of tokens, both with this outcome.
    """

    backend: str
    ms: float
    plain_ms: float | None
    plain_wins: bool
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    tokens: tuple[int, int]

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {self.backend!r:.50}")
        for name in ("ms", "plain_ms"):
            value = getattr(self, name)
            if not (value is None and name == "plain_ms") and not _is_time(value):
                raise ValueError(f"{name} must be a positive number; got {value!r:.50}")
        if type(self.plain_wins) is not bool or (self.plain_wins and self.plain_ms is None):
            raise ValueError(f"plain_wins must be true or false, and false without plain_ms; got {self.plain_wins!r}")
        for text in (self.dtype, *(name for name, _ in self.sizes)):
            if not isinstance(text, str) or len(text) > 20 or not text.isprintable():
                raise ValueError(f"dtype and the names of sizes must be short texts; got {text!r:.50}")
        if not self.sizes or not all(_is_size(size) for size in (*self.tokens, *(size for _, size in self.sizes))):
            raise ValueError(f"sizes and tokens must be positive whole numbers; got {self.sizes}, {self.tokens}")
        if len(self.tokens) != 2 or self.tokens[0] > self.tokens[1]:
            raise ValueError(f"tokens must be the least and the most; got {self.tokens}")

    @classmethod
    def parse(cls, fields: Any) -> "Entry":
        """Parses the result of `as_json`; raises the errors of `Machine.parse`."""
        tokens = fields["tokens"]
        if not isinstance(tokens, list):
            raise ValueError("tokens must be a list")
        return cls(**{**fields, "sizes": tuple(fields["sizes"].items()), "tokens": tuple(tokens)})

    def as_json(self) -> dict[str, Any]:
        """Returns JSON data that `parse` reads."""
        return {**asdict(self), "sizes": dict(self.sizes), "tokens": list(self.tokens)}

    def covers(self, dtype: str, sizes: tuple[int, ...]) -> bool:
        """Whether the measurement was made for this dtype and these sizes of a model."""
        return self.dtype == dtype and tuple(size for _, size in self.sizes) == sizes

    @property
    def range(self) -> str:
        """The range as text, for example `512 to 4096 tokens, H=2048 bfloat16`."""
        low, high = self.tokens
        tokens = f"{high}" if low == high else f"{low} to {high}"
        return f"{tokens} tokens, {' '.join(f'{name}={size}' for name, size in self.sizes)} {self.dtype}"

    def __str__(self) -> str:
        plain = "" if self.plain_ms is None else f", plain PyTorch {self.plain_ms:.3g} ms"
        return f"measured here: {self.backend} {self.ms:.3g} ms{plain}, {self.range} (npu-kernels tune)"


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 40


@dataclass(frozen=True)
class Variation:
    """The difference of a tile from the formula's: its size and its warps are halved (-1), unchanged (0) or doubled
    (1)."""

    size: int = 0
    warps: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "warps"):
            value = getattr(self, name)
            if type(value) is not int or value not in (-1, 0, 1):
                raise ValueError(f"{name} must be -1, 0 or 1; got {value!r:.50}")


# A function of `tiling`, and its arguments except the device.
TileKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Machine:
    """The measurements on one chip.

    Attributes:
        versions: the versions of the relevant packages.
        ops: for each op, a result for each range.
        tiles: the tiles that differ from the formula's.
    """

    versions: Mapping[str, str]
    ops: Mapping[str, tuple[Entry, ...]]
    tiles: Mapping[TileKey, Variation]

    @classmethod
    def parse(cls, data: Any) -> "Machine":
        """Parses JSON data. Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for invalid data."""
        if not all(isinstance(version, str) for version in data["versions"].values()):
            raise ValueError("versions must be texts")
        tiles = {}
        for tile in data["tiles"]:
            function, args = tile["function"], tuple(tile["args"])
            if not isinstance(function, str) or not all(isinstance(arg, int) for arg in args):
                raise ValueError("a tile has the name of a function and whole numbers")
            tiles[function, args] = Variation(tile["size"], tile["warps"])
        ops = {op: tuple(map(Entry.parse, entries)) for op, entries in data["ops"].items()}
        return cls(dict(data["versions"]), ops, tiles)

    def as_json(self) -> dict[str, Any]:
        """Returns JSON data that `parse` reads."""
        return {
            "versions": dict(self.versions),
            "ops": {op: [entry.as_json() for entry in entries] for op, entries in self.ops.items()},
            "tiles": [{"function": f, "args": list(args), **asdict(by)} for (f, args), by in self.tiles.items()],
        }

    def at(self, op: str, dtype: str, tokens: int, sizes: tuple[int, ...]) -> Entry | None:
        """Returns the result that applies to a call, or None."""
        for entry in self.ops.get(op, ()):
            if entry.tokens[0] <= tokens <= entry.tokens[1] and entry.covers(dtype, sizes):
                return entry
        return None

    def with_results(self, ops: Mapping[str, Iterable[Entry]], tiles: Mapping[TileKey, Variation]) -> "Machine":
        """Returns a copy with new results; it drops earlier results whose range overlaps a new one."""
        merged = dict(self.ops)
        for op, entries in ops.items():
            new = tuple(entries)
            merged[op] = (*(old for old in merged.get(op, ()) if not any(_touch(old, n) for n in new)), *new)
        return Machine(self.versions, merged, {**self.tiles, **tiles})


def _touch(a: Entry, b: Entry) -> bool:
    same = (a.dtype, a.sizes) == (b.dtype, b.sizes)
    return same and a.tokens[0] <= b.tokens[1] and b.tokens[0] <= a.tokens[1]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def file() -> Path:
    """Returns the path of the file. Raises `OSError` if there is no folder for a user's files."""
    try:
        return cache_dir() / "tuned.json"
    except RuntimeError as error:  # neither HOME nor an entry in the user database
        raise FileNotFoundError(f"there is no home folder ({error}); set {CACHE_VARIABLE} to a folder") from error


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _parse(text: str) -> dict[str, Machine]:
    """Parses the file to machines by chip. Raises `ValueError` for any other format."""
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


def _content(path: Path) -> bytes:
    """Reads a regular file. For anything else, such as a pipe, it raises `OSError` without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    with open(descriptor, "rb") as stream:
        return stream.read(MAX_BYTES + 1)


def _read() -> dict[str, Machine]:
    try:
        path = file()
    except OSError as error:
        warnings.warn(f"What npu-kernels tune measured cannot be looked up: {error}", stacklevel=2)
        return {}
    try:
        content = _content(path)
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
    """Returns the measurements by chip, of any versions. The file is read once."""
    return _read() if switch(IGNORE, True) else {}


@functools.cache
def machine(chip: str) -> Machine | None:
    """Returns the measurements of the installed versions on a chip, or None. Warns once if there are measurements of
    other versions."""
    found, now = machines().get(chip), _versions()
    if found is None or found.versions == now:
        return found
    names = dict.fromkeys((*found.versions, *now))
    differ = (n for n in names if found.versions.get(n) != now.get(n))
    changes = ", ".join(
        f"{n} {found.versions.get(n, 'not installed')} -> {now.get(n, 'not installed')}" for n in differ
    )
    warnings.warn(
        f"What npu-kernels tune measured on {chip} is ignored, since versions have changed ({changes}). Run it again, "
        f"or remove {file()}.",
        stacklevel=2,
    )
    return None


def variation(function: str, args: tuple[int, ...], chip: str) -> Variation | None:
    """Returns the difference of a tile from the formula's on a chip, or None."""
    found = machine(chip)
    return None if found is None else found.tiles.get((function, args))


def forget() -> None:
    """Clears the cache, so that the file is read again."""
    machines.cache_clear()
    machine.cache_clear()


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignores all measurements inside the `with` block, as NPU_KERNELS_TUNED=0 does."""
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


def document(measured: Mapping[str, Machine]) -> dict[str, Any]:
    """Returns the content of the file for machines by chip."""
    return {"format": FORMAT, "machines": {chip: found.as_json() for chip, found in measured.items()}}


def machine_of(ops: Mapping[str, Iterable[Entry]], tiles: Mapping[TileKey, Variation]) -> Machine:
    """Makes a machine of new measurements with the installed versions."""
    return Machine(_versions(), {}, {}).with_results(ops, tiles)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file, so that no other process stores inside the `with` block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_writable() -> None:
    """Raises `OSError` if `store` could not write."""
    path = file()
    with _locked(path), tempfile.TemporaryFile(dir=path.parent), contextlib.suppress(FileNotFoundError):
        _content(path)


def store(chip: str, ops: Mapping[str, Iterable[Entry]], tiles: Mapping[TileKey, Variation] | None = None) -> Path:
    """Adds measurements of a chip, which replace earlier ones of the same ranges and tiles.

    It replaces the whole file, so that a reader never sees a partial one, and holds a lock, so that two processes that
    store at the same time lose nothing. Raises `OSError` if it cannot write the file.
    """
    path = file()
    with _locked(path):
        stored, now = _read(), _versions()
        known = stored.get(chip)
        if known is None or known.versions != now:
            known = Machine(now, {}, {})
        stored[chip] = known.with_results(ops, tiles or {})
        text = json.dumps(document(stored), indent=1)
        if len(text.encode()) > MAX_BYTES:
            raise OSError(f"{path} would be larger than {MAX_BYTES} bytes; remove it and measure again what you need")
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            made = Path(folder, path.name)
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    forget()
    return path
