"""What the package knows of devices. Ops, tiles and patches ask here what a device can do, and name none.

Beside this file only those name a kind of device that look up, print or stand in for one: `backends.py` and
`table.json`, the command line, `fit/` and `ascend/` (`tests/test_device.py` has the list).

`spec(device)` returns a frozen `DeviceSpec`, queried once per device and cached, so that no call of an op queries a
driver. `use_chip("Ascend910B4")` makes the CPU return the spec of that chip, to compile and check kernels without it.
The environment variable NPU_KERNELS_CHIP does the same; with backend "ascend-lowering" its default is Ascend910B4.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from .support.switch import variable

__all__ = [
    "ASCEND_CHIPS",
    "KINDS",
    "DeviceSpec",
    "accelerator",
    "captures_unasked",
    "chip_spec",
    "compute_capability",
    "gains_by_segments_alone",
    "graph_class",
    "grouped_product_by",
    "has_atomic_index_add",
    "has_flash_of_its_own",
    "has_fp32_output_product",
    "has_fp64",
    "has_libdevice",
    "host_multiplies_bf16",
    "is_capturing",
    "is_current",
    "is_out_of_memory",
    "keeps_compiled",
    "kind_of",
    "most_graphs",
    "npu_stream",
    "occupy",
    "sized_as",
    "spec",
    "stand_in",
    "synchronize",
    "try_fp32_output_product",
    "type_of",
    "use_chip",
    "use_spec",
    "widest_flash_head",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

KINDS = ("npu", "cuda", "cpu", "other")
"""Kinds of devices: Ascend NPUs, CUDA GPUs of NVIDIA, the host, and all others, where the ops run in torch."""


@dataclass(frozen=True)
class DeviceSpec:
    """The properties of a device that tiling uses.

    Attributes:
        kind: one of `KINDS`.
        name: the chip, for example `"Ascend910B4"` or `"NVIDIA H200"`.
        vector_cores: number of programs that run at once for elementwise work (Ascend: vector cores; CUDA:
            multiprocessors; CPU: 1).
        on_chip_bytes: on-chip memory of one such core that a kernel may use (Ascend: the unified buffer; CUDA: the
            register file; CPU: 0).
        memory_bytes: device memory; 0 if unknown.
    """

    kind: str
    name: str
    vector_cores: int
    on_chip_bytes: int
    memory_bytes: int = 0

    def __hash__(self) -> int:
        # The spec is a key of the caches of tiles, and hashing all fields takes Python four times as long.
        return hash(self.name)

    @property
    def has_buffer(self) -> bool:
        """Whether a program runs on a core with a buffer that the compiler plans. Tiles then depend on the bytes of the
        buffer, and there are as many programs as cores."""
        return self.kind == "npu"

    @property
    def has_warps(self) -> bool:
        """Whether a program is a group of warps with registers, and the hardware schedules any number of programs."""
        return self.kind == "cuda"

    @property
    def is_host(self) -> bool:
        """Whether the device is the processor that Python runs on."""
        return self.kind == "cpu"


# The vector cores and the unified buffer that `bishengir-compile --target=<chip>` (ascendnpu-ir 1.2.0) plans with.
ASCEND_CHIPS: dict[str, DeviceSpec] = {
    name: DeviceSpec("npu", name, vector_cores, on_chip_kib * KIB)
    for name, vector_cores, on_chip_kib in (
        ("Ascend910B1", 48, 192),
        ("Ascend910B2", 48, 192),
        ("Ascend910B2C", 48, 192),
        ("Ascend910B3", 40, 192),
        ("Ascend910B4", 40, 192),
        ("Ascend910B4-1", 40, 192),
        ("Ascend910_9362", 40, 192),
        ("Ascend910_9372", 40, 192),
        ("Ascend910_9381", 48, 192),
        ("Ascend910_9382", 48, 192),
        ("Ascend910_9391", 48, 192),
        ("Ascend910_9392", 48, 192),
        *((f"Ascend950{name}", 64, 248) for name in (
            "DT_9581", "DT_9582", "DT_9583", "DT_9584", "DT_9585", "DT_9586", "DT_9587", "DT_9588", "PR_9589",
            "PR_958b")),
        *((f"Ascend950{name}", 56, 248) for name in (
            "DT_9571", "DT_9572", "DT_9573", "DT_9574", "DT_9575", "DT_9576", "DT_9577", "DT_9578", "PR_9579",
            "PR_957b", "PR_957c", "PR_957d")),
        *((f"Ascend950{name}", 72, 248) for name in (
            "DT_9591", "DT_9592", "DT_9595", "DT_9596", "DT_95A1", "DT_95A2", "PR_9599")),
        *((f"Ascend950{name}", 16, 248) for name in ("DT_950x", "DT_950y")),
        ("Ascend950PR_950z", 8, 248),
    )
}  # fmt: skip
_CYCLES_PER_SECOND = 2e9
# The smallest chips of the family and of the generation with more memory: tiles that fit them fit the others.
_UNKNOWN_ASCEND, _UNKNOWN_950 = ASCEND_CHIPS["Ascend910B4"], ASCEND_CHIPS["Ascend950PR_9579"]
_CPU = DeviceSpec("cpu", "cpu", vector_cores=1, on_chip_bytes=0)

_override: contextvars.ContextVar[DeviceSpec | None] = contextvars.ContextVar("npu_kernels_chip", default=None)
_stood_in_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("npu_kernels_kind", default=None)


def chip_spec(name: str) -> DeviceSpec:
    """Returns the `DeviceSpec` of an Ascend chip. Raises `ValueError` for a name that is not in `ASCEND_CHIPS`."""
    if name not in ASCEND_CHIPS:
        raise ValueError(f"chip must be one of {', '.join(ASCEND_CHIPS)}; got {name!r}")
    return ASCEND_CHIPS[name]


def sized_as(name: str) -> DeviceSpec:
    """Returns the chip whose tiles an Ascend chip uses: itself, or the smallest of its generation if it is unknown."""
    return ASCEND_CHIPS.get(name, _UNKNOWN_950 if name.startswith("Ascend950") else _UNKNOWN_ASCEND)


@contextlib.contextmanager
def use_spec(device_spec: DeviceSpec) -> Iterator[None]:
    """Makes every device return `device_spec` inside the `with` block, on this thread."""
    token = _override.set(device_spec)
    try:
        yield
    finally:
        _override.reset(token)


@contextlib.contextmanager
def stand_in(device_spec: DeviceSpec) -> Iterator[None]:
    """Like `use_spec`, but the host also has that kind, so that all decisions are those of that device. It is meant for
    tensors without memory, of which only the shapes are read."""
    token = _stood_in_for.set(device_spec.kind)
    try:
        with use_spec(device_spec):
            yield
    finally:
        _stood_in_for.reset(token)


def use_chip(name: str) -> contextlib.AbstractContextManager[None]:
    """Makes every device return the spec of an Ascend chip inside the `with` block, to compile without the card."""
    return use_spec(chip_spec(name))


def stands_for_npu() -> bool:
    """Whether `use_chip` or `use_spec` currently makes every device return the spec of an NPU."""
    override = _override.get()
    return override is not None and override.kind == "npu"


@functools.cache
def torch_npu_error() -> Exception | None:
    """Returns why torch_npu cannot be imported, or None if it can. The import takes seconds and starts torch_npu's
    runtime, so call this only if the answer is necessary."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # torch_npu is not installed, a driver library is missing, or it was built for another torch.
        return error
    return None


@functools.cache
def torch_npu_state() -> str | None:
    """Returns why an installed torch_npu does not make this machine train on an NPU; None if it does or is missing."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    error = torch_npu_error()
    if error is not None:
        return f"torch_npu is installed, but cannot be imported ({type(error).__name__}: {error})"
    # Not `accelerator`, whose result may have been cached before this import.
    return None if torch.npu.is_available() else "torch_npu is installed, but finds no NPU"  # type: ignore[attr-defined]


@functools.cache
def _of_environment(chip: str, backend: str) -> DeviceSpec:
    if chip:
        return chip_spec(chip)
    # "ascend-lowering" needs the tiles of a chip, because it executes the code that an NPU would run.
    return _UNKNOWN_ASCEND if "ascend-lowering" in backend else _CPU


@functools.cache
def _query(device: torch.device) -> DeviceSpec | None:
    """Queries the driver for the spec of an accelerator; returns None for the host."""
    kind, index = device.type, device.index or 0
    if _KINDS.get(kind) == "cuda":
        p = torch.cuda.get_device_properties(index)
        # 64 Ki 32-bit registers per multiprocessor on every chip since Kepler.
        return DeviceSpec("cuda", p.name, p.multi_processor_count, 256 * KIB, p.total_memory)
    if kind == "npu":
        p = getattr(torch, kind).get_device_properties(index)  # torch_npu adds torch.npu
        known = ASCEND_CHIPS.get(p.name)
        if known is None:
            like = sized_as(p.name)
            warnings.warn(
                f"unknown Ascend chip {p.name!r}: tiles are sized as for {like.name} "
                f"(known: {', '.join(ASCEND_CHIPS)})",
                stacklevel=2,
            )
            known = replace(like, name=p.name)
        # Use the card's number of cores, since some may be disabled; a torch_npu without it leaves the table's number.
        cores = getattr(p, "vector_core_num", 0)
        return replace(known, vector_cores=cores if cores > 0 else known.vector_cores, memory_bytes=p.total_memory)
    return None if kind_of(device) == "cpu" else DeviceSpec("other", kind, vector_cores=1, on_chip_bytes=0)


# A meta tensor has no device; it is treated as a tensor of the host, or of the chip of `use_chip`.
_HOST = ("cpu", "meta")
# PyTorch calls AMD's GPUs "cuda", too. Every figure and tile of ours is NVIDIA's: on AMD's the ops run in torch.
_KINDS = {"npu": "npu", "cuda": "cuda" if torch.version.hip is None else "other"}


@functools.cache
def type_of(device: torch.device) -> str:
    """Caches `device.type`, for which PyTorch makes a new string every time."""
    return device.type


def kind_of(device: torch.device) -> str:
    """Returns the kind of a torch device, one of `KINDS`."""
    kind = type_of(device)
    if kind in _HOST:
        return _stood_in_for.get() or "cpu"
    return _KINDS.get(kind, "other")


def spec(device: torch.device) -> DeviceSpec:
    """Returns the `DeviceSpec` of a torch device. It is cached, and so cheap enough for every call of an op."""
    override = _override.get()
    if override is not None:
        return override
    found = _query(device)
    if found is not None:
        return found
    return _of_environment(variable("NPU_KERNELS_CHIP"), variable("NPU_KERNELS_BACKEND"))


def accelerator() -> str:
    """Returns the kind of device that training would use here: `"npu"`, `"cuda"` or `"cpu"`; `"cpu"` in `stand_in`."""
    return "cpu" if _stood_in_for.get() else _accelerator()


@functools.cache
def _accelerator() -> str:
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue. The CPU has none."""
    if device.type in ("cuda", "npu"):
        getattr(torch, device.type).synchronize(device)


def occupy(device: torch.device, seconds: float = 1e-3) -> None:
    """Keeps the device busy for about so long. Only CUDA supports this.

    Args:
        device: the device.
        seconds: for how long; by default longer than Python needs for a call, up to half of it for a backward on a slow
            host.
    """
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


_npu_products: dict[int | None, bool] = {}
# Torch before 2.8 has no `out_dtype`, whatever the device.
_TORCH_HAS_IT = "dtype_out" in torch.ops.aten.addmm.overloads()


def has_fp32_output_product(device: torch.device) -> bool:
    """Whether `torch.mm` and `torch.addmm` with `out_dtype=torch.float32` take bf16 and fp16 factors on a device.

    On CUDA they do. torch_npu 2.13 lists both functions and older versions do not, so an NPU is tested once.
    """
    if not _TORCH_HAS_IT:
        return False
    kind = kind_of(device)
    if kind != "npu":
        return kind == "cuda"
    known = _npu_products.get(device.index)
    if known is None:
        known = try_fp32_output_product(device)
        if known is None:
            return False
        _npu_products[device.index] = known
    return known


def host_multiplies_bf16() -> bool:
    """Whether PyTorch multiplies bf16 matrices on the host without converting them to fp32 first."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def try_fp32_output_product(where: torch.device) -> bool | None:
    """Tests whether these products work on a device as the LM head uses them, on numbers that are exact in fp32 and not
    in bf16. Returns None for tensors without values (fake tensors). Waits for the device."""
    a = (torch.arange(33 * 70, device="cpu").view(33, 70) % 127).to(torch.bfloat16)
    b = (torch.arange(70 * 48, device="cpu").view(70, 48) % 7 - 2).to(torch.bfloat16)
    total = torch.empty(33, 48, dtype=torch.float32, device=where)
    if type(total) is not torch.Tensor:
        return None
    try:
        torch.mm(a.to(where), b.to(where), out_dtype=torch.float32, out=total)
        torch.addmm(total, a.to(where), b.to(where), out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        # The device or this torch does not implement them.
        return False
    return torch.equal(total.cpu(), 2 * (a.float() @ b.float()))


def has_fp64(device: torch.device) -> bool:
    """Whether the device computes in fp64."""
    return kind_of(device) != "npu"


@functools.cache
def _current_device(kind: str) -> Callable[[], int]:
    current: Callable[[], int] = torch.get_device_module(kind).current_device
    return current


def is_current(device: torch.device) -> bool:
    """Whether a device is the current one, on which kernels are launched."""
    kind = type_of(device)
    return kind == "cpu" or device.index is None or _current_device(kind)() == device.index


@functools.cache
def keeps_compiled(device: torch.device) -> bool:
    """Whether a compiled kernel may be cached and launched again without Triton's lookup: Triton specialises it only on
    dtypes, alignment to 16 bytes, integers and constants. On AMD it also specialises on the size of storages."""
    return _KINDS.get(device.type) in ("npu", "cuda")


@functools.cache
def npu_stream() -> Callable[[int], int]:
    """Returns a function from the index of an NPU to its current stream. If possible, the function does not wait until
    torch_npu's task queue is empty.

    torch_npu's `_npu_getCurrentRawStream`, which triton-ascend calls for every launch, waits for the queue, so that
    kernels launched outside of the queue keep the order of operators. triton-ascend launches through the queue unless a
    variable disables that; only then is the wait necessary. torch_npu 2.13 has a function without the wait. In older
    versions reading a stream's handle waits but reading its number does not, so each handle is read once and cached."""
    bindings = importlib.import_module("torch_npu._C")
    waiting: Callable[[int], int] = bindings._npu_getCurrentRawStream
    # triton-ascend reads the variable in the same way.
    if os.environ.get("TRITON_ENABLE_TASKQUEUE", "true").lower() not in ("true", "1"):
        return waiting
    if hasattr(bindings, "_npu_getCurrentRawStreamNoWait"):
        return cast(Callable[[int], int], bindings._npu_getCurrentRawStreamNoWait)
    number = bindings._npu_getCurrentStream
    handles: dict[tuple[int, ...], int] = {}

    def known(index: int) -> int:
        # (number, device, kind of device) of the stream; numbers of different devices may be equal.
        stream = number(index)
        handle = handles.get(stream)
        if handle is None:
            handle = handles[stream] = waiting(index)
        return handle

    return known


def graph_class(device: torch.device) -> Any:
    """Returns the class of a device's graphs, `torch.cuda.CUDAGraph` or `torch.npu.NPUGraph`; None: it has none, as
    under an older torch_npu."""
    module = torch.get_device_module(device)
    return getattr(module, "NPUGraph" if device.type == "npu" else "CUDAGraph", None)


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on the current stream of a device, in which nobody may wait for the device."""
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and asked()


def captures_unasked(device: torch.device) -> bool:
    """Whether `capture="auto"` may capture bodies on a device: where it was measured to be right and faster."""
    return kind_of(device) == "cuda"


_STREAMS_FOR_GRAPHS = 1800


def most_graphs(device: torch.device) -> int | None:
    """Returns how many graphs a process may have, or None: memory is the limit. On an NPU each graph holds a stream,
    of which a process has about 2,048."""
    return _STREAMS_FOR_GRAPHS if device.type == "npu" else None


def builds_launchers(device: torch.device) -> bool:
    """Whether Triton compiles a C++ launcher for each signature on a device, which takes seconds."""
    return device.type == "npu"


# Texts of out-of-memory errors that are plain RuntimeErrors: of Triton, and of torch_npu before it raised PyTorch's
# type ("out of memory"); of CANN below an operator (error EL0004, status 207001); of PyTorch for the host.
_OUT_OF_MEMORY = (
    "out of memory", "EL0004", "error code is 207001", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, is an out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def is_of_an_earlier_call(error: BaseException) -> bool:
    """Whether this error reports the failure of an earlier operator in torch_npu's task queue."""
    # torch_npu 2.13: "Since the operator is called asynchronously, the stacktrace may be inaccurate."
    return isinstance(error, RuntimeError) and "operator is called asynchronously" in str(error)


def compute_capability(device: torch.device) -> int:
    """Returns the major compute capability of a CUDA device; under `stand_in` it is 9, that of Hopper."""
    return 9 if _stood_in_for.get() else _capability(device)


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


_GROUPED_PRODUCTS = {"cuda": "torch", "npu": "vendor", "cpu": "loop"}


def grouped_product_by(device: torch.device) -> str | None:
    """Who multiplies each group of rows by its own matrix there: `"torch"` (PyTorch's grouped product), `"vendor"`
    (torch_npu's operator), `"loop"` (one product for each group), or None, where nobody is known to."""
    return _GROUPED_PRODUCTS.get(kind_of(device))


def gains_by_segments_alone(device: torch.device) -> bool:
    """Whether attention by segments, one after another in torch, is worth leaving padding out for. On an NPU nobody has
    seen it gain anything over the batch with its padding."""
    return kind_of(device) != "npu"


def has_flash_of_its_own(device: torch.device) -> bool:
    """Whether transformers has a flash attention of its own for the device, around the vendor's operator."""
    return kind_of(device) == "npu"


@functools.cache
def widest_flash_head(device: torch.device) -> int:
    """The widest head of PyTorch's flash attention on the device, with backward; 0 where there is none. The driver is
    asked once."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return 0
    # 8.6, 8.9 and 12.x have 100 KiB of shared memory per block: PyTorch has no backward of heads above 192 there.
    return 256 if minor == 0 and major < 12 else 192


def has_libdevice(device: torch.device) -> bool:
    """Whether kernels on a device can call CUDA's library of accurate functions."""
    return kind_of(device) == "cuda"


def has_atomic_index_add(device: torch.device) -> bool:
    """Whether on a device `index_add_` adds in no fixed order, and `index_put_` with accumulate in a fixed order."""
    return kind_of(device) == "cuda"
