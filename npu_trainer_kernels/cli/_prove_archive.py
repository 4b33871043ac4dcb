"""The files of `npu-kernels prove`: a journal in its folder during the measurements, and the archive to send in.

The journal has one line of JSON for each result, written at once, so a new run finds the results of a run that was
interrupted. The archive is a zip of three files, `prove.json`, `report.md` and `tuned.json`, with no names, paths,
addresses, data or secrets: this module chooses its fields, and every text in it goes through a `Scrubber`.
"""

import contextlib
import fcntl
import getpass
import json
import re
import socket
import zipfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..evidence import tuned
from ..evidence.table import FORM_NAMES, TABLE
from .output import plain

__all__ = ["SCHEMA", "Journal", "Scrubber", "document", "write"]

SCHEMA = 1
Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------- journal


class Journal:
    """The records of a folder, from this run and the runs that it continues.

    Raises `OSError` if the folder cannot be written, `BlockingIOError` if another process is writing there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = open(folder / "journal.jsonl", "a+", encoding="utf-8")  # noqa: SIM115  `close` closes it
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._stream.close()
            raise
        self._stream.seek(0)
        text = self._stream.read()
        self.records: list[Row] = []
        for line in text.splitlines():
            # The last line of a run that was killed may be incomplete.
            with contextlib.suppress(json.JSONDecodeError):
                self.records.append(json.loads(line))
        if text and not text.endswith("\n"):
            self._stream.write("\n")

    def add(self, record: Row) -> None:
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()
        self.records.append(record)

    def close(self) -> None:
        # On a full disk `close` tries again to write what `add` could not, and fails as `add` has.
        with contextlib.suppress(OSError):
            self._stream.close()

    def of(self, part: str) -> dict[str, Row]:
        """Returns the last record of each item of a part."""
        return {r["item"]: r for r in self.records if r.get("part") == part and "item" in r}

    def items(self, part: str) -> list[str]:
        """Returns the items of a part; empty until its process has listed them."""
        named = [r["items"] for r in self.records if r.get("part") == part and "items" in r]
        return named[-1] if named else []

    def left(self, part: str) -> list[str]:
        """Returns the items of a part that have no record."""
        done = self.of(part)
        return [item for item in self.items(part) if item not in done]


# ------------------------------------------------------------------------------------------------------------ scrubbing
_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PROXY|URL|URI|ENDPOINT|DSN|EMAIL|ACCOUNT|LOGIN", re.I
)
_NAMES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "HOST", "COMPUTERNAME")
# A path may directly follow an option of one letter, as in the commands of compilers.
_PATH = re.compile(r"(?:(?<![\w./<)-])|(?<=-[A-Za-z]))(?:~|[A-Za-z]:(?=[\\/]))?[\\/](?:[^\s:'\"`,;()<>\[\]=|]+)")
_FILE = re.compile(r"[\w.+-]*\.(?:so[.\d]*|py|h|hpp|cpp)")
_ADDRESSES = re.compile(r"\w+://\S+|[\w.+-]+@[\w-]+\.[\w.-]+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_VERSION = re.compile(r"[\d.]+[\w.+-]*")
# Words of ours that are never removed, even if a user or a machine has one of them as its name.
_WORDS = {
    "cpu", "npu", "cuda", "torch", "triton", "vendor", "reference", "ok", "wrong", "failed", "absent", "error", "plain",
    "flag", "forward", "backward", "both", "run", "float32", "bfloat16", "float16", "Linux", "ops", "end-to-end",
    *FORM_NAMES, *TABLE,
}  # fmt: skip


def _host_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0]}


def _user_names() -> set[str]:
    names = set()
    # Without an environment variable and an entry in the user database there is no name (OSError since Python 3.13).
    with contextlib.suppress(KeyError, OSError):
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        names.add(Path.home().name)
    return names


class Scrubber:
    """Removes from texts what identifies the machine or its user, and secrets."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        names = {environment.get(name, "") for name in _NAMES} | _host_names() | _user_names()
        self._names = _whole_words(names - {""} - _WORDS)
        # Short values are switches, not secrets.
        secrets = {v for k, v in environment.items() if _SECRET.search(k) and len(v) >= 6}
        self._secrets = (
            re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True)))) if secrets else None
        )

    def text(self, text: str) -> str:
        """Removes secrets, addresses, paths and names; of a path to a library or source file the file name stays."""
        if text in _WORDS:
            return text
        if self._secrets is not None:
            text = self._secrets.sub("<secret>", text)
        if not _VERSION.fullmatch(text):
            text = _ADDRESSES.sub("<address>", text)
        text = _PATH.sub(_of_path, text)
        return text if self._names is None else self._names.sub("<name>", text)

    def value(self, value: Any) -> Any:
        """Applies `text` to every string in lists and dictionaries, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def _whole_words(names: Iterable[str]) -> re.Pattern[str] | None:
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<![\w])(?:{listed})(?![\w])") if listed else None


def _of_path(found: re.Match[str]) -> str:
    last = re.split(r"[\\/]", found[0])[-1]
    return f"<path>/{last}" if _FILE.fullmatch(last) else "<path>"


# ------------------------------------------------------------------------------------------------------------- document
def _rows(journal: Journal) -> list[Row]:
    return [
        row for part in ("kernels", "steps", "ranks") for r in journal.of(part).values() for row in r.get("rows", [])
    ]


def _failures(journal: Journal, parts: Iterable[str]) -> list[Row]:
    """Returns the items that are wrong or failed, except those of plain PyTorch."""
    return [
        {"part": part, "item": item, "status": found["status"], "reason": found.get("reason") or "a wrong result"}
        for part in parts
        for item, found in journal.of(part).items()
        if found["status"] in ("wrong", "failed") and not item.endswith(("/reference", "/plain"))
    ]


def _measured(journal: Journal, chip: str) -> dict[str, Any]:
    """Returns the table that `npu-kernels tune` would write."""
    machines = [tuned.Machine.parse(found["machine"]) for found in journal.of("table").values() if "machine" in found]
    if not machines:
        return tuned.document({})
    whole = machines[0]
    for machine in machines[1:]:
        whole = whole.with_results(machine.ops, machine.tiles)
    return tuned.document({chip: whole})


def document(
    journal: Journal, parts: Iterable[str], environment: Mapping[str, str], command: str = "npu-kernels prove"
) -> dict[str, Any]:
    """Returns all results, scrubbed. `meta` and `rows` have the format of a results file of the benchmarks."""
    parts = list(parts)
    device = journal.of("device").get("device", {})
    unknown = {"format": 1, "device": {"kind": "unknown", "name": "unknown", "memory_bytes": 0}, "packages": {}}
    meta = device.get("meta") or unknown
    here: Row = next((r["environment"] for r in reversed(journal.records) if "environment" in r), {})
    found = {
        "schema": SCHEMA,
        "meta": {**meta, "command": command, "devices": device.get("count", 0)},
        "written": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "environment": {**here, "without_npu": device.get("without_npu")},
        "rows": _rows(journal),
        "choices": journal.of("checks").get("choices", {}).get("choices", {}),
        "checks": [
            {key: r.get(key) for key in ("op", "backend", "dtype", "shape", "status", "reason")}
            for item, r in journal.of("checks").items() if "op" in r
        ],
        "convergence": [
            {"case": item, **{key: r.get(key) for key in ("status", "steps", "losses", "checks", "reason")}}
            for item, r in journal.of("convergence").items()
        ],
        "tuning": {op: r["outcomes"] for op, r in journal.of("table").items() if "outcomes" in r},
        "tuned": _measured(journal, device.get("chip", "unknown")),
        "failures": _failures(journal, ("device", *parts)),
        "absent": [
            {"part": part, "item": item, "reason": r.get("reason")}
            for part in parts for item, r in journal.of(part).items() if r["status"] == "absent"
        ],
        "parts": {
            part: {"done": len(journal.of(part)), "left": journal.left(part), "begun": bool(journal.items(part))}
            for part in parts
        },
    }  # fmt: skip
    scrubbed: dict[str, Any] = plain(Scrubber(environment).value(found))
    return scrubbed


def write(folder: Path, found: Mapping[str, Any], report: str) -> Path:
    """Writes the archive atomically. Raises `OSError` if it cannot be written."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", found["meta"]["device"]["name"]).strip("-").lower() or "unknown"
    path = folder / f"prove-{device}.zip"
    unfinished = path.with_suffix(".zip.tmp")
    files = {
        "prove.json": json.dumps(found, indent=1, allow_nan=False) + "\n",
        "report.md": report,
        "tuned.json": json.dumps(found["tuned"], indent=1) + "\n",
    }
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                # `ZipInfo` with only a name has no owner and no time.
                archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # it may take the last room on a disk
        raise
    return path
