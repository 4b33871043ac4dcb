"""Puts back what a look has changed: random states, and whatever modules hold besides their parameters.

A look runs code whose traces are known to stay within this (`probe.traces`): transformers' own modules set attributes
and buffers, and draw.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ... import device
from .agreement import repeatable

__all__ = ["kept_state", "remembered"]

_CONTAINERS = (dict, list, set, deque)


@contextlib.contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """After the `with` block every module of a model has the attributes, the entries of its lists and dictionaries, and
    the numbers in its buffers and other tensors that it had before; random states are what they were, on all devices.
    """
    put_back = remembered(model)
    try:
        with _all_generators():
            yield
    finally:
        put_back()


def remembered(model: nn.Module) -> Callable[[], None]:
    """Returns a function that gives every module of a model the attributes, entries and numbers that it has now."""
    kept = [(own := vars(module), dict(own), _contents(own)) for module in model.modules()]
    tensors = [(t, t._version, t.clone()) for own, _, _ in kept for t in _tensors(own)]

    def put_back() -> None:
        for own, attributes, contents in kept:
            if own.keys() != attributes.keys() or any(own[name] is not value for name, value in attributes.items()):
                own.clear()
                own.update(attributes)
            for container, before in contents:
                _refill(container, before)
        with torch.no_grad():
            for tensor, version, copied in tensors:
                if tensor._version != version:
                    tensor.copy_(copied)

    return put_back


def _contents(own: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Returns copies of the containers in a module's attributes; what registers a hook is not run. FSDP2 gathers the
    parameters for a forward, and must find those that it has put there."""
    return [(v, v.copy()) for name, v in own.items() if isinstance(v, _CONTAINERS) and name != "_parameters"
            and type(v).__module__ in ("builtins", "collections") and "_hooks" not in name]  # fmt: skip


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        if list(container) == list(before) and all(container[key] is value for key, value in before.items()):
            return
        container.clear()
        container.update(before)
    elif len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _tensors(own: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that a module holds besides its parameters, which no look writes to."""
    held = (*own.get("_buffers", {}).values(), *own.values())
    return [t for t in held if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter) and not t.is_inference()]


@contextlib.contextmanager
def _all_generators() -> Iterator[None]:
    kind = device.accelerator()
    module: Any = None if kind == "cpu" else torch.get_device_module(kind)
    with contextlib.ExitStack() as stack:
        stack.enter_context(repeatable())
        if module is not None and module.is_initialized():
            stack.enter_context(torch.random.fork_rng(list(range(module.device_count())), device_type=kind))
        yield
