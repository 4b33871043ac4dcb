"""What a decoder layer launches and waits for, forward and backward, as tables: with and without the kernels.

Devices are stood in for: every decision falls as it would there, our launches are counted and compute nothing, and of
PyTorch's operators those are counted that start something on a device. Attention is one operator each way, and a
gradient is the parameter's first, so that nothing is added to it.
"""

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from npu_trainer_kernels import apply_npu_kernels, device
from npu_trainer_kernels.ops.experts import grouped
from npu_trainer_kernels.ops.launch import use_launcher
from tests.models import small_model

# Those that only look at memory in another way, or ask for some.
_FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "new_empty", "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
_SPECS = {
    "npu": device.chip_spec("Ascend910B4"),
    "cuda": device.DeviceSpec("cuda", "NVIDIA H200", 132, 256 << 10, 140 << 30),
}
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "unique_dim"}


class _Operators(TorchDispatchMode):
    def __init__(self, launches: Counter[str], waits: Counter[str]) -> None:
        super().__init__()
        self.launches, self.waits = launches, waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::").removeprefix("_").rstrip("_")
        if function._schema.name.removeprefix("aten::") in _WAITS:
            self.waits[name] += 1
        elif function._schema.name.removeprefix("aten::") not in _FREE:
            self.launches[name] += 1
        return function(*args, **(kwargs or {}))


def launched(family: str, where: str) -> tuple[int, Counter[str], Counter[str]]:
    """Launches of a layer, each by name, and what is waited for; `where`: npu, cuda or plain."""
    launches: Counter[str] = Counter()
    waits: Counter[str] = Counter()

    def launcher(kernel: JITFunction[Any], grid: Any, args: Any, constexprs: Any) -> None:
        launches[kernel.fn.__name__] += 1

    def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        launches["npu_grouped_matmul"] += 1
        return x.new_empty(x.shape[0], weight.shape[2])

    def outer(x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        launches["npu_grouped_matmul"] += 1
        return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        launches["grouped_mm"] += 1
        shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[1])
        return a.new_empty(shape)

    model: Any = small_model(family).to(torch.bfloat16).train()
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    x = torch.zeros(1, 64, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    tables = (torch.zeros(1, 64, size, dtype=torch.bfloat16),) * 2
    with contextlib.ExitStack() as stack:
        if where != "plain":
            stack.enter_context(device.stand_in(_SPECS[where]))
            for name, function in (("grouped_product", product), ("outer_products", outer)):
                stack.enter_context(mock.patch.object(grouped.vendor, name, function))
            for name in ("unavailable", "trial"):
                stack.enter_context(mock.patch.object(grouped, name, return_value=None))
            stack.enter_context(use_launcher(launcher))
            stack.enter_context(apply_npu_kernels(model, backend="triton"))
            # The experts have been recognised by what they compute.
            stack.enter_context(mock.patch.object(grouped, "_grouped_mm", grouped_mm))
        launches.clear()
        with _Operators(launches, waits):
            out = model.model.layers[1](x, position_embeddings=tables, attention_mask=None)
            out = out[0] if isinstance(out, tuple) else out
            seed = torch.empty_like(out)
            torch.autograd.backward(out, seed)
    return launches.total(), launches, waits


# Of a layer, forward and backward. On CUDA q and k are rotated in one launch, on an NPU in one each.
LAUNCHES = {
    ("llama", "npu"): 40,
    ("llama", "cuda"): 38,
    ("qwen3", "npu"): 46,
    ("qwen3", "cuda"): 44,
    ("qwen3-moe", "npu"): 72,
    ("qwen3-moe", "cuda"): 69,
}


@pytest.mark.parametrize(("family", "where"), LAUNCHES)
def test_launches_of_a_layer_and_no_wait(family, where):
    total, launches, waits = launched(family, where)
    assert total == LAUNCHES[family, where], launches
    assert not waits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_the_kernels_it_is_more_than_twice_as_many(family):
    total, launches, _ = launched(family, "plain")
    assert total > 2 * max(LAUNCHES[family, where] for where in ("npu", "cuda")), launches


def test_a_wait_is_seen():
    """The experts' own code asks how many tokens each has."""
    assert launched("qwen3-moe", "plain")[2]
