"""Parameters that move: graphs read them in buffers, into which they are copied before a replay.

FSDP2 gathers the parameters of a layer before its forward and before its backward, each time into other memory. Layers
whose parameters have the same shapes share one set of buffers, so these take the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["WeightSlots"]


class WeightSlots:
    """Buffers for the parameters of layers that are alike.

    Attributes:
        buffers: one for each parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.buffers = [torch.empty_like(p, requires_grad=False) for p in parameters]
        self._owner: object = None

    @staticmethod
    def key(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
        """Returns a key that is equal for the parameters of layers that may share buffers."""
        return tuple((p.shape, p.stride(), p.dtype, p.device) for p in parameters)

    @torch.no_grad()
    def load(self, owner: object, parameters: Sequence[nn.Parameter], again: bool) -> None:
        """Copies the parameters of a layer into the buffers.

        Args:
            owner: the layer.
            parameters: its parameters, where they are now.
            again: whether they have not changed since this layer loaded them last, as in the backward of that forward.
        """
        if not (again and self._owner is owner):
            torch._foreach_copy_(self.buffers, list(parameters))
            self._owner = owner
