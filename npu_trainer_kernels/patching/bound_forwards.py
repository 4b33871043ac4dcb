"""Forwards that Hugging Face's package `kernels` has set on modules, in the place of their classes' own.

Where transformers is asked for `use_kernels=True`, `kernels.kernelize` sets a forward on every module whose class has a
name for kernels, and does it again whenever the model changes between training and evaluation. There are three kinds:

- the own forward of the module's class, where `kernels` has no kernel for it;
- a layer of this package (`hub_layers`);
- a kernel of somebody else.

Forwards of the first two kinds hide nothing that the ops have to keep: they are taken out before modules are
recognised, and again at a model's forward if they have come back, and `restore` sets them again. A kernel of somebody
else stays, and the report names it.
"""

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..support.opaque import opaque
from .classes import original_class
from .undo import Undo

__all__ = ["BoundForwards", "has_other_forward", "is_kernelizable", "kernel_of_package", "own_function"]

_LAYERS = f"{__package__}.hub_layers"


def is_kernelizable(module: nn.Module) -> bool:
    """Whether `kernels` may set a forward on a module: its class, or what it has made of a function, has a name."""
    return hasattr(type(module), "kernel_layer_name")


def _bound(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the function that `kernels` has bound to a module as its forward, or None."""
    forward = vars(module).get("forward")
    if forward is None or not is_kernelizable(module) or not isinstance(forward, types.MethodType):
        return None
    return forward.__func__ if forward.__self__ is module else None


def _is_ours(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether a bound function is a class's own forward, or a layer of this package."""
    cls: Any = type(module)
    return function in (cls.forward, original_class(module).forward) or function.__module__ == _LAYERS


def has_other_forward(module: nn.Module) -> bool:
    """Whether a forward was set on a module that may compute something else than its class does."""
    if "forward" not in vars(module):
        return False
    function = _bound(module)
    return function is None or not _is_ours(module, function)


def kernel_of_package(module: nn.Module) -> str | None:
    """Returns that `kernels` has set a kernel of somebody else on a module, and how to do without it, or None."""
    function = _bound(module)
    if function is None or _is_ours(module, function):
        return None
    return (
        f"a kernel of the package kernels, from {function.__module__}: use_kernels=False, or kernel_config() of "
        "npu_trainer_kernels.hub_kernels, does without it"
    )


def own_function(value: Any) -> Callable[..., Any] | None:
    """Returns a function of a model's code: the function itself, or the one of which `kernels` has made a module."""
    if isinstance(value, types.FunctionType):
        return value
    if isinstance(value, nn.Module) and is_kernelizable(value) and not any(True for _ in value.parameters()):
        return types.MethodType(type(value).forward, value)
    return None


class BoundForwards:
    """Takes forwards of the first two kinds out of a model, and sets them again when everything is restored."""

    def __init__(self) -> None:
        # A bound method would keep its module alive, so the layer of this package is kept, or None for a class's own.
        self._taken: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def take_out(self, model: nn.Module) -> None:
        """Deletes these forwards from the model's modules."""
        for module in model.modules():
            function = _bound(module)
            if function is not None and _is_ours(module, function):
                self._taken[module] = function if function.__module__ == _LAYERS else None
                del module.forward

    def put_back(self) -> None:
        """Sets again what was taken out, unless other code has set a forward in the meantime."""
        for module, function in list(self._taken.items()):
            if "forward" not in vars(module):
                cls: Any = type(module)
                module.forward = types.MethodType(function or cls.forward, module)
        self._taken.clear()

    def watch(self, model: nn.Module, undo: Undo) -> None:
        """Has these forwards taken out before each forward of a model in which they have come back."""
        path = next((path for path, module in model.named_modules() if is_kernelizable(module)), None)
        if path is None or model in self._watched:
            return
        self._watched.add(model)
        undo.add(lambda: self._watched.clear())
        undo.add(model.register_forward_pre_hook(_Again(self, path), prepend=True).remove)


class _Again:
    """The hook of `watch`. One module of the model shows whether `kernels` has been at work."""

    def __init__(self, forwards: BoundForwards, path: str) -> None:
        self._forwards, self._path = forwards, path

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Again":
        # A copy of a model has no handle that would put anything back.
        return _Again(BoundForwards(), self._path)

    def __call__(self, model: nn.Module, args: Any) -> None:
        _take_out_again(self._forwards, model, self._path)


def _traced(forwards: BoundForwards, model: nn.Module, path: str) -> None:
    """Replaces the hook in a graph that may not be broken."""


def _again(forwards: BoundForwards, model: nn.Module, path: str) -> None:
    if "forward" in vars(model.get_submodule(path)):
        forwards.take_out(model)


_take_out_again = opaque(_again, in_full_graphs=_traced)
