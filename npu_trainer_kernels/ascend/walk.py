"""Reads planned IR: its loops, their loads and stores, and the waits between units.

Plans of the 910 have loops. Plans of the 950 have jumps instead, from which `loops_again` reconstructs the loops, so
that `Walk` can read both.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

__all__ = ["BYTES_PER_ELEMENT_ACCESS", "DMA_BLOCK_BYTES", "Memory", "Region", "Walk", "memory_of"]

# A transfer shorter than one 32-byte block costs the chip as much as one of 512 bytes, its unit of full-speed transfer.
BYTES_PER_ELEMENT_ACCESS = 512
DMA_BLOCK_BYTES = 32

_SWITCH = re.compile(r"hivm\.hir\.wait_flag\[<PIPE_V>, <PIPE_S>|hivm\.hir\.wait_flag\[<PIPE_S>, <PIPE_V>")
# With a fixed event a load waits for the latest store; if buffers alternate, so does the event, and the load waits for
# the store before that.
_LOAD_AFTER_STORE = "hivm.hir.wait_flag[<PIPE_MTE3>, <PIPE_MTE2>, <EVENT"
_LOAD_AFTER_VECTOR = "hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT"
_ASSIGN = re.compile(r"\s*(%[\w$.-]+)(?::\d+)?(?:, %[\w$.:-]+)* = (.*)")
_ROTATING_STRUCT = re.compile(r"llvm\.select .*!llvm\.struct<\(ptr<6>")
_NAME = re.compile(r"%[\w$.-]+")
_FOR = re.compile(r"scf\.for (%[\w$.-]+) = (%[\w$.-]+) to (%[\w$.-]+) step (%[\w$.-]+)")
_CONSTANT = re.compile(r"(?:arith\.constant |llvm\.mlir\.constant\()(-?\d+) : ")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\)")
_ELEMENT = re.compile(r"(?:memref|affine)\.(?:load|store)\b.*?(%[\w$.-]+)\[([^\]]*)\].* : (memref<.*>)")
_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<\[([^\]]*)\][^>]*>)?(?:, #hivm\.address_space<(\w+)>)?>")
_ENDLESS = 1 << 62
_BITS = {"f64": 64, "i64": 64, "index": 64, "f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i1": 1}


def entry_function(text: str) -> Iterator[str]:
    """Returns the lines of the function that runs on the device; a module also has host functions and declarations."""
    inside = False
    for line in text.splitlines():
        if line.startswith("  func.func "):
            inside = "hacc.entry" in line
        elif line.startswith("  }"):
            inside = False
        elif inside:
            yield line


_LABEL = re.compile(r"  \^bb(\d+)(?:\((%[\w$.-]+))?.*?:(?:  // (\d+) preds|  // pred: \^bb(\d+))?")
_JUMP = re.compile(r"\^bb(\d+)(?:\((%[\w$.-]+))?")
_COMPARED = re.compile(r"\s*%[\w$.-]+ = arith\.cmpi \w+, %[\w$.-]+, (%[\w$.-]+) :")


@dataclass
class _Block:
    """A basic block of a function with jumps.

    Attributes:
        counter: its first argument; "": it has none.
        before: its only predecessor; None: it has several, or none.
        lines: its lines, with its jump.
        jumps: its successors, each with the first value that the jump passes ("": none).
    """

    counter: str = ""
    before: int | None = None
    lines: list[str] = field(default_factory=list)
    jumps: list[tuple[int, str]] = field(default_factory=list)


def loops_again(lines: Iterable[str]) -> Iterator[str]:
    """Returns a function's lines with reconstructed loops: a backward jump becomes an `scf.for` around the blocks that
    it repeats, and a block that is reached only by a condition is indented. Other lines are unchanged."""
    lines = list(lines)
    if not any("cf.br " in line or "cf.cond_br " in line for line in lines):
        yield from lines
        return
    blocks = _blocks(lines)
    last = {to: at for at, block in enumerate(blocks) for to, _ in block.jumps if to <= at}
    ends: list[int] = []
    for at, block in enumerate(blocks):
        while ends and ends[-1] < at:
            ends.pop()
        if at in last:
            yield "  " * (len(ends) + 2) + _loop(blocks, at, last[at])
            ends.append(last[at])
        leads = blocks[block.before] if block.before is not None else None
        conditional = leads is not None and len(leads.jumps) == 2 and block.before not in last
        indent = "  " * (len(ends) + 2 + conditional)
        yield from (indent + line.strip() for line in block.lines)


def _blocks(lines: Iterable[str]) -> list[_Block]:
    blocks = [_Block()]
    for line in lines:
        label = _LABEL.match(line)
        if label:
            # Blocks are numbered from 1 in the order in which they are printed; the first has no label.
            assert int(label[1]) == len(blocks), "blocks come in the order of their numbers"
            blocks.append(_Block(label[2] or "", int(label[4]) if label[4] else None))
            continue
        blocks[-1].lines.append(line)
        if line.lstrip().startswith("cf."):
            blocks[-1].jumps = [(int(to), value) for to, value in _JUMP.findall(line)]
    return blocks


def _loop(blocks: list[_Block], header: int, end: int) -> str:
    """Returns the head of a loop: its first block compares the counter with a limit, its last block increments it."""
    first = next((value for block in blocks[:header] for to, value in block.jumps if to == header), "")
    stepped = next((value for to, value in blocks[end].jumps if to == header), "")
    counter = blocks[header].counter
    limit = next((found[1] for line in blocks[header].lines if (found := _COMPARED.match(line))), "")
    added = re.compile(rf"\s*{re.escape(stepped)} = (?:arith\.addi|llvm\.add) {re.escape(counter)}, (%[\w$.-]+)")
    step = next((found[1] for line in blocks[end].lines if (found := added.match(line))), "")
    return (
        f"scf.for {counter} = {first} to {limit} step {step}" if counter and first and limit and step else "scf.while"
    )


@dataclass(frozen=True)
class Memory:
    """The static shape (None: a runtime size), strides, element type and memory space of a memref value."""

    dims: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    element: str
    space: str
    rotates: bool = False
    cut: bool = False  # whether it is a slice of runtime size

    @property
    def element_bits(self) -> int:
        """The bits of an element."""
        return _BITS.get(self.element, 8)

    @property
    def bytes(self) -> int | None:
        """The bytes of all elements, or None if a dimension has a runtime size."""
        sizes = [d for d in self.dims if d is not None]
        return -(-math.prod(sizes) * self.element_bits // 8) if len(sizes) == len(self.dims) else None

    @property
    def run_bytes(self) -> int:
        """The bytes of the longest contiguous piece; a piece of runtime size counts as `_ENDLESS` elements."""
        run = 1
        for size, stride in zip(reversed(self.dims), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            if size is None:
                return _ENDLESS
            run *= size
        return -(-run * self.element_bits // 8)


def memory_of(text: str) -> Memory | None:
    """Parses the memref type at the beginning of a text; None: there is none."""
    found = _MEMREF.match(text)
    if found is None:
        return None
    dims = tuple(None if d == "?" else int(d) for d in found[1].split("x")[:-1])
    if found[3] is None:
        return Memory(dims, _row_major(dims), found[2], found[4] or "")
    strides = tuple(None if s.strip() == "?" else int(s) for s in found[3].split(",") if s.strip())
    return Memory(dims, strides, found[2], found[4] or "")


def _row_major(dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if None in dims[i + 1 :] else math.prod(d or 0 for d in dims[i + 1 :]) for i in range(len(dims)))


def _collapsed(text: str, source: Memory, memory: Memory) -> Memory:
    """Returns the result of a `memref.collapse_shape` with the sizes that follow from its source."""
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


def _at_most(memory: Memory, source: Memory) -> Memory:
    """Returns a part of `source` of runtime size with its upper bound as its size."""
    if len(memory.dims) == len(source.dims):
        return replace(memory, dims=tuple(s if d is None else d for d, s in zip(memory.dims, source.dims, strict=True)))
    if len(memory.dims) == 1 and None not in source.dims:
        return replace(memory, dims=(math.prod(size or 0 for size in source.dims),))
    return memory


@dataclass
class Region:
    """A loop, or the whole program, and the work in it. A loop's work is added to the region around it when it ends."""

    indent: int
    counter: str | None = None
    runs: int | None = None  # the trip count; None: a runtime value
    is_loop: bool = True
    is_row_loop: bool = False
    switches: int = 0
    block_switches: int = 0
    tiny_vector_ops: int = 0
    vector_bytes: int = 0
    wide_ops: int = 0  # vector operations and transfers of more than 32 bytes
    # The `own_` counts are of this loop itself, without the loops inside it.
    own_tiles: int = 0  # tile transfers
    own_waits: int = 0  # waits of loads for stores
    own_loads: int = 0  # loads of tiles
    own_cut_loads: int = 0  # those of them with a runtime size: loads of a tail
    own_fixed_waits: int = 0  # waits of loads for the vector unit by a fixed event, outside of any `if`
    holds_loads: bool = False  # whether a loop inside it loads tiles
    loads_after_stores: int = 0
    streamed: int = 0
    small_accesses: int = 0
    touches_elements: bool = False  # whether it accesses single elements at indices that depend on its counter
    element_loops: list[int | None] = field(default_factory=list)

    def close(self) -> None:
        """Counts the loop's waits for stores if the loop itself transfers tiles, which these waits then delay."""
        if self.is_loop and self.own_tiles:
            self.loads_after_stores += self.own_waits

    def absorb(self, inner: "Region") -> None:
        """Adds the work of a loop inside this region, times its trip count."""
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


class Walk:
    """Reads the lines of a device function in order, and keeps track of its values and loops.

    The printer reuses value names in sibling regions, so the latest definition of a name counts.
    """

    def __init__(self, planned: str) -> None:
        self.constants: dict[str, int] = {}
        self.memories: dict[str, Memory] = {}
        self.origins: dict[str, frozenset[str]] = {}  # the loop counters, and "program", that a value depends on
        self.regions = [Region(indent=-1, is_loop=False)]
        self.row_loops: list[Region] = []
        self.loading_loops: list[Region] = []
        self.rotating: set[str] = set()  # descriptors selected between two buffers
        self.buffer_end = self.loop_transfers = self.single_buffers = self.largest_transfer = 0
        self.fills_in_loops = False
        for line in loops_again(entry_function(planned)):
            self.read(line)

    def row_body(self) -> Region:
        """Returns the worst of the row bodies."""
        self._close(-1)
        program = self.regions[0]
        if not self.row_loops:
            return program
        worst = Region(indent=-1)
        for name in ("switches", "block_switches", "tiny_vector_ops", "vector_bytes", "loads_after_stores"):
            setattr(worst, name, max(getattr(loop, name) for loop in self.row_loops))
        # A loop's streamed bytes allow element accesses in that loop only: take the loop with the most in excess.
        dearest = max(self.row_loops, key=lambda r: r.small_accesses * BYTES_PER_ELEMENT_ACCESS - r.streamed)
        worst.small_accesses, worst.streamed = dearest.small_accesses, dearest.streamed
        worst.element_loops = [runs for loop in self.row_loops for runs in loop.element_loops]
        worst.element_loops += [None for loop in self.row_loops if loop.touches_elements and loop.wide_ops == 0]
        return worst

    def fixed_waits(self) -> int:
        """Returns `MemoryPlan.fixed_waits`."""
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
        if _ROTATING_STRUCT.match(text):
            self.rotating.add(name)
        if "memref<" not in text:
            return
        memory = memory_of(text[text.rindex("memref<") :])
        if memory is None:
            return
        source = next((self.memories[o] for o in operands if o in self.memories), None)
        if text.startswith("builtin.unrealized_conversion_cast") and self.rotating.intersection(operands):
            memory = replace(memory, rotates=True)
        elif text.startswith("memref.extract_strided_metadata"):
            if source is None:  # an argument, whose size is unknown
                return
            memory = source
        if source is not None and text.startswith(("memref.cast", "memref.subview")):
            # A cast only hides the shape; a slice of runtime size is at most as large as its source.
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
            elif text.startswith("memref.reinterpret_cast") and None in memory.dims:
                memory = replace(_at_most(memory, source), cut=True)
            memory = replace(memory, rotates=source.rotates, cut=source.cut or memory.cut)
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
            self.regions.append(Region(indent, tag, runs, is_row_loop=outermost and starts_at_program))
        elif "scf.while" in line:
            self.regions.append(Region(indent))

    def _call(self, function: str, operands: list[str]) -> None:
        region = self.regions[-1]
        self.fills_in_loops |= not function.startswith("store_ub") and any(r.is_loop for r in self.regions)
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
        # A memref without a definition in the body is an argument, in HBM.
        if memory is None or memory.space == "gm":
            region.small_accesses += 1
