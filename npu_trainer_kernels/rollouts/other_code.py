"""Other code in or around a model, which `generate` would run for each token and a captured step would not.

A graph repeats what the device did. A hook that counts tokens, collects hidden states or steers from the seventh token
on is called while a step is captured and never again; so is a method by which a class prepares each token's arguments,
and a mode that sees every operator. A model with any of these is left to `generate`, and the report names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationMixin

from ..patching.classes import GLOBAL_HOOKS
from .ranks import hooks_of_wrappers

__all__ = ["has_own_loop", "other_code"]

_PACKAGE = __name__.partition(".")[0]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Hooks of backwards are not called in a forward without gradients."""
_LIBRARIES = ("transformers", "trl", "peft")
_HARMLESS = ("output_capturing_hook", "make_inputs_require_grad", "make_inputs_require_grads",
             "cast_outputs_to_original_dtype")  # fmt: skip
"""The names of hooks of these libraries that do to each token the same operators, or none: transformers' collector of
outputs that are asked for, what makes embedded tokens require a gradient, and TRL's cast of them."""
_OF_THE_LOOP = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
"""The methods that `generate`'s loop calls beside the model's forward."""


def has_own_loop(kind: Any) -> bool:
    """Whether the sampling loop of a class is another one than transformers' own."""
    loop: Any = kind._sample
    return loop is not GenerationMixin._sample or loop.__module__ != "transformers.generation.utils"


def other_code(model: nn.Module, shared: bool) -> str | None:
    """Returns which other code takes part in a model's forwards for single tokens, as a reason, or None.

    Args:
        model: the causal model.
        shared: whether its weights are gathered for a rollout; what gathers them by hooks is taken out then.
    """
    if any(GLOBAL_HOOKS):
        return "other code has hooked every module"
    around = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    mode = next((each for each in around if type(each) is not DeviceContext), None)
    if mode is not None:
        return f"a mode of other code sees its operators ({type(mode).__name__})"
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
            return f"{path} is compiled ({type(module).__name__})"
        own = vars(module)
        if own["training"] and own.get("gradient_checkpointing"):
            return "gradient checkpointing is on in training mode, where it keeps no cache"
        if not own["_forward_hooks"] and not own["_forward_pre_hooks"]:
            continue
        gathers = {id(hooks[key]) for hooks, key in hooks_of_wrappers(module)} if shared else set()
        for hook in (each for name in _HOOKS for each in own[name].values()):
            if id(hook) not in gathers and not _is_harmless(hook):
                return f"other code has hooked {path or 'the model'} ({_name(hook)})"
    for name in _OF_THE_LOOP:
        method: Any = getattr(model, name, None)
        if method is not None and (name in vars(model) or _root(method) != "transformers"):
            return f"its {name} is its own, not transformers'"
    return None


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _root(function: Callable[..., Any]) -> str:
    """Returns the package that a function, a method or a callable object is from."""
    return (getattr(_function(function), "__module__", None) or "").partition(".")[0]


def _name(hook: Any) -> str:
    function = _function(hook)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _is_harmless(hook: Any) -> bool:
    root = _root(hook)
    return root == _PACKAGE or (root in _LIBRARIES and getattr(_function(hook), "__name__", "") in _HARMLESS)
