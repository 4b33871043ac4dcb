"""A tiny body without attention that is captured and replayed, for tests of what its code does."""

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from npu_trainer_kernels.patching.bodies import BodyCapture
from npu_trainer_kernels.patching.body import Batch, BodyForward
from npu_trainer_kernels.patching.undo import Undo

__all__ = ["Body", "Replayed", "ids_of", "own_output"]

_IDS = 32


class Body(nn.Module):
    """Embeds ids, and calls its layers in an order."""

    _npu_kernels_packs_by = None  # what prepares a body for packed rows sets it

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(_IDS, 4)
        self.layers = nn.ModuleList(layers)
        self.order = list(range(len(layers)))
        self.config = types.SimpleNamespace(_attn_implementation="sdpa")

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool = False
    ) -> tuple[torch.Tensor]:
        hidden = self.embed(input_ids)
        for i in self.order:
            hidden = self.layers[i](hidden)
        return (hidden,)


def ids_of(rows: int = 8) -> torch.Tensor:
    """Returns rows of ids that fill a bucket: 8 tokens each, 64 of 8 rows."""
    return torch.randint(0, _IDS, (rows, 8))


def _batch(ids: torch.Tensor) -> Batch:
    return Batch.full({"input_ids": ids, "use_cache": False})


def own_output(body: Body, ids: torch.Tensor) -> torch.Tensor:
    """Returns what a body's own code computes of a packed row."""
    out, _ = _batch(ids).through(type(body), body, "", None, None)
    found: torch.Tensor = out[0]
    return found


class Replayed:
    """A body whose calls are replayed.

    Attributes:
        body: the body.
        made: what captures it.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.made = BodyCapture(Undo(), list, lambda: False)
        self.made.install(body)

    @classmethod
    def of_layer(cls, layer: nn.Module) -> "Replayed":
        return cls(Body([layer]))

    @property
    def replayed(self) -> int:
        return self.made.replayed

    @property
    def reasons(self) -> Any:
        return self.made.reasons

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        kind: Any = type(self.body)
        forward = BodyForward(kind, self.body, "", None, None, carries=False, mixes=False)
        out = self.made.call(_batch(ids), forward)
        return own_output(self.body, ids) if out is None else out[0]
