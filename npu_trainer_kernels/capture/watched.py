"""The values by which Python code decides, as they were at a capture, and whether they are still the same.

`Watched` follows what code reads (`reads`): the globals of the code that ran, the variables that its functions close
over, defaults of arguments, and from there each attribute that the code names, of modules, classes and other objects;
entries of dicts, lists, tuples and sets. It keeps flat tuples of (object, key, value), so that a comparison is a few
loops in C. What cannot be compared is declined by name.
"""

from __future__ import annotations

import argparse
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import gc
import logging
import operator
import os
import pathlib
import re
import sys
import types
import uuid
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .reads import Reads, is_foreign

__all__ = ["SIMPLE", "Watched", "torch_settings"]

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONSTANT = (
    *SIMPLE, enum.Enum, range, slice, type(Ellipsis), type(NotImplemented), re.Pattern, np.generic, np.dtype, np.ufunc,
    type(np.all),
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, types.CodeType,
    types.GenericAlias, types.UnionType, logging.Logger, logging.LoggerAdapter, contextvars.ContextVar,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath, uuid.UUID,
    type(os.environ),
)  # fmt: skip
_OPERATORS = types.BuiltinFunctionType | types.BuiltinMethodType | torch.dtype
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MAPPINGS = (dict, UserDict, types.MappingProxyType)
_SEQUENCES = (list, tuple, deque, UserList)
_MOST_ENTRIES = 4096
"""Larger containers are declined: to compare them at each replay takes longer than the code that a replay saves."""
_LARGEST_ARRAY = 4096
_CACHED: Any = type(functools.cache(len))
_ABSENT: Any = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_READ = frozenset((*vars(nn.Module()), "_is_hf_initialized")) - {"training"}
"""Attributes of every module: hooks are compared by `_HOOKS`, children by `_modules`, and tensors by others, with their
addresses."""


def torch_settings() -> tuple[Any, ...]:
    """Returns the settings of PyTorch that operators depend on, and how many modes see operators on this thread."""
    return (
        torch.get_default_dtype(), torch._C._get_deterministic_algorithms(), torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )  # fmt: skip


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, or simple values that no code can tell apart."""
    return one is other or (type(one) is type(other) and isinstance(one, SIMPLE) and repr(one) == repr(other))


class _Looked:
    """Lookups of one kind, `get(owner, key)`, with what they gave."""

    def __init__(self, get: Callable[[Any, Any], Any]) -> None:
        self.get = get
        self.owners: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.paths: list[str] = []
        self._known: set[tuple[int, Any]] = set()

    def add(self, owner: Any, key: Any, path: str) -> Any:
        value = self.get(owner, key)
        place = id(owner), key if isinstance(key, SIMPLE) else id(key)
        if place not in self._known:
            self._known.add(place)
            self.owners.append(owner)
            self.keys.append(key)
            self.values.append(value)
            self.paths.append(path)
        return value

    def same(self) -> bool:
        return all(map(operator.is_, map(self.get, self.owners, self.keys), self.values))

    def differs(self) -> str | None:
        """Returns the first value that has changed, or None. Equal numbers are taken for the same from then on."""
        for i, (owner, key, value) in enumerate(zip(self.owners, self.keys, self.values, strict=True)):
            try:
                now = self.get(owner, key)
            except (LookupError, AttributeError, ValueError):
                return self.paths[i]
            if not _is_equal(now, value):
                return self.paths[i]
            self.values[i] = now
        return None


class Watched:
    """Values as they were when they were read.

    Args:
        modules: the modules whose code ran. All of their attributes are compared, and those of their configurations.
        reads: the code that ran; None: only the modules are compared.
        ignored: returns the names of a module's attributes that do not count.
        settings: `torch_settings()` at the capture; None: as they are now.

    Attributes:
        reason: why the code may decide otherwise without a change that `holds` sees, or None.
        tensors: the tensors that were reached, by path; parameters and buffers of modules are not among them.
        differs: the value that the last comparison has found changed.
    """

    def __init__(
        self, modules: Iterable[nn.Module], reads: Reads | None = None,
        ignored: Callable[[nn.Module], Iterable[str]] = lambda _: (), settings: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        self._modules, self._reads, self._ignored = list(modules), reads, ignored
        self._settings = torch_settings() if settings is None else settings
        self.differs = ""
        ran = -1
        # Code that did not run, since its results are kept by a cache, may read more.
        while ran != (0 if reads is None else len(reads.codes)):
            ran = 0 if reads is None else len(reads.codes)
            self._begin()
            self._follow_roots()
            while self._open:
                self._follow(*self._open.pop())
        self._hooked = list(map(len, map(operator.getitem, *self._hooks)))

    def _begin(self) -> None:
        reads = self._reads
        self._items, self._attributes = _Looked(operator.getitem), _Looked(getattr)
        # Of classes that have a `__getitem__` of their own, which may make what it returns.
        self._entries, self._places = _Looked(dict.__getitem__), _Looked(list.__getitem__)
        self._looked = [self._items, self._attributes, self._entries, self._places]
        self._objects: list[Any] = []
        self._kinds: list[Any] = []
        self._hooks: tuple[list[Any], list[str]] = [], []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self._spaces: list[tuple[str, frozenset[str] | None]] = []  # the names that a `__dict__` did not have
        self._contents: list[tuple[str, Callable[[], Any], Any]] = []
        self._seen: dict[int, Any] = {}
        self._classes: set[int] = set()
        self._found: set[int] = set()  # code of functions that objects lead to
        self._open: list[tuple[Any, str, bool]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.reason = None if reads is None else reads.reason
        self._names = frozenset() if reads is None else reads.names
        self._any = reads is not None and reads.any_name

    def has_entries(self, space: dict[str, Any]) -> None:
        """Compares all entries of a dict, too, but does not follow them."""
        self._size(space, None, "the parameters or buffers of a module")
        for name in space:
            self._items.add(space, name, name)

    def compares(self, path: str, content: Callable[[], Any]) -> None:
        """Compares what a function returns, too."""
        self._contents.append((path, content, content()))

    # -- comparison --------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether no value has changed since."""
        try:
            if (
                all(each.same() for each in self._looked) and list(map(len, self._sized)) == self._lengths
                and list(map(type, self._objects)) == self._kinds
                and list(map(len, map(operator.getitem, *self._hooks))) == self._hooked
                and self._settings == torch_settings() and self._changed_content() is None
            ):  # fmt: skip
                return True
        except (LookupError, AttributeError, ValueError):  # a name or a variable is gone
            pass
        self.differs = self._first_change() or ""
        return not self.differs

    def _first_change(self) -> str | None:
        if self._settings != torch_settings():
            return "a setting of PyTorch"
        found = self._changed_content() or next(filter(None, (each.differs() for each in self._looked)), None)
        if found is not None:
            return found
        if list(map(type, self._objects)) != self._kinds:
            return "the class of an object"
        if list(map(len, map(operator.getitem, *self._hooks))) != self._hooked:
            return "the hooks of a module"
        for i, (each, length, (path, absent)) in enumerate(zip(self._sized, self._lengths, self._spaces, strict=True)):
            if len(each) != length:
                if absent is None or not absent.isdisjoint(each):
                    return path
                self._lengths[i] = len(each)  # of a name that nobody has read
        return None

    def _changed_content(self) -> str | None:
        for path, content, value in self._contents:
            if not _is_equal(now := content(), value) and not (type(now) is frozenset and now == value):
                return path
        return None

    def signature(self) -> int:
        """Returns a number. Two states of the same modules have the same number if nothing has changed between them.
        The number keeps no object alive."""
        looked = tuple(
            (path, key if isinstance(key, SIMPLE) else id(key), repr(v) if isinstance(v, SIMPLE) else id(v))
            for each in self._looked  # what `vars` returns of a class is a new object each time, so it has no number
            for path, key, v in zip(each.paths, each.keys, each.values, strict=True)
        )
        return hash((looked, tuple(map(id, self._kinds)), tuple(self._lengths), tuple(self._hooked), self._settings))

    def reaches(self, each: Any) -> bool:
        """Whether an object is one of those that are compared."""
        return self._seen.get(id(each)) is each

    # -- what code reads ---------------------------------------------------------------------------------------------

    def _follow_roots(self) -> None:
        configs: dict[int, Any] = {}
        for module in self._modules:
            self._root(module, self._ignored(module))
            config = vars(module).get("config")
            if hasattr(config, "__dict__") and not isinstance(config, _MAPPINGS):
                configs[id(config)] = config
        for config in configs.values():
            self._root(config, ())
        reads = self._reads
        if reads is None:
            return
        for code, space in list(reads.codes.values()):
            for name in code.co_names:
                imported = sys.modules.get(name)
                if name in space:
                    self._look(self._items, space, name, name)
                elif isinstance(imported, types.ModuleType):
                    self._open.append((imported, name, True))  # within a function
        for variable in reads.variables:
            get = functools.partial(variable.get, _ABSENT)
            self.compares(f"the context variable {variable.name}", get)
            self._open.append((get(), variable.name, True))
        for flag in reads.flags:
            try:
                self.compares(f"torch's {flag.__name__}()", flag)
            except TypeError:  # it takes an argument, such as the tensor that it is asked about
                continue
        for name in reads.environment:
            self.compares(f"the environment variable {name}", functools.partial(os.environ.get, name))
        while self._open:
            self._follow(*self._open.pop())
        self._follow_unknown(reads)

    def _follow_unknown(self, reads: Reads) -> None:
        """Follows functions that ran and that no object leads to, for what they close over. A method that closes over
        its class alone has nothing to follow; finding a function by its code takes a walk over all objects."""
        missing = [
            code for at, (code, _) in reads.codes.items()
            if at not in self._found and {*code.co_freevars} - {"__class__"} and not reads.is_made_inside(code)
        ]  # fmt: skip
        if missing:
            functions = [each for each in gc.get_referrers(*missing) if isinstance(each, types.FunctionType)]
            self._open += [(each, each.__qualname__, True) for each in functions if reads.runs(each.__code__)]

    def _root(self, each: Any, ignored: Iterable[str]) -> None:
        """Compares all attributes of an object."""
        own = each.__dict__
        self._seen[id(each)] = each
        without = {*_NOT_READ, *ignored} if isinstance(each, nn.Module) else {*ignored}
        kind = type(each).__name__
        self._typed(each)
        for name in own:
            if name not in without:
                self._look(self._items, own, name, f"{kind}.{name}", self._is_read(name, own[name]), followed=True)
        self._size(own, None, f"the attributes of a {kind}")
        if isinstance(each, nn.Module):
            self._of_hooks(each, kind, ignored)
            self._container(each._modules, kind, False)
        self._of_class(type(each), kind)

    def _of_hooks(self, module: nn.Module, path: str, ignored: Iterable[str] = ()) -> None:
        own = module.__dict__
        for name in _HOOKS:
            if name not in ignored:
                self._hooks[0].append(own)
                self._hooks[1].append(name)
                if own[name]:
                    self._container(own[name], f"{path}.{name}", False)

    def _is_read(self, name: str, value: Any) -> bool:
        """Whether code may read a value by its name. A computed name may be any, but few are those of locks."""
        if name in self._names:
            return True
        return self._any and hasattr(value, "__dict__") and not is_foreign(type(value).__module__)

    def _look(
        self, looked: _Looked, owner: Any, key: Any, path: str, said: bool = True, followed: bool = False
    ) -> None:
        value = looked.add(owner, key, path)
        if said or followed:
            self._open.append((value, path, said))

    def _typed(self, value: Any) -> None:
        self._objects.append(value)
        self._kinds.append(type(value))

    def _size(self, owner: Any, absent: frozenset[str] | None, path: str) -> None:
        self._sized.append(owner)
        self._lengths.append(len(owner))
        self._spaces.append((path, absent))

    def _decline(self, path: str, value: Any) -> None:
        self.reason = self.reason or f"its code reads {path}, a {type(value).__name__}, which cannot be compared"

    def _follow(self, value: Any, path: str, said: bool) -> None:
        """Compares what code may read of a value; `said`: whether the code names the value."""
        if isinstance(value, _CONSTANT) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors[path] = value
        elif isinstance(value, dict) and "__builtins__" in value:  # the globals of a Python module
            self._namespace(value, path, grows=True)
        elif isinstance(value, (*_MAPPINGS, *_SEQUENCES, set, frozenset)):
            self._container(value, path, said)
        elif isinstance(value, types.ModuleType):
            self._namespace(vars(value), path, grows=True)
        elif isinstance(value, type):
            self._of_class(value, path)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial | property | staticmethod
                        | classmethod | functools.cached_property | _CACHED):  # fmt: skip
            self._function(value, path)
        elif isinstance(value, nn.Module):
            if said:
                self._module(value, path)
        elif isinstance(value, weakref.ReferenceType):
            self.compares(path, value)
            self._open.append((value(), path, said))
        elif isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY and value.dtype != object:
            self.compares(path, value.tobytes)
        elif said:
            self._object(value, path)

    def _container(self, value: Any, path: str, said: bool) -> None:
        if len(value) > _MOST_ENTRIES:
            if said:
                self._decline(path, value)
            return
        if isinstance(value, set | frozenset):
            self.compares(path, functools.partial(frozenset, value))
            self._open += [(each, path, said) for each in value]
            return
        if isinstance(value, tuple):
            self._open += [(each, f"{path}[{i}]", said) for i, each in enumerate(value)]
            return
        self._size(value, None, path)
        if isinstance(value, UserDict | UserList):
            self._look(self._attributes, value, "data", path, said, followed=True)
            return
        keys = range(len(value)) if isinstance(value, list | deque) else list(value)
        own = type(value).__getitem__ not in (dict.__getitem__, list.__getitem__)
        raw = self._entries if isinstance(value, dict) else self._places if isinstance(value, list) else self._items
        looked = raw if own else self._items
        for key in keys:
            self._look(looked, value, key, f"{path}[{key!r}]", said, followed=True)
            if not isinstance(key, SIMPLE):
                self._open.append((key, path, said))
        if hasattr(value, "__dict__") and said:
            self._instance(value, path)

    def _namespace(self, space: Any, path: str, grows: bool = False) -> None:
        """Compares the entries of a `__dict__` that the code names."""
        if self._any and not grows:
            found = [name for name in space if not (name.startswith("__") and name.endswith("__"))]
        else:
            found = [name for name in self._names if name in space and not name.startswith("__")]
        for name in found:
            # Operators themselves are assumed not to change.
            if not (grows and isinstance(space[name], _OPERATORS)):
                self._look(self._items, space, name, f"{path}.{name}", self._is_read(name, space[name]), followed=True)
        if not grows:
            self._size(space, self._names.difference(space), path)

    def _module(self, module: nn.Module, path: str) -> None:
        """Follows a module that is none of `modules`: it is called by its own name, or reached in an object."""
        if isinstance(module, torch.jit.ScriptModule):  # its attributes are in C++
            self._decline(path, module)
            return
        self._typed(module)
        own = module.__dict__
        for name in own:
            if name not in _NOT_READ:
                self._look(self._items, own, name, f"{path}.{name}", name in self._names)
        self._size(own, None, path)
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                self._look(self._items, tensors, name, f"{path}.{name}")
        self._of_hooks(module, path)
        children = module._modules
        ours = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        for name in children:
            if ours or name in self._names:
                self._look(self._items, children, name, f"{path}.{name}")
        self._of_class(type(module), path)

    def _object(self, value: Any, path: str) -> None:
        """Follows an object of any other class."""
        kind = type(value)
        if kind is object or kind.__module__ == "typing":
            return
        if hasattr(kind, "__next__"):
            self._decline(path, value)
        elif is_foreign(kind.__module__) and not isinstance(value, _NAMESPACES):
            # PyTorch's own objects are assumed not to change; a queue, a lock, a file or a generator of numbers is not.
            if str(kind.__module__).partition(".")[0] in sys.stdlib_module_names | {"numpy"}:
                self._decline(path, value)
        else:
            self._instance(value, path)

    def _instance(self, value: Any, path: str) -> None:
        kind = type(value)
        self._typed(value)
        own = getattr(value, "__dict__", None)
        if own is not None:
            self._namespace(own, path)
        slots = [name for cls in kind.__mro__ for name, each in vars(cls).items()
                 if isinstance(each, types.MemberDescriptorType) and (self._any or name in self._names)]  # fmt: skip
        for name in slots:
            if hasattr(value, name):
                self._look(self._attributes, value, name, f"{path}.{name}")
        in_c = own is None and not any("__slots__" in vars(cls) for cls in kind.__mro__)
        if in_c and not isinstance(value, (*_MAPPINGS, *_SEQUENCES)):
            self._decline(path, value)
        self._of_class(kind, path)

    def _of_class(self, kind: Any, path: str) -> None:
        """Compares attributes of a class that the code names, and its functions that ran."""
        for cls in kind.__mro__:
            if id(cls) in self._classes or is_foreign(cls.__module__):
                continue
            self._classes.add(id(cls))
            space = vars(cls)
            for name, each in space.items():
                ran = any(map(self._ran, _functions(each)))
                said = name in self._names and not (name.startswith("__") and not ran)
                if ran or said:
                    self._look(self._items, space, name, f"{cls.__name__}.{name}")
            self._size(space, self._names.difference(space), f"the attributes of {cls.__name__}")
        meta = type(kind)
        if meta is not type and not is_foreign(meta.__module__):
            self._of_class(meta, path)

    def _ran(self, function: types.FunctionType) -> bool:
        return self._reads is not None and self._reads.runs(function.__code__)

    def _function(self, value: Any, path: str) -> None:
        """Follows functions that ran: what they close over, defaults of arguments, attributes."""
        if isinstance(value, functools.partial):
            self._open += [(each, path, True) for each in (value.func, value.args, value.keywords)]
        elif isinstance(value, types.MethodType):
            self._open += [(value.__func__, path, True), (value.__self__, path, True)]
        elif isinstance(value, _CACHED):
            inner = value.__wrapped__
            if isinstance(inner, types.FunctionType) and self._reads is not None:
                if not is_foreign(inner.__module__):
                    self._reads.adds(inner)
                self._open.append((inner, path, True))
        elif not isinstance(value, types.FunctionType):
            self._open += [(each, path, True) for each in _functions(value)]
        else:
            home = str(value.__globals__.get("__name__"))
            # Code may ask a function of somebody else's for an attribute that it has not got yet.
            if (value.__dict__ or not home.startswith("transformers.")) and not is_foreign(home):
                self._namespace(value.__dict__, path)
            if not self._ran(value):
                return
            self._found.add(id(value.__code__))
            variables = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [(name, cell) for name, cell in variables if cell != _EMPTY and name != "__class__"]
            if is_foreign(value.__globals__.get("__name__")):  # a decorator's, around what runs
                inside = (cell.cell_contents for _, cell in cells)
                self._open += [(each, path, False) for each in inside if isinstance(each, _WRAPPED)]
                return
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                if getattr(value, name) is not None:
                    self._look(self._attributes, value, name, f"{path}.{name}")
            for name, cell in cells:
                self._look(self._attributes, cell, "cell_contents", f"{path}'s {name}")


_EMPTY = types.CellType()
_WRAPPED = types.FunctionType | types.MethodType | functools.partial


def _functions(value: Any) -> Sequence[types.FunctionType]:
    """Returns the functions of a method, a property, or another attribute of a class."""
    if isinstance(value, types.FunctionType):
        return (value,)
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType)]
    if isinstance(value, functools.cached_property):
        return _functions(value.func)
    if isinstance(value, staticmethod | classmethod):
        return _functions(value.__func__)
    return ()
