"""Distributes rows over micro-batches and ranks: host arithmetic, no trainer and no tensor.

Padding is skipped, so the cost of a micro-batch is its number of live tokens, and a prompt that its rows share counts
once. In every micro-batch, ranks wait for the longest of them. So bins, one for each micro-batch of each rank, are
filled with pieces (rows of one prompt), longest first, each piece into the shortest bin that has room for it. Then the
bins are sorted, and consecutive bins go to the ranks of one micro-batch: the remaining differences are between
micro-batches, where no rank waits.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..patching.body import MIN_SAVED

__all__ = ["Completion", "arranged", "imbalance", "live"]


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion.

    Attributes:
        prompt: an id that the rows of one prompt share, and no others.
        prompt_tokens: the number of live tokens of the prompt.
        completion_tokens: the number of live tokens of the completion.
    """

    prompt: int
    prompt_tokens: int
    completion_tokens: int


def live(rows: Iterable[Completion]) -> int:
    """Returns how many tokens a micro-batch computes: its live tokens, shared prompts once where sharing pays off."""
    rows = list(rows)
    every = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    saved = sum(row.prompt_tokens for row in rows) - sum({row.prompt: row.prompt_tokens for row in rows}.values())
    return every - saved if saved >= MIN_SAVED * every else every


def _filled(rows: Sequence[Completion], pieces: list[list[int]], rooms: list[int]) -> list[list[int]]:
    """Puts pieces into bins with room for so many rows each: those with most rows first, then the longest, each into
    the shortest bin with room for it. A piece that fits into none is cut to the largest room."""

    def tokens(piece: list[int]) -> int:
        shared = {rows[i].prompt: rows[i].prompt_tokens for i in piece}
        return sum(shared.values()) + sum(rows[i].completion_tokens for i in piece)

    bins: list[list[int]] = [[] for _ in rooms]
    loads, free = [0] * len(rooms), list(rooms)
    waiting = deque(sorted(pieces, key=lambda piece: (len(piece), tokens(piece)), reverse=True))
    size, shortest = 0, []
    while waiting:
        piece = waiting.popleft()
        if len(piece) != size:
            size, shortest = len(piece), [(loads[i], i) for i, room in enumerate(free) if room >= len(piece)]
            heapq.heapify(shortest)
        while shortest and free[shortest[0][1]] < size:
            heapq.heappop(shortest)
        if shortest:
            i = shortest[0][1]
            bins[i] += piece
            loads[i] += tokens(piece)
            free[i] -= size
            heapq.heapreplace(shortest, (loads[i], i))
        else:
            cut = max(free)
            waiting.extendleft((piece[cut:], piece[:cut]))
    return bins


def _pieces(rows: Sequence[Completion], most: int) -> list[list[int]]:
    """Splits the rows of each prompt into as few pieces of at most `most` rows as possible."""
    prompts: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        prompts.setdefault(row.prompt, []).append(i)
    pieces = []
    for alike in prompts.values():
        whole, rest = divmod(len(alike), most)
        pieces += _filled(rows, [[i] for i in alike], [most] * whole + [rest] * (rest > 0))
    return pieces


def arranged(rows: Sequence[Completion], ranks: int, slices: int) -> list[list[list[int]]]:
    """Returns the rows of each rank in each micro-batch, equally many everywhere, with as little waiting as possible.

    Rows of a prompt are all together, or fewer of them (half as many, down to one), whichever finishes first.

    Args:
        rows: the rows of all micro-batches of all ranks.
        ranks: the number of ranks.
        slices: the number of micro-batches of each rank.

    Returns:
        Indices of rows by micro-batch, rank and position.
    """
    size = len(rows) // (ranks * slices)
    ways, most = [], size
    while most:
        bins = _filled(rows, _pieces(rows, most), [size] * (ranks * slices))
        most //= 2
        bins.sort(key=lambda bin_: live(rows[i] for i in bin_), reverse=True)
        turns = [bins[i : i + ranks] for i in range(0, len(bins), ranks)]
        # Every second micro-batch is reversed, so that no rank has the longest bin of all of them.
        ways.append([turn[::-1] if number % 2 else turn for number, turn in enumerate(turns)])
    return min(ways, key=lambda way: _work(rows, way))


def _work(rows: Sequence[Completion], way: list[list[list[int]]]) -> tuple[int, int]:
    """Returns the tokens until all ranks have done all micro-batches, and those of the longest micro-batch."""
    longest = [max(live(rows[i] for i in bin_) for bin_ in micro_batch) for micro_batch in way]
    return sum(longest), max(longest)


def imbalance(loads: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Returns two ratios of the tokens of every micro-batch and rank: the longest rank over the mean, as ranks wait in
    each micro-batch, and the longest micro-batch of any rank over the mean."""
    longest, every = [max(ranks) for ranks in loads], [tokens for ranks in loads for tokens in ranks]
    mean = sum(every) / len(every)
    return sum(longest) / len(longest) / mean, max(longest) / mean
