"""GRPO's loss of each token, from its log-probability and the trainer's batch. Only this file implements the formulas
of `ops/head/grpo_loss.py` and the weights of the tokens.

For token-level losses a kernel computes the same as `grpo_terms` and autograd, in one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..checks import check_choice, is_number
from ..fallback import falls_back
from ..launch import launch

__all__ = [
    "CLIPPED",
    "LEVELS",
    "LOSS_TYPES",
    "GrpoOptions",
    "GrpoTokens",
    "batch_tokens",
    "grpo_objective",
    "grpo_terms",
    "token_gradient",
    "token_losses",
]

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# vespo clamps logarithms of ratios to these bounds.
_LEAST_LOG, _MOST_LOG = math.log(1e-8), 20.0


@dataclass(frozen=True)
class GrpoOptions:
    """The numbers of the formulas in `ops/head/grpo_loss.py`. Raises `ValueError` for values outside their range."""

    loss_type: str = "dapo"
    importance_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    bias_corrected_kl: bool = False
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_level", self.importance_level, LEVELS)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if not isinstance(field.default, str | bool) and not (
                is_number(value) or (value is None and field.default is None)
            ):
                raise ValueError(f"{name} must be a finite number; got {value!r}")
            if name.startswith("sapo_temperature") and not value > 0:
                raise ValueError(f"{name} must be positive; got {value!r}")
            if name in ("epsilon_low", "epsilon_high", "delta") and value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative; got {value!r}")
        if self.delta is not None and self.loss_type not in CLIPPED:
            raise ValueError(f"delta={self.delta!r} has no effect with loss_type={self.loss_type!r}; leave it None")
        if self.bias_corrected_kl and self.beta == 0.0:
            raise ValueError("bias_corrected_kl=True has no effect with beta=0.0")

    @property
    def upper(self) -> float:
        """Returns epsilon_high, or epsilon_low if that is None."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high


# ---------------------------------------------------------------------------------------------------------------------
# Batch
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrpoTokens:
    """The loss's inputs for each of the n scored tokens, in the order of the head's rows, as `[n]` fp32 tensors.

    Attributes:
        advantage: A.
        weight: the weight of the token in the loss; 0 for a token that is scored but not trained on.
        counted: 1 for tokens that count towards their completion's ratio, else 0.
        old: l', or None when on-policy.
        reference: l'', or None with beta = 0.
        policy_weight: q e, or None for ones.
        log_sampler_ratio: log q, for vespo; None for zeros.
        entropy_weight: the weight of the token in the mean entropy, or None without an entropy bonus.
        sequence: int64, the index of the token's completion.
        lengths: `[B]`, the number of counted tokens of each completion (at least 1).
    """

    advantage: torch.Tensor
    weight: torch.Tensor
    counted: torch.Tensor
    old: torch.Tensor | None
    reference: torch.Tensor | None
    policy_weight: torch.Tensor | None
    log_sampler_ratio: torch.Tensor | None
    entropy_weight: torch.Tensor | None
    sequence: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return self.advantage.shape[0]

    def of(self, chunk: slice) -> GrpoTokens:
        """Returns the tokens of one chunk."""
        cut = {
            f.name: value[chunk]
            for f in fields(self)
            if f.name != "lengths" and (value := getattr(self, f.name)) is not None
        }
        return replace(self, **cut)

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Returns for each token the sum of the counted values of its completion."""
        sums = values.new_zeros(self.lengths.shape).index_add(0, self.sequence, values * self.counted)
        return sums[self.sequence]


def batch_tokens(
    o: GrpoOptions,
    rows: torch.Tensor,
    mask: torch.Tensor,
    *,
    advantages: torch.Tensor,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    importance_ratio: torch.Tensor | None = None,
    entropy_mask: torch.Tensor | None = None,
    max_completion_length: int | None = None,
    num_items: int | float | torch.Tensor | None = None,
    divisor: torch.Tensor | float | None = None,
    bonus_divisor: float = 1.0,
) -> GrpoTokens:
    """Computes the loss's inputs for each token from a trainer's batch.

    Args:
        o: the options of the loss.
        rows: `[n]`, the indices into the flattened `[B, T]` of the scored tokens, one completion after the other.
        mask: fp32 `[B, T]`, 1 for the scored tokens that are trained on, else 0.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        old: l' `[B, T]`; None for on-policy.
        reference: l'' `[B, T]`, with beta.
        importance_ratio: q of the sampler, `[B]`, `[B, 1]` or `[B, T]`.
        entropy_mask: e `[B, T]`.
        max_completion_length: for dr_grpo.
        num_items: the divisor of dapo, cispo and vespo; None for the number of tokens of the batch.
        divisor: an additional divisor of all weights, for gradient accumulation.
        bonus_divisor: an additional divisor of the entropy's weights.
    """
    lengths = mask.sum(1).clamp(min=1.0)
    total = mask.sum().clamp(min=1.0)
    weight = _weight_of_each(o.loss_type, lengths, total, max_completion_length, num_items)
    weight = weight if divisor is None else weight / divisor
    sequence = torch.arange(mask.shape[0], device=mask.device).unsqueeze(1).expand(mask.shape).reshape(-1)[rows]

    def pick(t: torch.Tensor | None) -> torch.Tensor | None:
        """Returns each token's number, or that of its completion."""
        if t is None:
            return None
        return t.detach().float().reshape(-1)[rows if t.shape == mask.shape else sequence]

    policy_weight, log_sampler = importance_ratio, None
    if importance_ratio is not None and o.loss_type == "vespo":
        policy_weight, log_sampler = None, importance_ratio.detach().float().log().clamp(_LEAST_LOG, _MOST_LOG)
        if log_sampler.shape == mask.shape:
            log_sampler = (log_sampler * mask).sum(1)
    if entropy_mask is not None:
        chosen = entropy_mask.float()
        policy_weight = chosen if policy_weight is None else policy_weight.reshape(mask.shape[0], -1) * chosen
    entropy_weight = None
    if o.entropy_coef:
        effective = mask if entropy_mask is None else mask * entropy_mask
        active = total if entropy_mask is None else effective.sum().clamp(min=1.0)
        entropy_weight = effective / (active * bonus_divisor)
    advantage, counted = pick(advantages), pick(mask)
    assert advantage is not None
    assert counted is not None
    return GrpoTokens(
        advantage=advantage,
        weight=weight[sequence] * counted,
        counted=counted,
        old=pick(old),
        reference=pick(reference),
        policy_weight=pick(policy_weight),
        log_sampler_ratio=pick(log_sampler),
        entropy_weight=pick(entropy_weight),
        sequence=sequence,
        lengths=lengths,
    )


def _weight_of_each(
    loss_type: str,
    lengths: torch.Tensor,
    total: torch.Tensor,
    max_completion_length: int | None,
    num_items: int | float | torch.Tensor | None,
) -> torch.Tensor:
    """Returns the weight of an unmasked token of each completion, `[B]`. `total` counts the tokens of the batch."""
    batch = lengths.shape[0]
    ones = torch.ones_like(lengths)
    if loss_type in ("grpo", "sapo"):
        return 1.0 / (batch * lengths)
    if loss_type == "bnpo":
        return ones / total
    if loss_type == "dr_grpo":
        assert max_completion_length is not None
        return ones / (batch * max_completion_length)
    if loss_type == "luspo":
        return ones / batch
    if isinstance(num_items, torch.Tensor):
        return ones / num_items.detach().reshape(()).to(lengths.device, torch.float32).clamp(min=1.0)
    return ones / (total if num_items is None else max(float(num_items), 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Formula
# ---------------------------------------------------------------------------------------------------------------------


class GrpoTerms(NamedTuple):
    policy: torch.Tensor
    kl: torch.Tensor | None
    ratio: torch.Tensor


def grpo_terms(log_prob: torch.Tensor, tokens: GrpoTokens, o: GrpoOptions) -> GrpoTerms:
    """Computes policy, kl and r of `ops/head/grpo_loss.py`, per token."""
    advantage = tokens.advantage
    log_ratio = log_prob - (log_prob.detach() if tokens.old is None else tokens.old)
    log_weight = log_ratio
    if o.importance_level == "sequence":
        log_weight = tokens.per_sequence(log_ratio) / tokens.lengths[tokens.sequence]
    ratio = log_weight.exp()
    kl = None
    if tokens.reference is not None:
        gap = tokens.reference - log_prob
        kl = gap.exp() - gap - 1
        kl = kl * ratio if o.bias_corrected_kl else kl
    if o.loss_type == "cispo":
        policy = -ratio.clamp(max=o.upper).detach() * advantage * log_prob
    elif o.loss_type == "sapo":
        tau = torch.where(advantage > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
        policy = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    elif o.loss_type == "vespo":
        policy = -_phi(log_ratio.detach(), tokens, o) * advantage * log_prob
    else:
        clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.upper)
        ratio = ratio if o.delta is None else ratio.clamp(max=o.delta)
        policy = -torch.min(ratio * advantage, clipped * advantage)
    return GrpoTerms(policy, kl, ratio)


def _phi(log_ratio: torch.Tensor, tokens: GrpoTokens, o: GrpoOptions) -> torch.Tensor:
    log_w = tokens.per_sequence(log_ratio.clamp(-_MOST_LOG, _MOST_LOG))
    if tokens.log_sampler_ratio is not None:
        log_w = log_w + tokens.log_sampler_ratio
    log_w = log_w.clamp(_LEAST_LOG, _MOST_LOG)
    up = tokens.advantage >= 0
    k = torch.where(up, o.vespo_k_pos, o.vespo_k_neg)
    lam = torch.where(up, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def token_losses(log_prob: torch.Tensor, tokens: GrpoTokens, o: GrpoOptions) -> torch.Tensor:
    """Computes q e policy + beta kl, per token."""
    terms = grpo_terms(log_prob, tokens, o)
    policy = terms.policy if tokens.policy_weight is None else terms.policy * tokens.policy_weight
    return policy if terms.kl is None else policy + o.beta * terms.kl


def grpo_objective(
    log_prob: torch.Tensor, entropy: torch.Tensor | None, tokens: GrpoTokens, o: GrpoOptions
) -> torch.Tensor:
    """Computes the part of the loss that these tokens contribute."""
    loss = (token_losses(log_prob, tokens, o) * tokens.weight).sum()
    if tokens.entropy_weight is not None and entropy is not None:
        loss = loss - o.entropy_coef * (entropy * tokens.entropy_weight).sum()
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit(lengths=("n",))
def _token_kernel(
    log_prob,  # [n] fp32; likewise all other pointers
    old,  # read if HAS_OLD
    reference,  # read if HAS_REFERENCE
    advantage,
    weight,
    policy_weight,  # read if HAS_POLICY_WEIGHT
    loss,  # written: the token's part of the loss
    factor,  # written: the derivative of that
    n,
    low,
    high,
    delta,
    beta,
    tau_up,
    tau_down,
    FORM: tl.constexpr,  # 0 clipped, 1 cispo, 2 sapo
    HAS_OLD: tl.constexpr,
    HAS_REFERENCE: tl.constexpr,
    HAS_POLICY_WEIGHT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    CORRECTED: tl.constexpr,  # multiply the KL by the ratio
    BLOCK: tl.constexpr,
):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < n
        lp = tl.load(log_prob + at, mask=mask, other=0.0)
        a = tl.load(advantage + at, mask=mask, other=0.0)
        w = tl.load(weight + at, mask=mask, other=0.0)
        r = tl.full([BLOCK], 1.0, tl.float32)
        if HAS_OLD:
            r = tl.exp(lp - tl.load(old + at, mask=mask, other=0.0))
        if FORM == 1:
            d = -tl.where(r > high, high, r) * a
            policy = d * lp
        elif FORM == 2:
            tau = tl.where(a > 0, tau_up, tau_down)
            sigmoid = tl.sigmoid(tau * (r - 1.0))
            policy = -sigmoid * 4.0 / tau * a
            d = -4.0 * a * sigmoid * (1.0 - sigmoid) * r
        else:
            clipped = tl.where(r > high, high, tl.where(r < low, low, r))
            bounded = r
            passes = tl.full([BLOCK], 1.0, tl.float32)
            if HAS_DELTA:
                bounded = tl.where(r > delta, delta, r)
                passes = (r <= delta).to(tl.float32)
            passes_clip = ((r >= low) & (r <= high)).to(tl.float32)
            u = bounded * a
            v = clipped * a
            policy = -tl.where(v < u, v, u)
            # If u and v are equal, both have the same derivative or a is 0.
            d = -a * r * tl.where(v < u, passes_clip, passes)
        if HAS_POLICY_WEIGHT:
            q = tl.load(policy_weight + at, mask=mask, other=0.0)
            policy *= q
            d *= q
        if HAS_REFERENCE:
            gap = tl.load(reference + at, mask=mask, other=0.0) - lp
            e = tl.exp(gap)
            kl = e - gap - 1.0
            d_kl = 1.0 - e
            if CORRECTED:
                kl *= r
                d_kl = d_kl * r + kl
            policy += beta * kl
            d += beta * d_kl
        tl.store(loss + at, policy * w, mask=mask)
        tl.store(factor + at, d * w, mask=mask)


_FORMS = {**dict.fromkeys(CLIPPED, 0), "cispo": 1, "sapo": 2}


@falls_back("grpo_loss")
def token_gradient(
    log_prob: torch.Tensor, tokens: GrpoTokens, o: GrpoOptions, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes these tokens' part of a token-level loss and its gradient with respect to log_prob."""
    if backend not in ("torch", "vendor") and o.loss_type in _FORMS and o.importance_level == "token" and len(tokens):
        n = len(tokens)
        # Align both rows to 16 bytes for every n, because Triton would compile another kernel for unaligned rows.
        out = torch.empty(2, -(-n // 4) * 4, dtype=torch.float32, device=log_prob.device)[:, :n]
        given = [log_prob, tokens.old, tokens.reference, tokens.advantage, tokens.weight, tokens.policy_weight]
        spec = device.spec(log_prob.device)
        tile = tiling.token_block(spec)
        launch(
            _token_kernel, (tiling.programs(-(-n // tile.size), spec),),
            (*(log_prob if t is None else t.contiguous() for t in given), out[0], out[1], n,
             *map(float, (1 - o.epsilon_low, o.upper if o.loss_type == "cispo" else 1 + o.upper, o.delta or 0.0,
                          o.beta, o.sapo_temperature_pos, o.sapo_temperature_neg))),
            {"FORM": _FORMS[o.loss_type], "HAS_OLD": tokens.old is not None,
             "HAS_REFERENCE": tokens.reference is not None, "HAS_POLICY_WEIGHT": tokens.policy_weight is not None,
             "HAS_DELTA": o.delta is not None, "CORRECTED": o.bias_corrected_kl, "BLOCK": tile.size, **tile.options},
        )  # fmt: skip
        return out[0].sum(), out[1]
    with torch.enable_grad():
        leaf = log_prob.detach().requires_grad_()
        value = grpo_objective(leaf, None, tokens, o)
    return value.detach(), torch.autograd.grad(value, leaf)[0]
