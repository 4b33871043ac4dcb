"""The calls that a checkpoint makes of a layer, and repeats before the layer's backward."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .buckets import NUMBERS

__all__ = ["Repeated", "number_now", "repeatable", "repeated_now"]


@dataclass
class Repeated:
    """A checkpoint's call of a layer. The checkpoint repeats the call before its backward, and the repetition must run
    as the call did.

    The layer's arguments do not identify the repetition: before transformers 5.23 a checkpoint also repeats the hooks
    of FSDP2, which pass other tensors to the layer the second time.

    Attributes:
        layer: the layer.
        replayed: whether the call was a replay; False: it was the layer's own code; None: it was not made yet.
        collects: the names of the outputs that transformers' hooks collected in the call.
        number: the call's turn. The memory of graphs that a checkpoint repeats is the call's from its repetition on.
    """

    layer: nn.Module
    replayed: bool | None = None
    collects: tuple[str, ...] = ()
    number: int = dataclasses.field(default_factory=NUMBERS.__next__)


_repeated: contextvars.ContextVar[Repeated | None] = contextvars.ContextVar("npu_kernels_repeated", default=None)
"""The checkpoint's call that is made, or repeated, on this thread."""


def number_now() -> int:
    """Returns the number of the turn of a call whose graphs keep nothing beyond the backward that follows it."""
    repeated = _repeated.get()
    return next(NUMBERS) if repeated is None else repeated.number


def repeatable(repeated: Repeated, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer's function for a checkpoint, in the first call and in its repetition, which comes on another thread
    where that computes gradients."""
    token = _repeated.set(repeated)
    try:
        return function(*args, **kwargs)
    finally:
        _repeated.reset(token)


def repeated_now() -> Repeated | None:
    """Returns the checkpoint's call that is made, or repeated, on this thread."""
    return _repeated.get()
