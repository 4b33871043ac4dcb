"""Runs a lowered kernel on CPU tensors over its full grid, and counts its traffic between HBM and the chip.

The compiler's MLIR is instrumented (with a call at each transfer), lowered to machine code with the compiler's own
passes and LLVM 19, and linked with a small C program that loops over the grid. The kernel gets raw pointers, as on the
chip, so it reads and writes non-contiguous tensors and tensors with an offset as the chip would.

Each launch runs in its own process, so a wrong kernel cannot crash the caller. Its tensors lie in shared memory, each
storage ends at the end of a page, and there is a protected zone before and after it: an access to the first byte past
the end, as by a kernel that lacks a mask, is reported with the argument's name.

There are two levels. `"ttadapter"` is the output of triton-ascend; `"hfusion"` also includes bishengir's rewrites for
the vector unit (bf16 arithmetic in fp32, division, tanh, rounding modes, NaN rules), which is closer to the chip but
cannot run atomics. Programs of a grid run one after the other.
"""

import ctypes
import functools
import itertools
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import toolchain
from .lower import Specialization, lower
from .plan import without_mix_mode
from .toolchain import ToolchainError

__all__ = ["LEVELS", "Traffic", "execute"]

LEVELS = ("ttadapter", "hfusion")


@dataclass(frozen=True)
class Traffic:
    """The traffic of a launch between HBM and the chip; `+` adds launches.

    Attributes:
        bytes_in: bytes that transfers read from HBM.
        bytes_out: bytes that transfers wrote to HBM.
        transfers_in: the number of transfers that read.
        transfers_out: the number of transfers that wrote.
        scalar_loads: the number of elements that the scalar unit read from HBM.
        scalar_stores: the number of elements that the scalar unit wrote to HBM.
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
        """All bytes moved in both directions."""
        return self.bytes_in + self.bytes_out + self.atomic_bytes + self.scalar_bytes

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def execute(spec: Specialization, grid: tuple[int, ...], args: Mapping[str, Any], level: str = "ttadapter") -> Traffic:
    """Runs every program of the grid, and writes tensors in place.

    Args:
        spec: the launch's specialization.
        grid: one to three positive ints.
        args: the value of each parameter by name (see `lower.bind`): CPU tensors, ints, floats, bools; constants of
            `spec` may be omitted.
        level: one of `LEVELS`.

    Raises:
        ValueError: an unknown level, a grid that is not one to three positive ints, or a tensor that is not on the CPU.
        MissingDependencyError: a tool is not installed.
        ToolchainError: the kernel cannot be built at this level, accesses memory outside its arguments, or does not
            end. Tensors are then unchanged.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"grid must be one to three positive ints; got {grid!r}")
    program = _program_of(spec, level)
    stage = f"running on the CPU ({level})"
    with open(os.memfd_create(spec.name), "r+b") as file:
        memory = _Memory(file.fileno(), spec, grid, args)
        where = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        done = toolchain.invoke(spec.name, stage, [program, where], check=False)
    fault = memory.fault()
    if fault is None and done.returncode != 0:
        fault = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    if fault is not None:
        raise ToolchainError(spec.name, stage, [fault, *toolchain.telling_lines(done.stderr)])
    return memory.take_back()


# --------------------------------------------------------------------------------------------------- memory of a launch
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


# The memory begins with 64-bit integers: the grid, the counts, the storage of an illegal access (counted from 1; -1:
# the access is near no argument's storage) with the distance from its start or end, the number of storages; then three
# integers for each argument and two for each storage.
_GRID, _COUNTS, _FAULT, _STORAGES, _ARGUMENTS = 0, 3, 11, 13, 14
_PER_ARGUMENT, _PER_STORAGE = 3, 2


class _Memory:
    """The arguments and counts of a launch, in a file that both processes map.

    Each storage ends at the end of a page. The rest of its first page has a fill value, which is checked afterwards.
    """

    def __init__(self, file: int, spec: Specialization, grid: tuple[int, ...], args: Mapping[str, Any]) -> None:
        given = {name: args[name] for name, kind in spec.runtime.items() if kind.startswith("*")}
        for name, tensor in given.items():
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} must be a CPU tensor; it is on {tensor.device}")
        # Arguments that share a storage, such as two halves of a tensor, also share it in the other process.
        self._names: dict[int, list[str]] = {}
        self._storages: list[torch.Tensor] = []
        for name, tensor in given.items():
            address = tensor.untyped_storage().data_ptr()
            if address not in self._names:
                self._storages.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
            self._names.setdefault(address, []).append(name)
        first = _ARGUMENTS + _PER_ARGUMENT * len(spec.runtime)
        ends = list(itertools.accumulate((_in_pages(s.numel()) for s in self._storages), initial=_in_pages(
            8 * (first + _PER_STORAGE * len(self._storages)))))  # fmt: skip
        os.ftruncate(file, ends[-1])
        whole = torch.frombuffer(mmap.mmap(file, ends[-1]), dtype=torch.uint8)
        self._words = whole[: ends[0]].view(torch.int64)
        self._words[_GRID:_COUNTS] = torch.tensor((*grid, 1, 1)[:3])
        self._words[_STORAGES] = len(self._storages)
        self._copies, self._slacks = [], []
        for number, (storage, start, end) in enumerate(zip(self._storages, ends, ends[1:], strict=False)):
            at = first + _PER_STORAGE * number
            self._words[at : at + _PER_STORAGE] = torch.tensor((start, storage.numel()))
            self._slacks.append(whole[start : end - storage.numel()].fill_(_FILL))
            self._copies.append(whole[end - storage.numel() : end].copy_(storage))
        places = {name: number for number, names in enumerate(self._names.values()) for name in names}
        for number, (name, kind) in enumerate(spec.runtime.items()):
            at = _ARGUMENTS + _PER_ARGUMENT * number
            if name in given:
                self._words[at : at + _PER_ARGUMENT] = torch.tensor(_placed(places[name], given[name]))
            else:
                value = bytes(_C_TYPES[kind][1](args[name]))
                whole[8 * at : 8 * at + len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)

    def fault(self) -> str | None:
        """Returns a description of an access outside the arguments, or None."""
        names = [" or ".join(names) for names in self._names.values()]
        storage, distance = self._words[_FAULT:_STORAGES].tolist()
        if storage > 0:
            where = f"{distance} bytes past its end" if distance >= 0 else f"{-distance} bytes before its start"
            return f"{names[storage - 1]} is read or written {where}"
        if storage < 0:
            return "memory that is no argument's is read or written"
        for name, slack in zip(names, self._slacks, strict=True):
            written = (slack != _FILL).nonzero()
            if len(written):
                return f"{name} is written {len(slack) - int(written[0])} bytes before its start"
        return None

    def take_back(self) -> "Traffic":
        """Copies the results into the tensors, and returns the counts."""
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.copy_(copy)
        return Traffic(*self._words[_COUNTS:_FAULT].tolist())


_FILL = 0xA5


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _placed(storage: int, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns a tensor's storage, the offset of its first byte, and the number of elements from there to the end."""
    first = int(tensor.storage_offset())
    elements = tensor.untyped_storage().nbytes() // tensor.element_size() - first
    return storage, first * tensor.element_size(), elements


# ------------------------------------------------------------------------------------------------- building the program
# The first pass, bishengir's own, converts its operations into upstream ones; the rest is upstream's lowering to LLVM.
# Deallocation frees each tile after its last use; without it a loop over rows would leak every tile.
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

# The compiler's upstream conversion leaves calls of the device library's functions, `__hmf_*`.
_DRIVER = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {{ void *allocated, *aligned; int64_t offset, size, stride; }} Buffer;

float __hmf_tanhf(float x) {{ return tanhf(x); }}
float __hmf_tanf(float x) {{ return tanf(x); }}
float __hmf_atanf(float x) {{ return atanf(x); }}
float __hmf_log1pf(float x) {{ return log1pf(x); }}
float __hmf_roundf(float x) {{ return roundf(x); }}
float __hmf_recipf(float x) {{ return 1.0f / x; }}
float __hmf_reluf(float x) {{ return x > 0.0f ? x : 0.0f; }}
float __hmf_powf(float x, float y) {{ return powf(x, y); }}

enum {{ GRID = {grid}, COUNTS = {counts}, FAULT = {fault}, STORAGES = {storages}, ARGUMENTS = {arguments},
        PER_ARGUMENT = {per_argument}, PER_STORAGE = {per_storage}, N_ARGUMENTS = {n_arguments} }};
static const int64_t zone = 1 << 30;
static int64_t *words;
static char *starts[N_ARGUMENTS + 1], *ends[N_ARGUMENTS + 1];

void npuk_count(int32_t kind, int64_t elements, int32_t bytes) {{
  int64_t *counted = words + COUNTS;
  switch (kind) {{
    case 0: case 1: counted[kind] += elements * bytes; counted[kind + 2]++; break;
    case 2: case 3: counted[kind + 2] += elements; counted[7] += elements * bytes; break;
    default: counted[6] += elements * bytes;
  }}
}}

static void left(int number, siginfo_t *info, void *context) {{
  char *at = info->si_addr;
  words[FAULT] = -1;
  for (int i = 0; i < words[STORAGES]; i++) {{
    if (at >= ends[i] && at < ends[i] + zone) words[FAULT] = i + 1, words[FAULT + 1] = at - ends[i];
    if (at < starts[i] && at >= starts[i] - zone) words[FAULT] = i + 1, words[FAULT + 1] = at - starts[i];
  }}
  _exit(1);
}}

static void map_storage(int file, int i) {{
  const int64_t *storage = words + ARGUMENTS + PER_ARGUMENT * N_ARGUMENTS + PER_STORAGE * i;
  int64_t page = sysconf(_SC_PAGESIZE), pages = (storage[1] + page - 1) / page * page;
  char *place = mmap(0, zone + pages + zone, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) _exit(2);
  ends[i] = place + zone + pages, starts[i] = ends[i] - storage[1];
  int flags = MAP_SHARED | MAP_FIXED;
  if (pages && mmap(place + zone, pages, PROT_READ | PROT_WRITE, flags, file, storage[0]) == MAP_FAILED) _exit(2);
}}

static Buffer buffer(int i) {{
  const int64_t *argument = words + ARGUMENTS + PER_ARGUMENT * i;
  char *start = starts[argument[0]] + argument[1];
  return (Buffer){{start, start, 0, argument[2], 1}};
}}

void _mlir_ciface_{kernel}({types});

int main(int count, char **arguments) {{
  static int8_t scratch[65536];
  Buffer lock = {{scratch, scratch, 0, sizeof scratch, 1}}, workspace = lock;
  int file = open(arguments[1], O_RDWR);
  struct stat whole;
  if (file < 0 || fstat(file, &whole)) return 2;
  words = mmap(0, whole.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (words == MAP_FAILED) return 2;
  for (int i = 0; i < words[STORAGES]; i++) map_storage(file, i);
  struct sigaction action = {{.sa_sigaction = left, .sa_flags = SA_SIGINFO}};
  sigaction(SIGSEGV, &action, 0), sigaction(SIGBUS, &action, 0);
  Buffer buffers[N_ARGUMENTS + 1];
  {buffers}
  int32_t grid[3] = {{words[GRID], words[GRID + 1], words[GRID + 2]}};
  for (int32_t z = 0; z < grid[2]; z++)
    for (int32_t y = 0; y < grid[1]; y++)
      for (int32_t x = 0; x < grid[0]; x++)
        _mlir_ciface_{kernel}({values});
  return 0;
}}
"""


@functools.cache
def _host() -> tuple[str, str]:
    """Returns flags for the host's machine and CPU, as LLVM names them; without the first LLVM uses no vector
    instructions. They are part of a program's cache key, since machines may share the cache's disk."""
    text = toolchain.invoke("llc", "ask for the host's CPU", [toolchain.host_tool("llc-19"), "--version"]).stdout
    machine, cpu = re.search(r"Default target: (\S+)", text), re.search(r"Host CPU: (\S+)", text)
    assert machine is not None, "llc names its default target"
    return f"-mtriple={machine[1]}", f"-mcpu={cpu[1] if cpu else 'generic'}"


@functools.cache
def _this_module() -> str:
    """Returns the source of this module, which is part of a program's cache key."""
    return Path(__file__).read_text()


def _program_of(spec: Specialization, level: str) -> Path:
    """Returns the path of the program that runs the kernel; builds it if it is not cached."""
    text = lower(spec)
    name = toolchain.digest(toolchain.versions(), text, level, _this_module(), *_host())
    return toolchain.cached(f"host/{spec.name}-{name}", lambda made: _build(made, spec, text, level))


def _build(program: Path, spec: Specialization, lowered: str, level: str) -> None:
    folder = program.parent
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
    # Unrolling loops of constant length yields thousands of instructions, which would take seconds to compile.
    optimize_flags = ("-O2", "--disable-loop-unrolling", *_host())
    step("optimization", toolchain.host_tool("opt-19"), *optimize_flags, in_ir, "-o", optimized)
    # `opt` has already done the optimizations that matter, such as vectorizing sums; more than -O0 in `llc` would take
    # longer than the program runs.
    compile_flags = ("-O0", *_host(), "-relocation-model=pic", "-filetype=obj")
    step("compilation", toolchain.host_tool("llc-19"), *compile_flags, optimized, "-o", machine)
    libraries = toolchain.llvm_libraries()
    linked = ("-lm", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lmlir_c_runner_utils")
    step("linking", toolchain.host_tool("gcc"), "-O2", "-o", program, machine, driver, *linked)


def _entry_name(lowered: str) -> str:
    found = re.search(r"func\.func @(\w+)\(", lowered)
    assert found is not None, "a lowered kernel has a function"
    return found[1]


def _driver(spec: Specialization, entry: str, level: str) -> str:
    types, values = ["Buffer *", "Buffer *"], ["&lock", "&workspace"]
    if level == "hfusion":  # the first argument is the address of the inter-core flags
        types, values = ["int64_t", *types], ["0", *values]
    for place, kind in enumerate(spec.runtime.values()):
        pointer = kind.startswith("*")
        c_type = "Buffer *" if pointer else _C_TYPES[kind][0]
        types.append(c_type)
        at = _ARGUMENTS + _PER_ARGUMENT * place
        values.append(f"&buffers[{place}]" if pointer else f"*({c_type} *)&words[{at}]")
    types += ["int32_t"] * 6
    values += ["grid[0]", "grid[1]", "grid[2]", "x", "y", "z"]
    pointers = [place for place, kind in enumerate(spec.runtime.values()) if kind.startswith("*")]
    return _DRIVER.format(
        kernel=entry,
        types=", ".join(types),
        values=", ".join(values),
        buffers="".join(f"buffers[{place}] = buffer({place}); " for place in pointers),
        grid=_GRID, counts=_COUNTS, fault=_FAULT, storages=_STORAGES, arguments=_ARGUMENTS,
        per_argument=_PER_ARGUMENT, per_storage=_PER_STORAGE, n_arguments=len(spec.runtime),
    )  # fmt: skip


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
    # The following passes do not know the attributes of the chip's runtime.
    text = re.sub(r"\{hacc\.arg_type = #hacc\.arg_type<\w+>\}", "", text)
    text = re.sub(r"hacc\.\w+(?: = #hacc\.\w+<\w+>)?(?:, )?", "", text)
    return "\n".join(_spelled_out(text.splitlines()))


def _spelled_out(lines: Iterable[str]) -> Iterator[str]:
    """Replaces operations that the conversion to upstream ones does not handle: `vnot`, the rounding modes of casts to
    integers, and `interleave`, which alternates the elements of two tensors."""
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
        # floor, ceil and similar functions are casts from fp32 to fp32; in a cast to a narrower float a rounding mode
        # concerns only the last bit.
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
# The body of a sum, whose order the compiler may choose. The chip adds blocks in parallel; a loop that adds thousands
# of elements one after the other would accumulate a larger error than the kernel's.
_SUM = re.compile(r"(\s*%\w+ = arith\.addf %in\w*, %init\w*)( : f32)$")
_VIEWS = {"reinterpret_cast", "subview", "cast", "collapse_shape", "expand_shape"}
_IN, _OUT, _LOAD, _SCALAR_OUT, _UPDATE = range(5)
_ELEMENT_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "i1": 1}


def instrument(text: str) -> str:
    """Adds a call of `npuk_count(kind, elements, bytes of an element)` to a lowered kernel before every HBM access, and
    allows reassociation of sums."""
    in_hbm: set[str] = set()
    fresh = itertools.count()
    result: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("func.func @"):
            in_hbm = set(_ARGUMENT.findall(line))
            line = line.replace("attributes {", "attributes {llvm.emit_c_interface, ", 1)
        view = _VIEW.match(line)
        if view:
            # Sibling regions reuse names for other values.
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
    """Returns (kind, memref value, its type) for each access to HBM that a line may make."""
    if copy := _COPY.match(line):
        yield _IN, copy[1], copy[3]
        yield _OUT, copy[2], copy[4]
    for kind, pattern in ((_OUT, _STORE), (_LOAD, _SCALAR_LOAD), (_SCALAR_OUT, _SCALAR_STORE), (_UPDATE, _ATOMIC)):
        if found := pattern.match(line):
            yield kind, found[1], found[2]


def _count_call(kind: int, value: str, memref: str, number: int) -> Iterator[str]:
    shape = _SHAPE.match(memref)
    assert shape is not None, f"the type of an HBM access is a memref, not {memref}"
    # A scalar access reads or writes one element, regardless of the memref's size.
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
