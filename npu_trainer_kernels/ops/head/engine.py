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
    log_sum_sq       log sum_j p_ij^2       none (only for monitoring)
    argmax           first j of max z_ij    none

so the gradient of any scalar L of the statistics is, with four numbers per row,

    dL/dz_ij = a_i p_ij + b_i [j = id_i] + c_i u_j + e_i p_ij (log p_ij + entropy_i)
    a = dL/dlse - dL/dlog_prob     b = dL/dlog_prob     c = dL/dmean     e = -dL/dentropy
    dL/dl_ij = dL/dz_ij * dz/dl    dL/dx = dL/dl W      dL/dW = (dL/dl)^T x      dL/dbias = sum_i dL/dl_i

One kernel reads a chunk of logits once and writes the statistics; another overwrites the chunk with its gradient. The
loss is computed between the two.

A row may have k ids (`several_ids`). Then its log_prob has k numbers, and so has b; a is dL/dlse minus their sum:

    dL/dz_ij = a_i p_ij + sum_k b_ik [j = id_ik] + ...

An id that a row has twice counts twice, as two statistics of equal value do. Such a head has neither a teacher nor a
sharded vocabulary.

A head may have a teacher, another head on other hidden states with the same ids. Then each chunk of logits has the
teacher's beside it, in a second buffer, and one statistic more, the divergence of the two distributions. Its gradient
with respect to the logits needs the teacher's, so another kernel writes it (`ops/head/divergence.py`). The teacher
needs no gradient. Its product is one more in forward, and one more wherever backward computes the logits again.

Modes
-----
planned     the caller passes an `objective`. Forward computes its gradient while the logits of a chunk exist (three
            matrix products in total). If backward receives a gradient of the objective, it only scales the result. If
            it receives gradients of the statistics instead, it compares them with the planned ones, row by row. Where
            they equal the planned ones times one scalar, it applies that scalar; for the other rows it computes the
            difference from the real gradient and adds it. A wrong plan costs time, never correctness.
recompute   there is no plan, and backward computes the logits again (four products).
frozen      weight and bias need no gradient. Forward computes d log_prob / dx (with a teacher, d divergence / dx),
            and backward scales each row (two products); for gradients of other statistics backward computes the logits
            again.
no grad     one product.

Memory beyond inputs and gradients: one chunk of logits, half an fp32 weight gradient while several chunks accumulate
(the other half uses the memory of the result), and `[N]` statistics; nothing grows with the vocabulary times N. If one
kernel computes statistics and gradient together, the first chunk is longer: some of its columns use the memory of the
weight gradient, which is not written yet. Then one chunk often suffices for all rows, or fewer chunks do. Accumulation
and statistics are fp32 for all dtypes. `ops/head/__init__.py` lists the files.
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
from .divergence import Teacher, divergence_and_gradient, teacher_rows
from .fused import statistics_and_gradient
from .gradient import coefficients, gradient_in_place, gradient_of_logits
from .head_options import HeadOptions
from .objective import (
    GIVE_UP,
    DivergenceObjective,
    LinearObjective,
    Objective,
    may_fuse,
    objective_gradient,
)
from .reference import logits_statistics_reference
from .statistics import DIFFERENTIABLE, HeadStatistics, Softmax, row_statistics
from .vocabulary_slices import VocabSlice

__all__ = ["head_statistics", "logits_statistics"]


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of the engine that are not tensors."""

    options: HeadOptions
    objective: Objective | None
    backend: str
    chunk_rows: int | Sequence[int] | None
    dtype: torch.dtype
    on_mismatch: Callable[[float], None] | None
    low_memory: bool
    part: VocabSlice | None
    several_ids: bool = False

    def uniform(self, weight: torch.Tensor, class_weights: torch.Tensor | None) -> float | None:
        """Returns u if it is the same for every column, else None."""
        if class_weights is not None:
            return None
        return 1.0 / (weight.shape[0] if self.part is None else self.part.vocab)


@dataclass
class _Plan:
    """The gradients that forward has computed for backward.

    Attributes:
        gradients: the gradients of x, weight and bias, computed from `d_rows`.
        d_rows: the planned gradients of the differentiable statistics, per row.
        row_by_row: mode `frozen`: the index of the statistic whose gradient is 1 in every row, which backward may scale
            by a different number for each row. None in mode `planned`.
        rows: the number of rows.
    """

    gradients: Gradients
    d_rows: tuple[torch.Tensor | None, ...]
    row_by_row: int | None
    rows: int


class _Formed(NamedTuple):
    """The results of forward.

    Attributes:
        total: the value of the objective, or None without one.
        statistics: the statistics of all rows.
        plan: None if forward computed no gradients.
        softmax: the numbers of all rows for a backward that computes the logits again: the fields of `Softmax` and,
            with a teacher, its row_max and inverse_s and the P of `ops/head/divergence.py`.
        ids, rows: the ids and rows as tensors.
    """

    total: torch.Tensor | None
    statistics: HeadStatistics
    plan: _Plan | None
    softmax: tuple[torch.Tensor | None, ...]
    ids: torch.Tensor
    rows: torch.Tensor | None


# Indices of differentiable statistics.
_LOG_PROB, _DIVERGENCE = (HeadStatistics._fields.index(name) for name in ("log_prob", "divergence"))


def _only(index: int, d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Returns gradients of the differentiable statistics, of which one is not None."""
    return tuple(d if i == index else None for i in range(DIFFERENTIABLE))


def _of_teacher(softmax: Softmax | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the numbers of a teacher's softmax that backward needs."""
    return (None, None) if softmax is None else (softmax.row_max, softmax.inverse_s)


def _form(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids, rows: Rows,
          class_weights: torch.Tensor | None, teacher: Teacher | None, call: _Call,
          needs: tuple[bool, ...]) -> _Formed:  # fmt: skip
    """Computes forward. `needs` says whether x, weight and bias need a gradient."""
    objective = call.objective
    # The gradients of k log-probabilities of a row are no multiple of one row.
    frozen = needs == (True, False, False) and objective is None and not call.several_ids
    forms = any(needs) and (objective is not None or frozen)
    tile = None
    # The gradient of a slice of the vocabulary needs the statistics of the other slices first.
    fused = (
        forms
        and call.part is None
        and teacher is None
        and not call.several_ids
        and may_fuse(objective, bias, call.dtype, call.options, call.backend)
    )
    if fused and call.backend not in ("torch", "vendor"):
        tile = tiling.fused_tile(weight.shape[0], call.dtype.itemsize, device.spec(x.device))
        fused = tile is not None
    borrow = tile is not None and needs[1] and not call.low_memory
    chunks = Chunks(x, weight, bias, ids, rows, call.dtype, call.backend, call.chunk_rows, forms and needs[1], borrow,
                    call.part, 0 if teacher is None else teacher.dtype.itemsize)  # fmt: skip
    beside = None if teacher is None else teacher_rows(teacher, chunks, call.backend)
    # The statistic whose gradient is planned in mode `frozen`.
    first = _LOG_PROB if teacher is None else _DIVERGENCE
    uniform = call.uniform(weight, class_weights)
    total: torch.Tensor | None = None
    collected: list[HeadStatistics] = []
    softmaxes: list[tuple[torch.Tensor | None, ...]] = []
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
            softmaxes.append((*softmax, None, None, None))
            late = None
            if known is None:
                value, (late, *_) = objective_gradient(objective, statistics, chunk, call.backend)
                total = _add(total, value)
            d_rows.append(_only(_LOG_PROB, late if known is None else known))
            grads.add(blocks, x_chunk, chunks.weight, chunk, chunks.rows, needs[1], late)
            continue
        statistics, softmax = row_statistics(logits, ids_chunk, class_weights, call.options, call.backend, call.part)
        teacher_softmax = p_sum = None
        d = _only(first, torch.ones_like(statistics.lse))
        written = False
        if teacher is not None and beside is not None:
            of_teacher = next(beside)
            if isinstance(objective, DivergenceObjective):
                d = _only(_DIVERGENCE, objective.factor(statistics.lse))
            # One kernel computes the divergence and writes its gradient if the gradient is known before.
            written = grads is not None and (objective is None or isinstance(objective, DivergenceObjective))
            # The gradient of a slice of the vocabulary needs the sums over the other slices first.
            written = written and (call.part is None or teacher.beta == 0)
            made, teacher_softmax, p_sum = divergence_and_gradient(
                logits, of_teacher, ids_chunk, statistics, softmax, None, None, d if written else None, call.options,
                teacher, call.backend, call.part,
            )  # fmt: skip
            assert made is not None
            statistics = made
        collected.append(statistics)
        softmaxes.append((*softmax, *_of_teacher(teacher_softmax), p_sum))
        if objective is not None and forms and not written:
            value, d = objective_gradient(objective, statistics, chunk, call.backend)
            total = _add(total, value)
        elif objective is not None:
            total = _add(total, objective(statistics, chunk))
        if grads is not None:
            d_rows.append(d)
            if teacher is None:
                k = coefficients(d, statistics.lse, uniform)
                gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend, call.part)
            elif not written:
                divergence_and_gradient(
                    logits, of_teacher, ids_chunk, None, softmax, teacher_softmax, p_sum, d, call.options, teacher,
                    call.backend, call.part,
                )  # fmt: skip
            grads.add(blocks, x_chunk, chunks.weight, chunk, chunks.rows, needs[1])
    merged = HeadStatistics._make(_concatenated(collected, _empty_statistics(call.options, teacher, chunks.ids)))
    if fused and isinstance(objective, LinearObjective):
        total = objective(merged, slice(None))
    if objective is not None and total is None:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
    plan = None
    if grads is not None:
        planned = _concatenated(d_rows, (None,) * DIFFERENTIABLE)
        plan = _Plan(grads.cast(weight, bias), planned, first if frozen else None, chunks.ids.shape[0])
    return _Formed(total, merged, plan, _concatenated(softmaxes, (None,) * 6), chunks.ids, chunks.rows)


class _Saved(NamedTuple):
    """The saved tensors. Backward unpacks them at most once: a checkpoint recomputes them at the first access and
    raises at a second one, and an offloading hook copies them back at every access."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    rows: torch.Tensor | None
    class_weights: torch.Tensor | None
    row_max: torch.Tensor | None
    inverse_s: torch.Tensor | None
    shift: torch.Tensor | None
    teacher_max: torch.Tensor | None
    teacher_inverse_s: torch.Tensor | None
    p_sum: torch.Tensor | None
    teacher_x: torch.Tensor | None
    teacher_weight: torch.Tensor | None
    teacher_bias: torch.Tensor | None

    @property
    def rows_numbers(self) -> tuple[torch.Tensor | None, ...]:
        """`_Formed.softmax`."""
        return self[6:12]


class _Head(torch.autograd.Function):
    """Computes (objective, *statistics) from (x, weight, bias). Backward receives the gradients of these outputs; see
    the modes in the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids, rows: Rows,
                class_weights: torch.Tensor | None, teacher: Teacher | None,
                call: _Call) -> tuple[Any, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        formed = _form(x, weight, bias, ids, rows, class_weights, teacher, call, tuple(ctx.needs_input_grad[:3]))
        # Drop the objective, which backward does not need: its closure may hold large tensors.
        ctx.call, ctx.plan, ctx.weight_shape = replace(call, objective=None), formed.plan, weight.shape
        # Its tensors are saved below, so that hooks on saved tensors have them, too.
        ctx.teacher = None if teacher is None else (teacher.options, teacher.beta, teacher.dtype)
        ctx.teacher_shape = None if teacher is None else teacher.weight.shape
        of_teacher = (None,) * 3 if teacher is None else (teacher.x, teacher.weight, teacher.bias)
        # In the order of `_Saved`.
        ctx.save_for_backward(x, weight, bias, formed.ids, formed.rows, class_weights, *formed.softmax, *of_teacher)
        ctx.mark_non_differentiable(*(t for t in formed.statistics[DIFFERENTIABLE:] if t is not None))
        return (formed.total, *formed.statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: torch.Tensor | None, *d_statistics: torch.Tensor | None) -> tuple[Any, ...]:
        grads = _backward(ctx, d_total, [None if d is None else d.float() for d in d_statistics[:DIFFERENTIABLE]])
        if ctx.call.part is not None and grads.x is not None:
            grads.x = ctx.call.part.total(grads.x)
        return (grads.x, grads.weight, grads.bias, *(None,) * 5)


def _backward(ctx: Any, d_total: torch.Tensor | None, d_rows: list[torch.Tensor | None]) -> Gradients:
    # Autograd may store the returned tensors as `.grad`, so the plan must not be used by a second backward.
    plan, ctx.plan = ctx.plan, None
    if plan is not None:
        # Backward needs these if the plan is used up or does not match.
        ctx.d_planned = plan.d_rows
    of_rows = any(d is not None for d in d_rows)
    if plan is not None and plan.rows == 0:
        # The gradients are zero whatever backward receives: the gradient of a mean over no tokens is infinite.
        return plan.gradients
    if plan is not None and d_total is not None and not of_rows:
        return plan.gradients.scaled(d_total, ctx.call.backend)
    saved = _Saved(*ctx.saved_tensors)
    if plan is not None and d_total is None and of_rows and not ctx.call.several_ids:
        grads = _from_plan(ctx, saved, plan, d_rows)
        if grads is not None:
            return grads
    # Free the plan, which cannot be used, before computing the gradients again.
    plan = None
    if d_total is not None:
        d_rows = [_add(u, None if v is None else v * d_total) for u, v in zip(d_rows, ctx.d_planned, strict=True)]
    return _recomputed(ctx, saved, d_rows)


# A row's gradient matches the plan if they differ by less than this fraction of the largest gradient, which allows for
# the fp32 rounding of two ways to write one formula. The error that this ignores is as small as that of an fp32 sum.
_PLAN_TOLERANCE = 1e-5


def _from_plan(ctx: Any, saved: _Saved, plan: _Plan, d_rows: list[torch.Tensor | None]) -> Gradients | None:
    """Computes the gradients from the plan, for incoming gradients of the statistics. Returns None if it cannot."""
    grads, call = plan.gradients, ctx.call
    if plan.row_by_row is not None:
        factor = d_rows[plan.row_by_row]
        if factor is None or any(d is not None for i, d in enumerate(d_rows) if i != plan.row_by_row):
            return None
        if saved.rows is not None and grads.x is not None:
            factor = factor.new_zeros(grads.x.shape[0]).index_copy_(0, saved.rows, factor)
        return grads.scaled(factor.unsqueeze(-1), call.backend)
    count = saved.ids.shape[0]
    scale, wrong = _compare(plan.d_rows, d_rows)
    if wrong.numel() > GIVE_UP * count:
        # FSDP2's `output_dtype` may round the model's outputs, and then their incoming gradients are rounded, too. So
        # compare again with a rounded plan; the gradients still come from the unrounded one.
        for dtype in (torch.bfloat16, torch.float16):
            rounded = [None if p is None else p.to(dtype).float() for p in plan.d_rows]
            found = _compare(rounded, d_rows)
            if found[1].numel() <= GIVE_UP * count:
                scale, wrong = found
                break
    if wrong.numel():
        share = wrong.numel() / count
        # A gradient that is not finite, as after an overflow, matches no plan, but is no reason to stop planning.
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
    """Returns the scalar factor from the planned row gradients to the real ones, and the rows that do not match. Waits
    for the device, because the host decides whether to compute rows again. Tensors without values count as matching."""
    if not has_values(next(t for t in real if t is not None)):
        return next(t for t in real if t is not None).new_ones(()), torch.empty(0, dtype=torch.int64)
    pairs = [(p, r) for p, r in zip(planned, real, strict=True) if p is not None or r is not None]
    p = torch.stack([torch.zeros_like(r) if p is None else p for p, r in pairs])  # type: ignore[arg-type]
    r = torch.stack([torch.zeros_like(p) if r is None else r for p, r in pairs])  # type: ignore[arg-type]
    # The factor comes from the row with the largest planned gradient. If that row is wrong, all others seem wrong, and
    # backward computes everything again, which is slower but still correct.
    top = p.abs().argmax().view(1)
    # Indexing with `[top]` would make the host wait.
    p_top, r_top = (t.flatten().index_select(0, top).squeeze(0) for t in (p, r))
    scale = torch.where(p_top == 0, torch.ones_like(p_top), r_top / p_top)
    limit = _PLAN_TOLERANCE * (scale * p).abs().amax()
    # Negate `<=` instead of using `>`, so that a NaN does not count as a match.
    return scale, torch.nonzero(~((r - scale * p).abs() <= limit).all(0)).squeeze(1)


def _empty_statistics(options: HeadOptions, teacher: Teacher | None, ids: torch.Tensor) -> HeadStatistics:
    def empty(wanted: bool, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(0, dtype=dtype, device=ids.device) if wanted else None

    taught = teacher is not None
    return HeadStatistics(
        torch.empty_like(ids, dtype=torch.float32), empty(True), empty(options.entropy), empty(options.mean),
        empty(taught), empty(options.log_sum_sq), empty(options.argmax, torch.int64),
        empty(taught), empty(teacher is not None and teacher.options.entropy),
    )  # fmt: skip


def _concatenated(
    chunks: Sequence[tuple[torch.Tensor | None, ...]], empty: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Concatenates the chunks' tensors field by field; returns `empty` if there are no chunks."""
    if len(chunks) < 2:
        return chunks[0] if chunks else empty
    return tuple(None if field[0] is None else torch.cat(field) for field in zip(*chunks, strict=True))


def _recomputed(
    ctx: Any, saved: _Saved, d_rows: Sequence[torch.Tensor | None], select: torch.Tensor | None = None
) -> Gradients:
    """Computes the gradients from the real incoming gradients of all rows, or of the rows in `select`. It computes the
    logits again, chunk by chunk."""
    x, weight, bias, ids, rows, class_weights = saved[:6]
    numbers = list(saved.rows_numbers)
    call, needs, teacher = ctx.call, tuple(ctx.needs_input_grad[:3]), None
    _check_gathered("", weight, ctx.weight_shape)
    if saved.teacher_x is not None and saved.teacher_weight is not None:
        _check_gathered("teacher_", saved.teacher_weight, ctx.teacher_shape)
        teacher = Teacher(saved.teacher_x, saved.teacher_weight, saved.teacher_bias, *ctx.teacher)
    chunk_rows = call.chunk_rows
    if select is not None:
        rows, ids = select if rows is None else rows[select], ids[select]
        numbers = [None if t is None else t[select] for t in numbers]
        d_rows = [None if t is None else t[select] for t in d_rows]
        chunk_rows = None
    uniform = call.uniform(weight, class_weights)
    chunks = Chunks(x, weight, bias, ids, rows, call.dtype, call.backend, chunk_rows, needs[1], part=call.part,
                    beside=0 if teacher is None else teacher.dtype.itemsize)  # fmt: skip
    beside = None if teacher is None else teacher_rows(teacher, chunks, call.backend)
    grads = Gradients.empty(x, weight, bias, chunks, needs, call.low_memory)
    for chunk, x_chunk, ids_chunk, (logits,) in chunks.walk():
        row_max, inverse_s, shift, *of_teacher, p_sum = (None if t is None else t[chunk] for t in numbers)
        softmax = Softmax(row_max, inverse_s, shift)  # type: ignore[arg-type]
        d = [None if t is None else t[chunk] for t in d_rows]
        if teacher is None or beside is None:
            k = coefficients(d, softmax.row_max, uniform)
            gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend, call.part)
        else:
            divergence_and_gradient(
                logits, next(beside), ids_chunk, None, softmax, Softmax(*of_teacher, None), p_sum, d,  # type: ignore
                call.options, teacher, call.backend, call.part,
            )  # fmt: skip
        grads.add((logits,), x_chunk, chunks.weight, chunk, rows, needs[1])
    return grads.cast(weight, bias)


def _check_gathered(prefix: str, weight: torch.Tensor, shape: torch.Size) -> None:
    """Raises if a saved weight is no longer what it was in forward."""
    if weight.shape != shape or (weight.numel() and not weight.untyped_storage().nbytes()):
        raise RuntimeError(
            f"{prefix}weight is needed in backward, where it has shape {list(weight.shape)} and "
            f"{weight.untyped_storage().nbytes()} bytes of storage; in forward it was {list(shape)}. "
            "Whatever shards it has to gather it again before the head's backward."
        )


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
    teacher: Teacher | None = None,
    several_ids: bool = False,
) -> tuple[torch.Tensor | None, HeadStatistics]:
    """Computes the statistics of the head for chosen rows, and the sum of an objective over their chunks.
    `torch.compile` does not trace it, because it contains a host loop of unknown length.

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`.
        ids: `[n]` ids in `[0, V)`; n = N, or the length of `rows`. `ids` and `rows` may be functions, so that work that
            waits for the device starts after the device has other work.
        bias: `[V]` or None.
        options: the transform of the logits and the statistics.
        rows: `[n]` int64, distinct rows of x to project; None for all rows. The others cost nothing.
        class_weights: `[V]` fp32, the u of `mean`.
        objective: the function whose gradient forward computes (mode `planned`).
        backend: `"torch"`, `"vendor"` (for objectives of log_prob alone, on logits without transform; it needs three
            more chunks of logits in fp32), or any other name for the kernels.
        chunk_rows: the number of rows of a chunk, or the row at which each chunk ends; None for `tiling.head_chunk`.
        on_mismatch: called with the fraction of rows whose gradient differed from the plan, if there are any.
        low_memory: sum the chunks' weight gradients in weight's dtype instead of fp32.
        part: the slice of a sharded vocabulary that weight and bias cover. ids and class_weights cover the whole
            vocabulary, and x is the same on all ranks. All ranks must make the same calls, forward and backward.
        teacher: adds the statistics `divergence`, `teacher_log_prob` and `teacher_entropy`. Its weight and bias are
            plain tensors, with `part` those of the same slice. It needs none of the statistics mean, log_sum_sq and
            argmax, and its tensors get no gradient.
        several_ids: whether ids are `[n, k]`, and log_prob is, too; without `part` and `teacher`, and for the backends
            other than `"vendor"`. The only plan is then that of the objective.

    Returns:
        The objective summed over chunks (None without one) and the `[n]` statistics, of which log_sum_sq and argmax are
        not differentiable.
    """
    dtype = compute_dtype(x)
    if part is not None and class_weights is not None:
        class_weights = part.of_columns(class_weights)
    # The products run in this dtype and everything else in fp32, so switch autocast off.
    with torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext():
        call = _Call(options, objective, backend, chunk_rows, dtype, on_mismatch, low_memory, part, several_ids)
        # Check the grad mode here: `needs_input_grad` of an autograd function is true for a parameter under `no_grad`.
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if recorded and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
            total, *statistics = _Head.apply(x, weight, bias, ids, rows, class_weights, teacher, call)
            return total, HeadStatistics._make(statistics)
        with torch.no_grad():
            formed = _form(x, weight, bias, ids, rows, class_weights, teacher, call, (False,) * 3)
        return formed.total, formed.statistics


class _LogitsStatistics(torch.autograd.Function):
    """Computes the statistics of existing logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, unused: torch.Tensor | None, options: HeadOptions,
                backend: str) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        statistics, softmax = row_statistics(logits, ids, None, options, backend)
        ctx.save_for_backward(logits, ids, unused, *softmax)
        ctx.options, ctx.backend = options, backend
        ctx.mark_non_differentiable(*(t for t in statistics[DIFFERENTIABLE:] if t is not None))
        return tuple(statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_statistics: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, ids, unused, *softmax_fields = ctx.saved_tensors
        softmax = Softmax._make(softmax_fields)
        k = coefficients(d_statistics, softmax.row_max, 1.0 / logits.shape[1])
        grads = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        gradient_of_logits(logits, grads, ids, None, softmax, k, ctx.options, ctx.backend)
        if unused is not None:
            # These rows are zero already, unless a logit is not finite: zero times that is NaN.
            grads.index_fill_(0, unused, 0.0)
        return grads, None, None, None, None


@opaque
def logits_statistics(
    logits: torch.Tensor, ids: torch.Tensor, options: HeadOptions, *, unused: torch.Tensor | None = None, backend: str
) -> HeadStatistics:
    """Computes the statistics of logits `[n, V]`, differentiable as those of `head_statistics`. Forward reads the
    logits once; backward reads them once and writes their gradient once. `unused` has the indices of rows whose
    statistics the caller drops; these rows may contain any values."""
    if logits.shape[0] == 0:
        return logits_statistics_reference(logits, ids, options)
    # The gradient has the logits' strides, so rows must not share memory, as they do in an expanded tensor.
    if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()
    return HeadStatistics._make(_LogitsStatistics.apply(logits, ids, unused, options, backend))
