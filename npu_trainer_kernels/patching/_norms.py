"""RMSNorm modules: found by what they compute, not by what they are called.

A module is a candidate when it has no submodules and at most one parameter, a vector named `weight`. Its forward is run
on a few random rows, with random weights, in fp32 and bf16 on the CPU, and compared bit for bit with every form of
`rms_norm_reference`. The form that equals it in both dtypes is what the module computes; where none does, it is left
alone.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import backends
from ..ops._norm import CASTINGS
from ..ops.rms_norm import rms_norm, rms_norm_reference
from ._classes import original_class, subclass_with_forward

__all__ = ["NormForm", "full_shape", "is_candidate", "keeps_own_code", "patched_norm_class", "recognise_norm"]

_ROWS = 4
# Where a module has no weight, its width does not matter.
_WIDTH_WITHOUT_WEIGHT = 64


@dataclass(frozen=True)
class NormForm:
    """What an RMSNorm module computes: the arguments of `ops.rms_norm`."""

    eps: float
    offset: float
    casting: str
    weighted: bool

    def __str__(self) -> str:
        return f"casting={self.casting}, offset={self.offset:g}, eps={self.eps:g}" + (
            "" if self.weighted else ", no weight"
        )


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the shape of an RMSNorm: a leaf with one vector `weight`, or with nothing but an epsilon."""
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return False
    parameters = dict(module.named_parameters())
    if parameters:
        return list(parameters) == ["weight"] and len(full_shape(parameters["weight"])) == 1
    return "norm" in original_class(module).__name__.lower() and bool(_epsilons(module))


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """DeepSpeed's ZeRO-3 leaves an empty tensor in a parameter's place, and notes its shape."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _epsilons(module: nn.Module) -> list[float]:
    """Every small positive float among the module's attributes: one of them is its epsilon."""
    found = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-1}
    # torch.nn.RMSNorm(eps=None) takes the input dtype's machine epsilon: not one number, so not a form of ours.
    return sorted(found)


def _probe(module: nn.Module, dtype: torch.dtype, weight: torch.Tensor | None) -> nn.Module:
    """The module with another weight, on the CPU, as a copy: works for meta and sharded modules too."""
    twin = copy.copy(module)
    twin.__class__ = original_class(module)
    parameters = {} if weight is None else {"weight": nn.Parameter(weight.to(dtype), requires_grad=False)}
    twin.__dict__ = {**module.__dict__, "_parameters": parameters, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    twin.__dict__.pop("forward", None)
    return twin


def recognise_norm(module: nn.Module) -> NormForm | str:
    """What a candidate computes, or why it is left alone."""
    parameter = dict(module.named_parameters()).get("weight")
    width = _WIDTH_WITHOUT_WEIGHT if parameter is None else full_shape(parameter)[0]
    generator = torch.Generator().manual_seed(0)
    # Small enough that epsilon counts, and a weight far from 0 and 1 so that offsets show.
    x = 0.01 * torch.randn(_ROWS, width, generator=generator)
    weight = None if parameter is None else torch.rand(width, generator=generator) + 0.25
    forms = [
        NormForm(eps, offset, casting, parameter is not None)
        for eps, offset, casting in itertools.product(
            _epsilons(module), (0.0, 1.0) if parameter is not None else (0.0,), CASTINGS
        )
    ]
    for dtype in (torch.float32, torch.bfloat16):
        inputs, w = x.to(dtype), None if weight is None else weight.to(dtype)
        try:
            with torch.no_grad():
                expected = _probe(module, dtype, weight)(inputs)
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError) as error:
            return f"its forward does not take one tensor ({type(error).__name__})"
        if not isinstance(expected, torch.Tensor):
            return "its forward does not return one tensor"
        forms = [
            f
            for f in forms
            if torch.equal(expected, rms_norm_reference(inputs, w, f.eps, offset=f.offset, casting=f.casting))
        ]
    if not forms:
        return "it does not compute an RMSNorm that rms_norm knows"
    return forms[0]


def keeps_own_code(op: str, x: torch.Tensor, backend: str | None) -> bool:
    """Whether a patched module had better run its own code for this call: without gradients the torch backend saves
    nothing, and generation calls every norm once a token."""
    return not torch.is_grad_enabled() and backends.choose(op, x.device, backend) == "torch"


@functools.cache
def _forward(cls: Any, form: NormForm, backend: str | None) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if keeps_own_code("rms_norm", hidden_states, backend):
            return cls.forward(self, hidden_states)
        weight = self.weight if form.weighted else None
        return rms_norm(hidden_states, weight, form.eps, offset=form.offset, casting=form.casting, backend=backend)

    return forward


def patched_norm_class(module: Any, form: NormForm, backend: str | None) -> type[nn.Module]:
    """The class to give to a recognised module."""
    cls: Any = original_class(module)
    return subclass_with_forward(cls, _forward(cls, form, backend))
