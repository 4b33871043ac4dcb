"""What the Ascend compiler plans for a kernel: its on-chip memory and how its units have to wait for each other.

`plan` runs the real `bishengir-compile` up to its closed code generator and reads the planned IR: where every buffer
lies, which transfers rotate between two buffers, which loops are left, where the vector unit and the scalar unit wait
for each other. `violations` holds these facts against the project's rules.

What is counted, and per what. A *row body* is what is repeated for each row or tile of rows: the body of an outermost
loop that starts at the program's index (a persistent kernel), or the whole program where there is none. Work is counted
per row body: a loop of constant length counts as often as it runs, a loop of runtime length (over the blocks of a long
row) counts once, both sides of an `if` count. Of several row bodies (full tiles, then the rest) the worst counts.

Touching single elements is not always wrong: a row may need its target's id, or its own scale. The rule is therefore a
price: one access to a single element is paid for by `BYTES_PER_ELEMENT_ACCESS` bytes that the same row body streams.
A per-row number next to a row of 512 and more bytes is free by it; a number per element never is.
"""

import json
import math
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import toolchain
from .lower import Specialization, lower
from .toolchain import ToolchainError

__all__ = [
    "BYTES_PER_ELEMENT_ACCESS",
    "MAX_SWITCHES",
    "MemoryPlan",
    "memory_of",
    "plan",
    "plan_lowered",
    "planned",
    "planned_code",
    "read_plan",
    "target_facts",
    "violations",
]

MAX_SWITCHES = 6
# A transfer shorter than one 32-byte block costs the chip as much as one of 512 bytes, its unit of full-speed transfer.
BYTES_PER_ELEMENT_ACCESS = 512
DMA_BLOCK_BYTES = 32


@dataclass(frozen=True)
class MemoryPlan:
    """Facts of one compiled kernel. "Per row" means per row body, see the module.

    Attributes:
        kernel: its name.
        chip: the chip it was compiled for.
        fits: the plan fits the unified buffer (False: nothing below but the buffer is known).
        buffer_used: bytes of the unified buffer that the plan uses; those it would need where it does not fit.
        buffer_size: bytes of the unified buffer that the compiler plans with.
        double_buffered: transfers inside loops rotate between two buffers (True where no loop transfers anything).
        multi_buffer_dropped: the compiler gave double buffering up to make the plan fit.
        single_buffers: tile transfers inside loops whose buffer does not rotate.
        loads_after_stores: waits of loads for earlier stores in loops that stream tiles. Each of them stops the overlap
            that double buffering is for; reading and writing through one argument causes them.
        fixed_waits: waits of loads for the vector unit by a fixed event, in innermost loops that load whole tiles (in
            all of them, where none loads whole ones: a tail's loop runs once). Then the next tile is not loaded while
            this one is computed, although there are two buffers.
        element_loops: loops over single elements that the streamed bytes do not pay for.
        element_transfers: HBM accesses of less than 32 bytes per row, beyond those that the streamed bytes pay for.
        atomics: atomic updates of HBM in the program text.
        vector_scalar_switches: waits between the vector and the scalar unit per row.
        block_switches: those of them in loops of runtime length, which repeat for each block of the row.
        tiny_vector_ops: vector instructions on 32 bytes or less per row.
        vector_bytes: bytes of the widest operand of each vector operation per row: over `bytes_streamed`, how much work
            the vector unit has for each byte that arrives.
        bytes_streamed: bytes in transfers of 32 bytes and more per row (masked tails count in full).
        largest_transfer: bytes of the largest transfer.
        structured: the planned IR still has its loops. The 950's has not: switches and tiny operations are then those
            of the program text; bytes, element transfers and waits for stores are not known (0).
        seconds: what the compiler took when it was run (not part of equality).
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
    structured: bool = True
    seconds: float = field(default=0.0, compare=False)
    diagnostics: tuple[str, ...] = ()


def violations(plan: MemoryPlan) -> list[str]:
    """The rules that a plan breaks, each as `"<rule>: <fact>"`; empty for a kernel that passes.

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


# -------------------------------------------------------------------------------------------------- running the planner
def plan(spec: Specialization) -> MemoryPlan:
    """Plans a kernel for its chip. The compiler's output is cached on disk by content.

    Raises:
        MissingDependencyError: a tool is not installed.
        ToolchainError: the compiler fails for another reason than the size of its buffers.
    """
    return plan_lowered(spec.name, lower(spec), spec.chip, multi_buffer=bool(spec.options.get("multibuffer", True)))


def plan_lowered(kernel: str, lowered: str, chip: str, *, multi_buffer: bool = True) -> MemoryPlan:
    """`plan` of a kernel that is lowered already; needs no Triton, so it can run on any thread. Raises as `plan`."""
    compiled = _compiled(kernel, lowered, chip, multi_buffer)
    facts = read_plan(kernel, chip, lowered, compiled["planned"], compiled["log"])
    return replace(facts, seconds=compiled["seconds"])


def target_facts(kernel: str, lowered: str, chip: str) -> str:
    """What the compiler knows of a chip that a plan depends on, in its own words: the sizes of memories that it wrote
    into the planned IR of some kernel. The numbers of cores are left out: they change nothing else of the planned IR
    (a test holds `planned_code` of every kernel against that)."""
    found = _TARGET.search(_compiled(kernel, lowered, chip, True)["planned"])
    if found is None:
        raise ToolchainError(kernel, f"description of {chip}", ["the planned IR has no target_device_spec"])
    return _CORE_COUNTS.sub("", found[1])


def planned(kernel: str, lowered: str, chip: str, *, multi_buffer: bool = True) -> str:
    """The planned IR itself. Raises as `plan`, and `ToolchainError` where no plan fits."""
    text: str = _compiled(kernel, lowered, chip, multi_buffer)["planned"]
    if not text:
        raise ToolchainError(kernel, f"plan on-chip memory for {chip}", ["no plan fits"])
    return text


def planned_code(kernel: str, lowered: str, chip: str) -> str:
    """The planned IR without the compiler's description of the chip."""
    return _TARGET.sub("", _compiled(kernel, lowered, chip, True)["planned"])


def _compiled(kernel: str, lowered: str, chip: str, multi_buffer: bool) -> dict[str, Any]:
    """The planned IR, the compiler's log and its seconds, from the cache or made now."""
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
    """The attribute says that triton-ascend has split the kernel already, which on this path it has not."""
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
        # The code generator's stand-in produces no object file, so that success is a planned IR, not an exit status.
        done = toolchain.invoke(kernel, stage, command, check=False, PATH=search, NPU_KERNELS_PLANNED_IR=str(planned))
        seconds = round(time.perf_counter() - started, 2)
        log = (done.stderr + done.stdout).replace(folder, "")
        if not planned.exists() and not _REQUIRED.search(log):
            raise ToolchainError(kernel, stage, toolchain.telling_lines(log))
        compiled = {"seconds": seconds, "log": log, "planned": planned.read_text() if planned.exists() else ""}
        path.write_bytes(zlib.compress(json.dumps(compiled).encode()))


# ------------------------------------------------------------------------------------------------- reading what it says
_REQUIRED = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits available")
_UB_SIZE = re.compile(r'"UB_SIZE", (\d+) : i32')
_TARGET = re.compile(r"#hacc\.target_device_spec<(.*?>)>")
_CORE_COUNTS = re.compile(r'#dlti\.dl_entry<"\w+_CORE_COUNT", \d+ : i32>,? ?')
_DROPPED = "set enable-auto-multi-buffer to false"
_SWITCH = re.compile(r"hivm\.hir\.wait_flag\[<PIPE_V>, <PIPE_S>|hivm\.hir\.wait_flag\[<PIPE_S>, <PIPE_V>")
# A fixed event is the store just before; where buffers rotate the event does too, and stands for the store before that.
_LOAD_AFTER_STORE = "hivm.hir.wait_flag[<PIPE_MTE3>, <PIPE_MTE2>, <EVENT"
_LOAD_AFTER_VECTOR = "hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT"
_ASSIGN = re.compile(r"\s*(%[\w$.-]+)(?::\d+)? = (.*)")
_NAME = re.compile(r"%[\w$.-]+")
_ROTATING_STRUCT = re.compile(r"llvm\.select .*!llvm\.struct<\(ptr<6>")
_FOR = re.compile(r"scf\.for (%[\w$.-]+) = (%[\w$.-]+) to (%[\w$.-]+) step (%[\w$.-]+)")
_CONSTANT = re.compile(r"(?:arith\.constant |llvm\.mlir\.constant\()(-?\d+) : ")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\)")
_ELEMENT = re.compile(r"(?:memref|affine)\.(?:load|store)\b.*?(%[\w$.-]+)\[([^\]]*)\].* : (memref<.*>)")
_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<\[([^\]]*)\][^>]*>)?(?:, #hivm\.address_space<(\w+)>)?>")
_BITS = {"f64": 64, "i64": 64, "index": 64, "f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i1": 1}


def read_plan(kernel: str, chip: str, lowered: str, planned: str, log: str) -> MemoryPlan:
    """The facts in a planned IR (empty: the compiler found no plan that fits) and the compiler's log."""
    remarks = tuple(line for line in toolchain.telling_lines(log) if _INTERESTING.search(line))
    required = _REQUIRED.search(log)
    if not planned:
        assert required is not None, "an IR that was not planned comes with what it requires"
        return MemoryPlan(kernel, chip, False, int(required[1]) // 8, int(required[2]) // 8, diagnostics=remarks)
    size = _UB_SIZE.search(planned)
    body = list(_entry_function(planned))
    structured = not any("cf.br " in line or "cf.cond_br " in line for line in body)
    walk = _Walk()
    for line in body:
        walk.read(line)
    worst = walk.row_body()
    dropped = _DROPPED in log
    rotates = walk.single_buffers < walk.loop_transfers or walk.loop_transfers == 0
    if not structured:
        # Without loops there is no row body. What the lowered form still says: loops over single elements are marked.
        worst.streamed = worst.small_accesses = worst.block_switches = worst.vector_bytes = 0
        worst.element_loops = [None] * lowered.count("{ExtractedLoadOrStore}")
        rotates = any(_ROTATING_STRUCT.search(line) for line in body)
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
        structured=structured,
        diagnostics=remarks,
    )


_INTERESTING = re.compile(r"\[NOTE\]|overflow")


def _entry_function(text: str) -> Iterator[str]:
    """The lines of the function that runs on the device (the module also holds host functions and declarations)."""
    inside = False
    for line in text.splitlines():
        if line.startswith("  func.func "):
            inside = "hacc.entry" in line
        elif line.startswith("  }"):
            inside = False
        elif inside:
            yield line


@dataclass(frozen=True)
class _Memory:
    """What is known of a memref value: its static shape (None: runtime), strides, element, and where it lies."""

    dims: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    element: str
    space: str
    rotates: bool = False
    cut: bool = False  # a slice whose size is known at run time only

    @property
    def element_bits(self) -> int:
        """Bits of an element."""
        return _BITS.get(self.element, 8)

    @property
    def bytes(self) -> int | None:
        """Bytes of all elements, or None where a dimension is known at run time only."""
        sizes = [d for d in self.dims if d is not None]
        return -(-math.prod(sizes) * self.element_bits // 8) if len(sizes) == len(self.dims) else None

    @property
    def run_bytes(self) -> int:
        """Bytes of the longest contiguous piece, by static sizes (a runtime dimension ends it)."""
        run = 1
        for size, stride in zip(reversed(self.dims), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            if size is None:
                break
            run *= size
        return -(-run * self.element_bits // 8)


def memory_of(text: str) -> _Memory | None:
    """The memref type at the beginning of a text; None: there is none."""
    found = _MEMREF.match(text)
    if found is None:
        return None
    dims = tuple(None if d == "?" else int(d) for d in found[1].split("x")[:-1])
    if found[3] is None:
        return _Memory(dims, _row_major(dims), found[2], found[4] or "")
    strides = tuple(None if s.strip() == "?" else int(s) for s in found[3].split(",") if s.strip())
    return _Memory(dims, strides, found[2], found[4] or "")


def _row_major(dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if None in dims[i + 1 :] else math.prod(d or 0 for d in dims[i + 1 :]) for i in range(len(dims)))


def _collapsed(text: str, source: _Memory, memory: _Memory) -> _Memory:
    """The result of a `memref.collapse_shape` with the sizes that are known of what it collapses."""
    groups = [
        [int(axis) for axis in group.split(",")] for group in re.findall(r"\[([\d, ]+)\]", text.partition(" : ")[0])
    ]
    if len(groups) != len(memory.dims) or sum(map(len, groups)) != len(source.dims):
        return memory
    known = [
        None if None in sizes else math.prod(d or 0 for d in sizes)
        for sizes in ([source.dims[axis] for axis in group] for group in groups)
    ]
    dims = tuple(k if d is None else d for d, k in zip(memory.dims, known, strict=True))
    return replace(
        memory, dims=dims, strides=memory.strides if "strided<" in text[text.rindex("memref<") :] else _row_major(dims)
    )


@dataclass
class _Region:
    """A loop, or the whole program, and the work in it. Work of a closed loop is added to the region around it."""

    indent: int
    counter: str | None = None
    runs: int | None = None  # how often, None: known at run time only
    is_loop: bool = True
    is_row_loop: bool = False
    switches: int = 0
    block_switches: int = 0
    tiny_vector_ops: int = 0
    vector_bytes: int = 0
    wide_ops: int = 0  # vector operations and transfers of more than 32 bytes
    own_tiles: int = 0  # tile transfers in this loop itself, not in loops inside it
    own_waits: int = 0  # waits of loads for stores, likewise
    own_loads: int = 0  # tiles that are loaded, likewise
    own_cut_loads: int = 0  # those of them whose size is known at run time only: a tail's
    own_fixed_waits: int = 0  # waits of loads for the vector unit by a fixed event, likewise, and not inside an `if`
    holds_loads: bool = False  # a loop inside it loads tiles
    loads_after_stores: int = 0
    streamed: int = 0
    small_accesses: int = 0
    touches_elements: bool = False  # single elements, at places that follow this loop's counter
    element_loops: list[int | None] = field(default_factory=list)

    def close(self) -> None:
        """Settles what only the whole loop shows: a wait for a store stops transfers that the loop itself makes."""
        if self.is_loop and self.own_tiles:
            self.loads_after_stores += self.own_waits

    def absorb(self, inner: "_Region") -> None:
        """Adds the work of a loop inside this region, as often as it runs."""
        times = 1 if inner.runs is None else inner.runs
        self.loads_after_stores += times * inner.loads_after_stores
        self.vector_bytes += times * inner.vector_bytes
        self.switches += times * inner.switches
        self.block_switches += inner.switches if inner.runs is None else times * inner.block_switches
        self.tiny_vector_ops += times * inner.tiny_vector_ops
        self.wide_ops += times * inner.wide_ops
        self.streamed += times * inner.streamed
        self.small_accesses += times * inner.small_accesses
        self.element_loops += [None if n is None else times * n for n in inner.element_loops]
        if inner.touches_elements and inner.wide_ops == 0:
            self.element_loops.append(inner.runs)


class _Walk:
    """Reads the lines of a device function in order, following its values and its loops.

    The printer reuses value names in sibling regions, so that a name means what its latest definition above says.
    """

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.memories: dict[str, _Memory] = {}
        self.origins: dict[str, frozenset[str]] = {}  # the loop counters, and "program", that a value depends on
        self.regions = [_Region(indent=-1, is_loop=False)]
        self.row_loops: list[_Region] = []
        self.loading_loops: list[_Region] = []
        self.buffer_end = self.loop_transfers = self.single_buffers = self.largest_transfer = 0

    def row_body(self) -> _Region:
        """The worst of the row bodies."""
        self._close(-1)
        program = self.regions[0]
        if not self.row_loops:
            return program
        worst = _Region(indent=-1)
        for name in ("switches", "block_switches", "tiny_vector_ops", "vector_bytes", "loads_after_stores"):
            setattr(worst, name, max(getattr(loop, name) for loop in self.row_loops))
        # Element accesses are paid for by their own loop's bytes, so take the loop where most are left to pay.
        dearest = max(self.row_loops, key=lambda r: r.small_accesses * BYTES_PER_ELEMENT_ACCESS - r.streamed)
        worst.small_accesses, worst.streamed = dearest.small_accesses, dearest.streamed
        worst.element_loops = [runs for loop in self.row_loops for runs in loop.element_loops]
        worst.element_loops += [None for loop in self.row_loops if loop.touches_elements and loop.wide_ops == 0]
        return worst

    def fixed_waits(self) -> int:
        """See `MemoryPlan`."""
        whole = [loop for loop in self.loading_loops if loop.own_cut_loads < loop.own_loads]
        return sum(loop.own_fixed_waits for loop in whole or self.loading_loops)

    def read(self, line: str) -> None:
        indent = len(line) - len(line.lstrip())
        self._close(indent)
        assigned = _ASSIGN.match(line)
        if assigned:
            self._define(assigned[1], assigned[2])
        self._enter_loop(line, indent)
        if _SWITCH.search(line):
            self.regions[-1].switches += 1
        if _LOAD_AFTER_STORE in line:
            self.regions[-1].own_waits += 1
        if _LOAD_AFTER_VECTOR in line and indent == self.regions[-1].indent + 2:
            self.regions[-1].own_fixed_waits += 1
        called = _CALL.search(line)
        if called:
            self._call(called[1], [name.strip() for name in called[2].split(",") if name.strip()])
        touched = _ELEMENT.search(line)
        if touched:
            self._touch(touched[1], touched[2])

    def _close(self, indent: int) -> None:
        while len(self.regions) > 1 and self.regions[-1].indent >= indent:
            inner = self.regions.pop()
            inner.close()
            if inner.is_loop and inner.own_loads and not inner.holds_loads:
                self.loading_loops.append(inner)
            self.regions[-1].holds_loads |= inner.holds_loads or bool(inner.own_loads)
            if inner.is_row_loop:
                self.row_loops.append(inner)
            else:
                self.regions[-1].absorb(inner)

    def _define(self, name: str, text: str) -> None:
        operands = _NAME.findall(text)
        self.origins[name] = frozenset().union(*(self.origins.get(o, frozenset()) for o in operands))
        self.constants.pop(name, None)
        self.memories.pop(name, None)
        if "hivm.hir.get_block_idx" in text:
            self.origins[name] |= {"program"}
        constant = _CONSTANT.match(text)
        if constant:
            self.constants[name] = int(constant[1])
        if "memref<" not in text:
            return
        memory = memory_of(text[text.rindex("memref<") :])
        if memory is None:
            return
        source = next((self.memories[o] for o in operands if o in self.memories), None)
        if source is not None and text.startswith(("memref.cast", "memref.subview")):
            # Casts only forget the shape; a slice of runtime size is at most what it is a slice of.
            is_cut = text.startswith("memref.subview") and None in memory.dims
            if len(source.dims) == len(memory.dims):
                dims = tuple(s if d is None else d for d, s in zip(memory.dims, source.dims, strict=True))
                strides = tuple(s if d is None else d for d, s in zip(memory.strides, source.strides, strict=True))
                memory = replace(memory, dims=dims, strides=strides)
            memory = replace(memory, rotates=source.rotates, cut=source.cut or is_cut)
        elif text.startswith(("arith.select", "llvm.select")) and memory.space == "ub":
            memory = replace(memory, rotates=True)
        elif text.startswith("hivm.hir.pointer_cast") and memory.space == "ub" and memory.bytes is not None:
            places = [self.constants[o] for o in operands if o in self.constants]
            self.buffer_end = max([self.buffer_end, *(place + memory.bytes for place in places)])
        elif source is not None:
            if text.startswith("memref.collapse_shape"):
                memory = _collapsed(text, source, memory)
            memory = replace(memory, rotates=source.rotates, cut=source.cut)
        self.memories[name] = memory

    def _enter_loop(self, line: str, indent: int) -> None:
        loop = _FOR.search(line)
        if loop:
            counter, first, last, step = loop.groups()
            bounds = [self.constants.get(bound) for bound in (first, last, step)]
            runs = None
            if None not in bounds:
                low, high, by = (bound or 0 for bound in bounds)
                runs = max(0, -(-(high - low) // by))
            outermost = not any(region.is_loop for region in self.regions)
            starts_at_program = "program" in self.origins.get(first, frozenset())
            tag = f"{counter}@{len(self.row_loops)}.{indent}.{len(self.regions)}"
            self.origins[counter] = self.origins.get(first, frozenset()) | {tag}
            self.regions.append(_Region(indent, tag, runs, is_row_loop=outermost and starts_at_program))
        elif "scf.while" in line:
            self.regions.append(_Region(indent))

    def _call(self, function: str, operands: list[str]) -> None:
        region = self.regions[-1]
        memories = [self.memories[o] for o in operands if o in self.memories]
        sizes = [memory.bytes for memory in memories if memory.bytes is not None]
        if not function.startswith(("load_gm_to_", "store_ub")):
            if sizes and max(sizes) <= DMA_BLOCK_BYTES:
                region.tiny_vector_ops += 1
            elif sizes:
                region.wide_ops += 1
            region.vector_bytes += max(sizes, default=0)
            return
        moved = min(sizes, default=0)
        outside = next((memory for memory in memories if memory.space == "gm"), None)
        run = min(outside.run_bytes, moved) if outside else moved
        if run < DMA_BLOCK_BYTES:
            region.small_accesses += max(1, moved // max(1, run))
        else:
            region.streamed += moved
        if moved > DMA_BLOCK_BYTES:
            region.wide_ops += 1
        self.largest_transfer = max(self.largest_transfer, moved if run >= DMA_BLOCK_BYTES else run)
        if moved >= BYTES_PER_ELEMENT_ACCESS and any(r.is_loop for r in self.regions):
            region.own_tiles += 1
            if function.startswith("load_gm_to_"):
                region.own_loads += 1
                region.own_cut_loads += any(memory.cut for memory in memories)
            self.loop_transfers += 1
            self.single_buffers += not any(memory.rotates for memory in memories if memory.space == "ub")

    def _touch(self, base: str, indices: str) -> None:
        region, memory = self.regions[-1], self.memories.get(base)
        origins = frozenset().union(*(self.origins.get(o, frozenset()) for o in [base, *_NAME.findall(indices)]))
        if region.counter in origins:
            region.touches_elements = True
        # Arguments have no definition in the body: they lie in HBM.
        if memory is None or memory.space == "gm":
            region.small_accesses += 1


def summary(plans: Iterable[MemoryPlan]) -> str:
    """A line per plan, for people."""
    lines = []
    for p in plans:
        share = f"{p.buffer_used}/{p.buffer_size} bytes ({100 * p.buffer_used // max(1, p.buffer_size)}%)"
        lines.append(f"{p.kernel} on {p.chip}: {share}, {'; '.join(violations(p)) or 'passes'}")
    return "\n".join(lines)
