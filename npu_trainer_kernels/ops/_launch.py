"""The one place where kernels are launched.

Every op calls `launch(kernel, grid, *args, **constexprs)`. By default that is `kernel[grid](*args, **constexprs)`, and
for CPU tensors without Triton's interpreter the kernel's Ascend lowering (backend "ascend-lowering": no other backend
launches that). A launcher installed with `use_launcher` can record the launches instead (the Ascend compile gate runs
an op on `meta` tensors and compiles what it would have launched) or execute them another way.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from .._triton import INTERPRETED

__all__ = ["KernelError", "Launcher", "compile_only", "launch", "use_launcher"]


class KernelError(RuntimeError):
    """A kernel could not be compiled for the device, or could not be launched; it has written nothing."""


Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    # Every kernel's first argument is a tensor, and its arguments are on one device.
    if not INTERPRETED and args[0].is_cpu:
        # Development only, so neither imported nor looked for before.
        from ..ascend.launcher import lowering_launcher

        lowering_launcher(kernel, grid, args, constexprs)
    else:
        try:
            kernel[grid](*args, **constexprs)
        except Exception as error:
            # Compilers and drivers raise types of their own, and many: they become one that callers can name.
            raise KernelError(_describe(kernel, grid, args, constexprs, error)) from error


def _describe(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any], error: Exception
) -> str:
    given = ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in args if hasattr(a, "dtype"))
    options = ", ".join(f"{name}={value}" for name, value in constexprs.items())
    cause = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return f"kernel {kernel.__name__}({given}; {options}) over grid {grid}: {cause}"


_launcher: contextvars.ContextVar[Launcher] = contextvars.ContextVar("npu_kernels_launcher", default=_run)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> None:
    """Launches `kernel` over `grid` (a tuple of at least one positive int) with positional arguments and constexprs."""
    _launcher.get()(kernel, grid, args, constexprs)


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
    """Compiles what `launch` would launch on the current device, into Triton's cache. Dtypes stand for tensors.

    Raises:
        KernelError: it cannot be compiled.
    """
    try:
        kernel.warmup(*args, grid=grid, **constexprs)
    except Exception as error:
        raise KernelError(_describe(kernel, grid, args, constexprs, error)) from error


@contextlib.contextmanager
def use_launcher(launcher: Launcher) -> Iterator[None]:
    """Inside the `with` block, on this thread, launches go to `launcher(kernel, grid, args, constexprs)`."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)
