"""Where `npu-kernels tune` found the model's own code faster: for so many tokens a patched module runs that instead.

How many tokens a call has is known when it is made, and what was measured holds for a range of tokens. So a module is
not left alone for good; it gets a forward that looks at its input.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..tuned import Entry
from ._classes import original_class, subclass_with_forward

__all__ = ["described", "model_sizes", "switching_class"]


def _size(value: Any) -> int:
    return value if type(value) is int else 0


def model_sizes(op: str, module: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """dtype and sizes of what a module computes, in the order of `workloads.Workload.model_sizes`; None where they
    cannot be told."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None:
        return None
    sizes: tuple[int, ...] = tuple(weight.shape)
    if op == "add_rms_norm":
        # The norms of a decoder layer are its only parameters of one dimension that are as long as its input.
        norm = next((p for child in module.children() for p in child.parameters(recurse=False) if p.dim() == 1), None)
        sizes = () if norm is None else tuple(norm.shape)
    elif op == "swiglu":
        sizes = (_size(getattr(module.up_proj, "out_features", None)),)
    elif op == "rope":
        config = getattr(module, "config", None)
        heads = _size(getattr(config, "num_attention_heads", None))
        kv_heads = _size(getattr(config, "num_key_value_heads", None))
        sizes = (heads, kv_heads, _size(getattr(module, "head_dim", None)))
    return weight.dtype, sizes


def described(entries: tuple[Entry, ...]) -> str:
    """What was measured, for the report: `512 to 4096 tokens: its own code (measured)`."""

    def one(entry: Entry) -> str:
        low, high = entry.tokens
        tokens = f"{high}" if low == high else f"{low} to {high}"
        return f"{tokens} tokens: {'its own code' if entry.plain_wins else entry.backend} (measured)"

    return ", ".join(map(one, entries))


def _tokens(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens a module's first argument has."""
    first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return 0
    return first.numel() if op == "embedding" else first.numel() // max(1, first.shape[-1])


@functools.cache
def _switching(
    cls: Any, patched: Any, op: str, ranges: tuple[tuple[int, int, bool], ...], otherwise: bool
) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph for each number of tokens would be compiled
            return patched.forward(self, *args, **kwargs)
        tokens = _tokens(op, args, kwargs)
        own = next((own for low, high, own in ranges if low <= tokens <= high), otherwise)
        return (cls if own else patched).forward(self, *args, **kwargs)

    return forward


def switching_class(
    module: nn.Module, patched: type[nn.Module], op: str, entries: tuple[Entry, ...], otherwise: bool
) -> type[nn.Module]:
    """A class whose forward is the original one where `entries` say so, and `patched`'s elsewhere.

    Args:
        module: a recognised module.
        patched: the class that it would get.
        op: what it computes.
        entries: what was measured at the module's sizes.
        otherwise: whether its own code runs for numbers of tokens that were not measured.
    """
    if not otherwise and not any(entry.plain_wins for entry in entries):
        return patched
    ranges = tuple((*entry.tokens, entry.plain_wins) for entry in entries)
    cls = original_class(module)
    helpers = tuple((name, value.__func__) for name, value in vars(patched).items() if isinstance(value, staticmethod))
    return subclass_with_forward(cls, _switching(cls, patched, op, ranges, otherwise), helpers)
