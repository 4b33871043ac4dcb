"""How long sequences are in the workloads whose batches have padding.

Lengths are not drawn: they are the distribution's quantiles at the middles of equal parts, in random order. So a batch
of eight rows has what eight rows have on average, and the share of positions that are tokens does not depend on luck.
"""

import math
import random

__all__ = ["DISTRIBUTIONS", "lengths", "prompt_lengths"]

# How long completions are when a model answers as it likes, up to a maximum at which they are cut.
_MEAN, _LEAST = 0.4, 0.05
_EVEN_LEAST = 9 / 16

DISTRIBUTIONS = {
    "exponential": f"exponential, mean {_MEAN} of the maximum, clipped to {_LEAST} to 1 of it: 37% of the maximum",
    "even": "evenly spaced from 9/16 of the maximum to the maximum: 78% of the maximum",
}


def _quantile(distribution: str, index: int, count: int) -> float:
    """Of the maximum."""
    if distribution == "exponential":
        return min(1.0, max(_LEAST, -_MEAN * math.log(1 - (index + 0.5) / count)))
    if distribution == "even":
        return 1.0 if count == 1 else _EVEN_LEAST + (1 - _EVEN_LEAST) * index / (count - 1)
    raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}; got {distribution!r}")


def lengths(distribution: str, count: int, longest: int, seed: int = 3) -> list[int]:
    """Lengths of `count` sequences of at most `longest` tokens, at least one, in an order that the seed decides.

    Raises:
        ValueError: no such distribution.
    """
    found = [max(1, round(longest * _quantile(distribution, i, count))) for i in range(count)]
    random.Random(seed).shuffle(found)
    return found


def prompt_lengths(count: int, longest: int) -> list[int]:
    """Lengths of different prompts, evenly spaced up to the longest."""
    return [max(1, round(longest * (i + 1) / count)) for i in range(count)]
