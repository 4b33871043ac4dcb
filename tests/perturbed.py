"""Stands in for processors on which PyTorch's products round by the layout of their operands.

How a product of matrices, an attention or a convolution sums depends on shapes, strides, the number of matrices and
threads, and on the processor: one that gives the same bits for two layouts says nothing of the next. `Perturbed` makes
this true of every processor. It moves each result of these operators by a fraction of a unit that is drawn from what
the operator is given: the same call gives the same bits, and another layout gives others. A test that is green under it
(`pytest --perturbed`) asks no equal bits of two layouts.
"""

import functools
import types
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PRODUCTS", "Perturbed", "asks_for_bits"]

_aten = torch.ops.aten
_NAMES = """
    mm addmm bmm baddbmm mv addmv dot vdot _grouped_mm linear matmul convolution convolution_backward mkldnn_linear
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_attention_math
"""
# The oldest torch lacks some of them.
PRODUCTS = {getattr(_aten, name) for name in _NAMES.split() if hasattr(_aten, name)}
"""The operators whose results are moved."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Perturbed(TorchDispatchMode):
    """Moves each result of a product by up to half a unit, by the layout of its operands."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets torch.compile trace functions, which it does not under other modes; what it compiles is moved, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket not in PRODUCTS:
            return result
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        found = [value for value in tree_leaves(result) if _is_plain(value) and value.is_floating_point()]
        if not all(map(_is_plain, given)) or _is_exact([*given, *found]):
            return result
        seed = zlib.crc32(repr((str(func), [_layout(value) for value in given], torch.get_num_threads())).encode())
        for at, value in enumerate(found):
            _move(value, seed + at)
        return result


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and value.device.type == "cpu" and value.layout is torch.strided


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """What a product may go by; the stride of a dimension of one place is none."""
    strides = [stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True)]
    return str(value.dtype), list(value.shape), strides


def _is_exact(values: list[torch.Tensor]) -> bool:
    """Whether all are multiples of a sixteenth, whose sums are the same in any order."""
    return all(bool((v * 16 == (v * 16).round()).all()) for v in values if v.is_floating_point())


def _move(value: torch.Tensor, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    u = torch.rand(value.shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5
    moved = value + value * (torch.finfo(value.dtype).eps * u).to(value.dtype)
    value.copy_(torch.where(moved.isfinite(), moved, value))


def asks_for_bits(test: Any) -> bool:
    """Whether a test asks for equal bits: its code, or that of a function of the tests that it names, calls
    `torch.equal`, or compares with a tolerance that it chooses, as 0."""
    return isinstance(test, types.FunctionType) and any(map(_compares_bits, _with_helpers(test)))


@functools.cache
def _with_helpers(test: types.FunctionType) -> tuple[types.FunctionType, ...]:
    found = {test: None}
    for each in (queue := [test]):
        named = (each.__globals__.get(name) for code in _codes(each.__code__) for name in code.co_names)
        for other in named:
            if isinstance(other, types.FunctionType) and other.__module__.startswith("tests.") and other not in found:
                found[other] = None
                queue.append(other)
    return tuple(found)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _compares_bits(function: types.FunctionType) -> bool:
    codes = list(_codes(function.__code__))
    keywords = {name for code in codes for const in code.co_consts if isinstance(const, tuple) for name in const
                if isinstance(name, str)}  # fmt: skip
    return any("equal" in code.co_names for code in codes) or "rtol" in keywords
