"""A head whose vocabulary several ranks share out: each has some rows of the weight, and all have the same tokens.

A rank forms the logits of its own slice alone. What it knows of a row then is (m, s, d, u, q): the maximum, the sums of
exp(z - m), exp(z - m) (z - m), u z and exp(z - m)^2, and z of the id if that is its own. Slices merge as blocks of
columns do, with M the greatest m:

    s = sum s_r f_r            f_r = exp(m_r - M)
    d = sum (d_r + s_r (m_r - M)) f_r
    q = sum q_r f_r^2          u = sum u_r         z_id = sum z_id_r, which is 0 where the id is another rank's

One collective for each chunk of rows hands these few numbers around, and every rank merges them in the same order, so
that all have the same bits. From there on nothing is to be said: the gradient of a slice of logits needs the row's own
numbers and nothing of other slices, that of a slice of the weight is the rank's own, and the ranks' shares in that of x
are added up once, when backward has formed all of it (`total`).

What ranks do together they must do equally often. So chunks are cut by numbers that all ranks have (`widest`), and what
a rank finds out for itself (a plan that does not hold, a kernel that fails) changes no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard

__all__ = ["RowSums", "VocabSlice", "own_part", "unshared"]

# What the kernels have for a maximum where no logit is above it.
_NEGATIVE = -1e30


class RowSums(NamedTuple):
    """What columns say of rows, each `[n]` and fp32; None where it was not asked for.

    Attributes:
        row_max, s, d, u, q: m, s, d, u and q of the module's docstring.
        best: the column of the maximum (of any dtype); after merging the id.
        z_id: z of the id; 0 where its column is not among them.
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
    """Which part of a vocabulary is this rank's.

    Attributes:
        group: the ranks that share it out.
        start, width: the rank's first id, and how many it has.
        vocab: ids in all.
        widest: the most that a rank has.
    """

    group: distributed.ProcessGroup
    start: int
    width: int
    vocab: int
    widest: int

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of ids in this slice, and which ids these are; the others have column 0."""
        column = ids.long() - self.start
        mine = (column >= 0) & (column < self.width)
        return column.masked_fill(~mine, 0), mine

    def of_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Of `[vocab]` numbers those of this slice, in memory of their own: it begins where kernels like to read."""
        return values[self.start : self.start + self.width].clone()

    def merged(self, own: RowSums) -> RowSums:
        """From what this slice's columns say to what all columns do. What is None is not handed around."""
        if own.best is not None:
            own = own._replace(best=own.best.nan_to_num(0.0, 0.0, 0.0).float() + self.start)
        given = torch.stack([t for t in own if t is not None])
        every = given.new_empty(self.group.size(), *given.shape)
        distributed.all_gather(list(every.unbind()), given, group=self.group)
        found = iter(every.unbind(1))
        m, s, d, u, q, best, z_id = (next(found) if t is not None else given[:0] for t in own)
        # A slice whose logits are all -inf has no sums that could be read, and adds nothing.
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
            # The first of equals, as torch.argmax has it.
            None if own.best is None else best.masked_fill(m < row_max, torch.inf).amin(0),
            z_id.sum(0),
        )

    def total(self, d_x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' shares in the gradient of x, in place where that is without gaps."""
        d_x = d_x.contiguous()
        distributed.all_reduce(d_x, group=self.group)
        return d_x


def unshared(weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why a weight `[V, H]` that is a DTensor, and its bias, are none that ranks share out by rows, or None. All ranks
    are told the same."""
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
    """The parameters of a head as plain tensors, this rank's rows of them where ranks share it out, and which rows.

    Raises:
        ValueError: they are DTensors of another kind.
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
