"""Summaries of timed calls, and their comparison. Reports use this module without torch, so it does not import it."""

import math
from dataclasses import dataclass

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and minimum of the samples in milliseconds, and their number."""

    median: float
    q1: float
    q3: float
    least: float
    samples: int

    def slower_than(self, other: "Summary") -> bool:
        """Whether these calls are slower by more than the spread of both: the first quartile is above the other's
        third, and the median is more than 2% above the other's."""
        return self.q1 > other.q3 and self.median > 1.02 * other.median


def _quantile(ordered: list[float], share: float) -> float:
    """Interpolates linearly between the order statistics."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(samples: list[float]) -> Summary:
    """Summarises at least one sample."""
    if not samples:
        raise ValueError("samples: at least one is needed; got none")
    ordered = sorted(samples)
    median, q1, q3 = (_quantile(ordered, share) for share in (0.5, 0.25, 0.75))
    return Summary(median, q1, q3, ordered[0], len(ordered))
