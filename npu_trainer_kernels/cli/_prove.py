"""Tests the project's claims on this machine, in at most an hour, and packs the results into an archive to send in.

It compares every op with its reference on every available backend, including the vendor's operators; compares every
kernel and the LM head with plain PyTorch in time and memory; measures steps of SFT, GRPO and DPO, and short trainings,
plain and with the kernels; runs two ranks, if there are two devices (on a CPU two processes); and measures the table of
backends that `npu-kernels tune` would write. Without TRL it skips TRL's trainers, and lists them.

Each part runs in a separate process. A failure, crash or hang is recorded, and the other parts continue. After Ctrl-C
the archive has the results so far; the same command continues from there.

The archive has prove.json, report.md and tuned.json: versions and numbers, no names, no paths, no data, no environment
variables. Read report.md before you send it. The command sends nothing, and changes nothing outside of its folder.

Exit codes: 0 nothing is wrong (there may be cases where the kernels are slower), 1 something is wrong or failed, or
nothing was measured, 2 wrong usage, 130 stopped by Ctrl-C.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..support.cache import CACHE_VARIABLE
from ..support.errors import one_line
from . import _doctor, _prove_archive, _prove_report
from ._environment import ERROR
from ._process import ENDED, OUT_OF_TIME, read
from .output import FINE, FOUND, STOPPED, Output, UsageError, unwritten

__all__ = ["HELP", "NAME", "PARTS", "Part", "add_arguments", "run"]

NAME = "prove"
HELP = "measure on this machine what the project claims, and pack it into an archive to send in"
FOLDER = Path("npu-kernels-prove")
WORKER = (sys.executable, "-m", "npu_trainer_kernels.cli._prove_worker")


@dataclass(frozen=True)
class Part:
    """A part of the measurements, which runs in a separate process.

    Attributes:
        name: a key of `_prove_worker.PARTS`.
        weight: its share of the remaining time is its weight / the sum of its weight and those of the later parts.
        silence: the time limit of one item in seconds.
        quick: the number of its items with --quick; of `steps` those of one step, plain and with the flag.
    """

    name: str
    weight: float
    silence: float
    quick: int = 1


# An item may have to compile a kernel, which takes Ascend's compiler tens of seconds; a step compiles all kernels of a
# model.
PARTS = (
    Part("checks", 3, 300.0, quick=2),
    Part("kernels", 5, 300.0, quick=2),
    Part("steps", 5, 900.0, quick=2),
    Part("convergence", 4, 900.0, quick=0),
    Part("ranks", 2, 900.0, quick=0),
    Part("table", 3, 600.0),
)
_DEVICE = Part("device", 0, 300.0)
# The least time for a new process, which has to import torch before its first line.
LEAST_SECONDS = 20.0
# Launches are asynchronous, so a failure would be raised by a later operator; with these, the failing one raises it.
_BLOCKING = ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING")
# Environment variables that would change the results, in addition to ours; a launcher's are among them.
_CHANGING = ("TRITON_INTERPRET", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             *_BLOCKING)  # fmt: skip
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="that it may take (default 60)")
    parser.add_argument("--output", type=Path, default=FOLDER,
                        help=f"folder for the journal and the archive (default {FOLDER})")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="measure one or two items of most parts, to see that the command works")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="try again what was wrong, failed or absent before")


def environment_of(part: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a part's process: no variable overrides the choice of backends, and a kernel that
    fails raises instead of being replaced."""
    ours = {name for name in environment if name.startswith("NPU_KERNELS_")} - {CACHE_VARIABLE}
    found = {name: value for name, value in environment.items() if name not in (*_CHANGING, *ours)}
    found.update(NPU_KERNELS_STRICT="1", NPU_KERNELS_TUNED="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if part not in ("ranks", "device"):
        # With several visible devices the Trainer would distribute the batch over them.
        found.update({name: environment.get(name, "0").split(",")[0] for name in _VISIBLE})
    if part == "checks":
        # This part measures no times.
        found.update(dict.fromkeys(_BLOCKING, "1"))
    return found


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Inside the block SIGTERM, with which schedulers end jobs, has the effect of Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM are ignored, while the archive is written."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Proof:
    """One run of the command."""

    def __init__(
        self, journal: _prove_archive.Journal, output: Output, again: bool, quick: bool, seconds: float
    ) -> None:
        self.journal, self.output = journal, output
        self._quick = quick
        self.retried = {
            (r["part"], r["item"])
            for r in journal.records
            if again and r.get("status") in ("wrong", "failed", "absent")
        }
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def done(self, part: str) -> list[str]:
        return [item for item in self.journal.of(part) if (part, item) not in self.retried]

    def is_complete(self, part: str) -> bool:
        """Whether all items of a part are done."""
        items = self.journal.items(part)
        return bool(items) and not set(items) - set(self.done(part))

    def do(self, part: Part, seconds: float) -> None:
        """Runs processes of a part until it is complete or the time is over."""
        end = time.monotonic() + seconds
        with self.output.progress() as progress:
            while not self.is_complete(part.name):
                left = end - time.monotonic()
                if left <= 0 or not self._once(part, left, progress):
                    return

    def _once(self, part: Part, seconds: float, progress: Any) -> bool:
        """Runs one process; returns whether another process could do more items."""
        begun: str | None = None
        began = time.monotonic()
        command = (*WORKER, part.name, *([str(part.quick)] if self._quick else []))
        lines = read(command, seconds, environment=environment_of(part.name, os.environ),
                     silence=part.silence, given=json.dumps(self.done(part.name)))  # fmt: skip
        for line in lines:
            if "begins" in line:
                begun, began = line["begins"], time.monotonic()
                # The first part has one item, and finds out which device there is.
                progress.begin("finding the device" if part is _DEVICE else f"{part.name}: {begun}")
                continue
            if ENDED not in line:
                self._keep(part.name, line)
                begun = None if line.get("item") == begun else begun
                continue
            if line["why"] == OUT_OF_TIME and time.monotonic() - began < part.silence:
                return False  # the item had less time than its limit: it is not recorded as failed
            if begun is None:
                # The process failed before its first item or between two items.
                self._keep(part.name, {"items": [*self.journal.items(part.name), "start"]})
                begun = "start"
            self._keep(part.name, {"item": begun, "status": "failed", "reason": line[ENDED], "rows": []})
            return begun != "start"
        return False

    def records(self) -> int:
        """Returns the number of items with a final record."""
        return sum(len(self.done(part.name)) for part in PARTS)

    def _keep(self, part: str, line: dict[str, Any]) -> None:
        known = self.journal.of(part).get(_DEVICE.name, {}) if part == _DEVICE.name else {}
        if "chip" in known and line.get("chip", known["chip"]) != known["chip"]:
            raise UsageError(f"--output: what is there was measured on {known['chip']}, this is {line['chip']}; "
                             "give it another folder")  # fmt: skip
        self.journal.add({"part": part, **line})
        self.retried.discard((part, line.get("item", "")))


def _installation(output: Output) -> dict[str, Any]:
    """Returns the findings of `doctor` without paths."""
    here = _doctor.look(output)
    return {
        "versions": here.versions,
        "broken": here.broken,
        "launcher": {name: found is not None for name, found in here.launcher.items()},
        "findings": [asdict(finding) for finding in here.findings],
    }


def _same_machine(journal: _prove_archive.Journal, here: dict[str, Any]) -> None:
    """Raises `UsageError` if a folder's records are of other versions, which must not be in the same archive."""
    before = next((r["environment"]["versions"] for r in journal.records if "environment" in r), here["versions"])
    changed = [f"{name} {before.get(name)} -> {now}" for name, now in here["versions"].items()
               if before.get(name) != now]  # fmt: skip
    if changed:
        raise UsageError(f"--output: what is there was measured with other versions ({', '.join(changed)}); "
                         "give it another folder")  # fmt: skip


def _open(folder: Path) -> _prove_archive.Journal:
    try:
        return _prove_archive.Journal(folder)
    except BlockingIOError as error:
        raise UsageError(f"--output: another npu-kernels prove is writing to {folder}; wait for it, or give it "
                         "another folder") from error  # fmt: skip
    except OSError as error:
        raise UsageError(f"--output: {folder} cannot be written: {error.strerror or error}; give it another "
                         "folder") from error  # fmt: skip


def run(args: argparse.Namespace, output: Output) -> int:
    if not 0 < args.minutes <= 24 * 60:
        raise UsageError(f"--minutes must be positive, and at most a day; got {args.minutes:g}")
    journal = _open(args.output)
    stopped, code = False, FINE
    try:
        with _ended_like_ctrl_c():
            try:
                _measure(journal, args, output)
            except KeyboardInterrupt:
                stopped = True
            except OSError as error:
                # The disk is full, or no process can be started; perhaps the existing results can still be packed.
                output.text(f"It cannot go on: {one_line(error)}; mend that, and the same command goes on from here",
                            style="red")  # fmt: skip
                code = FOUND
            with _undisturbed():
                return max(code, _finish(journal, args, stopped, output))
    finally:
        journal.close()


def _measure(journal: _prove_archive.Journal, args: argparse.Namespace, output: Output) -> None:
    proof = _Proof(journal, output, args.again, args.quick, 60 * args.minutes)
    if any(record.get("quick", args.quick) is not args.quick for record in journal.records):
        raise UsageError(f"--output: what is there was measured {'without' if args.quick else 'with'} --quick; give it "
                         "another folder")  # fmt: skip
    here = _installation(output)
    _same_machine(journal, here)
    journal.add({"environment": here, "quick": args.quick})
    if here["versions"]["torch"] is None or "torch" in here["broken"]:
        return  # the findings have the reason
    # The device is checked in every run, since several machines may share a folder.
    proof.retried.add((_DEVICE.name, _DEVICE.name))
    proof.do(_DEVICE, min(_DEVICE.silence, proof.left()))
    device = journal.of(_DEVICE.name).get(_DEVICE.name, {})
    if "meta" in device:
        name, kind = (device["meta"]["device"][key] for key in ("name", "kind"))
        output.text(f"Device: {name} ({kind})")
        line = {"device": device["meta"]["device"], **{name: device[name] for name in ("sized_as", "without_npu")}}
        here["findings"] += [asdict(finding) for finding in _doctor.device_findings(line, here["versions"])]
        journal.add({"environment": here})
    before = -1
    # Until all is done or a round adds nothing: the time that a part leaves is used by the others.
    while proof.records() > before and proof.left() > LEAST_SECONDS:
        before = proof.records()
        todo = [part for part in _parts(args.quick) if not proof.is_complete(part.name)]
        for number, part in enumerate(todo):
            share = part.weight / sum(later.weight for later in todo[number:])
            proof.do(part, min(proof.left(), max(LEAST_SECONDS, proof.left() * share)))


def _parts(quick: bool) -> list[Part]:
    """Returns the parts that are measured."""
    return [part for part in PARTS if part.quick or not quick]


def _finish(journal: _prove_archive.Journal, args: argparse.Namespace, stopped: bool, output: Output) -> int:
    """Writes and shows the results; returns the exit code."""
    folder: Path = args.output
    command = f"npu-kernels {NAME}{' --quick' if args.quick else ''}"
    found = _prove_archive.document(journal, [part.name for part in _parts(args.quick)], os.environ, command)
    report = _prove_report.text(found)
    try:
        path = _prove_archive.write(folder, found, report)
    except OSError as error:
        output.text(report)
        problem = f"The archive could not be written: {unwritten(error)}, and the same command packs what is measured"
        output.text(problem, style="red")
        output.result({**found, "archive": None, "problem": problem, "stopped": stopped})
        return FOUND
    output.text(f"\n{report}")
    left = sum(len(part["left"]) or (not part["begun"]) for part in found["parts"].values())
    if stopped:
        output.text("Stopped; the same command goes on from here.", style="yellow")
    elif left:
        output.text("Not all was done in time; the same command goes on from here.", style="yellow")
    wrong = bool(found["failures"]) or any(f["level"] == ERROR for f in found["environment"].get("findings", []))
    if not (wrong or stopped or any(part["done"] for part in found["parts"].values())):
        output.text(f"Nothing was measured: --minutes must be more than {args.minutes:g} here.", style="red")
        wrong = True
    what = "To send in, after a look at the report in it" if not args.quick else "A try, and nothing to send in"
    output.paragraph(f"{what}: {path}", 0)
    lost, unused = _prove_report.losses(found)
    output.result({**found, "archive": str(path), "losses": lost, "losses_unused": unused, "stopped": stopped})
    return STOPPED if stopped else FOUND if wrong else FINE
