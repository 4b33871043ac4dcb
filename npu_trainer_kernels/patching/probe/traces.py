"""Whether a run of code may leave a trace: a change outside of the tensors that it returns.

A look runs a module once more than the user's own run does, so that code that counts, collects or draws would go on.
Code cannot change what it cannot reach. So foreign code leaves no trace if everything that it reads from outside (its
module's attributes, its class, globals, closures, default arguments) cannot be changed (numbers, strings, tuples,
functions that leave no trace) or is put back after a look (tensors, the modules of a tree: `kept_state`), and if it
writes to local variables alone. Anything else (a list, a dictionary, a counter, an iterator, a generator of numbers of
its own) counts as a trace, whether the code writes to it or not; lists, dictionaries and sets do if any of the code
calls one of `_REFILLING`.

Code of the packages in `_KNOWN` is taken as it is, but for functions of others that have been put into it: hooks,
forwards set on instances, names in its modules, attributes of its classes.
"""

import builtins
import dis
import enum
import functools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from ..classes import GLOBAL_HOOKS, original_class
from .code_reads import codes_in, codes_of, globals_in, names_in, writes_of, writes_outside

__all__ = [
    "TRACE", "trace_of", "trace_of_all", "trace_of_class", "trace_of_function", "trace_of_operators", "traces_within",
]  # fmt: skip

TRACE = "a run of its code may leave a trace"
"""The beginning of each reason."""
_KNOWN = frozenset((
    "torch", "transformers", "npu_trainer_kernels", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "torchao",
    "torch_npu", "kernels", "flash_attn", "fla", "causal_conv1d", "mamba_ssm", "triton", "liger_kernel", "numpy",
    "einops", "torchvision", "unsloth", "unsloth_zoo", "packaging", "huggingface_hub", "safetensors", "tokenizers",
    "datasets", "tqdm", "regex", "typing_extensions",
))  # fmt: skip
"""Packages whose code is no user's, and whose state is in tensors and in attributes of modules."""
_FOLLOWED = frozenset(("transformers", "peft", "trl", "accelerate"))
"""Those of them into whose modules other code puts functions of its own; what their functions call is looked at."""
_HARMLESS = frozenset((
    "math", "random", "functools", "itertools", "typing", "collections", "numbers", "abc",
    "enum", "dataclasses", "contextlib", "copy", "types", "warnings", "builtins", "logging",
))  # fmt: skip
"""Modules of the standard library whose functions change at most what they are given, or the generator of `random`."""
_CHANGING = frozenset((
    "setattr", "delattr", "exec", "eval", "compile", "open", "print", "input", "__import__", "globals", "locals",
    "vars", "breakpoint",
))  # fmt: skip
_OF_MODULES = frozenset((
    "register_buffer", "register_parameter", "register_module", "add_module", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "register_hook",
    "register_post_accumulate_grad_hook", "load_state_dict", "requires_grad_", "zero_grad", "backward", "__setattr__",
    "__setstate__", "__delattr__", "set_", "__dict__", "__class__", "__globals__", "__closure__", "__code__",
    "batch_norm", "instance_norm", "warn", "warn_explicit",
))  # fmt: skip
"""Names in code that change a module or a tensor otherwise than by a store, or that are seen otherwise."""
_REFILLING = frozenset((
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard", "sort",
    "reverse", "difference_update", "intersection_update", "symmetric_difference_update", "__setitem__", "__delitem__",
    "__iadd__", "__ior__", "__isub__", "__iand__", "__ixor__", "__imul__",
))  # fmt: skip
"""Names in code that change a list, a dictionary or a set."""
_MODES = ("torch.utils._device", "torch._subclasses", "torch._functorch", "torch.fx", "npu_trainer_kernels")
"""The files of modes that keep nothing of the operators that they see."""
_SPECIAL = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__setattr__", "__getattribute__")
_GENERATORS = (random._inst, cast(Any, np.random.random_sample).__self__)
_PLAIN = (
    int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, enum.Enum,
)  # fmt: skip
_IN_MODULE = frozenset((*vars(nn.Module()), *dir(nn.Module)))


def _is_known(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _KNOWN


def _home(function: types.FunctionType) -> str:
    """Returns the module that a function was written in; `__module__` is what a decorator has copied."""
    return str(function.__globals__.get("__name__"))


def _is_of_python(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _home_of(value: Any) -> str:
    """Returns the package that a function or a method was written in; empty for anything else."""
    function = getattr(value, "__func__", value)
    return _home(function).partition(".")[0] if isinstance(function, types.FunctionType) else ""


# ---------------------------------------------------------------------------------------------------------------------
# What it reaches
# ---------------------------------------------------------------------------------------------------------------------


class _Judge:
    """Judges the code of a tree of modules; each function once.

    Args:
        inside: the modules whose attributes and buffers are put back after a look.
        fresh: whether the objects that methods are called on are made for the run (a miniature), so that what they hold
            need not stay.
    """

    def __init__(self, inside: Iterable[nn.Module] = (), *, fresh: bool = False) -> None:
        self._inside, self._fresh = set(map(id, inside)), fresh
        self._container: str | None = None  # the first list, dictionary or set that code reads
        self._refills: str | None = None  # the first function that changes one
        self._kinds: dict[type, tuple[tuple[str, ...], list[Any]]] = {}
        # By id and by the names that code reads; with the object, so that the id stays its own.
        self._known_reasons: dict[Any, tuple[Any, str | None]] = {}

    def _once(self, thing: Any, judged: Callable[[], str | None], names: frozenset[str] | None = None) -> str | None:
        """Judges a thing once; while it is judged (it may reach itself) it counts as harmless."""
        key = id(thing), names
        if key not in self._known_reasons:
            self._known_reasons[key] = thing, None
            self._known_reasons[key] = thing, judged()
        return self._known_reasons[key][1]

    def function(self, function: Any, own: bool = False) -> str | None:
        """Returns which trace calling something may leave, or None. `own`: its first argument is made for the call."""
        if isinstance(function, staticmethod | classmethod):
            return self.function(function.__func__, own)
        if isinstance(function, property):
            return None if function.fget is None else self.function(function.fget)
        if isinstance(function, functools.partial):
            given = (*function.args, *function.keywords.values())
            return self.function(function.func) or self._first(given, f"a value bound to {_name_of(function.func)}",
                                                               function.func)  # fmt: skip
        if isinstance(function, types.MethodType):
            return self.function(function.__func__) or self._first((function.__self__,), "the object of a method",
                                                                   function.__func__)  # fmt: skip
        if isinstance(function, type):
            return self.cls(function)
        if isinstance(function, types.FunctionType):
            if _is_of_python(home := _home(function)):
                return None if _may_be_called(home) else f"calls {home}.{function.__name__}"
            judged = self._known if _is_known(home) else functools.partial(self._foreign, own=own)
            return self._once(function, lambda: judged(function))
        if (wrapped := getattr(function, "__wrapped__", None)) is not None and not isinstance(function, nn.Module):
            return self.function(wrapped)
        if isinstance(function, types.BuiltinFunctionType | types.BuiltinMethodType):
            return self._builtin(function)
        if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType | types.MethodWrapperType):
            return None
        if _is_known(type(function).__module__):
            return None
        return f"calls {_name_of(function)}, an object with a state of its own"

    def _first(self, values: Iterable[Any], name: str, by: Any) -> str | None:
        """Judges values that a function has got: those of a known function only if they are foreign functions."""
        known = isinstance(by, types.FunctionType) and _is_known(_home(by))
        return next(filter(None, (self.value(name, v) for v in values if not known or _is_foreign_function(v))), None)

    def _builtin(self, function: Any) -> str | None:
        owner, name = getattr(function, "__self__", None), function.__name__
        if owner is builtins:
            return f"calls {name}" if name in _CHANGING else None
        if owner is None or isinstance(owner, types.ModuleType | type) or any(owner is each for each in _GENERATORS):
            home = (function.__module__ or "torch") if not isinstance(owner, types.ModuleType) else owner.__name__
            root = home.partition(".")[0].lstrip("_")
            return None if root in _KNOWN or root in _HARMLESS else f"calls {home}.{name}"
        return self.value(name, owner)

    def _known(self, function: types.FunctionType) -> str | None:
        """Judges what others have put into the reach of a known function."""
        if _home(function).partition(".")[0] not in _FOLLOWED:
            return None
        space, names = function.__globals__, names_in(function.__code__)
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        for value in (*(space[name] for name in globals_in(function.__code__) if name in space), *held):
            if isinstance(value, types.ModuleType):
                reason = self._put_into(value, names) if _is_known(value.__name__) else None
                if reason is not None:
                    return reason
            elif isinstance(value, Mapping):  # a table: of ways to attend, of activations
                foreign = (each for each in value.values() if _is_foreign_function(each))
                if (reason := next(filter(None, map(self.function, foreign)), None)) is not None:
                    return reason
            else:
                follows = _is_foreign_function(value) or _home_of(value) in _FOLLOWED
                if follows and (reason := self.function(value)) is not None:
                    return reason
        return None

    def _put_into(self, module: types.ModuleType, names: frozenset[str], depth: int = 2) -> str | None:
        """Judges the foreign functions that a known module has under some names."""
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType) and depth and _is_known(value.__name__):
                reason = self._put_into(value, names, depth - 1)
            else:
                reason = self.function(value) if _is_foreign_function(value) else None
            if reason is not None:
                return reason
        return None

    def _foreign(self, function: types.FunctionType, own: bool) -> str | None:
        code, name = function.__code__, function.__qualname__
        writes = writes_outside(function) if self._fresh else writes_of(code, own)
        if writes is not None:
            return f"{name} {writes}"
        names, space = names_in(code), function.__globals__
        if self._refills is None and (refills := names & _REFILLING):
            self._refills = f"{name} calls {min(refills)}"
        if not self._fresh and (changes := names & _OF_MODULES):
            return f"{name} calls or reads {min(changes)}"
        imports = (s.argval for c in codes_in(code) for s in dis.get_instructions(c) if s.opname == "IMPORT_NAME")
        if (other := next((each for each in imports if not _may_be_called(each)), None)) is not None:
            return f"{name} imports {other}"
        for each in globals_in(code):
            value = space.get(each, vars(builtins).get(each))
            if isinstance(value, types.ModuleType):
                reason = self._of_module(value, names)
            else:
                reason = self.value(each, value, names)
            if reason is not None:
                return _within(name, reason)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        held = [(word, cell.cell_contents) for word, cell in cells if _is_full(cell) and word != "__class__"]
        held += [("a default", v) for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())]
        reasons = (self.value(word, value, names) for word, value in held)
        found = next(filter(None, reasons), None)
        return None if found is None else _within(name, found)

    def _of_module(self, module: types.ModuleType, names: frozenset[str]) -> str | None:
        """Judges what code reads of a Python module: all of a foreign one, and what others have put into a known."""
        if _is_known(module.__name__):
            return self._put_into(module, names)
        if _is_of_python(module.__name__):
            return None if _may_be_called(module.__name__) else f"uses {module.__name__}"
        reasons = (self.value(name, vars(module)[name], names) for name in names if name in vars(module))
        return next(filter(None, reasons), None)

    def value(self, name: str, value: Any, names: Iterable[str] = ()) -> str | None:
        """Returns which trace code may leave that reads a value, or None. `names`: those in the code."""
        if isinstance(value, _PLAIN):
            return None
        if isinstance(value, tuple | frozenset) or type(value) in (list, set, dict):
            if not isinstance(value, tuple | frozenset):
                self._container = self._container or f"reads {name}, a {type(value).__name__}"
            inside = value.values() if isinstance(value, dict) else value
            reasons = (self.value(name, each, names) for each in inside)
            return self._once(value, lambda: next(filter(None, reasons), None), frozenset(names))
        if isinstance(value, torch.Tensor):
            return None if _is_known(type(value).__module__) else f"reads {name}, a {type(value).__name__}"
        if isinstance(value, nn.Module):
            return None if id(value) in self._inside else self._outside(name, value)
        if isinstance(value, types.ModuleType):
            return None if _is_known(value.__name__) or _may_be_called(value.__name__) else f"uses {value.__name__}"
        if isinstance(value, _FUNCTIONS):
            return self.function(value)
        root = type(value).__module__.partition(".")[0]
        if isinstance(value, logging.Logger) and self._fresh:
            return None  # a line of the log is no state
        plain = isinstance(value, PretrainedConfig | types.SimpleNamespace)
        if plain or (root not in _KNOWN and hasattr(value, "__dict__")):
            said = frozenset(names)
            return self._once(value, lambda: self._holder(name, value, said), said)
        if root == "transformers":  # tables of functions
            return None
        if root == "typing" or isinstance(value, types.GenericAlias | types.UnionType):
            return None
        return f"reads {name}, a {type(value).__name__}, which may change"

    def _holder(self, name: str, value: Any, names: frozenset[str]) -> str | None:
        """Judges an object by the code of its class, and by the attributes that code reads of it."""
        kind, held = type(value), vars(value)
        known = isinstance(value, PretrainedConfig) or kind is types.SimpleNamespace
        if not known and (_is_of_python(kind.__module__) or _is_known(kind.__module__)):
            return f"reads {name}, a {kind.__name__}, which may change"
        for base in kind.__mro__[:-1]:
            for each, code in vars(base).items() if not _is_known(base.__module__) else ():
                if not isinstance(code, _FUNCTIONS) or each in ("__init__", "__new__"):
                    continue
                names = names.union(*map(names_in, codes_of(code)))
                if base.__module__ != "types" and (reason := self.function(code)) is not None:
                    return f"reads {name}, a {kind.__name__}, whose {reason}"
        found = ((each, held[each] if each in held else _attribute(kind, each)) for each in names)
        reasons = (
            self.value(f"{name}.{each}", v, names) for each, v in found
            if v is not _ABSENT and not isinstance(v, _FUNCTIONS)
        )  # fmt: skip
        return next(filter(None, reasons), None)

    def _outside(self, name: str, module: nn.Module) -> str | None:
        """Judges a module that is in no tree: nothing of it is put back."""
        return self._once(module, lambda: self._judged_outside(name, module))

    def _judged_outside(self, name: str, module: nn.Module) -> str | None:
        known = _is_known(original_class(module).__module__) and not any(True for _ in module.buffers())
        found = None if known else f"reads {name}, a {original_class(module).__name__} outside of the model"
        return found or next(filter(None, map(self.module, module.modules())), None)

    def cls(self, kind: type) -> str | None:
        """Judges a class that code makes an object of, or asks for."""
        return None if _is_known(kind.__module__) else self._once(kind, lambda: self._judged_class(kind))

    def _judged_class(self, kind: type) -> str | None:
        root = kind.__module__.partition(".")[0]
        if _is_of_python(root):
            return None if root.lstrip("_") in _HARMLESS else f"uses {kind.__module__}.{kind.__name__}"
        if issubclass(kind, enum.Enum | BaseException):
            return None
        functions = {n: v for n, v in vars(kind).items() if isinstance(v, _FUNCTIONS) and not isinstance(v, type)}
        names = frozenset().union(*(names_in(code) for each in functions.values() for code in codes_of(each)))
        for name, value in vars(kind).items():
            if name in functions:
                reason = self.function(value, own=not issubclass(kind, nn.Module) or name == "__init__")
            else:
                reason = self.value(name, value, names) if name in names and name not in _IN_MODULE else None
            if reason is not None:
                return reason
        for base in kind.__mro__[1:]:
            if base is not object and (reason := self.cls(base)) is not None:
                return reason
        return None

    def module(self, module: nn.Module, hooks: bool = True) -> str | None:
        """Judges the code that a module's call runs, without that of its children."""
        kind, own = original_class(module), vars(module)
        set_here = {name: value for name, value in own.items() if isinstance(value, _FUNCTIONS)}
        if not set_here and kind not in self._kinds:
            self._kinds[kind] = _reached(kind, {})
        names, functions = _reached(kind, set_here) if set_here else self._kinds[kind]
        if (reason := next(filter(None, map(self.function, functions)), None)) is not None:
            return reason
        if _is_known(kind.__module__):
            given = [(n, v) for n, v in own.items() if not _is_known_object(v) and n in names]
        else:
            given = [(name, own[name] if name in own else _attribute(kind, name)) for name in names]
        given = [(name, value) for name, value in given if value is not _ABSENT and not isinstance(value, _FUNCTIONS)]
        if (reason := next(filter(None, (self.value(*each, names) for each in given)), None)) is not None:
            return f"{kind.__name__} {reason}"
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and not _is_known(type(value).__module__):
                return f"{kind.__name__} has a {type(value).__name__} for its {name}"
        listed = (*module._forward_hooks.values(), *module._forward_pre_hooks.values()) if hooks else ()
        return next((f"a hook: {reason}" for hook in listed if (reason := self.function(hook)) is not None), None)

    def of_containers(self) -> str | None:
        """Returns which list, dictionary or set the code that was judged may change, or None."""
        both = self._container is not None and self._refills is not None
        return f"{self._refills}, and it {self._container}" if both else None


_ABSENT: Any = object()
_FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, staticmethod, classmethod,
    property, type, types.MethodDescriptorType, types.WrapperDescriptorType, functools._lru_cache_wrapper,
)  # fmt: skip


def _is_known_object(value: Any) -> bool:
    """Whether a value in a known module's attributes is of a kind that packages keep there."""
    root = type(value).__module__.partition(".")[0]
    return root in _KNOWN or root == "builtins" or root in sys.stdlib_module_names


def _is_foreign_function(value: Any) -> bool:
    """Whether a value is code of neither a known package nor the standard library."""
    if isinstance(value, functools.partial):
        return _is_foreign_function(value.func)
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        home = _home(function)
        return not _is_known(home) and not _is_of_python(home)
    if isinstance(value, type | types.ModuleType) or not callable(value):
        return False
    root = type(value).__module__.partition(".")[0]
    return root not in _KNOWN and not _is_of_python(root)


def _may_be_called(module: str) -> bool:
    return _is_known(module) or module.partition(".")[0] in _HARMLESS


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # not set yet
        return False
    return True


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _within(name: str, reason: str) -> str:
    return reason if reason.partition(" ")[0].isidentifier() and "." in reason.partition(" ")[0] else f"{name} {reason}"


def _attribute(kind: Any, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)


def _reached(kind: Any, own: dict[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Returns the names of attributes in the code that a call of a module runs, and the methods among them, with those
    of the bases that they may call by `super()`. `own`: the functions that were set on the instance."""
    names, functions = dict.fromkeys(_SPECIAL), []
    queue = list(_SPECIAL)
    for name in queue:
        found = [own[name]] if name in own else []
        found += [vars(base)[name] for base in kind.__mro__[:-1] if name in vars(base)]
        for value in found if name in _SPECIAL or name not in _IN_MODULE else ():
            if not isinstance(value, _FUNCTIONS) or isinstance(value, type):
                continue
            functions.append(value)
            for code in codes_of(value):
                fresh = [each for each in names_in(code) if each not in names and each not in _IN_MODULE]
                names.update(dict.fromkeys(fresh))
                queue += fresh
    return tuple(name for name in names if name not in _SPECIAL), functions


# ---------------------------------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------------------------------


def trace_of(module: nn.Module, *, hooks: bool = True) -> str | None:
    """Returns which trace a run of a module's code, without its children's, may leave, or None. `hooks`: whether its
    own hooks run, too; those of all modules do."""
    judge = _Judge(module.modules())
    return _said(_of_all_modules(judge) or judge.module(module, hooks) or judge.of_containers())


def trace_of_operators() -> str | None:
    """Returns which trace any operator may leave, since a mode of torch sees it, or None."""
    return _said(_of_modes())


def _of_modes() -> str | None:
    modes = (*torch.overrides._get_current_function_mode_stack(),
             *torch.utils._python_dispatch._get_current_dispatch_mode_stack())  # fmt: skip
    other = next((type(mode).__name__ for mode in modes if not type(mode).__module__.startswith(_MODES)), None)
    return None if other is None else f"{other} looks at every operator"


def _of_all_modules(judge: _Judge) -> str | None:
    """Judges what sees every module, or every operator."""
    if (mode := _of_modes()) is not None:
        return mode
    hooks = (hook for table in GLOBAL_HOOKS for hook in table.values())
    return next((f"a hook of all modules: {r}" for hook in hooks if (r := judge.function(hook)) is not None), None)


def trace_of_all(model: nn.Module) -> str | None:
    """Returns which trace a call of a model may leave that is not put back, or None: by the code of any of its modules,
    by hooks, or by a mode of torch that sees every operator."""
    return traces_within(model)(model)


def traces_within(model: nn.Module) -> Callable[[nn.Module], str | None]:
    """Returns `trace_of_all` for modules of a model, within which attributes are put back."""
    inside = list(model.modules())

    def trace(module: nn.Module) -> str | None:
        judge = _Judge(inside)
        reason = _of_all_modules(judge)
        # The forward of the module is called, and not the module: its own hooks do not run.
        reasons = (judge.module(part, hooks=part is not module) for part in module.modules())
        reason = reason or next(filter(None, reasons), None)
        return _said(reason or judge.of_containers())

    return trace


def trace_of_class(kind: type[nn.Module], modules: Iterable[nn.Module] = ()) -> str | None:
    """Returns which trace making and calling a new object of a class may leave, or None. `modules`: those of a model of
    this class, whose known classes may have been given functions of others."""
    judge = _Judge(fresh=True)
    reason = judge.cls(kind)
    for each in dict.fromkeys(original_class(module) for module in modules):
        if reason is None and _is_known(each.__module__):
            reason = next(filter(None, map(judge.function, _reached(each, {})[1])), None)
    return _said(reason or judge.of_containers())


def trace_of_function(function: Callable[..., Any]) -> str | None:
    """Returns which trace a call of a function may leave, or None."""
    judge = _Judge()
    return _said(judge.function(function) or judge.of_containers())


def _said(reason: str | None) -> str | None:
    return None if reason is None else f"{TRACE}: {reason}"
