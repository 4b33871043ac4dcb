"""The LM head engine: statistics of softmax(x W^T) per token and the gradients of any function of them, without the
`[N, V]` logits. Every loss at the head is a few lines of torch over these statistics.

Maths
-----
For row i with transformed logits (cap and temperature are optional)

    l_i = x_i W^T + bias                    z_i = softcap(logit_scale * l_i) / temperature
    lse_i = log sum_j exp z_ij              p_ij = exp(z_ij - lse_i)

the statistics and their derivatives with respect to z_ij are

    log_prob         z_i[id_i] - lse_i      [j = id_i] - p_ij
    lse              as above               p_ij
    entropy          lse_i - sum_j p z      -p_ij (log p_ij + entropy_i)
    mean             sum_j u_j z_ij         u_j               (u uniform, 1/V, unless given)
    log_sum_sq       log sum_j p_ij^2       none (a monitoring quantity)
    argmax           first j of max z_ij    none

so the gradient of any scalar L of the statistics is, with four numbers per row,

    dL/dz_ij = a_i p_ij + b_i [j = id_i] + c_i u_j + e_i p_ij (log p_ij + entropy_i)
    a = dL/dlse - dL/dlog_prob     b = dL/dlog_prob     c = dL/dmean     e = -dL/dentropy
    dL/dl_ij = dL/dz_ij * dz/dl    dL/dx = dL/dl W      dL/dW = (dL/dl)^T x      dL/dbias = sum_i dL/dl_i

One kernel reads a chunk of logits once and writes the statistics; one overwrites the chunk with its gradient. Between
them lives the loss.

Modes
-----
planned     an `objective` is given: its gradient is formed in forward while the chunk's logits are live (three matrix
            products in all). A gradient of the objective itself only scales it. Gradients that arrive for the
            statistics instead are compared with the plan's, row by row: where they are the plan's times one scalar,
            that scalar is applied; the rows where they are not are formed again from the real gradient and added. A
            wrong plan costs time, never correctness.
recompute   no plan: backward repeats the logits (four products).
frozen      weight and bias need no gradient: forward forms d log_prob / dx, and backward multiplies each row (two
            products); gradients of other statistics are recomputed.
no grad     one product.

Memory beyond inputs and gradients: one chunk of logits, half an fp32 weight gradient while several chunks accumulate
(the other half lies where the gradient will), and `[N]` statistics; independent of the vocabulary times N. Where one
kernel forms statistics and gradient at once, the first chunk is longer: some of its columns lie in memory that the
weight gradient is not yet written to, so that one chunk often does for all, and fewer do otherwise. Accumulation and
statistics are fp32 whatever the dtypes.

Files
-----
options            how logits are transformed and which statistics are wanted
objective          what forward may form the gradient of
statistics         one chunk of logits: its statistics
gradient           one chunk of logits: its gradient, in its place
fused              both at once, where one kernel can
vocabulary_slices  statistics and gradients of a vocabulary that ranks share out
chunks             walking over the chunks, and summing their gradients
reference          the statistics by their definitions, which tests compare with
engine             what is differentiated: plans, and the autograd functions
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ... import device, tiling
from ...support.opaque import opaque
from ..checks import has_values
from ..host import autocasts, compute_dtype, once_differentiable
from .chunks import Chunks, Gradients, Ids, Rows
from .fused import statistics_and_gradient
from .gradient import coefficients, gradient_in_place, gradient_of_logits
from .objective import GIVE_UP, LinearObjective, Objective, may_fuse, objective_gradient
from .options import HeadOptions
from .reference import logits_statistics_reference
from .statistics import HeadStatistics, Softmax, row_statistics
from .vocabulary_slices import VocabSlice

__all__ = ["head_statistics", "logits_statistics"]


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What a call of the engine is given besides tensors."""

    options: HeadOptions
    objective: Objective | None
    backend: str
    chunk_rows: int | Sequence[int] | None
    dtype: torch.dtype
    on_mismatch: Callable[[float], None] | None
    low_memory: bool
    part: VocabSlice | None

    def uniform(self, weight: torch.Tensor, class_weights: torch.Tensor | None) -> float | None:
        """u, where it is the same for every column."""
        if class_weights is not None:
            return None
        return 1.0 / (weight.shape[0] if self.part is None else self.part.vocab)


@dataclass
class _Plan:
    """What forward has formed for backward.

    Attributes:
        gradients: of x, weight and bias, for the rows' gradients below.
        d_rows: gradients of log_prob, lse, entropy and mean that they were formed from.
        row_by_row: mode `frozen`: each row may still be scaled by a number of its own.
        rows: how many there were.
    """

    gradients: Gradients
    d_rows: tuple[torch.Tensor | None, ...]
    row_by_row: bool
    rows: int


class _Formed(NamedTuple):
    """What forward has formed.

    Attributes:
        total: the objective, where there is one.
        statistics: of all rows.
        plan: None where there are no gradients in forward.
        softmax: of all rows, for a backward that forms the logits a second time.
        ids, rows: as tensors.
    """

    total: torch.Tensor | None
    statistics: HeadStatistics
    plan: _Plan | None
    softmax: tuple[torch.Tensor | None, ...]
    ids: torch.Tensor
    rows: torch.Tensor | None


def _form(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids, rows: Rows,
          class_weights: torch.Tensor | None, call: _Call, needs: tuple[bool, ...]) -> _Formed:  # fmt: skip
    """Forward; `needs`: whether x, weight and bias will be asked for a gradient."""
    objective, frozen = call.objective, needs == (True, False, False) and call.objective is None
    forms = any(needs) and (objective is not None or frozen)
    tile = None
    # Of a slice of the vocabulary the gradient is known when the other slices' statistics are.
    fused = forms and call.part is None and may_fuse(objective, bias, call.dtype, call.options, call.backend)
    if fused and call.backend != "vendor":
        tile = tiling.fused_tile(weight.shape[0], call.dtype.itemsize, device.spec(x.device))
        fused = tile is not None
    borrow = tile is not None and needs[1] and not call.low_memory
    chunks = Chunks(x, weight, bias, ids, rows, call.dtype, call.backend, call.chunk_rows, forms and needs[1], borrow,
                    call.part)  # fmt: skip
    uniform = call.uniform(weight, class_weights)
    total: torch.Tensor | None = None
    collected: list[HeadStatistics] = []
    softmaxes: list[Softmax] = []
    d_rows: list[tuple[torch.Tensor | None, ...]] = []
    grads = Gradients.empty(x, weight, bias, chunks, needs, call.low_memory) if forms else None
    for chunk, x_chunk, ids_chunk, blocks in chunks.walk(None if grads is None else grads.total):
        logits, second = blocks[0], blocks[1] if len(blocks) > 1 else None
        if fused and objective is not None and grads is not None:
            known = objective.factor[chunk] if isinstance(objective, LinearObjective) else None
            ones = torch.ones(ids_chunk.shape, dtype=torch.float32, device=x.device) if known is None else known
            statistics, softmax = statistics_and_gradient(
                logits, second, ids_chunk, ones, call.options, tile, call.backend
            )
            collected.append(statistics)
            softmaxes.append(softmax)
            late = None
            if known is None:
                value, (late, *_) = objective_gradient(objective, statistics, chunk, call.backend)
                total = _add(total, value)
            d_rows.append((late if known is None else known, None, None, None))
            grads.add(blocks, x_chunk, chunks.weight, chunk, chunks.rows, needs[1], late)
            continue
        statistics, softmax = row_statistics(logits, ids_chunk, class_weights, call.options, call.backend, call.part)
        collected.append(statistics)
        softmaxes.append(softmax)
        d: tuple[torch.Tensor | None, ...] = (torch.ones_like(statistics.lse), None, None, None)
        if objective is not None and forms:
            value, d = objective_gradient(objective, statistics, chunk, call.backend)
            total = _add(total, value)
        elif objective is not None:
            total = _add(total, objective(statistics, chunk))
        if grads is not None:
            d_rows.append(d)
            k = coefficients(d, statistics.lse, uniform)
            gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend, call.part)
            grads.add(blocks, x_chunk, chunks.weight, chunk, chunks.rows, needs[1])
    merged = HeadStatistics._make(_concatenated(collected, _empty_statistics(call.options, x.device)))
    if fused and isinstance(objective, LinearObjective):
        total = objective(merged, slice(None))
    if objective is not None and total is None:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
    plan = None
    if grads is not None:
        plan = _Plan(grads.cast(weight, bias), _concatenated(d_rows, (None,) * 4), frozen, chunks.ids.shape[0])
    return _Formed(total, merged, plan, _concatenated(softmaxes, (None,) * 3), chunks.ids, chunks.rows)


class _Saved(NamedTuple):
    """What backward reads. It is read at most once: a checkpoint forms it anew at the first reading and refuses a
    second one, and a hook that keeps it elsewhere brings it back at each."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    rows: torch.Tensor | None
    class_weights: torch.Tensor | None
    row_max: torch.Tensor | None
    inverse_s: torch.Tensor | None
    shift: torch.Tensor | None


class _Head(torch.autograd.Function):
    """(x, weight, bias) -> (objective, *statistics). Everything differentiable comes back to backward as gradients of
    these outputs; see the modes in the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids, rows: Rows,
                class_weights: torch.Tensor | None, call: _Call) -> tuple[Any, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        formed = _form(x, weight, bias, ids, rows, class_weights, call, tuple(ctx.needs_input_grad[:3]))
        # Backward needs no objective, and what it has closed over may be large.
        ctx.call, ctx.plan, ctx.weight_shape = replace(call, objective=None), formed.plan, weight.shape
        # In the order of `_Saved`.
        ctx.save_for_backward(x, weight, bias, formed.ids, formed.rows, class_weights, *formed.softmax)
        ctx.mark_non_differentiable(*(t for t in formed.statistics[4:] if t is not None))
        return (formed.total, *formed.statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: torch.Tensor | None, *d_statistics: torch.Tensor | None) -> tuple[Any, ...]:
        grads = _backward(ctx, d_total, [None if d is None else d.float() for d in d_statistics[:4]])
        if ctx.call.part is not None and grads.x is not None:
            grads.x = ctx.call.part.total(grads.x)
        return (grads.x, grads.weight, grads.bias, *(None,) * 4)


def _backward(ctx: Any, d_total: torch.Tensor | None, d_rows: list[torch.Tensor | None]) -> Gradients:
    # Autograd may keep what is returned as `.grad`, so the plan is handed over, not kept for a second backward.
    plan, ctx.plan = ctx.plan, None
    if plan is not None:
        # What a second backward of the objective will need.
        ctx.d_planned = plan.d_rows
    of_rows = any(d is not None for d in d_rows)
    if plan is not None and plan.rows == 0:
        # Nothing goes into them, whatever arrives: a mean over no tokens sends back an infinity.
        return plan.gradients
    if plan is not None and d_total is not None and not of_rows:
        return plan.gradients.scaled(d_total, ctx.call.backend)
    saved = _Saved(*ctx.saved_tensors)
    if plan is not None and d_total is None and of_rows:
        grads = _from_plan(ctx, saved, plan, d_rows)
        if grads is not None:
            return grads
    # A plan that is no help makes room for what takes its place.
    plan = None
    if d_total is not None:
        d_rows = [_add(u, None if v is None else v * d_total) for u, v in zip(d_rows, ctx.d_planned, strict=True)]
    return _recomputed(ctx, saved, d_rows)


# A row's gradient is the plan's when they differ by less than this part of the largest gradient: fp32 rounding of two
# ways to write the same formula. What is waived so is as small as the rounding of an fp32 sum.
_PLAN_TOLERANCE = 1e-5


def _from_plan(ctx: Any, saved: _Saved, plan: _Plan, d_rows: list[torch.Tensor | None]) -> Gradients | None:
    """The gradients by the plan for what arrives for the statistics, or None where it is no help."""
    grads, call = plan.gradients, ctx.call
    if plan.row_by_row:
        if d_rows[0] is None or any(d is not None for d in d_rows[1:]):
            return None
        factor = d_rows[0]
        if saved.rows is not None and grads.x is not None:
            factor = factor.new_zeros(grads.x.shape[0]).index_copy_(0, saved.rows, factor)
        return grads.scaled(factor.unsqueeze(-1), call.backend)
    count = saved.ids.shape[0]
    scale, wrong = _compare(plan.d_rows, d_rows)
    if wrong.numel() > GIVE_UP * count:
        # What leaves the model may be rounded (by FSDP2's `output_dtype`), and then what arrives for it is, too: once
        # more, with the plan rounded as well. The gradients are those of the plan as it was.
        for dtype in (torch.bfloat16, torch.float16):
            rounded = [None if p is None else p.to(dtype).float() for p in plan.d_rows]
            found = _compare(rounded, d_rows)
            if found[1].numel() <= GIVE_UP * count:
                scale, wrong = found
                break
    if wrong.numel():
        share = wrong.numel() / count
        # A gradient that is not finite, as of a step that overflowed, is no row's plan, and no reason to plan no more.
        if call.on_mismatch is not None and all(bool(d.isfinite().all()) for d in d_rows if d is not None):
            call.on_mismatch(share)
        if share > GIVE_UP:
            return None
    grads = grads.scaled(scale, call.backend)
    if wrong.numel():
        rest = [_subtract(d, None if p is None else p * scale) for d, p in zip(d_rows, plan.d_rows, strict=True)]
        grads = grads.plus(_recomputed(ctx, saved, rest, wrong))
    return grads


def _compare(
    planned: Sequence[torch.Tensor | None], real: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar that takes the plan's row gradients to the real ones, and the rows where it does not. Waits for the
    device: whether anything is left to do is a decision of the host. Without values the plan is taken to hold."""
    if not has_values(next(t for t in real if t is not None)):
        return next(t for t in real if t is not None).new_ones(()), torch.empty(0, dtype=torch.int64)
    pairs = [(p, r) for p, r in zip(planned, real, strict=True) if p is not None or r is not None]
    p = torch.stack([torch.zeros_like(r) if p is None else p for p, r in pairs])  # type: ignore[arg-type]
    r = torch.stack([torch.zeros_like(p) if r is None else r for p, r in pairs])  # type: ignore[arg-type]
    # The scalar is read off the largest planned gradient; should that row be one of the wrong ones, the others will
    # look wrong, and everything is formed again: slower, still right.
    top = p.abs().argmax().view(1)
    # Not by `[top]`, for which the host waits.
    p_top, r_top = (t.flatten().index_select(0, top).squeeze(0) for t in (p, r))
    scale = torch.where(p_top == 0, torch.ones_like(p_top), r_top / p_top)
    limit = _PLAN_TOLERANCE * (scale * p).abs().amax()
    # Not `>`: a NaN must not pass for a match.
    return scale, torch.nonzero(~((r - scale * p).abs() <= limit).all(0)).squeeze(1)


def _empty_statistics(options: HeadOptions, where: torch.device) -> HeadStatistics:
    def empty(wanted: bool) -> Any:
        return torch.empty(0, dtype=torch.float32, device=where) if wanted else None

    fields = [empty(wanted) for wanted in (True, True, options.entropy, options.mean, options.log_sum_sq)]
    return HeadStatistics._make([*fields, torch.empty(0, dtype=torch.int64, device=where) if options.argmax else None])


def _concatenated(
    chunks: Sequence[tuple[torch.Tensor | None, ...]], empty: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The chunks' tensors, field by field, as one; `empty` where there is no chunk."""
    if len(chunks) < 2:
        return chunks[0] if chunks else empty
    return tuple(None if field[0] is None else torch.cat(field) for field in zip(*chunks, strict=True))


def _recomputed(
    ctx: Any, saved: _Saved, d_rows: Sequence[torch.Tensor | None], select: torch.Tensor | None = None
) -> Gradients:
    """Gradients from the real upstream gradients: the logits are formed once more, chunk by chunk; of all rows, or of
    those that `select` names."""
    x, weight, bias, ids, rows, class_weights, *softmax_fields = saved
    call, needs = ctx.call, tuple(ctx.needs_input_grad[:3])
    if weight.shape != ctx.weight_shape or (weight.numel() and not weight.untyped_storage().nbytes()):
        raise RuntimeError(
            f"weight is needed in backward, where it has shape {list(weight.shape)} and "
            f"{weight.untyped_storage().nbytes()} bytes of storage; in forward it was {list(ctx.weight_shape)}. "
            "Whatever shards it has to gather it again before the head's backward."
        )
    chunk_rows = call.chunk_rows
    if select is not None:
        rows, ids = select if rows is None else rows[select], ids[select]
        softmax_fields = [None if t is None else t[select] for t in softmax_fields]
        d_rows = [None if t is None else t[select] for t in d_rows]
        chunk_rows = None
    uniform = call.uniform(weight, class_weights)
    chunks = Chunks(x, weight, bias, ids, rows, call.dtype, call.backend, chunk_rows, needs[1], part=call.part)
    grads = Gradients.empty(x, weight, bias, chunks, needs, call.low_memory)
    for chunk, x_chunk, ids_chunk, (logits,) in chunks.walk():
        softmax = Softmax(*(None if t is None else t[chunk] for t in softmax_fields))  # type: ignore[arg-type]
        k = coefficients([None if t is None else t[chunk] for t in d_rows], softmax.row_max, uniform)
        gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend, call.part)
        grads.add((logits,), x_chunk, chunks.weight, chunk, rows, needs[1])
    return grads.cast(weight, bias)


def _subtract(u: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor | None:
    return _add(u, None if v is None else -v)


def _add(u: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor | None:
    return v if u is None else u if v is None else u + v


@opaque
def head_statistics(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: Ids,
    bias: torch.Tensor | None,
    options: HeadOptions,
    *,
    rows: Rows = None,
    class_weights: torch.Tensor | None = None,
    objective: Objective | None = None,
    backend: str,
    chunk_rows: int | Sequence[int] | None = None,
    on_mismatch: Callable[[float], None] | None = None,
    low_memory: bool = False,
    part: VocabSlice | None = None,
) -> tuple[torch.Tensor | None, HeadStatistics]:
    """Statistics of the head for chosen rows, and the sum of an objective over chunks of them. Opaque to
    `torch.compile` (it would have to trace a host loop of unknown length).

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`.
        ids: `[n]` ids in `[0, V)`; n = N, or the length of `rows`. It and `rows` may be functions, for what waits for
            the device, or need not be done before it has work.
        bias: `[V]` or None.
        options: transform and statistics.
        rows: `[n]` int64, distinct rows of x to project; None: all of them. The others cost nothing.
        class_weights: `[V]` fp32, the u of `mean`.
        objective: what forward should form the gradients of (mode `planned`).
        backend: `"torch"`, `"vendor"` (for objectives of log_prob alone, on logits that nothing transforms; besides the
            chunk of logits it needs three of its size in fp32), or any other for the kernels.
        chunk_rows: rows of logits alive at once, or the row at which each chunk ends; None: as `tiling.head_chunk`
            says.
        on_mismatch: told the share of rows whose real gradient was not the plan's, when there are any.
        low_memory: sum the chunks' weight gradients in weight's dtype, not in fp32.
        part: where ranks share the vocabulary out, which of it weight and bias are; ids and class_weights are of all of
            it, and x is the same on all ranks. Every rank has to make the same calls, forward and backward.

    Returns:
        The objective summed over chunks (None without one) and the `[n]` statistics, all differentiable as the
        module's docstring says.
    """
    dtype = compute_dtype(x)
    if part is not None and class_weights is not None:
        class_weights = part.of_columns(class_weights)
    # The products run in this dtype and everything else in fp32: autocast has no further say.
    with torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext():
        call = _Call(options, objective, backend, chunk_rows, dtype, on_mismatch, low_memory, part)
        # Asked here, because an autograd function is not told: its `needs_input_grad` is true for a parameter under
        # `no_grad`, too.
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if recorded and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
            total, *statistics = _Head.apply(x, weight, bias, ids, rows, class_weights, call)
            return total, HeadStatistics._make(statistics)
        with torch.no_grad():
            formed = _form(x, weight, bias, ids, rows, class_weights, call, (False,) * 3)
        return formed.total, formed.statistics


class _LogitsStatistics(torch.autograd.Function):
    """Statistics of logits that exist already."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, unused: torch.Tensor | None, options: HeadOptions,
                backend: str) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        statistics, softmax = row_statistics(logits, ids, None, options, backend)
        ctx.save_for_backward(logits, ids, unused, *softmax)
        ctx.options, ctx.backend = options, backend
        ctx.mark_non_differentiable(*(t for t in statistics[4:] if t is not None))
        return tuple(statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_statistics: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, ids, unused, *softmax_fields = ctx.saved_tensors
        softmax = Softmax._make(softmax_fields)
        k = coefficients(d_statistics[:4], softmax.row_max, 1.0 / logits.shape[1])
        grads = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        gradient_of_logits(logits, grads, ids, None, softmax, k, ctx.options, ctx.backend)
        if unused is not None:
            # Zero already, unless the row has a logit that is not finite: 0 times that is NaN.
            grads.index_fill_(0, unused, 0.0)
        return grads, None, None, None, None


@opaque
def logits_statistics(
    logits: torch.Tensor, ids: torch.Tensor, options: HeadOptions, *, unused: torch.Tensor | None = None, backend: str
) -> HeadStatistics:
    """Statistics of logits `[n, V]`, differentiable as those of `head_statistics`. One read of the logits in forward;
    one read and one write in backward. `unused`: indices of rows whose statistics the caller drops, whatever is in
    them."""
    if logits.shape[0] == 0:
        return logits_statistics_reference(logits, ids, options)
    # The gradient has the logits' strides, so rows must not share memory, as those of an expanded tensor do.
    if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()
    return HeadStatistics._make(_LogitsStatistics.apply(logits, ids, unused, options, backend))
