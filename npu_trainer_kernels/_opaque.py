"""Marking functions that `torch.compile` must call and not trace."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["opaque"]

_F = TypeVar("_F", bound=Callable[..., Any])


def opaque(fn: _F) -> _F:
    """As `torch.compiler.disable(fn)`, but without importing Dynamo (and with it Triton, seconds long) before anything
    is compiled."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(fn)(*args, **kwargs)
        return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
