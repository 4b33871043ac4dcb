"""What ops do on the host before a launch, as cheap as can be: a small op's time is Python's.

What has a counterpart in torch does the same, without what that costs where nothing is to be done.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as _once_differentiable

__all__ = ["autocasts", "compute_dtype", "contiguous_like", "in_dtype", "once_differentiable", "promoted"]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's, with two differences: that enters `torch.no_grad()` even in a backward that records nothing; and it
    lets a second derivative pass as zero where no gradient that arrives requires one itself, as that of a loss does
    not, although what backward has saved does."""
    guarded = _once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return guarded(ctx, *(None if g is None else g.detach().requires_grad_() for g in grads))

    return wrapper


def promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """`torch.promote_types`."""
    return a if a is b else torch.promote_types(a, b)


def in_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t.to(dtype)`, which takes as long as an allocation also where it has nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def contiguous_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor of t's shape (and dtype) without gaps. `torch.empty` reads a shape, a dtype and a device
    from Python, which takes three times as long, and each argument of `torch.empty_like` a fourth as long again."""
    if (dtype is None or dtype is t.dtype) and t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def autocasts(x: torch.Tensor) -> bool:
    """Whether products with x run in autocast's dtype."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the products with x: its own, or autocast's."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
