"""The accuracy rule: what it lets through, and what it does not."""

import pytest
import torch

from npu_trainer_kernels.support.rounding import Rounded
from tests.closeness import assert_op_close, rounded

ONES = torch.ones(4)


def off_by(errors):
    """An op whose results are off by so much; none is in fp64."""

    def op(x):
        return x + (0 if x.dtype == torch.float64 else torch.tensor(errors))

    return op


def test_an_error_in_any_element_is_seen():
    assert_op_close(off_by([1e-3, 0.0, -1e-3, 0.0]), off_by([0.0, 1e-3, 0.0, -1e-3]), [ONES])
    for where in range(4):
        errors = [0.0] * 4
        errors[where] = 3e-3
        with pytest.raises(AssertionError, match=rf"element {where}: error 3\.000e-03"):
            assert_op_close(off_by(errors), off_by([1e-3, 0.0, 0.0, -1e-3]), [ONES])


def test_more_than_the_references_error_on_average_is_seen():
    with pytest.raises(AssertionError, match="rms error"):
        assert_op_close(off_by([1.9e-3] * 4), off_by([1e-3, 0.0, 0.0, 0.0]), [ONES])


# ---------------------------------------------------------------------------------------------------------------------
# What rounding does
# ---------------------------------------------------------------------------------------------------------------------


def test_a_reference_that_is_right_by_luck_does_not_count_alone():
    """The gradient of a softmax of one score is zero, and a reference's may be so to the last bit."""
    x = torch.randn(16, 1, requires_grad=True)
    factors = torch.linspace(-3, 3, 16)[:, None]

    def by_exponentials(x):
        return (3 * x - 2 * x - x).exp()

    def softmax(x):
        return x.softmax(1)

    assert not any(v.any() for v in torch.autograd.grad((softmax(x) * factors).sum(), x))
    assert_op_close(by_exponentials, softmax, [x], lambda outputs: (outputs[0] * factors.to(outputs[0])).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_moved_is_moved_by_units(dtype):
    x = (torch.rand(64, 64) + 0.5).to(dtype)
    found = rounded(lambda: x * x.sin())
    truth = x.double() * x.double().sin()
    for value in found:
        error = ((value - truth) / truth).abs() / torch.finfo(dtype).eps
        # Of the sine and of the product each half a unit by its own rounding and a whole one by the move.
        assert 0.25 <= error.mean() <= error.max() <= 3
    assert len({tuple(value.flatten().tolist()) for value in found}) == len(found)


def test_moves_are_without_bias():
    x = torch.rand(1 << 16) + 0.5
    plain = x * 3.0
    for moved in rounded(lambda: x * 3.0):
        units = (moved.double() - plain) / plain / torch.finfo(torch.float32).eps
        assert 0.2 < units.square().mean().sqrt() < 0.5
        # Five times what is left of so many.
        assert units.mean().abs() < 5 * 0.5 / 256


def test_gradients_are_moved_too():
    x = torch.randn(64, requires_grad=True)
    y = x.sin().sum()
    (plain,) = torch.autograd.grad(y, x, retain_graph=True)
    for (moved,) in rounded(lambda: torch.autograd.grad(y, x, retain_graph=True)):
        assert not torch.equal(moved, plain)
        torch.testing.assert_close(moved, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_a_sum_every_term_is_rounded(dtype):
    """Of fp32 alone: terms of 16 bits are added in fp32."""
    x = torch.randn(1, 4096).to(dtype)
    terms = torch.cat((x, -x), 1)
    ones = torch.ones(8192, 1).to(dtype)
    size = torch.finfo(dtype).eps * x.double().norm()
    for found in rounded(lambda: torch.cat((terms @ ones, terms.sum(1, keepdim=True)))):
        if dtype == torch.float32:
            assert (found.abs() > 0.01 * size).all()
            assert (found.abs() < 20 * size).all()
        else:
            assert (found.abs() < 1e-3 * size).all()


def test_a_product_is_written_where_it_is_asked_for():
    x = torch.randn(8, 8)
    for out in rounded(lambda: torch.mm(x, x, out=torch.full((8, 8), torch.nan))):
        torch.testing.assert_close(out, x @ x, rtol=1e-5, atol=1e-5)


def test_what_is_only_taken_from_elsewhere_stays():
    x = torch.randn(6, 8)
    with Rounded(0):
        found = [x.t().contiguous().t(), x[torch.arange(6)], torch.cat((x[:2], x[2:])), x.view(8, 6).view(6, 8)]
    assert all(torch.equal(value, x) for value in found)


def test_infinities_stay_and_the_random_state_of_torch_too():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, torch.finfo(torch.float32).max])
    state = torch.get_rng_state()
    for value in rounded(lambda: x * 1.0):
        torch.testing.assert_close(value, x, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_results_are_moved_in_place_where_that_is_asked_for(in_place):
    """A model's parameters are not to be moved by a look at it."""
    x = torch.full((1000,), 0.5)
    with Rounded(0, in_place=in_place):
        y = x.mul_(3.0).clamp_(min=0)
    assert y is x
    assert ((x - 1.5).abs().max() > 0) == in_place
    assert (x - 1.5).abs().max() < 1e-6


def test_what_counts_in_floats_stays():
    """OPT makes positions of a mask in floats: one that is moved below an integer is another position."""
    mask = torch.ones(4, 100)
    expected = torch.arange(1, 101).expand(4, 100)
    for positions in rounded(lambda: (mask.cumsum(1) * mask).long()):
        assert torch.equal(positions, expected)
    for share in rounded(lambda: torch.ones(1000) / 3):
        assert share.unique().numel() > 1


def test_what_is_summed_inside_of_an_operator_is_rounded():
    """The gradient of a softmax's input sums to zero but for the rounding of a sum inside of the operator."""
    y, upstream = torch.randn(64, 128).softmax(-1), 1e4 + torch.randn(64, 128)
    size = torch.finfo(y.dtype).eps * 1e4

    def backward():
        return torch.ops.aten._softmax_backward_data(upstream, y, -1, y.dtype)

    for found in rounded(backward):
        assert (found - backward()).sum(1).abs().max() > 0.01 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_systematic_fault_is_seen(dtype):
    x, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((32, 48), (48,)))
    fault = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    with pytest.raises(AssertionError):
        assert_op_close(lambda x, w: norm(x, w) * (1 + fault), norm, [x, weight], lambda outputs: outputs[0].sum())
    assert_op_close(norm, norm, [x, weight], lambda outputs: outputs[0].sum())
