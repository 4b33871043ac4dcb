"""Stands in for processors on which PyTorch's products round by the layout of their operands.

How a product of matrices, an attention or a convolution sums depends on shapes, strides, the number of matrices and
threads, and on the processor: one that gives the same bits for two layouts says nothing of the next. `Perturbed` makes
this true of every processor. It moves each result of these operators by a fraction of a unit that is drawn from what
the operator is given (`moved_products`): the same call gives the same bits, and another layout gives others. A test
that is green under it (`pytest --perturbed`) asks no equal bits of two layouts.
"""

import functools
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["PRODUCTS", "Perturbed", "asks_for_bits"]


def _products() -> Any:
    """Loads the kernels as code of PyTorch, which whoever watches Python code run passes over."""
    spec = importlib.util.spec_from_file_location("torch.moved_products", Path(__file__).with_name("moved_products.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_MOVED = _products()
PRODUCTS = _MOVED.PRODUCTS


class Perturbed:
    """Moves each result of a product by up to half a unit, by the layout of its operands, inside of a `with` block."""

    def __enter__(self) -> None:
        _MOVED.install()
        _MOVED.moves = True

    def __exit__(self, *error: object) -> None:
        _MOVED.moves = False

    @staticmethod
    def is_on() -> bool:
        """Whether results are moved, as they must be in a process that a test compares with its own."""
        return bool(_MOVED.moves)


def asks_for_bits(test: Any) -> bool:
    """Whether a test asks for equal bits: its code, or that of a function of the tests that it names, calls
    `torch.equal`, or compares with a tolerance that it chooses, as 0. A test of `Perturbed` itself does not."""
    if not isinstance(test, types.FunctionType) or "Perturbed" in test.__code__.co_names:
        return False
    return any(map(_compares_bits, _with_helpers(test)))


@functools.cache
def _with_helpers(test: types.FunctionType) -> tuple[types.FunctionType, ...]:
    found = {test: None}
    for each in (queue := [test]):
        named = (each.__globals__.get(name) for code in _codes(each.__code__) for name in code.co_names)
        for other in named:
            if isinstance(other, types.FunctionType) and other.__module__.startswith("tests.") and other not in found:
                found[other] = None
                queue.append(other)
    return tuple(found)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _compares_bits(function: types.FunctionType) -> bool:
    codes = list(_codes(function.__code__))
    keywords = {name for code in codes for const in code.co_consts if isinstance(const, tuple) for name in const
                if isinstance(name, str)}  # fmt: skip
    return any("equal" in code.co_names for code in codes) or "rtol" in keywords
