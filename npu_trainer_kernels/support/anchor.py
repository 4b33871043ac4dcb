"""A node of autograd's graph that needs no memory."""

from typing import Any

import torch

__all__ = ["Anchor"]


class Anchor(torch.autograd.Function):
    """Returns an empty tensor that depends on its inputs in autograd's graph without holding their memory. It computes
    nothing, and the operations that depend on it raise before backward reaches it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        raise AssertionError("what stands on an anchor raises before it")
