"""Shows the installation and the device, packages that do not work together, the backend of each op with the reason,
and whether every op is correct and fast here.

The command checks torch, torch_npu, triton, transformers and TRL in other processes before it imports them, and
compares each op forward and backward with its reference in another process. It ends with a remedy for each finding.

Exit codes: 0 nothing is broken (warnings may have been printed), 1 something is broken, 2 wrong usage.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..evidence.table import FORM_NAMES, op_of
from . import _launcher
from ._environment import ERROR, WARNING, Finding, broken_imports, findings, versions
from ._lost_gains import lost_gains
from ._process import ENDED, OUT_OF_TIME, read
from .output import FINE, FOUND, Output, UsageError, new_table

__all__ = ["HELP", "NAME", "Installation", "add_arguments", "device_findings", "look", "run", "self_check"]

NAME = "doctor"
HELP = "look at the installation, and run every op against its reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-self-check", action="store_true", help="look at the installation alone")
    parser.add_argument("--no-times", action="store_true", help="check the ops, but do not time them")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds that the ops may take in all (default 600)"
    )


def _child(ops: list[str], times: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """Returns the lines of one self-check process; if it did not finish, the last one has `ended`."""
    command = [sys.executable, "-m", "npu_trainer_kernels.cli._selfcheck", "--ops", ",".join(ops)]
    command += [] if times else ["--no-times"]
    # In strict mode a kernel that fails raises, and is not replaced.
    return read(command, seconds, environment={**os.environ, "NPU_KERNELS_STRICT": "1"})


def self_check(times: bool = True, seconds: float = 600.0) -> Iterator[dict[str, Any]]:
    """Returns the lines that `_selfcheck` writes, and for every op that it did not finish a line that says why.

    If the process ends before it is done with an op, wherever that is, the op's line has the reason as `problem`, and a
    new process checks the remaining ops. If the time is over, the remaining ops have the reason as `unchecked`. A
    process that ends before it has described the device, or badly after the last op, is a line with `ended`.
    """
    left, end, described = list(FORM_NAMES), time.monotonic() + seconds, False
    while left:
        within: dict[str, Any] = {}
        ended: dict[str, Any] = {ENDED: None, "why": None}
        for line in _child(left, times, max(0.0, end - time.monotonic())):
            if ENDED in line:
                ended = line
                continue
            described = described or "device" in line
            if "times" in line:
                left.remove(line["op"])
            within = line if line.get("begins") else {} if "times" in line else within
            yield line
        reason = ended[ENDED] or ("its process ended without a reason before it was done" if left else None)
        if not described or not left:
            yield from [{ENDED: reason}] if reason else []
            return
        op = left.pop(0)
        yield {"op": op, "backend_op": op_of(op), **within, "begins": False, "times": None, "problem": reason}
        if ended["why"] == OUT_OF_TIME:
            yield from ({"op": op, "unchecked": f"there was no time for it in {seconds:.0f} s"} for op in left)
            return


def device_findings(line: dict[str, Any], installed: dict[str, str | None]) -> list[Finding]:
    kind, found = line["device"]["kind"], []
    if line["without_npu"] is not None:
        found.append(Finding(
            WARNING, "no-npu", line["without_npu"],
            "see what `npu-smi info` says, and whether ASCEND_RT_VISIBLE_DEVICES hides it",
        ))  # fmt: skip
    name, like = line["device"]["name"], line["sized_as"]
    if kind == "npu" and like != name:
        found.append(Finding(
            WARNING, "chip", f"{name} is no chip that we know: tiles are sized as for {like}",
            "please report the name; npu-kernels tune --model YOUR_MODEL tries others",
        ))  # fmt: skip
    wanted = {"npu": "triton-ascend", "cuda": "triton"}.get(kind)
    if wanted is None or installed[wanted]:
        return found
    # triton-ascend imports pybind11, but does not list it as a requirement.
    install = f"pip install {wanted}{' pybind11' if kind == 'npu' else ''}"
    other = next((name for name in ("triton", "triton-ascend") if installed[name]), None)
    if other is None:
        found.append(Finding(WARNING, "no-triton", f"{wanted} is not installed: every op runs in torch", install))
    else:
        found.append(Finding(
            ERROR, "other-triton", f"{other} is installed in the place of {wanted}, and launches no kernel here",
            f"pip uninstall -y {other}, then {install}",
        ))  # fmt: skip
    return found


def _check_findings(line: dict[str, Any]) -> list[Finding]:
    op, found = line.get("op"), []
    if line.get("problem") is not None:
        found.append(Finding(
            ERROR, "self-check", f"{op}, {line.get('dtype', 'between two checks')}: {line['problem']}",
            f"train with NPU_KERNELS_BACKEND={line['backend_op']}=torch meanwhile, and report it with this output",
        ))  # fmt: skip
    if "unchecked" in line:
        found.append(Finding(
            WARNING, "unchecked", f"{op} was not checked: {line['unchecked']}",
            "npu-kernels doctor --timeout gives the ops more seconds; any other reason is a fault of this package",
        ))  # fmt: skip
    times = line.get("times")
    if times is not None and times["slower"] and not line["plain"]:
        ours, plain = times["ours"]["median"], times["plain"]["median"]
        found.append(Finding(
            WARNING, "slow", f"{op}, {times['dtype']}, {times['shape']}: {ours:.3g} ms, plain PyTorch {plain:.3g} ms",
            "npu-kernels tune --model YOUR_MODEL measures at your shapes, and uses what is fastest there",
        ))  # fmt: skip
    return found


def _found_table(title: str, found: dict[str, str | None]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for name, what in found.items():
        table.add_row(name, what or "-")
    return table


def _ops_table(lines: list[dict[str, Any]]) -> Table:
    table = new_table()
    timed = any(line.get("times") for line in lines)
    for column in ("op", "backend", "right", *(("ours", "plain") if timed else ())):
        table.add_column(column, justify="right" if column in ("ours", "plain") else "left")
    for op in FORM_NAMES:
        of_op = [line for line in lines if line.get("op") == op]
        if not of_op:
            continue
        problems = [line for line in of_op if line.get("problem") is not None]
        times = next((line["times"] for line in of_op if line.get("times")), None)
        right = "NO" if problems else "not checked" if any("unchecked" in line for line in of_op) else "yes"
        milliseconds = [f"{times[who]['median']:.3g} ms" for who in ("ours", "plain")] if times else ["", ""]
        table.add_row(
            op, next((line["backend"] for line in of_op if "backend" in line), ""),
            right, *(milliseconds if timed else ()),
        )  # fmt: skip
    return table


def _show_ops(lines: list[dict[str, Any]], output: Output) -> None:
    """Shows the table of ops, the shapes that were timed, and the reason for each backend."""
    output.text("\nOps, forward and backward")
    output.show(_ops_table(lines))
    shapes = {line["op"]: f"{line['times']['shape']} {line['times']['dtype']}" for line in lines if line.get("times")}
    if shapes:
        output.text("\nTimed at")
        for shape in dict.fromkeys(shapes.values()):
            output.paragraph(f"{', '.join(op for op, of_op in shapes.items() if of_op == shape)}: {shape}")
    output.text("\nWhy these backends")
    for reason, ops in _why(lines).items():
        output.paragraph(f"{', '.join(ops)}: {reason}")


def _why(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the reasons for backends, the reasons for leaving ops out, and local measurements, each with its ops."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        left_out = f"left out of models unless asked for: {line['plain']}" if line.get("plain") else None
        by_table = f"{line['backend']}: {line['reason']}" if "reason" in line else None
        for reason in (by_table, left_out, *line.get("measured", ())):
            if reason is not None and line["op"] not in reasons.setdefault(reason, []):
                reasons[reason].append(line["op"])
    return reasons


def _graphs(graphs: dict[str, Any] | None) -> str:
    if graphs is None:
        return "impossible, this version of the device's package has no graphs"
    return f"possible, by {graphs['class']}" + ("" if graphs["most"] is None else f", at most {graphs['most']}")


def _run_self_check(args: argparse.Namespace, output: Output) -> list[dict[str, Any]]:
    lines = []
    with output.progress(len(FORM_NAMES)) as progress:
        for line in self_check(not args.no_times, args.timeout):
            lines.append(line)
            if line.get("begins"):
                progress.begin(f"self-check: {line['op']}, {line['dtype']}")
            if "times" in line:
                progress.advance()
    return lines


def _nothing_found(lines: list[dict[str, Any]]) -> str:
    """Returns the message that the checks passed, with their number."""
    ops = len({line["op"] for line in lines if "op" in line})
    checked = f", and {ops} ops against their references" if ops > 1 else ", and 1 op against its reference"
    return f"Everything checked passed: the installation{checked if ops else '; the ops were not checked'}."


@dataclass(frozen=True)
class Installation:
    """The installed packages, drivers and tools, and their problems.

    Attributes:
        versions: versions by package, driver and toolkit.
        broken: the packages that cannot be imported, with the errors.
        launcher: the paths of the tools and headers with which triton-ascend launches kernels; empty if torch_npu or
            triton-ascend is not installed.
        findings: the problems.
    """

    versions: dict[str, str | None]
    broken: dict[str, str]
    launcher: dict[str, str | None]
    findings: list[Finding]


def look(output: Output) -> Installation:
    """Examines the installation without importing any of its packages."""
    installed = versions()
    with output.progress() as progress:
        progress.begin("importing each package in a process of its own")
        broken = broken_imports(installed)
    found = findings(installed, broken)
    launcher: dict[str, str | None] = {}
    if installed["torch_npu"] and installed["triton-ascend"]:
        needs = _launcher.needs()
        launcher = {need.name: need.found for need in needs}
        found += _launcher.findings(needs, installed)
    return Installation(installed, broken, launcher, found)


def run(args: argparse.Namespace, output: Output) -> int:
    if not args.timeout > 0:
        raise UsageError(f"--timeout must be positive; got {args.timeout:g}")
    here = look(output)
    installed, found = here.versions, here.findings
    output.show(_found_table("Versions", installed))
    if here.launcher:
        output.show(_found_table("What triton-ascend launches kernels with", here.launcher))
    found += lost_gains(installed, here.broken, args.timeout, runs=not args.no_self_check)
    lines: list[dict[str, Any]] = []
    device: dict[str, Any] | None = None
    if not args.no_self_check and installed["torch"] and "torch" not in here.broken:
        lines = _run_self_check(args, output)
        device = next((line["device"] for line in lines if "device" in line), None)
        for line in lines:
            if ENDED in line:
                what = "cannot start" if device is None else "ended badly after the last op"
                found.append(Finding(ERROR, "self-check", f"the self-check {what}: {line[ENDED]}",
                                     "mend what is named above; else report it with this output"))  # fmt: skip
            found += device_findings(line, installed) if "device" in line else _check_findings(line)
    if device is not None:
        cores = f", {device['vector_cores']} vector cores" if device["kind"] == "npu" else ""
        output.text(f"\nDevice: {device['name']} ({device['kind']}{cores})")
        if device["kind"] != "cpu":
            output.text(f"Captured bodies (--capture): {_graphs(device['graphs'])}")
        _show_ops(lines, output)
    found = list(dict.fromkeys(found))
    output.text("\nFindings" if found else f"\n{_nothing_found(lines)}", style="" if found else "green")
    for number, finding in enumerate(found, 1):
        output.text(f"{number}. {finding.level}: {finding.what}\n   -> {finding.do}",
                    style="red" if finding.level == ERROR else "yellow")  # fmt: skip
    output.result({
        "versions": installed,
        "broken_imports": here.broken,
        "launcher": here.launcher,
        "device": device,
        "ops": [line for line in lines if "op" in line and not line.get("begins")],
        "backends": {
            line["op"]: {"backend": line["backend"], "reason": line["reason"]} for line in lines if "reason" in line
        },
        "findings": [asdict(finding) for finding in found],
    })  # fmt: skip
    return FOUND if any(finding.level == ERROR for finding in found) else FINE
