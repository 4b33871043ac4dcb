"""The results file, with rows, machine and versions, which is rewritten atomically after every row."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import npu_trainer_kernels
from npu_trainer_kernels import device as devices

__all__ = ["Comparison", "Results", "compare", "default_name", "environment", "key_of", "package_version", "read"]

PACKAGES = (
    "torch", "triton", "triton-ascend", "torch_npu", "transformers", "trl", "accelerate", "liger-kernel",
    "cut-cross-entropy", "numpy",
)  # fmt: skip
Row = dict[str, Any]
FORMAT = 1
# Smaller differences are not reported as regressions, regardless of the spread.
TIME_TOLERANCE, MEMORY_TOLERANCE_BYTES = 1.02, 1 << 20


def package_version(name: str) -> str:
    """Returns the installed version of a distribution, or `"not installed"`; for this package a hash of its sources."""
    if name == "npu_trainer_kernels":
        return _sources_digest()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sources_digest() -> str:
    """Returns a hash of this package's Python files: our rows are measured again when it changes."""
    folder = Path(npu_trainer_kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """Returns the CPU's model, or its architecture if the system does not name the model."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def environment(
    device: torch.device, arguments: list[str], commit: str | None = None, module: str = "benchmarks"
) -> Row:
    """Returns the machine, the versions and the command.

    Args:
        device: the device that is measured.
        arguments: the command's arguments.
        commit: the sources' commit; None: git is asked.
        module: the module that was run with the arguments.
    """
    spec = devices.spec(device)
    name = _processor() if spec.kind == "cpu" else spec.name
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": {"kind": spec.kind, "name": name, "memory_bytes": spec.memory_bytes},
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "system": platform.system(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": commit or _commit(),
        "sources": _sources_digest(),
        "command": f"python -m {module} " + " ".join(arguments),
    }


def default_name(meta: Row) -> str:
    """Returns `<date>-<device>` as a file name."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", meta["device"]["name"]).strip("-").lower() or meta["device"]["kind"]
    return f"{meta['date'][:10]}-{device}"


def key_of(row: Row) -> str:
    """Returns a row's key, by which rows of different files correspond."""
    return "/".join(str(row[name]) for name in ("group", "op", "shape", "dtype", "provider", "mode"))


def read(path: Path) -> tuple[Row, list[Row]]:
    """Returns (machine and versions, rows). Raises `ValueError` for a file of another format."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("meta", {}).get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a results file of format {FORMAT}")
    return data["meta"], data["rows"]


class Results:
    """The rows of this run and of the runs that it continues."""

    def __init__(self, path: Path, meta: Row, earlier: Iterable[Path] = ()) -> None:
        self.path, self.meta = path, meta
        self._rows: dict[str, Row] = {}
        commands: list[str] = []
        for source in (*earlier, path):
            if source.exists():
                before, rows = read(source)
                if before["device"]["name"] != meta["device"]["name"]:
                    raise ValueError(
                        f"{source.name} is of {before['device']['name']!r}, this is {meta['device']['name']!r}: "
                        "rows of two machines do not belong in one file"
                    )
                commands += before.get("commands", [before["command"]])
                self._rows.update({key_of(row): row for row in rows})
        # Rows of earlier runs were made by their commands.
        self.meta["commands"] = list(dict.fromkeys([*commands, meta["command"]]))

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def find(self, **wanted: Any) -> list[Row]:
        """Returns the rows whose fields have these values."""
        return [r for r in self._rows.values() if all(r.get(k) == v for k, v in wanted.items())]

    def has(self, key: str, version: str) -> bool:
        """Whether there is a row made by the same version. A row that failed or was absent counts as missing, unless
        its provider made the device unusable."""
        row = self._rows.get(key)
        if row is None or row["version"] != version:
            return False
        return row["status"] == "ok" or bool(row.get("fatal"))

    def add(self, rows: Iterable[Row]) -> None:
        """Adds or replaces rows and writes the file atomically."""
        self._rows.update({key_of(row): row for row in rows})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".json.tmp")
        text = json.dumps({"meta": self.meta, "rows": self.rows}, indent=1, allow_nan=True)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.path)


class Comparison:
    """A comparison of two files.

    Attributes:
        rows: (key, old milliseconds, new milliseconds, ratio of times, ratio of memory or None, remark).
        regressions: keys of the rows that failed, became inaccurate, slower beyond the spread, or larger.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float, float | None, str]] = []
        self.regressions: list[str] = []
        self.notes: list[str] = []

    def add(self, key: str, old: Row, new: Row) -> None:
        if new["status"] != "ok":
            self.regressions.append(key)
            self.rows.append((key, old["ms"]["median"], float("nan"), float("nan"), None, f"now {new['status']}"))
            return
        before, now = old["ms"], new["ms"]
        ratio = now["median"] / before["median"]
        memory, remarks = _memory_ratio(old.get("extra_bytes"), new.get("extra_bytes")), []
        if now["q1"] > before["q3"] and ratio > TIME_TOLERANCE:
            remarks.append("slower")
        elif now["q3"] < before["q1"] and ratio < 1 / TIME_TOLERANCE:
            remarks.append("faster")
        if memory is not None and memory > TIME_TOLERANCE:
            remarks.append("larger")
        if old.get("verdict") == "ok" and new.get("verdict") in ("inaccurate", "wrong"):
            remarks.append(str(new["verdict"]))
        if set(remarks) & {"slower", "larger", "inaccurate", "wrong"}:
            self.regressions.append(key)
        self.rows.append((key, before["median"], now["median"], ratio, memory, ", ".join(remarks)))


def _memory_ratio(old: int | None, new: int | None) -> float | None:
    if old is None or new is None:
        return None
    if abs(new - old) <= MEMORY_TOLERANCE_BYTES:
        return 1.0
    return new / max(old, MEMORY_TOLERANCE_BYTES)


def compare(old: Path, new: Path) -> Comparison:
    """Compares two results files; rows that only one of them has are only counted.

    A row is slower when its first quartile lies above the old third quartile and its median 2% above the old one.
    """
    (old_meta, old_rows), (new_meta, new_rows) = read(old), read(new)
    result = Comparison()
    for what in ("name", "kind"):
        if old_meta["device"][what] != new_meta["device"][what]:
            raise ValueError(
                f"{old.name} is of {old_meta['device']['name']!r} and {new.name} of {new_meta['device']['name']!r}: "
                "times of two devices are not comparable"
            )
    for name, version in old_meta["packages"].items():
        if new_meta["packages"].get(name) != version:
            result.notes.append(f"{name}: {version} -> {new_meta['packages'].get(name)}")
    before = {key_of(r): r for r in old_rows if r["status"] == "ok"}
    now = {key_of(r): r for r in new_rows}
    for key in before:
        if key in now:
            result.add(key, before[key], now[key])
    measured = {key for key, row in now.items() if row["status"] == "ok"}
    only = len(before.keys() - now.keys()), len(measured - before.keys())
    if any(only):
        result.notes.append(f"{only[0]} rows only in {old.name}, {only[1]} only in {new.name}: not compared")
    return result
