"""Gated MLPs: `down_proj(silu(gate_proj(x)) * up_proj(x))`.

A candidate has those three children. Whether it computes that, and with SiLU, is found by running its forward with the
three projections replaced by constants, and comparing what reaches `down_proj` bit for bit.

Where `down_proj` is a bare linear layer its product is part of the op (`swiglu_linear`), which keeps one tensor less
for backward. That is asked at every call: hooks, adapters and sharding may come after the patch; then the layer is
called as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.swiglu import swiglu, swiglu_linear, swiglu_reference
from ._classes import has_hooks, original_class, subclass_with_forward
from ._undo import Undo

__all__ = ["is_bare_linear", "is_gated_mlp", "patched_mlp_class", "recognise_mlp"]

_CHILDREN = ("gate_proj", "up_proj", "down_proj")


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module has the three projections of a gated MLP as its own children."""
    return all(name in module._modules for name in _CHILDREN)


def recognise_mlp(module: Any) -> str | None:
    """None when `swiglu` is what a candidate computes, else why it is left alone."""
    generator = torch.Generator("cpu").manual_seed(0)
    # Drawn in fp32, whatever the process's default dtype is, so that the numbers are always these.
    gate, up = (torch.randn(2, 8, generator=generator, dtype=torch.float32, device="cpu").bfloat16() for _ in range(2))
    undo = Undo()
    try:
        for name in _CHILDREN:
            undo.silence(getattr(module, name))
        undo.set_attribute(module.gate_proj, "forward", lambda x: gate)
        undo.set_attribute(module.up_proj, "forward", lambda x: up)
        undo.set_attribute(module.down_proj, "forward", lambda x: x)
        with torch.no_grad():
            out = original_class(module).forward(module, torch.zeros(2, 8, dtype=torch.bfloat16, device="cpu"))
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"its forward cannot be probed ({type(error).__name__})"
    finally:
        undo.restore()
    if not isinstance(out, torch.Tensor) or not torch.equal(out, swiglu_reference(gate, up)):
        return "it does not compute down_proj(silu(gate_proj(x)) * up_proj(x))"
    return None


def is_bare_linear(module: nn.Module) -> bool:
    """Whether calling a module is `functional.linear` of its parameters and nothing else: no subclass (adapters,
    quantisation, FSDP units, parametrisations), no hooks, no forward of its own, no tensor subclass as its weight but
    the fake one, which stands for the parameter that it was made of."""
    return (
        type(module) is nn.Linear
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and all(type(p) in (nn.Parameter, FakeTensor) for p in (module.weight, module.bias) if p is not None)
    )


@functools.cache
def _forward(backend: str | None) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if not is_bare_linear(down):
            return down(swiglu(gate, up, backend=backend))
        # What bare linear layers return nobody else has seen.
        ours = is_bare_linear(self.gate_proj) and is_bare_linear(self.up_proj)
        return swiglu_linear(gate, up, down.weight, down.bias, overwrite=ours, backend=backend)

    return forward


def patched_mlp_class(module: nn.Module, backend: str | None) -> type[nn.Module]:
    """The class to give to a recognised module."""
    cls: Any = original_class(module)
    return subclass_with_forward(cls, _forward(backend))
