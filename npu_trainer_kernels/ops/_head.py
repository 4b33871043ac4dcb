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
            products in all), and backward only scales it.
recompute   gradients arrive for the statistics: backward repeats the logits (four products).
no grad     one product.

Memory beyond inputs and gradients: one chunk of logits, an fp32 weight gradient while several chunks accumulate, and
`[N]` statistics; independent of the vocabulary times N. Accumulation and statistics are fp32 whatever the dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import device, tiling
from .._opaque import opaque
from .._triton import jit, tl
from ._launch import launch

__all__ = ["HeadOptions", "HeadStatistics", "Objective", "head_statistics", "head_statistics_reference", "transform"]

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
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a positive finite number; got {self.temperature!r}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be None or a positive finite number; got {self.softcap!r}")
        if not math.isfinite(self.logit_scale):
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
    shift: torch.Tensor | None  # lse - entropy: log p + entropy = z - shift


# From a chunk's statistics, and which rows these are, to a scalar whose gradient is wanted.
Objective = Callable[[HeadStatistics, slice], torch.Tensor]


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
    logits = torch.nn.functional.linear(x, weight, bias)
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
def _transformed(x, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr):
    """z(l) in fp32. tanh(y) = 2 sigmoid(2 y) - 1: the one form that every backend compiles well."""
    z = x.to(tl.float32)
    if HAS_CAP:
        z = outer * (2.0 * tl.sigmoid(2.0 * inner * z) - 1.0)
    elif not IS_IDENTITY:
        z = inner * z
    return z


@jit
def _row_statistics_kernel(
    logits,  # [n_rows, n_cols], row stride given, any float dtype
    class_weights,  # [n_cols] fp32, read where HAS_WEIGHTS
    out,  # [6, n_rows] fp32: max, sum e, sum e z, sum u z, sum e^2, argmax (e = exp(z - max))
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
        xs = tl.zeros([WIDTH], tl.float32)
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
            e = tl.exp(z - m_new[None, :])
            s = s * rescale + tl.sum(e, axis=0)
            if HAS_ENTROPY:
                xs = xs * rescale + tl.sum(e * z, axis=0)
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
            e = tl.where(mask, tl.exp(z - m_new), 0.0)
            s = s * rescale + e
            if HAS_ENTROPY:
                xs = xs * rescale + e * z
            if HAS_SQUARES:
                sq = sq * rescale * rescale + e * e
            m = m_new
        row_max = tl.max(m, axis=0)
        rescale = tl.exp(m - row_max)
        tl.store(out + row, row_max)
        tl.store(out + n_rows + row, tl.sum(s * rescale, axis=0))
        if HAS_ENTROPY:
            tl.store(out + 2 * n_rows + row, tl.sum(xs * rescale, axis=0))
        if HAS_MEAN:
            tl.store(out + 3 * n_rows + row, tl.sum(us, axis=0))
        if HAS_SQUARES:
            tl.store(out + 4 * n_rows + row, tl.sum(sq * rescale * rescale, axis=0))
        if HAS_ARGMAX:
            tl.store(out + 5 * n_rows + row, tl.min(tl.where(m == row_max, best, n_cols), axis=0).to(tl.float32))


@jit
def _row_gradient_kernel(
    logits,  # [n_rows, n_cols], overwritten with dL/dl
    ids,  # [n_rows] int32
    class_weights,  # [n_cols] fp32, read where HAS_WEIGHTS
    row_max,  # [n_rows] fp32, as are shift = lse - entropy and the coefficients
    shift,
    a,  # a / s and e / s with s = sum_j exp(z_j - row_max), so that exp(z - row_max) need not be normalised
    b,
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
        start_of_row = logits + tl.cast(row, tl.int64) * row_stride
        row_id = tl.load(ids + row)
        z_max = tl.load(row_max + row)
        row_a = tl.load(a + row)
        row_b = tl.load(b + row)
        row_c = tl.load(c + row) if HAS_MEAN else 0.0
        row_e = tl.load(e + row) if HAS_ENTROPY else 0.0
        row_shift = tl.load(shift + row) if HAS_ENTROPY else 0.0
        for start in range(0, n_full, BLOCK):
            x = tl.load(start_of_row + start + lane)
            u = tl.load(class_weights + start + lane) if HAS_WEIGHTS else 1.0
            g = _logit_gradient(x, u, start + lane == row_id, z_max, row_a, row_b, row_c, row_e, row_shift, inner,
                                outer, HAS_CAP, IS_IDENTITY, HAS_MEAN, HAS_ENTROPY)  # fmt: skip
            tl.store(start_of_row + start + lane, g.to(logits.dtype.element_ty))
        for start in range(n_full, n_cols, BLOCK):
            mask = start + lane < n_cols
            x = tl.load(start_of_row + start + lane, mask=mask, other=0.0)
            u = tl.load(class_weights + start + lane, mask=mask, other=0.0) if HAS_WEIGHTS else 1.0
            g = _logit_gradient(x, u, start + lane == row_id, z_max, row_a, row_b, row_c, row_e, row_shift, inner,
                                outer, HAS_CAP, IS_IDENTITY, HAS_MEAN, HAS_ENTROPY)  # fmt: skip
            tl.store(start_of_row + start + lane, g.to(logits.dtype.element_ty), mask=mask)


@jit
def _logit_gradient(x, u, is_id, z_max, a, b, c, e, shift, inner, outer, HAS_CAP: tl.constexpr,
                    IS_IDENTITY: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_ENTROPY: tl.constexpr):  # fmt: skip
    """dL/dl of one block, the formula of the module's docstring."""
    x = x.to(tl.float32)
    if HAS_CAP:
        t = 2.0 * tl.sigmoid(2.0 * inner * x) - 1.0
        z = outer * t
    elif IS_IDENTITY:
        z = x
    else:
        z = inner * x
    g = tl.exp(z - z_max) * (a + e * (z - shift) if HAS_ENTROPY else a)
    g += tl.where(is_id, b, 0.0)
    if HAS_MEAN:
        g += c * u
    if HAS_CAP:
        g = g * (outer * inner) * (1.0 - t * t)
    elif not IS_IDENTITY:
        g = g * inner
    return g


# ---------------------------------------------------------------------------------------------------------------------
# The two steps, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def _kernel_flags(options: HeadOptions) -> dict[str, Any]:
    inner, _ = options.factors
    return {"HAS_CAP": options.softcap is not None, "IS_IDENTITY": options.softcap is None and inner == 1.0}


def _raw_statistics_triton(
    logits: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions
) -> tuple[torch.Tensor, ...]:
    n_rows, n_cols = logits.shape
    out = torch.empty(6, n_rows, dtype=torch.float32, device=logits.device)
    n_sums = 2 + options.entropy + options.mean + options.log_sum_sq + options.argmax
    tile = tiling.statistics_tile(n_rows, n_cols, n_sums, device.spec(logits.device))
    step = tile.fold * tile.width
    inner, outer = options.factors
    launch(
        _row_statistics_kernel, (tile.programs,),
        logits, out if class_weights is None else class_weights, out,
        n_rows, n_cols, n_cols // step * step, logits.stride(0), inner, outer,
        **_kernel_flags(options),
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
    e = (z - row_max.unsqueeze(-1)).exp_()
    none = row_max
    return (
        row_max,
        e.sum(-1),
        torch.linalg.vecdot(e, z) if options.entropy else none,
        (z.sum(-1) if class_weights is None else z @ class_weights) if options.mean else none,
        torch.linalg.vecdot(e, e) if options.log_sum_sq else none,
        z.argmax(-1) if options.argmax else none,
    )


def _statistics(
    logits: torch.Tensor, ids: torch.Tensor, class_weights: torch.Tensor | None, options: HeadOptions, backend: str
) -> tuple[HeadStatistics, _Softmax]:
    """Statistics of one chunk of logits, which stay as they are."""
    raw = _raw_statistics_torch if backend == "torch" else _raw_statistics_triton
    row_max, s, xs, us, sq, best = raw(logits, class_weights, options)
    log_s = s.log()
    lse = row_max + log_s
    z_id = transform(logits.gather(1, ids.long().unsqueeze(1)).squeeze(1).float(), options)
    entropy = lse - xs / s if options.entropy else None
    statistics = HeadStatistics(
        # Not z_id - lse: the difference to the maximum is exact where the id is likely.
        log_prob=(z_id - row_max) - log_s,
        lse=lse,
        entropy=entropy,
        mean=(us / logits.shape[1] if class_weights is None else us) if options.mean else None,
        log_sum_sq=sq.log() - 2 * log_s if options.log_sum_sq else None,
        argmax=best.long() if options.argmax else None,
    )
    return statistics, _Softmax(row_max, 1.0 / s, None if entropy is None else lse - entropy)


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
    if backend == "torch":
        logits.copy_(_gradient_torch(logits, ids, class_weights, softmax, k, options))
        return
    n_rows, n_cols = logits.shape
    tile = tiling.gradient_tile(n_rows, n_cols, device.spec(logits.device))
    inner, outer = options.factors
    unused = k.a
    launch(
        _row_gradient_kernel, (tile.programs,),
        logits, ids.int(), unused if class_weights is None else class_weights,
        softmax.row_max, unused if softmax.shift is None else softmax.shift,
        k.a * softmax.inverse_s, k.b, unused if k.c is None else k.c,
        unused if k.e is None else k.e * softmax.inverse_s,
        n_rows, n_cols, n_cols // tile.block * tile.block, logits.stride(0), inner, outer,
        **_kernel_flags(options),
        HAS_MEAN=k.c is not None, HAS_WEIGHTS=k.c is not None and class_weights is not None,
        HAS_ENTROPY=k.e is not None, BLOCK=tile.block, **tile.options,
    )  # fmt: skip


def _gradient_torch(
    logits: torch.Tensor,
    ids: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: _Softmax,
    k: _Coefficients,
    options: HeadOptions,
) -> torch.Tensor:
    """dL/dl of a chunk; may overwrite fp32 logits, because the caller does so next."""
    inner, outer = options.factors
    z = logits.float()  # fp32 logits themselves: what follows works in place on them
    t = None
    if options.softcap is not None:
        t = torch.tanh(inner * z)
        z = outer * t
    elif inner != 1.0:
        z = z.mul_(inner)
    row_max, a = softmax.row_max.unsqueeze(-1), (k.a * softmax.inverse_s).unsqueeze(-1)
    if k.e is None or softmax.shift is None:
        g = z.sub_(row_max).exp_().mul_(a)
    else:
        e = (k.e * softmax.inverse_s).unsqueeze(-1)
        g = torch.exp(z - row_max).mul_(z.sub_(softmax.shift.unsqueeze(-1)).mul_(e).add_(a))
    g.scatter_add_(1, ids.long().unsqueeze(1), k.b.unsqueeze(1))
    if k.c is not None:
        # u = 1/V is folded into c by the caller.
        g.add_(k.c.unsqueeze(-1) if class_weights is None else torch.outer(k.c, class_weights))
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
    """`total += a @ b` without rounding `a @ b` to the inputs' dtype first. `total` is fp32.

    Rounding every chunk's product would bias a long accumulation although each product's own error looks harmless.
    """
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif device.has_fp32_output_product(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


@dataclass
class _Gradients:
    """Gradients of x, weight and bias as they are formed chunk by chunk."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def empty(cls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor | None,
              needs: tuple[bool, ...], n_chunks: int) -> _Gradients:  # fmt: skip
        dx = None
        if needs[0]:
            # Rows that were left out have gradient zero.
            dx = torch.zeros_like(x) if rows is not None else torch.empty_like(x)
        # One chunk: the product is the gradient. Several: they add up in fp32.
        dw = None
        if needs[1] and n_chunks != 1:
            dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        db = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None and needs[2] else None
        return cls(dx, dw, db)

    def add(self, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, chunk: slice, rows: torch.Tensor | None,
            needs_weight: bool) -> None:  # fmt: skip
        if self.x is not None:
            if rows is None:
                torch.mm(g, weight, out=self.x[chunk]) if self.x.dtype == g.dtype else self.x[chunk].copy_(g @ weight)
            else:
                self.x.index_copy_(0, rows[chunk], (g @ weight).to(self.x.dtype))
        if needs_weight:
            if self.weight is None:
                self.weight = g.t() @ x
            else:
                _accumulate(self.weight, g.t(), x)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=torch.float32)

    def cast(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Gradients:
        dw = None if self.weight is None else self.weight.to(weight.dtype)
        db = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return _Gradients(self.x, dw, db)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Chunks:
    """Walks over the rows in chunks of logits: yields (chunk, its x, its ids, its logits); the buffer is reused."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor,
                 rows: torch.Tensor | None, dtype: torch.dtype, chunk_rows: int | None) -> None:  # fmt: skip
        self.x, self.ids, self.rows, self.dtype = x, ids, rows, dtype
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.n = ids.shape[0]
        spec = device.spec(x.device)
        self.size = chunk_rows or tiling.head_chunk(self.n, weight.shape[0], dtype.itemsize, spec)
        self.count = -(-self.n // self.size) if self.n else 0

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        if not self.n:
            return
        # A row stride that is a multiple of 16 bytes keeps the matrix unit's and the kernels' accesses aligned for a
        # vocabulary that divides nothing.
        vocab, per_16_bytes = self.weight.shape[0], 16 // self.dtype.itemsize
        stride = -(-vocab // per_16_bytes) * per_16_bytes
        buffer = torch.empty(self.size, stride, dtype=self.dtype, device=self.x.device)[:, :vocab]
        for start in range(0, self.n, self.size):
            chunk = slice(start, min(start + self.size, self.n))
            x = self.x[chunk] if self.rows is None else self.x.index_select(0, self.rows[chunk])
            x = x.to(self.dtype)
            yield chunk, x, self.ids[chunk], _project(x, self.weight, self.bias, buffer[: chunk.stop - start])


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
    objective: Objective, statistics: HeadStatistics, chunk: slice
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The objective of a chunk and its gradient with respect to log_prob, lse, entropy and mean."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in statistics[:4]]
        value = objective(HeadStatistics._make([*leaves, *statistics[4:]]), chunk)
    given = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(value, given, allow_unused=True))
    return value.detach(), tuple(None if t is None else next(found) for t in leaves)


class _Head(torch.autograd.Function):
    """(x, weight, bias) -> (objective, *statistics). Everything differentiable comes back to backward as gradients of
    these outputs; gradients of the objective are a scalar times what forward has formed already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor,
                rows: torch.Tensor | None, class_weights: torch.Tensor | None, options: HeadOptions,
                objective: Objective | None, backend: str, chunk_rows: int | None,
                dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        chunks = _Chunks(x, weight, bias, ids, rows, dtype, chunk_rows)
        needs = tuple(ctx.needs_input_grad[:3])
        planned = objective is not None and any(needs)
        uniform = 1.0 / weight.shape[0] if class_weights is None else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        collected: list[HeadStatistics] = []
        softmaxes: list[_Softmax] = []
        grads = _Gradients.empty(x, weight, bias, rows, needs, chunks.count) if planned else None
        for chunk, x_chunk, ids_chunk, logits in chunks:
            statistics, softmax = _statistics(logits, ids_chunk, class_weights, options, backend)
            collected.append(statistics)
            softmaxes.append(softmax)
            if objective is not None and grads is None:
                total += objective(statistics, chunk)
            elif objective is not None and grads is not None:
                value, d = _objective_gradient(objective, statistics, chunk)
                total += value
                k = _coefficients(d, statistics.lse, uniform)
                _gradient_in_place(logits, ids_chunk, class_weights, softmax, k, options, backend)
                grads.add(logits, x_chunk, chunks.weight, chunk, rows, needs[1])
        merged = HeadStatistics._make(_concatenated(collected, _empty_statistics(options, x.device)))
        ctx.planned = None if grads is None else grads.cast(weight, bias)
        ctx.save_for_backward(x, weight, bias, ids, rows, class_weights, *_concatenated(softmaxes, (None,) * 3))
        ctx.options, ctx.objective = options, objective
        ctx.backend, ctx.chunk_rows, ctx.dtype = backend, chunk_rows, dtype
        ctx.mark_non_differentiable(*(t for t in merged[4:] if t is not None))
        return (None if objective is None else total, *merged)

    @staticmethod
    def backward(ctx: Any, d_total: torch.Tensor | None, *d_statistics: torch.Tensor | None) -> tuple[Any, ...]:
        d_rows = d_statistics[:4]
        nothing = (None,) * 8
        if d_total is not None and all(d is None for d in d_rows) and ctx.planned is not None:
            # Autograd may keep what is returned as `.grad`, so it is handed over, not kept for a second backward.
            planned, ctx.planned = ctx.planned, None
            for t in (planned.x, planned.weight, planned.bias):
                if t is not None:
                    t.mul_(d_total)
            return planned.x, planned.weight, planned.bias, *nothing
        return *_recomputed_gradients(ctx, d_total, d_rows), *nothing


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


def _recomputed_gradients(
    ctx: Any, d_total: torch.Tensor | None, d_rows: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients from the real upstream gradients: the logits are formed once more, chunk by chunk."""
    x, weight, bias, ids, rows, class_weights, row_max, inverse_s, shift = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[:3])
    options = ctx.options
    uniform = 1.0 / weight.shape[0] if class_weights is None else None
    chunks = _Chunks(x, weight, bias, ids, rows, ctx.dtype, ctx.chunk_rows)
    grads = _Gradients.empty(x, weight, bias, rows, needs, chunks.count)
    for chunk, x_chunk, ids_chunk, logits in chunks:
        d = [None if t is None else t[chunk] for t in d_rows]
        softmax = _Softmax(row_max[chunk], inverse_s[chunk], None if shift is None else shift[chunk])
        if d_total is not None and ctx.objective is not None:
            # A second backward, or an objective used beside the statistics.
            statistics, _ = _statistics(logits, ids_chunk, class_weights, options, ctx.backend)
            _, extra = _objective_gradient(ctx.objective, statistics, chunk)
            d = [_add(u, None if v is None else v * d_total) for u, v in zip(d, extra, strict=True)]
        k = _coefficients(d, softmax.row_max, uniform)
        _gradient_in_place(logits, ids_chunk, class_weights, softmax, k, options, ctx.backend)
        grads.add(logits, x_chunk, chunks.weight, chunk, rows, needs[1])
    grads = grads.cast(weight, bias)
    return grads.x, grads.weight, grads.bias


def _add(u: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor | None:
    return v if u is None else u if v is None else u + v


@opaque
def head_statistics(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    options: HeadOptions,
    *,
    rows: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    objective: Objective | None = None,
    backend: str,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor | None, HeadStatistics]:
    """Statistics of the head for chosen rows, and the sum of an objective over chunks of them. Opaque to
    `torch.compile` (it would have to trace a host loop of unknown length).

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`.
        ids: `[n]` ids in `[0, V)`; n = N, or the length of `rows`.
        bias: `[V]` or None.
        options: transform and statistics.
        rows: `[n]` int64, distinct rows of x to project; None: all of them. The others cost nothing.
        class_weights: `[V]` fp32, the u of `mean`.
        objective: what forward should form the gradients of (mode `planned`).
        backend: `"torch"`, or any other for the kernels.
        chunk_rows: rows of logits alive at once; None: as `tiling.head_chunk` says.

    Returns:
        The objective summed over chunks (None without one) and the `[n]` statistics, all differentiable as the
        module's docstring says. A backward from the objective alone uses the gradients formed in forward; any other
        repeats the logits.
    """
    dtype = _compute_dtype(x)
    # The products run in this dtype and everything else in fp32: autocast has no further say.
    with torch.autocast(x.device.type, enabled=False):
        total, *statistics = _Head.apply(
            x, weight, bias, ids, rows, class_weights, options, objective, backend, chunk_rows, dtype
        )
    return total, HeadStatistics(*statistics)
