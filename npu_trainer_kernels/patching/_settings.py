"""What a module's own code reads of it beside tensors and children: epsilons, limits, factors, names, functions.

A form was proven with these as they were. They are found by the names in the code of the module's methods, so that one
that changes nothing yet (a limit that is None, a method that nobody has set on the instance) is among them; and they
are compared at every call: whatever has been set otherwise since leaves the call to the module's own code.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ._classes import original_class

__all__ = ["Settings", "changed", "settings_of"]

Settings = tuple[tuple[str, Any], ...]
"""Names and values."""

_ABSENT: Any = object()
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *dir(nn.Module)))


def settings_of(module: nn.Module, method: str = "forward") -> Settings:
    """What a method of a module reads, and the methods of the module that it calls; the method's own name is among it
    where not every module has it."""
    kind, own = original_class(module), vars(module)
    values = ((name, own.get(name, _ABSENT)) for name in _read(kind, own, method) if name not in _OF_EVERY_MODULE)
    return tuple((name, value) for name, value in values if value is _ABSENT or _is_setting(value))


def changed(module: nn.Module, settings: Settings) -> str | None:
    """What of a module has been set otherwise since, as a reason; None: nothing."""
    own = module.__dict__
    for name, value in settings:
        now = own.get(name, _ABSENT)
        if now is not value and (type(now) is not type(value) or now != value):
            return f"its {name} has been changed"
    return None


def _read(kind: type[nn.Module], own: dict[str, Any], method: str) -> list[str]:
    """Names in the code of a method that are those of the instance or of its class, and in the code of those."""
    found = [method]
    for name in found:
        for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for read in _names(vars(cls).get(name)):
                if read not in found and (read in own or hasattr(kind, read)):
                    found.append(read)
    return found


def _names(method: Any) -> Iterator[str]:
    """The names in the code of a method, or of a property's, and in the code inside it."""
    function: Any = method.fget if isinstance(method, property) else method
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    for code in codes:
        if isinstance(code, types.CodeType):
            yield from code.co_names
            codes += code.co_consts


def _is_setting(value: Any) -> bool:
    # Of these functions a copy of a model has the same ones. Shapes are those of the parameters.
    functions = types.FunctionType | types.BuiltinFunctionType | type
    return isinstance(value, int | float | str | torch.dtype | None | functions)
