"""The divergence between the softmaxes of two chunks of logits, a student's and a teacher's, and its gradient with
respect to the student's logits: a kernel that overwrites the student's chunk, and the same in torch.

Maths
-----
For one row let p be the student's softmax and q the teacher's, of transformed logits z (`ops/head/engine.py`), both
over the same V ids, and m = beta q + (1 - beta) p their mixture. With

    Q = sum_j q_j (log q_j - log m_j)        P = sum_j p_j (log p_j - log m_j)

the divergence D and its gradient with respect to the student's z are

    beta = 0    D = Q with m = p, KL(q || p)      dD/dz_j = p_j - q_j
    beta = 1    D = P with m = q, KL(p || q)      dD/dz_j = p_j (log p_j - log q_j - P)
    between     D = beta Q + (1 - beta) P         dD/dz_j = (1 - beta) p_j (log p_j - log m_j - P)

The last line follows from g_j = dD/dp_j = (1 - beta) (log p_j - log m_j): the terms with dm_j/dp_j = 1 - beta sum to
(1 - beta) (1 - (beta q_j + (1 - beta) p_j) / m_j) = 0. And dD/dz_j = p_j (g_j - sum_k p_k g_k) for every softmax.

With u = log q - log p + log beta - log(1 - beta) and t = log(1 + exp(-|u|)),

    log m - log p = log(1 - beta) + max(u, 0) + t        log m - log q = log beta + max(-u, 0) + t

neither overflow nor underflow, and each is accurate where its own probability counts; log m - log q as the difference
of log m - log p and log q - log p would not be. P is a sum over the row, so a row whose beta is not 0 is read twice:
for P and D, and for the gradient. With beta = 0 it is read once for both.

A loss may also depend on the student's log-probabilities and entropies. Then, with a, b and e of `ops/head/engine.py`,
entropy H, and f = dL/dD,

    dL/dz_j = f dD/dz_j + a p_j + b [j = id] + e p_j (log p_j + H)

If ranks have slices of the vocabulary, Q and P are sums over the slices, too, and the gradient of a slice needs the
whole P: then the sums are computed and added up first, and the gradient after that (with beta = 0, which needs no P,
at once). Beside the statistics of the two softmaxes, ranks exchange these two numbers for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..launch import launch
from .chunks import Chunks
from .gradient import coefficients
from .head_options import HeadOptions, guarded, kernel_flags, slope, transform, transformed
from .statistics import HeadStatistics, Softmax, row_statistics
from .vocabulary_slices import VocabSlice

__all__ = ["Teacher", "divergence_and_gradient", "teacher_rows"]


@dataclass(frozen=True)
class Teacher:
    """The teacher of a head.

    Attributes:
        x: `[N, H']` hidden states, beside the student's.
        weight: `[V, H']`, with as many rows as the student's.
        bias: `[V]` or None.
        options: the transform of its logits, and whether its entropy is wanted.
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for the mixture.
        dtype: the dtype of its products.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    options: HeadOptions
    beta: float
    dtype: torch.dtype


class Mixture(NamedTuple):
    """The options of one call of the kernel."""

    options: HeadOptions
    teacher: HeadOptions
    beta: float

    @property
    def kind(self) -> int:
        """0 for m = p, 1 for m = q, 2 for the mixture."""
        return 0 if self.beta == 0 else 1 if self.beta == 1 else 2

    @property
    def logs(self) -> tuple[float, float]:
        """(log beta, log(1 - beta)); zeros where there is no mixture."""
        return (0.0, 0.0) if self.kind < 2 else (math.log(self.beta), math.log1p(-self.beta))


class Factors(NamedTuple):
    """The numbers per row of the gradient without its b term, `[n]` fp32 each: dL/dz_j = f dD/dz_j + a p_j + e p_j
    log p_j, where a includes e H. None for zeros."""

    f: torch.Tensor
    a: torch.Tensor | None
    e: torch.Tensor | None


def teacher_rows(teacher: Teacher, chunks: Chunks, backend: str) -> Iterator[torch.Tensor]:
    """Yields the teacher's logits of each chunk; all of them use one buffer."""
    stops = [chunk.stop for chunk in chunks.slices]
    beside = Chunks(teacher.x, teacher.weight, teacher.bias, lambda: chunks.ids, chunks.rows, teacher.dtype, backend,
                    stops, False)  # fmt: skip
    for _, _, _, (logits,) in beside.walk():
        yield logits


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _of_mixture(r, log_beta, log_rest):
    """Computes log m - log p and log m - log q from r = log q - log p."""
    u = r + (log_beta - log_rest)
    # On an NPU a maximum that drops NaN takes seven instructions and stalls the unit that issues them. w - u is
    # max(-u, 0), and u - 2 w is -|u|.
    w = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    t = tl.log(1.0 + tl.exp(u - 2.0 * w))
    return log_rest + (w + t), log_beta + ((w - u) + t)


@jit
def _summands(lp, lq, log_beta, log_rest, KIND: tl.constexpr):
    """Computes the columns' summands of Q (unless KIND is 1) and P (unless it is 0)."""
    r = lq - lp
    if KIND == 0:
        of_q = tl.exp(lq) * r
        of_p = of_q
    elif KIND == 1:
        of_p = -tl.exp(lp) * r
        of_q = of_p
    else:
        over_p, over_q = _of_mixture(r, log_beta, log_rest)
        of_q = -tl.exp(lq) * over_q
        of_p = -tl.exp(lp) * over_p
    return of_q, of_p


@jit
def _student_gradient(lp, lq, a, f, e, log_beta, log_rest, KIND: tl.constexpr, HAS_ENTROPY: tl.constexpr):
    """Computes dL/dz without the b term. f is the factor of log p - log m (KIND 0: of p - q), a that of p alone."""
    r = lq - lp
    if KIND == 0:
        inside = a + f
    elif KIND == 1:
        inside = a - f * r
    else:
        over_p, _ = _of_mixture(r, log_beta, log_rest)
        inside = a - f * over_p
    if HAS_ENTROPY:
        inside = inside + e * lp
    g = tl.exp(lp) * inside
    if KIND == 0:
        g = g - f * tl.exp(lq)
    return g


@jit(lengths=("n_rows",))
def _row_divergence_kernel(
    logits,  # [n_rows, n_cols], the student's
    # With HAS_GRADIENT the kernel overwrites the student's logits with dL/dl without its b term. `grads` is the same
    # memory as a second pointer: with one pointer an NPU's loads would wait for the preceding stores.
    grads,
    teacher,  # [n_rows, n_cols], the teacher's
    row_max,  # [n_rows] fp32; likewise all other pointers but `out`
    log_s,  # log sum_j exp(z_j - row_max)
    teacher_max,
    teacher_log_s,
    f,  # read if HAS_GRADIENT; likewise a, and e if HAS_ENTROPY
    a,
    e,
    out,  # [2, n_rows] fp32: Q and P, written if HAS_SUMS; P is read if not
    n_rows,
    n_cols,
    n_full,  # the columns of whole blocks
    row_stride,
    teacher_stride,
    inner,
    outer,
    teacher_inner,
    teacher_outer,
    to_student,  # the factor of P in D
    log_beta,
    log_rest,  # log(1 - beta)
    KIND: tl.constexpr,  # 0 m = p, 1 m = q, 2 the mixture
    HAS_CAP: tl.constexpr,
    IS_IDENTITY: tl.constexpr,
    TEACHER_HAS_CAP: tl.constexpr,
    TEACHER_IS_IDENTITY: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        # A chunk of logits can hold more than 2^31 elements.
        of_row = tl.cast(row, tl.int64) * row_stride
        of_teacher = tl.cast(row, tl.int64) * teacher_stride
        z_max = tl.load(row_max + row)
        z_log = tl.load(log_s + row)
        t_max = tl.load(teacher_max + row)
        t_log = tl.load(teacher_log_s + row)
        q_sum = tl.zeros([BLOCK], tl.float32)
        p_sum = tl.zeros([BLOCK], tl.float32)
        if HAS_SUMS and (KIND > 0 or not HAS_GRADIENT):
            for start in range(0, n_full, BLOCK):
                x = tl.load(logits + of_row + start + lane)
                t = tl.load(teacher + of_teacher + start + lane)
                lp = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY) - z_max - z_log
                lq = transformed(t, teacher_inner, teacher_outer, TEACHER_HAS_CAP, TEACHER_IS_IDENTITY) - t_max - t_log
                of_q, of_p = _summands(lp, lq, log_beta, log_rest, KIND)
                if KIND != 1:
                    q_sum += of_q
                if KIND != 0:
                    p_sum += of_p
            for start in range(n_full, n_cols, BLOCK):
                mask = start + lane < n_cols
                x = tl.load(logits + of_row + start + lane, mask=mask, other=0.0)
                t = tl.load(teacher + of_teacher + start + lane, mask=mask, other=0.0)
                lp = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY) - z_max - z_log
                lq = transformed(t, teacher_inner, teacher_outer, TEACHER_HAS_CAP, TEACHER_IS_IDENTITY) - t_max - t_log
                of_q, of_p = _summands(lp, lq, log_beta, log_rest, KIND)
                if KIND != 1:
                    q_sum += tl.where(mask, of_q, 0.0)
                if KIND != 0:
                    p_sum += tl.where(mask, of_p, 0.0)
        if HAS_GRADIENT:
            row_f = tl.load(f + row)
            row_a = tl.load(a + row)
            row_e = tl.load(e + row) if HAS_ENTROPY else 0.0
            if KIND > 0:
                row_f *= to_student
                p_row = tl.sum(p_sum, axis=0) if HAS_SUMS else tl.load(out + n_rows + row)
                row_a -= row_f * p_row
            if not HAS_CAP and not IS_IDENTITY:
                # dz/dl of the whole row.
                row_f *= inner
                row_a *= inner
                row_e *= inner
            for start in range(0, n_full, BLOCK):
                x = tl.load(logits + of_row + start + lane)
                t = tl.load(teacher + of_teacher + start + lane)
                z = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
                lp = z - z_max - z_log
                lq = transformed(t, teacher_inner, teacher_outer, TEACHER_HAS_CAP, TEACHER_IS_IDENTITY) - t_max - t_log
                g = _student_gradient(lp, lq, row_a, row_f, row_e, log_beta, log_rest, KIND, HAS_ENTROPY)
                if HAS_CAP:
                    g *= slope(z, inner, outer, HAS_CAP, IS_IDENTITY)
                tl.store(grads + of_row + start + lane, g.to(grads.dtype.element_ty))
                if HAS_SUMS and KIND == 0:
                    of_q, of_p = _summands(lp, lq, log_beta, log_rest, KIND)
                    q_sum += of_q
            for start in range(n_full, n_cols, BLOCK):
                mask = start + lane < n_cols
                x = tl.load(logits + of_row + start + lane, mask=mask, other=0.0)
                t = tl.load(teacher + of_teacher + start + lane, mask=mask, other=0.0)
                z = transformed(x, inner, outer, HAS_CAP, IS_IDENTITY)
                lp = z - z_max - z_log
                lq = transformed(t, teacher_inner, teacher_outer, TEACHER_HAS_CAP, TEACHER_IS_IDENTITY) - t_max - t_log
                g = _student_gradient(lp, lq, row_a, row_f, row_e, log_beta, log_rest, KIND, HAS_ENTROPY)
                if HAS_CAP:
                    g *= slope(z, inner, outer, HAS_CAP, IS_IDENTITY)
                tl.store(grads + of_row + start + lane, g.to(grads.dtype.element_ty), mask=mask)
                if HAS_SUMS and KIND == 0:
                    of_q, of_p = _summands(lp, lq, log_beta, log_rest, KIND)
                    q_sum += tl.where(mask, of_q, 0.0)
        if HAS_SUMS:
            tl.store(out + row, tl.sum(q_sum, axis=0))
            tl.store(out + n_rows + row, tl.sum(p_sum, axis=0))


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


@guarded
def _divergence_step(
    logits: torch.Tensor, teacher: torch.Tensor, softmax: Softmax, teacher_softmax: Softmax, p_sum: torch.Tensor | None,
    factors: Factors | None, mixture: Mixture, backend: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Computes Q and P of each row if `p_sum` is None, and overwrites the student's logits with dL/dl without the b
    term if `factors` is not None. `p_sum` is P if it is known; then the result is None."""
    if backend == "torch":
        return _divergence_torch(logits, teacher, softmax, teacher_softmax, p_sum, factors, mixture)
    n_rows, n_cols = logits.shape
    where = logits.device
    out = torch.empty(2, n_rows, dtype=torch.float32, device=where) if p_sum is None else torch.stack((p_sum, p_sum))
    widest = max(logits.element_size(), teacher.element_size())
    tile = tiling.divergence_tile(n_cols, widest, device.spec(where))
    log_s, teacher_log_s = (-s.inverse_s.log() for s in (softmax, teacher_softmax))
    unused = log_s
    f, a, e = (unused, unused, None) if factors is None else factors
    flags, teacher_flags = (kernel_flags(options, where) for options in (mixture.options, mixture.teacher))
    launch(
        _row_divergence_kernel, (min(n_rows, tile.programs),),
        (logits, logits, teacher, softmax.row_max, log_s, teacher_softmax.row_max, teacher_log_s, f,
         torch.zeros_like(f) if a is None else a, unused if e is None else e, out, n_rows, n_cols,
         n_cols // tile.block * tile.block, logits.stride(0), teacher.stride(0), *mixture.options.factors,
         *mixture.teacher.factors, 1.0 if mixture.kind < 2 else 1.0 - mixture.beta, *mixture.logs),
        {"KIND": mixture.kind, **flags, **{f"TEACHER_{name}": value for name, value in teacher_flags.items()},
         "HAS_SUMS": p_sum is None, "HAS_GRADIENT": factors is not None, "HAS_ENTROPY": e is not None,
         "BLOCK": tile.block, **tile.options},
    )  # fmt: skip
    return (out[0], out[1]) if p_sum is None else None


# The torch step makes about six fp32 copies of the logits, of this many rows at a time.
_ROWS_IN_TORCH = 128


def _divergence_torch(
    logits: torch.Tensor, teacher: torch.Tensor, softmax: Softmax, teacher_softmax: Softmax, p_sum: torch.Tensor | None,
    factors: Factors | None, mixture: Mixture,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Computes the kernel's outputs in torch, a few rows at a time."""
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, logits.shape[0], _ROWS_IN_TORCH):
        rows = slice(start, start + _ROWS_IN_TORCH)
        z = transform(logits[rows].float(), mixture.options)
        lp = _log_probabilities(z, softmax, rows)
        lq = _log_probabilities(transform(teacher[rows].float(), mixture.teacher), teacher_softmax, rows)
        p, q, r = lp.exp(), lq.exp(), lq - lp
        if p_sum is None:
            sums.append(_sums_torch(p, q, r, mixture))
        if factors is None:
            continue
        own = sums[-1][1] if p_sum is None else p_sum[rows]
        f, a, e = (None if t is None else t[rows] for t in factors)
        assert f is not None
        g = _gradient_torch(lp, p, q, r, own, Factors(f, a, e), mixture)
        logits[rows] = g.mul_(_slope_torch(z, mixture.options)).to(logits.dtype)
    if p_sum is not None:
        return None
    none = logits.new_empty(0, dtype=torch.float32)
    return (none, none) if not sums else tuple(torch.cat(each) for each in zip(*sums, strict=True))  # type: ignore[return-value]


def _log_probabilities(z: torch.Tensor, softmax: Softmax, rows: slice) -> torch.Tensor:
    return z - softmax.row_max[rows].unsqueeze(-1) + softmax.inverse_s[rows].log().unsqueeze(-1)


def _of_mixture_torch(r: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes log m - log p and log m - log q from r = log q - log p."""
    log_beta, log_rest = mixture.logs
    u = r + (log_beta - log_rest)
    t = torch.log1p(torch.exp(-u.abs()))
    return (u.clamp(min=0) + t).add_(log_rest), u.neg_().clamp_(min=0).add_(t).add_(log_beta)


def _sums_torch(
    p: torch.Tensor, q: torch.Tensor, r: torch.Tensor, mixture: Mixture
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes Q and P of rows."""
    zero = torch.zeros(r.shape[:1], dtype=r.dtype, device=r.device)
    if mixture.kind == 0:
        return torch.linalg.vecdot(q, r), zero
    if mixture.kind == 1:
        return zero, -torch.linalg.vecdot(p, r)
    over_p, over_q = _of_mixture_torch(r, mixture)
    return -torch.linalg.vecdot(q, over_q), -torch.linalg.vecdot(p, over_p)


def _gradient_torch(
    lp: torch.Tensor, p: torch.Tensor, q: torch.Tensor, r: torch.Tensor, p_sum: torch.Tensor, factors: Factors,
    mixture: Mixture,
) -> torch.Tensor:  # fmt: skip
    """Computes dL/dz of rows without the b term."""
    f, a, e = (None if t is None else t.unsqueeze(-1) for t in factors)
    assert f is not None
    if mixture.kind == 0:
        g = (p - q).mul_(f)
    elif mixture.kind == 1:
        g = (r + p_sum.unsqueeze(-1)).mul_(p).mul_(-f)
    else:
        g = _of_mixture_torch(r, mixture)[0].add_(p_sum.unsqueeze(-1)).mul_(p).mul_((mixture.beta - 1.0) * f)
    if a is not None:
        g.addcmul_(p, a)
    if e is not None:
        g.add_(p * lp * e)
    return g


def _slope_torch(z: torch.Tensor, options: HeadOptions) -> torch.Tensor | float:
    """Computes dz/dl at z."""
    inner, outer = options.factors
    if options.softcap is None:
        return inner
    t = z / outer
    return (outer * inner) * (1 - t * t)


def _factors(d: Sequence[torch.Tensor | None], softmax: Softmax) -> tuple[Factors, torch.Tensor | None]:
    """Computes the numbers per row of the gradient, and b (None for zeros), from the gradients of the differentiable
    statistics."""
    f = torch.zeros_like(softmax.row_max) if d[4] is None else d[4].float().contiguous()
    if all(t is None for t in d[:4]):
        return Factors(f, None, None), None
    k = coefficients(d, softmax.row_max, None)
    if k.e is None or softmax.shift is None:
        return Factors(f, k.a.contiguous(), None), k.b
    # log p + H = log p - log s - shift with log s = -log(inverse_s).
    entropy = -softmax.inverse_s.log() - softmax.shift
    return Factors(f, k.a + k.e * entropy, k.e.contiguous()), k.b


def divergence_and_gradient(
    logits: torch.Tensor, beside: torch.Tensor, ids: torch.Tensor, statistics: HeadStatistics | None, softmax: Softmax,
    teacher_softmax: Softmax | None, p_sum: torch.Tensor | None, d: Sequence[torch.Tensor | None] | None,
    options: HeadOptions, teacher: Teacher, backend: str, part: VocabSlice | None = None,
) -> tuple[HeadStatistics | None, Softmax, torch.Tensor]:  # fmt: skip
    """Computes the divergences of one chunk, or overwrites its logits with dL/dl, or both.

    Args:
        logits: the student's logits of the chunk.
        beside: the teacher's.
        ids: the ids of the log-probabilities.
        statistics: the student's; the result has the teacher's and the divergence added.
        softmax: the student's.
        teacher_softmax, p_sum: the teacher's softmax and P of each row, if an earlier call has returned them.
        d: the gradients of the differentiable statistics; None to leave the logits as they are.
        options: the transform of the student's logits.
        teacher: the teacher.
        backend: as for `head_statistics`.
        part: the slice of a sharded vocabulary that both chunks of logits cover. Then a call with `d` needs `p_sum`,
            unless beta is 0; and a call without `p_sum` is one that all ranks must make.

    Returns:
        The statistics, the teacher's softmax, and P.
    """
    mixture = Mixture(options, teacher.options, teacher.beta)
    if teacher_softmax is None:
        assert statistics is not None
        of_teacher, teacher_softmax = row_statistics(beside, ids, None, teacher.options, backend, part)
        statistics = statistics._replace(teacher_log_prob=of_teacher.log_prob, teacher_entropy=of_teacher.entropy)
    factors, b, at_id = None, None, None
    if d is not None:
        factors, b = _factors(d, softmax)
    own, mine = (ids.long(), None) if part is None else part.own(ids)
    column = own.unsqueeze(1)
    if b is not None:
        # The element of an id of another rank is one like any other of its row.
        b = b if mine is None else b.masked_fill(~mine, 0.0)
        # The b term changes one element of each row, which is computed apart, from `[n]` numbers.
        at_id = transform(logits.gather(1, column).float(), options)
        at_id_beside = transform(beside.gather(1, column).float(), teacher.options)
    found = _divergence_step(logits, beside, softmax, teacher_softmax, p_sum, factors, mixture, backend)
    if found is not None:
        q_sum, p_sum = found if part is None else part.total(torch.stack(found)).unbind()
        if statistics is not None:
            to_teacher, to_student = ((1.0, 0.0), (0.0, 1.0), (teacher.beta, 1.0 - teacher.beta))[mixture.kind]
            statistics = statistics._replace(divergence=to_teacher * q_sum + to_student * p_sum)
    assert p_sum is not None
    if at_id is not None and b is not None and factors is not None:
        every = slice(None)
        lp, lq = _log_probabilities(at_id, softmax, every), _log_probabilities(at_id_beside, teacher_softmax, every)
        g = _gradient_torch(lp, lp.exp(), lq.exp(), lq - lp, p_sum, factors, mixture).add_(b.unsqueeze(1))
        logits.scatter_(1, column, g.mul_(_slope_torch(at_id, options)).to(logits.dtype))
    return statistics, teacher_softmax, p_sum
