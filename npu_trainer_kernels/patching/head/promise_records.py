"""The operations on promised logits that do not materialize them, one function for each kind.

Each function returns the next promise, or says why the logits must be computed. An operation on rows is applied to the
hidden states, and an operation on values becomes a scale or a soft cap of the fused op. A meta tensor of the same shape
goes through the same operations, so shapes, strides and errors are torch's own.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only

from ...ops.host import autocasts, refused
from ...support.opaque import opaque
from .head_call import is_of_a_wrapper
from .promise import OwedGradient, Place, PromisedLogits, PromiseStep, Transform

__all__ = ["answer"]

T = torch.Tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@opaque
def answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a torch function that is called with a promise."""
    first = args[0] if args else None
    if isinstance(first, PromisedLogits) and function in _OBSERVERS:
        return _observed(first, function, args[1:], kwargs)
    promised = isinstance(first, PromisedLogits) and first.state.real is None
    names_type = function is T.type and len(args) == 1 and not kwargs
    if names_type or function in (_no_values() if promised else (T.__hash__,)):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if function is torch.autograd.grad:
        return _grad(*args, **kwargs)
    if function in _LIKE and isinstance(first, PromisedLogits):
        with torch._C.DisableTorchFunctionSubclass():
            stand_in = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
        return function(stand_in, *args[1:], **kwargs)
    record = _RECORDS.get(function)
    reason = ""
    if record is not None:
        made = record(function, *args, **kwargs)
        if not isinstance(made, str):
            return made
        reason = f" ({made})"
    reason = f"given to {resolve_name(function) or getattr(function, '__name__', function)}{reason}"
    args, kwargs = tree_map_only(PromisedLogits, lambda p: p.formed(reason), (args, kwargs))
    return function(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Functions that read no values
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _no_values() -> frozenset[Any]:
    """Returns the functions that read no values. Called late, since a device's extension adds to them."""
    getters = {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "grad", "_version", "_base", "_grad",
        "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "itemsize", "nbytes",
    }  # fmt: skip
    getters |= {name for name in dir(T) if name.startswith("is_") and not callable(getattr(T, name))}
    found = {getattr(T, name).__get__ for name in getters if hasattr(T, name)}
    found |= {getattr(T, name).__set__ for name in ("requires_grad", "_backward_hooks", "grad")}
    found |= {
        T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.storage_offset, T.element_size, T.get_device,
        T.is_floating_point, T.is_complex, T.is_contiguous, T.is_signed, T.is_inference, T._is_view, T.__len__,
        T.__hash__, T.__dir__, T.requires_grad_, torch.is_floating_point, torch.is_complex, torch.is_signed,
        torch.is_inference, torch.numel,
    }  # fmt: skip
    return frozenset(found)


_OBSERVERS = {T.register_hook, T.retain_grad}
_LIKE = {
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    T.new_empty, T.new_zeros, T.new_ones, T.new_full, T.new_tensor,
}  # fmt: skip


def _observed(logits: PromisedLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Registers a hook on the gradient: at the promise, at the materialized logits, or at both.

    Everything derived from a head's own promise sends its gradient through that promise. The materialized logits of a
    derived promise do not send theirs through the derived promise.
    """
    state = logits.state
    derived, watched = state.parent is not None and state.own, True
    if function is T.register_hook:
        hook = args[0] if args else kwargs["hook"]
        watched = not is_of_a_wrapper(hook)
        args, kwargs = (functools.partial(_look, hook) if watched else hook,), {}
    if (derived and watched and not state.fused) or logits.written:
        return function(logits.formed("watched for their gradient"), *args, **kwargs)
    if derived and state.real is not None:
        function(state.real, *args, **kwargs)
    elif derived and function is T.register_hook:
        state.hooks.append(*args)
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, *args, **kwargs)


def _look(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> Any:
    return hook(_formed(gradient))


def _formed(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's values; differentiating them raises an error if differentiating the gradient does."""
    if not isinstance(gradient, OwedGradient):
        return gradient
    values = gradient.formed()
    if not (gradient.requires_grad and torch.is_grad_enabled()):
        return values
    made = refused((values,), (gradient,))[0]
    assert made is not None
    return made


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns gradients of promises as values; a promise that was made from another may have been materialized."""

    def in_graph(logits: PromisedLogits) -> torch.Tensor:
        state = logits.state
        return logits if state.real is None or state.parent is None else state.real

    given = tree_map_only(PromisedLogits, in_graph, (outputs, inputs, args, kwargs))
    outputs, inputs, args, kwargs = given
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    return tuple(map(_formed, found))


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def _alone(logits: Any, *rest: Any) -> str | None:
    """Returns why the arguments are not one unsettled promise followed by plain values, or None."""
    if not isinstance(logits, PromisedLogits):
        return "not as its first argument"
    if _any_promised(rest):
        return "together with others"
    return "they have been written to, or are formed already" if logits.settled else None


def _any_promised(values: Iterable[Any]) -> bool:
    # Called at every step of a loss; `tree_leaves` takes ten times as long.
    return any(isinstance(v, PromisedLogits) or (isinstance(v, (tuple, list)) and _any_promised(v)) for v in values)


def _shaped(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Records views and reshapes that keep each row of logits together."""
    reason = _alone(logits, *args, *kwargs.values())
    if reason is not None:
        return reason
    place: Place = logits.place
    shadow = function(place.shadow, *args, **kwargs)
    if shadow is place.shadow:
        return logits
    vocabulary = place.shadow.shape[-1]
    if shadow.dtype != place.shadow.dtype or shadow.dim() == 0 or shadow.shape[-1] != vocabulary:
        return "a row of logits is taken apart"
    with torch.enable_grad():
        hidden = place.hidden.reshape(*shadow.shape[:-1], place.hidden.shape[-1])
    return _next(logits, function, args, kwargs, shadow, shadow._is_view(), hidden=hidden)


def _next(
    logits: PromisedLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shadow: torch.Tensor,
    alias: bool, *, hidden: torch.Tensor | None = None, transform: Transform | None = None,
) -> PromisedLogits:  # fmt: skip
    place = logits.place
    step = PromiseStep(function, args, kwargs, alias)
    return logits.done(
        Place(
            place.call, place.hidden if hidden is None else hidden, shadow,
            place.transform if transform is None else transform, (*place.steps, step),
        )
    )  # fmt: skip


def _takes(index: Any) -> int:
    """Returns how many dimensions one element of an index consumes."""
    if index is None or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _indexed(function: Any, logits: Any, index: Any) -> Any:
    """Records a choice of rows by slices, numbers, tensors or masks."""
    reason = _alone(logits, index)
    if reason is not None:
        return reason
    place: Place = logits.place
    parts = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(part, (slice, int, torch.Tensor, type(None), type(Ellipsis))) for part in parts):
        return "by an index of another kind"
    taken, dots = sum(_takes(part) for part in parts if part is not Ellipsis), any(part is Ellipsis for part in parts)
    dim, vocabulary = place.shadow.dim(), place.shadow.shape[-1]
    if taken > dim:
        return "by too many indices"
    if taken == dim or (dots and parts[-1] is not Ellipsis):
        # The last element then indexes the vocabulary.
        last = parts[-1]
        if not isinstance(last, slice) or last.indices(vocabulary) != (0, vocabulary, 1):
            return "by an index into the vocabulary"
        parts = (*parts[:-1], slice(None))
    with torch.enable_grad():
        hidden = place.hidden[parts]
    alias = not any(isinstance(part, torch.Tensor) for part in parts)
    shadow = place.shadow[parts] if alias else place.shadow.new_empty((*hidden.shape[:-1], vocabulary))
    return _next(logits, function, (index,), {}, shadow, alias, hidden=hidden)


def _copied(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Records copies that change nothing."""
    reason = _alone(logits, *args, *kwargs.values())
    if reason is not None:
        return reason
    shadow = function(logits.place.shadow, *args, **kwargs)
    if shadow is logits.place.shadow:
        return logits
    return _next(logits, function, args, kwargs, shadow, False)


def _detached(function: Any, logits: Any) -> Any:
    reason = _alone(logits)
    if reason is not None:
        return reason
    # Without a step and a parent, since it must not keep the graph alive.
    return PromisedLogits(logits.place)


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


def _cast(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Records a cast to a dtype that the fused op serves; the op computes in fp32 anyway."""
    reason = _alone(logits)
    if reason is not None:
        return reason
    if function in (T.type, T.type_as, T.to):
        given = tree_map_only(PromisedLogits, lambda p: p.place.shadow, (args, kwargs))
        args, kwargs = given
    if function is T.to:
        like = args[0] if args else kwargs.get("other")
        device = kwargs.get("device", like if isinstance(like, (str, int, torch.device)) else None)
        device = like.device if isinstance(like, torch.Tensor) and like.device.type != "meta" else device
        if device is not None and torch.device(device) != logits.device:
            return "on another device"
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        dtype = like.dtype if isinstance(like, torch.Tensor) else dtype
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "dtype", "other", "non_blocking")}
        if rest or any(isinstance(a, bool) and a for a in args[2:]):
            return "with other arguments"
        dtype = logits.place.shadow.dtype if dtype is None else dtype
        shadow = logits.place.shadow.to(dtype)
        args, kwargs = (dtype,), {}
    elif function is T.type_as:
        if args[0].device not in (logits.device, torch.device("meta")):
            return "on another device"
        shadow = logits.place.shadow.to(args[0].dtype)
        function, args = T.to, (args[0].dtype,)
    else:
        if kwargs:
            return "with other arguments"
        shadow = function(logits.place.shadow, *args)
    if shadow is logits.place.shadow:
        return logits
    if shadow.dtype not in _DTYPES:
        return f"cast to {shadow.dtype}"
    return _next(logits, function, args, kwargs, shadow, False)


def _number(value: Any) -> float | None:
    """Returns a finite number, also of a tensor that the host can read without waiting for a device, or None."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is T and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
        value = value.item() if plain and value.dtype != torch.bool else None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _times(function: Any, logits: Any, other: Any, **kwargs: Any) -> Any:
    """Records products with numbers, and quotients by them."""
    divides = function in _QUOTIENTS
    swapped = isinstance(other, PromisedLogits) and not divides and not isinstance(logits, PromisedLogits)
    logits, other = (other, logits) if swapped else (logits, other)
    reason = _alone(logits, other)
    if reason is not None:
        return reason
    number = _number(other)
    if kwargs or number is None or (divides and number == 0.0):
        return "with something that is no finite number"
    if isinstance(other, torch.Tensor) and torch.result_type(logits.place.shadow, other) != logits.place.shadow.dtype:
        return "with a tensor of another kind"
    transform = logits.place.transform.times(1.0 / number if divides else number)
    if not math.isfinite(transform.inner) or (
        transform.outer is not None and not 0.0 < abs(transform.outer) < math.inf
    ):
        return "by a factor out of range"
    # Stored as a number, since the tensor may be written to before it is needed.
    function, argument = (torch.div if divides else torch.mul), number if isinstance(other, torch.Tensor) else other
    return _next(logits, function, (argument,), {}, torch.empty_like(logits.place.shadow), False, transform=transform)


def _tanh(function: Any, logits: Any) -> Any:
    """Records the tanh of a soft cap."""
    reason = _alone(logits)
    if reason is not None:
        return reason
    if logits.place.transform.outer is not None:
        return "a second time"
    transform = logits.place.transform.capped()
    return _next(logits, function, (), {}, torch.empty_like(logits.place.shadow), False, transform=transform)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def _cross_entropy(
    function: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Runs the fused op for `torch.nn.functional.cross_entropy`, if targets are ids, one for each row of logits."""
    reason = _alone(input, target, weight)
    if reason is not None:
        return reason
    place: Place = input.place
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return "with other arguments"
    device = place.call.device
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64 or target.device != device:
        return "with targets that are no ids"
    if place.shadow.dim() not in (1, 2) or target.shape != place.shadow.shape[:-1]:
        return "with targets of another shape"
    if weight is not None and (weight.device != device or weight.dtype != place.shadow.dtype):
        return "with class weights of another kind"
    options = {"ignore_index": ignore_index, "label_smoothing": float(label_smoothing), "class_weights": weight,
               **place.transform.options}  # fmt: skip
    if (reason := place.call.differs(place.hidden, place.transform, target, **options)) is not None:
        return reason
    loss = input.loss(
        lambda: place.call.cross_entropy(place.hidden, target, reduction=reduction, **options),
        lambda logits: functional.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        ),
    )
    return loss.to(torch.float32 if autocasts(target) else place.shadow.dtype)


_QUOTIENTS = {torch.div, torch.true_divide, torch.divide, T.div, T.true_divide, T.divide, T.__truediv__, T.__div__}
_RECORDS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((T.view, T.reshape, torch.reshape, T.flatten, torch.flatten, T.view_as, T.reshape_as), _shaped),
    **dict.fromkeys((T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze, T.unflatten), _shaped),
    T.__getitem__: _indexed,
    **dict.fromkeys((T.contiguous, T.clone, torch.clone), _copied),
    **dict.fromkeys((T.detach, torch.detach), _detached),
    **dict.fromkeys((T.float, T.half, T.bfloat16, T.double, T.to, T.type, T.type_as), _cast),
    **dict.fromkeys((torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__, *_QUOTIENTS), _times),
    **dict.fromkeys((torch.tanh, T.tanh), _tanh),
    functional.cross_entropy: _cross_entropy,
}
PromisedLogits.answer = staticmethod(answer)
