"""What code reads and writes, by its bytecode and its source."""

import ast
import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .source import source_of

__all__ = ["codes_in", "codes_of", "globals_in", "names_in", "writes_of", "writes_outside"]


@functools.cache
def codes_in(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """Returns a code object and those inside it."""
    inside = (each for const in code.co_consts if isinstance(const, types.CodeType) for each in codes_in(const))
    return (code, *inside)


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of attributes and globals in code, and the strings that it may pass to `getattr`."""
    codes = codes_in(code)
    asks = any("getattr" in each.co_names for each in codes)
    words = {c for each in codes for c in each.co_consts if isinstance(c, str) and c.isidentifier()} if asks else set()
    return frozenset(words.union(*(each.co_names for each in codes)))


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    steps = (step for each in codes_in(code) for step in dis.get_instructions(each))
    return frozenset(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


_WRITES = {
    "STORE_ATTR": "sets", "DELETE_ATTR": "deletes", "STORE_SUBSCR": "writes to an entry of something",
    "DELETE_SUBSCR": "deletes an entry of something", "STORE_GLOBAL": "sets", "DELETE_GLOBAL": "deletes",
    "STORE_NAME": "sets",
}  # fmt: skip


_WRITTEN = frozenset(("out", "inplace", "max_norm"))
"""Arguments by which functions of torch write to what they are given."""


@functools.cache
def writes_of(code: types.CodeType, first: bool) -> str | None:
    """Returns what code writes to besides local variables, or None. `first`: attributes of the first parameter are
    local, too (the context of an autograd function, an object that is being made)."""
    mine = code.co_varnames[0] if first and code.co_argcount else None
    for each in codes_in(code):
        before = None
        for step in dis.get_instructions(each):
            if step.opname in _WRITES and not (step.opname == "STORE_ATTR" and before == mine is not None):
                return f"{_WRITES[step.opname]} {step.argval or ''}".rstrip()
            if step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
                return f"sets {step.argval} of the function around it"
            if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
                return f"computes in place ({step.argrepr})"
            before = step.argval if step.opname.startswith("LOAD_FAST") else None
        for words in each.co_consts:
            if isinstance(words, tuple) and (given := _WRITTEN.intersection(w for w in words if isinstance(w, str))):
                return f"passes {min(given)}="
    return next((f"calls {name}" for name in sorted(names_in(code)) if _is_in_place(name)), None)


def _is_in_place(name: str) -> bool:
    named = any(hasattr(space, name) for space in (torch.Tensor, torch, nn.init))
    return name.endswith("_") and not name.endswith("__") and named


def writes_outside(function: types.FunctionType) -> str | None:
    """Returns what a function writes to that it was not given and has not made, or None."""
    code = function.__code__
    if writes_of(code, True) is None:
        return None
    text = source_of(function)
    if text is None:
        return "writes to something, and its source is not at hand"
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return "writes to something, and its source is part of a statement"
    outside = globals_in(code) | set(code.co_freevars)
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            return f"sets {node.names[0]}"
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            root, of_class = node, False  # type: Any, bool
            while isinstance(root, ast.Attribute | ast.Subscript):
                of_class = of_class or (isinstance(root, ast.Attribute) and root.attr in ("__class__", "__dict__"))
                root = root.value
            if of_class or not isinstance(root, ast.Name) or root.id in outside or "type" in outside:
                return f"sets {ast.unparse(node)}"
    return None


def codes_of(function: Any) -> Iterator[types.CodeType]:
    """Yields the code of a method, and of the functions that it wraps."""
    found = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
    while isinstance(found, functools.partial):
        found = found.func
    while isinstance(found, types.FunctionType):
        yield found.__code__
        found = getattr(found, "__wrapped__", None)
