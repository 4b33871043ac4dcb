"""A head whose vocabulary is sharded over ranks: each rank has some rows of the weight, and all have the same tokens.

A rank computes the logits of its slice of the vocabulary. For each row they give it (m, s, d, u, q): the maximum and
the sums of exp(z - m), exp(z - m) (z - m), u z and exp(z - m)^2, and z of the id if the id is in its slice. Slices
merge as blocks of columns do, with M the greatest m:

    s = sum s_r f_r            f_r = exp(m_r - M)
    d = sum (d_r + s_r (m_r - M)) f_r
    q = sum q_r f_r^2          u = sum u_r         z_id = sum z_id_r, which is 0 where the id is another rank's

One all-gather for each chunk of rows exchanges these numbers, and every rank merges them in the same order, so that all
ranks have the same bits. After that the ranks exchange nothing more for the chunk: the gradient of a slice of logits
needs only the merged numbers of the row, the gradient of a slice of the weight stays on its rank, and backward sums the
ranks' parts of the gradient of x once, at its end (`total`).

All ranks must call the same collectives equally often. So chunks depend on numbers that all ranks have (`widest`), and
events on one rank (a plan that does not match, a kernel that fails) change no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard

__all__ = ["RowSums", "VocabSlice", "own_part", "unshared"]

# The lower bound of the maximum in the kernels.
_NEGATIVE = -1e30


class RowSums(NamedTuple):
    """The sums over some columns for each row, `[n]` and fp32 each; None for those that were not requested.

    Attributes:
        row_max, s, d, u, q: m, s, d, u and q of the module's docstring.
        best: the column of the maximum (of any dtype); after merging, its id.
        z_id: z of the id; 0 if its column is not among these columns.
    """

    row_max: torch.Tensor
    s: torch.Tensor
    d: torch.Tensor | None
    u: torch.Tensor | None
    q: torch.Tensor | None
    best: torch.Tensor | None
    z_id: torch.Tensor


@dataclass(frozen=True)
class VocabSlice:
    """This rank's slice of a sharded vocabulary.

    Attributes:
        group: the process group of the ranks.
        start, width: the first id of the slice, and its number of ids.
        vocab: the size of the whole vocabulary.
        widest: the largest number of ids of a rank.
    """

    group: distributed.ProcessGroup
    start: int
    width: int
    vocab: int
    widest: int

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each id's column in this slice and the mask of ids in it; ids of other slices have column 0."""
        column = ids.long() - self.start
        mine = (column >= 0) & (column < self.width)
        return column.masked_fill(~mine, 0), mine

    def of_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this slice of `[vocab]` numbers, as a copy whose memory is aligned for the kernels."""
        return values[self.start : self.start + self.width].clone()

    def merged(self, own: RowSums) -> RowSums:
        """Merges the sums of this slice with those of all other slices. It does not exchange fields that are None."""
        if own.best is not None:
            own = own._replace(best=own.best.nan_to_num(0.0, 0.0, 0.0).float() + self.start)
        given = torch.stack([t for t in own if t is not None])
        every = given.new_empty(self.group.size(), *given.shape)
        distributed.all_gather(list(every.unbind()), given, group=self.group)
        found = iter(every.unbind(1))
        m, s, d, u, q, best, z_id = (next(found) if t is not None else given[:0] for t in own)
        # If all logits of a slice are -inf, its sums are invalid, and the slice adds nothing.
        dead = m == -torch.inf
        m = m.clamp(min=_NEGATIVE)
        row_max = m.amax(0)
        fall = m - row_max
        f = fall.exp()
        s = s.masked_fill(dead, 0.0)
        return RowSums(
            row_max,
            (s * f).sum(0),
            None if own.d is None else ((d.masked_fill(dead, 0.0) + s * fall) * f).sum(0),
            None if own.u is None else u.sum(0),
            None if own.q is None else (q.masked_fill(dead, 0.0) * f * f).sum(0),
            # The first of equal maxima, as in torch.argmax.
            None if own.best is None else best.masked_fill(m < row_max, torch.inf).amin(0),
            z_id.sum(0),
        )

    def total(self, parts: torch.Tensor) -> torch.Tensor:
        """Sums the ranks' parts of the gradient of x, or of a divergence, in place if they are contiguous."""
        parts = parts.contiguous()
        distributed.all_reduce(parts, group=self.group)
        return parts


def unshared(weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Returns why a weight `[V, H]` that is a DTensor, and its bias, are not sharded by rows as the head requires, or
    None. All ranks get the same answer."""
    if not isinstance(weight, DTensor):
        return "weight is no DTensor"
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
        return (
            f"weight is placed {placements} on a mesh of shape {tuple(mesh.shape)}; [Shard(0)] on one dimension is it"
        )
    if -(-weight.shape[0] // mesh.size()) * (mesh.size() - 1) >= weight.shape[0]:
        return f"some of {mesh.size()} ranks have none of the weight's {weight.shape[0]} rows"
    if bias is None or (isinstance(bias, DTensor) and (bias.device_mesh, bias.placements) == (mesh, placements)):
        return None
    return "bias is not placed as weight is"


def own_part(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabSlice | None]:
    """Returns the weight and bias of a head as plain tensors. If they are sharded over ranks, these are this rank's
    rows, and the third result is the slice.

    Raises:
        ValueError: DTensors with another placement.
    """
    if not isinstance(weight, DTensor):
        if isinstance(bias, DTensor):
            raise ValueError("bias must be a plain tensor where weight is one; got a DTensor")
        return weight, bias, None
    reason = unshared(weight, bias)
    if reason is not None:
        raise ValueError(f"a weight that is a DTensor must be sharded by rows over all ranks that have x: {reason}")
    mesh, vocab = weight.device_mesh, weight.shape[0]
    local, local_bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else None
    widest = -(-vocab // mesh.size())
    part = VocabSlice(mesh.get_group(), widest * mesh.get_local_rank(), local.shape[0], vocab, widest)
    return local, local_bias, part
