"""Which Python code a function runs, and by what it could decide otherwise at another call.

A graph repeats what a device did, and none of the Python code that asked for it. So whoever replays a graph must know
what that code reads. `Reads` sees each function that is called while a function is looked at (as a profiler does), and
each call of something that is written in C. A call that depends on more than objects that can be compared later (a
clock, a file, a generator of random numbers, an iterator) is refused by name. What the code reads is followed in
`watched`.

Code of PyTorch, NumPy, Triton, DeepSpeed, Python's standard library, transformers' utilities and this package is
assumed not to change.
"""

from __future__ import annotations

import builtins
import contextvars
import dis
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Reads", "is_foreign", "why_unseen"]

_FOREIGN = frozenset(("torch", "torch_npu", "numpy", "triton", "deepspeed", "npu_trainer_kernels"))


def is_foreign(name: Any) -> bool:
    """Whether code of a Python module (by its name) is assumed not to change."""
    if not isinstance(name, str):  # of a function that Cython has made, say
        return name is not None
    first = name.partition(".")[0]
    return first in _FOREIGN or first in sys.stdlib_module_names or name.startswith("transformers.utils")


def _is_of_python(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names


def why_unseen() -> str | None:
    """Returns why the code that runs on this thread cannot be seen at present, or None."""
    profiler = sys.getprofile()
    if profiler is None:
        return None
    name = getattr(profiler, "__qualname__", type(profiler).__qualname__)
    return f"a profiler watches this thread, so that Python code cannot be seen ({name})"


_PURE = frozenset((
    "builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools", "functools", "_collections",
    "collections", "_collections_abc", "_abc", "abc", "_struct", "_bisect", "_heapq", "_sre", "re", "_warnings",
    "_weakref", "_typing", "typing", "types", "_string", "binascii", "_json", "_statistics", "_decimal", "decimal",
    "fractions", "array", "_contextvars", "enum", "sys", "_imp", "marshal", "_codecs",
))  # fmt: skip
"""Modules of Python's standard library, written in C, whose functions depend on their arguments alone."""

_IMPURE = frozenset(("open", "print", "input", "globals", "next", "_getframe", "_current_frames", "setprofile"))
_READS_ANY = frozenset(("getattr", "hasattr", "vars", "attrgetter", "__dict__", "__getattribute__", "dir"))
_CONTAINERS = (list, dict, set, deque, OrderedDict, bytearray)
_IN_PLACE = frozenset((
    "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear", "sort",
    "reverse", "rotate", "update", "setdefault", "add", "discard", "move_to_end", "difference_update",
    "intersection_update", "symmetric_difference_update", "__setitem__", "__delitem__",
))  # fmt: skip


_OF_INTEREST = (torch.Generator, random.Random, types.ModuleType)
"""Of what has other code than the layer's own called a function written in C, if that matters."""
_COMPILED = "_TorchDynamoContext.__call__."
"""The qualified name of each function that `torch.compile` puts around another one begins so."""


class Reads:
    """Sees the Python code that runs inside of the `with` block on this thread.

    Args:
        paused: whether code that runs now does not count, asked at each call.

    Attributes:
        codes: the code objects that ran by their `id`, each with the globals that it reads.
        variables: the context variables that the code asked for their value.
        flags: the functions of PyTorch that the code asked for a setting.
        environment: the names of environment variables that it read.
        changed: the containers that it changed in place, by `id`.
        reason: why it may do something else when it runs again, although nothing that can be compared has changed.
    """

    def __init__(self, paused: Callable[[], bool] = lambda: False) -> None:
        self.codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self.variables: list[contextvars.ContextVar[Any]] = []
        self.environment: set[str] = set()
        self.flags: list[Callable[[], Any]] = []
        self.changed: dict[int, Any] = {}
        self.reason: str | None = None
        self._foreign: dict[int, types.CodeType] = {}
        self._seen: set[int] = set()  # the ids of code whose next call shows nothing new
        self._paused = paused

    def __enter__(self) -> Reads:
        self.reason = why_unseen()
        if self.reason is None:
            sys.setprofile(self._see)
        return self

    def __exit__(self, *error: Any) -> None:
        if sys.getprofile() == self._see:
            sys.setprofile(None)

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All names in the code that ran: globals, attributes, and strings that may name attributes."""
        return frozenset(name for code, _ in self.codes.values() for name in _names(code))

    @functools.cached_property
    def any_name(self) -> bool:
        """Whether the code may read attributes whose names are computed."""
        return not _READS_ANY.isdisjoint(self.names)

    def runs(self, code: types.CodeType) -> bool:
        """Whether code has run."""
        return id(code) in self.codes or id(code) in self._foreign

    def is_made_inside(self, code: types.CodeType) -> bool:
        """Whether code is that of a function which code that ran makes."""
        return any(code is each for other, _ in self.codes.values() for each in other.co_consts)

    def adds(self, function: types.FunctionType) -> None:
        """Adds code that did not run because its result was known, as under `functools.cache`."""
        if id(function.__code__) not in self.codes:
            self._adds(function.__code__, function.__globals__)

    def _adds(self, code: types.CodeType, space: dict[str, Any]) -> None:
        self.codes[id(code)] = code, space
        self.__dict__.pop("names", None)
        self.__dict__.pop("any_name", None)
        # A function that is made inside of what runs shares variables of the call alone.
        if not self.is_made_inside(code) and (stored := _stored(code)) is not None:
            self._refuse(f"its code ({code.co_name}) sets {stored}, which is no variable of its own")

    # It is called some ten thousand times for a layer, most of them for code that does not count.
    def _see(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in self._seen and not self._paused():
                self._enters(frame)
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            if id(frame.f_code) in self.codes:
                if not self._paused():
                    self._calls(called, owner)
            elif isinstance(owner, _OF_INTEREST) and owner is not builtins and not self._paused():
                self._foreign_calls(frame, called, owner)

    def _enters(self, frame: types.FrameType) -> None:
        """Looks at a call of a function that was not called yet, or whose arguments count."""
        code, space = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == "__getitem__" and space == "os":
            if self._is_asked_for(frame.f_back):
                self.environment.add(frame.f_locals["key"])
            return
        self._seen.add(id(code))
        if not is_foreign(space):
            self._adds(code, frame.f_globals)
            return
        self._foreign[id(code)] = code
        if code.co_qualname.startswith(_COMPILED):
            function = frame.f_locals.get("fn")
            of = getattr(function, "__self__", function)  # the module, of a method
            name = getattr(of, "__qualname__", type(of).__name__)
            self._refuse(f"its code calls a function that is compiled, whose code cannot be seen ({name})")

    def _foreign_calls(self, frame: types.FrameType, called: Any, owner: Any) -> None:
        """Looks at a call, by code that is assumed not to change, of something written in C."""
        if isinstance(owner, torch.Generator):
            self._refuse(f"its code calls {called.__name__} of a generator of random numbers")
        elif isinstance(owner, random.Random):
            if self._is_asked_for(frame):
                self._refuse("its code draws random numbers on the host")
        elif called is open:
            # The source that a warning quotes is opened by `tokenize`.
            if self._is_asked_for(frame) and frame.f_globals.get("__name__") != "tokenize":
                self._refuse("its code opens a file")
        elif frame.f_back is not None and id(frame.f_back.f_code) in self.codes and _is_flag(called, owner):
            self.flags.append(called)

    def _is_asked_for(self, frame: types.FrameType | None) -> bool:
        """Whether the code that called the standard library is looked at."""
        while frame is not None and _is_of_python(frame) and id(frame.f_code) not in self.codes:
            frame = frame.f_back
        return frame is not None and id(frame.f_code) in self.codes

    def _calls(self, called: Any, owner: Any) -> None:
        """Looks at a call, by code that counts, of something written in C."""
        name = called.__name__
        if isinstance(owner, torch.Generator):
            self._refuse(f"its code calls {name} of a generator of random numbers")
            return
        if _is_flag(called, owner):
            self.flags.append(called)
            return
        if isinstance(owner, contextvars.ContextVar):
            if name == "get":
                self.variables.append(owner)
            else:
                self._refuse(f"its code sets the context variable {owner.name}")
            return
        if isinstance(owner, _CONTAINERS):
            if name in _IN_PLACE:
                self.changed[id(owner)] = owner
            return
        if isinstance(owner, type | types.ModuleType):
            home = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
        else:
            home = type(owner).__module__ if owner is not None else called.__module__
        home = home if isinstance(home, str) else "builtins"
        impure = home.partition(".")[0] in sys.stdlib_module_names and home not in _PURE
        if impure or (home in _PURE and name in _IMPURE) or name == "__next__":
            self._refuse(f"its code calls {home}.{name}, whose result a replay would not see")


def _is_flag(called: Any, owner: Any) -> bool:
    """Whether a function returns a setting of PyTorch."""
    ours = isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch")
    return ours and called.__name__.lstrip("_").startswith(("get_", "is_", "are_"))


def _once(of: Callable[[types.CodeType], Any]) -> Callable[[types.CodeType], Any]:
    """Keeps the results of a function of code, by identity: the hash of code takes its length."""
    known: dict[int, tuple[types.CodeType, Any]] = {}

    def asked(code: types.CodeType) -> Any:
        if id(code) not in known:
            known[id(code)] = code, of(code)
        return known[id(code)][1]

    return asked


@_once
def _names(code: types.CodeType) -> set[str]:
    """Returns the names that code says, and the strings that it may use as names of attributes or keys."""
    return {*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())}


@_once
def _stored(code: types.CodeType) -> str | None:
    """Returns a name outside of a function that the function sets, or None."""
    for each in dis.get_instructions(code):
        outside = each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        if outside or (each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in code.co_freevars):
            return str(each.argval)
    return None
