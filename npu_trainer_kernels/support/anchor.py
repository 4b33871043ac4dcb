"""A place in autograd's graph that costs no memory."""

from typing import Any

import torch

__all__ = ["Anchor"]


class Anchor(torch.autograd.Function):
    """A tensor without numbers that stands where its inputs do in the graph, and keeps none of their memory. It is no
    op: nothing is computed of it, and what stands on it raises before backward reaches it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        raise AssertionError("what stands on an anchor raises before it")
