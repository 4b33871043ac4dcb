"""The head on a CPU: how much memory a call takes, and the sums of a chunk's products there."""

import pytest
import torch

from benchmarks.measure import peak_extra_bytes
from npu_trainer_kernels import device, ops
from npu_trainer_kernels.descriptions import Inputs
from npu_trainer_kernels.ops.head import chunks
from tests.closeness import assert_op_close

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_call_takes_a_chunk_of_logits_and_half_a_gradient(dtype):
    n, hidden, vocab = 1024, 32, 60000
    x, weight = torch.randn(n, hidden, dtype=dtype), torch.randn(vocab, hidden, dtype=dtype)
    inputs = Inputs({"x": x, "weight": weight, "target": torch.randint(0, vocab, (n,))}, ("x", "weight")).require_grad()

    def call(t):
        return ops.fused_linear_cross_entropy(t["x"], t["weight"], t["target"], backend="torch")

    chunk = max(256 * vocab * dtype.itemsize, 48 * MIB)
    sums = 0 if dtype == torch.float32 else vocab * hidden * 4
    # A block of the products, and fp32 copies of a few rows of logits.
    assert peak_extra_bytes(call, inputs, "both", torch.device("cpu")) < chunk + sums + 12 * MIB


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sums_of_chunks_on_any_processor(monkeypatch, dtype, rounds):
    monkeypatch.setattr(device, "host_multiplies_bf16", lambda: rounds)
    products = []
    of_blocks = chunks._host_blocks
    monkeypatch.setattr(chunks, "_host_blocks", lambda *args: products.append(1) or of_blocks(*args))
    x = torch.randn(96, 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(5000, 24, dtype=dtype, requires_grad=True)
    target = torch.randint(0, 5000, (96,))
    assert_op_close(
        lambda x, weight: ops.fused_linear_cross_entropy(x, weight, target, backend="torch", chunk_rows=16),
        lambda x, weight: ops.linear_cross_entropy_reference(x, weight, target),
        (x, weight),
        lambda outputs: outputs[0],
    )
    assert len(products) >= 6


def test_small_products_of_fp16_are_not_lost():
    # The product of 2^-14 and 2^-12 is below the least number of fp16.
    total = torch.zeros(8, 4)
    for _ in range(4):
        chunks._accumulate(total, torch.full((8, 1), 2.0**-14).half(), torch.full((1, 4), 2.0**-12).half())
    assert torch.equal(total, torch.full((8, 4), 4 * 2.0**-26))
