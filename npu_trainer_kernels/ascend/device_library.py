"""Runs functions of the compiler's device library on this machine, to list the instructions that they would issue.

Planned kernels call these functions (`vexp_1d_float`, `load_gm_to_ubuf_1d_bfloat16_t`, ...), which the compiler's
package contains as LLVM bitcode. `call` builds a function with every hardware instruction replaced by a call that
records it, runs it on descriptors of its operands, and returns the recorded events: vector instructions with their
repeats, transfers, flags. No values are computed. The events depend only on the sizes, strides and alignment of the
operands, so `call` caches them.
"""

import ctypes
import importlib.util
import re
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import toolchain

__all__ = ["Event", "View", "call"]

_BUFFER_BYTES = 1 << 20


class Event(NamedTuple):
    """An instruction, transfer or synchronisation that a program issues.

    Attributes:
        kind: `"vector"`, `"load"`, `"store"`, `"set"`, `"wait"`, `"barrier"` or `"scalar"` (the scalar unit accesses
            memory).
        name: the instruction, for example `"VADD"`; for a flag the unit that sets it, for a barrier the unit that
            waits, for a scalar access the memory.
        repeats: for a vector instruction its number of repeats, each on 256 bytes; for a transfer its pieces.
        bytes: for a transfer the bytes that it moves.
        waits: for a flag the unit that waits for it.
        flag: the number of a flag.
    """

    kind: str
    name: str
    repeats: int = 0
    bytes: int = 0
    waits: str = ""
    flag: int = 0


@dataclass(frozen=True)
class View:
    """A memory view that is an operand of the library's functions.

    Attributes:
        address: the address in bytes; in the unified buffer, from its start.
        sizes, strides: the sizes and strides in elements.
        bits: the bits of an element.
        space: the memory, `"ub"` or `"gm"`.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    bits: int
    space: str


_UNITS = {0: "S", 1: "V", 2: "M", 3: "MTE1", 4: "MTE2", 5: "MTE3", 6: "ALL"}
_ELEMENT_BYTES = {"f32": 4, "s32": 4, "u32": 4, "b32": 4, "s64": 8, "b8": 1, "s8": 1, "u8": 1}  # others: 2
_CONVERSION = re.compile(r"VCONV\.(bf16|[fsu]\d+)2(bf16|[fsu](?:16|32|64|8))")


# ---------------------------------------------------------------------------------------------------------- building it
_INTRINSIC = re.compile(r"@llvm\.hivm\.([\w.]+)")
_DECLARED = re.compile(
    r"declare [^@]*?(void|i\d+|ptr(?: addrspace\(\d\))?) @llvm\.hivm\.([\w.]+)\((.*)\)(?: #\d+)?$", re.M
)
_RESULTS = {"SBITSET0", "SBITSET1"}  # stubs compute these; every other instruction with a result returns 0


@cache
def _bitcode() -> Path:
    """Returns the path of the library of the 910's vector cores (the compiler calls their generation c220)."""
    found = importlib.util.find_spec("ascendnpuir")
    toolchain.bishengir("bishengir-compile", "")
    folders = found.submodule_search_locations if found else None
    assert folders is not None, "the compiler was just found in it"
    return Path(folders[0], "lib", "meta_op.aiv.c220.bc")


@cache
def _this_module() -> str:
    return Path(__file__).read_text()


def _instrumented(text: str) -> str:
    """Replaces each hardware instruction in LLVM IR by a function that calls `npuk_record` with the instruction's name,
    its first three arguments and its last."""
    stubs = ["@npuk_record = global ptr null", "@npuk_nothing = global [16 x i64] zeroinitializer"]
    for result, name, parameters in dict.fromkeys(_DECLARED.findall(text)):
        kinds = [re.match(r"ptr addrspace\(\d\)|\w+", part.strip()) for part in parameters.split(",") if part.strip()]
        stubs.append(_stub(result, name, [kind[0] for kind in kinds if kind]))
    kept = [
        # LLVM cannot compile for the chip, so the target and its features are removed.
        re.sub(r' "[^"]*"(="[^"]*")?', "", line) if line.startswith("attributes #") else line
        for line in text.splitlines()
        if not line.startswith(("target ", "declare")) or (line.startswith("declare") and "@llvm.hivm." not in line)
    ]
    body = "\n".join(kept).replace(" noinline", "").replace(" optnone", "")
    # On the chip a descriptor may lie at address 0. In LLVM reading it is undefined, and such code would be removed.
    body = body.replace("ptr noundef null", "ptr noundef @npuk_nothing")
    return "\n".join([_INTRINSIC.sub(_renamed, body), *stubs])


def _renamed(found: re.Match[str]) -> str:
    return "@npuk." + found[1]


def _stub(result: str, name: str, kinds: list[str]) -> str:
    head = f"define {result} @npuk.{name}({', '.join(f'{kind} %a{i}' for i, kind in enumerate(kinds))}) noinline {{"
    if name in _RESULTS:
        mask = "%bit = shl i64 1, %a1"
        how = "or i64 %a0, %bit" if name == "SBITSET1" else "and i64 %a0, %rest"
        return "\n".join([head, mask, "%rest = xor i64 %bit, -1", f"%r = {how}", "ret i64 %r", "}"])
    text = f'@npuk.name.{name} = private constant [{len(name) + 1} x i8] c"{name}\\00"'
    lines = [text, head]
    for i, kind in enumerate(kinds):
        if kind.startswith("ptr"):
            lines.append(f"%v{i} = ptrtoint {kind} %a{i} to i64")
        elif kind.startswith("i"):
            lines.append(
                f"%v{i} = {'add i64 0,' if kind == 'i64' else f'zext {kind}'} %a{i}"
                + ("" if kind == "i64" else " to i64")
            )
        else:  # the value of a floating-point argument has no influence on the events
            lines.append(f"%v{i} = add i64 0, 0")
    values = [f"%v{i}" for i in range(len(kinds))]
    given = [*(values[i] if i < len(values) else "0" for i in range(3)), values[-1] if values else "0"]
    lines.append("%record = load ptr, ptr @npuk_record")
    lines.append(f"call void %record(ptr @npuk.name.{name}, {', '.join(f'i64 {value}' for value in given)})")
    lines.append("ret void" if result == "void" else f"ret {result} {'null' if result.startswith('ptr') else '0'}")
    return "\n".join([*lines, "}"])


def _build(path: Path, function: str) -> None:
    """Writes a shared library with the function to `path`."""
    folder = path.parent
    given, optimized, machine = (folder / f"{function}.{suffix}" for suffix in ("ll", "opt.ll", "o"))
    stage = "build of the device library"

    def step(tool: str, *arguments: str | Path) -> str:
        return toolchain.invoke(function, stage, [toolchain.host_tool(tool), *arguments]).stdout

    given.write_text(
        _instrumented(step("llvm-extract-19", _bitcode(), "--recursive", f"--func=_mlir_ciface_{function}", "-S"))
    )
    step("opt-19", "-O2", given, "-S", "-o", optimized)
    step("llc-19", "-O1", "-relocation-model=pic", "-filetype=obj", optimized, "-o", machine)
    step("gcc", "-shared", "-Wl,-Bsymbolic", "-o", path, machine, "-lm")


_Recorder = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *[ctypes.c_int64] * 4)
_answers: dict[tuple[Any, ...], tuple[Event, ...]] = {}
_MOST_ANSWERS = 4096  # a kernel has some hundred distinct calls
_running = threading.Lock()  # there is one buffer and one list of events


class _Machine:
    """The one core that functions run on: its buffer, the mask of its vector instructions, and the recorded calls."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_BUFFER_BYTES + 4096)
        self.base = -(-ctypes.addressof(self.buffer) // 4096) * 4096
        self.issued: list[tuple[bytes, int, int, int, int]] = []
        self.counts = False
        self.mask = 0
        # Records are decoded after the function has returned, since ctypes would swallow an exception in a callback.
        self.record = _Recorder(lambda *issued: self.issued.append(issued))

    def take(self) -> tuple[Event, ...]:
        """Returns the events since the last call."""
        issued, self.issued = self.issued, []
        events = (self._event(name.decode(), *arguments) for name, *arguments in issued)
        return tuple(event for event in events if event is not None)

    def _event(self, name: str, a: int, b: int, c: int, last: int) -> Event | None:
        """Decodes a recorded instruction by the bit fields of the instruction set: the top byte of a vector
        instruction's last argument is its repeats, a transfer's third argument has its pieces and their length."""
        if name == "SET.CTRL":
            self.counts = bool(a >> 56 & 1)
        elif name == "MOVEMASK":
            self.mask = b  # the lower half of the mask; in counter mode, the number of elements
        elif name in ("SET.FLAG.IMM", "WAIT.FLAG.IMM"):
            return Event(name[:-9].lower(), _UNITS[a], waits=_UNITS[b], flag=c)
        elif name == "BARRIER":
            return Event("barrier", _UNITS[a])
        elif name.startswith(("MOV.OUT.TO.UB", "MOV.UB.TO.OUT")):
            pieces, length = c >> 4 & 0xFFF, c >> 16 & 0x1FFFFF
            return Event("load" if name.startswith("MOV.OUT") else "store", "", pieces, pieces * length)
        elif name.startswith("MOV.UB.TO.UB"):
            pieces, blocks = c >> 4 & 0xFFF, c >> 16 & 0xFFFF
            return Event("vector", "COPY", pieces * max(1, blocks // 8))
        elif name.startswith(("V", "MOVEV", "S.VNCHW")):
            return Event("vector", name.removeprefix("S.").partition(".")[0], self._repeats(name, c, last))
        return None

    def _repeats(self, name: str, third: int, last: int) -> int:
        config = third if ".order" in name else last
        repeats = config >> 56 & 0xFF
        if name.startswith("VREDUCEv2"):
            repeats = repeats << 8 | config & 0xFF
        if self.counts and not name.startswith(("VBRCB", "S.VNCHW")):
            repeats = -(-self.mask * _element_bytes(name) // 256)
        return max(1, repeats)


def _element_bytes(name: str) -> int:
    converted = _CONVERSION.match(name)
    kinds = converted.groups() if converted else name.split(".")[1:3]
    return max((_ELEMENT_BYTES.get(kind, 2) for kind in kinds), default=2)


@cache
def _machine() -> _Machine:
    return _Machine()


@cache
def _function(name: str) -> Any:
    """Returns a function of the library, built for this machine."""
    key = toolchain.digest(toolchain.versions(), name, _this_module())
    library = ctypes.CDLL(str(toolchain.cached(f"device/{name}-{key}.so", lambda path: _build(path, name))))
    ctypes.c_void_p.in_dll(library, "npuk_record").value = ctypes.cast(_machine().record, ctypes.c_void_p).value
    function = getattr(library, f"_mlir_ciface_{name}")
    function.restype = None
    return function


def _descriptor(view: View) -> Any:
    """Returns a memref descriptor: allocation, first element, offset, sizes and strides. The functions never access
    HBM, so its addresses may have any value."""
    address = view.address + (_machine().base if view.space == "ub" else 0)
    return ctypes.byref((ctypes.c_int64 * (3 + 2 * len(view.sizes)))(address, address, 0, *view.sizes, *view.strides))


def call(name: str, operands: tuple[View | int | float, ...]) -> tuple[Event, ...]:
    """Returns the events of a function of the library.

    Args:
        name: the function, for example `"vexp_1d_float"`.
        operands: the operands of the planned call; the values of floating-point numbers do not matter.

    Raises:
        MissingDependencyError: a tool is not installed.
        ToolchainError: the function cannot be built, for example because the library has no function of this name.
    """
    key = name, *(_alike(operand) for operand in operands)
    with _running:
        if key not in _answers:
            if len(_answers) >= _MOST_ANSWERS:
                _answers.clear()
            machine = _machine()
            passed = [_passed(operand) for operand in operands]
            # The library's loads take one number more than the planner passes: the cache mode, 0.
            _function(name)(*passed, *([ctypes.c_int32(0)] if name.startswith("load_gm_to_") else []))
            _answers[key] = machine.take()
        return _answers[key]


def _alike(operand: View | int | float) -> Any:
    """Returns the properties of an operand that decide the events: of an address in HBM only its alignment."""
    if isinstance(operand, View) and operand.space == "gm":
        return operand.address % 512, operand.sizes, operand.strides
    return operand


def _passed(operand: View | int | float) -> Any:
    if isinstance(operand, View):
        return _descriptor(operand)
    return ctypes.c_float(operand) if isinstance(operand, float) else ctypes.c_int64(operand)
