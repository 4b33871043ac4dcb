"""Makes operators on the host allocate the tensors that they would allocate on a CUDA device.

PyTorch uses other attention operators on the host than on a card, and TRL's head folds its tiles in plain torch. Inside
`standing_in` both allocate as on a card. No values are computed, so no card is needed, and none is used.
"""

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import device as devices
from ..ops.launch import use_launcher
from ..support.foreign import at_least

__all__ = ["LIBRARIES", "NoValues", "deciding", "fused_heads", "scratch", "standing_in"]

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10

LIBRARIES = 64 * MIB
"""The bytes that cuBLAS allocates on Hopper: a workspace of 32 MiB (torch's `getChosenWorkspaceSize`) for the thread of
forward, and one for the thread of backward."""

_MOST_HEAD = 256  # the largest head of flash attention in PyTorch, and of cuDNN on Hopper

# On Hopper PyTorch prefers cuDNN if it is newer than 9.15, as in the CUDA builds of torch 2.11.
_CUDNN_FIRST = at_least("torch", "2.11")


def _h200(memory: int) -> devices.DeviceSpec:
    """Returns the card that predictions were compared with; the kernels use only its kind and its cores."""
    return devices.DeviceSpec("cuda", "NVIDIA H200", 132, 256 * KIB, memory)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Computes `scaled_dot_product_attention` with the operator that PyTorch chooses on a card, in its order: cuDNN,
    flash, memory-efficient, plain. Without a mask flash attention stands for cuDNN's, since the results of both have
    the query's memory layout. The result of memory-efficient attention has the heads of a token together, which the
    next matrix product needs; the others' may have to be copied for it."""
    aten = torch.ops.aten
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half and query.shape[-1] == value.shape[-1] <= _MOST_HEAD:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if not enable_gqa:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -math.inf)
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        # Only memory-efficient attention computes a gradient of the bias.
        trained = bias is not None and bias.requires_grad
        records = query.requires_grad or key.requires_grad or value.requires_grad or trained
        if _CUDNN_FIRST and not trained and half and query.shape[-1] == value.shape[-1] <= _MOST_HEAD:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, records, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, records, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True
    )[0]


def scratch(function: Any, args: tuple[Any, ...]) -> int:
    """Returns the bytes of temporary tensors inside an operator on a card."""
    name = function.__name__
    if "attention_backward" not in name:
        return 0
    # The gradient of q is accumulated in fp32, and each row has one fp32 number.
    q, k = args[1], args[2]
    size = 4 * (q.numel() + q.numel() // q.shape[-1])
    if k.shape[1] != q.shape[1]:
        # Grouped keys and values have a gradient for each query head, before these are summed.
        size += 2 * q.element_size() * q.numel() // q.shape[2] * k.shape[2]
    return size


class NoValues(TorchDispatchMode):
    """Handles operators on tensors without memory that need values, or that PyTorch has only for cards.

    Args:
        kept: the number of rows that a boolean mask of tokens selects.
    """

    def __init__(self, kept: int) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:
            # Two thirds of all calls ask fake tensors for their device.
            return args[0].fake_device
        kwargs = kwargs or {}
        if function._overloadname == "dtype_out":
            # Matrix products with a result of another dtype.
            return kwargs["out"]
        if function.__name__ == "_grouped_mm.default" and args[0].dtype is not torch.bfloat16:
            # Cards also support other dtypes; fake tensors do not.
            halves = (t.to(torch.bfloat16) for t in args[:2])
            return function(*halves, *args[2:], **kwargs).to(args[0].dtype)
        if function is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            return args[0].new_empty(self._kept, *args[0].shape[args[1][0].dim() :])
        return function(*args, **kwargs)


class _NoKernel:
    """Replaces a kernel of TRL that folds a tile in place."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


def deciding(memory: int) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block the package decides as on a card with so much memory; computations still run."""
    return devices.stand_in(_h200(memory))


@contextlib.contextmanager
def standing_in(memory: int, kept: int) -> Iterator[None]:
    """Decides as `deciding`, uses the operators of a card, and launches no kernels. `kept`: the number of rows whose
    target counts in the loss."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(deciding(memory))
        stack.enter_context(use_launcher(lambda kernel, grid, args, constexprs: None))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
        # `valid_rows` needs values; the last token of a sequence has no target.
        rows = torch.empty(kept, dtype=torch.int64, device="cpu")
        for name in ("linear_cross_entropy", "linear_divergence"):
            head = importlib.import_module(f"npu_trainer_kernels.ops.head.{name}")
            stack.enter_context(mock.patch.object(head, "valid_rows", return_value=rows))
        # Packed sequences are detected by values; here each row is one sequence.
        masking = importlib.import_module("transformers.masking_utils")
        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", _none))
        if _trl_has_a_head():
            for module, names in _of_trl():
                for name, value in names.items():
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, value))
        yield


def _none(*_: object) -> None:
    """No row is a packed one."""


def fused_heads() -> list[type[torch.autograd.Function]]:
    """Returns the autograd functions of fused heads: ours, and TRL's if it has one."""
    found = [importlib.import_module("npu_trainer_kernels.ops.head.engine")._Head]
    if _trl_has_a_head():
        found.append(importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction)
    if _trl_has_a_divergence():
        found.append(importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction)
    return found


def _trl_has_a_head() -> bool:
    """Whether TRL has a fused head, as 1.15 and later do."""
    return importlib.util.find_spec("trl") is not None and importlib.util.find_spec("trl.kernels") is not None


def _trl_has_a_divergence() -> bool:
    """Whether TRL computes the divergence of two heads by a fused function, as 1.16 and later do."""
    return _trl_has_a_head() and importlib.util.find_spec("trl.kernels.chunked_divergence") is not None


def _of_trl() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns replacements for the functions and kernels that TRL's head calls on a card with Triton, by module."""
    yes = {"_use_triton": lambda device: True}
    yield importlib.import_module("trl.trainer.utils"), yes
    kernels = {name: _NoKernel() for name in ("_forward_kernel", "_backward_kernel")}
    # `torch.addmm` with `out_dtype` adds in place without a temporary tensor.
    kernels["_addmm_fp32"] = lambda acc, a, b: None  # type: ignore[assignment]
    yield importlib.import_module("trl.kernels.chunked_logprob"), {**yes, **kernels}
    if _trl_has_a_divergence():
        yield importlib.import_module("trl.trainer.distillation_trainer"), yes
        kernels |= {name: _NoKernel() for name in ("_stats_kernel", "_jsd_kernel")}
        yield importlib.import_module("trl.kernels.chunked_divergence"), {**yes, **kernels}
