"""The largest micro-batch that fits."""

from collections.abc import Callable

__all__ = ["MOST", "largest_batch"]

MOST = 1 << 12
"""A micro-batch beyond which nobody asks."""
# Of a small batch the optimiser's state may be all, so that two of them say little of a third.
_FURTHEST = 8


def largest_batch(peak: Callable[[int], int], memory: int) -> int:
    """The largest micro-batch whose peak is at most `memory`; 0 where one sequence is too much.

    Peaks grow with the batch nearly in a line, so two of them say where it meets the memory. What is returned was
    asked for and fits, and one more was asked for and does not.

    Args:
        peak: bytes of a micro-batch; does not fall from one to the next. Asked once for each.
        memory: bytes that there are.
    """
    known: dict[int, int] = {}

    def fits(batch: int) -> bool:
        known[batch] = peak(batch)
        return known[batch] <= memory

    if not fits(1):
        return 0
    good, bad = 1, MOST + 1
    guess = 2
    while bad - good > 1:
        if fits(guess):
            good = guess
        else:
            bad = guess
        # The line through the largest that fits and its nearest neighbour that is known.
        other = bad if bad in known else max((b for b in known if b < good), default=good)
        slope = (known[good] - known[other]) / (good - other) if other != good else 0.0
        ahead = int((memory - known[good]) / slope) if slope > 0 else good
        guess = min(max(good + ahead, good + 1), bad - 1, _FURTHEST * good)
    return good
