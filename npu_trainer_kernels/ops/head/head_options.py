"""Shared by the steps on a chunk of logits: the transform of logits in torch and in Triton, the requested statistics,
and the ops that fall back to torch if a kernel fails. `ops/head/engine.py` has the maths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import device, tiling
from ...support.triton import jit, libdevice, tl
from ..checks import is_number
from ..fallback import falls_back

__all__ = ["HeadOptions", "guarded", "kernel_flags", "row_blocks", "slope", "transform", "transformed", "twice_sigmoid"]

guarded = falls_back("linear_cross_entropy", "linear_logprob", "linear_divergence", "grpo_loss")


@dataclass(frozen=True)
class HeadOptions:
    """The transform of logits and the requested statistics.

    Attributes:
        temperature: divides the logits; positive.
        softcap: `softcap * tanh(logits / softcap)`, applied after `logit_scale` and before the temperature; or None.
        logit_scale: multiplies the logits first.
        entropy, mean, log_sum_sq, argmax: the statistics to compute in addition to `log_prob` and `lse`.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    entropy: bool = False
    mean: bool = False
    log_sum_sq: bool = False
    argmax: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a positive finite number; got {self.temperature!r}")
        if self.softcap is not None and not (is_number(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be None or a positive finite number; got {self.softcap!r}")
        if not is_number(self.logit_scale):
            raise ValueError(f"logit_scale must be a finite number; got {self.logit_scale!r}")

    @property
    def factors(self) -> tuple[float, float]:
        """(inner, outer) of z = outer * tanh(inner * l) with a softcap, z = inner * l without."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


def transform(logits: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    """Computes z of `ops/head/engine.py` in the dtype of `logits`."""
    inner, outer = options.factors
    if options.softcap is not None:
        return outer * torch.tanh(inner * logits)
    return logits if inner == 1.0 else inner * logits


def kernel_flags(options: HeadOptions, where: torch.device) -> dict[str, Any]:
    """Returns the constants of every kernel that transforms logits."""
    inner, _ = options.factors
    cap = 2 if options.softcap is not None and device.has_libdevice(where) else options.softcap is not None
    return {"HAS_CAP": cap, "IS_IDENTITY": options.softcap is None and inner == 1.0}


def row_blocks(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cuts `[n, V]` logits into the blocks of rows that torch computes at a time.

    On the host the fp32 copies of a block stay in the processor's cache. Elsewhere all rows are one block, because each
    block costs launches."""
    if not device.spec(logits.device).is_host:
        return (logits,)
    return logits.split(tiling.host_rows(logits.shape[1]))


@jit
def transformed(x, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """Computes z(l) in fp32."""
    z = x.to(tl.float32)
    if HAS_CAP == 2:
        z = outer * libdevice.tanh(inner * z)
    elif HAS_CAP:
        z = twice_sigmoid(z, inner, outer) - outer
    elif not IS_IDENTITY:
        z = inner * z
    return z


@jit
def twice_sigmoid(x, inner, outer):
    """Computes 2 outer sigmoid(2 inner x) = outer (tanh(inner x) + 1). An NPU needs four instructions for it; CUDA's
    fast exponential would lose digits."""
    return (2.0 * outer) / (1.0 + tl.exp((-2.0 * inner) * x))


@jit
def slope(z, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """Computes dz/dl at z(l)."""
    if HAS_CAP:
        t = z / outer
        return (outer * inner) * (1.0 - t * t)
    elif IS_IDENTITY:
        return 1.0
    else:
        return inner
