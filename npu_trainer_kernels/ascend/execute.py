"""Runs the lowered kernel on CPU tensors over its full grid, and counts what it moves between HBM and the chip.

The compiler's MLIR is instrumented (a call beside each transfer), lowered to machine code with the compiler's own
passes and LLVM 19, and linked with a small C program that loops over the grid. Tensors are passed as what the kernel
was written for, raw pointers: a non-contiguous tensor or one with an offset is read and written as the chip would.

There are two levels. `"ttadapter"` is what triton-ascend emits; `"hfusion"` has also been through bishengir's rewrites
for the vector unit (bf16 arithmetic in fp32, division, tanh, rounding modes, NaN rules), so it is nearer to the chip;
atomics cannot be run there. Programs of a grid run one after the other.
"""

import ctypes
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import toolchain
from .lower import Specialization, lower
from .plan import without_mix_mode

__all__ = ["LEVELS", "Traffic", "execute"]

LEVELS = ("ttadapter", "hfusion")


@dataclass(frozen=True)
class Traffic:
    """What one launch moved between HBM and the chip; `+` adds launches.

    Attributes:
        bytes_in: bytes that transfers read from HBM.
        bytes_out: bytes that transfers wrote to HBM.
        transfers_in: transfers that read.
        transfers_out: transfers that wrote.
        scalar_loads: single elements that the scalar unit read from HBM.
        scalar_stores: single elements that the scalar unit wrote to HBM.
        atomic_bytes: bytes that atomic updates wrote.
        scalar_bytes: bytes of the scalar loads and stores.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    transfers_in: int = 0
    transfers_out: int = 0
    scalar_loads: int = 0
    scalar_stores: int = 0
    atomic_bytes: int = 0
    scalar_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All bytes moved, in both directions."""
        return self.bytes_in + self.bytes_out + self.atomic_bytes + self.scalar_bytes

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def execute(spec: Specialization, grid: tuple[int, ...], args: Mapping[str, Any], level: str = "ttadapter") -> Traffic:
    """Runs every program of the grid; tensors are written in place.

    Args:
        spec: the launch's specialization.
        grid: one to three positive ints.
        args: the value of each parameter by name (see `lower.bind`): CPU tensors, ints, floats, bools; those that are
            constants of `spec` may be left out.
        level: one of `LEVELS`.

    Raises:
        ValueError: an unknown level, a grid that is not one to three positive ints, or a tensor that is not on the CPU.
        MissingDependencyError: a tool is not installed.
        ToolchainError: the kernel cannot be built at this level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"grid must be one to three positive ints; got {grid!r}")
    passed = [_argument(name, kind, args[name]) for name, kind in spec.runtime.items()]
    pointers = (ctypes.c_void_p * max(1, len(passed)))(*(ctypes.addressof(argument) for argument in passed))
    sizes = (ctypes.c_int32 * 3)(*(*grid, 1, 1)[:3])
    counts = (ctypes.c_int64 * len(Traffic.__dataclass_fields__))()
    _launcher_of(spec, level)(pointers, sizes, counts)
    return Traffic(*counts)


class _Buffer(ctypes.Structure):
    """A one-dimensional memref descriptor: allocation, first element, offset, size and stride in elements."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


_C_TYPES: dict[str, tuple[str, Any]] = {
    "i1": ("int8_t", ctypes.c_int8),
    "i8": ("int8_t", ctypes.c_int8),
    "i16": ("int16_t", ctypes.c_int16),
    "i32": ("int32_t", ctypes.c_int32),
    "i64": ("int64_t", ctypes.c_int64),
    "u8": ("uint8_t", ctypes.c_uint8),
    "u16": ("uint16_t", ctypes.c_uint16),
    "u32": ("uint32_t", ctypes.c_uint32),
    "u64": ("uint64_t", ctypes.c_uint64),
    "fp32": ("float", ctypes.c_float),
}


def _argument(name: str, kind: str, value: Any) -> Any:
    if not kind.startswith("*"):
        return _C_TYPES[kind][1](value)
    if value.device.type != "cpu":
        raise ValueError(f"{name} must be a CPU tensor; it is on {value.device}")
    address = value.data_ptr()
    elements = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    return _Buffer(address, address, 0, elements, 1)


# ---------------------------------------------------------------------------------------------------------- building it
# bishengir's own passes turn its operations into upstream ones; the rest is the upstream way down to LLVM.
# Deallocation frees each tile after its last use: without it a loop over rows would keep every tile of every row.
_PASSES = (
    "--execution-engine-convert-hfusion-to-upstream",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--arith-expand=include-bf16=true",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)

# `__hmf_*` are the device library's functions, which the compiler's upstream conversion leaves as calls.
_DRIVER = """
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {{ void *allocated, *aligned; int64_t offset, size, stride; }} Buffer;

float __hmf_tanhf(float x) {{ return tanhf(x); }}
float __hmf_tanf(float x) {{ return tanf(x); }}
float __hmf_atanf(float x) {{ return atanf(x); }}
float __hmf_log1pf(float x) {{ return log1pf(x); }}
float __hmf_roundf(float x) {{ return roundf(x); }}
float __hmf_recipf(float x) {{ return 1.0f / x; }}
float __hmf_reluf(float x) {{ return x > 0.0f ? x : 0.0f; }}
float __hmf_powf(float x, float y) {{ return powf(x, y); }}

static int64_t counted[8];

void npuk_count(int32_t kind, int64_t elements, int32_t bytes) {{
  switch (kind) {{
    case 0: case 1: counted[kind] += elements * bytes; counted[kind + 2]++; break;
    case 2: case 3: counted[kind + 2] += elements; counted[7] += elements * bytes; break;
    default: counted[6] += elements * bytes;
  }}
}}

void _mlir_ciface_{kernel}({types});

void npuk_launch(void **args, const int32_t *grid, int64_t *result) {{
  static int8_t scratch[65536];
  Buffer lock = {{scratch, scratch, 0, sizeof scratch, 1}}, workspace = lock;
  memset(counted, 0, sizeof counted);
  for (int32_t z = 0; z < grid[2]; z++)
    for (int32_t y = 0; y < grid[1]; y++)
      for (int32_t x = 0; x < grid[0]; x++)
        _mlir_ciface_{kernel}({values});
  memcpy(result, counted, sizeof counted);
}}
"""


@functools.cache
def _host() -> tuple[str, str]:
    """The machine and CPU that LLVM compiles for, as flags; without the first it knows of no vector instructions. Part
    of the key of a library, which may be on a disk that machines share."""
    text = toolchain.invoke("llc", "ask for the host's CPU", [toolchain.host_tool("llc-19"), "--version"]).stdout
    machine, cpu = re.search(r"Default target: (\S+)", text), re.search(r"Host CPU: (\S+)", text)
    assert machine is not None, "llc names its default target"
    return f"-mtriple={machine[1]}", f"-mcpu={cpu[1] if cpu else 'generic'}"


@functools.cache
def _this_module() -> str:
    """What is done to a kernel on its way to a library: part of the library's key, too."""
    return Path(__file__).read_text()


_libraries: dict[tuple[str, str], Callable[..., None]] = {}
_running = threading.Lock()  # a library counts in static variables


def _launcher_of(spec: Specialization, level: str) -> Callable[..., None]:
    """The launch function of the kernel's library, from this process's memory, the disk, or built now."""
    key = (spec.content, level)
    if key not in _libraries:
        text = lower(spec)
        name = toolchain.digest(toolchain.versions(), text, level, _this_module(), *_host())
        path = toolchain.cached(f"host/{spec.name}-{name}.so", lambda made: _build(made, spec, text, level))
        function = ctypes.CDLL(str(path)).npuk_launch
        function.restype = None

        def launch(*arguments: Any) -> None:
            with _running:
                function(*arguments)

        _libraries[key] = launch
    return _libraries[key]


def _build(library: Path, spec: Specialization, lowered: str, level: str) -> None:
    folder = library.parent
    optimizer = toolchain.bishengir("bishengir-opt", "")
    work = [folder / f"kernel.{suffix}" for suffix in ("mlir", "llvm.mlir", "ll", "opt.ll", "o")]
    source, in_llvm, in_ir, optimized, machine = work
    text = lowered if level == "ttadapter" else _through_hfusion(spec.name, lowered, folder)
    source.write_text(instrument(text))
    driver = folder / "driver.c"
    driver.write_text(_driver(spec, _entry_name(lowered), level))

    def step(stage: str, *command: str | Path) -> None:
        toolchain.invoke(spec.name, f"{stage} for the CPU ({level})", command)

    step("lowering to LLVM", optimizer, source, *_PASSES, "-o", in_llvm)
    step("translation", toolchain.host_tool("mlir-translate-19"), "--mlir-to-llvmir", in_llvm, "-o", in_ir)
    # Loops of constant length unrolled into thousands of instructions would take seconds to compile.
    optimize_flags = ("-O2", "--disable-loop-unrolling", *_host())
    step("optimization", toolchain.host_tool("opt-19"), *optimize_flags, in_ir, "-o", optimized)
    # What costs time is done to the IR, sums side by side among it; a library runs for less time than this step takes.
    compile_flags = ("-O0", *_host(), "-relocation-model=pic", "-filetype=obj")
    step("compilation", toolchain.host_tool("llc-19"), *compile_flags, optimized, "-o", machine)
    libraries = toolchain.llvm_libraries()
    linked = ("-lm", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lmlir_c_runner_utils")
    # -Bsymbolic: each library calls its own npuk_count, whichever was loaded first.
    flags = ("-fPIC", "-shared", "-Wl,-Bsymbolic")
    step("linking", toolchain.host_tool("gcc"), *flags, "-o", library, machine, driver, *linked)


def _entry_name(lowered: str) -> str:
    found = re.search(r"func\.func @(\w+)\(", lowered)
    assert found is not None, "a lowered kernel has a function"
    return found[1]


def _driver(spec: Specialization, entry: str, level: str) -> str:
    types, values = ["Buffer *", "Buffer *"], ["&lock", "&workspace"]
    if level == "hfusion":  # the address of the inter-core flags comes first
        types, values = ["int64_t", *types], ["0", *values]
    for place, kind in enumerate(spec.runtime.values()):
        pointer = kind.startswith("*")
        c_type = "Buffer *" if pointer else _C_TYPES[kind][0]
        types.append(c_type)
        values.append(f"(Buffer *)args[{place}]" if pointer else f"*({c_type} *)args[{place}]")
    types += ["int32_t"] * 6
    values += ["grid[0]", "grid[1]", "grid[2]", "x", "y", "z"]
    return _DRIVER.format(kernel=entry, types=", ".join(types), values=", ".join(values))


# --------------------------------------------------------------------------------------------- bishengir's own rewrites
_CONVERSION = re.compile(
    r"(?P<pad>\s*)(?P<result>%\w+) = hfusion\.(?:cast|elemwise_unary) \{(?P<how>.*)\} "
    r"ins\((?P<operand>%\w+) : (?P<from>tensor<(?:\d+x)*(?P<from_element>\w+)>)\) "
    r"outs\(.*-> tensor<(?:\d+x)*(?P<to_element>\w+)>$"
)
_INTERLEAVE = re.compile(
    r"(?P<pad>\s*)(?P<result>%\w+) = hfusion\.interleave (?P<even>%\w+), (?P<odd>%\w+) : "
    r"(?P<kind>tensor<(?P<shape>(?:\d+x)+)\w+>), tensor<.*> -> (?P<to>tensor<.*>)$"
)
_ROUNDING = {"rint": "roundeven", "floor": "floor", "ceil": "ceil", "round": "round", "trunc": "trunc"}


def _through_hfusion(kernel: str, lowered: str, folder: Path) -> str:
    source = folder / "lowered.mlir"
    source.write_text(without_mix_mode(lowered))
    command: list[str | Path] = [
        toolchain.bishengir("bishengir-opt", ""),
        source,
        "--lower-hfusion-pipeline=enable-triton-kernel-compile=true",
    ]
    text = toolchain.invoke(kernel, "rewriting for the vector unit", command).stdout
    # The attributes of the chip's runtime mean nothing to the passes that follow.
    text = re.sub(r"\{hacc\.arg_type = #hacc\.arg_type<\w+>\}", "", text)
    text = re.sub(r"hacc\.\w+(?: = #hacc\.\w+<\w+>)?(?:, )?", "", text)
    return "\n".join(_spelled_out(text.splitlines()))


def _spelled_out(lines: Iterable[str]) -> Iterator[str]:
    """Writes out what the conversion to upstream operations drops: `vnot`, how casts to whole numbers round, and
    `interleave`, which puts the elements of two tensors by turns."""
    for number, line in enumerate(lines):
        by_turns = _INTERLEAVE.match(line)
        if by_turns is not None:
            yield from _interleaved(number, by_turns)
            continue
        found = _CONVERSION.match(line)
        if found is None:
            yield line
            continue
        pad, operand, kind = found["pad"], found["operand"], found["from"]
        rounding = re.search(r"round_mode<(\w+)>", found["how"])
        # floor and its like are casts from fp32 to fp32; to a narrower float a rounding mode is about the last bit.
        to_whole = found["to_element"] in ("f32", "i8", "i16", "i32", "i64")
        if "unary_fn<vnot>" in found["how"]:
            ones = "true" if found["from_element"] == "i1" else "-1"
            yield f"{pad}%npuk_ones{number} = arith.constant dense<{ones}> : {kind}"
            yield f"{pad}{found['result']} = arith.xori {operand}, %npuk_ones{number} : {kind}"
        elif rounding and rounding[1] in _ROUNDING and to_whole and found["from_element"] == "f32":
            yield f"{pad}%npuk_rounded{number} = math.{_ROUNDING[rounding[1]]} {operand} : {kind}"
            yield line.replace(f"ins({operand} ", f"ins(%npuk_rounded{number} ")
        else:
            yield line


def _interleaved(number: int, found: re.Match[str]) -> Iterator[str]:
    sizes = found["shape"].rstrip("x").split("x")
    before, kind, to = ["0"] * (len(sizes) - 1), found["kind"], found["to"]
    strides = ", ".join(["1"] * (len(sizes) - 1) + ["2"])
    names = [f"%npuk_empty{number}", f"%npuk_even{number}", found["result"]]
    yield f"{found['pad']}{names[0]} = tensor.empty() : {to}"
    for place, part in enumerate((found["even"], found["odd"])):
        at = f"[{', '.join([*before, str(place)])}] [{', '.join(sizes)}] [{strides}] : {kind} into {to}"
        yield f"{found['pad']}{names[place + 1]} = tensor.insert_slice {part} into {names[place]}{at}"


# --------------------------------------------------------------------------------------------------- counting transfers
_VALUE = r"%[\w$.-]+"
_ARGUMENT = re.compile(rf"({_VALUE}): memref<")
_VIEW = re.compile(rf"\s*({_VALUE})(?::\d+)? = (?:memref\.(\w+) ({_VALUE})|.*)")
_COPY = re.compile(rf"\s*memref\.copy ({_VALUE}), ({_VALUE}) : (memref<.*>) to (memref<.*>)$")
_STORE = re.compile(
    r"\s*bufferization\.materialize_in_destination .* in (?:restrict )?writable "
    rf"({_VALUE}) : \(.*, (memref<.*>)\) -> \(\)"
)
_SCALAR_LOAD = re.compile(rf"\s*{_VALUE} = (?:memref|affine)\.load ({_VALUE})\[.*\] : (memref<.*>)")
_SCALAR_STORE = re.compile(rf"\s*(?:memref|affine)\.store {_VALUE}, ({_VALUE})\[.*\] : (memref<.*>)")
_ATOMIC = re.compile(rf"\s*linalg\.generic .*outs\(({_VALUE}) : (memref<.*>)\) attrs = .*GenericAtomicRMW")
_SHAPE = re.compile(r"memref<((?:[\d?]+x)*)(\w+)")
# The body of a sum. Its order is the compiler's to choose: the chip adds up blocks side by side, a plain loop would add
# one element after the other, and thousands of them would gather an error that no kernel makes.
_SUM = re.compile(r"(\s*%\w+ = arith\.addf %in\w*, %init\w*)( : f32)$")
_VIEWS = {"reinterpret_cast", "subview", "cast", "collapse_shape", "expand_shape"}
_IN, _OUT, _LOAD, _SCALAR_OUT, _UPDATE = range(5)
_ELEMENT_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "i1": 1}


def instrument(text: str) -> str:
    """Adds to a lowered kernel a call of `npuk_count(kind, elements, bytes of an element)` beside every HBM access, and
    leaves the order of sums open."""
    in_hbm: set[str] = set()
    fresh = itertools.count()
    result: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("func.func @"):
            in_hbm = set(_ARGUMENT.findall(line))
            line = line.replace("attributes {", "attributes {llvm.emit_c_interface, ", 1)
        view = _VIEW.match(line)
        if view:
            # Names come again in sibling regions, for other values.
            in_hbm.discard(view[1])
            if view[2] in _VIEWS and view[3] in in_hbm:
                in_hbm.add(view[1])
        pad = line[: len(line) - len(line.lstrip())]
        for kind, value, memref in _accesses(line):
            if value in in_hbm:
                result += [pad + call for call in _count_call(kind, value, memref, next(fresh))]
        result.append(_SUM.sub(r"\1 fastmath<reassoc>\2", line))
        if line.startswith("module"):
            result.append("  func.func private @npuk_count(i32, index, i32)")
    return "\n".join(result) + "\n"


def _accesses(line: str) -> Iterator[tuple[int, str, str]]:
    """The (kind, memref value, its type) that a line may access in HBM."""
    if copy := _COPY.match(line):
        yield _IN, copy[1], copy[3]
        yield _OUT, copy[2], copy[4]
    for kind, pattern in ((_OUT, _STORE), (_LOAD, _SCALAR_LOAD), (_SCALAR_OUT, _SCALAR_STORE), (_UPDATE, _ATOMIC)):
        if found := pattern.match(line):
            yield kind, found[1], found[2]


def _count_call(kind: int, value: str, memref: str, number: int) -> Iterator[str]:
    shape = _SHAPE.match(memref)
    assert shape is not None, f"the type of an HBM access is a memref, not {memref}"
    # A scalar access is to one element, whatever the size of the memref that it is in.
    dims = [] if kind in (_LOAD, _SCALAR_OUT) else shape[1].split("x")[:-1]
    name = f"%npuk{number}"
    yield f"{name}_kind = arith.constant {kind} : i32"
    yield f"{name}_bytes = arith.constant {_ELEMENT_BYTES[shape[2]]} : i32"
    yield f"{name}_n = arith.constant {math.prod(int(d) for d in dims if d != '?')} : index"
    elements = f"{name}_n"
    for axis in (axis for axis, dim in enumerate(dims) if dim == "?"):
        yield f"{name}_axis{axis} = arith.constant {axis} : index"
        yield f"{name}_dim{axis} = memref.dim {value}, {name}_axis{axis} : {memref}"
        yield f"{name}_n{axis} = arith.muli {elements}, {name}_dim{axis} : index"
        elements = f"{name}_n{axis}"
    yield f"func.call @npuk_count({name}_kind, {elements}, {name}_bytes) : (i32, index, i32) -> ()"
