"""The host stands in for a card: what a CUDA device would run, as tensors without memory show it.

On the host PyTorch attends with other operators than on a card, and TRL's head folds its tiles in plain torch. Inside
`standing_in` both take what a card takes. Nothing is computed, so no card is needed; and a card that is there is not
touched.
"""

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from .. import device as devices
from ..ops.launch import use_launcher

__all__ = ["LIBRARIES", "NoValues", "deciding", "fused_heads", "scratch", "standing_in"]

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10

LIBRARIES = 64 * MIB
"""What cuBLAS holds on Hopper: a workspace of 32 MiB (torch's `getChosenWorkspaceSize`) for the thread that runs
forward, and one for that which runs backward."""

_MOST_HEAD = 256  # flash attention's in PyTorch, and cuDNN's on Hopper

# On Hopper PyTorch asks cuDNN first, if it is newer than 9.15, as that of the CUDA builds of torch 2.11 is.
_CUDNN_FIRST = Version(torch.__version__) >= Version("2.11")


def _h200(memory: int) -> devices.DeviceSpec:
    """The card that predictions were held against; what the kernels ask of it beside its kind are its cores."""
    return devices.DeviceSpec("cuda", "NVIDIA H200", 132, 256 * KIB, memory)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`scaled_dot_product_attention` by the operators that PyTorch chooses on a card, in its order: cuDNN, flash,
    memory-efficient, plain. Without a mask flash stands for cuDNN's: the result of both lies in memory as the query
    does. That of memory-efficient attention always has a token's heads together, as the next product reads them; the
    others' may have to be copied for it."""
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
        # A bias that is trained has a gradient in memory-efficient attention alone.
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
    """Bytes that a card's operator takes and gives back inside itself."""
    name = function.__name__
    if "attention_backward" not in name:
        return 0
    # The gradient of q is summed in fp32, and each row has a number of its own.
    q, k = args[1], args[2]
    size = 4 * (q.numel() + q.numel() // q.shape[-1])
    if k.shape[1] != q.shape[1]:
        # Keys and values of a group: a gradient for each of its heads, and their sum.
        size += 2 * q.element_size() * q.numel() // q.shape[2] * k.shape[2]
    return size


class NoValues(TorchDispatchMode):
    """Answers for tensors without memory what PyTorch answers from values, or on cards alone.

    Args:
        kept: rows that a mask of tokens leaves.
    """

    def __init__(self, kept: int) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:
            # Two thirds of all calls: fake tensors are asked where they are.
            return args[0].fake_device
        kwargs = kwargs or {}
        if function._overloadname == "dtype_out":
            # Products with a result of another dtype.
            return kwargs["out"]
        if function.__name__ == "_grouped_mm.default" and args[0].dtype is not torch.bfloat16:
            # Cards multiply other dtypes, too; of fake tensors this is not known.
            halves = (t.to(torch.bfloat16) for t in args[:2])
            return function(*halves, *args[2:], **kwargs).to(args[0].dtype)
        if function is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            return args[0].new_empty(self._kept, *args[0].shape[args[1][0].dim() :])
        return function(*args, **kwargs)


class _NoKernel:
    """Stands for a kernel of TRL's that folds a tile in place."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


def deciding(memory: int) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block every decision falls as on a card with so much memory; what is computed is computed."""
    return devices.stand_in(_h200(memory))


@contextlib.contextmanager
def standing_in(memory: int, kept: int) -> Iterator[None]:
    """As `deciding`, and operators are those of the card; nothing is launched, and so nothing is computed. `kept`: rows
    whose target counts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(deciding(memory))
        stack.enter_context(use_launcher(lambda kernel, grid, args, constexprs: None))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
        # Which targets count is found by values, too; a sequence's last token has none.
        head = importlib.import_module("npu_trainer_kernels.ops.head.linear_cross_entropy")
        rows = torch.empty(kept, dtype=torch.int64, device="cpu")
        stack.enter_context(mock.patch.object(head, "valid_rows", return_value=rows))
        # Rows of several sequences are found by values; here each row is one.
        masking = importlib.import_module("transformers.masking_utils")
        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", return_value=None))
        if _trl_has_a_head():
            for module, names in _of_trl():
                for name, value in names.items():
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, value))
        yield


def fused_heads() -> list[type[torch.autograd.Function]]:
    """Ours, and TRL's where it has one."""
    found = [importlib.import_module("npu_trainer_kernels.ops.head.engine")._Head]
    if _trl_has_a_head():
        found.append(importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction)
    return found


def _trl_has_a_head() -> bool:
    """1.15 and later."""
    return importlib.util.find_spec("trl") is not None and importlib.util.find_spec("trl.kernels") is not None


def _of_trl() -> Iterator[tuple[Any, dict[str, Any]]]:
    """What TRL's head asks and calls on a card with Triton."""
    yes = {"_use_triton": lambda device: True}
    yield importlib.import_module("trl.trainer.utils"), yes
    kernels = {name: _NoKernel() for name in ("_forward_kernel", "_backward_kernel")}
    # In place, without a temporary, as `torch.addmm` with `out_dtype` is.
    kernels["_addmm_fp32"] = lambda acc, a, b: None  # type: ignore[assignment]
    yield importlib.import_module("trl.kernels.chunked_logprob"), {**yes, **kernels}
