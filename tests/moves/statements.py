"""Moves of statements: others come between them, and two that do not depend on each other change places."""

import ast
from collections.abc import Iterable

from .trees import (
    blocks,
    callee,
    children,
    classes,
    forward_of,
    forwards,
    functions,
    is_docstring,
    layers,
    loaded,
    stored,
)  # fmt: skip

__all__ = ["children_called_by_name", "keywords_added", "statements_inserted", "statements_reordered"]


def statements_inserted(tree: ast.Module) -> None:
    """Puts a statement that does nothing behind every statement of the layers' forwards and of the file's functions."""
    kinds = ("noted_{} = None", "noted_{}: int = {}", "noted_{} = noted_{} = not True")
    for function in (*forwards(tree), *functions(tree).values()):
        count = 0
        for block in list(blocks(function)):
            made: list[ast.stmt] = []
            for node in block:
                made.append(node)
                if not (is_docstring(node) or isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)):
                    made += ast.parse(kinds[count % len(kinds)].format(count, count)).body
                    count += 1
            block[:] = made


# Methods of tensors that compute nothing, or nothing but their result.
_PURE = frozenset(("view", "transpose", "reshape", "contiguous", "unsqueeze", "permute", "to", "float", "pow", "mean"))


def _linear(cls: ast.ClassDef) -> set[str]:
    """The attributes of `self` that are linear layers."""
    found = set()
    for node in ast.walk(cls):
        made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if made and ast.unparse(node.value.func) == "nn.Linear" and isinstance(node.targets[0], ast.Attribute):
            found.add(node.targets[0].attr)
    return found


def _is_pure(value: ast.expr, linear: set[str]) -> bool:
    """Whether an expression depends on variables and weights alone, and changes nothing."""
    allowed = (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop,
               ast.expr_context, ast.Tuple, ast.Subscript, ast.Slice, ast.Starred)  # fmt: skip
    for node in ast.walk(value):
        if not isinstance(node, allowed):
            return False
        if isinstance(node, ast.Call):
            called = node.func
            if node.keywords or not isinstance(called, ast.Attribute):
                return False
            if called.attr not in _PURE and not (ast.unparse(called.value) == "self" and called.attr in linear):
                return False
    return True


def _are_independent(a: ast.stmt, b: ast.stmt, linear: set[str]) -> bool:
    """Whether two assignments may change places: both are pure, and none sets what the other one reads or sets."""
    for node in (a, b):
        if not isinstance(node, ast.Assign) or not _is_pure(node.value, linear):
            return False
        if not all(isinstance(t, ast.Name | ast.Tuple) for t in node.targets) or "self" in stored(node):
            return False
    return not (stored(a) & (loaded(b) | stored(b)) or stored(b) & loaded(a))


def statements_reordered(tree: ast.Module) -> None:
    """Exchanges neighbours that do not depend on each other, from the front, each statement once at most."""
    of_layers = [(f, _linear(cls)) for cls in layers(tree) for f in cls.body if isinstance(f, ast.FunctionDef)]
    for function, linear in (*of_layers, *((f, set[str]()) for f in functions(tree).values())):
        if function.name == "__init__":
            continue  # random numbers are drawn there
        for block in list(blocks(function)):
            i = 0
            while i + 1 < len(block):
                if _are_independent(block[i], block[i + 1], linear):
                    block[i], block[i + 1] = block[i + 1], block[i]
                    i += 1
                i += 1


def _named(call: ast.Call, names: Iterable[str]) -> None:
    """Gives a call's arguments by name."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        return
    names = list(names)
    if len(call.args) <= len(names):
        call.keywords = [*(ast.keyword(n, v) for n, v in zip(names, call.args, strict=False)), *call.keywords]
        call.args = []


def _words(call: ast.Call) -> set[str | None]:
    return {word.arg for word in call.keywords}


def keywords_added(tree: ast.Module) -> None:
    """Gives arguments by name that were given by place, to functions of the file, and one more to caches, as 5.24."""
    known = functions(tree)
    methods = [n for cls in classes(tree).values() for n in cls.body if isinstance(n, ast.FunctionDef)]
    for function in methods:
        others = function.args.kwarg is not None and function.args.kwarg.arg == "kwargs"
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            if name in known and call.args and not known[name].args.posonlyargs:
                first, *rest = call.args
                given = ast.Call(call.func, rest, call.keywords)
                _named(given, [each.arg for each in known[name].args.args][1:])
                call.args, call.keywords = [first, *given.args], given.keywords
            elif others and name.endswith(".update") and len(call.args) >= 3 and "kwargs" not in _words(call):
                call.keywords.append(ast.keyword("kwargs", ast.Name("kwargs", ast.Load())))


def children_called_by_name(tree: ast.Module) -> None:
    """Gives the one tensor of a child by its name."""
    known = classes(tree)
    for cls in layers(tree):
        held, function = children(tree, cls), forward_of(cls)
        assert function is not None
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and len(n.args) == 1):
            name = callee(call, function, held)
            theirs = None if name is None else forward_of(known[name])
            if theirs is not None and not call.keywords:
                _named(call, [each.arg for each in theirs.args.args][1:])
