"""Limits of tile sizes on an NPU below which loads overlap arithmetic: `tiles.json`, with the evidence.

The largest tile that fits is not the best one. The compiler makes it fit by placing temporaries in the buffers into
which the next tile is loaded, and then each load waits for the vector unit. So the limits were chosen from sweeps over
tiles (`python -m npu_trainer_kernels.ascend.sweep`) and are stored as data. A function of `tiling/` reads its limit
here and computes a tile for any number of rows and columns from it; limits do not depend on the shape.

The file is part of the package. An invalid entry raises an error when the file is read; there are no defaults.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..device import KIB, DeviceSpec

__all__ = ["FILE", "Evidence", "Limit", "Trial", "limits", "parse", "store", "tile_limit", "trying"]

FILE = Path(__file__).with_name("tiles.json")
_ITEMSIZES = (2, 4)


@dataclass(frozen=True)
class Trial:
    """The result of a sweep for one tile at one shape.

    Attributes:
        shape: the name of the shape in the compile gate's cases, for example `"4096 x 14336 (intermediate)"`.
        tile: the tried value of the varied field, for example `8192`.
        fixed_waits: number of waits of loads for the vector unit by a fixed event, in loops that load.
        waits_per_row: number of waits of the scalar unit for the vector unit per row; None if not traced.
        cycles_per_kib: simulated cycles per KiB loaded, valid for ratios between tiles and not as a time. None if the
            plan does not fit or has no double buffering, or if its loads depend on data.
    """

    shape: str
    tile: int
    fixed_waits: int
    waits_per_row: float | None
    cycles_per_kib: float | None


@dataclass(frozen=True)
class Evidence:
    """The sweep that a limit was chosen from.

    Attributes:
        case: the compile gate's case, for example `"swiglu"`.
        dtype: the dtype of its tensors, for example `"bf16"`.
        chip: the chip that the compiler planned for.
        compiler: the versions of the compiler.
        varied: the varied field, for example `"swiglu_block.size"`.
        trials: the trials; for each shape the previous tile comes first.
    """

    case: str
    dtype: str
    chip: str
    compiler: str
    varied: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Limit:
    """A limit of one kernel.

    Attributes:
        kernel: a stable name, `"<op>.<kernel>"`, and a variant after a space: `"rms_norm._forward_kernel rounded"`.
        itemsize: bytes of an element of its tensors, 2 or 4.
        buffer_kib: the on-chip memory of a core that the limit was chosen for.
        limit: the number that a function of `tiling/` uses.
        unit: the unit of `limit`, for example `"elements of a tile"`.
        evidence: the sweeps that the limit was chosen from.
    """

    kernel: str
    itemsize: int
    buffer_kib: int
    limit: int
    unit: str
    evidence: tuple[Evidence, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """The fields that identify a limit in the file."""
        return self.kernel, self.itemsize, self.buffer_kib


def parse(text: str) -> tuple[Limit, ...]:
    """Parses the text of a limits file.

    Raises:
        ValueError: invalid content; the error names the entry, the field, its value and the allowed values.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"tiles.json must be JSON: {error}") from None
    if not isinstance(content, dict) or set(content) != {"limits"} or not isinstance(content["limits"], list):
        raise ValueError('tiles.json must be an object with one list, "limits"')
    found = [_limit(fields) for fields in content["limits"]]
    seen: set[tuple[str, int, int]] = set()
    for limit in found:
        if limit.key in seen:
            raise ValueError(f"tiles.json must have one limit for each kernel, itemsize and buffer_kib: {limit.key}")
        seen.add(limit.key)
    return tuple(found)


def _limit(fields: Any) -> Limit:
    where = f"tiles.json: {fields['kernel']}" if isinstance(fields, dict) and "kernel" in fields else "tiles.json"
    made: Limit = _made(Limit, where, fields, evidence=_evidence)
    if made.itemsize not in _ITEMSIZES:
        raise ValueError(f"{where}: itemsize must be one of {_ITEMSIZES}; got {made.itemsize}")
    if made.limit < 1 or made.buffer_kib < 1:
        raise ValueError(f"{where}: limit and buffer_kib must be positive; got {made.limit}, {made.buffer_kib}")
    if not made.evidence or not all(part.trials for part in made.evidence):
        raise ValueError(f"{where}: evidence must name at least one trial")
    return made


def _evidence(where: str, fields: Any) -> Evidence:
    made: Evidence = _made(Evidence, where, fields, trials=lambda where, fields: _made(Trial, where, fields))
    return made


# The JSON types for each field type. An integer is allowed for a float.
_TYPES: dict[Any, tuple[type, ...]] = {
    int: (int,),
    str: (str,),
    float: (int, float),
    float | None: (int, float, type(None)),
}


def _made(kind: Any, where: str, fields: Any, **lists: Any) -> Any:
    """Makes a dataclass from a JSON object. `lists` has the functions that make the elements of list fields."""
    names = kind.__dataclass_fields__
    if not isinstance(fields, dict) or set(fields) != set(names):
        got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"{where}: {kind.__name__.lower()} must have exactly the fields {sorted(names)}; got {got}")
    values: dict[str, Any] = {}
    for name, field in names.items():
        value = fields[name]
        if name in lists:
            if not isinstance(value, list):
                raise ValueError(f"{where}: {name} must be a list; got {type(value).__name__}")
            values[name] = tuple(lists[name](where, part) for part in value)
        elif isinstance(value, bool) or not isinstance(value, _TYPES[field.type]):
            allowed = " or ".join(one.__name__ for one in _TYPES[field.type])
            raise ValueError(f"{where}: {name} must be {allowed}; got {value!r:.50}")
        else:
            values[name] = value
    return kind(**values)


@cache
def limits() -> tuple[Limit, ...]:
    """Reads the limits of the package's file. Raises the errors of `parse`."""
    return parse(FILE.read_text())


_tried: dict[tuple[str, int], int] = {}


def tile_limit(kernel: str, itemsize: int, spec: DeviceSpec) -> int:
    """Returns the limit of a kernel for the device's on-chip memory or, without a sweep for that size, for the largest
    smaller size: a tile whose loads overlap in less memory also overlaps in more.

    Args:
        kernel: the name in `Limit`.
        itemsize: bytes of the widest element that is read or written.
        spec: the device.

    Raises:
        ValueError: the file has no such limit.
    """
    if (kernel, itemsize) in _tried:
        return _tried[kernel, itemsize]
    known = [limit for limit in limits() if (limit.kernel, limit.itemsize) == (kernel, itemsize)]
    fitting = [limit for limit in known if limit.buffer_kib * KIB <= spec.on_chip_bytes]
    if not fitting:
        has = ", ".join(f"{limit.kernel} {limit.itemsize} ({limit.buffer_kib} KiB)" for limit in limits())
        raise ValueError(f"{kernel!r} with itemsize {itemsize} has no limit for {spec.name}; tiles.json has {has}")
    return max(fitting, key=lambda limit: limit.buffer_kib).limit


@contextlib.contextmanager
def trying(kernel: str, itemsize: int, limit: int) -> Iterator[None]:
    """Overrides the limit of a kernel inside the `with` block. The caller must clear `tiling`'s caches."""
    _tried[kernel, itemsize] = limit
    try:
        yield
    finally:
        del _tried[kernel, itemsize]


def store(new: Limit, file: Path = FILE) -> None:
    """Writes a limit to the file and replaces the one with the same key."""
    kept = [limit for limit in parse(file.read_text()) if limit.key != new.key]
    content = {"limits": [asdict(limit) for limit in sorted([*kept, new], key=lambda limit: limit.key)]}
    file.write_text(_written(content) + "\n")
    limits.cache_clear()


def _written(content: dict[str, Any]) -> str:
    """Formats JSON with one line per trial, so that a changed trial is one changed line."""
    text = json.dumps(content, indent=1)
    lines: list[str] = []
    open_trial = ""
    for line in text.splitlines():
        if line.strip() == "{" and lines and lines[-1].strip().startswith(('"trials"', '{"shape"')):
            open_trial = line
        elif open_trial:
            open_trial += (" " if open_trial.endswith(",") else "") + line.strip()
            if line.strip().startswith("}"):
                lines.append(open_trial)
                open_trial = ""
        else:
            lines.append(line)
    return "\n".join(lines)
