"""What stands in for a module's own parameters and parts while it is captured, on the thread that captures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...capture import Refused

__all__ = ["Exchanged", "OnThisThread", "without_part"]


class OnThisThread(dict[str, Any]):
    """The parameters or parts of a module; on the thread that makes it, others are in their places. Other threads may
    list them meanwhile, or run the module."""

    def __init__(self, own: dict[str, Any], others: dict[int, Any]) -> None:
        super().__init__(own)
        self._others = {name: others.get(id(each), each) for name, each in own.items()}
        self._thread = threading.get_ident()

    def _seen(self) -> dict[str, Any]:
        return self._others if threading.get_ident() == self._thread else dict(super().items())

    def __getitem__(self, name: str) -> Any:
        return self._seen()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._seen().get(name, default)

    def items(self) -> Any:
        return self._seen().items()

    def values(self) -> Any:
        return self._seen().values()


class Exchanged:
    """Other parameters in the places of those of a module, on the thread that makes it.

    Args:
        module: the module.
        others: a parameter for the `id` of each of the module's own.
    """

    def __init__(self, module: nn.Module, others: dict[int, nn.Parameter]) -> None:
        self._parts = [(part.__dict__, OnThisThread(part._parameters, others)) for part in module.modules()]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the `with` block the module has them."""
        before = [where["_parameters"] for where, _ in self._parts]
        try:
            for where, those in self._parts:
                where["_parameters"] = those
            yield
        finally:
            for (where, _), own in zip(self._parts, before, strict=True):
                where["_parameters"] = own


class _Known(nn.Module):
    """Stands in for a part of a module, whose result is known."""

    def __init__(self, part: nn.Module, given: torch.Tensor, result: torch.Tensor) -> None:
        super().__init__()
        self.__dict__.update(stands_for=part, expected=given, results=[result])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        own = self.__dict__
        if given is not own["expected"] or not own["results"]:
            raise Refused("its code embeds other ids than it is given, or does so several times")
        result: torch.Tensor = own["results"].pop()
        return result


@contextlib.contextmanager
def without_part(module: nn.Module, part: nn.Module, given: torch.Tensor, result: torch.Tensor) -> Iterator[None]:
    """Inside the `with` block a module does not run one of its parts on this thread, whose result is known.

    Args:
        module: the module.
        part: the part.
        given: what it is called with; a call with anything else, and a second one, raise `Refused`.
        result: its result.
    """
    known = _Known(part, given, result)
    own = [(m.__dict__, m._modules) for m in module.modules() if any(each is part for each in m._modules.values())]
    try:
        for where, parts in own:
            where["_modules"] = OnThisThread(parts, {id(part): known})
        yield
        if known.__dict__["results"]:
            raise Refused("its code does not embed the ids that it is given")
    finally:
        for where, parts in own:
            where["_modules"] = parts
