"""Triton, or a stand-in that says what to install.

Triton, triton-ascend and torch_npu are optional, and on real machines each of them is sometimes present but broken
(triton-ascend installed over triton, a driver library missing). Importing this package must work all the same, so this
is the one module that imports Triton; the others take `triton`, `tl` and `jit` from here.
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
# For kernels: whether this is triton-ascend, where the best form of an expression may be another one.
ON_ASCEND: Any = None
try:
    import triton
    import triton.language as tl

    # By its general name, which CUDA's compiler replaces by its own: `tl.extra.cuda` does not exist in triton-ascend,
    # whose frontend looks up the names of branches that are not taken, too.
    from triton.language.extra import libdevice

    # A half-installed Triton (triton-ascend's files over Triton's, say) imports, but lacks parts of itself.
    triton.jit, tl.load, triton.runtime.JITFunction  # noqa: B018
    ON_ASCEND = tl.constexpr(importlib.util.find_spec("triton.backends.ascend") is not None)
    # Triton before 3.4 is given something else to launch a compiled kernel. Of triton-ascend 3.2 is known.
    _version = tuple(map(int, triton.__version__.split(".")[:2]))
    LAUNCHES_COMPILED = _version == (3, 2) if ON_ASCEND.value else _version >= (3, 4)
except (ImportError, OSError, AttributeError, RuntimeError, SyntaxError) as error:
    IMPORT_ERROR = error
    triton = tl = libdevice = None

# Read at decoration time by `triton.jit`, hence once and here.
INTERPRETED = IMPORT_ERROR is None and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")


class _MissingKernel:
    """Stands for a kernel where Triton cannot be imported; using it raises."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.__name__ = fn, fn.__name__

    def __getitem__(self, grid: object) -> Any:
        raise MissingDependencyError(
            f"the Triton kernel {self.__name__} was asked for, but Triton cannot be imported "
            f"({type(IMPORT_ERROR).__name__}: {IMPORT_ERROR}). In a checkout of npu_trainer_kernels, for "
            "your device: pip install '.[cuda]' (triton) or pip install '.[npu-any]' (triton-ascend)."
        )


def jit(fn: Any = None, *, lengths: Sequence[str] = ()) -> Any:
    """`triton.jit`, or a stand-in that raises `MissingDependencyError` when it is launched.

    Args:
        fn: the kernel; without it a decorator is returned.
        lengths: the integer arguments that change from batch to batch. Triton would compile anew where one of them is
            1, or starts or ceases to be a multiple of 16. Sizes and strides of a model are left to it: their alignment
            is what wide loads need.
    """
    if fn is None:
        return functools.partial(jit, lengths=lengths)
    return _MissingKernel(fn) if IMPORT_ERROR is not None else triton.jit(fn, do_not_specialize=list(lengths))


def _round_interpreted_casts() -> None:
    """Makes the interpreter round fp32 to bf16 to nearest even, as every device does; on its own it truncates
    (triton 3.2 to 3.9), which no honest accuracy test of a bf16 kernel survives. The way back is a shift of 16 bits:
    the interpreter's own takes numbers apart, which is slower and wrong for subnormals."""
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
    """Makes the interpreter put back all that it changes in `triton.language` while a kernel runs.

    On its own it leaves some of it there (triton 3.7 to 3.9 what is changed for a function that a kernel calls, older
    ones everything), and a kernel that is compiled later in the process finds the interpreter's builtins in its place.
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
    """Makes the interpreter change `triton.language` once for a launch, and not again for every function that a kernel
    calls, `tl.sum` among them: looking through all names of the language takes milliseconds, which is more than what
    such a function computes. A language that is not changed yet refuses each of its builtins, so none is missed."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    launch, change = executor.__call__, interpreter._patch_lang
    changed: set[int] = set()

    @functools.cache  # a function is called by every program, and a module has hundreds of names
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
    """Keeps the interpreter from computing, for every sum, difference and product of integers, whether it overflows:
    five more operations, whose result it drops, since it asserts nothing outside of its debug mode."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_numpy_types() -> None:
    """Makes the interpreter look a type of numpy up once: it builds a table of all of them for every operation."""
    from triton.runtime import interpreter

    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.name  # which names the whole type; types of pointers and blocks cannot be hashed
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
