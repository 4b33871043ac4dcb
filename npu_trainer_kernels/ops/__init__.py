"""The ops, as functions of tensors. See each one's docstring for formula, shapes, dtypes and errors."""

from .linear_cross_entropy import (
    LinearCrossEntropyOutput,
    fused_linear_cross_entropy,
    linear_cross_entropy_reference,
)
from .linear_logprob import LinearLogProbOutput, linear_logprob, linear_logprob_reference
from .rms_norm import rms_norm, rms_norm_reference

__all__ = [
    "LinearCrossEntropyOutput",
    "LinearLogProbOutput",
    "fused_linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_logprob",
    "linear_logprob_reference",
    "rms_norm",
    "rms_norm_reference",
]
