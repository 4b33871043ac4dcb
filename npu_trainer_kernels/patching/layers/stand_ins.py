"""Parameters that stand in for a layer's own while it is captured, on the thread that captures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["OnThisThread", "exchanged"]


class OnThisThread(dict[str, Any]):
    """The parameters of a module; on the thread that makes it, others are in their places. Other threads may list
    parameters meanwhile, or run the module."""

    def __init__(self, own: dict[str, Any], others: dict[int, nn.Parameter]) -> None:
        super().__init__(own)
        self._others = {name: None if p is None else others[id(p)] for name, p in own.items()}
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


@contextlib.contextmanager
def exchanged(layer: nn.Module, others: dict[int, nn.Parameter]) -> Iterator[None]:
    """Inside the `with` block a layer has other parameters on this thread: `others` has one for the id of each of the
    layer's own."""
    own = [(module.__dict__, module._parameters) for module in layer.modules()]
    try:
        for where, parameters in own:
            where["_parameters"] = OnThisThread(parameters, others)
        yield
    finally:
        for where, parameters in own:
            where["_parameters"] = parameters
