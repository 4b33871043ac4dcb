"""The lengths of sequences in workloads whose batches have padding.

Lengths are not sampled: they are the distribution's quantiles at the middles of equal parts, in random order. A batch
of eight rows therefore has the average lengths of eight rows, and its fraction of live positions is not random.
"""

import math
import random

__all__ = ["DISTRIBUTIONS", "lengths", "prompt_lengths"]

# A distribution of completion lengths when a model answers freely, up to a maximum at which completions are cut.
_MEAN, _LEAST = 0.4, 0.05
_EVEN_LEAST = 9 / 16

DISTRIBUTIONS = {
    "exponential": f"exponential, mean {_MEAN} of the maximum, clipped to {_LEAST} to 1 of it: 37% of the maximum",
    "even": "evenly spaced from 9/16 of the maximum to the maximum: 78% of the maximum",
}


def _quantile(distribution: str, index: int, count: int) -> float:
    """Returns a quantile as a fraction of the maximum."""
    if distribution == "exponential":
        return min(1.0, max(_LEAST, -_MEAN * math.log(1 - (index + 0.5) / count)))
    if distribution == "even":
        return 1.0 if count == 1 else _EVEN_LEAST + (1 - _EVEN_LEAST) * index / (count - 1)
    raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}; got {distribution!r}")


def lengths(distribution: str, count: int, longest: int, seed: int = 3) -> list[int]:
    """Returns the lengths of `count` sequences, each of 1 to `longest` tokens, in an order that depends on the seed.

    Raises:
        ValueError: the distribution is unknown.
    """
    found = [max(1, round(longest * _quantile(distribution, i, count))) for i in range(count)]
    random.Random(seed).shuffle(found)
    return found


def prompt_lengths(count: int, longest: int) -> list[int]:
    """Returns the lengths of different prompts, evenly spaced up to the longest."""
    return [max(1, round(longest * (i + 1) / count)) for i in range(count)]
