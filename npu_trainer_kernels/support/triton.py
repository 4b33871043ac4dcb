"""Imports Triton, or provides a replacement whose errors state what to install.

Triton, triton-ascend and torch_npu are optional, and on real machines an installed one is sometimes broken
(triton-ascend installed over triton, a driver library missing). Importing this package must work anyway, so only this
module imports Triton; the others import `triton`, `tl` and `jit` from here.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

__all__ = [
    "IMPORT_ERROR",
    "INTERPRETED",
    "LAUNCHES_COMPILED",
    "ON_ASCEND",
    "MissingDependencyError",
    "jit",
    "libdevice",
    "tl",
    "triton",
]


class MissingDependencyError(ImportError):
    """An optional dependency is missing or cannot be imported; the message names the extra that installs it."""


IMPORT_ERROR: Exception | None = None
LAUNCHES_COMPILED = False
# Whether this is triton-ascend, as a constant for kernels that use different expressions there.
ON_ASCEND: Any = None
try:
    import triton
    import triton.language as tl

    # Use the general name, which CUDA's compiler replaces by its libdevice. `tl.extra.cuda` does not exist in
    # triton-ascend, whose frontend also resolves names in branches that are not taken.
    from triton.language.extra import libdevice

    # A partly overwritten Triton (for example by triton-ascend's files) imports, but lacks some of its parts.
    triton.jit, tl.load, triton.runtime.JITFunction  # noqa: B018
    ON_ASCEND = tl.constexpr(importlib.util.find_spec("triton.backends.ascend") is not None)
    # `ops/launch.py` launches compiled kernels only with the signatures of Triton 3.4 and later and triton-ascend 3.2.
    _version = tuple(map(int, triton.__version__.split(".")[:2]))
    LAUNCHES_COMPILED = _version == (3, 2) if ON_ASCEND.value else _version >= (3, 4)
except (ImportError, OSError, AttributeError, RuntimeError, SyntaxError) as error:
    IMPORT_ERROR = error
    triton = tl = libdevice = None

# `triton.jit` reads the variable at decoration time, so it is read once, here.
INTERPRETED = IMPORT_ERROR is None and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")


class _MissingKernel:
    """Replaces a kernel if Triton cannot be imported; launching it raises."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.__name__ = fn, fn.__name__

    def __getitem__(self, grid: object) -> Any:
        raise MissingDependencyError(
            f"the Triton kernel {self.__name__} was asked for, but Triton cannot be imported "
            f"({type(IMPORT_ERROR).__name__}: {IMPORT_ERROR}). In a checkout of npu_trainer_kernels, for "
            "your device: pip install '.[cuda]' (triton) or pip install '.[npu-any]' (triton-ascend)."
        )


def jit(fn: Any = None, *, lengths: Sequence[str] = ()) -> Any:
    """`triton.jit`, or a replacement that raises `MissingDependencyError` when it is launched.

    Args:
        fn: the kernel; without it, `jit` returns a decorator.
        lengths: the integer arguments that change from batch to batch. Without this Triton would compile another kernel
            if one of them is 1 or a multiple of 16. Triton still specialises on sizes and strides of the model, because
            wide loads need their alignment.
    """
    if fn is None:
        return functools.partial(jit, lengths=lengths)
    return _MissingKernel(fn) if IMPORT_ERROR is not None else triton.jit(fn, do_not_specialize=list(lengths))


def _round_interpreted_casts() -> None:
    """Makes the interpreter round fp32 to bf16 to nearest even, as every device does. By default it truncates (triton
    3.2 to 3.9), which fails any strict accuracy test of a bf16 kernel. bf16 to fp32 becomes a shift by 16 bits; the
    interpreter's conversion is slower and wrong for subnormals."""
    import torch
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.bfloat16, tl.float32):
            return handle((src.data.astype("uint32") << 16).view("float32"), tl.float32)
        if pair != (tl.float32, tl.bfloat16):
            return original(self, src, dst_type)
        rounded = torch.as_tensor(src.data).to(torch.bfloat16).view(torch.int16).numpy()
        return handle(rounded.view("uint16"), tl.bfloat16)

    builder.cast_impl = cast_impl


def _leave_the_language_as_it_was() -> None:
    """Makes the interpreter restore everything that it changes in `triton.language` while a kernel runs.

    By default some changes remain (in triton 3.7 to 3.9 those for functions that a kernel calls, in older versions
    all), and a kernel that is compiled later in the process would use the interpreter's builtins.
    """
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    original = executor.__call__
    classes = [value for value in vars(tl.core).values() if isinstance(value, type)]
    owners = [tl, tl.core, tl.math, *(cls for cls in classes if cls.__module__ == tl.core.__name__)]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [dict(vars(owner)) for owner in owners]
        try:
            return original(self, *args, **kwargs)
        finally:
            for owner, attributes in zip(owners, before, strict=True):
                for name, value in dict(vars(owner)).items():
                    if name not in attributes:
                        delattr(owner, name)
                    elif value is not attributes[name]:
                        setattr(owner, name, attributes[name])

    executor.__call__ = call


def _change_the_language_once_a_launch() -> None:
    """Makes the interpreter change `triton.language` once per launch, and not again for every function that a kernel
    calls, such as `tl.sum`. Visiting all names of the language takes milliseconds, longer than the function itself.
    Builtins of an unchanged language raise an error, so a missed change would be noticed."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    launch, change = executor.__call__, interpreter._patch_lang
    changed: set[int] = set()

    @functools.cache  # every program calls this function, and a module has hundreds of names
    def languages_of(fn: Any) -> frozenset[int]:
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    def change_once(fn: Any) -> Any:
        languages = languages_of(fn)
        if languages and languages <= changed:
            return None
        changed.update(languages)
        return change(fn)

    @functools.wraps(launch)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        changed.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            changed.clear()

    executor.__call__, interpreter._patch_lang = call, change_once


def _leave_out_unread_overflow_checks() -> None:
    """Keeps the interpreter from checking every sum, difference and product of integers for overflow. The check takes
    five operations, and outside of debug mode nothing uses its result."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_numpy_types() -> None:
    """Makes the interpreter look up each numpy type once. By default every operation builds a table of all types."""
    from triton.runtime import interpreter

    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.name  # the name identifies the type; types of pointers and blocks cannot be hashed
        if name not in known:
            known[name] = original(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


if INTERPRETED:
    _round_interpreted_casts()
    _leave_out_unread_overflow_checks()
    _remember_numpy_types()
    _leave_the_language_as_it_was()
    _change_the_language_once_a_launch()
