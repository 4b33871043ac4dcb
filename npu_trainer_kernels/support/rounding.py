"""Measures how far rounding can move the results of a computation.

In a single run the processor's order of summation decides the rounding errors. `Rounded` changes the result of every
operator at random, by about as much as rounding does, which shows how far the results may move on any processor.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["SEEDS", "Rounded", "rounded"]

T = TypeVar("T")

# A single number (the gradient of a scalar) has one error in each run. If errors were normal, one number in 170 would
# have an error of more than twice the largest of these runs and the unchanged one; with four roundings one in 40.
SEEDS = 8
# Added to the seed, so that the random numbers differ from those that a small seed gives for the test's tensors.
_STREAM = 0x526F756E64

_aten = torch.ops.aten
# These operators return values of their arguments without rounding.
_EXACT = {
    _aten._unsafe_view, _aten.clone, _aten.copy_, _aten.cat, _aten.stack, _aten.index, _aten.index_select,
    _aten.gather, _aten.scatter, _aten.embedding, _aten.masked_fill, _aten.masked_select, _aten.where,
    _aten.constant_pad_nd, _aten.repeat, _aten.roll, _aten.flip, _aten.neg, _aten.abs, _aten.relu, _aten.clamp,
    _aten.clamp_min, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.maximum, _aten.minimum, _aten.topk, _aten.sort,
    _aten.zero_, _aten.fill_, _aten.new_zeros, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_full,
    _aten.empty_like, _aten.new_empty, _aten.slice_backward, _aten.select_backward, _aten.threshold_backward,
    _aten._local_scalar_dense, _aten.index_put_, _aten.triu, _aten.tril, _aten.clamp_, _aten.clamp_min_, _aten.relu_,
    _aten.neg_, _aten.abs_, _aten.masked_fill_, _aten.scatter_, _aten.index_copy_,
    # These return indices, which a changed argument would exchange.
    _aten.argmax, _aten.argmin, _aten.argsort, _aten.nonzero, _aten.searchsorted, _aten.bucketize, _aten.multinomial,
}  # fmt: skip
# An operator that is not pointwise computes sums, and rounds each term as it adds it. 16-bit terms are added in fp32,
# whose rounding is negligible compared with theirs.
_ADDED = (torch.float32, torch.float64)
# DTensors are not changed, because each rank would change its part differently.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Rounded(TorchDispatchMode):
    """Changes every floating-point result of an operator, forward and backward, by a random fraction of a unit.

        x  ->  x (1 + eps u),    u uniform in [-1/2, 1/2), eps of the dtype of x, rounded to that dtype

    The fp32 arguments of an operator that sums (a product, a sum, a softmax and its backward) change likewise, because
    each term is rounded: terms that cancel leave much more than a unit of the result, and how much depends on the order
    in which a processor adds. Integers do not change, even in floating-point tensors, because counts are exact.

    A value that is exact in one run changes, too: a probability is exactly one only by the luck of its sum. Operators
    that only move values (views, copies, gathers) do not change them. The mode works on any device and in any dtype,
    does not need fp64, and does not change torch's random state.

    Args:
        seed: the seed of the changes; equal seeds on one device give equal changes.
        in_place: whether to change tensors that an operator writes in place, which may be parameters.
    """

    def __init__(self, seed: int, *, in_place: bool = True) -> None:
        super().__init__()
        self._seed, self._in_place = seed, in_place
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not _rounds(func, given, self._in_place):
            return func(*args, **kwargs)
        counts = _are_integers(given)
        adds = torch.Tag.pointwise not in func.tags
        if adds and not counts and not func._schema.is_mutable:  # a mutable operator must get the original tensors
            args, kwargs = tree_map_only(torch.Tensor, self._moved, (args, kwargs))
        result = func(*args, **kwargs)
        found = [v for v in tree_leaves(result) if type(v) in _PLAIN and v.is_floating_point()]
        if not (counts and _are_integers(found)):
            for value in found:
                self._move(value)
        return result

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in _ADDED or type(value) not in _PLAIN:
            return value
        copied = value.clone()
        # A mask whose rows are padded in memory must stay so: attention on CUDA demands it.
        if copied.stride() != value.stride():
            return value
        self._move(copied)
        return copied

    def _move(self, value: torch.Tensor) -> None:
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(_STREAM + self._seed)
        u = torch.rand(value.shape, generator=generator, device=value.device) - 0.5
        # Add value * eps u: a factor 1 + eps u would be rounded to 1 - eps / 2 or 1.
        moved = value + value * (torch.finfo(value.dtype).eps * u).to(value.dtype)
        value.copy_(torch.where(moved.isfinite(), moved, value))


def _rounds(func: Any, given: Sequence[torch.Tensor], in_place: bool) -> bool:
    """Whether an operator computes its result with rounding, and does not return the memory of an argument."""
    if func.overloadpacket in _EXACT or not any(value.is_floating_point() for value in given):
        return False
    return all(r.alias_info is None or (in_place and r.alias_info.is_write) for r in func._schema.returns)


def _are_integers(values: Sequence[torch.Tensor]) -> bool:
    """Whether all floating-point values are integers: counts (positions from a mask) are exact on every processor. It
    tests one value of each tensor first."""
    floats = [value for value in values if value.is_floating_point() and value.numel()]
    return all(_is_integer(v[(0,) * v.dim()]) for v in floats) and all(map(_is_integer, floats))


def _is_integer(value: torch.Tensor) -> bool:
    return bool((value == value.round()).all())


def rounded(run: Callable[[], T]) -> list[T]:
    """Returns the results of `run` under each of `SEEDS` random roundings."""
    found = []
    for seed in range(SEEDS):
        with Rounded(seed):
            found.append(run())
    return found
