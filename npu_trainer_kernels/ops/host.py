"""Host functions that ops call before a launch. They must be fast, because Python dominates the time of a small op.

A function with a counterpart in torch does the same as that, but costs less if there is nothing to do.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..support.anchor import Anchor

__all__ = [
    "autocasts",
    "compute_dtype",
    "contiguous_like",
    "in_dtype",
    "once_differentiable",
    "promoted",
    "refused",
    "stands_on",
]


def stands_on(ctx: Any, *inputs: torch.Tensor | None) -> None:
    """Registers inputs that backward depends on but forward does not save; `once_differentiable` reads them."""
    with torch.enable_grad():
        ctx.anchor = Anchor.apply(*inputs)


class _ReadOnce:
    """The context of a backward, with its saved tensors cached: a checkpoint unpacks them only once."""

    def __init__(self, ctx: Any) -> None:
        vars(self)["ctx"] = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.ctx, name)
        if name == "saved_tensors":
            vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


_REFUSED = (
    b"the gradients of npu_trainer_kernels' ops cannot be differentiated (a second derivative); "
    b"restore the model, or call the op's reference, for that"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward whose gradients raise an error if they are differentiated again. In autograd's graph the
    gradients depend on the incoming gradients, the saved tensors and the inputs of `stands_on`, as they would if they
    were differentiable. With torch's `once_differentiable` they depend on nothing, so that `autograd.grad` of them
    finds no path to the inputs and returns zero instead of an error."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        once = _ReadOnce(ctx)
        with torch.no_grad():
            outputs = backward(once, *grads)
        below = (*grads, *once.saved_tensors, vars(ctx).get("anchor"))
        if not isinstance(outputs, tuple):
            return refused((outputs,), below)[0]
        return refused(outputs, below)

    return wrapper


def refused(outputs: tuple[torch.Tensor | None, ...], below: Iterable[Any]) -> tuple[torch.Tensor | None, ...]:
    """Returns `outputs` as tensors that raise an error if they are differentiated. In autograd's graph they depend on
    the tensors of `below` that require a gradient."""
    below = [t for t in below if isinstance(t, torch.Tensor) and t.requires_grad]
    # Add new leaves as inputs: without any input that requires a gradient, autograd would treat the result as constant.
    leaves = [None if t is None else t.detach().requires_grad_() for t in outputs]
    given: Any = (*leaves, *below)
    made = torch._C._functions.DelayedError(_REFUSED, len(given))(*given)
    return tuple(made[: len(leaves)])


def promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The same as `torch.promote_types`, but faster for equal dtypes."""
    return a if a is b else torch.promote_types(a, b)


def in_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same as `t.to(dtype)`, which takes as long as an allocation even if there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def contiguous_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor of t's shape. `torch.empty` would read a shape, a dtype and a device
    from Python, which takes three times as long, and each argument of `torch.empty_like` a quarter longer."""
    if (dtype is None or dtype is t.dtype) and t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def autocasts(x: torch.Tensor) -> bool:
    """Whether matrix products with x run in autocast's dtype."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with x: x's dtype, or autocast's."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
