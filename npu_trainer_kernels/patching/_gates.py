"""What a model's own activation computes, found by running it: `gate_of(act_fn)`.

Activations are compared on every number that bf16 has, in bf16 and in fp32, bit for bit with those of transformers: an
activation may be spelt in several ways that round differently, and `ops.swiglu` is as close to the truth as any of
them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.activations import ACT2FN

from ._patch import PROBE_ERRORS

__all__ = ["gate_of"]

# By transformers' names.
_SPELLINGS = {
    "silu": ("silu",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    "relu2": ("relu2",),
}
_DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def _every_number(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of bf16, as `dtype`."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    numbers = (bits << 16).view(torch.float32)
    return numbers[numbers.isfinite()].to(dtype)


@functools.cache
def _spelt(name: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = ACT2FN[name](_every_number(dtype))
    return result


def _same(found: object, expected: torch.Tensor) -> bool:
    """Whether a result has the bits that are expected; NaN is NaN."""
    if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def gate_of(activation: Callable[..., Any]) -> str | None:
    """The activation of `ops.swiglu` that a module or function computes, or None."""
    found = []
    for dtype in _DTYPES:
        try:
            with torch.no_grad():
                found.append(activation(_every_number(dtype).clone()))
        except PROBE_ERRORS:
            return None
    for name, spellings in _SPELLINGS.items():
        for spelling in spellings:
            if all(_same(y, _spelt(spelling, dtype)) for y, dtype in zip(found, _DTYPES, strict=True)):
                return name
    return None
