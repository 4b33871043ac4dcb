"""Subclasses that replace a method or an attribute of a module's class and nothing else.

Setting its `__class__` gives an instance such a subclass. Its parameters, buffers, hooks, `state_dict` keys and names
stay as they are, `isinstance` still holds, `deepcopy` keeps the subclass, and setting the class back undoes it.
"""

import copy
import copyreg
import operator
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

__all__ = [
    "GLOBAL_HOOKS",
    "derived",
    "forward_of",
    "has_hooks",
    "is_patched_class",
    "leaves_out_hooks",
    "original_class",
    "subclass_with_forward",
]

GLOBAL_HOOKS = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)
"""The hooks that PyTorch runs for every module."""


class _Either:
    """A value that pickles as one object and is copied as another.

    A `__deepcopy__` of the module's class would not do: wrappers that forward missing attributes (PEFT's) would find
    the `__deepcopy__` of the module inside them, and be copied as that module.
    """

    def __init__(self, pickled: Any, copied: Any) -> None:
        self.pickled, self.copied = pickled, copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copied, memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return operator.getitem, ((self.pickled,), 0)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_PACKAGE = __name__.partition(".")[0]


def _state(module: nn.Module) -> dict[str, Any]:
    """Returns an instance's state; a pickle lacks this package's hooks, since it may be loaded without the package."""
    own = dict(module.__getstate__())
    ours = {
        key for name in _HOOKS for key, hook in own[name].items()
        if (getattr(hook, "func", hook).__module__ or "").partition(".")[0] == _PACKAGE
    }  # fmt: skip
    for name in (*_HOOKS, *_ABOUT_HOOKS) if ours else ():
        others = type(own[name])((key, value) for key, value in own[name].items() if key not in ours)
        own[name] = _Either(others, own[name])
    return own


def derived(cls: Any, namespace: dict[str, Any]) -> type[nn.Module]:
    """Returns a subclass of `cls`, which may itself be a derived class, with other attributes."""
    original = getattr(cls, "_npu_kernels_original", cls)

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        # A pickle names the original class, so that it loads as if nothing had been patched.
        return copyreg._reconstructor, (_Either(original, type(self)), object, None), _state(self)  # type: ignore[attr-defined]

    def shallow(self: nn.Module) -> nn.Module:
        new: nn.Module = original.__new__(original)
        new.__dict__.update(self.__dict__)
        return new

    return type(cls.__name__, (cls,), {
        **namespace,
        "__copy__": shallow,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_npu_kernels_original": original,
    })  # fmt: skip


def subclass_with_forward(
    cls: Any, forward: Callable[..., Any], helpers: tuple[tuple[str, Callable[..., Any]], ...] = ()
) -> type[nn.Module]:
    """Returns a subclass of `cls` with another `forward` and static helpers."""
    return derived(cls, {**{name: staticmethod(helper) for name, helper in helpers}, "forward": forward})


_HOOKED_BY = "_npu_kernels_hooked_by"


def leaves_out_hooks(module: nn.Module, undo: Any) -> None:
    """Gives a module with hooks of this package a class whose pickles lack them, unless the module's class defines how
    it is pickled or copied."""
    kind: Any = original_class(module)
    own_ways = (hasattr(kind, "__deepcopy__"), kind.__reduce__ is not object.__reduce__,
                kind.__reduce_ex__ is not object.__reduce_ex__)  # fmt: skip
    if not any(own_ways) and getattr(type(module), _HOOKED_BY, None) is not undo:
        undo.set_class(module, derived(type(module), {_HOOKED_BY: undo}))


def forward_of(cls: Any) -> Callable[..., Any]:
    """Returns a function that looks up the class's forward at each call: other code may replace it after the patch."""

    def own(module: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(module, *args, **kwargs)

    return own


def is_patched_class(cls: type[nn.Module]) -> bool:
    """Whether `derived` made this class itself, not a base of it."""
    return "_npu_kernels_original" in vars(cls)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module must be called, since its result is not all that matters: a wrapper that shards has hooked it,
    or other code has hooked every module (a counter of operations)."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        or any(GLOBAL_HOOKS)
    )  # fmt: skip


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was patched."""
    return getattr(type(module), "_npu_kernels_original", type(module))
