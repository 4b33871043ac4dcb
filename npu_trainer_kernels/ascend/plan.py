"""Runs the Ascend compiler's memory planner on a kernel, and checks the plan against the project's rules.

`plan` runs `bishengir-compile` up to its closed code generator and reads the planned IR: where every buffer lies, which
transfers alternate between two buffers, which loops remain, where the vector unit and the scalar unit wait for each
other. `violations` checks these facts.

Work is counted per *row body*, the code that is repeated for each row or tile of rows: the body of an outermost loop
that starts at the program's index (in a persistent kernel), or the whole program if there is no such loop. A loop of
constant length counts as often as it runs, a loop of runtime length (over the blocks of a long row) counts once, both
sides of an `if` count. If there are several row bodies (full tiles, then the rest), the worst counts.

Accesses to single elements are not always wrong: a row may need its target's id, or its own scale. The rule therefore
allows one access to a single element for each `BYTES_PER_ELEMENT_ACCESS` bytes that the same row body streams. It
allows a number per row of 512 bytes or more, and never a number per element.
"""

import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import toolchain
from .lower import Specialization, lower
from .toolchain import ToolchainError
from .walk import BYTES_PER_ELEMENT_ACCESS, DMA_BLOCK_BYTES, Walk

__all__ = [
    "BYTES_PER_ELEMENT_ACCESS",
    "MAX_SWITCHES",
    "MemoryPlan",
    "delays",
    "plan",
    "plan_lowered",
    "planned",
    "planned_code",
    "read_plan",
    "target_facts",
    "violations",
]

MAX_SWITCHES = 6


@dataclass(frozen=True)
class MemoryPlan:
    """The facts of a compiled kernel. "Per row" means per row body, see the module.

    Attributes:
        kernel: the kernel's name.
        chip: the chip that it was compiled for.
        fits: whether the plan fits the unified buffer. If not, only `buffer_used` and `buffer_size` are meaningful.
        buffer_used: bytes of the unified buffer that the plan uses; if it does not fit, those that it would need.
        buffer_size: bytes of the unified buffer that the compiler plans with.
        double_buffered: whether transfers inside loops alternate between two buffers (also True if no loop transfers
            tiles, or loops only store data that was computed before them).
        multi_buffer_dropped: whether the compiler dropped double buffering to make the plan fit.
        single_buffers: tile transfers inside loops whose buffer does not alternate.
        loads_after_stores: waits of loads for earlier stores in loops that stream tiles. Each of them stops the overlap
            that double buffering is for; reading and writing through one argument causes them.
        fixed_waits: waits of loads for the vector unit by a fixed event, in innermost loops that load whole tiles (in
            all loops that load, if none loads whole tiles: a tail's loop runs once). With them the next tile is not
            loaded while this one is computed, although there are two buffers.
        element_loops: loops over single elements that repeat more often than the streamed bytes allow.
        element_transfers: HBM accesses of less than 32 bytes per row, beyond those that the streamed bytes allow.
        atomics: atomic updates of HBM in the program text.
        vector_scalar_switches: waits between the vector and the scalar unit per row.
        block_switches: those of them in loops of runtime length, which repeat for each block of the row.
        tiny_vector_ops: vector instructions on 32 bytes or less per row.
        vector_bytes: bytes of the widest operand of each vector operation per row: divided by `bytes_streamed`, the
            vector unit's work for each byte that is transferred.
        bytes_streamed: bytes in transfers of 32 bytes and more per row (masked tails count in full).
        largest_transfer: bytes of the largest transfer.
        seconds: the seconds that the compiler took when it ran (not part of equality).
        diagnostics: the compiler's remarks and errors.
    """

    kernel: str
    chip: str
    fits: bool
    buffer_used: int
    buffer_size: int
    double_buffered: bool = False
    multi_buffer_dropped: bool = False
    single_buffers: int = 0
    loads_after_stores: int = 0
    fixed_waits: int = 0
    element_loops: int = 0
    element_transfers: int = 0
    atomics: int = 0
    vector_scalar_switches: int = 0
    block_switches: int = 0
    tiny_vector_ops: int = 0
    vector_bytes: int = 0
    bytes_streamed: int = 0
    largest_transfer: int = 0
    seconds: float = field(default=0.0, compare=False)
    diagnostics: tuple[str, ...] = ()


def violations(plan: MemoryPlan) -> list[str]:
    """Returns the rules that a plan breaks, each as `"<rule>: <fact>"`; empty for a kernel that passes.

    The rules: `buffer overflow`, `double buffering lost`, `element loop`, `element transfers`, `atomics`,
    `vector/scalar switches`.
    """
    if not plan.fits:
        return [f"buffer overflow: needs {plan.buffer_used} bytes of {plan.buffer_size}"]
    broken = []
    if plan.multi_buffer_dropped:
        broken.append("double buffering lost: the compiler dropped it to make the buffers fit")
    elif not plan.double_buffered:
        broken.append("double buffering lost: no transfer inside a loop rotates between two buffers")
    elif plan.loads_after_stores:
        broken.append(f"double buffering lost: loads wait for earlier stores, {plan.loads_after_stores} times per row")
    if plan.element_loops:
        broken.append(f"element loop: {plan.element_loops} loops work on one element at a time")
    if plan.element_transfers:
        broken.append(
            f"element transfers: {plan.element_transfers} HBM accesses of under {DMA_BLOCK_BYTES} bytes per row "
            f"beyond one for each {BYTES_PER_ELEMENT_ACCESS} bytes streamed"
        )
    if plan.atomics:
        broken.append(f"atomics: {plan.atomics} atomic updates of HBM")
    if plan.vector_scalar_switches > MAX_SWITCHES:
        broken.append(f"vector/scalar switches: {plan.vector_scalar_switches} per row, at most {MAX_SWITCHES}")
    elif plan.block_switches:
        broken.append(f"vector/scalar switches: {plan.block_switches} for each block of a row, none allowed there")
    return broken


def delays(plan: MemoryPlan) -> list[str]:
    """Returns the broken rule about waiting that a plan shows, as `violations` does: `fixed waits`. A kernel that
    breaks it is correct but slow."""
    if plan.fits and plan.fixed_waits:
        return [f"fixed waits: {plan.fixed_waits} of the next tile's loads for the vector unit"]
    return []


# -------------------------------------------------------------------------------------------------- running the planner
def plan(spec: Specialization) -> MemoryPlan:
    """Plans a kernel for its chip. The compiler's output is cached on disk by content.

    Raises:
        MissingDependencyError: a tool is not installed.
        ToolchainError: the compiler fails for another reason than the size of the buffers.
    """
    return plan_lowered(spec.name, lower(spec), spec.chip, multi_buffer=bool(spec.options.get("multibuffer", True)))


def plan_lowered(kernel: str, lowered: str, chip: str, *, multi_buffer: bool = True) -> MemoryPlan:
    """Plans a lowered kernel; needs no Triton, so it can run on any thread. Raises as `plan`."""
    compiled = _compiled(kernel, lowered, chip, multi_buffer)
    facts = read_plan(kernel, chip, lowered, compiled["planned"], compiled["log"])
    return replace(facts, seconds=compiled["seconds"])


def target_facts(kernel: str, lowered: str, chip: str) -> str:
    """Returns the facts about a chip that a plan depends on: the compiler's text about the sizes of memories in the
    planned IR of a kernel. It omits the numbers of cores, which change nothing else in the planned IR (a test checks
    this on `planned_code` of every kernel)."""
    found = _TARGET.search(_compiled(kernel, lowered, chip, True)["planned"])
    if found is None:
        raise ToolchainError(kernel, f"description of {chip}", ["the planned IR has no target_device_spec"])
    return _CORE_COUNTS.sub("", found[1])


def planned(kernel: str, lowered: str, chip: str, *, multi_buffer: bool = True) -> str:
    """Returns the planned IR. Raises as `plan`, and `ToolchainError` if no plan fits."""
    text: str = _compiled(kernel, lowered, chip, multi_buffer)["planned"]
    if not text:
        raise ToolchainError(kernel, f"plan on-chip memory for {chip}", ["no plan fits"])
    return text


def planned_code(kernel: str, lowered: str, chip: str) -> str:
    """Returns the planned IR without the compiler's description of the chip."""
    return _TARGET.sub("", _compiled(kernel, lowered, chip, True)["planned"])


def _compiled(kernel: str, lowered: str, chip: str, multi_buffer: bool) -> dict[str, Any]:
    """Returns the planned IR, the compiler's log and its seconds; runs the compiler if they are not cached."""
    flags = (
        f"--target={chip}",
        f"--enable-auto-multi-buffer={str(multi_buffer).lower()}",
        "--enable-auto-bind-sub-block=true",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
    )
    key = toolchain.digest(toolchain.versions(), lowered, *flags)
    stored = toolchain.cached(f"planned/{kernel}-{key}.z", partial(_compile_to, kernel, lowered, chip, flags))
    compiled: dict[str, Any] = json.loads(zlib.decompress(stored.read_bytes()))
    return compiled


def without_mix_mode(lowered: str) -> str:
    """Removes the attribute which says that triton-ascend has already split the kernel; it has not on this path."""
    return re.sub(r', mix_mode = "\w+"', "", lowered)


def _compile_to(kernel: str, lowered: str, chip: str, flags: tuple[str, ...], path: Path) -> None:
    stage = f"plan on-chip memory for {chip}"
    tool = toolchain.bishengir("bishengir-compile", chip)
    with tempfile.TemporaryDirectory() as folder:
        source, planned = Path(folder, "kernel.mlir"), Path(folder, "planned.mlir")
        source.write_text(without_mix_mode(lowered))
        search = f"{toolchain.stand_in_hivmc()}:{os.environ.get('PATH', '')}"
        command: list[str | Path] = [tool, source, *flags, "-o", Path(folder, "kernel.o")]
        started = time.perf_counter()
        # The stand-in for the code generator writes no object file, so success shows in the planned IR, not in the exit
        # status.
        done = toolchain.invoke(kernel, stage, command, check=False, PATH=search, NPU_KERNELS_PLANNED_IR=str(planned))
        seconds = round(time.perf_counter() - started, 2)
        log = (done.stderr + done.stdout).replace(folder, "")
        if not planned.exists() and not _REQUIRED.search(log):
            raise ToolchainError(kernel, stage, toolchain.telling_lines(log))
        compiled = {"seconds": seconds, "log": log, "planned": planned.read_text() if planned.exists() else ""}
        path.write_bytes(zlib.compress(json.dumps(compiled).encode()))


# ----------------------------------------------------------------------------------------------------- reading the plan
_REQUIRED = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits available")
_UB_SIZE = re.compile(r'"UB_SIZE", (\d+) : i32')
_TARGET = re.compile(r"#hacc\.target_device_spec<(.*?>)>")
_CORE_COUNTS = re.compile(r'#dlti\.dl_entry<"\w+_CORE_COUNT", \d+ : i32>,? ?')
_DROPPED = "set enable-auto-multi-buffer to false"


def read_plan(kernel: str, chip: str, lowered: str, planned: str, log: str) -> MemoryPlan:
    """Reads the facts in a planned IR (empty: the compiler found no plan that fits) and in the compiler's log."""
    remarks = tuple(line for line in toolchain.telling_lines(log) if _INTERESTING.search(line))
    required = _REQUIRED.search(log)
    if not planned:
        assert required is not None, "an IR that was not planned comes with what it requires"
        return MemoryPlan(kernel, chip, False, int(required[1]) // 8, int(required[2]) // 8, diagnostics=remarks)
    size = _UB_SIZE.search(planned)
    walk = Walk(planned)
    worst = walk.row_body()
    dropped = _DROPPED in log
    # A loop that only stores data computed before it, such as zeros, needs no second buffer.
    idle = walk.loop_transfers == 0 or not walk.fills_in_loops
    rotates = walk.single_buffers < walk.loop_transfers or idle
    paid = worst.streamed // BYTES_PER_ELEMENT_ACCESS
    return MemoryPlan(
        kernel,
        chip,
        fits=True,
        buffer_used=walk.buffer_end,
        buffer_size=int(size[1]) // 8 if size else 0,
        double_buffered=not dropped and rotates,
        multi_buffer_dropped=dropped,
        single_buffers=walk.single_buffers,
        loads_after_stores=worst.loads_after_stores,
        fixed_waits=walk.fixed_waits(),
        element_loops=sum(1 for runs in worst.element_loops if runs is None or runs > paid),
        element_transfers=max(0, worst.small_accesses - paid),
        atomics=lowered.count("GenericAtomicRMW"),
        vector_scalar_switches=worst.switches,
        block_switches=worst.block_switches,
        tiny_vector_ops=worst.tiny_vector_ops,
        vector_bytes=worst.vector_bytes,
        bytes_streamed=worst.streamed,
        largest_transfer=walk.largest_transfer,
        diagnostics=remarks,
    )


_INTERESTING = re.compile(r"\[NOTE\]|overflow")


def summary(plans: Iterable[MemoryPlan]) -> str:
    """Returns a readable line for each plan."""
    lines = []
    for p in plans:
        share = f"{p.buffer_used}/{p.buffer_size} bytes ({100 * p.buffer_used // max(1, p.buffer_size)}%)"
        lines.append(f"{p.kernel} on {p.chip}: {share}, {'; '.join(violations(p)) or 'passes'}")
    return "\n".join(lines)
