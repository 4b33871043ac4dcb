"""The lengths of sequences in workloads whose batches have padding."""

import math
from collections.abc import Iterable

__all__ = ["DISTRIBUTIONS", "lengths", "prompt_lengths"]

# A distribution of completion lengths when a model answers freely, up to a maximum at which completions are cut.
_MEAN, _LEAST = 0.4, 0.05
_EVEN_LEAST = 9 / 16
_PROMPT_LEAST = 1 / 4

DISTRIBUTIONS = {
    "exponential": f"exponential, mean {_MEAN} of the maximum, clipped to {_LEAST} to 1 of it: 37% of the maximum",
    "even": "uniform from 9/16 of the maximum to the maximum: 78% of the maximum",
}


def _quantile(distribution: str, point: float) -> float:
    """Returns a quantile as a fraction of the maximum."""
    if distribution == "exponential":
        return min(1.0, max(_LEAST, -_MEAN * math.log(1 - point)))
    if distribution == "even":
        return _EVEN_LEAST + (1 - _EVEN_LEAST) * point
    raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}; got {distribution!r}")


def lengths(distribution: str, points: Iterable[float], longest: int) -> list[int]:
    """Returns the quantiles of a distribution at points of [0, 1), as lengths of 1 to `longest` tokens.

    Raises:
        ValueError: the distribution is unknown.
    """
    return [max(1, round(longest * _quantile(distribution, point))) for point in points]


def prompt_lengths(points: Iterable[float], longest: int) -> list[int]:
    """Returns the lengths of prompts, uniform from a quarter of the longest to the longest; 0: there are no prompts."""
    shares = (_PROMPT_LEAST + (1 - _PROMPT_LEAST) * point for point in points)
    return [min(longest, max(1, round(longest * share))) for share in shares]
