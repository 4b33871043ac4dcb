"""Argument checks that several ops share. Every message names the argument, its value and the allowed values."""

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from ..device import kind_of
from ..support.switch import switch

__all__ = [
    "FLOATS",
    "check_choice",
    "check_choices",
    "check_float",
    "check_head",
    "check_ids",
    "check_num_items",
    "check_plain",
    "check_projection",
    "check_range",
    "check_same_device",
    "debug",
    "has_values",
    "is_number",
    "values_unread",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int64, torch.int32)
_REAL = (int, float)
_LARGEST = sys.float_info.max
# The head's kernel reports the argmax as an fp32 number.
_MAX_VOCAB = (1 << 24) - 1


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raises unless `tensor` is an fp32, bf16 or fp16 tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16; got {tensor.dtype}")


def check_ids(name: str, tensor: torch.Tensor) -> None:
    """Raises unless `tensor` is an int64 or int32 tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in _IDS:
        raise TypeError(f"{name} must be int64 or int32; got {tensor.dtype}")


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises if `tensor` is a DTensor."""
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} must be a plain tensor, the same on all ranks; got a DTensor placed {tensor.placements}"
        )


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_choices(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises unless `values` is a sequence of elements of `allowed`."""
    if not isinstance(values, Sequence) or isinstance(values, str) or any(v not in allowed for v in values):
        raise ValueError(f"{name} must be a sequence of {', '.join(allowed)}; got {values!r}")


def is_number(value: object) -> bool:
    """Whether an option is a finite int or float."""
    # Test the exact type first, which is the fast path of every call.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, _REAL)):
        return False
    return -_LARGEST <= value <= _LARGEST


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raises unless all tensors that are not None are on one device. Small ops compare devices before they call this,
    because passing keyword arguments takes Python longer than the comparison."""
    first = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            found = ", ".join(f"{name} on {t.device}" for name, t in tensors.items() if t is not None)
            raise ValueError(f"all tensors must be on one device; got {found}")


def check_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prefix: str = "") -> None:
    """Checks the arguments of a linear head: x `[..., H]`, which must not be a DTensor, weight `[V, H]`, bias `[V]`.
    `prefix` begins their names in messages."""
    name_x, name_weight, name_bias = (prefix + name for name in ("x", "weight", "bias"))
    check_float(name_x, x)
    check_float(name_weight, weight)
    check_plain(name_x, x)
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(f"{name_weight} must have shape [V, H] with V >= 1; got {list(weight.shape)}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name_x} must have shape [..., {weight.shape[1]}], like {name_weight}'s columns; got {list(x.shape)}"
        )
    if weight.shape[0] > _MAX_VOCAB:
        raise ValueError(f"{name_weight} has {weight.shape[0]} rows; at most {_MAX_VOCAB} are supported")
    if bias is not None:
        check_float(name_bias, bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{name_bias} must have shape [{weight.shape[0]}]; got {list(bias.shape)}")
    check_same_device(**{name_x: x, name_weight: weight, name_bias: bias})


def check_head(
    x: torch.Tensor, weight: torch.Tensor, ids_name: str, ids: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Checks the arguments of an op on the LM head: those of `check_projection`, and ids of x's leading shape, which
    must not be a DTensor."""
    check_ids(ids_name, ids)
    check_plain(ids_name, ids)
    check_projection(x, weight, bias)
    if ids.shape != x.shape[:-1]:
        raise ValueError(f"{ids_name} must have x's leading shape {list(x.shape[:-1])}; got {list(ids.shape)}")
    check_same_device(x=x, **{ids_name: ids})


def check_num_items(num_items: int | float | torch.Tensor | None, reduction: str) -> None:
    """Raises unless `num_items` may divide a loss with this reduction: a positive number, a tensor of one, or None."""
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"num_items divides a mean; with reduction={reduction!r} it must be None")
    if isinstance(num_items, torch.Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items must be a number or a tensor of one; got shape {list(num_items.shape)}")
    if not isinstance(num_items, torch.Tensor) and not (is_number(num_items) and num_items > 0):
        raise ValueError(f"num_items must be positive and finite; got {num_items!r}")


@functools.cache
def debug() -> bool:
    """Whether NPU_KERNELS_DEBUG enables checks that wait for the device."""
    return switch("NPU_KERNELS_DEBUG")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: a meta tensor has none, nor has a fake tensor, which is a subclass of Tensor."""
    return type(tensor) is torch.Tensor and tensor.device.type != "meta"


_unread: contextvars.ContextVar[bool] = contextvars.ContextVar("npu_kernels_unread", default=False)


@contextlib.contextmanager
def values_unread() -> Iterator[None]:
    """Inside the `with` block no check reads values: ops are being captured, and a graph does not read on the host."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def check_range(name: str, ids: torch.Tensor | Callable[[], torch.Tensor], where: torch.device, size: int) -> None:
    """Raises unless every id lies in [0, size). Reading the values waits for the device, so on an accelerator it checks
    only in debug mode; inside of `values_unread` it does not check at all."""
    if (kind_of(where) != "cpu" and not debug()) or _unread.get():
        return
    ids = ids() if callable(ids) else ids
    if not has_values(ids) or ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(f"{name} must lie in [0, {size}); got values from {low} to {high}")
