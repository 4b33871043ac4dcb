"""The attention of the variants "plain-flash" and "liger-flash": transformers' flash attention by PyTorch's kernel.

Whoever has the package flash-attn asks transformers for "flash_attention_2". In each layer transformers then takes the
live positions of q, k and v by the padding mask, calls flash-attn on them as one row with the rows' cumulative lengths,

    o_i = sum over j of softmax_j(scale q_i k_j) v_j          j live, in i's row, not behind i, within the window,

and writes o to its positions in a tensor of zeros. `register` gives transformers another name for the same code, in
which flash-attn's two functions are those of this module. They call PyTorch's own copy of the same kernels, so the
package is not needed. Masks, indices, lengths and padding are transformers' own work, which it does in every layer:
there is neither less nor more of it than with flash-attn. On an NPU transformers has functions of its own for these
two, and they are taken.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["CALLS", "DTYPES", "NAME", "dense", "register", "varlen"]

# transformers treats an attention as a flash attention (its masks, its checks) if "flash" is in the name.
NAME = "pytorch_flash_varlen"
# The kernels take 16 bits alone.
DTYPES = ("bfloat16", "float16")
# How often the kernel was called in this process, by layout: a row of results shows that it ran.
CALLS: Counter[str] = Counter()


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """Computes attention inside rows, as `flash_attn.flash_attn_varlen_func`. transformers passes the arguments that
    it finds in this signature.

    Args:
        q: `[Tq, H, D]`, the queries of all rows.
        k: `[Tk, K, D]`, H a multiple of K: the kernel and its backward take grouped heads.
        v: `[Tk, K, D]`.
        cu_seqlens_q: `[rows + 1]`, int32: where the rows begin in q, and its length.
        cu_seqlens_k: `[rows + 1]`, int32: the same of k and v.
        max_seqlen_q: the longest row in q.
        max_seqlen_k: the longest row in k.
        dropout_p: the probability that a weight is dropped.
        softmax_scale: the factor of the scores; None: `D ** -0.5`.
        causal: whether a query sees no key behind itself; the last query and the last key of a row are aligned.
        window_size: how many keys before and behind itself a query sees; -1: all.

    Returns:
        `[Tq, H, D]`.
    """
    CALLS["flash varlen"] += 1
    # transformers has read the lengths of a mask; those that it finds by position ids are tensors.
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, dropout_p, softmax_scale, causal, window_size)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """Computes attention of a batch without padding, as `flash_attn.flash_attn_func`: `[B, S, H, D]` of q
    `[B, S, H, D]`, k and v `[B, S, K, D]`. The other arguments are those of `varlen`."""
    CALLS["flash dense"] += 1
    lengths = q.shape[1], k.shape[1]
    return _attention(q, k, v, None, None, *lengths, dropout_p, softmax_scale, causal, window_size)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None,
    longest_q: int, longest_k: int, dropout: float, scale: float | None, causal: bool, window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Calls PyTorch's operator, whose backward is PyTorch's. `torch.nn.attention.varlen.varlen_attn` calls it too, but
    has no dropout, and a scale and a window only from torch 2.11 on."""
    import torch

    left, right = window[0], 0 if causal else window[1]
    # The kernel's own word for "causal" is a window with nothing behind and all before.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, causal and left < 0, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def register() -> None:
    """Makes `NAME` an attention of transformers in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    if NAME in AttentionInterface._global_mapping:
        return
    utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    own = utils._lazy_imports

    def functions_of(implementation: str | None, *args: Any, **options: Any) -> Any:
        """Returns what transformers takes from a flash attention package: (without padding, with rows of different
        lengths, with a cache, the function that pads, the function that unpads)."""
        if implementation != NAME or utils.is_torch_npu_available():
            return own(implementation, *args, **options)
        return dense, varlen, None, utils._pad_input, utils._unpad_input

    utils._lazy_imports = functions_of
    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
