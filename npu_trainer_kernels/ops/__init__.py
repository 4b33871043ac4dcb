"""The ops, as functions of tensors. The docstring of each op states its formulas, shapes, dtypes and errors.

A call of an op, in this order:

1. The op's file checks the arguments (`checks.py`) and asks `backends` which backend computes the call.
2. Steps that may fail are guarded (`fallback.py`): PyTorch takes over for a kernel that cannot be compiled. `trial.py`
   compares an operator of PyTorch or the vendor with its results before the first use.
3. `launch.py` launches the kernels. `blocks.py` and `gates.py` have the parts that several kernels share, and `host.py`
   the host's functions before a launch.

`embedding.py`, `rope.py` and `swiglu.py` are ops of one file; the folders are those of several. `slices.py` runs a
function of rows over slices of them.
"""

from .attention import (
    QkNorm,
    Segments,
    Shared,
    append_to_cache,
    decode_attention,
    decode_attention_reference,
    qk_norm_rope_append,
    take,
    varlen_attention,
    varlen_attention_reference,
)
from .convolution import causal_conv1d, causal_conv1d_reference
from .embedding import embedding, embedding_reference
from .experts import moe_experts, moe_experts_reference
from .head import (
    GrpoLossOutput,
    GrpoOptions,
    LinearCrossEntropyOutput,
    LinearDivergenceOutput,
    LinearLogProbOutput,
    fused_linear_cross_entropy,
    fused_linear_grpo_loss,
    fused_linear_grpo_loss_reference,
    grpo_loss,
    grpo_loss_reference,
    linear_cross_entropy_reference,
    linear_divergence,
    linear_divergence_reference,
    linear_logprob,
    linear_logprob_reference,
    linear_topk_divergence,
    linear_topk_divergence_reference,
)
from .linear_attention import gated_delta_rule, gated_delta_rule_reference
from .norms import (
    add_rms_norm,
    add_rms_norm_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    layer_norm,
    layer_norm_reference,
    linear_rms_norm,
    linear_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from .rope import rope, rope_reference
from .swiglu import swiglu, swiglu_linear, swiglu_linear_reference, swiglu_reference

__all__ = [
    "GrpoLossOutput",
    "GrpoOptions",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LinearLogProbOutput",
    "QkNorm",
    "Segments",
    "Shared",
    "add_rms_norm",
    "add_rms_norm_reference",
    "append_to_cache",
    "causal_conv1d",
    "causal_conv1d_reference",
    "decode_attention",
    "decode_attention_reference",
    "embedding",
    "embedding_reference",
    "fused_linear_cross_entropy",
    "fused_linear_grpo_loss",
    "fused_linear_grpo_loss_reference",
    "gated_delta_rule",
    "gated_delta_rule_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "grpo_loss",
    "grpo_loss_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy_reference",
    "linear_divergence",
    "linear_divergence_reference",
    "linear_logprob",
    "linear_logprob_reference",
    "linear_rms_norm",
    "linear_rms_norm_reference",
    "linear_topk_divergence",
    "linear_topk_divergence_reference",
    "moe_experts",
    "moe_experts_reference",
    "qk_norm_rope_append",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "swiglu",
    "swiglu_linear",
    "swiglu_linear_reference",
    "swiglu_reference",
    "take",
    "varlen_attention",
    "varlen_attention_reference",
]
