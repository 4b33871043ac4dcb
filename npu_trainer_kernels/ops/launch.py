"""The one place where kernels are launched.

Every op calls `launch(kernel, grid, args, constexprs)`. By default it calls `kernel[grid](*args, **constexprs)` and
caches the `CompiledKernel` that this returns, because most of the Python time of a launch is Triton's lookup of it. The
next equal launch uses the cache. On CPU tensors without Triton's interpreter it executes the kernel's Ascend lowering
(only backend "ascend-lowering" launches kernels there). A launcher installed with `use_launcher` replaces this: the
Ascend compile gate, for example, runs an op on `meta` tensors, records its launches and compiles the kernels.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import device
from ..support.triton import INTERPRETED, LAUNCHES_COMPILED, ON_ASCEND, triton

__all__ = [
    "KernelError",
    "Launcher",
    "build_launcher",
    "compile_only",
    "execute_on_host",
    "launch",
    "use_launcher",
]


class KernelError(RuntimeError):
    """A kernel could not be compiled for the device or could not be launched. It has written nothing."""


Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


# Executes kernels on CPU tensors without Triton's interpreter. Training does not import the Ascend compiler's tools;
# importing `npu_trainer_kernels.ascend.launcher` registers this launcher.
_on_host: Launcher | None = None


def execute_on_host(launcher: Launcher) -> None:
    """Sends all further launches on CPU tensors to `launcher`, unless Triton's interpreter is on."""
    global _on_host
    _on_host = launcher


# (kernel, the `CompiledKernel`, the kernel's constants in the order of its parameters).
_Kept = tuple[Any, Any, tuple[Any, ...]]
# The cache of compiled kernels. Its key contains everything that Triton's key may depend on, except settings of the
# process such as TRITON_DEBUG: the first launch decides these. The key contains lengths, although no kernel is compiled
# for them, because separating them would make every launch slower. The cache is empty if the device forbids caching.
_kept: dict[tuple[Any, ...], _Kept] = {}
# The same kernels by a key without lengths, for a launch with a new length. Triton's lookup takes longer, and
# triton-ascend's waits for torch_npu's task queue.
_of_any_length: dict[tuple[Any, ...], _Kept] = {}
# The indices of a kernel's arguments that are lengths.
_lengths: dict[Any, tuple[int, ...]] = {}
_MOST_KEPT = 1 << 12
_ASCEND = ON_ASCEND is not None and bool(ON_ASCEND.value)
# triton-ascend launches larger grids only if TRITON_ALL_BLOCKS_PARALLEL is set, so they do not use the cache.
_MOST_PROGRAMS = 65535


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    # Look into the cache first: Python dominates the time of a small op, and much of it is spent here.
    if _kept and _run_kept(kernel, grid, args, constexprs):
        return
    # The first argument of every kernel is a tensor, and all its tensors are on one device.
    where = args[0].device
    if not INTERPRETED and device.kind_of(where) == "cpu":
        if _on_host is None:
            raise RuntimeError(
                'backend "ascend-lowering" needs its launcher: import npu_trainer_kernels.ascend.launcher'
            )
        _on_host(kernel, grid, args, constexprs)
    elif device.is_current(where):
        _run_by_triton(kernel, grid, args, constexprs)
    else:
        # Triton launches on the current device, which differs from the tensors' one if a model spans several devices.
        with torch.get_device_module(where).device(where):
            if not (_kept and _run_kept(kernel, grid, args, constexprs)):
                _run_by_triton(kernel, grid, args, constexprs)


def _run_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    try:
        compiled = kernel[grid](*args, **constexprs)
    except Exception as error:
        if _says_enough(error):
            raise
        raise _named(error, kernel, grid, args, constexprs) from error
    if not (LAUNCHES_COMPILED and device.keeps_compiled(args[0].device)):
        return
    if isinstance(compiled, triton.compiler.CompiledKernel):
        # The launcher of triton-ascend 3.2 takes no constants.
        constants = () if _ASCEND else tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        index = triton.runtime.driver.active.get_current_device()
        kept = kernel, compiled, constants
        _lengths[kernel] = tuple(i for i, parameter in enumerate(kernel.params) if parameter.do_not_specialize)
        _keep(_kept, _key(kernel, index, args, constexprs)[0], kept)
        _keep(_of_any_length, _key_of_any_length(kernel, index, args, constexprs), kept)


def _keep(where: dict[tuple[Any, ...], _Kept], key: tuple[Any, ...], kept: _Kept) -> None:
    if len(where) >= _MOST_KEPT:
        where.clear()
    where[key] = kept


def _run_kept(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> bool:
    """Launches the kernel from the cache, without Triton's lookup. Returns False if the cache has no such kernel."""
    active = triton.runtime.driver.active
    index = active.get_current_device()
    key, addresses = _key(kernel, index, args, constexprs)
    kept = _kept.get(key)
    if kept is None:
        kept = _of_any_length.get(_key_of_any_length(kernel, index, args, constexprs))
        if kept is None:
            return False
        _keep(_kept, key, kept)
    _, compiled, constants = kept
    x, y, z = (*grid, 1, 1)[:3]
    if _ASCEND and x * y * z > _MOST_PROGRAMS:
        return False
    try:
        if _is_watched():
            compiled[x, y, z](*args, *constants)
        elif _ASCEND:
            # triton-ascend's launcher reads the shapes of tensors while CANN's profiler is on, so pass no addresses.
            compiled.run(x, y, z, device.npu_stream()(index), compiled.function, compiled.packed_metadata,
                         None, None, None, *args)  # fmt: skip
        else:
            # Like the first call, but without a record for hooks and without a driver query for each tensor.
            compiled.run(x, y, z, active.get_current_stream(index), compiled.function, compiled.packed_metadata,
                         None, None, None, *addresses, *constants)  # fmt: skip
    except Exception as error:
        if _says_enough(error):
            raise
        raise _named(error, kernel, grid, args, constexprs) from error
    return True


def _is_watched() -> bool:
    """Whether a launch hook is installed, for example by Triton's profiler."""
    # triton-ascend 3.2 is older than Triton's knobs.
    runtime = triton.compiler.CompiledKernel if _ASCEND else triton.knobs.runtime
    # Since Triton 3.5 this is always a chain of hooks; before, it was a hook or None.
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _says_enough(error: Exception) -> bool:
    """Whether an error of a launch reaches the caller unchanged."""
    return isinstance(error, torch.OutOfMemoryError) or device.is_of_an_earlier_call(error)


def _named(
    error: Exception, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]
) -> RuntimeError:
    """Converts the many error types of compilers and drivers to `KernelError`. An out-of-memory error is not the
    kernel's fault and becomes PyTorch's type, which callers catch to retry with a smaller batch; Triton has none."""
    kind = torch.OutOfMemoryError if device.is_out_of_memory(error) else KernelError
    return kind(_describe(kernel, grid, args, constexprs, error))


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


def _key(
    kernel: Any, index: int, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns the key of a launch, and its arguments with addresses in place of tensors. The key contains the current
    device, the tensors' device and, for each argument, at least the properties that Triton specialises on."""
    key: list[Any] = [id(kernel), index, args[0].get_device()]
    addresses: list[Any] = []
    add, give = key.append, addresses.append
    for arg in args:
        kind = type(arg)
        if kind is int:
            add(arg)
        elif kind is _TENSOR or kind is _PARAMETER or isinstance(arg, _TENSOR):
            add(arg.dtype)
            arg = arg.data_ptr()
            add(arg % 16)
        else:
            add(kind if kind is float else (kind, arg))
        give(arg)
    return (*key, *constexprs, *constexprs.values()), addresses


def _key_of_any_length(
    kernel: Any, index: int, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> tuple[tuple[Any, ...], ...]:
    """Like `_key`, but with only the bit width of each length, which is all that Triton specialises on."""
    # For other integers Triton also distinguishes 1 and multiples of 16.
    lengths = [
        (i, -(1 << 31) <= args[i] < 1 << 31, args[i] < 1 << 63)
        for i in _lengths.get(kernel, ())
        if type(args[i]) is int
    ]
    others = list(args)
    for i, *_ in lengths:
        others[i] = None
    return _key(kernel, index, tuple(others), constexprs)[0], *lengths


def _describe(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any], error: Exception
) -> str:
    given = ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in args if hasattr(a, "dtype"))
    options = ", ".join(f"{name}={value}" for name, value in constexprs.items())
    cause = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return f"kernel {kernel.__name__}({given}; {options}) over grid {grid}: {cause}"


_launcher: contextvars.ContextVar[Launcher] = contextvars.ContextVar("npu_kernels_launcher", default=_run)


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """Launches `kernel` over `grid` (a tuple of at least one positive int) with positional arguments and constexprs.
    They are a tuple and a dict, because Python would need several times as long to pass them as `*args, **kwargs`."""
    _launcher.get()(kernel, grid, args, constexprs)


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
    """Compiles the kernel that `launch` would launch on the current device, into Triton's cache. In `args` a dtype may
    replace a tensor.

    Returns Triton's `CompiledKernel`.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    try:
        return kernel.warmup(*args, grid=grid, **constexprs)
    except Exception as error:
        raise KernelError(_describe(kernel, grid, args, constexprs, error)) from error


def build_launcher(compiled: Any) -> None:
    """Builds the launcher of a `CompiledKernel` into Triton's cache, for its first launch. It does not use the device.

    Raises:
        KernelError: the launcher cannot be built.
    """
    try:
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        raise KernelError(f"the launcher of kernel {compiled.metadata.name}: {cause}") from error


@contextlib.contextmanager
def use_launcher(launcher: Launcher) -> Iterator[None]:
    """Sends launches inside the `with` block, on this thread, to `launcher(kernel, grid, args, constexprs)`."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)
