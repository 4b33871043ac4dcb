"""What ops do on the host before a launch, as cheap as can be: a small op's time is Python's.

What has a counterpart in torch does the same, without what that costs where nothing is to be done.
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
    """Inputs that a backward depends on without saving them: for `once_differentiable`."""
    with torch.enable_grad():
        ctx.anchor = Anchor.apply(*inputs)


class _ReadOnce:
    """A backward's context whose saved tensors are read once: a checkpoint gives them no second time."""

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
    """For a backward whose gradients raise, in whatever way they are differentiated once more. They stand where they
    would stand if they could be differentiated: on the gradients that arrive, on what was saved and on what
    `stands_on` names. torch's stands on nothing, so that `autograd.grad` of its gradients finds no way to the inputs,
    and takes that for zero."""

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
    """Gradients that raise where they are differentiated, and stand in the graph on whatever of `below` is in it."""
    below = [t for t in below if isinstance(t, torch.Tensor) and t.requires_grad]
    # Leaves of their own beside that: what comes to stand on nothing would pass as a constant.
    leaves = [None if t is None else t.detach().requires_grad_() for t in outputs]
    given: Any = (*leaves, *below)
    made = torch._C._functions.DelayedError(_REFUSED, len(given))(*given)
    return tuple(made[: len(leaves)])


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
