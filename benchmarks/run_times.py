"""The figures of a run, from the times and the tokens of its steps."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from .measure import as_json, summarise

__all__ = ["LEAST_STEPS", "SETTLED", "after", "figures"]

# The first step's beginning is not recorded.
LEAST_STEPS = 2
# The steps before the first one that counts in `mean_ms`, and in `mean_all_ms`, of a run that is long enough.
SETTLED, _STARTED = 10, 3


def after(steps: int, first: int) -> int:
    """Returns how many of a run's steps do not count if the first ones do not: at most half of all."""
    return min(first, steps // 2)


def figures(
    seconds: Sequence[float], live: Sequence[int], positions: Sequence[int], busy_ms: float | None
) -> dict[str, Any]:
    """Returns the fields of a row about time. Of a run that is too short for a field, the second half counts.

    ms           median and quartiles of the second half of the steps;
    mean_ms      the mean of the steps after the tenth, by which the tokens per second are;
    mean_all_ms  the mean of the steps after the third;
    each_ms      the steps one by one;
    busy_ratio   `mean_ms` divided by `busy_ms`.

    Args:
        seconds: the times of all steps except the first.
        live: the tokens of all steps.
        positions: the positions of all steps, padding included.
        busy_ms: how long the device is busy in a step; None: that is not known.
    """
    steps = len(seconds) + 1
    each = [1e3 * second for second in seconds]
    settled = after(steps, SETTLED)
    mean = fmean(each[settled - 1 :])
    tokens, with_padding = (fmean(counts[settled:steps]) for counts in (live, positions))
    return {
        "ms": as_json(summarise(each[after(steps, steps) - 1 :])),
        "mean_ms": mean, "mean_all_ms": fmean(each[after(steps, _STARTED) - 1 :]), "each_ms": each,
        "busy_ms": busy_ms, "busy_ratio": None if busy_ms is None else mean / busy_ms, "tokens": tokens,
        "positions": with_padding, "live_share": tokens / with_padding, "tokens_per_second": tokens / mean * 1e3,
    }  # fmt: skip
