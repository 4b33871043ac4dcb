"""Computes the statistics of one chunk of logits and overwrites the logits with their gradient, for losses whose
gradient is one factor per row times that of log_prob. `ops/head/engine.py` has the formulas.

One kernel replaces two: it reads a row and, while most of the row is still in the L2 cache, reads it again and
overwrites it. `tiling.fused_tile` decides where this kernel is used. The vendor's operator can also be used here.
"""

from __future__ import annotations

import torch

from ... import device, tiling, vendor
from ...support.triton import jit, libdevice, tl
from ..launch import launch
from .head_options import HeadOptions, guarded, kernel_flags, row_blocks, slope, transformed
from .statistics import HeadStatistics, Softmax, vendor_statistics

__all__ = ["statistics_and_gradient"]


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _read_columns(start_of_row, n_cols, m, s, ds, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                  HAS_ENTROPY: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Updates the lanes' running maxima m and their sums, s of exp(d) and ds of exp(d) d with d = z - m, with these
    columns."""
    NEGATIVE: tl.constexpr = -1e30
    LANES: tl.constexpr = WIDTH // VEC
    lane = tl.arange(0, WIDTH)
    folded = tl.arange(0, FOLD)[:, None] * WIDTH + lane[None, :]
    n_folded = n_cols // (FOLD * WIDTH) * (FOLD * WIDTH)
    for start in range(0, n_folded, FOLD * WIDTH):
        x = tl.load(start_of_row + start + folded)
        # A lane processes the columns of 16-byte loads, and rescales its sums once for FOLD * VEC columns.
        z = tl.reshape(transformed(x, inner, outer, HAS_CAP, IS_IDENTITY), [FOLD, LANES, VEC])
        m_new = tl.maximum(m, tl.max(tl.max(z, axis=2), axis=0))
        rescale = tl.exp(m - m_new)
        d = z - m_new[None, :, None]
        e = tl.exp(d)
        if HAS_ENTROPY:
            ds = (ds + s * (m - m_new)) * rescale + tl.sum(tl.sum(e * d, axis=2), axis=0)
        s = s * rescale + tl.sum(tl.sum(e, axis=2), axis=0)
        m = m_new
    for start in range(n_folded, n_cols, WIDTH):
        mask = start + lane < n_cols
        x = tl.load(start_of_row + start + lane, mask=mask, other=0.0)
        z = tl.where(mask, transformed(x, inner, outer, HAS_CAP, IS_IDENTITY), NEGATIVE)
        z = tl.reshape(z, [LANES, VEC])
        m_new = tl.maximum(m, tl.max(z, axis=1))
        rescale = tl.exp(m - m_new)
        d = z - m_new[:, None]
        # A lane without columns would count exp(NEGATIVE - NEGATIVE) = 1.
        e = tl.where(tl.reshape(mask, [LANES, VEC]), tl.exp(d), 0.0)
        if HAS_ENTROPY:
            ds = (ds + s * (m - m_new)) * rescale + tl.sum(e * d, axis=1)
        s = s * rescale + tl.sum(e, axis=1)
        m = m_new
    return m, s, ds


@jit
def _write_columns(start_of_row, n_cols, row_max, a, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                   FOLD: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Overwrites these columns with their gradient without the id's term."""
    lane = tl.arange(0, WIDTH)
    folded = tl.arange(0, FOLD)[:, None] * WIDTH + lane[None, :]
    n_folded = n_cols // (FOLD * WIDTH) * (FOLD * WIDTH)
    for start in range(n_folded, n_cols, WIDTH):
        mask = start + lane < n_cols
        x = tl.load(start_of_row + start + lane, mask=mask, other=0.0)
        g = _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(start_of_row + start + lane, g.to(start_of_row.dtype.element_ty), mask=mask,
                 eviction_policy="evict_first")  # fmt: skip
    # Go backwards, because the columns that were read last are the most likely to be in the cache.
    for done in range(0, n_folded, FOLD * WIDTH):
        start = n_folded - FOLD * WIDTH - done
        x = tl.load(start_of_row + start + folded, eviction_policy="evict_first")
        g = _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(start_of_row + start + folded, g.to(start_of_row.dtype.element_ty), eviction_policy="evict_first")


@jit
def _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """Computes a exp(z - row_max) dz/dl."""
    z = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
    return tl.exp(z - row_max) * a * slope(z, inner, outer, HAS_CAP, IS_IDENTITY)


@jit(lengths=("n_rows",))
def _row_fused_kernel(
    logits,  # [n_rows, n_first], the first columns, overwritten with dL/dl
    second,  # [n_rows, n_second], the other columns if HAS_SECOND, likewise overwritten
    ids,  # [n_rows]
    factor,  # [n_rows] fp32: dL/dlog_prob
    out,  # [5, n_rows] fp32: log_prob, lse, max, 1 / sum e, sum p d (d = z - max, e = exp(d))
    n_rows,
    n_first,
    n_second,
    row_stride,
    second_stride,
    inner,
    outer,
    HAS_SECOND: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_IDENTITY: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    FOLD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Few programs run at once, so that most of their rows stay in the L2 cache until they are read again.
    NEGATIVE: tl.constexpr = -1e30
    VEC: tl.constexpr = 8
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        start_of_row = logits + tl.cast(row, tl.int64) * row_stride
        start_of_second = second + tl.cast(row, tl.int64) * second_stride
        column = tl.load(ids + row).to(tl.int32)
        f = tl.load(factor + row)
        if HAS_SECOND:
            x_id = tl.load(start_of_row + column, mask=column < n_first, other=0.0)
            x_id += tl.load(start_of_second + column - n_first, mask=column >= n_first, other=0.0)
        else:
            x_id = tl.load(start_of_row + column)
        m = tl.full([WIDTH // VEC], NEGATIVE, tl.float32)
        s = tl.zeros([WIDTH // VEC], tl.float32)
        ds = tl.zeros([WIDTH // VEC], tl.float32)
        m, s, ds = _read_columns(start_of_row, n_first, m, s, ds, inner, outer, HAS_CAP, IS_IDENTITY, HAS_ENTROPY,
                                 FOLD, WIDTH, VEC)  # fmt: skip
        if HAS_SECOND:
            m, s, ds = _read_columns(start_of_second, n_second, m, s, ds, inner, outer, HAS_CAP, IS_IDENTITY,
                                     HAS_ENTROPY, FOLD, WIDTH, VEC)  # fmt: skip
        row_max = tl.max(m, axis=0)
        rescale = tl.exp(m - row_max)
        total = tl.sum(s * rescale, axis=0)
        inverse = tl.div_rn(1.0, total)
        log_s = libdevice.log(total) if LIBDEVICE else tl.log(total)
        z_id = transformed(x_id, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(out + row, (z_id - row_max) - log_s)
        tl.store(out + n_rows + row, row_max + log_s)
        tl.store(out + 2 * n_rows + row, row_max)
        tl.store(out + 3 * n_rows + row, inverse)
        if HAS_ENTROPY:
            tl.store(out + 4 * n_rows + row, tl.sum((ds + s * (m - row_max)) * rescale, axis=0) * inverse)
        a = -f * inverse
        # No thread may overwrite x_id or a tail before all threads have read it.
        tl.debug_barrier()
        if HAS_SECOND:
            _write_columns(start_of_second, n_second, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY, FOLD, WIDTH)
        _write_columns(start_of_row, n_first, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY, FOLD, WIDTH)
        # Compute the id's column again, because comparing every column with the id would cost time for each of them.
        at_id = _softmax_gradient(x_id, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        at_id = (at_id + f * slope(z_id, inner, outer, HAS_CAP, IS_IDENTITY)).to(logits.dtype.element_ty)
        tl.debug_barrier()
        if HAS_SECOND:
            tl.store(start_of_row + column, at_id, mask=column < n_first)
            tl.store(start_of_second + column - n_first, at_id, mask=column >= n_first)
        else:
            tl.store(start_of_row + column, at_id)


# ---------------------------------------------------------------------------------------------------------------------
# Step
# ---------------------------------------------------------------------------------------------------------------------


@guarded
def statistics_and_gradient(
    logits: torch.Tensor, second: torch.Tensor | None, ids: torch.Tensor, factor: torch.Tensor, options: HeadOptions,
    tile: tiling.StatisticsTile | None, backend: str,
) -> tuple[HeadStatistics, Softmax]:  # fmt: skip
    """Computes the statistics of one chunk of logits and overwrites the logits with dL/dl of sum_i factor_i log_prob_i.
    `second` has the columns that are not in `logits`."""
    if backend == "torch":
        if second is None:
            return _statistics_and_gradient_torch(logits, ids, factor, options)
        every = torch.cat((logits, second), 1)
        found = _statistics_and_gradient_torch(every, ids, factor, options)
        logits.copy_(every[:, : logits.shape[1]])
        second.copy_(every[:, logits.shape[1] :])
        return found
    if backend == "vendor":
        log_prob, log_probs = vendor.cross_entropy(logits, ids)
        statistics, softmax = vendor_statistics(log_prob, logits, ids)
        logits.copy_(vendor.cross_entropy_gradient(log_probs, ids, factor))
        return statistics, softmax
    assert tile is not None
    n_rows, n_first = logits.shape
    out = torch.empty(5, n_rows, dtype=torch.float32, device=logits.device)
    inner, outer = options.factors
    rest = logits if second is None else second
    launch(
        _row_fused_kernel, (tile.programs,),
        (logits, rest, ids, factor, out, n_rows, n_first, rest.shape[1], logits.stride(0), rest.stride(0), inner,
         outer),
        {"HAS_SECOND": second is not None, **kernel_flags(options, logits.device), "HAS_ENTROPY": options.entropy,
         "LIBDEVICE": device.has_libdevice(logits.device), "FOLD": tile.fold, "WIDTH": tile.width, **tile.options},
    )  # fmt: skip
    log_prob, lse, row_max, inverse_s, shift = out.unbind(0)
    entropy = (lse - row_max) - shift if options.entropy else None
    return HeadStatistics(log_prob, lse, entropy), Softmax(row_max, inverse_s, shift if options.entropy else None)


def _statistics_and_gradient_torch(
    logits: torch.Tensor, ids: torch.Tensor, factor: torch.Tensor, options: HeadOptions
) -> tuple[HeadStatistics, Softmax]:
    """Computes the same in torch; each block of rows is read once and written once."""
    out = torch.empty(5, len(logits), dtype=torch.float32, device=logits.device)
    columns, (inner, outer), start = ids.long().unsqueeze(1), options.factors, 0
    for block in row_blocks(logits):
        rows = slice(start, start + len(block))
        column, f, start = columns[rows], factor[rows].unsqueeze(1), rows.stop
        z, t = block.float(), None
        if options.softcap is not None:
            t = z.mul_(inner).tanh_()
            z = outer * t
        elif inner != 1.0:
            z.mul_(inner)
        z_id, row_max = z.gather(1, column), z.amax(1, keepdim=True)
        d = z.sub_(row_max)
        e = d.exp() if options.entropy else d.exp_()
        s = e.sum(1, keepdim=True)
        log_s, inverse_s = s.log(), 1.0 / s
        # Not z_id - lse, because the difference to the maximum is exact if the id is likely.
        numbers = [(z_id - row_max) - log_s, row_max + log_s, row_max, inverse_s]
        if options.entropy:
            numbers.append(torch.linalg.vecdot(e, d).unsqueeze(1) * inverse_s)
        for row, number in zip(out, numbers, strict=False):
            row[rows] = number.squeeze(1)
        a = -f * inverse_s
        at_id = e.gather(1, column) * a + f
        g = e.mul_(a).scatter_(1, column, at_id)
        if t is not None:
            g.mul_(outer * inner).mul_(1.0 - t * t)
        elif inner != 1.0:
            g.mul_(inner)
        block.copy_(g)
    log_prob, lse, row_max, inverse_s, shift = out.unbind(0)
    entropy = (lse - row_max) - shift if options.entropy else None
    return HeadStatistics(log_prob, lse, entropy), Softmax(row_max, inverse_s, shift if options.entropy else None)
