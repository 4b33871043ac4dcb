"""Rewrites a module's forward: its source is parsed, one thing in it is replaced, and the result is bound per instance.
Nothing of a model's code is copied into this package.

A source is read from a file, which may have been edited since the running code was compiled, so a source counts only if
it compiles to that code.

Forwards that close over variables are left alone, and those under decorators that change a call (`wrappers`).
"""

import __future__

import ast
import functools
import inspect
import linecache
import textwrap
import tokenize
import types
from collections.abc import Iterator
from typing import Any

from .wrappers import Wrapped, looked_through

__all__ = [
    "beyond_one_run", "called_on_self", "plain_forward", "rewritten", "rewritten_forward", "self_attribute",
    "source_of",
]  # fmt: skip

# A function's flags have the `from __future__` imports of its module, which the new function must have, too.
_FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


def plain_forward(cls: Any) -> types.FunctionType | str:
    """Returns a class's own forward, without its decorators, if it can be bound anew, else why not."""
    found = looked_through(cls)
    if isinstance(found, str):
        return found
    function = found.function
    if not isinstance(function, types.FunctionType):
        return f"its forward is no function, but of type {type(function).__name__}"
    if function.__closure__:
        return "its forward closes over variables"
    if source_of(function) is None:
        return _OTHER_SOURCE if _text_of(function) is not None else "its source is not at hand"
    return function


def rewritten_forward(cls: Any, *rewrites: ast.NodeTransformer) -> types.FunctionType:
    """Returns a class's own forward, one that `plain_forward` returns, with its source transformed (`rewritten`) and
    in its decorators."""
    found = looked_through(cls)
    assert isinstance(found, Wrapped)
    return found.around(rewritten(found.function, *rewrites))


_OTHER_SOURCE = "its source is not that of the code that runs (was its file edited after it was imported?)"


@functools.cache
def source_of(function: types.FunctionType) -> str | None:
    """Returns the source of a function; None where there is none, or where the running code was made of another one."""
    text = _text_of(function)
    if not text:
        return None
    lines, _ = inspect.findsource(function)
    code = function.__code__
    file, flags = "".join(lines), code.co_flags & _FUTURE_FLAGS
    found = (each for apart in (False, True) for unit in _units(file, flags, apart) for each in _codes(unit))
    here = (each for each in found if each.co_firstlineno == code.co_firstlineno)
    return text if any(_same_code(each, code) for each in here) else None


def _text_of(function: types.FunctionType) -> str | None:
    """Returns a function's text in its file, empty where it is not found there; None without a file."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return "" if linecache.getlines(function.__code__.co_filename) else None


@functools.lru_cache(maxsize=32)
def _units(file: str, flags: int, apart: bool) -> tuple[types.CodeType, ...]:
    """Returns the code of a file (its imports affect how methods are called) or, if `apart`, of each of its statements,
    as notebooks compile them."""
    try:
        tree = ast.parse(file)
        parts = [ast.Module([node], []) for node in tree.body] if apart else [tree]
        return tuple(compile(part, "", "exec", flags=flags, dont_inherit=True) for part in parts)
    except (SyntaxError, ValueError):
        return ()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and those inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


_OF_CODE = (
    "co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
    "co_kwonlyargcount",
)  # fmt: skip


def _same_code(a: Any, b: Any) -> bool:
    """Whether two constants of code are equal, wherever in a file they are."""
    if type(a) is not type(b):
        return False
    if isinstance(a, types.CodeType):
        return all(getattr(a, name) == getattr(b, name) for name in _OF_CODE) and _same_code(a.co_consts, b.co_consts)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_code, a, b))
    # By `repr`, since -0.0 equals 0.0; a set has no order.
    return bool(a == b) if isinstance(a, frozenset) else repr(a) == repr(b)


_OF_GRADIENTS = frozenset(
    ("autocast", "enable_grad", "inference_mode", "is_grad_enabled", "no_grad", "requires_grad", "set_grad_enabled")
)


@functools.cache
def beyond_one_run(function: types.FunctionType) -> str | None:
    """Returns why runs on a few rows do not show all that a function does, or None."""
    source = source_of(function)
    if source is None:
        return None if _text_of(function) is None else _OTHER_SOURCE
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # for a function inside a statement, the source has whole lines
        return None
    named = [node for node in nodes if isinstance(node, ast.Assign)]
    named = [node for node in named if _is_size(node.value) or _name(node.value) == "shape"]
    sizes = {_name(part) for node in named for target in node.targets for part in ast.walk(target)} - {None}
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            return f"its code sets {ast.unparse(node)}"
        if isinstance(node, ast.Attribute | ast.Name) and _name(node) in _OF_GRADIENTS:
            return f"its code goes by {_name(node)}"
        if (part := _beyond_a_probe(node, function.__globals__)) is not None:
            return f"its code goes by a place that no probe has: {part}"
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            checks = isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body)
            parts = ast.walk(node.test)
            if not checks and any(_is_size(part) or _name(part) in sizes for part in parts):
                return f"its code asks whether {ast.unparse(node.test)}"
    return None


def _beyond_a_probe(node: ast.AST, space: dict[str, Any]) -> str | None:
    """Returns the expression if it depends on whether a tensor has more than so many elements along a dimension, else
    None. Probes have at least two along each, so that a first or a last one shows."""
    if isinstance(node, ast.Subscript) and _name(node.value) != "shape" and not _is_size(node.value):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        bounds = [bound for part in parts if isinstance(part, ast.Slice) for bound in (part.lower, part.upper)]
    elif isinstance(node, ast.Call) and _is_count(node.func):
        bounds = [*node.args, *(word.value for word in node.keywords if word.arg != "dim")]
    else:
        return None
    for bound in filter(None, bounds):
        number = bound.operand if isinstance(bound, ast.UnaryOp) else bound
        value = number.value if isinstance(number, ast.Constant) else space.get(_name(number) or "")
        # An attribute may have any value.
        if isinstance(number, ast.Attribute) or (type(value) is int and value > 1):
            return ast.unparse(node)
    return None


def _is_count(function: ast.expr) -> bool:
    """Whether a function takes a number of a tensor's elements, or the smaller or larger of two numbers."""
    if isinstance(function, ast.Name):
        return function.id in ("max", "min")
    return isinstance(function, ast.Attribute) and function.attr in ("kthvalue", "narrow", "topk")


def _is_size(node: ast.AST) -> bool:
    """Whether an expression is part of a tensor's shape, or its number of elements; its number of dimensions is not."""
    of = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else node
    return of is not node and _name(of) in ("shape", "size", "numel", "nelement")


def _name(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def rewritten(function: types.FunctionType, *rewrites: ast.NodeTransformer) -> types.FunctionType:
    """Returns the function with its source transformed: same globals, defaults, file and line numbers."""
    source = source_of(function)
    assert source is not None
    tree = ast.parse(source)
    for rewrite in rewrites:
        tree = ast.fix_missing_locations(rewrite.visit(tree))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    # Inside a class of its class's name, which mangles names like `self.__x` alike.
    *_, owner, _ = ("", *function.__qualname__.split("."))
    if owner.isidentifier():
        around: Any = ast.parse(f"class {owner}: pass").body[0]
        around.body, tree.body = tree.body, [around]
    flags = function.__code__.co_flags & _FUTURE_FLAGS
    unit = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(c for c in _codes(unit) if c.co_name == function.__code__.co_name)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__module__, new.__qualname__, new.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return new


def self_attribute(name: str) -> ast.Attribute:
    """Returns the expression `self.name`, to be read."""
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def called_on_self(node: ast.expr) -> str | None:
    """Returns `name` of a call `self.name(one argument)`, else None."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    called = node.func
    if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"):
        return None
    return called.attr
