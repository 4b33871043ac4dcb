"""The vendor's fused operators for Ascend NPUs, from torch_npu. Only this module calls `torch.ops.npu`.

This module decides which calls an operator covers, from documentation: op-plugin's pages for torch_npu, those of CANN's
ops-nn for the kernels behind it, and the golden functions next to them for the roundings. tests/npu_contract compares
the arguments and result shapes of the operators with torch_npu; it does not compare their values, because no NPU is
available. Nothing here was timed.

This package's autograd functions call the operators, so the operators' autograd is not used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import device
from .evidence.table import TABLE, Vendor

__all__ = [
    "SERVED",
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_gradient",
    "grouped_product",
    "norm_backward",
    "norm_forward",
    "not_repeatable",
    "outer_products",
    "rotate",
    "swiglu",
    "swiglu_backward",
    "unavailable",
    "uncovered_attention",
    "uncovered_cross_entropy",
    "uncovered_experts",
    "uncovered_norm",
    "uncovered_rope",
    "uncovered_swiglu",
]

SERVED: dict[str, Vendor] = {name: op.vendor for name, op in TABLE.items() if op.vendor is not None}
"""The ops that torch_npu has operators for; the functions `uncovered_*` below decide for which calls."""

_MAX_HEAD = 896
_MAX_BATCH = 1000
_MAX_ROWS = 200_000
# Limits of npu_fusion_attention with layout TND: 1K segments, 1M tokens.
_MAX_SEGMENTS = 1024
_MAX_TOKENS = 1 << 20
_MAX_HEADS = 256
_MAX_ATTENTION_HEAD = 768
# Limit of npu_grouped_matmul for the last axis of either factor.
_MAX_INNER = 1 << 16


@functools.cache
def unavailable(op: str) -> str | None:
    """Returns why torch_npu has no operator for `op` in this environment, or None if it has."""
    if op not in SERVED:
        return f"torch_npu has no operator for it; there are some for {', '.join(SERVED)}"
    error = device.torch_npu_error()
    if error is not None:
        return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
    missing = [name for name in SERVED[op].operators if not hasattr(torch.ops.npu, name)]
    return f"this torch_npu lacks {', '.join(missing)}" if missing else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# Norms: aclnnRmsNorm, aclnnAddRmsNorm, aclnnRmsNormGrad
# ---------------------------------------------------------------------------------------------------------------------


# By whether something is added to x, and whether x is fp32, where the castings differ by rounding alone.
_NORM_CASTINGS = {
    (False, True): ("llama", "gemma", "none"), (True, True): ("llama", "gemma", "none"),
    (False, False): ("llama", "gemma"), (True, False): ("llama",),
}  # fmt: skip


def uncovered_norm(
    dtype: torch.dtype,
    weight: torch.dtype | None,
    casting: str,
    residual: torch.dtype | None = None,
    mode: str = "pre",
    multiplier: float = 1.0,
) -> str | None:
    """Returns why a norm of x in `dtype` is not covered, or None if it is. `residual` is the dtype of the residual, or
    None without one.

    `npu_rms_norm` computes x rstd weight in fp32 and rounds once, as casting "gemma" does; "llama" rounds x rstd too,
    so the vendor's value is more exact there. `npu_add_rms_norm` rounds in both places on 910B and A3.
    """
    if weight is None:
        return "no weight"
    adds = residual is not None
    if adds and mode != "pre":
        return f"mode {mode!r}: npu_add_rms_norm writes the sum, which this mode is there to avoid"
    if multiplier != 1.0:
        return f"multiplier={multiplier!r}"
    if adds and residual != dtype:
        return f"{_name(residual)} residual of {_name(dtype)} x"
    mixes = casting == "gemma" and weight == torch.float32 and not adds
    if weight != dtype and not mixes:
        return f"{_name(weight)} weight of {_name(dtype)} x with casting {casting!r}"
    if casting not in _NORM_CASTINGS[adds, dtype == torch.float32]:
        return f"casting {casting!r} in {_name(dtype)}: it rounds elsewhere"
    return None


def not_repeatable(weight: torch.Tensor | None) -> str | None:
    """Returns why backward of a norm would not give the same bits twice, or None if it would.

    aclnnRmsNormGrad is documented as not deterministic by default on Atlas A2 and A3; PyTorch's switch makes it so.
    """
    if weight is None or not weight.requires_grad or torch.are_deterministic_algorithms_enabled():
        return None
    return SERVED["rms_norm"].not_repeatable


def norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (y, S, rstd `[N]` fp32) of x and residual `[..., H]`; S is x without a residual."""
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        y, rstd = torch.ops.npu.npu_rms_norm(rows, gamma, eps)
        s = x
    else:
        y, rstd, s = torch.ops.npu.npu_add_rms_norm(rows, residual.reshape(rows.shape), gamma, eps)
    return y.view(x.shape), s.view(x.shape) if residual is not None else s, rstd.view(-1)


def norm_backward(
    s: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of S in S's dtype and the gradient of gamma in fp32."""
    rows = s.reshape(-1, s.shape[-1])
    ds, dgamma = torch.ops.npu.npu_rms_norm_backward(dy.reshape(rows.shape), rows, gamma, rstd.view(-1, 1))
    return ds.view(s.shape), dgamma


# ---------------------------------------------------------------------------------------------------------------------
# SwiGLU and rotation
# ---------------------------------------------------------------------------------------------------------------------


def uncovered_swiglu(form: Any) -> str | None:
    """Returns why `npu_swiglu` does not compute a gate (`ops.gates.Gate`), or None if it does."""
    if not form.is_swiglu:
        return f"{form}: npu_swiglu computes silu(gate) * up"
    if form.joined == "interleaved":
        return "interleaved gate and up: npu_swiglu takes halves"
    return None


def swiglu(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Computes silu(gate) * up. The operator requires both in one contiguous tensor that is not empty. If they are two
    tensors this costs a copy; if they are one, up is None."""
    if not gate.numel():
        return torch.empty_like(gate) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return torch.ops.npu.npu_swiglu(_joined(gate, up), -1)


def swiglu_backward(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of gate and up; without up, (the gradient of both in one tensor, None)."""
    if not gate.numel():
        return torch.empty_like(gate), None if up is None else torch.empty_like(up)
    joined = torch.ops.npu.npu_swiglu_backward(dy.contiguous(), _joined(gate, up), -1)
    if up is None:
        return joined, None
    dgate, dup = joined.chunk(2, -1)
    return dgate, dup


def _joined(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return gate.contiguous() if up is None else torch.cat((gate, up), -1)


def uncovered_rope(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, form: Any
) -> str | None:
    """Returns why `npu_rotary_mul` does not compute a rotation (`ops.rope.Rotation`) of q and k, or None if it does.
    Its documentation requires tables in [-1, 1], which is not checked, because that would wait for the device."""
    if (form.pairs, form.tables, form.heads) != ("halves", "each", 1):
        return f"pairs {form.pairs!r} with tables {form.tables!r} and heads in dimension {form.heads}"
    if cos.shape[-1] != q.shape[-1]:
        return f"{cos.shape[-1]} of {q.shape[-1]} elements of a head"
    given = (q, cos, sin) if k is None else (q, k, cos, sin)
    if len({t.dtype for t in given}) > 1:
        other = "" if k is None else f" and {_name(k.dtype)} k"
        return f"{_name(cos.dtype)} and {_name(sin.dtype)} tables of {_name(q.dtype)} q{other}"
    if q.shape[-1] >= _MAX_HEAD:
        return f"heads of {q.shape[-1]} elements, of which less than {_MAX_HEAD} are allowed"
    if max(q.shape[0], q.shape[1], 0 if k is None else k.shape[1]) >= _MAX_BATCH:
        return f"{_MAX_BATCH} or more sequences or heads"
    return None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes x cos + [-x2, x1] sin of x `[B, N, T, D]` with tables `[B or 1, 1, T, D]`."""
    return torch.ops.npu.npu_rotary_mul(x, cos, sin) if x.numel() else torch.empty_like(x)


# ---------------------------------------------------------------------------------------------------------------------
# Cross-entropy: aclnnCrossEntropyLoss, aclnnCrossEntropyLossGrad
# ---------------------------------------------------------------------------------------------------------------------


def uncovered_cross_entropy(
    n_rows: int, *, softcap: float | None, logit_scale: float, label_smoothing: float, z_loss: float, outputs: Any
) -> str | None:
    """Returns why a loss at the head is not covered, or None if it is. The operator has arguments for label smoothing
    and z-loss, but by its documentation the first has no gradient and the second is "not enabled". The engine leaves
    out ignored rows and multiplies class weights before the call."""
    if softcap is not None:
        return f"softcap={softcap!r}"
    if logit_scale != 1.0:
        return f"logit_scale={logit_scale!r}"
    if label_smoothing:
        return f"label_smoothing={label_smoothing!r}: npu_cross_entropy_loss has no gradient with it"
    if z_loss:
        return f"z_loss={z_loss!r}: npu_cross_entropy_loss does not compute it yet"
    if outputs:
        return f"outputs={tuple(outputs)!r}"
    if n_rows > _MAX_ROWS:
        return f"{n_rows} rows, of which {_MAX_ROWS} are allowed"
    return None


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of the ids `[n]` and of all ids `[n, V]`, both fp32. The operator rounds them to
    the dtype of its input, so the input is converted to fp32."""
    loss, log_probs, _, _ = torch.ops.npu.npu_cross_entropy_loss(logits.float(), ids.long(), None, "none")
    return -loss, log_probs


def cross_entropy_gradient(log_probs: torch.Tensor, ids: torch.Tensor, d_log_prob: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the logits, fp32 `[n, V]`, from the log-probabilities of `cross_entropy` and the incoming
    gradient `d_log_prob` `[n]` of the ids' log-probabilities."""
    return torch.ops.npu.npu_cross_entropy_loss_backward(-d_log_prob, log_probs, ids.long(), None, None, None, "none")


# ---------------------------------------------------------------------------------------------------------------------
# Attention by segments: aclnnFlashAttentionVarLenScore, aclnnFlashAttentionUnpaddingScoreGrad
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _takes_sinks() -> bool:
    """Whether this torch_npu's attention has an argument for sinks, in forward and backward."""
    operators = torch.ops.npu.npu_fusion_attention, torch.ops.npu.npu_fusion_attention_grad
    return all("sink" in {argument.name for argument in each.default._schema.arguments} for each in operators)


def uncovered_attention(
    dtype: torch.dtype, head_sizes: tuple[int, int], *, heads: int | None, tokens: int | None, segments: int,
    softcap: float | None, sinks: bool,
) -> str | None:  # fmt: skip
    """Returns why `npu_fusion_attention` does not cover attention by segments, or None if it does. `heads` and `tokens`
    are None if unknown. The limits are those of op-plugin's page and, for backward, of CANN's ops-transformer."""
    size, of_values = head_sizes
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{_name(dtype)} q, k and v"
    if softcap is not None:
        return f"softcap={softcap!r}: npu_fusion_attention has none"
    if size != of_values:
        return f"heads of {size} elements with values of {of_values}: their backward wants one size"
    if size > _MAX_ATTENTION_HEAD:
        return f"heads of {size} elements, of which {_MAX_ATTENTION_HEAD} are allowed"
    if heads is not None and heads > _MAX_HEADS:
        return f"{heads} heads, of which {_MAX_HEADS} are allowed"
    if segments > _MAX_SEGMENTS:
        return f"{segments} segments, of which {_MAX_SEGMENTS} are allowed"
    if tokens is not None and tokens > _MAX_TOKENS:
        return f"{tokens} tokens, of which {_MAX_TOKENS} are allowed"
    if sinks and dtype == torch.float32:
        return "sinks in float32: their backward takes 16 bits"
    if sinks and not _takes_sinks():
        return "sinks: this torch_npu's npu_fusion_attention has no argument for them"
    return None


@functools.cache
def _causal(where: torch.device) -> torch.Tensor:
    """Returns the mask of sparse modes 3 and 4, true for hidden keys. It has this size for all lengths."""
    with torch.inference_mode(False):
        return torch.ones(2048, 2048, dtype=torch.bool, device=where).triu_(1)


def _attention_arguments(q: torch.Tensor, sinks: torch.Tensor | None, segments: Any, options: Any) -> dict[str, Any]:
    """Returns the arguments that forward and backward share.

    Sparse mode 3 is causal; mode 4 is a band from `pre_tockens` keys before the query's position to `next_tockens` keys
    after it. Both are aligned at the lower right corner of each segment, so that the last query sees the last key.
    Sources: op-plugin's `docs/context/torch_npu-npu_fusion_attention.md` and `sparse_mode_introduction` of CANN's
    ops-transformer.
    """
    given = {
        "atten_mask": _causal(q.device),
        "keep_prob": 1.0 - options.dropout,
        "actual_seq_qlen": segments.q_ends,
        "actual_seq_kvlen": segments.k_ends,
        "sparse_mode": 3,
    }
    if options.window is not None:
        given |= {"sparse_mode": 4, "pre_tockens": options.window - 1, "next_tockens": 0}
    if sinks is not None:
        given["sink"] = sinks.float()
    return given


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: Any, options: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Any]:
    """Returns o, the tensors that backward needs, and the random state; see `ops/attention/varlen_attention.py`. The
    operator takes the segments' ends as lists on the host."""
    out, maximum, total, reserved, *random = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[1], "TND", scale=options.scale, **_attention_arguments(q, sinks, segments, options)
    )
    return out, (maximum, total, reserved), random


def attention_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    out: torch.Tensor, saved: tuple[torch.Tensor, ...], segments: Any, options: Any, random: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of q, k, v and the sinks."""
    maximum, total, reserved = saved
    seed, offset, numels = random
    dq, dk, dv, _, *dsinks = torch.ops.npu.npu_fusion_attention_grad(
        q, k, v, dy, q.shape[1], "TND", softmax_max=maximum, softmax_sum=total, softmax_in=reserved, attention_in=out,
        scale_value=options.scale, seed=seed, offset=offset, numels=numels,
        **_attention_arguments(q, sinks, segments, options),
    )  # fmt: skip
    return dq, dk, dv, None if sinks is None else dsinks[0].to(sinks.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Products in groups: aclnnGroupedMatmul
#
# npu_moe_token_permute and npu_moe_token_unpermute move rows to experts and back, but do not fit here. They also move
# rows without an expert on this rank, unless the host knows the number of other rows (num_out_tokens), and multiply
# them by a weight of zero, which does not remove a NaN. And backward of the second reads the experts' results
# (permuted_tokens), which `ops/experts/moe_experts.py` does not save.
# ---------------------------------------------------------------------------------------------------------------------


def uncovered_experts(dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Returns why `npu_grouped_matmul` does not cover rows of these sizes and dtype, or None if it does. The limit is
    from op-plugin's page for it."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{_name(dtype)} rows"
    wide = [size for size in sizes if 2 * size >= _MAX_INNER]
    return f"rows of up to {2 * wide[0]} elements, of which less than {_MAX_INNER} are allowed" if wide else None


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows `[S, K]` in groups by each group's matrix of `[G, K, M]` (or a transposed view). `ends` has the
    ends of the groups, `[G]` int64."""
    return torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=0, group_list_type=0
    )[0]


def outer_products(x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Computes `[G, K, M]` from rows `[S, K]` and `[S, M]`, summing over the rows of each group."""
    return torch.ops.npu.npu_grouped_matmul(
        [x.t()], [dy], group_list=ends, split_item=3, group_type=2, group_list_type=0
    )[0]
