"""dL/dl of one chunk of logits, from four numbers per row: a kernel that overwrites the logits, the same in torch, and
the vendor's operator. `ops/head/engine.py` has the formula and the four numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import device, tiling, vendor
from ...support.triton import jit, libdevice, tl
from ..launch import launch
from .head_options import HeadOptions, guarded, kernel_flags, row_blocks, twice_sigmoid
from .statistics import Softmax
from .vocabulary_slices import VocabSlice

__all__ = ["Coefficients", "coefficients", "first_places", "gradient_in_place", "gradient_of_logits"]


class Coefficients(NamedTuple):
    """The four numbers per row of `ops/head/engine.py`; None means zeros. For k ids per row, b is `[n, k]`."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    e: torch.Tensor | None


def coefficients(d: Sequence[torch.Tensor | None], like: torch.Tensor, uniform: float | None) -> Coefficients:
    """Computes the four numbers per row from the gradients of log_prob, lse, entropy and mean. `uniform` is a constant
    u, which becomes a factor of c."""
    d_log_prob, d_lse, d_entropy, d_mean = (None if t is None else t.float() for t in d[:4])
    b = torch.zeros_like(like) if d_log_prob is None else d_log_prob.contiguous()
    sum_b = b if b.dim() == 1 else b.sum(-1)
    a = -sum_b if d_lse is None else d_lse - sum_b
    c = d_mean if d_mean is None or uniform is None else d_mean * uniform
    return Coefficients(a, b, None if c is None else c.contiguous(), None if d_entropy is None else -d_entropy)


# ---------------------------------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------------------------------


@jit(lengths=("n_rows",))
def _row_gradient_kernel(
    logits,  # [n_rows, n_cols]
    # The kernel overwrites the logits with dL/dl without its b term. `grads` is the same memory as a second pointer:
    # with one pointer an NPU's loads would wait for the preceding stores.
    grads,
    class_weights,  # [n_cols] fp32, read if HAS_WEIGHTS
    row_max,  # [n_rows] fp32; likewise shift, a, c and e
    shift,  # log s - entropy
    a,  # a / s with s = sum_j exp(z_j - row_max), so that exp(z - row_max) need not be normalised
    c,
    e,  # e / s
    n_rows,
    n_cols,
    n_full,  # the columns of whole blocks
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
def _logit_gradient(x, u, z_max, a, c, e, shift, inner, outer, HAS_CAP: tl.constexpr, IS_IDENTITY: tl.constexpr,
                    HAS_MEAN: tl.constexpr, HAS_ENTROPY: tl.constexpr):  # fmt: skip
    """Computes dL/dl of one block without the b term, by the formula of `ops/head/engine.py`. Factors that are constant
    in a row are multiplied as scalars, because on an NPU the number of vector instructions decides the time."""
    x = x.to(tl.float32)
    if HAS_CAP == 2:
        t = libdevice.tanh(inner * x)
        d = outer * t - z_max
        by, slope = outer * inner, 1.0 - t * t
    elif HAS_CAP:
        # 1 - t^2 = w (2 outer - w) / outer^2 with w = z + outer.
        w = twice_sigmoid(x, inner, outer)
        d = w - (z_max + outer)
        by, slope = -inner / outer, w * (w - 2.0 * outer)
    elif IS_IDENTITY:
        d = x - z_max
        by = 1.0
    else:
        d = inner * x - z_max
        by = inner
    a = a * by
    g = tl.exp(d) * (a + (e * by) * (d - shift) if HAS_ENTROPY else a)
    if HAS_MEAN:
        g += (c * by) * u
    if HAS_CAP:
        g *= slope
    return g


# ---------------------------------------------------------------------------------------------------------------------
# Step
# ---------------------------------------------------------------------------------------------------------------------


def first_places(ids: torch.Tensor) -> torch.Tensor:
    """Returns the place of the first equal id in its row, for each of the ids `[n, k]`."""
    ordered, order = ids.sort(dim=-1, stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = (torch.arange(ids.shape[1], device=ids.device) * begins).cummax(-1).values
    return torch.empty_like(order).scatter_(-1, order, order.gather(-1, start))


def _added_up(b: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Adds the b of equal columns of a row; each of them gets the sum, so that all write the same number."""
    first = first_places(columns)
    return torch.zeros_like(b).scatter_add_(-1, first, b).gather(-1, first)


def gradient_in_place(
    logits: torch.Tensor,
    ids: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: Softmax,
    k: Coefficients,
    options: HeadOptions,
    backend: str,
    part: VocabSlice | None = None,
) -> None:
    """Overwrites one chunk of logits with dL/dl."""
    gradient_of_logits(logits, logits, ids, class_weights, softmax, k, options, backend, part)


def gradient_of_logits(
    logits: torch.Tensor,
    grads: torch.Tensor,
    ids: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: Softmax,
    k: Coefficients,
    options: HeadOptions,
    backend: str,
    part: VocabSlice | None = None,
) -> None:
    """Writes dL/dl of a chunk of logits to `grads`, which may be the logits themselves. With `part` the logits are the
    columns of that slice; softmax and k still belong to whole rows.

    The b term changes one element of each row, or k for ids `[n, k]`. This function computes those from `[n]` numbers
    in fp32 and writes them: comparing every column with the id would cost the kernel as much as the rest of its
    arithmetic.
    """
    if backend == "vendor":
        # The vendor's operator covers losses of log_prob alone, which b determines.
        assert (k.c, k.e) == (None, None)
        grads.copy_(vendor.cross_entropy_gradient(vendor.cross_entropy(logits, ids)[1], ids, k.b))
        return
    column, b = ids.long(), k.b
    if part is not None:
        # Another rank adds the b term of an id in its slice; this rank rewrites column 0 without a b term.
        column, mine = part.own(ids)
        b = b.masked_fill(~mine, 0.0)
    column = column.view(len(column), -1)
    b = b.view(len(column), -1).expand_as(column)
    if column.shape[1] > 1:
        b = _added_up(b, column)
    u = None if class_weights is None else class_weights[column]
    at_id = logits.gather(1, column)
    at_id = _gradient_torch(at_id.float(), u, softmax, k, options, b).to(logits.dtype)
    _gradient_without_id(grads, logits, class_weights, softmax, k, options, backend)
    # On the host, scattering two-byte numbers copies all that it scatters into.
    blocks = row_blocks(grads)
    each = len(blocks[0])
    for block, its_columns, its_values in zip(blocks, column.split(each), at_id.split(each), strict=True):
        block.scatter_(1, its_columns, its_values)


@guarded
def _gradient_without_id(
    grads: torch.Tensor,
    logits: torch.Tensor,
    class_weights: torch.Tensor | None,
    softmax: Softmax,
    k: Coefficients,
    options: HeadOptions,
    backend: str,
) -> None:
    """Writes dL/dl without the b term to `grads`."""
    if backend == "torch":
        start = 0
        for of_logits, of_grads in zip(row_blocks(logits), row_blocks(grads), strict=True):
            z = of_logits.float()
            if z is of_logits and grads is not logits:
                z = of_grads.copy_(of_logits)
            stop = start + len(z)
            numbers = (None if t is None else t[start:stop] for t in (*softmax, *k))
            its = [*numbers]
            g = _gradient_torch(z, class_weights, Softmax(*its[:3]), Coefficients(*its[3:]), options)  # type: ignore
            if g is not of_grads:
                of_grads.copy_(g)
            start = stop
        return
    n_rows, n_cols = logits.shape
    has_weights = k.c is not None and class_weights is not None
    tile = tiling.gradient_tile(n_cols, logits.element_size(), has_weights, device.spec(logits.device))
    inner, outer = options.factors
    unused = k.a
    launch(
        _row_gradient_kernel, (min(n_rows, tile.programs),),
        (logits, grads, unused if class_weights is None else class_weights, softmax.row_max,
         unused if softmax.shift is None else softmax.shift, k.a * softmax.inverse_s, unused if k.c is None else k.c,
         unused if k.e is None else k.e * softmax.inverse_s, n_rows, n_cols, n_cols // tile.block * tile.block,
         logits.stride(0), inner, outer),
        {**kernel_flags(options, logits.device), "HAS_MEAN": k.c is not None, "HAS_WEIGHTS": has_weights,
         "HAS_ENTROPY": k.e is not None, "BLOCK": tile.block, **tile.options},
    )  # fmt: skip


def _gradient_torch(
    z: torch.Tensor,
    u: torch.Tensor | None,
    softmax: Softmax,
    k: Coefficients,
    options: HeadOptions,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes dL/dl of fp32 logits, which it may overwrite; adds the b term, in every column, if `b` is not None."""
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
        g.add_(b)
    if k.c is not None:
        # `coefficients` has multiplied c by a uniform u = 1/V.
        g.add_(k.c.unsqueeze(-1) if u is None else k.c.unsqueeze(-1) * u)
    if t is not None:
        g.mul_(outer * inner).mul_(1 - t * t)
    elif inner != 1.0:
        g.mul_(inner)
    return g
