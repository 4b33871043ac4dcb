"""What the package changes in Triton's interpreter, which runs its kernels on the CPU."""

import pytest
import torch
import triton.language as tl

from npu_trainer_kernels._triton import jit
from tests.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are interpreted on the CPU alone")


@jit
def _widened(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(tl.float32))


def test_every_bf16_widens_to_its_own_value():
    """Subnormals, infinities and what is no number among them."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    y = torch.empty(2**16)
    _widened[(1,)](x, y, BLOCK=2**16)
    assert torch.equal(y.view(torch.int32), x.float().view(torch.int32))


@jit
def _mixed(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + row * COLUMNS + column)
    small = value.to(tl.bfloat16)
    value = tl.where(value > 0, value - small, 0.0) + row
    # Which type a tensor has, not only its values, decides what can be made of it.
    value = tl.reshape(value, (ROWS * COLUMNS,)) + tl.reshape(row * 0 + column, (ROWS * COLUMNS,))
    tl.store(y + tl.arange(0, ROWS * COLUMNS), value)


@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (8, 4)])
def test_types_are_those_of_shape_and_element(rows, columns):
    x, y = torch.randn(rows, columns), torch.empty(rows, columns)
    _mixed[(1,)](x, y, ROWS=rows, COLUMNS=columns)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    assert torch.equal(y, torch.where(x > 0, x - x.bfloat16(), 0.0) + row + column)


def test_pointers_to_different_memories_keep_different_types():
    made = [tl.block_type(tl.int32, [8]).with_element_ty(tl.pointer_type(tl.int32, space)) for space in (1, 3)]
    assert [block.element_ty.address_space for block in made] == [1, 3]
