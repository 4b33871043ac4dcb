"""What rounding does to a computation, asked for instead of hoped for.

Which way one run's rounding goes is a matter of the processor's order of summation. Moved at random at every operator,
by about as much as rounding moves it, a computation shows how far rounding may carry its results on any processor.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["SEEDS", "Rounded", "rounded"]

T = TypeVar("T")

SEEDS = 4
# Another stream of numbers than that which a small seed gives the tensors that are computed with.
_STREAM = 0x526F756E64

_aten = torch.ops.aten
# The values that these return stand in an argument, bit by bit.
_EXACT = {
    _aten._unsafe_view, _aten.clone, _aten.copy_, _aten.cat, _aten.stack, _aten.index, _aten.index_select,
    _aten.gather, _aten.scatter, _aten.embedding, _aten.masked_fill, _aten.masked_select, _aten.where,
    _aten.constant_pad_nd, _aten.repeat, _aten.roll, _aten.flip, _aten.neg, _aten.abs, _aten.relu, _aten.clamp,
    _aten.clamp_min, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.maximum, _aten.minimum, _aten.topk, _aten.sort,
    _aten.zero_, _aten.fill_, _aten.new_zeros, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_full,
    _aten.empty_like, _aten.new_empty, _aten.slice_backward, _aten.select_backward, _aten.threshold_backward,
    _aten._local_scalar_dense, _aten.index_put_, _aten.triu, _aten.tril, _aten.clamp_, _aten.clamp_min_, _aten.relu_,
    _aten.neg_, _aten.abs_, _aten.masked_fill_, _aten.scatter_, _aten.index_copy_,
    # These return places, which a moved argument would exchange.
    _aten.argmax, _aten.argmin, _aten.argsort, _aten.nonzero, _aten.searchsorted, _aten.bucketize, _aten.multinomial,
}  # fmt: skip
# An operator that is not pointwise adds: each term is rounded where it is added. Terms of 16 bits are added in fp32,
# whose rounding does not count beside theirs.
_ADDED = (torch.float32, torch.float64)
# What ranks share out (DTensor) stays as it is: each would move its part of a whole.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Rounded(TorchDispatchMode):
    """Moves every floating result of an operator, forward and backward, by a random part of a unit.

        x  ->  x (1 + eps u),    u uniform in [-1/2, 1/2), eps of the dtype of x, rounded to that dtype

    The fp32 arguments of an operator that adds (a product, a sum, a softmax and its backward) move likewise, since each
    term is rounded: of terms that cancel much more is left than a unit of the result, and how much depends on the order
    in which a processor adds. Integers stay: what counts in floats is exact.

    A value that is exact in one run moves, too: a probability of one is one by the luck of its sum. What only takes
    values from elsewhere (views, copies, gathers) does not. Works on any device and in any dtype, fp64 is not needed;
    the random state of torch is not touched.

    Args:
        seed: of the moves; the same on one device gives the same ones.
        in_place: whether what an operator writes in place moves, too. It may be a parameter.
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
        if adds and not counts and not func._schema.is_mutable:  # it writes to what it is given
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
        self._move(copied)
        return copied

    def _move(self, value: torch.Tensor) -> None:
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(_STREAM + self._seed)
        u = torch.rand(value.shape, generator=generator, device=value.device) - 0.5
        # Added, not as a factor of 1 + eps u, of which nothing but 1 - eps / 2 and 1 would be left.
        moved = value + value * (torch.finfo(value.dtype).eps * u).to(value.dtype)
        value.copy_(torch.where(moved.isfinite(), moved, value))


def _rounds(func: Any, given: Sequence[torch.Tensor], in_place: bool) -> bool:
    """Whether what an operator returns has been computed, and is no argument's memory."""
    if func.overloadpacket in _EXACT or not any(value.is_floating_point() for value in given):
        return False
    return all(r.alias_info is None or (in_place and r.alias_info.is_write) for r in func._schema.returns)


def _are_integers(values: Sequence[torch.Tensor]) -> bool:
    """Whether floats are all integers: what counts with floats (positions, of a mask) is exact on every processor. One
    number of each is looked at first."""
    floats = [value for value in values if value.is_floating_point() and value.numel()]
    return all(_is_integer(v[(0,) * v.dim()]) for v in floats) and all(map(_is_integer, floats))


def _is_integer(value: torch.Tensor) -> bool:
    return bool((value == value.round()).all())


def rounded(run: Callable[[], T]) -> list[T]:
    """What `run` returns under each of `SEEDS` roundings."""
    found = []
    for seed in range(SEEDS):
        with Rounded(seed):
            found.append(run())
    return found
