"""What sources of kernels must not have, because a compiler makes something else of it than the interpreter does."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from npu_trainer_kernels import ops


def sources() -> dict[str, str]:
    """The source of each module of the ops, by name."""
    names = [each.name for each in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    return {name: inspect.getsource(importlib.import_module(name)) for name in names}


SOURCES = sources()


def is_kernel(node: ast.AST) -> bool:
    """Whether Triton compiles a function."""
    decorators = getattr(node, "decorator_list", [])
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in decorators)


def assigned(node: Any) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def handed_on(kernel: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of variables that have one value, `a = c` and `b = c`, and of which a loop assigns one to the other. Triton
    (3.6, 3.9) takes `a = b` for no change of `a` then, and the loop does not carry it."""
    values: dict[str, str] = {}
    for node in ast.walk(kernel):
        found = assigned(node)
        if found is not None and isinstance(found[1], ast.Name):
            values.setdefault(found[0], found[1].id)
    for loop in (node for node in ast.walk(kernel) if isinstance(node, ast.For | ast.While)):
        for node in ast.walk(loop):
            found = assigned(node)
            if found is None or not isinstance(found[1], ast.Name):
                continue
            a, b = found[0], found[1].id
            if values.get(a) is not None and values.get(a) == values.get(b):
                yield a, b


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if "jit" in source])
def test_no_loop_hands_a_value_on_between_variables_that_begin_as_one(name: str) -> None:
    kernels = [node for node in ast.walk(ast.parse(SOURCES[name])) if is_kernel(node)]
    assert {(kernel.name, *pair) for kernel in kernels for pair in handed_on(kernel)} == set()


PLANTED = """
@jit
def kernel(x, y, COLS: tl.constexpr):
    zeros = tl.zeros([COLS], tl.float32)
    a = zeros
    b = zeros
    for token in range(10):
        c = tl.load(x + token)
        tl.store(y + token, a + b + c)
        a = b
        b = c
"""


def test_it_is_seen() -> None:
    (kernel,) = (node for node in ast.walk(ast.parse(textwrap.dedent(PLANTED))) if is_kernel(node))
    assert set(handed_on(kernel)) == {("a", "b")}
    mended = PLANTED.replace("a = zeros", "a = tl.zeros([COLS], tl.float32)")
    (kernel,) = (node for node in ast.walk(ast.parse(textwrap.dedent(mended))) if is_kernel(node))
    assert set(handed_on(kernel)) == set()
