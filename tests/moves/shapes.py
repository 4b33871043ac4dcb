"""Moves of the shape of code: decorators, base classes in between, helpers written out, code that becomes helpers."""

import ast
import copy
import itertools
from collections.abc import Iterator

from .trees import (
    added_import,
    all_arguments,
    body_of,
    forward_of,
    forwards,
    functions,
    helpers,
    layers,
    loaded,
    local_names,
    models,
    moved_by_name,
    stored,
)

__all__ = ["base_class_between", "forwards_decorated", "forwards_outlined", "helpers_inlined", "rotations_inlined"]


def forwards_decorated(tree: ast.Module) -> None:
    """Puts a decorator around every forward that hands its arguments on."""
    added_import(tree, "from tests.moves.wrappers import noted")
    for cls in (*layers(tree), *models(tree)):
        function = forward_of(cls)
        assert function is not None
        function.decorator_list.append(ast.parse("noted('5.40.0')", mode="eval").body)


def base_class_between(tree: ast.Module) -> None:
    """Moves the code of every layer's class to a new class under it."""
    moved = {id(cls) for cls in layers(tree)}
    body: list[ast.stmt] = []
    for node in tree.body:
        body.append(node)
        if isinstance(node, ast.ClassDef) and id(node) in moved:
            own, node.name = node.name, f"{node.name}Base"
            body += ast.parse(f"class {own}({node.name}):\n    pass").body
            # `super(Own, self)` and class attributes said by name mean the class that has the code, or one under it.
    tree.body = body


def _is_straight(function: ast.FunctionDef) -> bool:
    """Whether a function assigns variables and returns, and does nothing else."""
    *before, last = body_of(function)
    given = function.args
    plain = all(
        isinstance(n, ast.Assign) and all(isinstance(t, ast.Name | ast.Tuple) for t in n.targets) for n in before
    )
    return (
        plain and isinstance(last, ast.Return) and last.value is not None and not function.decorator_list[1:]
        and given.vararg is None and given.kwarg is None
        and not any(isinstance(n, ast.Lambda | ast.ListComp | ast.GeneratorExp) for n in ast.walk(function))
    )  # fmt: skip


def _bound(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """The value of each argument at a call."""
    names = [each.arg for each in all_arguments(function)]
    if any(isinstance(a, ast.Starred) for a in call.args) or any(w.arg is None for w in call.keywords):
        return None
    defaults = function.args.defaults
    found: dict[str, ast.expr] = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found |= dict(zip(names, call.args, strict=False))
    found |= {word.arg: word.value for word in call.keywords if word.arg is not None}
    return found if set(found) == set(names) else None


class _Inlined(ast.NodeTransformer):
    """Writes calls of straight functions out: `before` are the statements that have to run first."""

    def __init__(self, known: dict[str, ast.FunctionDef], numbers: Iterator[int]) -> None:
        self.known, self.before, self._numbers = known, [], numbers

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return node  # a branch that is not taken computes nothing

    visit_BoolOp = visit_ListComp = visit_GeneratorExp = visit_IfExp

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = self.known.get(node.func.id) if isinstance(node.func, ast.Name) else None
        given = None if function is None else _bound(function, node)
        if function is None or given is None:
            return node
        number = next(self._numbers)
        names = {name: f"{name}_in_{number}" for name in {*given, *stored(function)}}
        for name, value in given.items():
            self.before.append(ast.Assign([ast.Name(names[name], ast.Store())], value))
        *body, last = copy.deepcopy(body_of(function))
        for statement in (*body, last):
            moved_by_name(statement, names)
        self.before += body
        assert isinstance(last, ast.Return)
        assert last.value is not None
        return last.value


def _inline(into: list[ast.FunctionDef], known: dict[str, ast.FunctionDef]) -> None:
    for function in into:
        numbers = itertools.count()
        for block in list(_simple_blocks(function)):
            made: list[ast.stmt] = []
            for node in block:
                if isinstance(node, ast.Assign | ast.Return | ast.Expr):
                    rewrite = _Inlined({k: v for k, v in known.items() if v is not function}, numbers)
                    node = rewrite.visit(node)
                    made += rewrite.before
                made.append(node)
            block[:] = made


def _simple_blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    return [function.body, *(n.body for n in function.body if isinstance(n, ast.If))]


def helpers_inlined(tree: ast.Module) -> None:
    """Writes the functions out that the file's functions call."""
    known = {name: each for name, each in helpers(tree).items() if _is_straight(each)}
    _inline(list(functions(tree).values()), copy.deepcopy(known))


def rotations_inlined(tree: ast.Module) -> None:
    """Writes the functions out that the layers' forwards call, rotations among them."""
    known = {name: each for name, each in helpers(tree).items() if _is_straight(each)}
    _inline(forwards(tree), copy.deepcopy(known))


def forwards_outlined(tree: ast.Module) -> None:
    """Makes a function of the file of every sum, product or call that a layer's forward assigns or returns."""
    made: list[ast.stmt] = []
    for function in forwards(tree):
        own = local_names(function)
        nested = any(isinstance(n, ast.FunctionDef | ast.Lambda) and n is not function for n in ast.walk(function))
        for node in [] if nested else [n for block in _simple_blocks(function) for n in block]:
            value = node.value if isinstance(node, ast.Assign | ast.Return) else None
            if not isinstance(value, ast.Call | ast.BinOp) or not _moves_out(value):
                continue
            names = [name for name in sorted(loaded(value) & own) if name != "self"]
            names = ["self", *names] if "self" in loaded(value) else names
            name = f"_part_{len(made)}"
            part = ast.parse(f"def {name}({', '.join(names)}):\n    return None").body[0]
            part.body[0].value = value
            made.append(part)
            node.value = ast.parse(f"{name}({', '.join(names)})", mode="eval").body
    at = next((i for i, node in enumerate(tree.body) if isinstance(node, ast.ClassDef)), len(tree.body))
    tree.body[at:at] = made


def _moves_out(value: ast.expr) -> bool:
    odd = (ast.Starred, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.NamedExpr, ast.DictComp)
    private = any(isinstance(n, ast.Attribute) and n.attr.startswith("__") for n in ast.walk(value))
    handed_on = any(isinstance(n, ast.keyword) and n.arg is None for n in ast.walk(value))
    return not private and not handed_on and not any(isinstance(n, odd) or ast.unparse(n) == "super()"
                                                     for n in ast.walk(value) if isinstance(n, ast.expr))  # fmt: skip
