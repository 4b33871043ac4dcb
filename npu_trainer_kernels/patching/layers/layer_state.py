"""Everything that decides how a layer's code runs, except its arguments.

A graph remembers addresses and nothing else. So each call compares everything by which Python could decide otherwise:
the modules of the layer with their attributes, hooks, classes and configurations (adapters that are switched off,
modes, patches), and the parameters with their addresses and whether they are trained.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = [
    "SIMPLE", "LayerState", "collected_outputs", "collects_into", "has_foreign_hooks", "hooked", "is_checkpointed",
]  # fmt: skip


class LayerState:
    """What decides how a layer's code runs, as it was when the layer was captured.

    Args:
        layer: the layer.
        moves: whether its parameters are at other addresses in each call (FSDP2).
        tables: whether hooks of embeddings are compared. TRL adds one each time that it switches checkpointing on; it
            makes embedded tokens require a gradient, which does not matter in a forward without gradients.
    """

    def __init__(self, layer: nn.Module, moves: bool = False, tables: bool = True) -> None:
        self._moves = moves
        found = (vars(module).get("config") for module in layer.modules())
        configs = {id(config): config for config in found if hasattr(config, "__dict__")}
        self._objects = [
            _attributes(each, hooks=tables or not isinstance(each, nn.Embedding))
            for each in (*layer.modules(), *configs.values())
        ]
        self._parameters = [
            (owner._parameters, name, p, None if p is None else (moves or p.data_ptr(), p.requires_grad))
            for owner in layer.modules() for name, p in owner._parameters.items()
        ]  # fmt: skip
        self._buffers = [
            (owner._buffers, name, b, None if b is None else b.data_ptr())
            for owner in layer.modules() for name, b in owner._buffers.items()
        ]  # fmt: skip

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        for each, cls, own, size, plain, values, others, same in self._objects:
            if each.__class__ is not cls or len(own) != size or plain(own) != values:
                return False
            if not all(map(operator.is_, others(own), same)):
                return False
        moves = self._moves
        for where, name, p, known in self._parameters:
            if where.get(name) is not p or (p is not None and (moves or p.data_ptr(), p.requires_grad) != known):
                return False
        return all(where.get(name) is b and (b is None or b.data_ptr() == at) for where, name, b, at in self._buffers)

    def signature(self) -> int:
        """Returns a number. Two states of a layer have the same number if nothing has changed between them. The number
        keeps no object of the layer alive."""
        objects = tuple(
            (id(each), id(cls), size, repr(values), tuple(map(id, same)))
            for each, cls, _, size, _, values, _, same in self._objects
        )
        parameters = tuple((name, id(p), known) for _, name, p, known in self._parameters)
        return hash((objects, parameters, tuple((name, id(b), at) for _, name, b, at in self._buffers)))


def is_checkpointed(layer: Any) -> bool:
    """Whether a checkpoint repeats the calls of a layer."""
    return torch.is_grad_enabled() and bool(layer.training and getattr(layer, "gradient_checkpointing", False))


SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(value, SIMPLE)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_BY_NAME = (*_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_DICTS = (*_HOOKS, "_modules")
_ELSEWHERE = ("_parameters", "_buffers", "_gradient_checkpointing_func")
"""Attributes that are compared in another way, or that only code around a layer's forward reads. TRL switches
checkpointing off and on for each batch, with a new function each time."""


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that gets the values of a dict for these names."""
    if len(names) < 2:
        return lambda own: tuple(own[name] for name in names)
    return operator.itemgetter(*names)


def _attributes(each: Any, hooks: bool) -> tuple[Any, ...]:
    """Returns an object's attributes: values that may be changed in place as copies, others as they are."""
    own = each.__dict__
    names = [name for name in own if name not in _ELSEWHERE and (hooks or name not in _HOOKS_BY_NAME)]
    equal = [name for name in names if name in _DICTS or _is_plain(own[name])]
    plain, others = _getter(equal), _getter([name for name in names if name not in equal])
    values = tuple(
        value if isinstance(value, SIMPLE) else value.copy() if name in _DICTS else copy.deepcopy(value)
        for name, value in zip(equal, plain(own), strict=True)
    )
    return each, each.__class__, own, len(own), plain, values, others, others(own)


def collected_outputs() -> dict[str, list[Any]] | None:
    """Returns the lists that transformers' hooks write to at present (router logits, hidden states), by name; None
    where nothing is collected."""
    collector = _collector()
    return None if collector is None else collector.get() or None


@contextlib.contextmanager
def collects_into(lists: dict[str, list[Any]]) -> Iterator[None]:
    """Inside the `with` block transformers' hooks append to these lists; an empty dict makes them collect nothing."""
    collector = _collector()
    if collector is None:
        yield
        return
    token = collector.set(lists)
    try:
        yield
    finally:
        collector.reset(token)


@functools.cache
def _collector() -> Any:
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5 it gives modules another forward instead
        return None
    return _active_collector


def hooked(layer: nn.Module) -> bool:
    """Whether other code has hooked the layer or a module of it."""
    return any(map(has_foreign_hooks, layer.modules()))


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a hook of a module may keep or change the tensors that it gets. Two kinds of hooks do not count:
    transformers' collector, whose lists `collected_outputs` returns, and FSDP2's, which gather and free parameters."""
    own = module.__dict__
    return any(
        getattr(hook, "__name__", "") != "output_capturing_hook"
        and not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")
        for name in _HOOKS for hook in own[name].values()
    )  # fmt: skip
