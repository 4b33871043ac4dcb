"""The activations of gated MLPs that the op knows."""

from dataclasses import dataclass
from typing import Any

import torch

from ..ops.swiglu import swiglu_reference

__all__ = ["GATES", "Gate", "gated_reference"]


@dataclass(frozen=True)
class Gate:
    """An activation by the op's name."""

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """As the op takes it."""
        return {}

    def __str__(self) -> str:
        return self.name


GATES = (Gate("silu"),)


def gated_reference(gate: torch.Tensor, up: torch.Tensor, act: Gate) -> torch.Tensor:
    """`act(gate) * up` by the op's reference."""
    return swiglu_reference(gate, up, **act.options)
