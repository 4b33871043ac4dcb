"""The layers that `hub_kernels` registers with Hugging Face's package `kernels`, one for each name of `NAMES`.

`kernels` replaces the forward of a module by that of a layer, without asking what the module computes: classes of many
families share the name RMSNorm, and not all round at the same place. So a layer recognises its module as a patch does,
by a probe at its first call, checks each call as a patch does, and runs the forward of the module's class where the op
does not fit. A layer has no state of its own, since `kernels` allows none: what was recognised is kept here.

A module that `apply_npu_kernels` has patched as well is left to its patch.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import backends
from ..ops.checks import FLOATS
from ..ops.convolution import MOST_TAPS, causal_conv1d
from .bound_forwards import own_function
from .classes import original_class
from .modules import PATCHES, RopePatch, rope_form
from .patch import PLAIN, Patch, Scene, Site, guarded

__all__ = ["NAMES", "CausalConv1d", "GatedMlp", "RMSNorm", "RMSNormGated", "RotaryEmbedding", "layer_of", "site_of"]

_PATCHES: dict[str, Patch] = {patch.op: patch for patch in PATCHES}
_CONVOLUTION = "causal_conv1d"


class _Served:
    """What a layer has found out about a module: the site that serves it, or the reason why none does."""

    def __init__(self, found: Site | str, forward: Callable[..., Any]) -> None:
        self.found, self.forward = found, forward


_served: "weakref.WeakKeyDictionary[nn.Module, _Served]" = weakref.WeakKeyDictionary()


def _own(module: nn.Module) -> Callable[..., Any]:
    cls: Any = original_class(module)
    forward: Callable[..., Any] = cls.forward
    return forward


def _sees_one_token(at: int, x: Any) -> bool:
    """Whether a call generates one token of each row: the host limits that, and a launch of Triton's takes longer."""
    return not torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.dim() > at + 1 and x.shape[at] == 1


def _serve(op: str, at: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs an op in the place of a module's forward, or that forward. `at`: the dimension of tokens of `args[0]`."""
    cls: Any = type(module)
    if cls is not original_class(module):
        return cls.forward(module, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _own(module)(module, *args, **kwargs)
    served = _served.get(module)
    if served is None:
        served = _served[module] = _recognised(op, module, args[0])
    if isinstance(served.found, str) or (served.found.served != "vendor" and _sees_one_token(at, args[0])):
        return _own(module)(module, *args, **kwargs)
    return served.forward(module, *args, **kwargs)


def _recognised(op: str, module: nn.Module, x: torch.Tensor) -> _Served:
    return _functions[op](module, x) if op in _functions else _module(op, module, x)


def _module(op: str, module: nn.Module, x: torch.Tensor) -> _Served:
    patch, kind = _PATCHES[op], original_class(module)
    scene = Scene(module, (op,), x.device, x.dtype, None)
    form = patch.recognise(module, scene)
    if form is None or isinstance(form, str):
        return _Served(form or f"it does not compute what {op} does", _own(module))
    site = Site(op, kind, form, None)
    site.served, site.detail = patch.served_by(site, scene)[0], patch.detail(site)
    bind = functools.partial
    return _Served(site, guarded(site, bind(patch.declines, site), bind(patch.run, site), None, patch.tokens))


def _rotation(module: nn.Module, x: torch.Tensor) -> _Served:
    patch = next(patch for patch in PATCHES if isinstance(patch, RopePatch))
    function = own_function(module)
    form = None if function is None else rope_form(function)
    if form is None:
        return _Served("it is not a rotation that rope knows", _own(module))
    site = Site(patch.op, type(module), form, None, detail=str(form))
    site.served = backends.explain(patch.op, x.device, None)[0]

    def declines(module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        return patch.declines(site, form, *args, **kwargs)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return patch.run(site, form, *args, **kwargs)

    return _Served(site, guarded(site, declines, run, None, lambda module, *args, **kwargs: patch.tokens(*args)))


# Arguments of the compiled package causal_conv1d that the plain convolution of transformers does not know.
_OF_PACKAGE = ("seq_idx", "cu_seqlens", "initial_states", "final_states_out")
_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _convolution(module: nn.Module, x: torch.Tensor) -> _Served:
    site = Site(_CONVOLUTION, type(module), None, None)
    site.served = backends.explain(_CONVOLUTION, x.device, None)[0]

    def declines(module: Any, x: Any, weight: Any, bias: Any, activation: Any, **kwargs: Any) -> str | None:
        tensors = [t for t in (x, weight, bias) if t is not None]
        if any(kwargs.get(name) is not None for name in _OF_PACKAGE) or kwargs.get("return_final_states"):
            return "packed sequences, or states before or after them"
        if activation not in _ACTIVATIONS:
            return f"activation={activation!r}"
        if any(type(t) not in PLAIN or t.dtype not in FLOATS for t in tensors):
            return "no plain tensors of floats"
        if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or not 1 <= weight.shape[1] <= MOST_TAPS:
            return f"other shapes than [B, C, L] and [C, K], K up to {MOST_TAPS}"
        if bias is not None and bias.dtype is not weight.dtype:
            return "a bias of another dtype than the weight"
        return None

    def run(module: Any, x: Any, weight: Any, bias: Any, activation: Any, **kwargs: Any) -> Any:
        return causal_conv1d(x, weight, bias, activation=_ACTIVATIONS[activation])

    return _Served(site, guarded(site, declines, run, None, lambda module, x, *args, **kwargs: x.shape[0] * x.shape[2]))


_functions: dict[str, Callable[[nn.Module, torch.Tensor], _Served]] = {
    RopePatch.op: _rotation, _CONVOLUTION: _convolution,
}  # fmt: skip


class RMSNorm(nn.Module):
    """Runs `ops.rms_norm` in the place of an RMSNorm."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the normed `hidden_states`, of their shape and dtype."""
        normed: torch.Tensor = _serve("rms_norm", 1, self, hidden_states)
        return normed


class RMSNormGated(nn.Module):
    """Runs `ops.gated_rms_norm` in the place of an RMSNorm with a gate."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the normed and gated `hidden_states`, of their shape and dtype."""
        normed: torch.Tensor = _serve("gated_rms_norm", 1, self, hidden_states, gate)
        return normed


class GatedMlp(nn.Module):
    """Runs `ops.swiglu` between the projections of a gated MLP."""

    can_torch_compile = False
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `down(act(gate(x)) * up(x))`."""
        down: torch.Tensor = _serve("swiglu", 1, self, x)
        return down


class RotaryEmbedding(nn.Module):
    """Runs `ops.rope` in the place of a function that rotates queries and keys."""

    can_torch_compile = False
    has_backward = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotated q and k."""
        rotated: tuple[torch.Tensor, torch.Tensor] = _serve(
            "rope", 3 - unsqueeze_dim, self, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim
        )
        return rotated


class CausalConv1d(nn.Module):
    """Runs `ops.causal_conv1d` in the place of the function of state layers."""

    can_torch_compile = False
    has_backward = True

    def forward(
        self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the convolution of `hidden_states` `[B, C, L]` over their last dimension, in their dtype."""
        y: torch.Tensor = _serve(_CONVOLUTION, 2, self, hidden_states, weight, bias, activation, **kwargs)
        return y


NAMES: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNorm,
    "RMSNormGated": RMSNormGated,
    "SwiGLUMLP": GatedMlp,
    "GeGLUMLP": GatedMlp,
    "rotary_pos_emb": RotaryEmbedding,
    "causal_conv1d_fn": CausalConv1d,
}
"""transformers' names for kernels (`kernel_layer_name`) and the layer for each."""


def layer_of(module: nn.Module) -> type[nn.Module] | None:
    """Returns the layer of this module whose forward `kernels` has set on a module, or None."""
    function = getattr(vars(module).get("forward"), "__func__", None)
    return next((layer for layer in NAMES.values() if layer.forward is function), None)


def site_of(module: nn.Module, where: torch.device) -> Site | str | None:
    """Returns the site that serves a module with a layer on a device, why none does, or None before the layer's first
    call. A function is one object for all models of a family, which may be on several devices."""
    served = _served.get(module)
    if served is None or isinstance(served.found, str):
        return None if served is None else served.found
    if served.found.op in _functions:
        served.found.served = backends.explain(served.found.op, where, None)[0]
    return served.found
