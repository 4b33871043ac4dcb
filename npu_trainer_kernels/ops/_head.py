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
weight gradient is not yet written to (`_WeightSum.room`), so that one chunk often does for all, and fewer do otherwise.
Accumulation and statistics are fp32 whatever the dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import _vendor, device, tiling
from .._opaque import opaque
from .._triton import jit, libdevice, tl
from ._checks import is_number
from ._fallback import falls_back
from ._launch import launch

__all__ = [
    "HeadOptions",
    "HeadStatistics",
    "LinearObjective",
    "LogProbObjective",
    "Objective",
    "head_statistics",
    "head_statistics_reference",
    "logits_statistics",
    "logits_statistics_reference",
    "transform",
]

# Chosen so that exp(NEGATIVE - m) is 0 for every finite m and NEGATIVE * 0 is 0, which -inf would not give.
_NEGATIVE = -1e30
# The kernel reports the argmax as an fp32 number.
MAX_VOCAB = 1 << 24


@dataclass(frozen=True)
class HeadOptions:
    """How logits are transformed and which statistics are wanted.

    Attributes:
        temperature: divides the logits; positive.
        softcap: `softcap * tanh(logits / softcap)`, applied after `logit_scale` and before the temperature; None: no.
        logit_scale: multiplies the logits first.
        entropy, mean, log_sum_sq, argmax: which statistics to compute beyond `log_prob` and `lse`.
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
        """(inner, outer): z = outer * tanh(inner * l) with a softcap, z = inner * l without."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


class HeadStatistics(NamedTuple):
    """Per-row statistics, each an fp32 tensor `[n]` (`argmax`: int64), or None where it was not asked for."""

    log_prob: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    log_sum_sq: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


class _Softmax(NamedTuple):
    """A chunk's softmax in the form that loses nothing to rounding: p_ij = exp(z_ij - row_max_i) / s_i."""

    row_max: torch.Tensor
    inverse_s: torch.Tensor
    shift: torch.Tensor | None  # log s - entropy: log p + entropy = z - row_max - shift


# `[n]` ids; a function is asked once the first chunk of logits is on its way, so that the device need not wait.
Ids = torch.Tensor | Callable[[], torch.Tensor]
# `[n]` distinct rows of x, None for all of them; a function is asked right before the first product.
Rows = torch.Tensor | None | Callable[[], torch.Tensor | None]
# From a chunk's statistics, and which rows these are, to a scalar whose gradient is wanted.
Objective = Callable[[HeadStatistics, slice], torch.Tensor]


@dataclass(frozen=True)
class LinearObjective:
    """sum_i factor_i log_prob_i: an objective whose gradient is known before the logits are. `make` gives the `[n]`
    fp32 factors; asked once the first chunk of logits is on its way, so that the device need not wait."""

    make: Callable[[], torch.Tensor]

    @functools.cached_property
    def factor(self) -> torch.Tensor:
        return self.make()

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return (statistics.log_prob * self.factor[chunk]).sum()


@dataclass(frozen=True)
class LogProbObjective:
    """An objective of the log-probabilities alone, `function(log_prob, chunk)`. A row's gradient is then that of its
    log-probability times one number: one kernel may form it before the number is known. `gradient(log_prob, chunk,
    backend)` gives the value and these numbers, where there is a shorter way than autograd."""

    function: Callable[[torch.Tensor, slice], torch.Tensor]
    gradient: Callable[[torch.Tensor, slice, str], tuple[torch.Tensor, torch.Tensor]] | None = None

    def __call__(self, statistics: HeadStatistics, chunk: slice) -> torch.Tensor:
        return self.function(statistics.log_prob, chunk)


class _Coefficients(NamedTuple):
    """The four numbers per row of the module's docstring; None stands for zeros."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    e: torch.Tensor | None


# ---------------------------------------------------------------------------------------------------------------------
# Reference
# ---------------------------------------------------------------------------------------------------------------------


def transform(logits: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    """z of the module's docstring, in the dtype of `logits`."""
    inner, outer = options.factors
    if options.softcap is not None:
        return outer * torch.tanh(inner * logits)
    return logits if inner == 1.0 else inner * logits


def head_statistics_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    options: HeadOptions,
    class_weights: torch.Tensor | None = None,
) -> HeadStatistics:
    """The statistics by their definitions, on full logits, in plain differentiable PyTorch."""
    return logits_statistics_reference(torch.nn.functional.linear(x, weight, bias), ids, options, class_weights)


def logits_statistics_reference(
    logits: torch.Tensor, ids: torch.Tensor, options: HeadOptions, class_weights: torch.Tensor | None = None
) -> HeadStatistics:
    """The same, from logits `[n, V]`."""
    z = transform(logits if logits.dtype == torch.float64 else logits.float(), options)
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


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _tanh(y, HAS_CAP: tl.constexpr):
    """2 sigmoid(2 y) - 1 is the one form that every backend compiles well; CUDA's fast sigmoid loses digits there."""
    if HAS_CAP == 2:
        return libdevice.tanh(y)
    else:
        return 2.0 * tl.sigmoid(2.0 * y) - 1.0


@jit
def _transformed(x, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """z(l) in fp32."""
    z = x.to(tl.float32)
    if HAS_CAP:
        z = outer * _tanh(inner * z, HAS_CAP)
    elif not IS_IDENTITY:
        z = inner * z
    return z


@jit(lengths=("n_rows",))
def _row_statistics_kernel(
    logits,  # [n_rows, n_cols], row stride given, any float dtype
    class_weights,  # [n_cols] fp32, read where HAS_WEIGHTS
    out,  # [6, n_rows] fp32: max, sum e, sum e d, sum u z, sum e^2, argmax (d = z - max, e = exp(d))
    n_rows,
    n_cols,
    n_folded,  # columns that the folded loop covers: n_cols rounded down to FOLD * WIDTH
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
    WIDTH: tl.constexpr,
):
    # Every lane keeps its own running maximum and sums, so the only reductions over the whole vector are the few at
    # a row's end. FOLD * WIDTH contiguous logits share one rescaling of the lanes.
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
        best = tl.zeros([WIDTH], tl.int32)
        for start in range(0, n_folded, FOLD * WIDTH):
            z = _transformed(tl.load(start_of_row + start + folded), inner, outer, HAS_CAP, IS_IDENTITY)
            block_max = tl.max(z, axis=0)
            if HAS_ARGMAX:
                # Smallest column among a lane's maxima, as torch.argmax reports the first.
                first = tl.min(tl.where(z == block_max[None, :], start + folded, n_cols), axis=0)
                best = tl.where(block_max > m, first, best)
            m_new = tl.where(block_max > m, block_max, m)
            rescale = tl.exp(m - m_new)
            d = z - m_new[None, :]
            e = tl.exp(d)
            if HAS_ENTROPY:
                # Sums of e d, not e z: the entropy would be a small difference of large numbers.
                ds = (ds + s * (m - m_new)) * rescale + tl.sum(e * d, axis=0)
            s = s * rescale + tl.sum(e, axis=0)
            if HAS_MEAN:
                if HAS_WEIGHTS:
                    us += tl.sum(z * tl.load(class_weights + start + folded), axis=0)
                else:
                    us += tl.sum(z, axis=0)
            if HAS_SQUARES:
                sq = sq * rescale * rescale + tl.sum(e * e, axis=0)
            m = m_new
        for start in range(n_folded, n_cols, WIDTH):
            mask = start + lane < n_cols
            x = tl.load(start_of_row + start + lane, mask=mask, other=0.0)
            z = _transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
            if HAS_MEAN:
                if HAS_WEIGHTS:
                    us += z * tl.load(class_weights + start + lane, mask=mask, other=0.0)
                else:
                    us += tl.where(mask, z, 0.0)
            z = tl.where(mask, z, NEGATIVE)
            if HAS_ARGMAX:
                best = tl.where(z > m, start + lane, best)
            m_new = tl.where(z > m, z, m)
            rescale = tl.exp(m - m_new)
            # Without the mask a lane that has seen nothing would count exp(NEGATIVE - NEGATIVE) = 1.
            d = z - m_new
            e = tl.where(mask, tl.exp(d), 0.0)
            if HAS_ENTROPY:
                ds = (ds + s * (m - m_new)) * rescale + e * d
            s = s * rescale + e
            if HAS_SQUARES:
                sq = sq * rescale * rescale + e * e
            m = m_new
        row_max = tl.max(m, axis=0)
        rescale = tl.exp(m - row_max)
        tl.store(out + row, row_max)
        tl.store(out + n_rows + row, tl.sum(s * rescale, axis=0))
        if HAS_ENTROPY:
            tl.store(out + 2 * n_rows + row, tl.sum((ds + s * (m - row_max)) * rescale, axis=0))
        if HAS_MEAN:
            tl.store(out + 3 * n_rows + row, tl.sum(us, axis=0))
        if HAS_SQUARES:
            tl.store(out + 4 * n_rows + row, tl.sum(sq * rescale * rescale, axis=0))
        if HAS_ARGMAX:
            tl.store(out + 5 * n_rows + row, tl.min(tl.where(m == row_max, best, n_cols), axis=0).to(tl.float32))


@jit(lengths=("n_rows",))
def _row_gradient_kernel(
    logits,  # [n_rows, n_cols]
    grads,  # the same memory, overwritten with dL/dl less its b term. A second pointer, because an NPU's loads would
    # otherwise wait for the stores before them.
    class_weights,  # [n_cols] fp32, read where HAS_WEIGHTS
    row_max,  # [n_rows] fp32, as are shift = log s - entropy and the coefficients
    shift,
    a,  # a / s and e / s with s = sum_j exp(z_j - row_max), so that exp(z - row_max) need not be normalised
    c,
    e,
    n_rows,
    n_cols,
    n_full,  # columns that whole blocks cover
    row_stride,
    inner,
    outer,
    HAS_CAP: tl.constexpr,
    IS_IDENTITY: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * row_stride
        z_max = tl.load(row_max + row)
        row_a = tl.load(a + row)
        row_c = tl.load(c + row) if HAS_MEAN else 0.0
        row_e = tl.load(e + row) if HAS_ENTROPY else 0.0
        row_shift = tl.load(shift + row) if HAS_ENTROPY else 0.0
        for start in range(0, n_full, BLOCK):
            x = tl.load(logits + offset + start + lane)
            u = tl.load(class_weights + start + lane) if HAS_WEIGHTS else 1.0
            g = _logit_gradient(x, u, z_max, row_a, row_c, row_e, row_shift, inner, outer,
                                HAS_CAP, IS_IDENTITY, HAS_MEAN, HAS_ENTROPY)  # fmt: skip
            tl.store(grads + offset + start + lane, g.to(grads.dtype.element_ty))
        for start in range(n_full, n_cols, BLOCK):
            mask = start + lane < n_cols
            x = tl.load(logits + offset + start + lane, mask=mask, other=0.0)
            u = tl.load(class_weights + start + lane, mask=mask, other=0.0) if HAS_WEIGHTS else 1.0
            g = _logit_gradient(x, u, z_max, row_a, row_c, row_e, row_shift, inner, outer,
                                HAS_CAP, IS_IDENTITY, HAS_MEAN, HAS_ENTROPY)  # fmt: skip
            tl.store(grads + offset + start + lane, g.to(grads.dtype.element_ty), mask=mask)


@jit
def _read_columns(start_of_row, n_cols, m, s, ds, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                  HAS_ENTROPY: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """The lanes' running maximum m, and their sums s of exp(d) and ds of exp(d) d with d = z - m, after these
    columns."""
    NEGATIVE: tl.constexpr = -1e30
    LANES: tl.constexpr = WIDTH // VEC
    lane = tl.arange(0, WIDTH)
    folded = tl.arange(0, FOLD)[:, None] * WIDTH + lane[None, :]
    n_folded = n_cols // (FOLD * WIDTH) * (FOLD * WIDTH)
    for start in range(0, n_folded, FOLD * WIDTH):
        x = tl.load(start_of_row + start + folded)
        # A lane takes the columns of one 16-byte load: what it keeps is rescaled once for FOLD * VEC of them.
        z = tl.reshape(_transformed(x, inner, outer, HAS_CAP, IS_IDENTITY), [FOLD, LANES, VEC])
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
        z = tl.where(mask, _transformed(x, inner, outer, HAS_CAP, IS_IDENTITY), NEGATIVE)
        z = tl.reshape(z, [LANES, VEC])
        m_new = tl.maximum(m, tl.max(z, axis=1))
        rescale = tl.exp(m - m_new)
        d = z - m_new[:, None]
        # A lane that has seen nothing would count exp(NEGATIVE - NEGATIVE) = 1.
        e = tl.where(tl.reshape(mask, [LANES, VEC]), tl.exp(d), 0.0)
        if HAS_ENTROPY:
            ds = (ds + s * (m - m_new)) * rescale + tl.sum(e * d, axis=1)
        s = s * rescale + tl.sum(e, axis=1)
        m = m_new
    return m, s, ds


@jit
def _write_columns(start_of_row, n_cols, row_max, a, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                   FOLD: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Overwrites these columns with their gradient but for the id's own term."""
    lane = tl.arange(0, WIDTH)
    folded = tl.arange(0, FOLD)[:, None] * WIDTH + lane[None, :]
    n_folded = n_cols // (FOLD * WIDTH) * (FOLD * WIDTH)
    for start in range(n_folded, n_cols, WIDTH):
        mask = start + lane < n_cols
        x = tl.load(start_of_row + start + lane, mask=mask, other=0.0)
        g = _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(start_of_row + start + lane, g.to(start_of_row.dtype.element_ty), mask=mask,
                 eviction_policy="evict_first")  # fmt: skip
    # Backwards: what was read last is the surest to be in the cache.
    for done in range(0, n_folded, FOLD * WIDTH):
        start = n_folded - FOLD * WIDTH - done
        x = tl.load(start_of_row + start + folded, eviction_policy="evict_first")
        g = _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(start_of_row + start + folded, g.to(start_of_row.dtype.element_ty), eviction_policy="evict_first")


@jit
def _softmax_gradient(x, row_max, a, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """a exp(z - row_max) dz/dl."""
    z = _transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
    return tl.exp(z - row_max) * a * _slope(z, inner, outer, HAS_CAP, IS_IDENTITY)


@jit
def _slope(z, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """dz/dl at z(l)."""
    if HAS_CAP:
        t = z / outer
        return (outer * inner) * (1.0 - t * t)
    elif IS_IDENTITY:
        return 1.0
    else:
        return inner


@jit(lengths=("n_rows",))
def _row_fused_kernel(
    logits,  # [n_rows, n_first], the first columns, overwritten with dL/dl
    second,  # [n_rows, n_second], the others, where HAS_SECOND: a matrix of its own
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
    # Few programs, so that most of their rows stay in the L2 cache until they are read again.
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
        z_id = _transformed(x_id, inner, outer, HAS_CAP, IS_IDENTITY)
        tl.store(out + row, (z_id - row_max) - log_s)
        tl.store(out + n_rows + row, row_max + log_s)
        tl.store(out + 2 * n_rows + row, row_max)
        tl.store(out + 3 * n_rows + row, inverse)
        if HAS_ENTROPY:
            tl.store(out + 4 * n_rows + row, tl.sum((ds + s * (m - row_max)) * rescale, axis=0) * inverse)
        a = -f * inverse
        # Nobody may overwrite x_id or a tail before everybody has read it.
        tl.debug_barrier()
        if HAS_SECOND:
            _write_columns(start_of_second, n_second, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY, FOLD, WIDTH)
        _write_columns(start_of_row, n_first, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY, FOLD, WIDTH)
        # The id's own column, worked out once more: comparing every column with the id would cost each of them.
        at_id = _softmax_gradient(x_id, row_max, a, inner, outer, HAS_CAP, IS_IDENTITY)
        at_id = (at_id + f * _slope(z_id, inner, outer, HAS_CAP, IS_IDENTITY)).to(logits.dtype.element_ty)
        tl.debug_barrier()
        if HAS_SECOND:
            tl.store(start_of_row + column, at_id, mask=column < n_first)
            tl.store(start_of_second + column - n_first, at_id, mask=column >= n_first)
        else:
            tl.store(start_of_row + column, at_id)


@jit
def _logit_gradient(x, u, z_max, a, c, e, shift, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                    HAS_MEAN: tl.constexpr, HAS_ENTROPY: tl.constexpr):  # fmt: skip
    """dL/dl of one block without the b term, the formula of the module's docstring."""
    x = x.to(tl.float32)
    if HAS_CAP:
        t = _tanh(inner * x, HAS_CAP)
        z = outer * t
    elif IS_IDENTITY:
        z = x
    else:
        z = inner * x
    d = z - z_max
    g = tl.exp(d) * (a + e * (d - shift) if HAS_ENTROPY else a)
    if HAS_MEAN:
        g += c * u
    if HAS_CAP:
        g = g * (outer * inner) * (1.0 - t * t)
    elif not IS_IDENTITY:
        g = g * inner
    return g


@jit
def _scale_kernel(
    values,  # [n] of any float dtype, multiplied in place
    factor,  # one number
    n,
    BLOCK: tl.constexpr,
):
    f = tl.load(factor).to(tl.float32)
    # The usual factor is one, and then nothing is read or written.
    if f != 1.0:
        lane = tl.arange(0, BLOCK)
        for start in range(tl.cast(tl.program_id(0), tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            mask = start + lane < n
            value = tl.load(values + start + lane, mask=mask).to(tl.float32) * f
            tl.store(values + start + lane, value.to(values.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# The two steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


_guarded = falls_back("linear_cross_entropy", "linear_logprob", "grpo_loss")


@_guarded
def _scale(t: torch.Tensor, factor: torch.Tensor, backend: str) -> None:
    """`t *= factor`, for next to nothing when the factor is the number one, without waiting to know."""
    spec = device.spec(t.device)
    tile = None if backend == "torch" or factor.dim() or not t.is_contiguous() else tiling.scale_block(spec)
    if tile is None or not t.numel():
        t.mul_(factor)
    else:
        programs = tiling.accumulating_programs(-(-t.numel() // tile.size), spec, options=tile.options)
        launch(_scale_kernel, (programs,), t, factor, t.numel(), BLOCK=tile.size, **tile.options)


def _kernel_flags(options: HeadOptions, where: torch.device) -> dict[str, Any]:
    inner, _ = options.factors
    cap = 2 if options.softcap is not None and device.has_libdevice(where) else options.softcap is not None
    return {"HAS_CAP": cap, "IS_IDENTITY": options.softcap is None and inner == 1.0}


@_guarded
def _raw_statistics(
    logits: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str
) -> tuple[torch.Tensor, ...]:
    """(maximum, sum of exponentials, its weighting by z - maximum, sum of z, sum of squares, argmax), fp32 each."""
    if backend == "torch":
        return _raw_statistics_torch(logits, class_weights, options)
    n_rows, n_cols = logits.shape
    out = torch.empty(6, n_rows, dtype=torch.float32, device=logits.device)
    tile = tiling.statistics_tile(
        n_cols, logits.element_size(), device.spec(logits.device), entropy=options.entropy, mean=options.mean,
        squares=options.log_sum_sq, argmax=options.argmax, weights=class_weights is not None,
    )  # fmt: skip
    step = tile.fold * tile.width
    inner, outer = options.factors
    launch(
        _row_statistics_kernel, (min(n_rows, tile.programs),),
        logits, out if class_weights is None else class_weights, out,
        n_rows, n_cols, n_cols // step * step, logits.stride(0), inner, outer,
        **_kernel_flags(options, logits.device),
        HAS_ENTROPY=options.entropy, HAS_MEAN=options.mean, HAS_WEIGHTS=class_weights is not None,
        HAS_SQUARES=options.log_sum_sq, HAS_ARGMAX=options.argmax,
        FOLD=tile.fold, WIDTH=tile.width, **tile.options,
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


def _statistics(
    logits: torch.Tensor, ids: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str
) -> tuple[HeadStatistics, _Softmax]:
    """Statistics of one chunk of logits, which stay as they are."""
    if backend == "vendor":
        return _vendor_statistics(_vendor.cross_entropy(logits, ids)[0], logits, ids)
    row_max, s, ds, us, sq, best = _raw_statistics(logits, class_weights, options, backend)
    log_s = s.log()
    lse = row_max + log_s
    z_id = transform(logits.gather(1, ids.long().unsqueeze(1)).squeeze(1).float(), options)
    shift = ds / s if options.entropy else None
    statistics = HeadStatistics(
        # Not z_id - lse: the difference to the maximum is exact where the id is likely.
        log_prob=(z_id - row_max) - log_s,
        lse=lse,
        entropy=None if shift is None else log_s - shift,
        mean=(us / logits.shape[1] if class_weights is None else us) if options.mean else None,
        log_sum_sq=sq.log() - 2 * log_s if options.log_sum_sq else None,
        argmax=best.long() if options.argmax else None,
    )
    return statistics, _Softmax(row_max, 1.0 / s, shift)


def _vendor_statistics(
    log_prob: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor
) -> tuple[HeadStatistics, _Softmax]:
    """From what the vendor's operator returns; its softmax is exp(z - lse)."""
    lse = logits.gather(1, ids.long().unsqueeze(1)).squeeze(1).float() - log_prob
    return HeadStatistics(log_prob, lse), _Softmax(lse, torch.ones_like(lse), None)


def _fuses(objective: Objective | None, bias: torch.Tensor | None, dtype: torch.dtype, options: HeadOptions,
           backend: str) -> bool:  # fmt: skip
    """Whether statistics and gradient may come from one kernel."""
    if options.mean or options.log_sum_sq or options.argmax or backend == "torch":
        return False
    if isinstance(objective, LogProbObjective):
        # The number of a row multiplies x, and might leave fp16's range there.
        return bias is None and dtype != torch.float16
    return isinstance(objective, LinearObjective)


@_guarded
def _statistics_and_gradient(
    logits: torch.Tensor, second: torch.Tensor | None, ids: torch.Tensor, factor: torch.Tensor, options: HeadOptions,
    tile: tiling.StatisticsTile | None, backend: str,
) -> tuple[HeadStatistics, _Softmax]:  # fmt: skip
    """Statistics of one chunk of logits, which are overwritten with dL/dl of sum_i factor_i log_prob_i. `second`: the
    columns that are not in `logits`."""
    if backend == "torch":
        every = logits if second is None else torch.cat((logits, second), 1)
        statistics, softmax = _statistics(every, ids, None, options, backend)
        k = _coefficients((factor, None, None, None), statistics.lse, None)
        _gradient_in_place(every, ids, None, softmax, k, options, backend)
        if second is not None:
            logits.copy_(every[:, : logits.shape[1]])
            second.copy_(every[:, logits.shape[1] :])
        return statistics, softmax
    if backend == "vendor":
        log_prob, log_probs = _vendor.cross_entropy(logits, ids)
        statistics, softmax = _vendor_statistics(log_prob, logits, ids)
        logits.copy_(_vendor.cross_entropy_gradient(log_probs, ids, factor))
        return statistics, softmax
    assert tile is not None
    n_rows, n_first = logits.shape
    out = torch.empty(5, n_rows, dtype=torch.float32, device=logits.device)
    inner, outer = options.factors
    rest = logits if second is None else second
    launch(
        _row_fused_kernel, (tile.programs,), logits, rest, ids, factor, out,
        n_rows, n_first, rest.shape[1], logits.stride(0), rest.stride(0), inner, outer,
        HAS_SECOND=second is not None, **_kernel_flags(options, logits.device), HAS_ENTROPY=options.entropy,
        LIBDEVICE=device.has_libdevice(logits.device), FOLD=tile.fold, WIDTH=tile.width, **tile.options,
    )  # fmt: skip
    log_prob, lse, row_max, inverse_s, shift = out.unbind(0)
    entropy = (lse - row_max) - shift if options.entropy else None
    return HeadStatistics(log_prob, lse, entropy), _Softmax(row_max, inverse_s, shift if options.entropy else None)


def _gradient_in_place(
    logits: torch.Tensor,
    ids: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: _Softmax,
    k: _Coefficients,
    options: HeadOptions,
    backend: str,
) -> None:
    """Overwrites one chunk of logits with dL/dl."""
    _gradient_of_logits(logits, logits, ids, class_weights, softmax, k, options, backend)


def _gradient_of_logits(
    logits: torch.Tensor,
    grads: torch.Tensor,
    ids: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: _Softmax,
    k: _Coefficients,
    options: HeadOptions,
    backend: str,
) -> None:
    """Writes dL/dl of a chunk of logits to `grads`, which may be the logits themselves.

    The b term touches one element of each row. That element is worked out here on `[n]` numbers, in fp32, and put in
    its place: comparing every column with the id would cost the kernel as much as the rest of its arithmetic.
    """
    if backend == "vendor":
        # It covers losses of log_prob alone, so that b says everything.
        assert (k.c, k.e) == (None, None)
        grads.copy_(_vendor.cross_entropy_gradient(_vendor.cross_entropy(logits, ids)[1], ids, k.b))
        return
    column = ids.long().unsqueeze(1)
    at_id = logits.gather(1, column)
    u = None if class_weights is None else class_weights[ids.long()].unsqueeze(1)
    at_id = _gradient_torch(at_id.float(), u, softmax, k, options, k.b).to(logits.dtype)
    _gradient_without_id(grads, logits, class_weights, softmax, k, options, backend)
    grads.scatter_(1, column, at_id)


@_guarded
def _gradient_without_id(
    grads: torch.Tensor,
    logits: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: _Softmax,
    k: _Coefficients,
    options: HeadOptions,
    backend: str,
) -> None:
    """dL/dl but for b's term."""
    if backend == "torch":
        z = logits.float()
        if z is logits and grads is not logits:
            z = grads.copy_(logits)
        grads.copy_(_gradient_torch(z, class_weights, softmax, k, options))
        return
    n_rows, n_cols = logits.shape
    has_weights = k.c is not None and class_weights is not None
    tile = tiling.gradient_tile(n_cols, logits.element_size(), has_weights, device.spec(logits.device))
    inner, outer = options.factors
    unused = k.a
    launch(
        _row_gradient_kernel, (min(n_rows, tile.programs),),
        logits, grads, unused if class_weights is None else class_weights,
        softmax.row_max, unused if softmax.shift is None else softmax.shift,
        k.a * softmax.inverse_s, unused if k.c is None else k.c, unused if k.e is None else k.e * softmax.inverse_s,
        n_rows, n_cols, n_cols // tile.block * tile.block, logits.stride(0), inner, outer,
        **_kernel_flags(options, logits.device),
        HAS_MEAN=k.c is not None, HAS_WEIGHTS=has_weights, HAS_ENTROPY=k.e is not None,
        BLOCK=tile.block, **tile.options,
    )  # fmt: skip


def _gradient_torch(
    z: torch.Tensor,
    u: torch.Tensor | None,
    softmax: _Softmax,
    k: _Coefficients,
    options: HeadOptions,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """dL/dl of fp32 logits, which it may overwrite; with b's term where `b` is given."""
    inner, outer = options.factors
    t = None
    if options.softcap is not None:
        t = z.mul_(inner).tanh_()
        z = outer * t
    elif inner != 1.0:
        z = z.mul_(inner)
    row_max, a = softmax.row_max.unsqueeze(-1), (k.a * softmax.inverse_s).unsqueeze(-1)
    d = z.sub_(row_max)
    if k.e is None or softmax.shift is None:
        g = d.exp_().mul_(a)
    else:
        e = (k.e * softmax.inverse_s).unsqueeze(-1)
        g = torch.exp(d).mul_(d.sub_(softmax.shift.unsqueeze(-1)).mul_(e).add_(a))
    if b is not None:
        g.add_(b.unsqueeze(-1))
    if k.c is not None:
        # u = 1/V is folded into c by the caller.
        g.add_(k.c.unsqueeze(-1) if u is None else k.c.unsqueeze(-1) * u)
    if t is not None:
        g.mul_(outer * inner).mul_(1 - t * t)
    elif inner != 1.0:
        g.mul_(inner)
    return g


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """x W^T + bias into `out`, a slice of the chunk buffer."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` without rounding `a @ b` to the inputs' dtype first. `total` is fp32, or of the inputs' dtype.

    Rounding every chunk's product would bias a long accumulation although each product's own error looks harmless.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.dtype != torch.float32:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif device.has_fp32_output_product(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _begin(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total = a @ b`, likewise: the first product saves filling with zeros and reading them."""
    if a.dtype not in (torch.float32, total.dtype) and device.has_fp32_output_product(total.device):
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total)


class _WeightSum:
    """The sum of the chunks' weight gradients: in fp32, half of it in the memory of the result; or in the result.

    A result of two bytes an element has room for half the fp32 sums, so only the other half needs memory of its own.
    Until the first product writes to it, all this memory is free: the first chunk of logits may lie there with some
    of its columns (`room`), and the sum for its dx (`scratch`).
    """

    # Elements that are copied aside when the sums are rounded in place.
    _FIRST = 1 << 20

    def __init__(self, weight: torch.Tensor, in_result: bool) -> None:
        """With `in_result` there are no fp32 sums: the result itself is added to, and rounded after each chunk."""
        n_rows, n_cols = weight.shape
        self.result = torch.empty(n_rows, n_cols, dtype=weight.dtype, device=weight.device)
        self.parts = [self.result]
        self.begun = False
        if weight.dtype != torch.float32 and not in_result:
            inside = tiling.rows_inside(n_rows)
            room = self.result.view(-1)[: 2 * inside * n_cols]
            rest = torch.empty(n_rows - inside, n_cols, dtype=torch.float32, device=weight.device)
            self.parts = [room.view(torch.float32).view(inside, n_cols), rest] if inside else [rest]

    def room(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for so many columns of logits; `add` is done with them when it writes there."""
        free = self.parts[-1] if len(self.parts) > 1 else self.result[columns:]
        return free.view(-1).view(dtype)

    def scratch(self, columns: int, shape: tuple[int, int]) -> torch.Tensor:
        """An fp32 matrix in memory that `room(columns)` leaves free; to be used before the first `add`."""
        return self.parts[0][:columns].view(-1).view(torch.float32)[: shape[0] * shape[1]].view(shape)

    def add(self, g: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Adds g^T x; g by blocks of columns, in order."""
        product = _accumulate if self.begun else _begin
        self.begun = True
        first_column = 0
        for block in g:
            first_row = 0
            for part in self.parts:
                start = max(first_column, first_row)
                stop = min(first_column + block.shape[1], first_row + part.shape[0])
                if start < stop:
                    columns = block[:, start - first_column : stop - first_column]
                    product(part[start - first_row : stop - first_row], columns.t(), x)
                first_row += part.shape[0]
            first_column += block.shape[1]

    def finish(self) -> torch.Tensor:
        """The sum in the result's dtype. To be called once."""
        if not self.begun:
            return self.result.zero_()
        *inside, rest = self.parts
        if rest is self.result:
            return rest
        for sums in inside:
            # From the front, in pieces that double: each is written where only sums lay that are rounded already.
            source, target = sums.view(-1), self.result.view(-1)
            done = min(self._FIRST, source.shape[0])
            target[:done] = source[:done].clone()
            while done < source.shape[0]:
                piece = slice(done, min(2 * done, source.shape[0]))
                target[piece] = source[piece]
                done = piece.stop
        self.result[self.result.shape[0] - rest.shape[0] :] = rest
        return self.result


@dataclass
class _Gradients:
    """Gradients of x, weight and bias as they are formed chunk by chunk; `total`: weight's, while it is summed."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    total: _WeightSum | None = None

    @classmethod
    def empty(cls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunks: _Chunks,
              needs: tuple[bool, ...], low_memory: bool) -> _Gradients:  # fmt: skip
        dx = None
        if needs[0]:
            dx = torch.empty_like(x) if chunks.slices else torch.zeros_like(x)
        # One chunk: the product is the gradient. Several: they add up in fp32.
        one = len(chunks.slices) == 1
        total = _WeightSum(weight, low_memory or one) if needs[1] and (chunks.borrowed or not one) else None
        db = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None and needs[2] else None
        return cls(dx, None, db, total)

    def add(self, g: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, chunk: slice,
            rows: torch.Tensor | None, needs_weight: bool, factor: torch.Tensor | None = None) -> None:  # fmt: skip
        """The chunk's share, from dL/dl by blocks of columns. With `factor`, each row of g is still to be multiplied by
        its number (there is no bias then)."""
        if self.x is not None:
            if len(g) == 1 and rows is None and factor is None and self.x.dtype == g[0].dtype:
                torch.mm(g[0], weight, out=self.x[chunk])
            else:
                dx = self._dx(g, weight)
                dx = dx if factor is None else dx.mul_(factor.unsqueeze(1))
                if rows is None:
                    self.x[chunk] = dx
                else:
                    if chunk.start == 0:
                        # Rows that were left out have gradient zero.
                        self.x.zero_()
                    self.x.index_copy_(0, rows[chunk], dx.to(self.x.dtype))
        if self.bias is not None:
            self.bias += torch.cat([block.sum(0, dtype=torch.float32) for block in g])
        if factor is not None:
            x = torch.mul(x, factor.unsqueeze(1), out=torch.empty_like(x))
        if needs_weight:
            # The last to read g, since it may write where g lies.
            if self.total is None:
                self.weight = g[0].t() @ x
            else:
                self.total.add(g, x)

    def _dx(self, g: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        """g W, of several blocks in fp32."""
        if len(g) == 1:
            return g[0] @ weight
        assert self.total is not None
        columns = g[0].shape[1]
        dx = self.total.scratch(columns, (g[0].shape[0], weight.shape[1]))
        _begin(dx, g[0], weight[:columns])
        _accumulate(dx, g[1], weight[columns:])
        return dx

    def scaled(self, factor: torch.Tensor, backend: str) -> _Gradients:
        """All of them times a scalar (or x's rows times one each), in place."""
        for t in (self.x, self.weight, self.bias):
            if t is not None:
                _scale(t, factor, backend)
        return self

    def plus(self, other: _Gradients) -> _Gradients:
        """The sum with gradients from other rows, in place."""
        for t, u in ((self.x, other.x), (self.weight, other.weight), (self.bias, other.bias)):
            if t is not None and u is not None:
                t.add_(u)
        return self

    def cast(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Gradients:
        dw = None if self.weight is None else self.weight.to(weight.dtype)
        dw = dw if self.total is None else self.total.finish()
        db = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return _Gradients(self.x, dw, db)


def autocasts(x: torch.Tensor) -> bool:
    """Whether products with x run in autocast's dtype."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the products with x: its own, or autocast's."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


class _Chunks:
    """Walks over the rows in chunks of logits; the buffer is reused."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids,
                 rows: torch.Tensor | None, call: _Call, chunk_rows: int | Sequence[int] | None,
                 sums: bool, borrow: bool = False) -> None:  # fmt: skip
        """`sums`: the weight's gradient is summed over the chunks. With `borrow` the first one may be longer, with
        columns where that gradient will be."""
        self.x, self.rows, self.dtype = x, rows, call.dtype
        self._ids = ids
        dtype, in_place = call.dtype, call.backend not in ("torch", "vendor")
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.borrowed = 0
        n, (vocab, hidden), spec = (x if rows is None else rows).shape[0], weight.shape, device.spec(x.device)
        shortest = 0
        if chunk_rows is None and borrow:
            plan = tiling.borrowing_chunks(n, vocab, hidden, dtype.itemsize, weight.dtype.itemsize, spec)
            if plan is not None:
                chunk_rows, self.borrowed = plan.stops, plan.columns
        if chunk_rows is None:
            chunk_rows = tiling.head_chunk(n, vocab, dtype.itemsize, spec, hidden if sums else 0, in_place)
            shortest = tiling.shortest_chunk(chunk_rows, spec)
        stops = [*range(chunk_rows, n, chunk_rows), n] if isinstance(chunk_rows, int) else list(chunk_rows)
        if len(stops) > 1 and stops[-1] - stops[-2] < shortest:
            del stops[-2]
        self.slices = [slice(i, j) for i, j in itertools.pairwise([0, *stops]) if j > i]

    @functools.cached_property
    def ids(self) -> torch.Tensor:
        return self._ids() if callable(self._ids) else self._ids

    def walk(
        self, total: _WeightSum | None = None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yields (chunk, its x, its ids, its logits); the first chunk's by two blocks of columns where `total` lends
        memory for the first of them."""
        if not self.slices:
            return
        vocab, borrowed = self.weight.shape[0], self.borrowed
        first, others = self.slices[0], self.slices[1:]
        longest = max((chunk.stop - chunk.start for chunk in (others if borrowed else self.slices)), default=0)
        size = longest * self._stride(vocab)
        if borrowed:
            size = max(size, first.stop * self._stride(vocab - borrowed))
        buffer = torch.empty(size, dtype=self.dtype, device=self.x.device)
        for chunk in self.slices:
            x = self.x[chunk] if self.rows is None else self.x.index_select(0, self.rows[chunk])
            x = x.to(self.dtype)
            blocks = [(buffer, slice(0, vocab))]
            if borrowed and chunk is first:
                assert total is not None
                blocks = [(total.room(borrowed, self.dtype), slice(0, borrowed)), (buffer, slice(borrowed, vocab))]
            logits = []
            for memory, columns in blocks:
                weight, bias = self.weight[columns], None if self.bias is None else self.bias[columns]
                width = weight.shape[0]
                stride = self._stride(width)
                out = memory[: x.shape[0] * stride].view(x.shape[0], stride)[:, :width]
                logits.append(_project(x, weight, bias, out))
            yield chunk, x, self.ids[chunk], tuple(logits)

    def _stride(self, width: int) -> int:
        """A row stride that is a multiple of 16 bytes keeps the matrix unit's and the kernels' accesses aligned for a
        vocabulary that divides nothing."""
        per_16_bytes = 16 // self.dtype.itemsize
        return -(-width // per_16_bytes) * per_16_bytes


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------


def _coefficients(d: Sequence[torch.Tensor | None], like: torch.Tensor, uniform: float | None) -> _Coefficients:
    """From gradients of log_prob, lse, entropy and mean to the four numbers per row (u = `uniform` where constant)."""
    d_log_prob, d_lse, d_entropy, d_mean = (None if t is None else t.float() for t in d)
    b = torch.zeros_like(like) if d_log_prob is None else d_log_prob.contiguous()
    a = -b if d_lse is None else d_lse - b
    c = d_mean if d_mean is None or uniform is None else d_mean * uniform
    return _Coefficients(a, b, None if c is None else c.contiguous(), None if d_entropy is None else -d_entropy)


def _objective_gradient(
    objective: Objective, statistics: HeadStatistics, chunk: slice, backend: str
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The objective of a chunk and its gradient with respect to log_prob, lse, entropy and mean."""
    if isinstance(objective, LogProbObjective) and objective.gradient is not None:
        value, d_log_prob = objective.gradient(statistics.log_prob, chunk, backend)
        return value, (d_log_prob, None, None, None)
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in statistics[:4]]
        value = objective(HeadStatistics._make([*leaves, *statistics[4:]]), chunk)
    given = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(value, given, allow_unused=True))
    return value.detach(), tuple(None if t is None else next(found) for t in leaves)


@dataclass
class _Plan:
    """What forward has formed for backward.

    Attributes:
        gradients: of x, weight and bias, for the rows' gradients below.
        d_rows: gradients of log_prob, lse, entropy and mean that they were formed from.
        row_by_row: mode `frozen`: each row may still be scaled by a number of its own.
    """

    gradients: _Gradients
    d_rows: tuple[torch.Tensor | None, ...]
    row_by_row: bool


class _Head(torch.autograd.Function):
    """(x, weight, bias) -> (objective, *statistics). Everything differentiable comes back to backward as gradients of
    these outputs; see the modes in the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids, rows: Rows,
                class_weights: torch.Tensor | None, call: _Call) -> tuple[Any, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        needs = tuple(ctx.needs_input_grad[:3])
        objective, frozen = call.objective, needs == (True, False, False) and call.objective is None
        forms = any(needs) and (objective is not None or frozen)
        tile = None
        fused = forms and _fuses(objective, bias, call.dtype, call.options, call.backend)
        if fused and call.backend != "vendor":
            tile = tiling.fused_tile(weight.shape[0], call.dtype.itemsize, device.spec(x.device))
            fused = tile is not None
        borrow = tile is not None and needs[1] and not call.low_memory
        rows = rows() if callable(rows) else rows
        chunks = _Chunks(x, weight, bias, ids, rows, call, call.chunk_rows, forms and needs[1], borrow)
        uniform = 1.0 / weight.shape[0] if class_weights is None else None
        total: torch.Tensor | None = None
        collected: list[HeadStatistics] = []
        softmaxes: list[_Softmax] = []
        d_rows: list[tuple[torch.Tensor | None, ...]] = []
        grads = _Gradients.empty(x, weight, bias, chunks, needs, call.low_memory) if forms else None
        for chunk, x_chunk, ids_chunk, blocks in chunks.walk(None if grads is None else grads.total):
            logits, second = blocks[0], blocks[1] if len(blocks) > 1 else None
            if fused and objective is not None and grads is not None:
                known = objective.factor[chunk] if isinstance(objective, LinearObjective) else None
                ones = torch.ones(ids_chunk.shape, dtype=torch.float32, device=x.device) if known is None else known
                statistics, softmax = _statistics_and_gradient(
                    logits, second, ids_chunk, ones, call.options, tile, call.backend
                )
                collected.append(statistics)
                softmaxes.append(softmax)
                late = None
                if known is None:
                    value, (late, *_) = _objective_gradient(objective, statistics, chunk, call.backend)
                    total = _add(total, value)
                d_rows.append((late if known is None else known, None, None, None))
                grads.add(blocks, x_chunk, chunks.weight, chunk, rows, needs[1], late)
                continue
            statistics, softmax = _statistics(logits, ids_chunk, class_weights, call.options, call.backend)
            collected.append(statistics)
            softmaxes.append(softmax)
            d: tuple[torch.Tensor | None, ...] = (torch.ones_like(statistics.lse), None, None, None)
            if objective is not None and forms:
                value, d = _objective_gradient(objective, statistics, chunk, call.backend)
                total = _add(total, value)
            elif objective is not None:
                total = _add(total, objective(statistics, chunk))
            if grads is not None:
                d_rows.append(d)
                k = _coefficients(d, statistics.lse, uniform)
                _gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend)
                grads.add(blocks, x_chunk, chunks.weight, chunk, rows, needs[1])
        merged = HeadStatistics._make(_concatenated(collected, _empty_statistics(call.options, x.device)))
        if fused and isinstance(objective, LinearObjective):
            total = objective(merged, slice(None))
        if objective is not None and total is None:
            total = torch.zeros((), dtype=torch.float32, device=x.device)
        # Backward needs no objective, and what it has closed over may be large.
        ctx.call, ctx.plan, ctx.weight_shape = replace(call, objective=None), None, weight.shape
        if grads is not None:
            ctx.plan = _Plan(grads.cast(weight, bias), _concatenated(d_rows, (None,) * 4), frozen)
        ctx.save_for_backward(x, weight, bias, chunks.ids, rows, class_weights, *_concatenated(softmaxes, (None,) * 3))
        ctx.mark_non_differentiable(*(t for t in merged[4:] if t is not None))
        return (total, *merged)

    @staticmethod
    def backward(ctx: Any, d_total: torch.Tensor | None, *d_statistics: torch.Tensor | None) -> tuple[Any, ...]:
        d_rows = [None if d is None else d.float() for d in d_statistics[:4]]
        # Autograd may keep what is returned as `.grad`, so the plan is handed over, not kept for a second backward.
        plan, ctx.plan = ctx.plan, None
        grads = None
        if plan is not None:
            # What a second backward of the objective will need.
            ctx.d_planned = plan.d_rows
            grads = _from_plan(ctx, plan, d_total, d_rows)
        if grads is None:
            if d_total is not None:
                d_rows = [
                    _add(u, None if v is None else v * d_total) for u, v in zip(d_rows, ctx.d_planned, strict=True)
                ]
            grads = _recomputed(ctx, d_rows)
        return (grads.x, grads.weight, grads.bias, *(None,) * 4)


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


# A row's gradient is the plan's when they differ by less than this part of the largest gradient: fp32 rounding of two
# ways to write the same formula. What is waived so is as small as the rounding of an fp32 sum.
_PLAN_TOLERANCE = 1e-5


def _from_plan(
    ctx: Any, plan: _Plan, d_total: torch.Tensor | None, d_rows: list[torch.Tensor | None]
) -> _Gradients | None:
    """The gradients by the plan, or None where it is no help."""
    grads = plan.gradients
    if all(d is None for d in d_rows):
        return None if d_total is None else grads.scaled(d_total, ctx.call.backend)
    if d_total is not None:
        return None
    if ctx.saved_tensors[3].shape[0] == 0:
        return grads
    if plan.row_by_row:
        if d_rows[0] is None or any(d is not None for d in d_rows[1:]):
            return None
        rows = ctx.saved_tensors[4]
        factor = d_rows[0]
        if rows is not None and grads.x is not None:
            factor = factor.new_zeros(grads.x.shape[0]).index_copy_(0, rows, factor)
        return grads.scaled(factor.unsqueeze(-1), ctx.call.backend)
    scale, wrong = _compare(plan.d_rows, d_rows)
    if wrong.numel():
        share = wrong.numel() / ctx.saved_tensors[3].shape[0]
        if ctx.call.on_mismatch is not None:
            ctx.call.on_mismatch(share)
        if share > 0.5:
            return None
    grads = grads.scaled(scale, ctx.call.backend)
    if wrong.numel():
        rest = [_subtract(d, None if p is None else p * scale) for d, p in zip(d_rows, plan.d_rows, strict=True)]
        grads = grads.plus(_recomputed(ctx, rest, wrong))
    return grads


def _compare(
    planned: Sequence[torch.Tensor | None], real: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar that takes the plan's row gradients to the real ones, and the rows where it does not. Waits for the
    device: whether anything is left to do is a decision of the host."""
    pairs = [(p, r) for p, r in zip(planned, real, strict=True) if p is not None or r is not None]
    p = torch.stack([torch.zeros_like(r) if p is None else p for p, r in pairs])  # type: ignore[arg-type]
    r = torch.stack([torch.zeros_like(p) if r is None else r for p, r in pairs])  # type: ignore[arg-type]
    # The scalar is read off the largest planned gradient; should that row be one of the wrong ones, the others will
    # look wrong, and everything is formed again: slower, still right.
    top = p.abs().argmax()
    p_top, r_top = p.flatten()[top], r.flatten()[top]
    scale = torch.where(p_top == 0, torch.ones_like(p_top), r_top / p_top)
    limit = _PLAN_TOLERANCE * (scale * p).abs().amax()
    # Not `>`: a NaN must not pass for a match.
    return scale, torch.nonzero(~((r - scale * p).abs() <= limit).all(0)).squeeze(1)


def _empty_statistics(options: HeadOptions, where: torch.device) -> HeadStatistics:
    def empty(wanted: bool) -> Any:
        return torch.empty(0, device=where) if wanted else None

    fields = [empty(wanted) for wanted in (True, True, options.entropy, options.mean, options.log_sum_sq)]
    return HeadStatistics._make([*fields, torch.empty(0, dtype=torch.int64, device=where) if options.argmax else None])


def _concatenated(
    chunks: Sequence[tuple[torch.Tensor | None, ...]], empty: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The chunks' tensors, field by field, as one; `empty` where there is no chunk."""
    if len(chunks) < 2:
        return chunks[0] if chunks else empty
    return tuple(None if field[0] is None else torch.cat(field) for field in zip(*chunks, strict=True))


def _recomputed(ctx: Any, d_rows: Sequence[torch.Tensor | None], select: torch.Tensor | None = None) -> _Gradients:
    """Gradients from the real upstream gradients: the logits are formed once more, chunk by chunk; of all rows, or of
    those that `select` names."""
    x, weight, bias, ids, rows, class_weights, *softmax_fields = ctx.saved_tensors
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
    uniform = 1.0 / weight.shape[0] if class_weights is None else None
    chunks = _Chunks(x, weight, bias, ids, rows, call, chunk_rows, needs[1])
    grads = _Gradients.empty(x, weight, bias, chunks, needs, call.low_memory)
    for chunk, x_chunk, ids_chunk, (logits,) in chunks.walk():
        softmax = _Softmax(*(None if t is None else t[chunk] for t in softmax_fields))  # type: ignore[arg-type]
        k = _coefficients([None if t is None else t[chunk] for t in d_rows], softmax.row_max, uniform)
        _gradient_in_place(logits, ids_chunk, class_weights, softmax, k, call.options, call.backend)
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

    Returns:
        The objective summed over chunks (None without one) and the `[n]` statistics, all differentiable as the
        module's docstring says.
    """
    dtype = compute_dtype(x)
    # The products run in this dtype and everything else in fp32: autocast has no further say.
    with contextlib.nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False):
        call = _Call(options, objective, backend, chunk_rows, dtype, on_mismatch, low_memory)
        total, *statistics = _Head.apply(x, weight, bias, ids, rows, class_weights, call)
    return total, HeadStatistics(*statistics)


class _LogitsStatistics(torch.autograd.Function):
    """Statistics of logits that exist already."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, unused: torch.Tensor | None, options: HeadOptions,
                backend: str) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        statistics, softmax = _statistics(logits, ids, None, options, backend)
        ctx.save_for_backward(logits, ids, unused, *softmax)
        ctx.options, ctx.backend = options, backend
        ctx.mark_non_differentiable(*(t for t in statistics[4:] if t is not None))
        return tuple(statistics)

    @staticmethod
    def backward(ctx: Any, *d_statistics: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, ids, unused, *softmax_fields = ctx.saved_tensors
        softmax = _Softmax._make(softmax_fields)
        k = _coefficients(d_statistics[:4], softmax.row_max, 1.0 / logits.shape[1])
        grads = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        _gradient_of_logits(logits, grads, ids, None, softmax, k, ctx.options, ctx.backend)
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
