"""Fewer cases than a product of parameters has, in which every two values of two parameters still meet."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["pairs"]


def pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value each, such that of any two parameters every pair of values is in some row.

    A fault shows where two things meet: a dtype's rounding and an option, a mask and a shape. A product tries each such
    pair again with every value of a third parameter.
    """
    rows = list(itertools.product(*(range(len(each)) for each in values)))
    if len(values) < 2:
        return [tuple(each[i] for each, i in zip(values, row, strict=True)) for row in rows]
    places = list(itertools.combinations(range(len(values)), 2))
    open_pairs = {(a, b, row[a], row[b]) for row in rows for a, b in places}
    chosen: list[tuple[int, ...]] = []
    used: Counter[tuple[int, int]] = Counter()

    def worth(row: tuple[int, ...]) -> tuple[int, int]:
        new = sum((a, b, row[a], row[b]) in open_pairs for a, b in places)
        return new, -sum(used[at] for at in enumerate(row))  # every value about as often as another

    while open_pairs:
        best = max(rows, key=worth)
        chosen.append(best)
        used.update(enumerate(best))
        open_pairs -= {(a, b, best[a], best[b]) for a, b in places}
    return [tuple(each[i] for each, i in zip(values, row, strict=True)) for row in sorted(chosen)]
