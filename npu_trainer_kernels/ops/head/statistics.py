"""Statistics of one chunk of logits `[n, V]`, without changing the logits: a kernel that reads them once, the same in
torch, and the vendor's operator. `ops/head/engine.py` has the formulas.

The kernel returns a few sums per row, and torch computes the statistics from these `[n]` numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import device, tiling, vendor
from ...support.triton import jit, tl
from ..launch import launch
from .head_options import HeadOptions, guarded, kernel_flags, row_blocks, transform, transformed
from .vocabulary_slices import RowSums, VocabSlice

__all__ = ["DIFFERENTIABLE", "HeadStatistics", "Softmax", "row_statistics", "vendor_statistics"]

# The first fields of `HeadStatistics`; the others have no gradient.
DIFFERENTIABLE = 5


class HeadStatistics(NamedTuple):
    """Per-row statistics, each an fp32 tensor `[n]` (`argmax`: int64), or None if it was not requested. The last two
    and `divergence` belong to a head with a teacher beside it (`ops/head/divergence.py`)."""

    log_prob: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    log_sum_sq: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    teacher_log_prob: torch.Tensor | None = None
    teacher_entropy: torch.Tensor | None = None


class Softmax(NamedTuple):
    """The numbers that give a chunk's softmax without loss of accuracy: p_ij = exp(z_ij - row_max_i) / s_i."""

    row_max: torch.Tensor
    inverse_s: torch.Tensor
    shift: torch.Tensor | None  # log s - entropy: log p + entropy = z - row_max - shift


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _steep(d):
    """Scales differences of logits so that any difference but 0 outweighs every column index."""
    return 3e38 * d


@jit
def _taken_in(z, start, m, s, ds, sq, key, HAS_ENTROPY: tl.constexpr, HAS_SQUARES: tl.constexpr,
              HAS_ARGMAX: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Updates the lanes' maxima, sums and keys with the columns z `[FOLD, WIDTH]`, the first of which is `start`."""
    # On an NPU `tl.where` stalls the unit that issues instructions, and a maximum that drops NaN takes seven of them. A
    # row with a NaN becomes NaN in any case, through its sums.
    m_new = tl.maximum(m, tl.max(z, axis=0), propagate_nan=tl.PropagateNan.ALL)
    fall = m - m_new
    rescale = tl.exp(fall)
    d = z - m_new[None, :]
    e = tl.exp(d)
    if HAS_ENTROPY:
        # Sum e d, not e z: with e z the entropy would be a small difference of large numbers.
        ds = (ds + s * fall) * rescale + tl.sum(e * d, axis=0)
    s = s * rescale + tl.sum(e, axis=0)
    if HAS_SQUARES:
        sq = sq * rescale * rescale + tl.sum(e * e, axis=0)
    if HAS_ARGMAX:
        # Where d is 0 the key is minus the column, so that the greatest key is the first maximum, as in torch.argmax.
        first = tl.max(_steep(d) - tl.arange(0, FOLD).to(tl.float32)[:, None], axis=0)
        key = tl.maximum(key + _steep(fall), first * WIDTH - start, propagate_nan=tl.PropagateNan.ALL)
    return m_new, s, ds, sq, key


@jit
def _store_sum(pointer, lanes):
    """Stores the sum of the lanes as a vector of one element: an NPU's scalar unit would wait for a scalar."""
    tl.store(pointer + tl.arange(0, 1), tl.sum(tl.reshape(lanes, [1, lanes.shape[0]]), axis=1))


@jit(lengths=("n_rows",))
def _row_statistics_kernel(
    logits,  # [n_rows, n_cols] of any float dtype, with row stride row_stride
    class_weights,  # [n_cols] fp32, read if HAS_WEIGHTS
    out,  # [6, n_rows] fp32: max, sum e, sum e d, sum u z, sum e^2, argmax (d = z - max, e = exp(d))
    n_rows,
    n_cols,
    n_folded,  # the columns of whole steps: n_cols rounded down to a multiple of FOLD * WIDTH
    row_stride,
    inner,
    outer,
    HAS_CAP: tl.constexpr,
    IS_IDENTITY: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    FOLD: tl.constexpr,
    TAIL: tl.constexpr,  # TAIL * WIDTH columns cover the rest
    WIDTH: tl.constexpr,
):
    # Every lane has a running maximum and sums, so the only reductions over the whole vector are the few at the end of
    # a row. FOLD * WIDTH contiguous logits share one rescaling of the lanes.
    # exp(NEGATIVE - m) is 0 for every finite m, and NEGATIVE * 0 is 0, which does not hold for -inf.
    NEGATIVE: tl.constexpr = -1e30
    lane = tl.arange(0, WIDTH)
    folded = tl.arange(0, FOLD)[:, None] * WIDTH + lane[None, :]
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        # A chunk of logits can hold more than 2^31 elements.
        start_of_row = logits + tl.cast(row, tl.int64) * row_stride
        m = tl.full([WIDTH], NEGATIVE, tl.float32)
        s = tl.zeros([WIDTH], tl.float32)
        ds = tl.zeros([WIDTH], tl.float32)
        us = tl.zeros([WIDTH], tl.float32)
        sq = tl.zeros([WIDTH], tl.float32)
        key = tl.zeros([WIDTH], tl.float32)
        for start in range(0, n_folded, FOLD * WIDTH):
            z = transformed(tl.load(start_of_row + start + folded), inner, outer, HAS_CAP, IS_IDENTITY)
            if HAS_MEAN:
                us += tl.sum(z * tl.load(class_weights + start + folded) if HAS_WEIGHTS else z, axis=0)
            m, s, ds, sq, key = _taken_in(z, start, m, s, ds, sq, key, HAS_ENTROPY, HAS_SQUARES, HAS_ARGMAX,
                                          FOLD, WIDTH)  # fmt: skip
        if TAIL:
            # Load the rest as one vector, because an NPU represents its mask by one number.
            rest = n_folded + tl.arange(0, TAIL * WIDTH)
            x = tl.reshape(tl.load(start_of_row + rest, mask=rest < n_cols, other=0.0), [TAIL, WIDTH])
            z = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
            if HAS_MEAN:
                if HAS_WEIGHTS:
                    u = tl.load(class_weights + rest, mask=rest < n_cols, other=0.0)
                    us += tl.sum(z * tl.reshape(u, [TAIL, WIDTH]), axis=0)
                else:
                    us += tl.sum(z, axis=0)
            # Use less than NEGATIVE: in a lane without columns exp(NEGATIVE - NEGATIVE) would count as 1.
            column = n_folded + tl.arange(0, TAIL)[:, None] * WIDTH + lane[None, :]
            z = tl.where(column < n_cols, z, 2.0 * NEGATIVE)
            m, s, ds, sq, key = _taken_in(z, n_folded, m, s, ds, sq, key, HAS_ENTROPY, HAS_SQUARES, HAS_ARGMAX,
                                          TAIL, WIDTH)  # fmt: skip
        row_max = tl.max(m, axis=0)
        fall = m - row_max
        rescale = tl.exp(fall)
        tl.store(out + row, row_max)
        _store_sum(out + n_rows + row, s * rescale)
        if HAS_ENTROPY:
            _store_sum(out + 2 * n_rows + row, (ds + s * fall) * rescale)
        if HAS_MEAN:
            _store_sum(out + 3 * n_rows + row, us)
        if HAS_SQUARES:
            _store_sum(out + 4 * n_rows + row, sq * rescale * rescale)
        if HAS_ARGMAX:
            tl.store(out + 5 * n_rows + row, -tl.max(key + _steep(fall) - lane.to(tl.float32), axis=0))


# ---------------------------------------------------------------------------------------------------------------------
# Step
# ---------------------------------------------------------------------------------------------------------------------


@guarded
def _raw_statistics(
    logits: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str
) -> tuple[torch.Tensor, ...]:
    """Returns (max, sum e, sum e d, sum u z, sum e^2, argmax) with d = z - max and e = exp(d), fp32 each."""
    n_rows, n_cols = logits.shape
    out = torch.empty(6, n_rows, dtype=torch.float32, device=logits.device)
    if backend == "torch":
        start = 0
        for block in row_blocks(logits):
            stop = start + len(block)
            for row, numbers in zip(out, _raw_statistics_torch(block, class_weights, options), strict=True):
                row[start:stop] = numbers
            start = stop
        return out.unbind(0)
    spec = device.spec(logits.device)
    extras = options.entropy + options.mean + options.log_sum_sq + options.argmax
    extras += (class_weights is not None) + (options.softcap is not None)
    tile = tiling.statistics_tile(n_cols, logits.element_size(), extras, spec)
    step = tile.fold * tile.width
    inner, outer = options.factors
    launch(
        _row_statistics_kernel, (min(n_rows, tile.programs),),
        (logits, out if class_weights is None else class_weights, out, n_rows, n_cols, n_cols // step * step,
         logits.stride(0), inner, outer),
        {**kernel_flags(options, logits.device), "HAS_ENTROPY": options.entropy, "HAS_MEAN": options.mean,
         "HAS_WEIGHTS": class_weights is not None, "HAS_SQUARES": options.log_sum_sq, "HAS_ARGMAX": options.argmax,
         "FOLD": tile.fold, "TAIL": tile.tail(n_cols, spec), "WIDTH": tile.width, **tile.options},
    )  # fmt: skip
    return out.unbind(0)


def _raw_statistics_torch(
    logits: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions
) -> tuple[torch.Tensor, ...]:
    """Computes the kernel's outputs in torch, for all rows at once."""
    z = transform(logits.float(), options)
    row_max = z.amax(-1)
    d = z - row_max.unsqueeze(-1)
    e = d.exp() if options.entropy else d.exp_()
    none = row_max
    return (
        row_max,
        e.sum(-1),
        torch.linalg.vecdot(e, d) if options.entropy else none,
        (z.sum(-1) if class_weights is None else z @ class_weights) if options.mean else none,
        torch.linalg.vecdot(e, e) if options.log_sum_sq else none,
        z.argmax(-1) if options.argmax else none,
    )


def _like(number: torch.Tensor, of_ids: torch.Tensor) -> torch.Tensor:
    """Returns a number per row with the dimensions of a number per id."""
    return number if of_ids.dim() == 1 else number.unsqueeze(-1)


def row_statistics(
    logits: torch.Tensor, ids: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str,
    part: VocabSlice | None = None,
) -> tuple[HeadStatistics, Softmax]:  # fmt: skip
    """Computes the statistics of one chunk of logits. With `part`, logits and class_weights are the columns of that
    slice; the statistics still cover whole rows. For ids `[n, k]`, log_prob is `[n, k]`; then without `part`, and for
    other backends than the vendor's."""
    if backend == "vendor":
        return vendor_statistics(vendor.cross_entropy(logits, ids)[0], logits, ids)
    row_max, s, ds, us, sq, best = _raw_statistics(logits, class_weights, options, backend)
    column, mine = (ids.long(), None) if part is None else part.own(ids)
    z_id = transform(logits.gather(1, column.view(len(column), -1)).view(column.shape).float(), options)
    vocab = logits.shape[1]
    if part is not None and mine is not None:
        sums = RowSums(
            row_max, s, ds if options.entropy else None, us if options.mean else None,
            sq if options.log_sum_sq else None, best if options.argmax else None, z_id.masked_fill(~mine, 0.0),
        )  # fmt: skip
        row_max, s, ds, us, sq, best, z_id = part.merged(sums)  # type: ignore[assignment]
        vocab = part.vocab
    log_s = s.log()
    lse = row_max + log_s
    shift = ds / s if options.entropy else None
    statistics = HeadStatistics(
        # Not z_id - lse, because the difference to the maximum is exact if the id is likely.
        log_prob=(z_id - _like(row_max, z_id)) - _like(log_s, z_id),
        lse=lse,
        entropy=None if shift is None else log_s - shift,
        mean=(us / vocab if class_weights is None else us) if options.mean else None,
        log_sum_sq=sq.log() - 2 * log_s if options.log_sum_sq else None,
        # A row that is not finite has no maximum, and the kernel's argmax of it is not finite either.
        argmax=best.nan_to_num(0.0, 0.0, 0.0).long() if options.argmax else None,
    )
    return statistics, Softmax(row_max, 1.0 / s, shift)


def vendor_statistics(
    log_prob: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor
) -> tuple[HeadStatistics, Softmax]:
    """Computes statistics and softmax from the vendor's log-probabilities; its softmax is exp(z - lse)."""
    lse = logits.gather(1, ids.long().unsqueeze(1)).squeeze(1).float() - log_prob
    return HeadStatistics(log_prob, lse), Softmax(lse, torch.ones_like(lse), None)
