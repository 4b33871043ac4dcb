"""Copies of weights for the length of a rollout, in which they do not change.

They serve two purposes. TRL trains fp32 weights under bf16 autocast by default: a linear layer then reads four bytes of
a weight, writes two and reads them again, for one token; so such weights are cast once. And weights that multiply the
same tensor (those of queries, keys and values; of a gate and its values) are put side by side, since the product of few
rows takes as long as its launch: they become one product, whose columns are taken apart.

Which weights these are is seen in one forward of the model, whatever its modules are. It is known from then on, until
something of the model changes.

Weights of another class than torch's own (quantised ones) are used as they are: what their class does with a cast or a
copy is its own matter. Copies stand for weights on the thread of the rollout alone; other threads may train or evaluate
the same model meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..patching.patch import PLAIN

__all__ = ["Weights"]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where a tensor begins: its storage and the offset there, which tensors without memory have, too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


_VIEWS = frozenset(("aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view", "aten::detach", "aten::alias",
                    "aten::permute", "aten::slice", "aten::unsqueeze", "aten::select", "aten::expand",
                    "prim::device"))  # fmt: skip
"""Operators that read no numbers. Tensors without memory are asked for their device by one."""


class _Uses(TorchDispatchMode):
    """Notes which parameters are cast to autocast's dtype, and which are used as they are.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._known = {_place(p) for p in parameters if type(p) in PLAIN and p.dtype is torch.float32 and p.numel()}
        self.cast: dict[tuple[int, int], torch.dtype] = {}
        self.used: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in args:
            if type(each) not in PLAIN or each.dtype is not torch.float32:
                continue
            if (at := _place(each)) in self._known:
                name, kind = func._schema.name, each.device.type
                if name == "aten::_to_copy" and kwargs.get("dtype") is torch.get_autocast_dtype(kind):
                    self.cast[at] = kwargs["dtype"]
                elif name not in _VIEWS:
                    self.used.add(at)
        return func(*args, **kwargs)


def _plain_linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Returns the input and the weight of a call of `linear` without a bias, or None; None also for a weight of a class
    that is not torch's own."""
    if kwargs or len(args) < 2 or (len(args) > 2 and args[2] is not None):
        return None
    return (args[0], args[1]) if isinstance(args[1], nn.Parameter) and type(args[1]) in PLAIN else None


class _Products(TorchFunctionMode):
    """Notes which parameters multiply the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[tuple[int, int], tuple[torch.Tensor, list[nn.Parameter]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and (found := _plain_linear(args, kwargs or {})) is not None:
            x, weight = found
            # The entry keeps the tensor alive, so that its id is not used again.
            self._inputs.setdefault((id(x), x._version), (x, []))[1].append(weight)
        return func(*args, **kwargs or {})

    def groups(self) -> list[list[nn.Parameter]]:
        """Returns the parameters that multiply the same tensor, two at least, each of which does so once."""
        uses = [id(p) for _, each in self._inputs.values() for p in each]
        once = [[p for p in each if uses.count(id(p)) == 1] for _, each in self._inputs.values()]
        return [each for each in once if len(each) > 1]


@dataclass
class _Side:
    """Weights that multiply the same tensor, side by side."""

    all: nn.Parameter
    sizes: list[int] = field(default_factory=list)


class _Joined(TorchFunctionMode):
    """Computes products of weights that are side by side at once.

    Args:
        sides: by id of a weight, what it is a part of, and its place there.
    """

    def __init__(self, sides: dict[int, tuple[_Side, int]]) -> None:
        super().__init__()
        self._sides = sides
        self._now: dict[int, tuple[torch.Tensor, int, tuple[torch.Tensor, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _plain_linear(args, kwargs or {}) if func is functional.linear else None
        if found is None or id(found[1]) not in self._sides:
            return func(*args, **kwargs or {})
        x, (side, place) = found[0], self._sides[id(found[1])]
        known = self._now.get(id(side))
        if known is None or known[0] is not x or known[1] != x._version:
            known = x, x._version, functional.linear(x, side.all).split(side.sizes, -1)
            self._now[id(side)] = known
        return known[2][place]


class _Shown(dict[str, Any]):
    """The parameters of a module. On the thread that has made it some names stand for copies.

    Attributes:
        own: the module's own dict.
    """

    def __init__(self, own: dict[str, Any], copies: dict[str, nn.Parameter]) -> None:
        super().__init__(own)
        self.own, self._copies, self._thread = own, copies, threading.get_ident()

    def __getitem__(self, name: str) -> Any:
        here = name in self._copies and threading.get_ident() == self._thread
        return self._copies[name] if here else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is `get`)


@dataclass(frozen=True)
class WeightUses:
    """How a forward uses a model's weights, which are named by their `id`.

    Attributes:
        casts: the dtype that autocast casts a weight to, for weights whose own numbers nothing but the cast reads.
        also_read: weights that are cast, and whose own numbers something else reads, too.
        groups: weights that multiply the same tensor, two at least, each of which does so once.
    """

    casts: dict[int, torch.dtype]
    also_read: frozenset[int]
    groups: list[list[int]]


class Weights:
    """The copies for one model.

    Attributes:
        uses: what a forward has shown; None: nothing yet.
    """

    def __init__(self) -> None:
        self.uses: WeightUses | None = None
        self._copies: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._sides: dict[int, tuple[_Side, int]] = {}

    @contextlib.contextmanager
    def looking(self, model: nn.Module) -> Iterator[None]:
        """Inside the `with` block a forward of the model shows how it uses its weights."""
        cached = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        try:
            with _Uses(model.parameters()) as uses, _Products() as products:
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)
        plain = [p for p in model.parameters() if type(p) in PLAIN]
        cast = {id(p): (uses.cast[at], at in uses.used) for p in plain if (at := _place(p)) in uses.cast}
        self.uses = WeightUses(
            {known: dtype for known, (dtype, _) in cast.items()},
            frozenset(known for known, (_, read) in cast.items() if read),
            [[id(p) for p in group] for group in products.groups()],
        )

    def make(self, model: nn.Module, uses: WeightUses, room: int | None) -> None:
        """Allocates the copies, and fills them.

        Args:
            model: the model.
            uses: how it uses its weights.
            room: the number of bytes that copies may have which only put weights side by side; None: any number.
        """
        self.uses = uses
        # A table whose rows are looked up may be tied to the head; the table stays as it is.
        tables = {module for module in model.modules() if isinstance(module, nn.Embedding)}
        tied = {id(module.weight) for module in tables}
        weights = {id(p): p for p in model.parameters()}
        made: dict[int, nn.Parameter] = {}

        def dtype_of(p: nn.Parameter) -> torch.dtype:
            read = id(p) in uses.also_read and id(p) not in tied
            return p.dtype if read else uses.casts.get(id(p), p.dtype)

        for group in ([weights[known] for known in each] for each in uses.groups):
            dtypes = {(dtype_of(p), p.device) for p in group}
            if len(dtypes) == 1 and not any(id(p) in tied for p in group):
                if room is not None and all(dtype_of(p) is p.dtype for p in group):
                    room -= sum(p.nbytes for p in group)
                    if room < 0:
                        continue
                rows = [p.shape[0] for p in group]
                all_ = torch.empty(sum(rows), group[0].shape[1], dtype=dtype_of(group[0]), device=group[0].device)
                side = _Side(nn.Parameter(all_, requires_grad=False), rows)
                for place, (p, part) in enumerate(zip(group, all_.split(rows), strict=True)):
                    made[id(p)] = nn.Parameter(part, requires_grad=False)
                    self._sides[id(made[id(p)])] = side, place
        for module in model.modules():
            for name, weight in {} if module in tables else module._parameters.items():
                if weight is None or (id(weight) not in made and dtype_of(weight) is weight.dtype):
                    continue
                if id(weight) not in made:
                    copied = torch.empty_like(weight, dtype=dtype_of(weight))
                    made[id(weight)] = nn.Parameter(copied, requires_grad=False)
                self._copies.append((module, name, weight, made[id(weight)]))
        self.fill()

    def tensors(self) -> list[torch.Tensor]:
        """Returns the copies."""
        return list(
            {id(t): t for t in (*(c for *_, c in self._copies), *(s.all for s, _ in self._sides.values()))}.values()
        )

    @property
    def nbytes(self) -> int:
        """The memory of the copies."""
        return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in self.tensors())}.values())

    def fill(self) -> None:
        """Copies the weights as they are now."""
        with torch.no_grad():
            for _, _, p, copied in self._copies:
                copied.copy_(p)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside the `with` block the copies stand for the weights on this thread."""
        copies: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module, name, _, copied in self._copies:
            copies.setdefault(module, {})[name] = copied
        before = {module: _own(module) for module in copies}
        for module, each in copies.items():
            vars(module)["_parameters"] = _Shown(before[module], each)
        try:
            with _Joined(self._sides):
                yield
        finally:
            for module, own in before.items():
                vars(module)["_parameters"] = own


def _own(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own dict of parameters, also while a rollout on another thread shows copies."""
    found: Any = vars(module)["_parameters"]
    own: dict[str, Any] = found.own if isinstance(found, _Shown) else found
    return own
