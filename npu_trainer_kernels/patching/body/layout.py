"""Packs a padded batch into one row of live tokens: host arithmetic, no model and no device.

Rows that share a prefix, at the same columns, are stored as a tree. A node is a run of tokens that its rows have in
common; its tokens are computed once, and attend to the tokens on the path from the root, as they would in each row.
Without sharing every row is a node by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["DEAD", "MIN_SAVED", "PREDICTS", "READ", "Layout", "layout"]

DEAD, PREDICTS, READ = -1, -2, -3
"""Codes in place of an id: a position without a token, one without a token whose label must be predicted nevertheless,
and one that a classifier, which goes by ids, may read."""

MIN_SAVED = 0.1
"""The fraction of live tokens that sharing must save to be used: keys and values of a shared prefix are copied for each
of its rows. Below this an H200 was not faster, from here on it was where the device's time counts
(`benchmarks/results/2026-11-22-nvidia-h200-seventh-round-sharing.json`)."""
_MIN_NODE = 8


@dataclass(frozen=True)
class Layout:
    """The mapping between the positions of a batch [B, L] and the tokens of its packed row [n].

    Attributes:
        places: `[n]`, the position of each packed token in the flattened batch.
        lengths: the number of queries of each segment.
        key_lengths: the number of keys that each segment attends to.
        keys: `[sum(key_lengths)]`, the packed token of each of those keys; None: they are the segments' own tokens.
        tokens: `[B * L]`, the packed token of each position of the flattened batch, -1 where there is none.
        live: the number of positions with a token.
    """

    places: np.ndarray
    lengths: list[int]
    key_lengths: list[int]
    keys: np.ndarray | None
    tokens: np.ndarray
    live: int


@dataclass(frozen=True)
class _Node:
    """Columns `begin` to `end` of `rows`, of which `row` is the first, and the nodes on the path from the root."""

    row: int
    begin: int
    end: int
    rows: tuple[int, ...]
    path: tuple[int, ...]


def _tree(first: list[int], last: list[int], ids: np.ndarray) -> Iterator[_Node]:
    """Yields the nodes of all rows, parents before their children."""
    order = sorted(range(len(first)), key=lambda b: (first[b], ids[b, first[b] : last[b]].astype(">i8").tobytes()))
    # The column up to which a row equals the one before it.
    alike = [0] * len(order)
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        if first[a] == first[b]:
            end = min(last[a], last[b])
            differs = ids[a, first[a] : end] != ids[b, first[a] : end]
            alike[i] = first[a] + (int(differs.argmax()) if differs.any() else len(differs))
    begins = [0, *(i for i in range(1, len(order)) if alike[i] <= first[order[i]]), len(order)]
    # A stack of groups of rows with a common prefix: where a group begins and ends in the order, the column to go on
    # from, and the nodes before it. The last group is next, so that children follow their parents.
    left: list[tuple[int, int, int, tuple[int, ...]]] = []
    left += [(low, high, first[order[low]], ()) for high, low in itertools.pairwise(reversed(begins))]
    count = 0
    while left:
        low, high, begin, path = left.pop()
        rows = tuple(order[low:high])
        end = last[rows[0]] if len(rows) == 1 else min(alike[low + 1 : high])
        worth = (len(rows) - 1) * (end - begin) >= _MIN_NODE
        if end > begin and (len(rows) == 1 or worth):
            yield _Node(rows[0], begin, end, rows, path)
            path, begin, count = (*path, count), end, count + 1
        if len(rows) > 1:
            cuts = [low, *(i for i in range(low + 1, high) if alike[i] <= end), high]
            left += [(a, b, begin, path) for b, a in itertools.pairwise(reversed(cuts))]


def layout(ids: np.ndarray, *, share: bool) -> Layout | str:
    """Returns the layout of a batch.

    Args:
        ids: [B, L], the tokens' ids; `DEAD`, `PREDICTS` or `READ` where there is no token.
        share: whether tokens of a common prefix are stored once.

    Returns:
        The layout, or a sentence that says why there is none.
    """
    batch, width = ids.shape
    alive = ids >= 0
    counts = alive.sum(1)
    live = int(counts.sum())
    if live == 0:
        return "no token is live"
    if (ids == PREDICTS).any():
        return "labels are predicted at positions of padding"
    if (ids == READ).any():
        return "the classifier finds its token by ids, and the token may be padding"
    begin = alive.argmax(1)
    rows = np.flatnonzero(counts)
    first, last = begin.tolist(), (begin + counts).tolist()
    if any(not alive[b, first[b] : last[b]].all() for b in rows):
        return "the mask of a row has a gap"
    nodes = [_Node(b, first[b], last[b], (b,), ()) for b in rows.tolist()]
    if share:
        tree = [
            _Node(int(rows[node.row]), node.begin, node.end, tuple(int(rows[b]) for b in node.rows), node.path)
            for node in _tree([first[b] for b in rows], [last[b] for b in rows], ids[rows])
        ]
        if live - sum(node.end - node.begin for node in tree) >= MIN_SAVED * live:
            nodes = tree
    starts = np.cumsum([0, *(node.end - node.begin for node in nodes)]).tolist()
    places = np.concatenate([np.arange(node.row * width + node.begin, node.row * width + node.end) for node in nodes])
    tokens = np.full((batch, width), -1, np.int64)
    for node, start in zip(nodes, starts, strict=False):
        tokens[list(node.rows), node.begin : node.end] = np.arange(start, start + node.end - node.begin)
    lengths = [node.end - node.begin for node in nodes]
    paths = [[*node.path, i] for i, node in enumerate(nodes)]
    shared = any(node.path for node in nodes)
    keys = np.concatenate([np.arange(starts[i], starts[i + 1]) for path in paths for i in path]) if shared else None
    return Layout(places, lengths, [sum(lengths[i] for i in path) for path in paths], keys, tokens.reshape(-1), live)
