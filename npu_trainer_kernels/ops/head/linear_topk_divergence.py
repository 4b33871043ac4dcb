"""Distillation at the LM head with a teacher that is given by some ids of each token and its log-probabilities of them,
as a server sends its k most probable tokens, and as IW-OPD compares two models on the most probable tokens of either.

For token i let S_i be its distinct ids whose teacher's log-probability is above -inf: the support. An id that comes
again in a row counts once, with its first log-probability. With p_i the student's softmax,

    z_i = softcap(logit_scale * (x_i W^T + bias)) / temperature          p_i = softmax(z_i)

and q_iv the teacher's given probabilities, both distributions are brought to the support. With the tail bucket,

    add_tail       p'_iv = p_iv, q'_iv = q_iv for v in S_i, and one element more, the rest of the vocabulary:
                   log p'_i,rest = log(1 - exp(min(log sum_{v in S_i} p_iv, -1e-7))), and q'_i,rest likewise
    otherwise      p'_iv = p_iv / sum_{u in S_i} p_iu and q'_iv = q_iv / sum_{u in S_i} q_iu

and the divergence is that of `linear_divergence` between p' and q', by TRL's convention of beta:

    beta = 0       D_i = KL(q'_i || p'_i)                                forward KL
    beta = 1       D_i = KL(p'_i || q'_i)                                reverse KL
    0 < beta < 1   D_i = beta KL(q'_i || m_i) + (1 - beta) KL(p'_i || m_i)    with m_i = beta q'_i + (1 - beta) p'_i

A token whose support is empty has divergence 0. The bound of -1e-7, which is TRL's, keeps the rest positive where the
support has all of the probability in fp32.

D_i is a function of the k numbers log p_iv of the support. With b_iv = dL/d log p_iv, which torch's autograd computes
from `[n, k]` numbers, the gradient with respect to the logits is that of `ops/head/engine.py`:

    dL/dz_ij = sum_{v in S_i} b_iv ([j = v] - p_ij)

with dz/dl behind it, and so a factor 1 / temperature and none of temperature^2. No kernel is added: the row statistics
of a chunk of logits and its gradient are the engine's, and k logits of each row are gathered from the chunk.

If the result is reduced, forward computes the gradients with the logits of each chunk: three matrix products in total,
two with a frozen head. Per token, backward computes the logits again: four products, three with a frozen head. Without
gradients there is one product. Beside a chunk of logits there are a few tensors of `[n, k]`.
"""

from __future__ import annotations

import contextlib
import functools
import math

import torch

from ... import backends
from ...support.opaque import opaque
from ..checks import (
    check_choice,
    check_float,
    check_ids,
    check_num_items,
    check_plain,
    check_projection,
    check_range,
    check_same_device,
    is_number,
)
from ..host import autocasts, compute_dtype
from .chunks import Chunks
from .engine import head_statistics
from .gradient import first_places
from .head_options import HeadOptions
from .linear_divergence import REDUCTIONS, Reduction, Selected, check_mask
from .objective import LogProbObjective
from .reference import transformed_logits
from .statistics import row_statistics

__all__ = ["linear_topk_divergence", "linear_topk_divergence_reference", "top_log_probs"]

# TRL's bound of the logarithm of a support's probability.
_BELOW_ONE = -1e-7


def linear_topk_divergence_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    beta: float,
    add_tail: bool = True,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, on full logits of the selected tokens: both distributions are spread over the
    vocabulary, with the rest as one column more."""
    shape = x.shape[:-1]
    keep = torch.ones(shape, dtype=torch.bool, device=x.device) if mask is None else mask != 0
    logits = torch.nn.functional.linear(x[keep], weight, bias)
    z = transformed_logits(logits, logit_scale=logit_scale, softcap=softcap, temperature=temperature)
    log_p = torch.log_softmax(z, -1)
    log_q = torch.full_like(log_p, -torch.inf).detach()
    rows = torch.arange(log_p.shape[0], device=x.device)
    # From the last id to the first one, which overwrites those that come again.
    pairs = zip(ids[keep].long().unbind(-1), teacher_log_probs[keep].unbind(-1), strict=True)
    for column, values in reversed(list(pairs)):
        given = values != -torch.inf
        log_q[rows[given], column[given]] = values[given].detach().to(log_q.dtype)
    member = log_q != -torch.inf
    pair = [log.masked_fill(~member, -torch.inf) for log in (log_p, log_q)]
    sums = [torch.logsumexp(log, -1, keepdim=True) for log in pair]
    if add_tail:
        rest = [torch.log(-torch.expm1(total.clamp(max=_BELOW_ONE))) for total in sums]
        pair = [torch.cat(both, -1) for both in zip(pair, rest, strict=True)]
        member = torch.cat([member, torch.ones_like(member[:, :1])], -1)
    else:
        pair = [log - total for log, total in zip(pair, sums, strict=True)]
    # Outside of the support zeros, in place of infinities that would be multiplied by zero.
    log_p, log_q = (torch.where(member, log, torch.zeros_like(log)) for log in pair)
    p, q = (torch.where(member, log.exp(), torch.zeros_like(log)) for log in (log_p, log_q))
    if beta == 0:
        divergence = (q * (log_q - log_p)).sum(-1)
    elif beta == 1:
        divergence = (p * (log_p - log_q)).sum(-1)
    else:
        b = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
        log_m = torch.logaddexp(log_q + b.log(), log_p + torch.log1p(-b))
        divergence = beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)
    if reduction == "none":
        return divergence.new_zeros(shape).masked_scatter(keep, divergence)
    loss = divergence.sum()
    if reduction == "mean":
        loss = loss / (keep.sum().clamp(min=1) if num_items is None else num_items)
    return loss


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Checks the tensors."""
    check_projection(x, weight, bias)
    check_ids("ids", ids)
    check_float("teacher_log_probs", teacher_log_probs)
    given = {"weight": weight, "bias": bias, "ids": ids, "teacher_log_probs": teacher_log_probs}
    for name, tensor in given.items():
        if tensor is not None:
            check_plain(name, tensor)
    if ids.shape[:-1] != x.shape[:-1] or ids.dim() != x.dim() or ids.shape[-1] == 0:
        raise ValueError(
            f"ids must have shape [..., k] with x's leading shape {list(x.shape[:-1])} and k > 0; got {list(ids.shape)}"
        )
    if teacher_log_probs.shape != ids.shape:
        raise ValueError(
            f"teacher_log_probs must have the shape of ids, {list(ids.shape)}; got {list(teacher_log_probs.shape)}"
        )
    check_mask(mask, x)
    check_same_device(x=x, ids=ids, teacher_log_probs=teacher_log_probs, mask=mask)


def _rest(total: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of the probability outside of a support, from that of the support's."""
    return torch.log(-torch.expm1(total.clamp(max=_BELOW_ONE)))


def _on_support(
    log_p: torch.Tensor, log_q: torch.Tensor, member: torch.Tensor, beta: float, add_tail: bool
) -> torch.Tensor:
    """Returns the divergence of each row from the log-probabilities `[n, k]` of the ids that are `member`s."""

    def brought(log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logarithm and the value of p'; zeros outside of the support."""
        log = log.masked_fill(~member, -torch.inf)
        total = torch.logsumexp(log, -1, keepdim=True)
        log = torch.cat([log, _rest(total)], -1) if add_tail else log - total
        log = log.masked_fill(~counted, 0.0)
        return log, log.exp() * counted

    counted = torch.cat([member, torch.ones_like(member[:, :1])], -1) if add_tail else member
    (log_p, p), (log_q, q) = brought(log_p), brought(log_q)
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


@opaque
def linear_topk_divergence(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    beta: float,
    add_tail: bool = True,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
    low_memory: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the divergence between a student's head and a teacher's log-probabilities of k ids per token, with the
    logits of one chunk of tokens in memory at a time.

    Args:
        x: the student's hidden states `[..., H]`, fp32, bf16 or fp16, any strides. Products run in this dtype, or in
            autocast's, and logits are rounded to it, as a model's are.
        weight: `[V, H]`; cast to that dtype when it differs. Its gradient is accumulated in fp32 and returned in
            weight's dtype. A plain tensor.
        ids: int64 or int32 `[..., k]`, with x's leading shape, in `[0, V)` for selected tokens (checked on the CPU; on
            an accelerator under NPU_KERNELS_DEBUG=1), in any order.
        teacher_log_probs: `[..., k]`, fp32, bf16 or fp16: the teacher's log-probabilities of these ids, at its own
            temperature. -inf leaves out the id, which is how shorter rows are padded. They get no gradient.
        bias: `[V]` or None.
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for the generalised Jensen-Shannon
            divergence with the mixture beta q' + (1 - beta) p'; see the module's formula.
        add_tail: whether the probability outside of the support is one element more; otherwise both distributions are
            renormalised on the support.
        mask: bool or integers of x's leading shape, not 0 for the selected tokens; None for all. The other tokens cost
            nothing, whatever they contain.
        reduction: "mean" over the selected tokens (zero, not NaN, if there are none), "sum", or "none" (per token, zero
            where not selected).
        num_items: divides the sum instead of the number of selected tokens (gradient accumulation, several ranks).
        temperature: divides the student's logits; positive.
        softcap: `softcap * tanh(logits / softcap)` before the temperature; None for no cap.
        logit_scale: multiplies the logits first.
        chunk_rows: the number of rows of a chunk of logits; None for a choice by device.
        low_memory: sum the chunks' weight gradients in weight's dtype, as in `fused_linear_cross_entropy`.
        backend: overrides the choice of `backends.choose("linear_divergence", ...)`, by which this op goes.

    Returns:
        The divergence, fp32: a scalar, or of x's leading shape for "none".

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not match, tensors on several devices, DTensors, options or ids out of range.
    """
    _check(x, weight, bias, ids, teacher_log_probs, mask)
    check_choice("reduction", reduction, REDUCTIONS)
    check_num_items(num_items, reduction)
    if not (is_number(beta) and 0 <= beta <= 1):
        raise ValueError(f"beta must lie in [0, 1]; got {beta!r}")
    if type(add_tail) is not bool:
        raise ValueError(f"add_tail must be True or False; got {add_tail!r}")
    if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
        raise ValueError(f"chunk_rows must be None or a positive int; got {chunk_rows!r}")
    options = HeadOptions(temperature, softcap, logit_scale)
    selected = Selected(mask, None, x)
    # fp16 gradients of a mean over many tokens would underflow, so divide after the products there.
    how = Reduction(reduction, num_items, torch.float16 not in (x.dtype, compute_dtype(x)))

    def of_selected(t: torch.Tensor) -> torch.Tensor:
        flat = t.reshape(-1, t.shape[-1])
        return flat if selected.rows is None else flat.index_select(0, selected.rows)

    check_range("ids", lambda: of_selected(ids), x.device, weight.shape[0])

    @functools.cache
    def taught() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the selected tokens' ids, the teacher's log-probabilities in fp32, and which of them count."""
        of_ids, log_q = of_selected(ids).long(), of_selected(teacher_log_probs.detach()).float()
        given = log_q != -torch.inf
        # An id that is left out must not be the first one of its kind.
        first = first_places(of_ids.masked_fill(~given, -1))
        member = given & (first == torch.arange(ids.shape[-1], device=x.device))
        return of_ids, log_q, member

    @functools.cache
    def scale() -> torch.Tensor | float:
        return how.scale(selected.rows, selected.tokens, x.device)

    def divergence(log_prob: torch.Tensor, chunk: slice) -> torch.Tensor:
        _, log_q, member = taught()
        return _on_support(log_prob, log_q[chunk], member[chunk], float(beta), add_tail)

    def objective(log_prob: torch.Tensor, chunk: slice) -> torch.Tensor:
        total = divergence(log_prob, chunk).sum()
        return total * scale() if how.early else total

    total, s = head_statistics(
        x.reshape(-1, x.shape[-1]), weight, lambda: taught()[0], bias, options,
        rows=lambda: selected.rows,
        objective=None if reduction == "none" else LogProbObjective(objective),
        chunk_rows=chunk_rows, low_memory=low_memory, several_ids=True,
        backend=backends.choose("linear_divergence", x.device, backend, at=lambda: backends.of_head(x, weight)),
    )  # fmt: skip
    if total is not None:
        return total if how.early else total * scale()
    value = selected.spread(divergence(s.log_prob, slice(None)), x.shape[:-1])
    assert value is not None
    return value


@opaque
def top_log_probs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    ids: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the most probable ids of a head and the log-probabilities of them, and of other ids; one product, one
    chunk of logits in memory at a time, and no gradient.

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`.
        bias: `[V]` or None.
        k: how many of the most probable ids to find, up to V; 0 for none.
        ids: int64 `[n, j]`, other ids in `[0, V)`; None for none.
        rows: `[n]` int64, the rows of x to use; None for all of them, and then n = N.
        temperature, softcap, logit_scale, backend: as in `linear_topk_divergence`.

    Returns:
        (ids, log-probabilities): int64 and fp32 `[n, k + j]`, first the k most probable ids, then the given ones.
    """
    options = HeadOptions(temperature, softcap, logit_scale)
    chosen = backends.choose("linear_divergence", x.device, backend, at=lambda: backends.of_head(x, weight))
    dtype, count = compute_dtype(x), x.shape[0] if rows is None else rows.shape[0]
    others = torch.empty(count, 0, dtype=torch.int64, device=x.device) if ids is None else ids
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()
    with torch.no_grad(), plain:
        chunks = Chunks(x, weight, bias, others, rows, dtype, chosen, None, False)
        for _, _, of_chunk, (logits,) in chunks.walk():
            # The transform is monotone, and falls where the scale is negative.
            top = logits.topk(k, dim=-1, largest=logit_scale >= 0).indices
            of_chunk = torch.cat([top, of_chunk], -1)
            statistics, _ = row_statistics(logits, of_chunk, None, options, chosen)
            found.append((of_chunk, statistics.log_prob))
    if not found:
        return others.new_empty(0, k + others.shape[1]), x.new_empty(0, k + others.shape[1], dtype=torch.float32)
    return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])
