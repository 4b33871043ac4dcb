"""What the package changes in Triton's interpreter, which runs its kernels on the CPU."""

import pytest
import torch
import triton.language as tl

from npu_trainer_kernels.support.triton import jit
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
