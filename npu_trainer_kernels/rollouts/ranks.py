"""Weights that ranks hold parts of (FSDP2, ZeRO-3), whole for the length of a rollout.

Each forward of such a model gathers every layer, for one token as for a batch, and a graph would remember where the
gathered weights were. So they are gathered once: FSDP2's by this module, ZeRO-3's by TRL, which takes DeepSpeed's hooks
out for as long. The weights then are plain parameters, and every rank makes its tokens by itself, however many.

Gathering is done by all ranks together, and so is every step of `generate`. So ranks first agree that all of them can
make a rollout, and afterwards that all of them have made it; otherwise all of them call `generate`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..patching.head import is_partitioned
from .rollout_engine import free_bytes

__all__ = ["all_agree", "gathered", "hooks_of_wrappers", "is_shared", "why_not_gathered"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_shared(model: nn.Module) -> bool:
    """Whether ranks hold parts of a model's weights."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(map(is_partitioned, model.parameters()))


def all_agree(agrees: bool, where: torch.device) -> bool:
    """Returns whether all ranks agree. It is called by all of them."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return agrees
    answer = torch.tensor([int(agrees)], dtype=torch.int32, device=where)
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer.item())


def why_not_gathered(model: nn.Module, where: torch.device) -> str | None:
    """Returns why a model's weights cannot be whole for a rollout, or None.

    Args:
        model: the outermost model of those that FSDP2 has wrapped.
        where: the device of its weights.
    """
    if any(is_partitioned(p) and not _is_available(p) for p in model.parameters()):
        return "its parameters are spread over ranks, and nobody has gathered them (ds3_gather_for_generation)"
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not all(hooks_of_wrappers(module) for module in modules):
        return "FSDP gathers several of its modules at once"
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    if sharded and not modules:
        return "its parameters are spread over ranks"
    needed, free = sum(p.numel() * p.element_size() for p in sharded), free_bytes(where, 2)
    if free is not None and needed > free:
        return f"half of the free memory ({free / (1 << 30):.1f} GiB) has no room for its gathered weights"
    return None


def _is_available(parameter: Any) -> bool:
    """Whether DeepSpeed has gathered a parameter."""
    return getattr(getattr(parameter, "ds_status", None), "name", "") == "AVAILABLE"


def hooks_of_wrappers(module: Any) -> list[tuple[Any, int]]:
    """Returns the hooks of FSDP2 and DeepSpeed of a module, each as the dict that it is in and its key there."""
    state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None

    def gathers(hook: Any) -> bool:
        owner = getattr(hook, "__self__", None)
        made_by: str = getattr(inspect.unwrap(hook), "__module__", None) or ""
        return (state is not None and owner is state) or made_by.split(".")[0] == "deepspeed"

    named = (vars(module)[name] for name in _HOOKS)
    return [(hooks, key) for hooks in named for key, hook in hooks.items() if gathers(hook)]


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block FSDP2's weights are whole, and its hooks, which would gather and free them, are out. Of
    DeepSpeed's hooks TRL leaves one, which has ranks compare their forwards: it is out, too."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [(hooks, hooks.copy()) for module in model.modules() for hooks in (vars(module)[name] for name in _HOOKS)]
    try:
        for module in modules:
            module.unshard()
        for module in model.modules():
            for hooks, key in hooks_of_wrappers(module):
                del hooks[key]
        yield
    finally:
        for hooks, all_ in before:
            # In the same dict and in the same order.
            hooks.clear()
            hooks.update(all_)
        for module in modules:
            module.reshard()
