"""Exchanges rows of a GRPO batch between ranks: one collective describes each rank's batch, one more sends each tensor.

Ranks have padded their rows to different widths, so rows are sent at the largest width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from .balance import Completion

__all__ = ["Holding", "agreed", "exchanged", "holdings", "stays_here"]

# How TRL pads tensors with a number for each token (`_generate_and_score_completions`): prompts on the left,
# completions on the right. If rows of another rank are longer, more of the same padding follows. Values after a
# completion count in no sum, except importance ratios in vespo's, where only 1 adds nothing.
_LEFT = ("prompt_ids", "prompt_mask")
_RIGHT = {
    "completion_ids": None,
    "completion_mask": 0,
    "tool_mask": 1,
    "advantages": 0,
    "old_per_token_logps": 0,
    "ref_per_token_logps": 0,
    "sampling_per_token_logps": 0,
    "importance_sampling_ratio": 1,
}


@dataclass(frozen=True)
class Holding:
    """A description of a rank's batch for all ranks.

    Attributes:
        rows: the rows in the order of the batch.
        tensors: by name, the dtype and the shape of a row of each tensor with rows.
        lists: by name, the lists with an entry for each row.
        common: the names of values that all rows have in common.
    """

    rows: list[Completion]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    lists: dict[str, list[Any]]
    common: set[str]

    @classmethod
    def of(cls, batch: dict[str, Any], rows: list[Completion]) -> "Holding":
        """Describes a batch with these rows."""
        tensors = {n: v for n, v in batch.items() if isinstance(v, torch.Tensor) and v.dim()}
        lists = {n: v for n, v in batch.items() if isinstance(v, list)}
        common = batch.keys() - tensors.keys() - lists.keys()
        return cls(rows, {n: (v.dtype, tuple(v.shape[1:])) for n, v in tensors.items()}, lists, common)

    def kinds(self) -> Any:
        """Returns the properties that ranks must have in common to exchange rows."""
        tensors = {name: (dtype, len(shape)) for name, (dtype, shape) in self.tensors.items()}
        return len(self.rows), tensors, self.lists.keys(), self.common


def _everyones(mine: Any) -> list[Any]:
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, mine)
    return every


def agreed(reason: str | None) -> str | None:
    """Returns the first reason that any rank has, on all ranks: they would wait forever for one that takes no part."""
    return next((each for each in _everyones(reason) if each is not None), None)


def holdings(mine: Holding | None) -> list[Holding | None]:
    """Returns every rank's description; None for a rank whose batch stays as it is."""
    return _everyones(mine)


def stays_here(every: list[Holding]) -> str | None:
    """Returns why rows cannot go to other ranks, or None; all ranks return the same, from the same descriptions."""
    first = every[0]
    for holding in every[1:]:
        if holding.kinds() != first.kinds():
            return "what batches hold, or how many rows, differs from rank to rank"
    for name, (_, shape) in first.tensors.items():
        if len(shape) > 1 or (shape and name not in _LEFT and name not in _RIGHT):
            return f"how {name} of a batch is padded is not known"
    return None


def _padded(name: str, value: torch.Tensor, width: int, padding: int) -> torch.Tensor:
    missing = width - value.shape[1]
    if name in _LEFT:
        return functional.pad(value, (missing, 0), value=padding if name == "prompt_ids" else 0)
    known = _RIGHT[name]
    return functional.pad(value, (0, missing), value=padding if known is None else known)


def exchanged(
    batch: dict[str, Any], every: list[Holding], wanted: list[list[tuple[int, int]]], padding: int
) -> dict[str, Any]:
    """Returns this rank's batch after every rank has got the rows that it wants.

    Args:
        batch: this rank's batch before.
        every: the result of `holdings`.
        wanted: for each rank, the rank and the index there of each row that it gets, in order.
        padding: the id of the padding token.
    """
    here, ranks = distributed.get_rank(), len(every)
    going = [[place for rank, place in rows if rank == here] for rows in wanted]
    send = [len(places) for places in going]
    receive = [sum(rank == source for rank, _ in wanted[here]) for source in range(ranks)]
    # Rows arrive rank by rank, those of one rank in the order of `wanted`.
    arriving = sorted(range(len(wanted[here])), key=lambda i: wanted[here][i][0])
    order = sorted(range(len(arriving)), key=arriving.__getitem__)
    places = [place for rows in going for place in rows]
    result = dict(batch)
    for name in every[here].lists:
        result[name] = [every[rank].lists[name][place] for rank, place in wanted[here]]
    for name in sorted(every[here].tensors):
        value = batch[name]
        if value.dim() > 1:
            value = _padded(name, value, max(holding.tensors[name][1][0] for holding in every), padding)
        leaving = value[places]
        arrived = leaving.new_empty(len(arriving), *leaving.shape[1:])
        distributed.all_to_all_single(arrived, leaving, receive, send)
        result[name] = arrived[order]
    return result
