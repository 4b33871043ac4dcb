"""A decorator as releases put it around forwards."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["noted"]


def noted(version: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Hands all arguments on, and would say since which version something is deprecated."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if f"deprecated_before_{version}" in kwargs:
                kwargs.pop(f"deprecated_before_{version}")
            return function(*args, **kwargs)

        return wrapped

    return decorate
