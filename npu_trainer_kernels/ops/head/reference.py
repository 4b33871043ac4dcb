"""The head's statistics by their definitions, on full logits, in plain differentiable PyTorch.

The references use only the names of the engine's options and statistics, and none of its functions. So a fault in the
engine's transform of logits shows as a difference between the two, rather than being a fault of both.
"""

from __future__ import annotations

import torch

from .head_options import HeadOptions
from .statistics import HeadStatistics

__all__ = ["head_statistics_reference", "logits_statistics_reference", "transformed_logits"]


def transformed_logits(
    logits: torch.Tensor, *, logit_scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Computes z = softcap(logit_scale * logits) / temperature, operation by operation, in fp32 (fp64 for fp64)."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    # Skip operations without effect, because benchmarks time the references.
    if logit_scale != 1.0:
        z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z if temperature == 1.0 else z / temperature


def head_statistics_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    options: HeadOptions,
    class_weights: torch.Tensor | None = None,
) -> HeadStatistics:
    """Computes the statistics of the head for every row of x `[n, H]`."""
    return logits_statistics_reference(torch.nn.functional.linear(x, weight, bias), ids, options, class_weights)


def logits_statistics_reference(
    logits: torch.Tensor, ids: torch.Tensor, options: HeadOptions, class_weights: torch.Tensor | None = None
) -> HeadStatistics:
    """Computes the statistics of logits `[n, V]`."""
    z = transformed_logits(
        logits, logit_scale=options.logit_scale, softcap=options.softcap, temperature=options.temperature
    )
    lse = torch.logsumexp(z, -1)
    log_p = z - lse.unsqueeze(-1)
    p = log_p.exp()
    u = 1.0 / z.shape[-1] if class_weights is None else class_weights.to(z.dtype)
    return HeadStatistics(
        log_prob=log_p.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1),
        lse=lse,
        entropy=-(p * log_p).sum(-1) if options.entropy else None,
        mean=(z * u).sum(-1) if options.mean else None,
        log_sum_sq=torch.log((p * p).sum(-1)).detach() if options.log_sum_sq else None,
        argmax=z.argmax(-1) if options.argmax else None,
    )
