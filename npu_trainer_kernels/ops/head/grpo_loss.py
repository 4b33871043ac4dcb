"""GRPO and its relatives at the LM head: loss and gradients in one pass over each chunk of logits.

For token t of completion b, with log-probability l, old log-probability l' (when on-policy, l without gradient),
reference log-probability l'', advantage A and importance ratio of the sampler q (1 by default):

    log r   = l - l'                               importance_level "token"
            = mean over the completion of l - l'   importance_level "sequence" (GSPO)
    r       = exp(log r)
    kl      = exp(l'' - l) - (l'' - l) - 1         times r with `bias_corrected_kl`

    policy  = -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)    grpo bnpo dr_grpo dapo luspo
            = -stop(min(r, epsilon_high)) A l                                        cispo
            = -4 / tau sigmoid(tau (r - 1)) A        tau by the sign of A            sapo
            = -stop(phi) A l                                                         vespo

    phi     = exp(lambda + k log w - lambda w)     w: ratio of the whole completion; k and lambda by the sign of A

    loss    = sum_bt weight_bt (q_bt e_bt policy_bt + beta kl_bt) - entropy_coef mean_t H_t

with e the entropy mask, H the entropy, and the weight of an unmasked token by loss type:

    grpo, sapo    1 / (B length_b)            bnpo     1 / tokens in the batch
    dr_grpo       1 / (B max_completion_length)   luspo   1 / B
    dapo, cispo, vespo   1 / num_items (the tokens in the batch by default)

These are the definitions of TRL's `GRPOTrainer._compute_loss`; tests compare them with it option by option. With the
statistics of `ops/head/engine.py` the loss is arithmetic on `[n]` numbers. Autograd on those numbers gives the gradient
with respect to log-probability and entropy, and the head's kernels do the rest. For losses of each token by itself one
kernel (`grpo_formula`) replaces about fifty PyTorch kernels per chunk.

A token's gradient depends on the log-probabilities of other tokens only through the sequence-level ratio. So forward
computes the gradient (mode planned) for every token-level loss, for on-policy sequence-level losses (`planned` below),
and for off-policy ones if each completion fits in a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ... import backends, device, tiling
from ...support.opaque import opaque
from ..checks import check_float, check_head, check_ids, check_range, check_same_device, is_number
from .engine import head_statistics, logits_statistics
from .grpo_formula import CLIPPED, GrpoOptions, GrpoTokens, batch_tokens, grpo_objective, grpo_terms, token_gradient
from .head_options import HeadOptions
from .objective import LogProbObjective, Objective
from .reference import head_statistics_reference, logits_statistics_reference
from .statistics import HeadStatistics
from .vocabulary_slices import own_part

__all__ = [
    "GrpoLossOutput",
    "GrpoPlan",
    "fused_linear_grpo_loss",
    "fused_linear_grpo_loss_reference",
    "grpo_loss",
    "grpo_loss_reference",
    "planned",
]


class GrpoPlan(NamedTuple):
    """The arguments with which the head engine computes the gradient in forward.

    Attributes:
        objective: the objective of the engine.
        chunk_rows: the rows at which chunks must end, or None if they may end at any row.
    """

    objective: Objective
    chunk_rows: Sequence[int] | None


def _as_objective(batch: Callable[[], tuple[GrpoTokens, GrpoOptions]], bonus: bool) -> Objective:
    """Makes the objective of the head engine. `bonus` says whether the loss contains the entropy."""

    def value(log_prob: torch.Tensor, entropy: torch.Tensor | None, chunk: slice) -> torch.Tensor:
        tokens, o = batch()
        return grpo_objective(log_prob, entropy, tokens.of(chunk), o)

    def gradient(log_prob: torch.Tensor, chunk: slice, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, o = batch()
        return token_gradient(log_prob, tokens.of(chunk), o, backend)

    if bonus:
        return lambda s, chunk: value(s.log_prob, s.entropy, chunk)
    return LogProbObjective(lambda log_prob, chunk: value(log_prob, None, chunk), gradient)


def planned(
    tokens: Callable[[], GrpoTokens], o: GrpoOptions, on_policy: bool, lengths: Callable[[], Sequence[int]],
    vocab: int, itemsize: int, where: torch.device,
) -> GrpoPlan | None:  # fmt: skip
    """Makes the plan for a batch. Returns None if the gradient needs the log-probabilities of the whole batch first.

    Args:
        tokens: returns the batch; called after the first chunk's logits are launched, so that the device has work.
        o: the options of the loss.
        on_policy: whether the batch has no old log-probabilities.
        lengths: returns the number of tokens of each completion, in order; called only if it matters.
        vocab, itemsize, where: vocabulary size, bytes of a logit and device, which decide the rows of a chunk.
    """
    objective = _as_objective(functools.cache(lambda: _on_policy(tokens(), o)), o.entropy_coef != 0)
    coupled = o.importance_level == "sequence" and not (on_policy and _is_shared(o))
    coupled = coupled or (o.loss_type == "vespo" and not on_policy)
    if not coupled:
        return GrpoPlan(objective, None)
    of_each = lengths()
    rows = tiling.head_chunk(sum(of_each), vocab, itemsize, device.spec(where))
    if max(of_each, default=0) > rows:
        return None
    ends, start, end = [], 0, 0
    for length in of_each:
        if end + length - start > rows:
            ends.append(end)
            start = end
        end += length
    return GrpoPlan(objective, [*ends, end])


def _is_shared(o: GrpoOptions) -> bool:
    """Whether an on-policy sequence-level loss has the same gradient as a token-level loss."""
    return o.importance_level == "sequence" and not o.bias_corrected_kl


def _on_policy(tokens: GrpoTokens, o: GrpoOptions) -> tuple[GrpoTokens, GrpoOptions]:
    """Replaces an on-policy sequence-level loss by a token-level loss with the same gradient, if there is one.

    On-policy every ratio is 1, and the gradient with respect to a completion's ratio is distributed evenly over its
    tokens: the mean of (weight q e A) over the completion replaces each token's value.
    """
    if tokens.old is not None or not _is_shared(o):
        return tokens, o
    o = replace(o, importance_level="token")
    if o.loss_type in ("cispo", "vespo"):  # their ratios have no gradient
        return tokens, o
    signed = tokens.advantage * tokens.weight
    signed = signed if tokens.policy_weight is None else signed * tokens.policy_weight
    mean = tokens.per_sequence(signed) / tokens.lengths[tokens.sequence]
    advantage = torch.where(tokens.weight > 0, mean / tokens.weight, torch.zeros_like(mean))
    return replace(tokens, advantage=advantage, policy_weight=None), o


# ---------------------------------------------------------------------------------------------------------------------
# The ops
# ---------------------------------------------------------------------------------------------------------------------


class GrpoLossOutput(NamedTuple):
    """The result of the ops.

    Attributes:
        loss: fp32 scalar, differentiable. The other fields have no gradient.
        log_prob: fp32 `[B, T]`, 0 for masked tokens.
        entropy: fp32 `[B, T]`, in nats; None unless requested or part of the loss.
        kl: fp32 `[B, T]`, or None with beta = 0.
        clipped_low, clipped_high: bool `[B, T]`, true where the ratio was outside its bounds on the side that matters
            for the advantage's sign; None for loss types that do not clip.
    """

    loss: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    kl: torch.Tensor | None
    clipped_low: torch.Tensor | None
    clipped_high: torch.Tensor | None


def _mask_like(name: str, mask: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(mask).__name__}")
    if mask.is_complex():
        raise TypeError(f"{name} must be of an integer, bool or float dtype; got {mask.dtype}")
    if mask.shape != ids.shape:
        raise ValueError(f"{name} must have ids' shape {list(ids.shape)}; got {list(mask.shape)}")
    return mask != 0


def _rows_like(
    name: str, value: torch.Tensor | None, ids: torch.Tensor, allow_per_sequence: bool = False
) -> torch.Tensor | None:
    if value is None:
        return None
    check_float(name, value)
    allowed = [ids.shape] + ([ids.shape[:1], (ids.shape[0], 1)] if allow_per_sequence else [])
    if value.shape not in allowed:
        raise ValueError(
            f"{name} must have shape {' or '.join(str(list(s)) for s in allowed)}; got {list(value.shape)}"
        )
    return value


@dataclass(frozen=True)
class _Batch:
    """The checked arguments of a call: the scored tokens, and the loss's inputs for them."""

    keep: torch.Tensor  # [B, T] bool
    options: GrpoOptions
    on_policy: bool
    given: dict[str, Any]  # the arguments of `batch_tokens`

    # These properties are computed at first use: `rows` waits for the device, which then idles until the first product.

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """`[n]` int64, the indices of the scored tokens in the flattened `[B, T]`."""
        return torch.nonzero(self.keep.reshape(-1)).squeeze(1)

    @functools.cached_property
    def tokens(self) -> GrpoTokens:
        return batch_tokens(self.options, self.rows, self.keep.float(), **self.given)

    def lengths(self) -> list[int]:
        """Returns the number of scored tokens of each completion."""
        lengths: list[int] = self.keep.sum(1).tolist()
        return lengths


def _batch(
    ids: torch.Tensor,
    advantages: torch.Tensor,
    options: GrpoOptions | None,
    *,
    completion_mask: torch.Tensor | None,
    tool_mask: torch.Tensor | None,
    entropy_mask: torch.Tensor | None,
    old_log_prob: torch.Tensor | None,
    ref_log_prob: torch.Tensor | None,
    importance_ratio: torch.Tensor | None,
    max_completion_length: int | None,
    num_items: int | float | torch.Tensor | None,
) -> _Batch:
    options = GrpoOptions() if options is None else options
    if not isinstance(options, GrpoOptions):
        raise TypeError(f"options must be GrpoOptions or None; got {type(options).__name__}")
    if ids.dim() != 2:
        raise ValueError(f"ids must have shape [B, T]; got {list(ids.shape)}")
    if (ref_log_prob is None) != (options.beta == 0.0):
        raise ValueError(f"ref_log_prob must be given exactly when beta is not 0; got beta={options.beta!r}")
    if (max_completion_length is not None) != (options.loss_type == "dr_grpo"):
        raise ValueError("max_completion_length must be given exactly for loss_type='dr_grpo'")
    if num_items is not None and options.loss_type not in ("dapo", "cispo", "vespo"):
        raise ValueError(f"num_items has no effect with loss_type={options.loss_type!r}; leave it None")
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a tensor of one; got shape {list(num_items.shape)}")
    elif num_items is not None and not is_number(num_items):
        raise ValueError(f"num_items must be a finite number; got {num_items!r}")
    if max_completion_length is not None and not (type(max_completion_length) is int and max_completion_length > 0):
        raise ValueError(f"max_completion_length must be a positive int; got {max_completion_length!r}")
    check_float("advantages", advantages)
    per_token = {
        "advantages": _rows_like("advantages", advantages, ids, allow_per_sequence=True),
        "old": _rows_like("old_log_prob", old_log_prob, ids),
        "reference": _rows_like("ref_log_prob", ref_log_prob, ids),
        "importance_ratio": _rows_like("importance_ratio", importance_ratio, ids, allow_per_sequence=True),
    }
    masks = {"completion_mask": completion_mask, "tool_mask": tool_mask, "entropy_mask": entropy_mask}
    given = {name: _mask_like(name, mask, ids) for name, mask in masks.items()}
    check_same_device(
        ids=ids, advantages=advantages, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob,
        importance_ratio=importance_ratio, **given,
    )  # fmt: skip
    keep = torch.ones_like(ids, dtype=torch.bool)
    for mask in (given["completion_mask"], given["tool_mask"]):
        keep = keep if mask is None else keep & mask
    rest = {
        "entropy_mask": given["entropy_mask"], "max_completion_length": max_completion_length, "num_items": num_items,
    }  # fmt: skip
    return _Batch(keep, options, old_log_prob is None, {**per_token, **rest})


def _head_options(o: GrpoOptions, temperature: float, softcap: float | None, logit_scale: float, entropy: bool) -> Any:
    return HeadOptions(temperature, softcap, logit_scale, entropy=entropy or o.entropy_coef != 0)


def _output(loss: torch.Tensor, s: HeadStatistics, batch: _Batch) -> GrpoLossOutput:
    with torch.no_grad():
        terms = grpo_terms(s.log_prob.detach(), batch.tokens, batch.options)
        o, advantage = batch.options, batch.tokens.advantage
        low = high = None
        if o.loss_type in CLIPPED:
            low = (terms.ratio < 1 - o.epsilon_low) & (advantage < 0)
            high = (terms.ratio > 1 + o.upper) & (advantage > 0)
        elif o.loss_type == "cispo":
            high = (terms.ratio > o.upper) & (advantage > 0)

        def padded(t: torch.Tensor | None) -> torch.Tensor | None:
            if t is None:
                return None
            flat = t.new_zeros(batch.keep.numel()).index_copy(0, batch.rows, t.detach())
            return flat.view(batch.keep.shape)

        log_prob = padded(s.log_prob)
        assert log_prob is not None
        return GrpoLossOutput(loss, log_prob, padded(s.entropy), padded(terms.kl), padded(low), padded(high))


@opaque
def fused_linear_grpo_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    advantages: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    completion_mask: torch.Tensor | None = None,
    tool_mask: torch.Tensor | None = None,
    entropy_mask: torch.Tensor | None = None,
    old_log_prob: torch.Tensor | None = None,
    ref_log_prob: torch.Tensor | None = None,
    importance_ratio: torch.Tensor | None = None,
    options: GrpoOptions | None = None,
    max_completion_length: int | None = None,
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    backend: str | None = None,
) -> GrpoLossOutput:
    """Computes the GRPO loss of a linear head with three matrix products and the logits of one token chunk at a time.

    Masked tokens are left out before the projection and cost nothing.

    Args:
        x: hidden states `[B, T, H]`, position t predicting `ids[:, t]`; fp32, bf16 or fp16.
        weight: `[V, H]`; its gradient is accumulated in fp32. A DTensor if the vocabulary is sharded over ranks; see
            `fused_linear_cross_entropy`.
        ids: completion ids `[B, T]`, int64 or int32.
        advantages: `[B]`, `[B, 1]` or `[B, T]`.
        bias: `[V]` or None.
        completion_mask: `[B, T]` of any integer, bool or float dtype; a token counts if it is not 0 in both masks.
        tool_mask: likewise.
        entropy_mask: `[B, T]`; 0 leaves out a token's policy term, but not its KL.
        old_log_prob: l', `[B, T]`; None for on-policy.
        ref_log_prob: l'', `[B, T]`; required if `options.beta` is not 0, otherwise None.
        importance_ratio: q of the sampler, `[B, T]`, `[B]` or `[B, 1]`.
        options: `GrpoOptions`; None for the defaults.
        max_completion_length: for loss type dr_grpo.
        num_items: the divisor of the sum for dapo, cispo and vespo; None for the number of counted tokens of the batch.
        temperature: as in `linear_logprob`.
        softcap: as in `linear_logprob`.
        logit_scale: as in `linear_logprob`.
        entropy: whether to return the entropy.
        backend: overrides the choice of `backends.choose("grpo_loss", ...)`.

    Returns:
        `GrpoLossOutput`.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not match, options out of range or without effect.
    """
    check_head(x, weight, "ids", ids, bias)
    chosen_backend = backends.choose("grpo_loss", x.device, backend, at=lambda: backends.of_head(x, weight))
    batch = _batch(
        ids, advantages, options, completion_mask=completion_mask, tool_mask=tool_mask,
        entropy_mask=entropy_mask, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob,
        importance_ratio=importance_ratio, max_completion_length=max_completion_length, num_items=num_items,
    )  # fmt: skip

    def chosen() -> torch.Tensor:
        return ids.reshape(-1).index_select(0, batch.rows)

    check_range("ids", chosen, x.device, weight.shape[0])
    plan = planned(
        lambda: batch.tokens, batch.options, batch.on_policy, batch.lengths, weight.shape[0],
        x.element_size(), x.device,
    )  # fmt: skip
    weight, bias, part = own_part(weight, bias)
    total, s = head_statistics(
        x.reshape(-1, x.shape[-1]), weight, chosen, bias,
        _head_options(batch.options, temperature, softcap, logit_scale, entropy),
        rows=lambda: batch.rows, objective=plan and plan.objective, chunk_rows=plan and plan.chunk_rows,
        backend=chosen_backend, part=part,
    )  # fmt: skip
    if total is None:
        return _output(grpo_objective(s.log_prob, s.entropy, batch.tokens, batch.options), s, batch)
    # The gradient comes from the plan, the value from the original formula, in one sum over the batch.
    with torch.no_grad():
        value = grpo_objective(s.log_prob, s.entropy, batch.tokens, batch.options)
    return _output(total + (value - total).detach(), s, batch)


def fused_linear_grpo_loss_reference(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, advantages: torch.Tensor,
    bias: torch.Tensor | None = None, *, options: GrpoOptions | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, entropy: bool = False, **batch_arguments: Any,
) -> GrpoLossOutput:  # fmt: skip
    """Computes the op on full logits, in plain PyTorch."""
    batch = _batch(ids, advantages, options, **{**_NOTHING, **batch_arguments})
    s = head_statistics_reference(
        x.reshape(-1, x.shape[-1])[batch.rows], weight, ids.reshape(-1)[batch.rows], bias,
        _head_options(batch.options, temperature, softcap, logit_scale, entropy),
    )  # fmt: skip
    return _output(grpo_objective(s.log_prob, s.entropy, batch.tokens, batch.options), s, batch)


@opaque
def grpo_loss(
    logits: torch.Tensor,
    ids: torch.Tensor,
    advantages: torch.Tensor,
    *,
    completion_mask: torch.Tensor | None = None,
    tool_mask: torch.Tensor | None = None,
    entropy_mask: torch.Tensor | None = None,
    old_log_prob: torch.Tensor | None = None,
    ref_log_prob: torch.Tensor | None = None,
    importance_ratio: torch.Tensor | None = None,
    options: GrpoOptions | None = None,
    max_completion_length: int | None = None,
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    backend: str | None = None,
) -> GrpoLossOutput:
    """Computes the GRPO loss from existing logits `[B, T, V]`. See `fused_linear_grpo_loss`, which does not need them.

    Forward reads the logits once; backward reads them once more and writes their gradient.
    """
    check_float("logits", logits)
    check_ids("ids", ids)
    if logits.dim() != 3 or logits.shape[:2] != ids.shape or logits.shape[2] < 1:
        raise ValueError(
            f"logits must have shape [B, T, V] with ids' {list(ids.shape)} and V >= 1; got {list(logits.shape)}"
        )
    check_same_device(logits=logits, ids=ids)
    batch = _batch(
        ids, advantages, options, completion_mask=completion_mask, tool_mask=tool_mask,
        entropy_mask=entropy_mask, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob,
        importance_ratio=importance_ratio, max_completion_length=max_completion_length, num_items=num_items,
    )  # fmt: skip
    flat = ids.reshape(-1)
    # The id of a masked token may be invalid. Its row is read, but its statistics are dropped.
    flat = torch.where(batch.keep.reshape(-1), flat, torch.zeros_like(flat))
    check_range("ids", flat, logits.device, logits.shape[-1])
    unused = torch.nonzero(~batch.keep.reshape(-1)).squeeze(1) if batch.rows.shape[0] < flat.shape[0] else None
    every = logits_statistics(
        logits.reshape(-1, logits.shape[-1]), flat, _head_options(batch.options, temperature, None, 1.0, entropy),
        unused=unused, backend=backends.choose("grpo_loss", logits.device, backend),
    )  # fmt: skip
    s = HeadStatistics._make(None if t is None else t[batch.rows] for t in every)
    return _output(grpo_objective(s.log_prob, s.entropy, batch.tokens, batch.options), s, batch)


def grpo_loss_reference(
    logits: torch.Tensor, ids: torch.Tensor, advantages: torch.Tensor, *, options: GrpoOptions | None = None,
    temperature: float = 1.0, entropy: bool = False, **batch_arguments: Any,
) -> GrpoLossOutput:  # fmt: skip
    """Computes the op in plain PyTorch."""
    batch = _batch(ids, advantages, options, **{**_NOTHING, **batch_arguments})
    s = logits_statistics_reference(
        logits.reshape(-1, logits.shape[-1])[batch.rows], ids.reshape(-1)[batch.rows],
        _head_options(batch.options, temperature, None, 1.0, entropy),
    )  # fmt: skip
    return _output(grpo_objective(s.log_prob, s.entropy, batch.tokens, batch.options), s, batch)


_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "completion_mask", "tool_mask", "entropy_mask", "old_log_prob", "ref_log_prob", "importance_ratio",
        "max_completion_length", "num_items",
    )
)  # fmt: skip
