"""What a module's own code reads beside tensors and children: epsilons, limits, factors, names, functions.

A form was proven with these as they were. They are found by the names in the code of the module's methods and of the
functions that it calls, so that one that changes nothing yet (a limit that is None, a method that nobody has set on the
instance, what `getattr` has a default for) is among them; so are attributes of its class, names of the files that the
code stands in, and attributes of what any of these hold, such as a configuration. Code of torch, of Python's own
library and of transformers' utilities is taken to stay as it is. They are compared at every call: whatever has been set
otherwise since leaves the call to the module's own code. What can be written to in place (tensors, lists) would cost
more to compare than it is worth: a module whose code reads such a thing is left alone, and so is one that no run on a
few rows can show, because it keeps something on the side or goes by shapes or by gradients.
"""

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..classes import original_class
from .source import beyond_one_run

__all__ = ["Settings", "changed", "settings_of", "unseen"]

Settings = tuple[tuple[Callable[..., Any] | None, str, tuple[str, ...], Any], ...]
"""Who has the first name (`get(name, default)`; None: the instance), the name, the names of attributes of what it
stands for, and the value."""

_ABSENT: Any = object()
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *dir(nn.Module)))
_IN_PLACE = torch.Tensor | list | dict | set
_FOREIGN = sys.stdlib_module_names | {"torch", "torch_npu", "numpy"}
# How many attributes of attributes are followed: `self.config.text.limit`.
_DEPTH = 3


def settings_of(module: nn.Module, method: str = "forward") -> Settings:
    """What a method of a module reads, and what it calls; the method's own name is among it where not every module has
    it."""
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    values = (each for each in _values(module, method) if each[0] is not None or each[1] not in module._buffers)
    return tuple(dict.fromkeys(each for each in values if each[-1] is _ABSENT or _is_setting(each[-1], shapes)))


def unseen(module: nn.Module, method: str = "forward", known: str | None = None) -> str | None:
    """Why what a method does may be another thing at another call, without a sign that `changed` would see, or None:
    it reads what can be written to in place (but for parameters, and the buffer that is `known`), or goes by more than
    the numbers it is given, or has an effect beside its result."""
    for get, name, rest, value in _values(module, method):
        of_buffer = get is None and not rest and name in module._buffers
        if (isinstance(value, _IN_PLACE) or of_buffer) and name != known:
            return f"its code reads {'.'.join((name, *rest))}, which can be written to in place"
    functions = _read(original_class(module), {**module._buffers, **vars(module)}, method)[1]
    return next(filter(None, map(beyond_one_run, functions)), None)


def changed(module: nn.Module, settings: Settings) -> str | None:
    """What of a module has been set otherwise since, as a reason; None: nothing."""
    own = module.__dict__.get
    for get, first, rest, value in settings:
        now = (get or own)(first, _ABSENT)
        for name in rest:
            now = getattr(now, name, _ABSENT)
        if now is not value and (type(now) is not type(value) or now != value):
            return f"its {'.'.join((first, *rest))} has been changed"
    return None


Value = tuple[Callable[..., Any] | None, str, tuple[str, ...], Any]


def _values(module: nn.Module, method: str) -> Iterator[Value]:
    kind, own = original_class(module), {**module._buffers, **vars(module)}
    of_class: Any = kind
    read, functions = _read(kind, own, method)
    said = dict.fromkeys(name for function in functions for name in _names(function))
    asked = dict.fromkeys(name for function in functions for name in _asked_for(function))
    for name in dict.fromkeys((*read, *asked)):
        if name not in _OF_EVERY_MODULE:
            yield from _within(None, name, own.get(name, _ABSENT), said, asked)
            if name not in own:
                yield from _within(_attribute_of(of_class), name, getattr(kind, name, _ABSENT), said, asked)
    for function in functions:
        space = function.__globals__
        for name in _globals(function):
            value = space.get(name, _ABSENT)
            entries = _entries(value, own, function) if isinstance(value, dict) else []
            if entries:
                yield from entries
            elif value is not _ABSENT:  # else it is one of Python's own
                yield from _within(space.get, name, value, said, asked)


def _within(
    get: Callable[..., Any] | None, first: str, value: Any, said: dict[str, None], asked: dict[str, None],
    rest: tuple[str, ...] = (),
) -> Iterator[Value]:  # fmt: skip
    """A value, and those that code reads of it."""
    yield get, first, rest, value
    if isinstance(value, types.ModuleType):
        held = [] if _is_foreign(value.__name__) else [each for each in said if each in vars(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, _FUNCTIONS)):
        # A configuration's dtype changes when it is saved; whether a module casts to it, its probes have seen.
        held = [each for each in said if each != "dtype" and (each in asked or hasattr(value, each))]
    else:
        held = []
    if len(rest) < _DEPTH:
        for each in held:
            yield from _within(get, first, getattr(value, each, _ABSENT), said, asked, (*rest, each))


def _entries(table: dict[Any, Any], own: dict[str, Any], function: types.FunctionType) -> list[Value]:
    """Those of a file's table (of activations, say) that a function reads by a word of its own or of the module;
    none where it goes by something else."""
    words = (*own.values(), *(each for code in _codes(function) for each in code.co_consts))
    return [
        (table.get, each, (), table[each])
        for each in dict.fromkeys(each for each in words if isinstance(each, str) and each in table)
    ]


def _read(kind: type[nn.Module], own: dict[str, Any], method: str) -> tuple[list[str], list[types.FunctionType]]:
    """Names in the code of a method that are those of the instance or of its class, and in the code of those, and of
    functions that these call; and the functions that have this code."""
    found, functions = [method], []  # type: tuple[list[str], list[types.FunctionType]]

    def add(function: types.FunctionType | None) -> None:
        if function is None or function in functions:
            return
        functions.append(function)
        for read in _names(function):
            if read not in found and (read in own or hasattr(kind, read)):
                found.append(read)
        for name in _globals(function):
            value = function.__globals__.get(name)
            inside = isinstance(value, types.ModuleType) and not _is_foreign(value.__name__)
            for each in map(vars(value).get, _names(function)) if inside else (value,):
                called = _function(each)
                if called is not None and not _is_foreign(called.__module__):
                    add(called)

    for name in found:
        for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            add(_function(vars(cls).get(name)))
    return found, functions


def _is_foreign(name: str | None) -> bool:
    name = name or ""
    return name.partition(".")[0] in _FOREIGN or name.startswith("transformers.utils")


@functools.cache
def _attribute_of(kind: Any) -> Callable[..., Any]:
    """`get(name, default)` of a class."""
    return functools.partial(getattr, kind)


def _function(method: Any) -> types.FunctionType | None:
    """The function of a method, or of a property's, below what decorates it."""
    found: Any = method.fget if isinstance(method, property) else method
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, types.FunctionType) else None


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """The code of a function, and the code inside it."""
    codes: list[Any] = [function.__code__]
    for code in codes:
        if isinstance(code, types.CodeType):
            yield code
            codes += code.co_consts


@functools.cache
def _names(function: types.FunctionType) -> tuple[str, ...]:
    """The names in the code of a function; those that it hands to `getattr` are names, too."""
    found = (name for code in _codes(function) for name in code.co_names)
    return tuple(dict.fromkeys((*found, *_asked_for(function))))


@functools.cache
def _asked_for(function: types.FunctionType) -> tuple[str, ...]:
    """What may be a name of an attribute that need not be there."""
    asking = [code for code in _codes(function) if {"getattr", "hasattr"} & set(code.co_names)]
    found = (text for code in asking for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    return tuple(dict.fromkeys(found))


@functools.cache
def _globals(function: types.FunctionType) -> tuple[str, ...]:
    """The names in a function that are its file's, or Python's own; none of code that is taken to stay as it is."""
    if _is_foreign(function.__module__):
        return ()
    found = (each for code in _codes(function) for each in dis.get_instructions(code))
    return tuple(dict.fromkeys(each.argval for each in found if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


# Of these a copy of a model has the same ones.
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | type


def _is_setting(value: Any, shapes: list[torch.Size]) -> bool:
    if isinstance(value, tuple):
        return value not in shapes and all(_is_setting(each, shapes) for each in value)
    return isinstance(value, int | float | str | torch.dtype | None | _FUNCTIONS)
