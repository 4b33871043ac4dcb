"""The largest micro-batch that fits."""

from collections.abc import Callable

__all__ = ["largest_batch", "most_tried"]

# A step takes the longer the more tokens it has: MLPs and heads go through them in slices. So no more are tried than
# these, though at least so many rows, as a small model may have of long ones.
_ROWS, _TOKENS, _LONG_ROWS = 1 << 10, 1 << 19, 16
# Of a small batch the optimiser's state may be all, so that two of them say little of a third.
_FURTHEST = 8


def most_tried(tokens: int) -> int:
    """The largest micro-batch that is worth a try, of sequences of so many tokens; where it fits, more may fit."""
    return min(_ROWS, max(_LONG_ROWS, _TOKENS // tokens))


def largest_batch(peak: Callable[[int], int], memory: int, most: int) -> int:
    """The largest micro-batch up to `most` whose peak is at most `memory`; 0 where one sequence is too much.

    Peaks grow with the batch nearly in a line, so two of them say where it meets the memory. What is returned was
    asked for and fits, and one more was asked for and does not, unless it is `most`.

    Args:
        peak: bytes of a micro-batch; does not fall from one to the next. Asked once for each.
        memory: bytes that there are.
        most: beyond it nothing is asked for; at least 1.
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
        # The line through the largest that fits and its nearest neighbour that is known.
        other = bad if bad in known else max((b for b in known if b < good), default=good)
        slope = (known[good] - known[other]) / (good - other) if other != good else 0.0
        ahead = int((memory - known[good]) / slope) if slope > 0 else good
        guess = min(max(good + ahead, good + 1), bad - 1, _FURTHEST * good)
    return good
