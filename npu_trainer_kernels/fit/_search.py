"""Searches for the largest micro-batch that fits."""

from collections.abc import Callable

__all__ = ["largest_batch", "most_tried"]

# The time of a simulated step grows with its tokens, since MLPs and heads loop over slices of them. So a batch has at
# most this many rows and tokens, but may always have the last number of rows, for long sequences of a small model.
_ROWS, _TOKENS, _LONG_ROWS = 1 << 10, 1 << 19, 16
# The limit of a guess / the largest batch that fits: the peak of a small batch may be mostly optimiser state, so an
# extrapolation from two of them may be far off.
_FURTHEST = 8


def most_tried(tokens: int) -> int:
    """Returns the largest micro-batch of sequences of so many tokens that is tried; if it fits, more may fit."""
    return min(_ROWS, max(_LONG_ROWS, _TOKENS // tokens))


def largest_batch(peak: Callable[[int], int], memory: int, most: int) -> int:
    """Returns the largest micro-batch up to `most` whose peak is at most `memory`; 0 if one sequence does not fit.

    Peaks grow almost linearly with the batch, so two of them predict where the peak reaches the memory. The search has
    evaluated the batch that it returns, which fits, and, unless that is `most`, the next larger one, which does not.

    Args:
        peak: returns the peak bytes of a micro-batch, which must not decrease; it is called once for each.
        memory: the available bytes.
        most: the largest micro-batch that is tried; at least 1.
    """
    known: dict[int, int] = {}

    def fits(batch: int) -> bool:
        known[batch] = peak(batch)
        return known[batch] <= memory

    if not fits(1):
        return 0
    good, bad = 1, most + 1
    guess = 2
    while bad - good > 1:
        if fits(guess):
            good = guess
        else:
            bad = guess
        # Extrapolate linearly from the largest batch that fits and the nearest other one that was evaluated.
        other = bad if bad in known else max((b for b in known if b < good), default=good)
        slope = (known[good] - known[other]) / (good - other) if other != good else 0.0
        ahead = int((memory - known[good]) / slope) if slope > 0 else good
        guess = min(max(good + ahead, good + 1), bad - 1, _FURTHEST * good)
    return good
