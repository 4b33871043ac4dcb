"""How a padded batch becomes one row: every token sees what its own row had before it, and nothing is there twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_trainer_kernels.patching.body.layout import DEAD, MIN_SAVED, PREDICTS, Layout, layout


def batch_of(*rows: str) -> np.ndarray:
    """Ids of rows of letters, where a dot is a place without a token."""
    return np.array([[DEAD if letter == "." else ord(letter) for letter in row] for row in rows], np.int64)


def seen_in(found: Layout, width: int) -> dict[int, list[tuple[int, int]]]:
    """For each packed token what it sees, itself last, as (row, column) of the batch; token by token from the meaning
    of the fields, and from nothing that the layout was made with."""
    seen = {}
    first_query = first_key = 0
    for queries, keys in zip(found.lengths, found.key_lengths, strict=True):
        for i in range(queries):
            packed = []
            for j in range(keys - queries + i + 1):
                packed.append(first_key + j if found.keys is None else int(found.keys[first_key + j]))
            seen[first_query + i] = [divmod(int(found.places[p]), width) for p in packed]
        first_query, first_key = first_query + queries, first_key + keys
    return seen


def check(ids: np.ndarray, found: Layout) -> None:
    """Every live place has a packed token which sees that row's tokens up to it, at their columns, in their order."""
    assert isinstance(found, Layout), found
    batch, width = ids.shape
    assert len(found.lengths) == len(found.key_lengths)
    assert min(found.lengths) > 0
    assert sum(found.lengths) == len(found.places) == len(set(found.places.tolist()))
    if found.keys is None:
        assert found.lengths == found.key_lengths
    else:
        assert sum(found.key_lengths) == len(found.keys)
    seen, used = seen_in(found, width), set()
    for b in range(batch):
        before = []
        for c in range(width):
            token = int(found.tokens[b * width + c])
            if ids[b, c] < 0:
                assert token == -1, f"padding at row {b}, column {c} has token {token}"
                continue
            before.append((c, int(ids[b, c])))
            used.add(token)
            sees = [(column, int(ids[row, column])) for row, column in seen[token]]
            assert sees == before, f"row {b}, column {c}"
    assert used == set(range(len(found.places)))
    assert found.live == int((ids >= 0).sum())


def distinct(ids: np.ndarray) -> int:
    """How many beginnings the rows have, at their columns: what no layout can do with less."""
    beginnings = set()
    for row in ids:
        so_far: tuple[tuple[int, int], ...] = ()
        for c in np.flatnonzero(row >= 0):
            so_far = (*so_far, (int(c), int(row[c])))
            beginnings.add(so_far)
    return len(beginnings)


def test_rows_that_each_go_on_from_the_one_before_are_no_depth():
    """As deep as Python's stack is not."""
    found = layout(np.where(np.tri(1050, dtype=bool), 7, DEAD), share=True)
    assert isinstance(found, Layout)
    assert max(found.key_lengths) == 1050
    assert len(found.places) < 1100


@st.composite
def batches(draw) -> np.ndarray:
    """Rows that continue beginnings of other rows, of unequal lengths, each begun at one of a few columns."""
    width = draw(st.integers(1, 40))
    letters = st.integers(0, draw(st.integers(0, 2)))
    rows: list[list[int]] = [[]]
    starts = [0]
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(0, len(rows) - 1))
        kept = draw(st.integers(0, len(rows[parent])))
        start = starts[parent] if draw(st.booleans()) else draw(st.integers(0, width))
        row = [*rows[parent][:kept], *draw(st.lists(letters, max_size=width))][: width - start]
        rows.append(row)
        starts.append(start)
    ids = np.full((len(rows), width), DEAD, np.int64)
    for b, (start, row) in enumerate(zip(starts, rows, strict=True)):
        ids[b, start : start + len(row)] = row
    return ids


@settings(deadline=None, max_examples=200, derandomize=True)
@given(batches())
def test_every_token_sees_what_its_row_had_before_it(ids):
    for share in (False, True):
        found = layout(ids, share=share)
        if not (ids >= 0).any():
            assert found == "no token is live"
            continue
        check(ids, found)
        assert distinct(ids) <= len(found.places) <= found.live
        if not share:
            assert len(found.places) == found.live


@settings(deadline=None, max_examples=50, derandomize=True)
@given(batches())
def test_the_same_batch_gives_the_same_layout(ids):
    first, second = layout(ids, share=True), layout(ids.copy(), share=True)
    if isinstance(first, str):
        assert first == second
        return
    assert first.lengths == second.lengths
    assert first.key_lengths == second.key_lengths
    assert np.array_equal(first.places, second.places)


# rows -> lengths of the segments' queries, and of the keys that each sees
TREES = {
    "a prompt that all rows share": (
        ["..promptAbcdefghij", "..promptBcd.......", "..promptCdefgh...."],
        [(6, 6), (10, 16), (3, 9), (6, 12)],
    ),
    "two prompts": (
        ["promptoneX..", "promptoneYz.", "otherprompt1", "otherpromp2."],
        [(9, 9), (1, 10), (2, 11), (10, 10), (2, 12), (1, 11)],
    ),
    "a system prompt, and below it two questions": (
        ["systempromptquestionA1.", "systempromptquestionA2x", "systempromptdemandBBB3.", "systempromptdemandBBB4y"],
        [(12, 12), (9, 21), (1, 22), (2, 23), (9, 21), (1, 22), (2, 23)],
    ),
    "a row that is the beginning of another": (["beginninganend", "beginning....."], [(9, 9), (5, 14)]),
    "rows that are the same": (["thesamerow", "thesamerow", "thesamerow"], [(10, 10)]),
    "the same words at other columns": (["..thesamewords", "thesamewords.."], [(12, 12), (12, 12)]),
    "a beginning that is too short to be stored": (["shortABCDEFGH", "shortIJKLMNOP"], [(13, 13), (13, 13)]),
    "seven tokens that are saved": (["sevenAA12", "sevenAA34"], [(9, 9), (9, 9)]),
    "eight tokens that are saved": (["eightAAA12", "eightAAA34"], [(8, 8), (2, 10), (2, 10)]),
    "a row without a live token": (["promptsoA..", "...........", "promptsoBcd"], [(8, 8), (1, 9), (3, 11)]),
    "one live token": (["....x...."], [(1, 1)]),
    "one live token in each row": (["....x....", "x........"], [(1, 1), (1, 1)]),
    "nothing to drop": (["abcdefgh", "ijklmnop"], [(8, 8), (8, 8)]),
}


@pytest.mark.parametrize("name", TREES)
def test_the_tree_of(name):
    rows, expected = TREES[name]
    ids = batch_of(*rows)
    found = layout(ids, share=True)
    check(ids, found)
    assert sorted(zip(found.lengths, found.key_lengths, strict=True)) == sorted(expected)
    assert (found.keys is None) == all(q == k for q, k in expected)


def test_without_sharing_each_row_is_a_segment():
    ids = batch_of(*TREES["a prompt that all rows share"][0])
    found = layout(ids, share=False)
    check(ids, found)
    assert (found.lengths, found.keys) == ([16, 9, 12], None)


@pytest.mark.parametrize(("rows", "why"), [
    (["...", "..."], "no token is live"),
    (["ab.cd", "abcde"], "the mask of a row has a gap"),
    (["abcde", ".a.b."], "the mask of a row has a gap"),
])  # fmt: skip
def test_what_has_no_layout(rows, why):
    for share in (False, True):
        assert layout(batch_of(*rows), share=share) == why


def test_padding_whose_label_is_to_be_predicted_has_no_layout():
    ids = batch_of("..abc", "abc..")
    ids[0, 1] = PREDICTS
    assert layout(ids, share=True) == "labels are predicted at positions of padding"


@pytest.mark.parametrize("saved", [False, True])
def test_sharing_must_save_its_share(saved):
    """Ten tokens that two rows share, of as many as are just enough, or one more of each row."""
    rest = round(10 / MIN_SAVED / 2) - 10 + (not saved)
    ids = np.stack([np.r_[np.arange(10), 100 + np.arange(rest)], np.r_[np.arange(10), 1000 + np.arange(rest)]])
    found = layout(ids, share=True)
    check(ids, found)
    assert (found.keys is not None) == saved
    assert found.live - len(found.places) == 10 * saved


def test_large_ids_are_told_apart():
    """Ids that differ above their lowest bytes alone."""
    for step in (1 << 8, 1 << 16, 1 << 32):
        ids = np.array([[step * i for i in range(12)], [step * (i + 1) for i in range(12)]])
        found = layout(ids, share=True)
        check(ids, found)
        assert found.keys is None
