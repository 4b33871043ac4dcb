"""Cases of pairs in the place of a product."""

import itertools

import pytest

from tests.pairs import pairs


@pytest.mark.parametrize(("sizes", "most"), [((9, 6, 3), 56), ((5, 3, 3, 2), 18), ((2, 2, 2), 6), ((4,), 4)])
def test_every_two_values_meet_in_few_rows(sizes, most):
    values = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    rows = pairs(*values)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(values[one], values[other]))
    assert len(rows) <= most
