"""Finds what a module's code reads besides tensors and children: epsilons, limits, factors, names, functions.

A form was verified with these values, so every call compares them, and a module with a changed value runs its original
code. They are found by the names in the code of the module's methods and of the functions that it calls, so values
without effect so far are included (a limit that is None, a method that is not set on the instance, a name for which
`getattr` has a default). Included are also attributes of its class, names in the files of the code, variables that its
functions close over, defaults of their arguments, and attributes of any of these values, such as those of a
configuration. Code of torch, of Python's standard library and of transformers' utilities is assumed not to change.
Values that can be written to in place (tensors, lists) would cost more to compare than it is worth: a module whose code
reads such a value is left alone. So is a module that reads something else that is not compared (a context variable, the
environment, a clock), and one that a run on a few rows does not show, because it keeps state or depends on shapes or on
gradients.
"""

import dis
import enum
import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..classes import is_patched_class, original_class
from .source import beyond_one_run

__all__ = ["Settings", "changed", "functions_of", "replaced_functions", "settings_of", "unseen"]

Settings = tuple[tuple[Callable[..., Any] | None, str, tuple[str, ...], Any], ...]
"""For each value: the lookup of the first name (`get(name, default)`; None: on the instance), this name, the names of
the attributes below it, and the value."""

_ABSENT: Any = object()
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *dir(nn.Module)))
_IN_PLACE = torch.Tensor | list | dict | set
_FOREIGN = sys.stdlib_module_names | {"torch", "torch_npu", "numpy"}
# How many levels of attributes are followed: `self.config.text.limit`.
_DEPTH = 3


def settings_of(module: nn.Module, method: str = "forward") -> Settings:
    """Returns the values that a method reads, and the functions that it calls; the method itself is among them unless
    every module has one of that name."""
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    values = (each for each in _values(module, method) if each[0] is not None or each[1] not in module._buffers)
    return tuple(dict.fromkeys(each for each in values if each[-1] is _ABSENT or _is_setting(each[-1], shapes)))


def unseen(module: nn.Module, method: str = "forward", known: str | None = None) -> str | None:
    """Returns why a method may do something else at another call without a change that `changed` would see, or None: it
    reads a value that can be written to in place (except parameters, and the buffer `known`), depends on more than its
    input's numbers, or has a side effect."""
    for get, name, rest, value in _values(module, method):
        of_buffer = get is None and not rest and name in module._buffers
        if (isinstance(value, _IN_PLACE) or of_buffer) and name != known:
            return f"its code reads {'.'.join((name, *rest))}, which can be written to in place"
        if isinstance(value, types.MethodType | functools.partial) and not _is_foreign(_home_of(value)):
            return f"its code reads {'.'.join((name, *rest))}, a {type(value).__name__}, which is not compared"
    functions = functions_of(module, method)
    said = {name for function in functions for name in _names(function)}
    for function in functions:
        if _is_foreign(function.__module__):
            continue
        imported = next((i.argval for i in dis.get_instructions(function) if i.opname == "IMPORT_NAME"), None)
        if imported is not None:
            return f"its code imports {imported} when it is called"
        for _, name, value in _outer(function):
            if (reason := _beyond_comparison(value, name, said)) is not None:
                return reason
    return next(filter(None, map(beyond_one_run, functions)), None)


def functions_of(module: nn.Module, method: str = "forward") -> list[types.FunctionType]:
    """Returns the functions by whose code a method was recognised: its own, and those that it calls."""
    return _read(original_class(module), {**module._buffers, **vars(module)}, method)[1]


def replaced_functions(module: nn.Module) -> list[types.FunctionType]:
    """Returns the functions in whose place ops may compute: those of the patched modules inside of a module, and of
    their children. Code that is assumed not to change is not among them."""
    parts = (part for each in module.modules() if is_patched_class(type(each)) for part in each.modules())
    found = (function for part in dict.fromkeys(parts) for function in functions_of(part))
    return [function for function in dict.fromkeys(found) if not _is_foreign(function.__module__)]


def changed(module: nn.Module, settings: Settings) -> str | None:
    """Returns which value of a module has changed, as a reason, or None."""
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
        for get, name, value in _outer(function):
            entries = _entries(value, own, function) if isinstance(value, dict) else []
            if entries:
                yield from entries
            else:
                yield from _within(get, name, value, said, asked)


def _within(
    get: Callable[..., Any] | None, first: str, value: Any, said: dict[str, None], asked: dict[str, None],
    rest: tuple[str, ...] = (),
) -> Iterator[Value]:  # fmt: skip
    """Yields a value, and the attributes of it that code reads."""
    yield get, first, rest, value
    if isinstance(value, types.ModuleType):
        held = [] if _is_foreign(value.__name__) else [each for each in said if each in vars(value)]
    elif isinstance(value, type) and not _is_foreign(value.__module__):
        held = [each for each in said if not each.startswith("__") and hasattr(value, each)]
    elif get is None and isinstance(value, types.FunctionType) and not _is_foreign(value.__module__):
        held = [each for each in said if each in asked or each in vars(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, _FUNCTIONS)):
        # A configuration's dtype changes when it is saved; the probes show whether a module casts to it.
        held = [each for each in said if each != "dtype" and (each in asked or hasattr(value, each))]
    else:
        held = []
    if len(rest) < _DEPTH:
        for each in held:
            yield from _within(get, first, getattr(value, each, _ABSENT), said, asked, (*rest, each))


def _entries(table: dict[Any, Any], own: dict[str, Any], function: types.FunctionType) -> list[Value]:
    """Returns the entries of a global dictionary (of activations, say) that a function reads by a string of its own or
    of the module; none where the keys are something else."""
    words = (*own.values(), *(each for code in _codes(function) for each in code.co_consts))
    return [
        (table.get, each, (), table[each])
        for each in dict.fromkeys(each for each in words if isinstance(each, str) and each in table)
    ]


def _read(kind: type[nn.Module], own: dict[str, Any], method: str) -> tuple[list[str], list[types.FunctionType]]:
    """Returns the names of the instance or its class in the code of a method, of the methods that these names stand
    for, and of the functions that they call; and the functions that have this code."""
    found, functions = [method], []  # type: tuple[list[str], list[types.FunctionType]]

    def add(function: types.FunctionType | None) -> None:
        if function is None or function in functions:
            return
        functions.append(function)
        for read in _names(function):
            if read not in found and (read in own or hasattr(kind, read)):
                found.append(read)
        for _, _, value in _outer(function):
            inside: Any = (value,)
            if isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
                inside = map(vars(value).get, _names(function))
            elif isinstance(value, type) and not _is_foreign(value.__module__):
                inside = (inspect.getattr_static(value, each, None) for each in _names(function))
            elif _has_attributes(value):
                inside = (getattr(type(value), each, None) for each in (*_names(function), "__call__"))
            for each in inside:
                called = _function(each)
                if called is not None and not _is_foreign(called.__module__):
                    add(called)

    for name in found:
        for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            own_method = vars(cls).get(name)
            add(_function(own_method))
            for wrapper in _wrappers(own_method):
                add(wrapper)
        held = own.get(name)
        if _has_attributes(held):  # an object that is called
            held = inspect.getattr_static(type(held), "__call__", None)
        if isinstance(held, types.FunctionType) and not _is_foreign(held.__module__):
            add(_function(held))
            for wrapper in _wrappers(held):
                add(wrapper)
    return found, functions


def _wrappers(method: Any) -> Iterator[types.FunctionType]:
    """Yields the functions of decorators around a method that are no code which is assumed not to change."""
    while hasattr(method, "__wrapped__"):
        if isinstance(method, types.FunctionType) and not _is_foreign(method.__globals__.get("__name__")):
            yield method
        method = method.__wrapped__


def _outer(function: types.FunctionType) -> Iterator[tuple[Callable[..., Any], str, Any]]:
    """Yields the globals that a function names, the variables that it closes over, and the defaults of its arguments:
    the lookup, the name, and the value. A name that is no global is a builtin."""
    space = function.__globals__
    yield from ((space.get, name, space[name]) for name in _globals(function) if name in space)
    if not _is_foreign(function.__module__):
        held = _held_by(function)
        for name in (*function.__code__.co_freevars, *_defaults(function)):
            value = held(name, _ABSENT)
            if value is not _ABSENT and name != "__class__":
                yield held, name, value


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


@functools.cache
def _held_by(function: types.FunctionType) -> Callable[..., Any]:
    """Returns `get(name, default)` of the variables that a function closes over, and of its arguments' defaults."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(name: str, default: Any) -> Any:
        if name not in cells:
            return _defaults(function).get(name, default)
        try:
            return cells[name].cell_contents
        except ValueError:  # it was deleted
            return default

    return get


def _has_attributes(value: Any) -> bool:
    """Whether a value is an object of a class of somebody else's."""
    if isinstance(value, (nn.Module, torch.Tensor, types.ModuleType, types.MethodType, functools.partial, *_PLAIN)):
        return False
    return hasattr(value, "__dict__") and not _is_foreign(type(value).__module__)


_COMPARED = (
    nn.Module, torch.Tensor, types.MethodType, functools.partial, enum.Enum, logging.Logger, complex, bytes,
    torch.device, torch.Size, tuple, frozenset, property, staticmethod, classmethod, functools.cached_property,
    types.SimpleNamespace, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
"""Types beside `_PLAIN` whose values are compared by identity, or are in-place values that are left alone."""
_PURE = frozenset((
    "math", "cmath", "functools", "itertools", "operator", "typing", "collections", "warnings", "copy", "inspect",
    "dataclasses", "enum", "abc", "re", "types", "contextlib", "numbers", "logging", "torch", "torch_npu", "numpy",
))  # fmt: skip
_SWITCHES = frozenset((
    "backends", "are_deterministic_algorithms_enabled", "get_default_dtype", "get_float32_matmul_precision",
    "get_num_threads", "get_default_device",
))  # fmt: skip


def _beyond_comparison(value: Any, path: str, said: set[str]) -> str | None:
    """Returns that a value is not compared, as a reason, or None."""
    if isinstance(value, types.ModuleType):
        first = value.__name__.partition(".")[0]
        if first in sys.stdlib_module_names and first not in _PURE:
            return f"its code uses {path}"
        if first == "torch" and (switch := next(iter(sorted(_SWITCHES & said)), None)) is not None:
            return f"its code goes by torch's {switch}"
        return "its code uses numpy.random" if first == "numpy" and "random" in said else None
    if value is _ABSENT or isinstance(value, (*_PLAIN, *_COMPARED)) or _has_attributes(value):
        return None
    if type(value).__module__ in ("typing", "types", "transformers.utils.logging") or isinstance(value, _IN_PLACE):
        return None
    return f"its code reads {path}, a {type(value).__name__}, which is not compared"


def _home_of(value: Any) -> str | None:
    """Returns the module of the function of a method or a partial."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None)


def _is_foreign(name: str | None) -> bool:
    name = name or ""
    return name.partition(".")[0] in _FOREIGN or name.startswith("transformers.utils")


@functools.cache
def _attribute_of(kind: Any) -> Callable[..., Any]:
    """Returns `get(name, default)` of a class."""
    return functools.partial(getattr, kind)


def _function(method: Any) -> types.FunctionType | None:
    """Returns the function of a method or a property without its decorators, or None."""
    found: Any = method.fget if isinstance(method, property) else method
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, types.FunctionType) else None


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and the code inside it."""
    codes: list[Any] = [function.__code__]
    for code in codes:
        if isinstance(code, types.CodeType):
            yield code
            codes += code.co_consts


@functools.cache
def _names(function: types.FunctionType) -> tuple[str, ...]:
    """Returns the names in the code of a function, including those that it passes to `getattr`."""
    found = (name for code in _codes(function) for name in code.co_names)
    return tuple(dict.fromkeys((*found, *_asked_for(function))))


@functools.cache
def _asked_for(function: types.FunctionType) -> tuple[str, ...]:
    """Returns the strings in a function that may name attributes that need not exist."""
    asking = [code for code in _codes(function) if {"getattr", "hasattr"} & set(code.co_names)]
    found = (text for code in asking for text in code.co_consts if isinstance(text, str) and text.isidentifier())
    return tuple(dict.fromkeys(found))


@functools.cache
def _globals(function: types.FunctionType) -> tuple[str, ...]:
    """Returns the names in a function that are globals or builtins; none for code that is assumed not to change."""
    if _is_foreign(function.__module__):
        return ()
    found = (each for code in _codes(function) for each in dis.get_instructions(code))
    return tuple(dict.fromkeys(each.argval for each in found if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


# A copy of a model shares these with it.
_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType | type
_PLAIN = (int, float, str, torch.dtype, type(None), types.FunctionType, types.BuiltinFunctionType, type)


def _is_setting(value: Any, shapes: list[torch.Size]) -> bool:
    if isinstance(value, tuple):
        return value not in shapes and all(_is_setting(each, shapes) for each in value)
    return isinstance(value, int | float | str | torch.dtype | None | _FUNCTIONS)
