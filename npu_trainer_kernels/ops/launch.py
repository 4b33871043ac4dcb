"""The one place where kernels are launched.

Every op calls `launch(kernel, grid, args, constexprs)`. By default that is `kernel[grid](*args, **constexprs)`, or,
where that has been launched before, the `CompiledKernel` that it returned: most of a launch's time in Python is
Triton's search for it. For CPU tensors without Triton's interpreter it is the kernel's Ascend lowering (backend
"ascend-lowering": no other backend launches that). A launcher installed with `use_launcher` can record the launches
instead (the Ascend compile gate runs an op on `meta` tensors and compiles what it would have launched) or execute them
another way.
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
    """A kernel could not be compiled for the device, or could not be launched; it has written nothing."""


Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


# What executes kernels on CPU tensors without Triton's interpreter. Training knows nothing of the Ascend compiler's
# tools: whoever wants them imports them, and they come here.
_on_host: Launcher | None = None


def execute_on_host(launcher: Launcher) -> None:
    """From now on launches on CPU tensors go to `launcher` where Triton's interpreter is not on."""
    global _on_host
    _on_host = launcher


# (kernel, what Triton compiled of it, its constants in the order of its parameters).
_Kept = tuple[Any, Any, tuple[Any, ...]]
# By everything that Triton's own key may depend on but for settings of the process (TRITON_DEBUG, say): those of the
# first launch count. Lengths are in it, though no kernel is compiled for them, since to tell them apart from the rest
# would make every launch longer. Empty where nothing may be kept.
_kept: dict[tuple[Any, ...], _Kept] = {}
# The same by a key without them, which is looked up where a length is new: Triton's search takes longer, and
# triton-ascend's waits for torch_npu's task queue.
_of_any_length: dict[tuple[Any, ...], _Kept] = {}
# Which arguments of a kernel are lengths.
_lengths: dict[Any, tuple[int, ...]] = {}
_MOST_KEPT = 1 << 12
_ASCEND = ON_ASCEND is not None and bool(ON_ASCEND.value)
# More of them triton-ascend launches only where TRITON_ALL_BLOCKS_PARALLEL is set: it is asked.
_MOST_PROGRAMS = 65535


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    # Before anything else is asked: a small op's time is Python's, and much of it is spent here.
    if _kept and _run_kept(kernel, grid, args, constexprs):
        return
    # Every kernel's first argument is a tensor, and its arguments are on one device.
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
        # A model that is spread over several devices: Triton launches on the current one, wherever its arguments are.
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
        # triton-ascend 3.2 takes no constants.
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
    """Whether the same has been launched before, and so is launched again without Triton's search for it."""
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
            # triton-ascend's launcher asks what it is given for its shape while CANN's profiler is on: no addresses.
            compiled.run(x, y, z, device.npu_stream()(index), compiled.function, compiled.packed_metadata,
                         None, None, None, *args)  # fmt: skip
        else:
            # As the first, without a record for hooks and, for each tensor, a question to the driver.
            compiled.run(x, y, z, active.get_current_stream(index), compiled.function, compiled.packed_metadata,
                         None, None, None, *addresses, *constants)  # fmt: skip
    except Exception as error:
        if _says_enough(error):
            raise
        raise _named(error, kernel, grid, args, constexprs) from error
    return True


def _is_watched() -> bool:
    """Whether somebody, Triton's profiler for one, is told of launches."""
    # triton-ascend 3.2 is older than Triton's knobs.
    runtime = triton.compiler.CompiledKernel if _ASCEND else triton.knobs.runtime
    # From Triton 3.5 on there is always a chain of hooks; before, a hook or None.
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _says_enough(error: Exception) -> bool:
    """Whether what a launch has raised goes to callers as it is."""
    return isinstance(error, torch.OutOfMemoryError) or device.is_of_an_earlier_call(error)


def _named(
    error: Exception, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]
) -> RuntimeError:
    """Compilers and drivers raise types of their own, and many: they become one that callers can name. Memory that has
    run out is no fault of the kernel's; Triton has no type for it, and who makes do with less knows PyTorch's."""
    kind = torch.OutOfMemoryError if device.is_out_of_memory(error) else KernelError
    return kind(_describe(kernel, grid, args, constexprs, error))


_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter


def _key(
    kernel: Any, index: int, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Of every argument at least what Triton compiles for, beside the current device and that of the tensors; and the
    arguments with addresses in the place of tensors."""
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
    """As `_key`, with no more of each length than Triton compiles for: how wide it is."""
    # Of other integers it also asks whether they are 1, or multiples of 16.
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
    These come as a tuple and a dict: as arguments of this function they would take Python several times as long."""
    _launcher.get()(kernel, grid, args, constexprs)


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
    """Compiles what `launch` would launch on the current device, into Triton's cache. Dtypes stand for tensors.

    Returns Triton's `CompiledKernel`.

    Raises:
        KernelError: it cannot be compiled.
    """
    try:
        return kernel.warmup(*args, grid=grid, **constexprs)
    except Exception as error:
        raise KernelError(_describe(kernel, grid, args, constexprs, error)) from error


def build_launcher(compiled: Any) -> None:
    """Builds what launches a `CompiledKernel`, into Triton's cache, where its first launch finds it. The device is not
    asked for anything.

    Raises:
        KernelError: it cannot be built.
    """
    try:
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        raise KernelError(f"the launcher of kernel {compiled.metadata.name}: {cause}") from error


@contextlib.contextmanager
def use_launcher(launcher: Launcher) -> Iterator[None]:
    """Inside the `with` block, on this thread, launches go to `launcher(kernel, grid, args, constexprs)`."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)
