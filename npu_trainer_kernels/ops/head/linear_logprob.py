"""Per-token log-probability of ids under a linear head, with entropy and monitoring quantities on request.

    z_i = softcap(logit_scale * (x_i W^T + bias)) / temperature
    log_prob_i = z_i[id_i] - log sum_j exp z_ij

`ops/head/engine.py`, which this module calls, has the maths of the other outputs and of the gradients.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ... import backends
from ...support.opaque import opaque
from ..checks import check_choices, check_head, check_range
from .engine import head_statistics
from .head_options import HeadOptions
from .objective import Objective
from .reference import head_statistics_reference
from .vocabulary_slices import own_part

__all__ = [
    "LinearLogProbOutput",
    "linear_logprob",
    "linear_logprob_reference",
    "logprob_options",
    "planned_linear_logprob",
]

OUTPUTS = ("entropy", "is_top1", "mean_logit", "log_sum_sq_probs")


class LinearLogProbOutput(NamedTuple):
    """fp32 tensors of the ids' shape (`is_top1`: bool); None for those that were not requested.

    Attributes:
        log_prob: log-probability of the id; differentiable.
        entropy: entropy of the distribution, in nats; differentiable.
        is_top1: whether the id is the most likely one (the first of equals).
        mean_logit: mean of z over the vocabulary; differentiable.
        log_sum_sq_probs: log sum_j p_j^2; not differentiable.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    is_top1: torch.Tensor | None
    mean_logit: torch.Tensor | None
    log_sum_sq_probs: torch.Tensor | None


def logprob_options(
    temperature: float, softcap: float | None, logit_scale: float, outputs: Sequence[str]
) -> HeadOptions:
    """Converts the arguments of `linear_logprob` to the engine's options; raises the same `ValueError`."""
    check_choices("outputs", outputs, OUTPUTS)
    return HeadOptions(
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        entropy="entropy" in outputs,
        mean="mean_logit" in outputs,
        log_sum_sq="log_sum_sq_probs" in outputs,
        argmax="is_top1" in outputs,
    )


def linear_logprob_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> LinearLogProbOutput:
    """Computes the op in plain PyTorch, on full logits."""
    s = head_statistics_reference(x, weight, ids, bias, logprob_options(temperature, softcap, logit_scale, outputs))
    return LinearLogProbOutput(
        s.log_prob, s.entropy, None if s.argmax is None else s.argmax == ids, s.mean, s.log_sum_sq
    )


def linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    backend: str | None = None,
) -> LinearLogProbOutput:
    """Computes the log-probabilities of `ids` under softmax of a linear head, from the logits of one chunk at a time.

    Args:
        x: hidden states `[..., H]`, fp32, bf16 or fp16, any strides. Products run in this dtype, or in autocast's.
        weight: `[V, H]`; cast to that dtype when it differs. Its gradient is accumulated in fp32. A DTensor if the
            vocabulary is sharded over ranks; see `fused_linear_cross_entropy`.
        ids: int64 or int32 of x's leading shape, in `[0, V)` (checked on the CPU; on an accelerator under
            NPU_KERNELS_DEBUG=1, since the check waits for the device).
        bias: `[V]` or None.
        temperature: divides the logits; positive.
        softcap: `softcap * tanh(logits / softcap)` before the temperature; None for no cap.
        logit_scale: multiplies the logits first.
        outputs: any of "entropy", "is_top1", "mean_logit", "log_sum_sq_probs".
        backend: overrides the choice of `backends.choose("linear_logprob", ...)`.

    Returns:
        `LinearLogProbOutput`, fp32, of the ids' shape.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not match, tensors on several devices, options or ids out of range.

    Forward costs one product and backward three, because backward computes the logits again.
    """
    options = logprob_options(temperature, softcap, logit_scale, outputs)
    return planned_linear_logprob(x, weight, ids, bias, options, backend=backend)


@opaque
def planned_linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    options: HeadOptions,
    *,
    backend: str | None,
    objective: Objective | None = None,
    chunk_rows: Sequence[int] | None = None,
    on_mismatch: Callable[[float], None] | None = None,
) -> LinearLogProbOutput:
    """`linear_logprob` with an objective that predicts the gradients of its outputs; see `head_statistics`."""
    check_head(x, weight, "ids", ids, bias)
    check_range("ids", ids, x.device, weight.shape[0])
    flat_ids = ids.reshape(-1)
    weight, bias, part = own_part(weight, bias)
    _, s = head_statistics(
        x.reshape(-1, x.shape[-1]), weight, flat_ids, bias, options,
        objective=objective, chunk_rows=chunk_rows, on_mismatch=on_mismatch, part=part,
        backend=backends.choose("linear_logprob", x.device, backend, at=lambda: backends.of_head(x, weight)),
    )  # fmt: skip
    is_top1 = None if s.argmax is None else s.argmax == flat_ids
    shaped = (None if t is None else t.view(ids.shape) for t in (s.log_prob, s.entropy, is_top1, s.mean, s.log_sum_sq))
    return LinearLogProbOutput(*shaped)  # type: ignore[arg-type]
