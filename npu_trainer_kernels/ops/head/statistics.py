"""Statistics of one chunk of logits `[n, V]`, which stay as they are: a kernel that reads them once, its torch twin, or
the vendor's operator. The formulas: `ops/head/engine.py`.

The kernel and its twin leave a few sums per row; what becomes of these is torch on `[n]` numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import device, tiling, vendor
from ...support.triton import jit, tl
from ..launch import launch
from .options import HeadOptions, guarded, kernel_flags, transform, transformed
from .vocabulary_slices import RowSums, VocabSlice

__all__ = ["HeadStatistics", "Softmax", "row_statistics", "vendor_statistics"]


class HeadStatistics(NamedTuple):
    """Per-row statistics, each an fp32 tensor `[n]` (`argmax`: int64), or None where it was not asked for."""

    log_prob: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    log_sum_sq: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


class Softmax(NamedTuple):
    """A chunk's softmax in the form that loses nothing to rounding: p_ij = exp(z_ij - row_max_i) / s_i."""

    row_max: torch.Tensor
    inverse_s: torch.Tensor
    shift: torch.Tensor | None  # log s - entropy: log p + entropy = z - row_max - shift


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _steep(d):
    """Differences of logits in units so small that any but 0 outweighs every column."""
    return 3e38 * d


@jit
def _taken_in(z, start, m, s, ds, sq, key, HAS_ENTROPY: tl.constexpr, HAS_SQUARES: tl.constexpr,
              HAS_ARGMAX: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The lanes' maxima, sums and keys after the columns z `[FOLD, WIDTH]`, the first of which is `start`."""
    # An NPU's `tl.where` stops the unit that issues instructions, and a maximum that drops NaN takes seven of them. A
    # row with a NaN is NaN either way, by its sums.
    m_new = tl.maximum(m, tl.max(z, axis=0), propagate_nan=tl.PropagateNan.ALL)
    fall = m - m_new
    rescale = tl.exp(fall)
    d = z - m_new[None, :]
    e = tl.exp(d)
    if HAS_ENTROPY:
        # Sums of e d, not e z: the entropy would be a small difference of large numbers.
        ds = (ds + s * fall) * rescale + tl.sum(e * d, axis=0)
    s = s * rescale + tl.sum(e, axis=0)
    if HAS_SQUARES:
        sq = sq * rescale * rescale + tl.sum(e * e, axis=0)
    if HAS_ARGMAX:
        # Less its column where d is 0, so that the greatest key is that of the first maximum, as torch.argmax has it.
        first = tl.max(_steep(d) - tl.arange(0, FOLD).to(tl.float32)[:, None], axis=0)
        key = tl.maximum(key + _steep(fall), first * WIDTH - start, propagate_nan=tl.PropagateNan.ALL)
    return m_new, s, ds, sq, key


@jit
def _store_sum(pointer, lanes):
    """Stores one number, which an NPU's scalar unit does not wait for, as it would if it were none of a vector."""
    tl.store(pointer + tl.arange(0, 1), tl.sum(tl.reshape(lanes, [1, lanes.shape[0]]), axis=1))


@jit(lengths=("n_rows",))
def _row_statistics_kernel(
    logits,  # [n_rows, n_cols], row stride given, any float dtype
    class_weights,  # [n_cols] fp32, read where HAS_WEIGHTS
    out,  # [6, n_rows] fp32: max, sum e, sum e d, sum u z, sum e^2, argmax (d = z - max, e = exp(d))
    n_rows,
    n_cols,
    n_folded,  # columns that whole steps cover: n_cols rounded down to FOLD * WIDTH
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
    TAIL: tl.constexpr,  # TAIL * WIDTH cover the other columns
    WIDTH: tl.constexpr,
):
    # Every lane keeps its own running maximum and sums, so the only reductions over the whole vector are the few at
    # a row's end. FOLD * WIDTH contiguous logits share one rescaling of the lanes.
    # Chosen so that exp(NEGATIVE - m) is 0 for every finite m and NEGATIVE * 0 is 0, which -inf would not give.
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
            # Read in one line, whose mask is one number to an NPU.
            rest = n_folded + tl.arange(0, TAIL * WIDTH)
            x = tl.reshape(tl.load(start_of_row + rest, mask=rest < n_cols, other=0.0), [TAIL, WIDTH])
            z = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
            if HAS_MEAN:
                if HAS_WEIGHTS:
                    u = tl.load(class_weights + rest, mask=rest < n_cols, other=0.0)
                    us += tl.sum(z * tl.reshape(u, [TAIL, WIDTH]), axis=0)
                else:
                    us += tl.sum(z, axis=0)
            # Below a lane that has seen nothing: exp(NEGATIVE - NEGATIVE) would count as 1.
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
    """(maximum, sum of exponentials, its weighting by z - maximum, sum of z, sum of squares, argmax), fp32 each."""
    if backend == "torch":
        return _raw_statistics_torch(logits, class_weights, options)
    n_rows, n_cols = logits.shape
    out = torch.empty(6, n_rows, dtype=torch.float32, device=logits.device)
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
    """The kernel's outputs in torch: the whole chunk at once instead of a lane at a time."""
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


def row_statistics(
    logits: torch.Tensor, ids: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str,
    part: VocabSlice | None = None,
) -> tuple[HeadStatistics, Softmax]:  # fmt: skip
    """Statistics of one chunk of logits, which stay as they are. With `part` they are some columns of it, and
    class_weights theirs; the statistics are of whole rows all the same."""
    if backend == "vendor":
        return vendor_statistics(vendor.cross_entropy(logits, ids)[0], logits, ids)
    row_max, s, ds, us, sq, best = _raw_statistics(logits, class_weights, options, backend)
    column, mine = (ids.long(), None) if part is None else part.own(ids)
    z_id = transform(logits.gather(1, column.unsqueeze(1)).squeeze(1).float(), options)
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
        # Not z_id - lse: the difference to the maximum is exact where the id is likely.
        log_prob=(z_id - row_max) - log_s,
        lse=lse,
        entropy=None if shift is None else log_s - shift,
        mean=(us / vocab if class_weights is None else us) if options.mean else None,
        log_sum_sq=sq.log() - 2 * log_s if options.log_sum_sq else None,
        # Of a row that has no maximum, because it is not finite, the kernel has no argmax.
        argmax=best.nan_to_num(0.0, 0.0, 0.0).long() if options.argmax else None,
    )
    return statistics, Softmax(row_max, 1.0 / s, shift)


def vendor_statistics(
    log_prob: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor
) -> tuple[HeadStatistics, Softmax]:
    """From what the vendor's operator returns; its softmax is exp(z - lse)."""
    lse = logits.gather(1, ids.long().unsqueeze(1)).squeeze(1).float() - log_prob
    return HeadStatistics(log_prob, lse), Softmax(lse, torch.ones_like(lse), None)
