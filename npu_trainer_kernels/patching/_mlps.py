"""Gated MLPs: `down_proj(silu(gate_proj(x)) * up_proj(x))`.

A candidate has those three children. Whether it computes that, and with SiLU, is found by running its forward with the
three projections replaced by constants, and comparing what reaches `down_proj` bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..ops.swiglu import swiglu, swiglu_reference
from ._classes import original_class, subclass_with_forward
from ._undo import Undo

__all__ = ["is_gated_mlp", "patched_mlp_class", "recognise_mlp"]

_CHILDREN = ("gate_proj", "up_proj", "down_proj")


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module has the three projections of a gated MLP as its own children."""
    return all(name in module._modules for name in _CHILDREN)


def recognise_mlp(module: Any) -> str | None:
    """None when `swiglu` is what a candidate computes, else why it is left alone."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 8, generator=generator).bfloat16() for _ in range(2))
    undo = Undo()
    try:
        undo.set_attribute(module.gate_proj, "forward", lambda x: gate)
        undo.set_attribute(module.up_proj, "forward", lambda x: up)
        undo.set_attribute(module.down_proj, "forward", lambda x: x)
        with torch.no_grad():
            out = original_class(module).forward(module, torch.zeros(2, 8, dtype=torch.bfloat16))
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"its forward cannot be probed ({type(error).__name__})"
    finally:
        undo.restore()
    if not isinstance(out, torch.Tensor) or not torch.equal(out, swiglu_reference(gate, up)):
        return "it does not compute down_proj(silu(gate_proj(x)) * up_proj(x))"
    return None


@functools.cache
def _forward(backend: str | None) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), backend=backend))

    return forward


def patched_mlp_class(module: nn.Module, backend: str | None) -> type[nn.Module]:
    """The class to give to a recognised module."""
    cls: Any = original_class(module)
    return subclass_with_forward(cls, _forward(backend))
