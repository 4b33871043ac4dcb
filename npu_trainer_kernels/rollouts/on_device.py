"""Computes on the device what the code of a model's step would make on the host, or ask the host about.

A graph of the device has no copies from the host and no questions of it. Some code has one at each token whose result
is a constant: a scalar of a number, the entry of a list of one index, whether the parameters of a distribution are
valid. These calls are made in another way, with the same result.
"""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from ..patching.body import Unserved

__all__ = ["OnDevice"]

_TOPK = (torch.topk, torch.Tensor.topk)


def _is_one(part: Any) -> bool:
    return type(part) is list and len(part) == 1 and type(part[0]) is int


def _sliced(part: Any) -> Any:
    """Returns a part of an index, with a slice in the place of a list of one number, which selects the same entry."""
    return slice(part[0], part[0] + 1 or None) if _is_one(part) else part


class _Validates:
    """False on this thread; it notes that a distribution has asked whether its parameters are to be validated. On other
    threads it is what was there before."""

    def __init__(self, mode: OnDevice, before: Any) -> None:
        self._mode, self.before, self._thread = mode, before, threading.get_ident()

    def __bool__(self) -> bool:
        if threading.get_ident() != self._thread:
            return bool(self.before)
        self._mode.changed = True
        return False


class OnDevice(TorchFunctionMode):
    """Inside the `with` block a step's code is computed.

    Args:
        places: the number of places of a row's cache, if the code attends to all of them; None: it does not. Code that
            selects some of its keys would select among all places: what it then attends to is no matter of rounding,
            and no comparison can tell.

    Attributes:
        changed: whether it has changed any call, or would have; if not, the same code needs no such block.

    Raises:
        Unserved: the code selects among its keys.
    """

    def __init__(self, places: int | None) -> None:
        super().__init__()
        self._places = places
        self.changed = False

    def __enter__(self) -> OnDevice:
        before = Distribution._validate_args
        # A step that is captured on another thread at the same time may end later.
        self._validates = before.before if isinstance(before, _Validates) else before
        Distribution._validate_args = _Validates(self, self._validates)  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: types.TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        Distribution._validate_args = self._validates

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float):
            self.changed = True
            return torch.full((), args[0], **kwargs)
        if func is torch.Tensor.__getitem__:
            # Several lists select along one dimension together, which slices do not.
            index = args[1] if type(args[1]) is tuple else (args[1],)
            lists = sum(isinstance(part, list | torch.Tensor) for part in index)
            if lists == 1 and any(map(_is_one, index)):
                self.changed = True
                args = (args[0], tuple(map(_sliced, index)) if type(args[1]) is tuple else _sliced(args[1]))
        elif func in _TOPK and args[0].dim() > 2 and self._places in args[0].shape:
            raise Unserved("it selects among its keys")
        return func(*args, **kwargs)
