"""The head's loop over chunks of logits, the sums of the gradients of x, weight and bias over the chunks, and the
memory that the matrix products write to.

All chunks use one buffer for their logits, and the gradient of the logits overwrites them. With several chunks the
weight's gradient is summed in fp32, half of it in the memory of the result. Before the first product writes to that
memory, some columns of the first chunk's logits may use it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..launch import launch
from .head_options import guarded
from .vocabulary_slices import VocabSlice

__all__ = ["Chunks", "Gradients", "Ids", "Rows"]

# `[n]` ids; a function is called after the first chunk's logits are launched, so that the device has work.
Ids = torch.Tensor | Callable[[], torch.Tensor]
# `[n]` distinct rows of x, None for all rows; a function is called right before the first product.
Rows = torch.Tensor | None | Callable[[], torch.Tensor | None]


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Computes x W^T + bias into `out`, a slice of the chunk buffer."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Computes `total += a @ b` without rounding `a @ b` first. `total` is fp32 or has the inputs' dtype.

    Rounding every chunk's product would bias a long accumulation, although the error of one product is small.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.dtype != torch.float32:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif device.has_fp32_output_product(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif device.spec(total.device).is_host:
        for part, factor in _host_blocks(total, a):
            part.add_(factor @ b) if _rounds_products(a) else part.addmm_(factor.float(), b.float())
    else:
        total.addmm_(a.float(), b.float())


def _begin(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Computes `total = a @ b` likewise. For the first product this saves writing and reading zeros."""
    if a.dtype not in (torch.float32, total.dtype) and device.has_fp32_output_product(total.device):
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    elif a.dtype not in (torch.float32, total.dtype) and device.spec(total.device).is_host:
        for part, factor in _host_blocks(total, a):
            part.copy_(factor @ b) if _rounds_products(a) else torch.mm(factor.float(), b.float(), out=part)
    else:
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total)


def _host_blocks(total: torch.Tensor, a: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields blocks of rows of an fp32 sum and of its first factor, so that a copy of a block is a few MiB."""
    return zip(total.split(4096), a.split(4096), strict=True)


def _rounds_products(a: torch.Tensor) -> bool:
    """Whether the host rounds the product of a chunk to bf16 before it adds the product to the fp32 sum.

    PyTorch has no product of bf16 factors with an fp32 result on the host, and a product of their fp32 copies takes
    longer where the processor multiplies bf16 numbers by itself. The roundings of a few chunks add to the one rounding
    of the result, and are of its size. fp16 would lose products below its range.
    """
    return a.dtype == torch.bfloat16 and device.host_multiplies_bf16()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


class _WeightSum:
    """The sum of the chunks' weight gradients: in fp32 with half of it in the memory of the result, or in the result.

    A result with two bytes per element has room for half of the fp32 sums, so only the other half needs new memory.
    Until the first product writes to it, all this memory is free: some columns of the first chunk's logits may use it
    (`room`), and so may the fp32 sum for its dx (`scratch`).
    """

    # The number of elements that `finish` copies before it rounds the sums in place.
    _FIRST = 1 << 20

    def __init__(self, weight: torch.Tensor, in_result: bool) -> None:
        """With `in_result` there are no fp32 sums: products are added to the result, with a rounding per chunk."""
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
        """Returns memory for `columns` columns of logits; `add` has read them when it writes there."""
        free = self.parts[-1] if len(self.parts) > 1 else self.result[columns:]
        return free.view(-1).view(dtype)

    def scratch(self, columns: int, shape: tuple[int, int]) -> torch.Tensor:
        """Returns an fp32 matrix in memory that `room(columns)` does not use, valid until the first `add`."""
        return self.parts[0][:columns].view(-1).view(torch.float32)[: shape[0] * shape[1]].view(shape)

    def add(self, g: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Adds g^T x. `g` is a list of consecutive blocks of columns."""
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
        """Returns the sum in the result's dtype. The caller must call it only once."""
        if not self.begun:
            return self.result.zero_()
        *inside, rest = self.parts
        if rest is self.result:
            return rest
        for sums in inside:
            # Round from the front, in pieces of doubling size: each overwrites only sums that are rounded already.
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
class Gradients:
    """The gradients of x, weight and bias, computed chunk by chunk. `total` is the running sum of weight's gradient."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    total: _WeightSum | None = None

    @classmethod
    def empty(cls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunks: Chunks,
              needs: tuple[bool, ...], low_memory: bool) -> Gradients:  # fmt: skip
        dx = None
        if needs[0]:
            dx = torch.empty_like(x) if chunks.slices else torch.zeros_like(x)
        # With one chunk the product is the gradient. With several chunks the products are summed in fp32.
        one = len(chunks.slices) == 1
        total = _WeightSum(weight, low_memory or one) if needs[1] and (chunks.borrowed or not one) else None
        db = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None and needs[2] else None
        return cls(dx, None, db, total)

    def add(self, g: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, chunk: slice,
            rows: torch.Tensor | None, needs_weight: bool, factor: torch.Tensor | None = None) -> None:  # fmt: skip
        """Adds a chunk's gradients, from dL/dl as a list of blocks of columns. With `factor`, each row of g must still
        be multiplied by its factor (and there is no bias)."""
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
            # This must be the last read of g, because it may overwrite g.
            if self.total is None:
                self.weight = g[0].t() @ x
            else:
                self.total.add(g, x)

    def _dx(self, g: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        """Computes g W; for several blocks in fp32."""
        if len(g) == 1:
            return g[0] @ weight
        assert self.total is not None
        columns = g[0].shape[1]
        dx = self.total.scratch(columns, (g[0].shape[0], weight.shape[1]))
        _begin(dx, g[0], weight[:columns])
        _accumulate(dx, g[1], weight[columns:])
        return dx

    def scaled(self, factor: torch.Tensor, backend: str) -> Gradients:
        """Multiplies all gradients by a scalar, or x's rows by one factor each, in place."""
        for t in (self.x, self.weight, self.bias):
            if t is not None:
                _scale(t, factor, backend)
        return self

    def plus(self, other: Gradients) -> Gradients:
        """Adds the gradients of other rows, in place."""
        for t, u in ((self.x, other.x), (self.weight, other.weight), (self.bias, other.bias)):
            if t is not None and u is not None:
                t.add_(u)
        return self

    def cast(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Gradients:
        dw = None if self.weight is None else self.weight.to(weight.dtype)
        dw = dw if self.total is None else self.total.finish()
        db = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return Gradients(self.x, dw, db)


@jit
def _scale_kernel(
    values,  # [n] of any float dtype, multiplied in place
    factor,  # one number
    n,
    BLOCK: tl.constexpr,
):
    f = tl.load(factor).to(tl.float32)
    # The usual factor is one; then the kernel reads and writes nothing.
    if f != 1.0:
        lane = tl.arange(0, BLOCK)
        for start in range(tl.cast(tl.program_id(0), tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            mask = start + lane < n
            value = tl.load(values + start + lane, mask=mask).to(tl.float32) * f
            tl.store(values + start + lane, value.to(values.dtype.element_ty), mask=mask)


@guarded
def _scale(t: torch.Tensor, factor: torch.Tensor, backend: str) -> None:
    """Computes `t *= factor`. A factor of one costs almost nothing, and the host does not wait for its value."""
    spec = device.spec(t.device)
    tile = None if backend == "torch" or factor.dim() or not t.is_contiguous() else tiling.scale_block(spec)
    if tile is None or not t.numel():
        t.mul_(factor)
    else:
        programs = tiling.accumulating_programs(-(-t.numel() // tile.size), spec, options=tile.options)
        launch(_scale_kernel, (programs,), (t, factor, t.numel()), {"BLOCK": tile.size, **tile.options})


# ---------------------------------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------------------------------


class Chunks:
    """The chunks of logits; all of them use one buffer."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: Ids,
                 rows: Rows, dtype: torch.dtype, backend: str, chunk_rows: int | Sequence[int] | None,
                 sums: bool, borrow: bool = False, part: VocabSlice | None = None,
                 beside: int = 0) -> None:  # fmt: skip
        """`dtype` is that of the products; `sums` says whether the weight's gradient is summed over the chunks. With
        `borrow` the first chunk may be longer, with some columns in the memory of that gradient. With `part` all ranks
        cut the same chunks, whichever backends they use. `beside` is the number of bytes per logit of another head
        whose chunks are in memory at the same time."""
        self.x, self.dtype = x, dtype
        self.rows = rows = rows() if callable(rows) else rows
        self._ids = ids
        in_place = backend not in ("torch", "vendor")
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
            widest, sums, in_place = (vocab, sums, in_place) if part is None else (part.widest, True, True)
            columns = hidden if sums else 0
            chunk_rows = tiling.head_chunk(
                n, widest, dtype.itemsize + beside, spec, columns, in_place, part is not None
            )
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
        """Yields (chunk, its x, its ids, its logits as blocks of columns). The first chunk has two blocks if `total`
        lends memory for the first of them."""
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
                rows = memory[: x.shape[0] * stride].view(x.shape[0], stride)
                if stride > width:
                    # On processors with AMX the bf16 products of oneDNN read to the end of a row and multiply that by
                    # zero, so these columns must not be NaN.
                    rows[:, width:].zero_()
                logits.append(_project(x, weight, bias, rows[:, :width]))
            yield chunk, x, self.ids[chunk], tuple(logits)

    def _stride(self, width: int) -> int:
        """Rounds the row stride up to a multiple of 16 bytes, so that accesses of the matrix unit and the kernels are
        aligned for any vocabulary size."""
        per_16_bytes = 16 // self.dtype.itemsize
        return -(-width // per_16_bytes) * per_16_bytes
