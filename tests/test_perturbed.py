"""The stand-in for processors whose products round by layout: what it moves, what it leaves, and what it finds."""

import pytest
import torch
from torch.nn import functional

from tests.closeness import assert_op_close
from tests.perturbed import PRODUCTS, Perturbed, asks_for_bits


def tokens_first(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, with other strides."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


CALLS = {
    "mm": (lambda a, b: a @ b, (12, 16), (16, 8)),
    "linear with bias": (lambda a, b: functional.linear(a, b, b[:, 0].contiguous()), (12, 16), (8, 16)),
    "bmm": (torch.bmm, (4, 5, 6), (4, 6, 7)),
    "baddbmm": (lambda a, b: torch.baddbmm(a[:, :, :1], a, b), (4, 5, 6), (4, 6, 7)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (4, 5, 6), (4, 6, 7)),
    "mv": (lambda a, b: a @ b[:, 0].contiguous(), (12, 16), (16, 8)),
    "attention": (lambda a, b: functional.scaled_dot_product_attention(a, a, b), (2, 3, 9, 8), (2, 3, 9, 8)),
    "convolution": (lambda a, b: functional.conv1d(a, b, groups=2), (2, 8, 9), (6, 4, 3)),
    "groups": (
        lambda a, b: functional.grouped_mm(a, b, offs=torch.tensor([5, 12], dtype=torch.int32)), (12, 16), (2, 16, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_products_round_by_layout(name: str) -> None:
    call, *shapes = CALLS[name]
    a, b = (drawn(*shape) for shape in shapes)
    own = call(a, b)
    with Perturbed():
        found, again, other = call(a, b), call(a, b), call(tokens_first(a), b)
    assert torch.equal(found, again), "the same call gives the same bits"
    assert not torch.equal(found, other), "another layout gives others"
    for each in (found, other):
        assert ((each - own).abs() <= torch.finfo(own.dtype).eps * own.abs() * 1.01 + 4e-6).all()


def test_gradients_and_compiled_code_are_moved() -> None:
    a, b = drawn(12, 16).requires_grad_(), drawn(16, 8)
    compiled = torch.compile(lambda a, b: (a @ b).relu(), backend="aot_eager", fullgraph=True)
    (own,) = torch.autograd.grad((a @ b).sum() * 1.5, a)
    with torch.no_grad(), Perturbed():
        assert not torch.equal(compiled(a, b), compiled(tokens_first(a.detach()), b))
    with Perturbed():
        (found,) = torch.autograd.grad((a @ b).sum() * 1.5, a)
    assert not torch.equal(found, own)
    torch.testing.assert_close(found, own)


def test_what_is_exact_stays() -> None:
    """Sums of integers, and what another operator computes."""
    a, b = torch.arange(96.0).view(8, 12), torch.ones(12, 4)
    x = drawn(8, 12)
    with Perturbed():
        assert torch.equal(a @ b, tokens_first(a) @ b)
        assert torch.equal(x.sum(1) + x.exp()[:, 0], x.sum(1) + x.exp()[:, 0])
        assert torch.equal(x * 2, tokens_first(x) * 2)
    assert all(
        operator in PRODUCTS for operator in (torch.ops.aten.mm.default, torch.ops.aten.convolution_backward.default)
    )


def test_a_planted_assertion_is_found() -> None:
    """Equal bits of two layouts, which this processor gives and another one does not; the accuracy rule holds."""
    a, b = drawn(12, 16), drawn(16, 8)

    def asks() -> None:
        assert torch.equal(tokens_first(a) @ b, a @ b)

    with Perturbed():
        with pytest.raises(AssertionError):
            asks()
        assert_op_close(lambda a, b: tokens_first(a) @ b, lambda a, b: a @ b, [a, b])


def _helper(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a, b)


def test_tests_that_ask_for_bits_are_known() -> None:
    assert asks_for_bits(_helper)
    assert not asks_for_bits(test_what_is_exact_stays), "it has the stand-in itself"
    assert asks_for_bits(lambda a: _helper(a, a))
    assert asks_for_bits(lambda a: torch.testing.assert_close(a, a, rtol=0, atol=0))
    assert asks_for_bits(lambda a: all(map(torch.equal, a, a)))
    assert not asks_for_bits(lambda a: torch.testing.assert_close(a, a))
    assert not asks_for_bits(tokens_first)
