"""Compiles every kernel at a model's shapes with the Ascend compiler, for a chip that need not be installed, and shows
the plan of its on-chip memory.

The command needs the extra `ascend` (`pip install '.[ascend]'` in a checkout) in a separate environment (triton-ascend
and triton exclude each other), and no NPU. It measures no times.

Exit codes: 0 every kernel compiles and keeps the rules, 1 one does not, 2 wrong usage or the extra is missing.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..options import did_you_mean
from ._model import DTYPES, config_of, shapes_of
from ._model import HELP as MODEL_HELP
from .output import FINE, FOUND, Output, UsageError, new_table

if TYPE_CHECKING:
    from ..ascend import gate

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "compile"
HELP = "compile every kernel at a model's shapes for an Ascend chip that is not there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--target", default="Ascend910B4", metavar="CHIP", help="default Ascend910B4")
    target.add_argument("--all-targets", action="store_true", help="every chip that the kernels are tuned for")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default bf16)")
    parser.add_argument("--workers", type=int, default=2, help="compilers at once (default 2)")


def _ready() -> None:
    """Raises `UsageError` if the compiler is missing or kernels are being interpreted."""
    from ..ascend import toolchain
    from ..support import triton

    try:
        toolchain.versions()
    except triton.MissingDependencyError as error:
        raise UsageError(str(error)) from error
    if triton.INTERPRETED:
        raise UsageError("TRITON_INTERPRET is set: what is interpreted is not compiled; unset it")


def run(args: argparse.Namespace, output: Output) -> int:
    if args.workers < 1:
        raise UsageError(f"--workers must be at least 1; got {args.workers}")
    from ..device import ASCEND_CHIPS, chip_spec

    if args.target not in ASCEND_CHIPS:
        close = did_you_mean([args.target], list(ASCEND_CHIPS))
        raise UsageError(f"--target must be one of {', '.join(ASCEND_CHIPS)}; got {args.target!r}{close}")
    _ready()
    from ..ascend import cases as ascend_cases
    from ..ascend import gate
    from ..descriptions import GATE
    from ..patching.modules import rotations_of

    shapes = shapes_of(args.model)
    chips = gate.CHIPS if args.all_targets else (args.target,)
    cases = ascend_cases.model_cases(shapes, args.dtype, [form.options for form in rotations_of(config_of(args.model))])
    ops = {case.op for case in cases}
    left_out = [entry.op for entry in GATE if args.dtype in entry.dtypes and entry.op not in ops]
    specs = [chip_spec(chip) for chip in chips]
    # The op applies the same rule to a call, which the model's own code then computes.
    reasons = {case.op: reason for case in cases for spec in specs
               if case.unserved is not None and (reason := case.unserved(spec)) is not None}  # fmt: skip
    cases = [case for case in cases if case.op not in reasons]
    rows: list[gate.GateRow] = []
    with output.progress(len(cases)) as progress:
        for case in cases:
            progress.begin(f"compiling {case.op}, {case.shape}")
            rows += gate.collect([case], chips, args.workers)
            progress.advance()
    output.show(_table(rows))
    broken = [row for row in rows if row.broken]
    for row in broken:
        output.text(f"{row.op} {row.kernel} {row.chip}: {'; '.join(row.broken)}", style="red")
    if left_out:
        output.text(f"Left out, as the model has no such size or rotates otherwise: {'; '.join(left_out)}")
    for op, reason in reasons.items():
        output.text(f"Left to the model's own code: {op}: {reason}")
    output.text(f"{len(rows) - len(broken)} of {len(rows)} pass")
    output.result({
        "model": args.model,
        "shapes": asdict(shapes),
        "dtype": args.dtype,
        "targets": list(chips),
        "passed": not broken,
        "left_out": left_out,
        "left_to_the_model": reasons,
        "kernels": [_as_json(row) for row in rows],
    })  # fmt: skip
    return FOUND if broken else FINE


def _as_json(row: "gate.GateRow") -> dict[str, Any]:
    plan = row.plan
    return {
        "op": row.op,
        "kernel": row.kernel,
        "shape": row.shape,
        "target": row.chip,
        "buffer_used_bytes": plan.buffer_used if plan else None,
        "buffer_bytes": plan.buffer_size if plan else None,
        "double_buffered": plan.double_buffered if plan else None,
        "fixed_waits": plan.fixed_waits if plan else None,
        "vector_scalar_switches": plan.vector_scalar_switches if plan else None,
        "in_blocks": row.in_blocks,
        "broken": list(row.broken),
    }


def _table(rows: "list[gate.GateRow]") -> Table:
    """Chips with the same plan share a line."""
    table = new_table()
    for column in (
        "op",
        "kernel",
        "shape",
        "targets",
        "buffer",
        "double-buffered",
        "fixed waits",
        "switches",
        "verdict",
    ):
        table.add_column(column)
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        facts = _as_json(row)
        used, size = facts["buffer_used_bytes"], facts["buffer_bytes"]
        buffer = "" if used is None else f"{used / 1024:.1f} of {size / 1024:.0f} KiB"
        buffered = {None: "", True: "yes", False: "no"}[facts["double_buffered"]]
        fixed, switches = (
            str(facts[name] or 0) if row.plan else "" for name in ("fixed_waits", "vector_scalar_switches")
        )
        verdict = "FAILS" if row.broken else "passes"
        line = (row.op, row.kernel, row.shape, buffer, buffered, fixed, switches, verdict)
        lines.setdefault(line, []).append(row.chip.removeprefix("Ascend"))
    for (op, kernel, shape, *rest), chips in lines.items():
        table.add_row(op, kernel, shape, ", ".join(dict.fromkeys(chips)), *rest)
    return table
