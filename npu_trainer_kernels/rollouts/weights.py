"""Copies of weights in the dtype that autocast would cast them to at every token.

TRL trains fp32 weights under bf16 autocast by default. A linear layer then reads four bytes of a weight, writes two and
reads them again, for one token. During a rollout weights do not change, so they are cast once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Casts"]


_VIEWS = frozenset(("aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view", "aten::detach", "aten::alias",
                    "aten::permute", "aten::slice", "aten::unsqueeze", "aten::select", "aten::expand"))  # fmt: skip


class _Uses(TorchDispatchMode):
    """Notes which parameters are cast to autocast's dtype, and which are used as they are.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._known = {p.data_ptr(): p.dtype for p in parameters if p.dtype is torch.float32 and p.numel()}
        self.cast: dict[int, torch.dtype] = {}
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in args:
            if isinstance(each, torch.Tensor) and each.dtype is torch.float32 and each.data_ptr() in self._known:
                name, kind = func._schema.name, each.device.type
                if name == "aten::_to_copy" and kwargs.get("dtype") is torch.get_autocast_dtype(kind):
                    self.cast[each.data_ptr()] = kwargs["dtype"]
                elif name not in _VIEWS:
                    self.used.add(each.data_ptr())
        return func(*args, **kwargs)


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
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        tied = {id(m.weight) for m in tables}
        cached = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        try:
            with _Uses(model.parameters()) as uses:
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)
        self.found = True
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            # A table whose rows are looked up may be tied to the head; it is not cast.
            for name, p in {} if module in tables else module._parameters.items():
                if p is None or p.data_ptr() not in uses.cast or (p.data_ptr() in uses.used and id(p) not in tied):
                    continue
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, dtype=uses.cast[p.data_ptr()]), requires_grad=False)
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
