"""Triton pieces that several ops share."""

from __future__ import annotations

from .._triton import jit, tl

__all__ = ["load", "load_fp32", "store"]


@jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Values as they are stored; zeros where the mask says no, if there is one."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@jit
def load_fp32(pointers, mask, MASKED: tl.constexpr):
    """fp32 values; zeros where the mask says no, if there is one. Whole tiles carry no mask: on an NPU it costs a fill
    of the buffer."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@jit
def store(pointers, value, mask, MASKED: tl.constexpr):
    """Stores `value` in the dtype of what is pointed to, where the mask says so, if there is one."""
    value = value.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)
