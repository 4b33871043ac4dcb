"""Everything that decides how a body's code runs, except its arguments.

A graph remembers addresses and nothing else. So each call compares everything by which Python could decide otherwise:
the modules of the body with their attributes, hooks, classes and configurations (adapters that are switched off,
modes, patches), the parameters with their addresses and whether they are trained, and what else the body's code reads
(`capture.watched`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...capture import Reads, Watched
from ..probe import replaced_functions

__all__ = [
    "CHECKPOINT", "ON_ANOTHER_THREAD", "SAVED_ELSEWHERE", "BodyState", "collected_outputs", "has_foreign_hooks",
    "is_saved_elsewhere",
]  # fmt: skip


class BodyState:
    """What decides how a body's code runs, as it was when the body was captured.

    Args:
        body: the body.
        reads: the code of it that ran; None: only its modules and their configurations are compared.
        settings: PyTorch's settings at the capture; None: as they are now.

    Attributes:
        values: the values that its code reads.
    """

    def __init__(
        self, body: nn.Module, reads: Reads | None = None, settings: tuple[Any, ...] | None = None
    ) -> None:  # fmt: skip
        modules = [module for module in body.modules() if not isinstance(module, torch.jit.ScriptModule)]
        if reads is not None:
            # An op has computed in the place of a module's own code, by which it was recognised.
            for function in replaced_functions(body):
                reads.adds(function)
        self.values = Watched(modules, reads, _ignored, settings)
        for name in _attention_names(modules):
            self.values.compares("the function of its attention", functools.partial(ALL_ATTENTION_FUNCTIONS.get, name))
        for module in modules:
            self.values.has_entries(module._parameters)
            self.values.has_entries(module._buffers)
        self._tensors: list[torch.Tensor] = [*body.parameters(), *body.buffers()]
        self._known = self._now()

    def _now(self) -> tuple[list[int], list[bool]]:
        return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(_IS_TRAINED, self._tensors))

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        return self.values.holds() and self._now() == self._known


def _attention_names(modules: Iterable[nn.Module]) -> list[str]:
    """Returns the names of the attentions that modules call through transformers' table."""
    configs = (vars(module).get("config") for module in modules)
    names = dict.fromkeys(getattr(config, "_attn_implementation", None) for config in configs)
    return [name for name in names if name is not None]


_IS_TRAINED = operator.attrgetter("requires_grad")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_BY_NAME = (*_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute of a layer that holds the function which transformers calls as `checkpoint(function, *args)`."""
_ELSEWHERE = (CHECKPOINT,)
"""An attribute that only code around a layer's forward reads. TRL switches checkpointing off and on for each batch,
with a new function each time."""


def _ignored(module: nn.Module) -> tuple[str, ...]:
    """Returns the attributes of a module that do not count. TRL adds a hook to embeddings each time that it switches
    checkpointing on; it makes embedded tokens require a gradient, which does not matter in a forward without
    gradients."""
    return (*_ELSEWHERE, *_HOOKS_BY_NAME) if isinstance(module, nn.Embedding) else _ELSEWHERE


def collected_outputs() -> dict[str, list[Any]] | None:
    """Returns the lists that transformers' hooks write to at present (router logits, hidden states), by name; None
    where nothing is collected."""
    collector = _collector()
    return None if collector is None else collector.get() or None


@functools.cache
def _collector() -> Any:
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5 it gives modules another forward instead
        return None
    return _active_collector


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a hook of a module may keep or change the tensors that it gets. Two kinds of hooks do not count:
    transformers' collector, whose lists `collected_outputs` returns, and FSDP2's, which gather and free parameters."""
    own = module.__dict__
    return any(
        getattr(hook, "__name__", "") != "output_capturing_hook"
        and not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")
        for name in _HOOKS for hook in own[name].values()
    )  # fmt: skip


def is_saved_elsewhere() -> bool:
    """Whether hooks take the tensors that autograd saves for backward. A checkpoint around a body repeats the body's
    call, and nothing in the call says so; tensors that hooks should offload would stay in the memory of graphs."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are some"):  # which raises an error
            return False
    except RuntimeError:
        return True


SAVED_ELSEWHERE = "hooks around it take the tensors that it saves for backward (a checkpoint, or offloading)"
ON_ANOTHER_THREAD = "another thread called it first, and graphs are replayed on one thread"
