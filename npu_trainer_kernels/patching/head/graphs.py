"""Keeps a compiled model's head and loss outside of its graphs.

A promise and the fused op cannot be part of a graph, and code that `torch.compile` cannot trace ends a graph: another
one would begin after the head and after each step of the loss, and the layers would be traced once for each of the
functions around the head. So in training the forward of the module that owns the head runs untraced, including the
loss, and the modules besides the head are traced again, each as a graph of its own: for most models that is one graph
of all layers.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...support.opaque import opaque, starts_no_graph, traced
from ..classes import forward_of, original_class, subclass_with_forward
from ..undo import Undo

__all__ = ["keep_out_of_graphs", "may_promise"]

_BY = "_npu_kernels_kept_out_by"


def _untraced(kind: type[nn.Module]) -> Callable[..., Any]:
    own = forward_of(kind)
    called = opaque(own, in_full_graphs=own)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(module, *args, **kwargs) if may_promise(module) else own(module, *args, **kwargs)

    return starts_no_graph(forward)


def _traced(kind: type[nn.Module]) -> Callable[..., Any]:
    return traced(forward_of(kind))


def may_promise(module: nn.Module) -> bool:
    """Whether a call of a module may promise logits; if not, all of the module may be one graph."""
    return module.training and torch.is_grad_enabled()


def _beside(module: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """Yields the largest modules with children that do not contain the head."""
    for child in module.children():
        has_forward = type(child).forward is not nn.Module.forward
        if has_forward and not any(each is head for each in child.modules()):
            if any(True for _ in child.children()):
                yield child
        elif child is not head:
            yield from _beside(child, head)


def keep_out_of_graphs(owner: nn.Module, head: nn.Module, undo: Undo) -> None:
    """Gives the owner of a head, and the modules besides the head, subclasses that do what the module's docstring says.
    Skips modules that this `undo` has changed already, or that have a forward of this package."""
    for module, make in ((owner, _untraced), *((each, _traced) for each in _beside(owner, head))):
        kind, now = original_class(module), type(module)
        if now.forward is kind.forward or getattr(now, _BY, undo) is not undo:
            new = subclass_with_forward(kind, functools.wraps(kind.forward)(make(kind)))
            setattr(new, _BY, undo)
            undo.set_class(module, new)
