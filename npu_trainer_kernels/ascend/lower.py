"""Lowers a recorded launch to the MLIR that triton-ascend passes to the Ascend compiler.

A `Specialization` has everything that decides the compiled code: the kernel, the types of its arguments, its constants,
the arguments that are multiples of 16, and the chip. It is made from the arguments of a launch as Triton's JIT would
make it, but without a device; `meta` tensors are allowed, with which production shapes need no memory.
"""

import inspect
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import toolchain
from .toolchain import ToolchainError

__all__ = ["Specialization", "bind", "lower"]

# Python's parser counts its recursion depth per interpreter, not per thread: two threads in it raise SystemError.
_frontend = threading.RLock()
_ALIGNMENT = 16  # the JIT specializes on addresses (in bytes) and integers that are multiples of this


@dataclass(frozen=True)
class Specialization:
    """The compiler's input for one launch.

    Attributes:
        kernel: the `triton.JITFunction`.
        signature: the type of each runtime parameter, in order, for example `{"x": "*bf16", "n": "i32"}`.
        constants: the value of each compile-time parameter: constexprs, None, and integers equal to 1.
        aligned: the runtime parameters that are multiples of 16 (pointers: of 16 bytes).
        chip: a name of `device.ASCEND_CHIPS`.
        options: launch options that change the code, for example `{"multibuffer": False}`.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    chip: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], constexprs: Mapping[str, Any], chip: str) -> "Specialization":
        """Specialises a launch `kernel[grid](*args, **constexprs)` as the JIT would.

        Args:
            kernel: a `triton.JITFunction`.
            args: tensors (CPU or meta), ints, floats (compiled as fp32, as the JIT does), bools, None.
            constexprs: constexpr parameters by name, and launch options.
            chip: the chip to compile for.

        Raises:
            TypeError: `kernel` is not a compilable kernel, an argument has another type, or the arguments do not match
                the kernel's parameters.
        """
        values, options = bind(kernel, args, constexprs)
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: list[str] = []
        for parameter in kernel.params:
            name, value = parameter.name, values[parameter.name]
            specialised = not parameter.do_not_specialize
            is_one = type(value) is int and value == 1
            if parameter.is_constexpr:
                constants[name] = value
                continue
            signature[name] = "*i8" if value is None else parameter.annotation_type or _type_of(name, value, parameter)
            if value is None or (is_one and specialised):
                constants[name] = value
            elif specialised and not parameter.do_not_specialize_on_alignment and _is_aligned(value):
                aligned.append(name)
        return cls(kernel, signature, constants, tuple(aligned), chip, options)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    @property
    def runtime(self) -> dict[str, str]:
        """The signature without the constants: the arguments that the compiled code takes, in order."""
        return {name: kind for name, kind in self.signature.items() if name not in self.constants}

    @cached_property
    def content(self) -> str:
        """A digest of all that the lowering depends on: sources, types, constants, compiler (not the chip, see
        `lower`)."""
        # The JIT's key covers the source of the kernel and of the functions that it calls, but not their globals.
        with _frontend:
            source = self.kernel.cache_key
        read_globals = sorted((name, repr(value)) for (name, _), (value, _) in self.kernel.used_global_vals.items())
        options = sorted((key, repr(value)) for key, value in self.options.items())
        constants = sorted((key, repr(value)) for key, value in self.constants.items())
        parts = (read_globals, list(self.signature.items()), constants, self.aligned, options)
        return toolchain.digest(toolchain.versions(), self.name, source, *map(repr, parts))


def bind(kernel: Any, args: tuple[Any, ...], constexprs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the value of each of the kernel's parameters, defaults included, and the launch options in `constexprs`.

    Raises:
        TypeError: `kernel` is not a `triton.JITFunction`, or the arguments do not match its parameters.
    """
    known_options = toolchain.ascend_compiler().NPUOptions.__dataclass_fields__
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        got = type(kernel).__name__
        raise TypeError(f"kernel must be a triton.JITFunction (and TRITON_INTERPRET unset); got {got}")
    names = {parameter.name for parameter in kernel.params}
    options = {key: value for key, value in constexprs.items() if key not in names and key in known_options}
    bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in constexprs.items() if k not in options})
    bound.apply_defaults()
    return dict(bound.arguments), options


def _type_of(name: str, value: Any, parameter: Any) -> str:
    from triton.runtime.jit import mangle_type

    if not isinstance(value, torch.Tensor | int | float):
        raise TypeError(f"{name} must be a tensor, int, float, bool or None; got {type(value).__name__}")
    return mangle_type(value, parameter.is_const)


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A meta tensor has no address; a real storage comes from an allocator whose alignment is larger.
        address = value.storage_offset() * value.element_size() if value.is_meta else value.data_ptr()
        return address % _ALIGNMENT == 0
    return isinstance(value, int) and value % _ALIGNMENT == 0


def lower(spec: Specialization) -> str:
    """Lowers a kernel to linalg MLIR ("ttadapter") with triton-ascend's own passes; cached on disk by content.

    The result does not depend on the chip, so the chips of one generation share it.

    Raises:
        MissingDependencyError: triton-ascend is not installed.
        ToolchainError: the frontend or a pass rejects the kernel.
    """
    name = f"lowered/{spec.name}-{spec.content}.mlir"
    with _frontend:
        return toolchain.cached(name, lambda made: _lower_to(made, spec)).read_text()


def _lower_to(path: Path, spec: Specialization) -> None:
    compiler = toolchain.ascend_compiler()
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    backend = compiler.AscendBackend(GPUTarget("npu", spec.chip, 0))
    options = backend.parse_options(dict(spec.options))
    number = {parameter.name: parameter.num for parameter in spec.kernel.params}
    hints = {number[name]: _ALIGNMENT for name in spec.aligned}
    hints.update({number[name]: 1 for name in spec.signature if type(spec.constants.get(name)) is int})
    attributes = compiler.AscendAttrsDescriptor.from_hints(hints)
    source = ASTSource(spec.kernel, dict(spec.signature), dict(spec.constants), attributes)
    stage = "Triton frontend"
    try:
        context = ir.context()
        ir.load_dialects(context)
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        stage = "Triton passes"
        described = dict(options.__dict__)
        module = compiler.make_ttir(module, described, options)
        stage = "lowering to linalg"
        path.write_text(compiler.ttir_to_linalg(module, described, options, named_ops=True))
    except subprocess.CalledProcessError as error:
        output = (error.stderr or b"").decode(errors="replace")
        raise ToolchainError(spec.name, stage, toolchain.telling_lines(output)) from None
    except (CompilationError, RuntimeError) as error:
        raise ToolchainError(spec.name, stage, str(error).splitlines()[-8:]) from error
