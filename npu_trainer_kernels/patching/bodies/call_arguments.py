"""The arguments of a body's call, and its results: tensors apart from everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...capture import SIMPLE, Refused

__all__ = ["CallArguments", "outputs_of"]


class CallArguments:
    """The arguments of a call, which are given by name.

    Attributes:
        tensors: the tensors, with their names.
        rest: all other values, which must be equal for a replay.
    """

    __slots__ = ("_kwargs", "rest", "tensors")

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.rest: list[tuple[str, Any]] = []
        self._kwargs = kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                self.tensors.append((name, value))
            elif isinstance(value, SIMPLE):
                self.rest.append((name, value))
            else:
                raise Refused(f"it is given {name} of type {type(value).__name__}")

    def kinds(self) -> tuple[Any, ...]:
        """Returns what is equal for calls that may have the same graphs: everything but numbers and sizes."""
        return tuple((name, t.dim(), t.dtype, t.requires_grad) for name, t in self.tensors), tuple(self.rest)

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Calls a function with other tensors in the places of these."""
        return function(**{**self._kwargs, **{n: t for (n, _), t in zip(self.tensors, tensors, strict=True)}})


def outputs_of(out: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Returns the tensors of an output, and a function that returns the same output with others in their places."""
    leaves, spec = tree_flatten(out)
    at, count = [i for i, leaf in enumerate(leaves) if leaf is not None], len(leaves)
    tensors = [leaves[i] for i in at]
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            raise Refused(f"it returns {type(leaf).__name__}")

    def put(results: Sequence[torch.Tensor]) -> Any:
        filled: list[Any] = [None] * count
        for i, result in zip(at, results, strict=True):
            filled[i] = result
        return tree_unflatten(filled, spec)

    return tensors, put
