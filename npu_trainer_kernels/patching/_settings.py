"""What a module's own code reads of it beside tensors and children: epsilons, limits, factors, names, functions.

A form was proven with these as they were. They are found by the names in the code of the module's methods, so that one
that changes nothing yet (a limit that is None, a method that nobody has set on the instance) is among them; so are
those of an object that it holds, such as its configuration. They are compared at every call: whatever has been set
otherwise since leaves the call to the module's own code. What can be written to in place (tensors, lists) would cost
more to compare than it is worth: a module whose code reads such a thing is left alone, and so is one that no run on a
few rows can show, because it keeps something on the side or goes by shapes or by gradients.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ._classes import original_class
from ._source import beyond_one_run

__all__ = ["Settings", "changed", "settings_of", "unseen"]

Settings = tuple[tuple[str, str, Any], ...]
"""Which attribute of the module holds it (none: the module itself), its name, its value."""

_ABSENT: Any = object()
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *dir(nn.Module)))
_IN_PLACE = torch.Tensor | list | dict | set


def settings_of(module: nn.Module, method: str = "forward") -> Settings:
    """What a method of a module reads, and the methods of the module that it calls; the method's own name is among it
    where not every module has it."""
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    values = (each for each in _values(module, method) if each[1] not in module._buffers)
    return tuple(each for each in values if each[-1] is _ABSENT or _is_setting(each[-1], shapes))


def unseen(module: nn.Module, method: str = "forward", known: str | None = None) -> str | None:
    """Why what a method does may be another thing at another call, without a sign that `changed` would see, or None:
    it reads what can be written to in place (but for parameters, and the buffer that is `known`), or goes by more than
    the numbers it is given, or has an effect beside its result."""
    kind = original_class(module)
    for holder, name, value in _values(module, method):
        in_place = isinstance(value, _IN_PLACE) or isinstance(getattr(kind, name, None), _IN_PLACE)
        if (in_place or name in module._buffers) and name != known:
            return f"its code reads {f'{holder}.{name}'.lstrip('.')}, which can be written to in place"
    functions = _read(kind, {**module._buffers, **vars(module)}, method)[1]
    return next(filter(None, map(beyond_one_run, functions)), None)


def changed(module: nn.Module, settings: Settings) -> str | None:
    """What of a module has been set otherwise since, as a reason; None: nothing."""
    own = module.__dict__
    for holder, name, value in settings:
        now = getattr(own.get(holder), name, _ABSENT) if holder else own.get(name, _ABSENT)
        if now is not value and (type(now) is not type(value) or now != value):
            return f"its {f'{holder}.{name}'.lstrip('.')} has been changed"
    return None


def _values(module: nn.Module, method: str) -> Iterator[tuple[str, str, Any]]:
    kind, own = original_class(module), {**module._buffers, **vars(module)}
    read, functions = _read(kind, own, method)
    said = dict.fromkeys(name for function in functions for name in _names(function))
    for name in read:
        if name not in _OF_EVERY_MODULE:
            value = own.get(name, _ABSENT)
            yield "", name, value
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, _FUNCTIONS)):
                # A configuration's dtype changes when it is saved; whether a module casts to it, its probes have seen.
                held = (each for each in said if each != "dtype" and hasattr(value, each))
                yield from ((name, each, getattr(value, each)) for each in held)


def _read(kind: type[nn.Module], own: dict[str, Any], method: str) -> tuple[list[str], list[types.FunctionType]]:
    """Names in the code of a method that are those of the instance or of its class, and in the code of those; and the
    functions that have this code."""
    found, functions = [method], []
    for name in found:
        for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            function = _function(vars(cls).get(name))
            if function is None:
                continue
            functions.append(function)
            for read in _names(function):
                if read not in found and (read in own or hasattr(kind, read)):
                    found.append(read)
    return found, functions


def _function(method: Any) -> types.FunctionType | None:
    """The function of a method, or of a property's, below what decorates it."""
    found: Any = method.fget if isinstance(method, property) else method
    found = inspect.unwrap(found)
    return found if isinstance(found, types.FunctionType) else None


def _names(function: types.FunctionType) -> Iterator[str]:
    """The names in the code of a function, and in the code inside it."""
    codes: list[Any] = [function.__code__]
    for code in codes:
        if isinstance(code, types.CodeType):
            yield from code.co_names
            codes += code.co_consts


# Of these a copy of a model has the same ones.
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | type


def _is_setting(value: Any, shapes: list[torch.Size]) -> bool:
    if isinstance(value, tuple):
        return value not in shapes and all(_is_setting(each, shapes) for each in value)
    return isinstance(value, int | float | str | torch.dtype | None | _FUNCTIONS)
