"""Looks through what a forward is wrapped in: decorators that rename deprecated keywords, fill in arguments from a
configuration, or move weights before the forward runs.

A wrapper is looked through if it leaves a stand-in's calls as they are: the stand-in is called once for a call, gets
every argument under its own name and as the same object, in the gradient mode of the caller, its result comes back as
the same object, and nothing is different afterwards. A forward that is rewritten gets the same wrappers again, by the
same code with the same values: an old name of an argument goes on working.

A wrapper that a base class puts around the forward of each subclass (`GradientCheckpointingLayer`) is not put around
ours a second time: the class of ours is a subclass, too.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ... import device

__all__ = ["Wrapped", "looked_through"]


@dataclass(frozen=True)
class Wrapped:
    """A forward, and what it is wrapped in.

    Attributes:
        function: the forward itself.
        wrappers: the functions around it with the one inside of each, the outermost first.
    """

    function: Any
    wrappers: tuple[tuple[types.FunctionType, Any], ...]

    def around(self, new: types.FunctionType) -> types.FunctionType:
        """Returns another function in the same wrappers."""
        for wrapper, inner in reversed(self.wrappers):
            new = _around(wrapper, inner, new)
        return new


def looked_through(cls: Any) -> Wrapped | str:
    """Returns a class's own forward with its wrappers, or why one of them is not looked through."""
    return _looked_through(cls, cls.forward)


@functools.cache
def _looked_through(cls: Any, function: Any) -> Wrapped | str:
    wrappers = []
    while (inner := _inner(cls, function)) is not None:
        if not _made_by_base(cls, function):
            if (reason := _why_not(cls, function, inner)) is not None:
                return f"its forward is decorated by {_name(function)}, which {reason}"
            wrappers.append((function, inner))
        function = inner
    return Wrapped(function, tuple(wrappers))


def _inner(cls: Any, function: Any) -> Any:
    """Returns the function inside of a wrapper; None for a function that is no wrapper."""
    if (inner := getattr(function, "__dict__", {}).get("__wrapped__")) is not None:
        return inner
    # A decorator need not name what it wraps. One that changes arguments then looks like a forward with a helper.
    held = [each for each in map(_held, getattr(function, "__closure__", None) or ()) if inspect.isfunction(each)]
    return held[0] if len(held) == 1 and _why_not(cls, function, held[0]) is None else None


def _held(cell: types.CellType) -> Any:
    """Returns the value of a variable that a function closes over, None where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _name(wrapper: Any) -> str:
    """Returns the name of a decorator that has made a function."""
    code = getattr(wrapper, "__code__", None)
    return type(wrapper).__name__ if code is None else str(code.co_qualname.partition(".<locals>")[0])


def _made_by_base(cls: Any, wrapper: Any) -> bool:
    """Whether a base of a class makes this wrapper for each subclass."""
    makers = (vars(base).get("__init_subclass__") for base in cls.__mro__)
    made = (code for maker in makers if isinstance(maker, classmethod) for code in maker.__func__.__code__.co_consts)
    return inspect.isfunction(wrapper) and any(code is wrapper.__code__ for code in made)


def _around(wrapper: types.FunctionType, inner: Any, new: Any) -> types.FunctionType:
    """Returns a wrapper's code around another function than `inner`. Whatever else it closes over is shared."""
    itself = types.CellType()
    others = {id(inner): types.CellType(new), id(wrapper): itself}
    cells = tuple(others.get(id(_held(cell)), cell) for cell in wrapper.__closure__ or ())
    made = types.FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, wrapper)
    made.__wrapped__ = new  # type: ignore[attr-defined]
    itself.cell_contents = made
    return made


# ---------------------------------------------------------------------------------------------------------------------
# What a wrapper does to a stand-in
# ---------------------------------------------------------------------------------------------------------------------

_ANOTHER = "npu_kernels_another"
# What code raises where it needs more than a stand-in has.
_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)


@dataclass
class _StandIn:
    """Takes the place of the function inside of a wrapper.

    Attributes:
        result: what its calls return.
        calls: the arguments of its calls, and the modes that they were made in.
    """

    result: Any = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs, _modes()))
        return self.result


def _modes() -> tuple[Any, ...]:
    autocast = [(kind, torch.is_autocast_enabled(kind)) for kind in ("cpu", device.accelerator())]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast


class _Bare(nn.Module):
    """A module of another class that was not initialised; each child that it lacks is a module without anything."""

    def __init_subclass__(cls) -> None:
        """Leaves out what the other class does for a subclass."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config = PretrainedConfig()
        self.training = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nn.Module()


@functools.cache
def _why_not(cls: Any, wrapper: Any, inner: Any) -> str | None:
    """Returns why a wrapper is not looked through, or None."""
    if not inspect.isfunction(wrapper) or sum(_held(cell) is inner for cell in wrapper.__closure__ or ()) != 1:
        return "does not hold it as a function holds a variable"
    stand_in = _StandIn()

    def instead(*args: Any, **kwargs: Any) -> Any:
        return stand_in(*args, **kwargs)

    functools.update_wrapper(instead, inner)
    tried = _around(wrapper, inner, instead)
    try:
        module: nn.Module = type(cls.__name__, (_Bare, cls), {})()
        before = _state(tried, module)
        with warnings.catch_warnings(action="ignore"):
            found = (_changed(tried, stand_in, module, *each) for each in _calls(inner))
            reason = next(filter(None, found), None)
    except _ERRORS as error:
        return f"raises {type(error).__name__} on a stand-in"
    return reason or (None if _state(tried, module) == before else "keeps a state")


def _calls(inner: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields arguments by name, and how many of them are given by position: once all that can be, and twice none, since
    what is kept from a call shows in the next."""
    parameters = list(inspect.signature(inner).parameters.values())[1:]
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    given: dict[str, Any] = {}
    for i, each in enumerate(named):
        given[each.name] = each.default if isinstance(each.default, bool) else torch.full((1, 2, 4), float(i))
    yield given, sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in named)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        given = {**given, _ANOTHER: torch.zeros(1)}
    yield given, 0
    yield given, 0


def _changed(
    wrapper: Callable[..., Any], stand_in: _StandIn, module: nn.Module, given: dict[str, Any], by_position: int
) -> str | None:
    """Returns what a wrapper changes in a call, or None."""
    names = list(given)
    stand_in.calls, stand_in.result = [], torch.zeros(1) if by_position else (torch.zeros(1), None)
    with torch.set_grad_enabled(bool(by_position)):
        outside = _modes()
        first, rest = names[:by_position], names[by_position:]
        out = wrapper(module, *(given[name] for name in first), **{name: given[name] for name in rest})
    if len(stand_in.calls) != 1:
        return f"calls it {len(stand_in.calls)} times"
    (me, *args), kwargs, inside = stand_in.calls[0]
    if me is not module or len(args) > len(names):
        return "gives it other arguments"
    arrived = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in given.items():
        if arrived.get(name) is not value:
            return f"{'changes' if name in arrived else 'keeps back'} {_said(name)}"
    if out is not stand_in.result:
        return "changes its result"
    return None if inside == outside else "changes the mode that it runs in"


def _said(name: str) -> str:
    return "other keywords" if name == _ANOTHER else f"its {name}"


def _state(wrapper: types.FunctionType, module: nn.Module) -> list[Any]:
    """Returns the identities of what a wrapper may keep a state in: the values that its code names, and those in
    them."""
    named = (wrapper.__globals__.get(name) for name in wrapper.__code__.co_names)
    held = [*map(_held, wrapper.__closure__ or ()), *named, *(wrapper.__defaults__ or ()), wrapper, module]
    return [(id(value), *map(id, _inside(value))) for value in (*held, *vars(module).values())]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return list(value)
    known = isinstance(value, types.ModuleType) or not hasattr(value, "__dict__")
    return [] if known else list(vars(value).values())
