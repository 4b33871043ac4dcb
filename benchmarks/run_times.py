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
    """Returns the fields of a row about time.

    Args:
        seconds: the times of all steps except the first.
        live: the tokens of all steps.
        positions: the positions of all steps, padding included.
        busy_ms: how long the device is busy in a step; None: that is not known.
    """
    steps = len(seconds) + 1
    each = [1e3 * second for second in seconds]
    settled = after(steps, SETTLED)
    mean, tokens = fmean(each[settled - 1 :]), fmean(live[settled:steps])
    return {
        "ms": as_json(summarise(each[after(steps, steps) - 1 :])),
        "mean_ms": mean, "mean_all_ms": fmean(each[after(steps, _STARTED) - 1 :]), "each_ms": each,
        "busy_ms": busy_ms, "busy_ratio": mean / busy_ms if busy_ms else None, "tokens": tokens,
        "positions": fmean(positions[settled:steps]), "live_share": sum(live[settled:steps]) / sum(positions[settled:steps]),
        "tokens_per_second": tokens / mean * 1e3,
    }  # fmt: skip
