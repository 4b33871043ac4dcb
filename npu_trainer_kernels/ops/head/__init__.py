"""The LM head and its losses. All losses use one engine; each loss is a file with a few vector operations.

1. `engine.py`: the maths, and the loop over chunks of tokens: logits, statistics, coefficients, gradient.
2. `statistics.py`, `gradient.py`, `fused.py`: the kernels for a chunk; `divergence.py`: the kernel for the chunks of a
   student and a teacher; `chunks.py`: the matrix products and sums of a chunk.
3. `head_options.py`: the transform of logits; `objective.py`: the losses whose gradient forward computes;
   `vocabulary_slices.py`: a vocabulary that is sharded over ranks; `reference.py`: plain PyTorch.
4. `linear_cross_entropy.py`, `linear_logprob.py`, `linear_divergence.py`, `linear_topk_divergence.py`, `grpo_loss.py`
   (with the kernel of `grpo_formula.py`): the losses.
"""

from .grpo_formula import GrpoOptions, GrpoTokens, batch_tokens, token_losses
from .grpo_loss import (
    GrpoLossOutput,
    GrpoPlan,
    fused_linear_grpo_loss,
    fused_linear_grpo_loss_reference,
    grpo_loss,
    grpo_loss_reference,
    planned,
)
from .head_options import HeadOptions, transformed
from .linear_cross_entropy import LinearCrossEntropyOutput, fused_linear_cross_entropy, linear_cross_entropy_reference
from .linear_divergence import LinearDivergenceOutput, linear_divergence, linear_divergence_reference
from .linear_logprob import (
    OUTPUTS,
    LinearLogProbOutput,
    linear_logprob,
    linear_logprob_reference,
    logprob_options,
    planned_linear_logprob,
)
from .linear_topk_divergence import linear_topk_divergence, linear_topk_divergence_reference, top_log_probs
from .objective import GIVE_UP, LogProbObjective, Objective
from .vocabulary_slices import unshared

__all__ = [
    "GIVE_UP",
    "OUTPUTS",
    "GrpoLossOutput",
    "GrpoOptions",
    "GrpoPlan",
    "GrpoTokens",
    "HeadOptions",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LinearLogProbOutput",
    "LogProbObjective",
    "Objective",
    "batch_tokens",
    "fused_linear_cross_entropy",
    "fused_linear_grpo_loss",
    "fused_linear_grpo_loss_reference",
    "grpo_loss",
    "grpo_loss_reference",
    "linear_cross_entropy_reference",
    "linear_divergence",
    "linear_divergence_reference",
    "linear_logprob",
    "linear_logprob_reference",
    "linear_topk_divergence",
    "linear_topk_divergence_reference",
    "logprob_options",
    "planned",
    "planned_linear_logprob",
    "token_losses",
    "top_log_probs",
    "transformed",
    "unshared",
]
