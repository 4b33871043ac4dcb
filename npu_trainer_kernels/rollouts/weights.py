"""Copies of weights in the dtype that autocast would cast them to at every token.

TRL trains fp32 weights under bf16 autocast by default. A linear layer then reads four bytes of a weight, writes two and
reads them again, for one token. During a rollout weights do not change, so they are cast once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["Casts"]


class _Linears(TorchFunctionMode):
    """Notes the parameters that linear layers are given under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.dtype] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            for each in (*args[1:], *(kwargs or {}).values()):
                if isinstance(each, nn.Parameter) and torch.is_autocast_enabled(each.device.type):
                    dtype = torch.get_autocast_dtype(each.device.type)
                    if each.dtype is torch.float32 and dtype is not each.dtype:
                        self.seen[id(each)] = dtype
        return func(*args, **kwargs or {})


class Casts:
    """The copies for one model.

    Attributes:
        found: whether it was looked for the weights that autocast casts.
    """

    def __init__(self) -> None:
        self.found = False
        self._copies: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []

    @contextlib.contextmanager
    def looking(self, model: nn.Module) -> Iterator[None]:
        """Inside the `with` block a forward of the model shows which of its weights autocast casts."""
        with _Linears() as linears:
            yield
        self.found = True
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            # A table whose rows are looked up may be tied to the head; it is not cast.
            for name, p in {} if isinstance(module, nn.Embedding) else module._parameters.items():
                if p is not None and (dtype := linears.seen.get(id(p))) is not None:
                    if id(p) not in made:
                        made[id(p)] = nn.Parameter(torch.empty_like(p, dtype=dtype), requires_grad=False)
                    self._copies.append((module._parameters, name, p, made[id(p)]))

    def tensors(self) -> list[torch.Tensor]:
        """Returns the copies."""
        return list({id(copied): copied for *_, copied in self._copies}.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def fill(self) -> None:
        """Casts the weights as they are now."""
        with torch.no_grad():
            for _, _, p, copied in self._copies:
                copied.copy_(p)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside the `with` block the copies stand for the weights."""
        for where, name, _, copied in self._copies:
            where[name] = copied
        try:
            yield
        finally:
            for where, name, p, _ in self._copies:
                where[name] = p
