"""The arguments of a layer's call, and its results: tensors apart from everything else."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...capture import SIMPLE, Refused
from ..body import PackedMask

__all__ = ["CallArguments", "Now", "outputs_of"]


@functools.cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that a forward takes by position, the module apart."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(forward).parameters.items() if p.kind in positional)[1:]


_MAPPINGS = (dict, UserDict)


class CallArguments:
    """The arguments of a call. `tensors` has the tensors with their paths. `rest` has all other values, which must be
    equal for a replay. `maps` has the dicts, to which a layer writes tensors for other layers."""

    __slots__ = ("_names", "_reads_mask", "args", "kwargs", "maps", "mask", "rest", "tensors")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reads_mask: bool
    ) -> None:
        self._reads_mask = reads_mask
        self.tensors: list[tuple[Any, torch.Tensor]] = []
        self.rest: list[Any] = []
        self.maps: list[Any] = []
        self.mask: Any = None
        self.args, self.kwargs, self._names = args, kwargs, _parameter_names(function)
        for i, value in enumerate(args):
            self._add(self._name(i), value)
        for name, value in kwargs.items():
            self._add(name, value)

    def _name(self, i: int) -> Any:
        return self._names[i] if i < len(self._names) else i

    def _add(self, path: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # A mask that attention alone reads is not copied.
            if path == "attention_mask" and not self._reads_mask:
                self.mask = value
                self.rest.append((path, "a mask", value.dim(), value.dtype))
            else:
                self.tensors.append((path, value))
        elif type(value) is PackedMask:
            self.mask = value
            self.rest.append((path, "a packed row"))
        elif type(value) in (tuple, list):
            for i, each in enumerate(value):
                self._add((path, i), each)
        elif isinstance(value, _MAPPINGS):
            self.rest.append((path, type(value), tuple(value)))
            self.maps.append(value)
            for name, each in value.items():
                self._add((path, name), each)
        elif isinstance(value, SIMPLE):
            self.rest.append((path, value))
        else:
            raise Refused(f"it is given {path} of type {type(value).__name__}")

    def key(self) -> tuple[Any, ...]:
        specs = [(path, t.shape, t.stride(), t.dtype, t.requires_grad) for path, t in self.tensors]
        return tuple(specs), tuple(self.rest)

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, list[dict[Any, Any]]]:
        """Calls a function with other tensors in the places of these.

        Returns:
            the result of the function, and the entries that it has written to each of `maps`.
        """
        at = {path: tensor for (path, _), tensor in zip(self.tensors, tensors, strict=True)}
        given: list[tuple[Any, dict[Any, Any]]] = []

        def put(path: Any, value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(put((path, i), each) for i, each in enumerate(value))
            if isinstance(value, _MAPPINGS):
                made = copy.copy(value)
                given.append((made, {}))
                known = given[-1][1]
                known.update({name: put((path, name), each) for name, each in value.items()})
                made.update(known)
                return made
            return at.get(path, value)

        args = [put(self._name(i), value) for i, value in enumerate(self.args)]
        out = function(*args, **{name: put(name, value) for name, value in self.kwargs.items()})
        if any(name not in made for made, known in given for name in known):
            raise Refused("it removes entries of a dict that it is given")
        return out, [{k: v for k, v in made.items() if k not in known or v is not known[k]} for made, known in given]


@dataclass(frozen=True)
class Now:
    """What a seam is called with at a replay: the mask, and the tensors of the call."""

    mask: Any
    tensors: Sequence[torch.Tensor]


def outputs_of(out: Any, written: list[dict[Any, Any]]) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Returns the tensors that a layer returns and writes to dicts, and a function `put(results, maps)`: it puts the
    results in the places of these tensors, also into the dicts, and returns them as the layer would."""
    leaves, spec = tree_flatten((out, written))
    at, count = [i for i, leaf in enumerate(leaves) if leaf is not None], len(leaves)
    tensors = [leaves[i] for i in at]
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            raise Refused(f"it returns {type(leaf).__name__}")

    def put(results: Sequence[torch.Tensor], maps: list[Any]) -> Any:
        filled: list[Any] = [None] * count
        for i, result in zip(at, results, strict=True):
            filled[i] = result
        returned, entries = tree_unflatten(filled, spec)
        for each, new in zip(maps, entries, strict=True):
            each.update(new)
        return returned

    return tensors, put
