"""The accuracy rule: what it lets through, and what it does not."""

import pytest
import torch

from tests.closeness import assert_op_close

NUMBERS = [torch.tensor([value]) for value in (1.0, 2.0, 3.0, 4.0)]


def off_by(errors):
    """An op whose result for each of `NUMBERS` is off by so much; none is in fp64."""

    def op(x):
        return x + (0 if x.dtype == torch.float64 else errors[int(x) - 1])

    return op


def check(errors, reference_errors):
    first, *more = ([x] for x in NUMBERS)
    assert_op_close(off_by(errors), off_by(reference_errors), first, more=more)


def test_results_of_one_number_are_judged_together():
    """The reference happens to be right where the op is not."""
    with pytest.raises(AssertionError, match=r"error 1\.000e-03"):
        assert_op_close(off_by([1e-3]), off_by([0.0]), [NUMBERS[0]])
    check([1e-3, 0.0, -1e-3, 0.0], [0.0, 1e-3, 0.0, -1e-3])


@pytest.mark.parametrize("where", range(4))
def test_an_error_in_any_of_them_is_seen(where):
    errors = [0.0] * 4
    errors[where] = 3e-3
    with pytest.raises(AssertionError, match=rf"element {where}: error 3\.000e-03"):
        check(errors, [1e-3, 0.0, 0.0, -1e-3])


def test_more_than_the_references_error_on_average_is_seen():
    with pytest.raises(AssertionError, match="rms error"):
        check([1.9e-3] * 4, [1e-3, 0.0, 0.0, 0.0])
