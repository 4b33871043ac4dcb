"""The ops, as functions of tensors. The docstring of each op states its formulas, shapes, dtypes and errors."""

from .attention import Segments, Shared, take, varlen_attention, varlen_attention_reference
from .embedding import embedding, embedding_reference
from .experts import moe_experts, moe_experts_reference
from .head import (
    GrpoLossOutput,
    GrpoOptions,
    LinearCrossEntropyOutput,
    LinearLogProbOutput,
    fused_linear_cross_entropy,
    fused_linear_grpo_loss,
    fused_linear_grpo_loss_reference,
    grpo_loss,
    grpo_loss_reference,
    linear_cross_entropy_reference,
    linear_logprob,
    linear_logprob_reference,
)
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
    "LinearLogProbOutput",
    "Segments",
    "Shared",
    "add_rms_norm",
    "add_rms_norm_reference",
    "embedding",
    "embedding_reference",
    "fused_linear_cross_entropy",
    "fused_linear_grpo_loss",
    "fused_linear_grpo_loss_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "grpo_loss",
    "grpo_loss_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy_reference",
    "linear_logprob",
    "linear_logprob_reference",
    "linear_rms_norm",
    "linear_rms_norm_reference",
    "moe_experts",
    "moe_experts_reference",
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
