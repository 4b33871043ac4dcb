"""A promised KV cache, for a training forward whose configuration requests a cache that no code reads.

A packed row has no cache. When code reads anything of the promise, the model's own forward computes the cache, and the
promise becomes that very object: class, attributes and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache

from ...support.foreign import CACHES
from ..patch import PLAIN

__all__ = ["cache_field", "cache_of", "can_promise", "promised_cache"]


def cache_field(out: Any) -> str:
    """Returns the name under which a body's output has its KV cache; a tuple has none."""
    fields = getattr(out, "__dataclass_fields__", ())
    return next((name for name in CACHES if name in fields), CACHES[0])


def cache_of(out: Any) -> type[Cache] | None:
    """Returns the class of the KV cache in a body's output, or None."""
    cache = getattr(out, cache_field(out), None)
    return type(cache) if isinstance(cache, Cache) else None


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        _make(self)
        return getattr(type(self), name)(self, *args)

    return method


class _Promised:
    """The behaviour of a promised cache until code reads it, as the first base of its class."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, name)
        _make(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _make(self)
        setattr(self, name, value)


_HAS = ("__len__", "__getitem__", "__iter__", "__repr__", "__str__", "__reduce_ex__")


def _make(promise: Any) -> None:
    real = object.__getattribute__(promise, "__dict__")["make"]()
    object.__setattr__(promise, "__class__", type(real))
    vars(promise).clear()
    vars(promise).update(vars(real))


def can_promise(module: torch.nn.Module) -> bool:
    """Whether a module's parameters are available outside of the forward that is running."""
    return not torch.is_inference_mode_enabled() and all(type(p) in PLAIN and p.numel() for p in module.parameters())


def promised_cache(cls: Any, kind: Any, module: Any, given: dict[str, Any]) -> Cache:
    """Returns a promise of the KV cache of the training forward that is running.

    Args:
        cls: the class whose forward computes the cache.
        kind: the class of the cache (`cache_of`).
        module: the module of that forward.
        given: the arguments of the module.
    """
    device = next(module.parameters()).device.type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def versions() -> list[int]:
        tensors = (*module.parameters(), *given.values())
        return [t._version for t in tensors if isinstance(t, torch.Tensor)]

    before = versions()

    def make() -> Cache:
        if versions() != before or not module.training:
            raise RuntimeError(
                "the cache of a forward in training is computed when it is read, and the weights, arguments or mode "
                "have changed since: read it before, or ask for it by use_cache=True"
            )
        with torch.enable_grad(), autocast:
            out = cls.forward(module, **{**given, "use_cache": True})
            made: Cache = getattr(out, cache_field(out))
        return made

    promise: Cache = object.__new__(_promised_class(kind))
    object.__getattribute__(promise, "__dict__")["make"] = make
    return promise


@functools.cache
def _promised_class(kind: Any) -> Any:
    special = {name: _special(name) for name in _HAS if hasattr(kind, name)}
    return type(kind.__name__, (_Promised, kind), {**special, "__module__": kind.__module__})
