"""How large a kernel's tile may be on an NPU so that its loads overlap its arithmetic: `tiles.json`, with the evidence.

The largest tile that fits is not the best one. The planner makes it fit by laying temporaries over the buffers that the
next tile is loaded into, and then each load waits for the vector unit. So the limits were chosen from sweeps over tiles
(`python -m npu_trainer_kernels.ascend.sweep`), and they are data: a formula of `tiling/` asks for its limit here, and
makes of it a tile for any number of rows and columns. Nothing is looked up by shape.

The file is part of the package. What is wrong in it is an error when it is read, never a default.
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
    """What a sweep found of one tile at one shape.

    Attributes:
        shape: as the gate's cases name it, for example `"4096 x 14336 (intermediate)"`.
        tile: the value that was tried, in the sweep's terms, for example `8192`.
        fixed_waits: waits of loads for the vector unit by a fixed event, in loops that load.
        waits_per_row: waits of the scalar unit for the vector unit, executed per row; None: not traced.
        cycles_per_kib: simulated cycles per KiB loaded: good for ratios between tiles, not a time of a chip. None:
            nothing to simulate, because the plan does not fit or has lost its double buffering, or because its loads
            follow data.
    """

    shape: str
    tile: int
    fixed_waits: int
    waits_per_row: float | None
    cycles_per_kib: float | None


@dataclass(frozen=True)
class Evidence:
    """The sweep behind a limit.

    Attributes:
        case: the gate's case, for example `"swiglu"`.
        dtype: of its tensors, for example `"bf16"`.
        chip: the chip that was planned for.
        compiler: its versions.
        varied: what was varied, for example `"swiglu_block.size"`.
        trials: what was tried, of each shape the former tile first.
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
        kernel: a stable name, `"<op>.<kernel>"`, a variant behind a space: `"rms_norm._forward_kernel rounded"`.
        itemsize: bytes of an element of its tensors, 2 or 4.
        buffer_kib: the on-chip memory of a core that it was chosen for.
        limit: the number that a formula of `tiling/` uses.
        unit: what it counts, for example `"elements of a tile"`.
        evidence: the sweeps that it was chosen from.
    """

    kernel: str
    itemsize: int
    buffer_kib: int
    limit: int
    unit: str
    evidence: tuple[Evidence, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """What is unique in the file."""
        return self.kernel, self.itemsize, self.buffer_kib


def parse(text: str) -> tuple[Limit, ...]:
    """The limits in the text of such a file.

    Raises:
        ValueError: it is not as `Limit` says; the error names the entry, the field, its value and what is allowed.
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


# The types of the fields, as JSON has them. A whole number may stand where a fraction is allowed.
_TYPES: dict[Any, tuple[type, ...]] = {
    int: (int,),
    str: (str,),
    float: (int, float),
    float | None: (int, float, type(None)),
}


def _made(kind: Any, where: str, fields: Any, **lists: Any) -> Any:
    """A dataclass from an object of JSON; `lists` makes the elements of the fields that are lists."""
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
    """The limits of the package's own file. Raises as `parse`."""
    return parse(FILE.read_text())


_tried: dict[tuple[str, int], int] = {}


def tile_limit(kernel: str, itemsize: int, spec: DeviceSpec) -> int:
    """The limit of a kernel, for the device's on-chip memory or, where nothing was swept for that, for the largest
    below it: a tile that overlaps in less memory overlaps in more.

    Args:
        kernel: as in `Limit`.
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
    """Inside the `with` block the kernel has this limit, whatever the file says. `tiling`'s caches are the caller's."""
    _tried[kernel, itemsize] = limit
    try:
        yield
    finally:
        del _tried[kernel, itemsize]


def store(new: Limit, file: Path = FILE) -> None:
    """Writes a limit into the file, in the place of the one with its key."""
    kept = [limit for limit in parse(file.read_text()) if limit.key != new.key]
    content = {"limits": [asdict(limit) for limit in sorted([*kept, new], key=lambda limit: limit.key)]}
    file.write_text(_written(content) + "\n")
    limits.cache_clear()


def _written(content: dict[str, Any]) -> str:
    """JSON with a trial a line, so that a change of one is a change of one line."""
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
