"""Subclasses that replace one method of a module's class and nothing else.

An instance is moved to such a subclass by setting its `__class__`: parameters, buffers, hooks, `state_dict` keys, names
and `isinstance` stay as they are, `deepcopy` carries it along, and undoing it is setting the class back.
"""

import copy
import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

__all__ = ["GLOBAL_HOOKS", "forward_of", "has_hooks", "is_patched_class", "original_class", "subclass_with_forward"]

GLOBAL_HOOKS = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)
"""Hooks of every module there is."""


def subclass_with_forward(
    cls: Any, forward: Callable[..., Any], helpers: tuple[tuple[str, Callable[..., Any]], ...] = ()
) -> type[nn.Module]:
    """A subclass of `cls` with another `forward` and static helpers."""

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        # A pickle names the original class, so that it loads as if nothing had been patched.
        return copyreg._reconstructor, (cls, object, None), self.__dict__  # type: ignore[attr-defined]

    namespace: dict[str, Any] = {
        **{name: staticmethod(helper) for name, helper in helpers},
        "forward": forward,
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_npu_kernels_original": cls,
    }
    return type(cls.__name__, (cls,), namespace)


def forward_of(cls: Any) -> Callable[..., Any]:
    """The forward that a class has when it is called: somebody may replace it after the patch."""

    def own(module: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(module, *args, **kwargs)

    return own


def is_patched_class(cls: type[nn.Module]) -> bool:
    """Whether `subclass_with_forward` made a class: not one that somebody has derived of it."""
    return "_npu_kernels_original" in vars(cls)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants a module to be called, not just what it computes: a wrapper that shards, or who has hooked
    every module there is (a counter of operations)."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        or any(GLOBAL_HOOKS)
    )  # fmt: skip


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was patched."""
    return getattr(type(module), "_npu_kernels_original", type(module))
