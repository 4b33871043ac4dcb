"""Traces one program of a planned kernel: its instructions, transfers and waits, in the order in which it issues them.

The planned IR is the program of the vector core's scalar unit: integer arithmetic, loops, and calls into the device
library. This module translates it into a Python function that computes the integers and loops, and gets the events of
each call from `device_library.call`. A program of a production kernel is thus traced exactly, in a fraction of a second
and without a chip: the waits of the scalar unit for the vector unit (with those inside the library, which the planned
IR does not show), the vector instructions per element, the bytes moved.

The trace has no data, except integers that the scalar unit reads from tensors on the CPU, such as the rows that an
embedding's gradient sums. Where a branch depends on other data, integers are 0 and floating-point numbers 1: a token
whose target lies in the first tile, a row with a weight. The other side of the branch is not traced.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .device_library import Event, View, call
from .lower import Specialization, lower
from .plan import planned
from .toolchain import ToolchainError
from .walk import memory_of

__all__ = ["Trace", "counts", "trace"]

LANES = 64
"""The number of fp32 elements of one repeat of a vector instruction: 256 bytes."""


@dataclass(frozen=True)
class Trace:
    """The counts of one program's trace.

    Attributes:
        waits: waits of the scalar unit, which issues all instructions, for the vector unit.
        waits_of_library: those of them inside functions of the device library.
        vector_repeats: the sum of the repeats of all vector instructions, each on 256 bytes.
        by_name: the repeats by instruction.
        bytes_in, bytes_out: bytes that transfers read from and wrote to HBM.
        loads: the number of transfers that read from HBM.
    """

    waits: int
    waits_of_library: int
    vector_repeats: int
    by_name: Mapping[str, int]
    bytes_in: int
    bytes_out: int
    loads: int

    def instructions_per_element(self, elements: float) -> float:
        """Returns vector instructions per element, as if each worked on 64 fp32 lanes."""
        return self.vector_repeats * LANES / elements


# The planner uses events 0 to 5, the library uses event 6.
_LIBRARY_EVENT = 6


def counts(events: list[Event]) -> Trace:
    """Counts the events of a trace."""
    waits = [event for event in events if event.kind == "wait" and (event.name, event.waits) == ("V", "S")]
    by_name: Counter[str] = Counter()
    for event in events:
        if event.kind == "vector":
            by_name[event.name] += event.repeats
    return Trace(
        waits=len(waits),
        waits_of_library=sum(1 for event in waits if event.flag == _LIBRARY_EVENT),
        vector_repeats=sum(by_name.values()),
        by_name=dict(by_name),
        bytes_in=sum(event.bytes for event in events if event.kind == "load"),
        bytes_out=sum(event.bytes for event in events if event.kind == "store"),
        loads=sum(1 for event in events if event.kind == "load"),
    )


def trace(spec: Specialization, grid: tuple[int, ...], args: Mapping[str, Any], program: int = 0) -> list[Event]:
    """Traces one program of a launch.

    Args:
        spec: the launch's specialization.
        grid: the launch's grid.
        args: the value of each parameter by name (see `lower.bind`); tensors may be meta tensors.
        program: the index of the program.

    Raises:
        MissingDependencyError: a tool is not installed.
        ToolchainError: the kernel cannot be compiled, no plan fits, or the plan cannot be traced: plans of the 950 have
            no loops, and an operation may be unknown.
    """
    text = planned(spec.name, lower(spec), spec.chip, multi_buffer=bool(spec.options.get("multibuffer", True)))
    run = _compiled(spec.name, text)
    given = [0, *_scratch(), *(_argument(i, args[name]) for i, name in enumerate(spec.runtime)), *(*grid, 1, 1)[:3]]
    events: list[Event] = []
    values = [args[name] for name in spec.runtime]
    run(events, program, [_whole_numbers(value) for value in values], *given)
    return events


# The library never accesses HBM, so its addresses may have any value: every tensor gets a separate region.
_REGION_BITS = 44


def _scratch() -> list[View]:
    return [View(0, (1 << 16,), (1,), 8, "gm")] * 2


def _argument(place: int, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return View((place + 1) << _REGION_BITS, (value.numel(),), (1,), 8 * value.element_size(), "gm")


def _whole_numbers(value: Any) -> torch.Tensor | None:
    """Returns a flat view of the memory of an integer tensor; None: its values are not read."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_floating_point():
        return None
    rest = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    return value.as_strided((rest,), (1,))


def _read(data: list[torch.Tensor | None], view: View, index: tuple[int, ...]) -> int:
    """Returns an integer that the scalar unit reads from HBM."""
    place = (view.address >> _REGION_BITS) - 1
    tensor = data[place] if view.space == "gm" and 0 <= place < len(data) else None
    if tensor is None:
        return 0
    first = view.address - ((place + 1) << _REGION_BITS)
    at = first // tensor.element_size() + sum(a * b for a, b in zip(index, view.strides, strict=True))
    return int(tensor[at])


# --------------------------------------------------------------------------------------------- memref's view operations
def _view(address: int, sizes: tuple[int, ...], bits: int) -> View:
    return View(address, sizes, _row_major(sizes), bits, "ub")


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def _recast(view: View, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> View:
    return View(view.address + offset * view.bits // 8, sizes, strides, view.bits, view.space)


def _subview(
    view: View, offsets: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...], like: tuple[Any, Any]
) -> View:
    """`like`: the sizes and strides of the result's type; if it has fewer axes, axes of size 1 are dropped."""
    offset = sum(a * b for a, b in zip(offsets, view.strides, strict=True))
    strides = tuple(a * b for a, b in zip(steps, view.strides, strict=True))
    kept: list[tuple[int, int]] = []
    wanted = list(zip(*like, strict=True))
    surplus = len(sizes) - len(wanted)
    for size, stride in zip(sizes, strides, strict=True):
        fits = len(kept) < len(wanted) and all(
            known is None or known == real for known, real in zip(wanted[len(kept)], (size, stride), strict=True)
        )
        if surplus and size == 1 and not fits:
            surplus -= 1
        else:
            kept.append((size, stride))
    return _recast(
        view, offset, tuple(size for size, _ in kept[: len(wanted)]), tuple(s for _, s in kept[: len(wanted)])
    )


def _collapsed(view: View, groups: tuple[tuple[int, ...], ...]) -> View:
    sizes = tuple(math.prod(view.sizes[axis] for axis in group) for group in groups)
    strides = tuple(
        next((view.strides[axis] for axis in reversed(group) if view.sizes[axis] != 1), view.strides[group[-1]])
        for group in groups
    )
    return _recast(view, 0, sizes, strides)


def _expanded(view: View, groups: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> View:
    strides = [0] * len(sizes)
    for group, stride in zip(groups, view.strides, strict=True):
        for axis in reversed(group):
            strides[axis], stride = stride, stride * sizes[axis]
    return _recast(view, 0, sizes, tuple(strides))


def _divided(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# -------------------------------------------------------------------------------------------- from planned IR to Python
_ENTRY = re.compile(r"  func\.func @(\w+)\((.*)\) attributes \{.*hacc\.entry")
_PARAMETER = re.compile(r"(%arg\d+): ")
_MAP = re.compile(r"(#map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$", re.MULTILINE)
_RESULT = re.compile(r"(%[\w$.-]+)(?::(\d+))? = (.*)")
_VALUE = re.compile(r"%([\w$.-]+)(?:#(\d+))?")
_CONSTANT = re.compile(r"(?:arith\.constant |llvm\.mlir\.constant\()(\S+?)\)?(?: : (\w+))?$")
_LOOP = re.compile(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)(?: iter_args\((.*?)\) ->)?")
_FLAG = re.compile(r"hivm\.hir\.(set|wait)_flag\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|(%\w+))\]")
_CALL = re.compile(r"(?:func\.)?call @(\w+)\((.*?)\) : \((.*)\) -> \(\)")
_NOTHING = ("hivm.hir.set_mask_norm", "hivm.hir.set_ctrl", "annotation.mark", "return")
_INTEGERS = {
    "addi": "{0} + {1}", "subi": "{0} - {1}", "muli": "{0} * {1}", "divsi": "_divided({0}, {1})", "divui": "{0} // {1}",
    "remsi": "{0} - {1} * _divided({0}, {1})", "remui": "{0} % {1}", "andi": "{0} & {1}", "ori": "{0} | {1}",
    "xori": "{0} ^ {1}", "minsi": "min({0}, {1})", "maxsi": "max({0}, {1})", "minui": "min({0}, {1})",
    "maxui": "max({0}, {1})", "ceildivsi": "-(-{0} // {1})", "floordivsi": "{0} // {1}", "shli": "{0} << {1}",
    "shrsi": "{0} >> {1}", "select": "{1} if {0} else {2}", "index_cast": "{0}", "extsi": "{0}", "extui": "int({0})",
    "trunci": "{0}", "index_castui": "{0}",
}  # fmt: skip
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _python(name: str) -> str:
    """Returns the Python name of an IR value."""
    found = _VALUE.match(name.strip())
    assert found is not None, name
    return "v" + re.sub(r"\W", "_", found[1]) + (f"_r{found[2]}" if found[2] else "")


def _values(text: str) -> list[str]:
    """Returns the Python names of the values in a text, in order."""
    return [_python(found[0]) for found in _VALUE.finditer(text)]


def _numbers(text: str) -> str:
    """Converts a list of values and numbers into the inside of a Python tuple: `[%5, 64]` to `v5, 64,`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return "".join((_python(part) if part.startswith("%") else part) + ", " for part in parts)


class _Translation:
    """Writes the Python function line by line."""

    def __init__(self, kernel: str, planned: str) -> None:
        self.kernel = kernel
        self.maps = {found[1]: found for found in _MAP.finditer(planned)}
        self.lines: list[str] = []
        self.open: list[tuple[list[str], list[str]]] = []  # results and carried values of each open loop or branch

    def say(self, line: str) -> None:
        self.lines.append("    " * (len(self.open) + 1) + line)

    def refuse(self, line: str) -> ToolchainError:
        return ToolchainError(self.kernel, "trace of the planned code", [f"not understood: {line[:200]}"])

    def read(self, line: str) -> None:
        line = line.strip()
        if line.startswith("}"):
            results, carried = self.open.pop()
            if "else" in line:
                self.open.append((results, carried))
                self.lines.append("    " * len(self.open) + "else:")
                self.say("pass")
            elif results and carried:
                self.say(f"{', '.join(results)} = {', '.join(carried)}")
            return
        assigned = _RESULT.match(line)
        results = []
        if assigned:
            name, number, line = assigned.groups()
            results = [_python(name) + f"_r{i}" for i in range(int(number))] if number else [_python(name)]
        if line.startswith(("scf.", "func.call", "call ", "hivm.", *_NOTHING)) or not results:
            self.act(line, results)
        else:
            self.say(f"{results[0]} = {self.value(line)}")

    def act(self, line: str, results: list[str]) -> None:
        if loop := _LOOP.match(line):
            carried = re.findall(r"(%\S+) = (%[\w$.#-]+)", loop[5] or "")
            for inner, first in carried:
                self.say(f"{_python(inner)} = {_python(first)}")
            self.say(f"for {_python(loop[1])} in range({', '.join(_python(loop[i]) for i in (2, 3, 4))}):")
            self.open.append((results, [_python(inner) for inner, _ in carried]))
            self.say("pass")
        elif line.startswith("scf.if"):
            self.say(f"if {_values(line)[0]}:")
            self.open.append((results, []))
            self.say("pass")
        elif line.startswith("scf.yield"):
            given, (results, carried) = _values(line.partition(" : ")[0]), self.open[-1]
            if given:
                self.say(f"{', '.join(carried or results)} = {', '.join(given)}")
        elif flag := _FLAG.match(line):
            number = flag[4] or _python(flag[5])
            self.say(f"put(Event({flag[1]!r}, {flag[2]!r}, waits={flag[3]!r}, flag={number}))")
        elif line.startswith("hivm.hir.pipe_barrier"):
            self.say(f"put(Event('barrier', {line.split('PIPE_')[1].rstrip('>]')!r}))")
        elif line.startswith("hivm.hir.get_block_idx"):
            self.say(f"{results[0]} = program")
        elif line.startswith("hivm.hir.pointer_cast"):
            self.say(f"{results[0]} = {self.place(line)}")
        elif line.startswith("hivm.hir.bitcast"):
            self.say(f"{results[0]} = {_values(line)[0]}")
        elif called := _CALL.match(line):
            self.say(f"extend(call({called[1]!r}, ({', '.join(_values(called[2]))},)))")
        elif line.startswith(("memref.store", "affine.store")):
            self.say(f"put(Event('scalar', {self.space(line)!r}))")
        elif not line.startswith(_NOTHING):
            raise self.refuse(line)

    def value(self, line: str) -> str:
        """Returns the Python expression of an operation without side effects."""
        operation = line.split(" ")[0].split("(")[0]
        dialect, _, name = operation.partition(".")
        operands = _values(line.partition(" : ")[0])
        if constant := _CONSTANT.match(line):
            kind = constant[2] or "i1"
            whole = kind.startswith("i")
            return constant[1].capitalize() if constant[1] in ("true", "false") else constant[1] if whole else "1.0"
        if dialect == "arith" and name in _INTEGERS:
            return _INTEGERS[name].format(*operands)
        if operation == "arith.cmpi":
            predicate = line.split(" ")[1].rstrip(",").lstrip("su") if " eq" not in line and " ne" not in line else ""
            predicate = predicate or ("eq" if " eq" in line else "ne")
            return f"{operands[0]} {_COMPARED[predicate]} {operands[1]}"
        if operation == "arith.cmpf":
            return str("e" in line.split(" ")[1])  # compares 1 with 1: true if the predicate includes equality
        if operation.startswith("affine.") and name in ("apply", "min", "max"):
            return self.mapped(line, name, operands)
        if operation in ("memref.load", "affine.load"):
            whole = re.search(r"x(i\d+|index)\b", line[line.rindex("memref<") :])
            number = f"_read(data, {operands[0]}, ({', '.join(operands[1:])},))" if whole else "1.0"
            return f"(put(Event('scalar', {self.space(line)!r})), {number})[1]"
        if operation == "memref.cast":
            return operands[0]
        if dialect == "memref":
            return self.reshaped(line, name, operands)
        if dialect in ("arith", "math"):
            return "1.0" if re.search(r": (f|bf)\d+$|to (f|bf)\d+$", line) else "0"
        raise self.refuse(line)

    def mapped(self, line: str, name: str, operands: list[str]) -> str:
        found = re.search(r"#map\d*", line)
        assert found is not None, "an affine operation has a map"
        _, dims, symbols, results = self.maps[found[0]].groups()
        names = [part.strip() for part in f"{dims},{symbols or ''}".split(",") if part.strip()]
        known = dict(zip(names, operands, strict=True))
        text = results.replace("floordiv", "//").replace("mod", "%")
        if "ceildiv" in text:
            raise self.refuse(line)
        text = re.sub(r"\b[ds]\d+\b", lambda found: known[found[0]], text)
        return f"({text})" if name == "apply" else f"{name}(({text},))"

    def reshaped(self, line: str, name: str, operands: list[str]) -> str:
        like = memory_of(line[line.rindex("memref<") :])
        if like is None:
            raise self.refuse(line)
        lists = re.findall(r"\[([^\[\]]*)\]", line.partition(" : ")[0])
        if name == "reinterpret_cast":
            offset, sizes, strides = (_numbers(part) for part in lists)
            return f"_recast({operands[0]}, {offset.rstrip(', ')}, ({sizes}), ({strides}))"
        if name == "subview":
            places = ", ".join(f"({_numbers(part)})" for part in lists)
            return f"_subview({operands[0]}, {places}, {(like.dims, like.strides)})"
        if name == "collapse_shape":
            return f"_collapsed({operands[0]}, ({''.join(f'({part},), ' for part in lists)}))"
        if name == "expand_shape":
            groups = "".join(f"({part},), " for part in lists[:-1])
            return f"_expanded({operands[0]}, ({groups}), ({_numbers(lists[-1])}))"
        raise self.refuse(line)

    def place(self, line: str) -> str:
        memory = memory_of(line[line.rindex("memref<") :])
        if memory is None:
            raise self.refuse(line)
        offset, *runtime = _values(line.partition(" : ")[0])
        sizes = "".join(f"{runtime.pop(0) if size is None else size}, " for size in memory.dims)
        return f"_view({offset}, ({sizes}), {memory.element_bits})"

    def space(self, line: str) -> str:
        return "gm" if "address_space<gm>" in line else "ub"


def _compiled(kernel: str, planned: str) -> Callable[..., None]:
    """Returns the Python function of a planned kernel: `run(events, program, data, *arguments)`."""
    if "cf.cond_br " in planned or "cf.br " in planned:
        raise ToolchainError(kernel, "trace of the planned code", ["it has jumps in the place of loops"])
    translation = _Translation(kernel, planned)
    lines = iter(planned.splitlines())
    for line in lines:
        entry = _ENTRY.match(line)
        if entry:
            parameters = [_python(name) for name in _PARAMETER.findall(entry[2])]
            break
    else:
        raise ToolchainError(kernel, "trace of the planned code", ["no function runs on the device"])
    for line in lines:
        if line == "  }":
            break
        translation.read(line)
    head = [
        f"def run(events, program, data, {', '.join(parameters)}):",
        "    put, extend = events.append, events.extend",
    ]
    scope: dict[str, Any] = {
        "Event": Event, "call": call, "_view": _view, "_recast": _recast, "_subview": _subview, "_divided": _divided,
        "_read": _read,
        "_collapsed": _collapsed, "_expanded": _expanded,
    }  # fmt: skip
    exec(compile("\n".join([*head, *translation.lines]), f"<planned {kernel}>", "exec"), scope)
    run: Callable[..., None] = scope["run"]
    return run
