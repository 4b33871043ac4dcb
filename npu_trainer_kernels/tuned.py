"""What `npu-kernels tune` measured on this machine, in a small JSON file that the choice of backend reads.

    {"format": 1, "machines": {"NVIDIA H200": {"versions": {...}, "ops": {"rms_norm": {...}}}}}

Keyed by chip, versions and op: what was measured with another torch, Triton or version of this package does not count.
The file lies in `$NPU_KERNELS_CACHE`, or in `npu_trainer_kernels` in the user's cache folder. It is input like any
other: read as JSON of a limited size, every field checked, and ignored with a warning where anything is not as it
should be. NPU_KERNELS_TUNED=0 ignores it without one.
"""

import functools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .ascend.toolchain import cache_dir

__all__ = ["Entry", "file", "forget", "machines", "store"]

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


def _parse(text: str) -> dict[str, tuple[dict[str, str], dict[str, Entry]]]:
    """(versions, entries by op) by chip. Raises `ValueError` for anything that is not of this format."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("machines"), dict):
        raise ValueError(f"it is not of format {FORMAT}")
    found = {}
    for chip, machine in data["machines"].items():
        try:
            versions, ops = machine["versions"], machine["ops"]
            if not all(isinstance(v, str) for v in versions.values()):
                raise ValueError(f"versions of {chip!r} must be texts")
            found[chip] = dict(versions), {op: Entry(**fields) for op, fields in ops.items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the measurements of {chip!r:.50} are not as they should be ({error})") from error
    return found


def _read() -> dict[str, tuple[dict[str, str], dict[str, Entry]]]:
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
def machines() -> Mapping[str, Mapping[str, Entry]]:
    """What the installed versions measured, by chip and op; read once."""
    if os.environ.get(IGNORE, "1") == "0":
        return {}
    now = _versions()
    return {chip: entries for chip, (versions, entries) in _read().items() if versions == now}


def forget() -> None:
    """Reads the file again at the next call of `machines`."""
    machines.cache_clear()


def store(chip: str, entries: Mapping[str, Entry]) -> Path:
    """Writes the measurements of a chip, in place of its earlier ones of the same ops; other chips' stay. The file is
    replaced whole: a reader never sees half of it."""
    stored: dict[str, Any] = {
        name: {"versions": versions, "ops": _as_json(ops.items())} for name, (versions, ops) in _read().items()
    }
    now = _versions()
    known = stored.get(chip)
    kept = known["ops"] if known is not None and known["versions"] == now else {}
    stored[chip] = {"versions": now, "ops": {**kept, **_as_json(entries.items())}}
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        made = Path(folder, path.name)
        made.write_text(json.dumps({"format": FORMAT, "machines": stored}, indent=1), encoding="utf-8")
        os.replace(made, path)
    forget()
    return path


def _as_json(ops: Iterable[tuple[str, Entry]]) -> dict[str, Any]:
    return {op: asdict(measured) for op, measured in ops}
