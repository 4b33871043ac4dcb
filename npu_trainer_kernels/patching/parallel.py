"""Forwards that transformers sets on modules when it loads a model by a plan for several ranks (`tp_plan`).

Such a forward (`tp_forward`, of a *style*) converts its arguments to the style's layout, calls the module's original
forward, and converts the result to another layout. If the original forward gets plain tensors, as a norm of a rank's
own heads does, only this inner forward is replaced, and the rest (a sum of gradients over the ranks) stays. A head
whose logits would be gathered is replaced as a whole.

A style's parts are variables of a closure; transformers gives no other access to them. If a version names them
differently, its plans are not recognised. Their modules are left alone, as are all whose forward other code has set.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .classes import original_class
from .patch import others_forward, set_on_instance
from .undo import Undo

__all__ = ["gathered_over", "instead_of", "mixes_tokens", "plain_inside", "serve_inside", "serve_instead"]

_TENSORS, _EXPERTS = "transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel"


class _InPlace:
    """A forward of this package in place of a forward that was set on a module. It keeps the latter as `own`, so that
    the undo record need not keep the module alive."""

    __slots__ = ("_kind", "_module", "own")

    def __init__(self, own: Callable[..., Any], kind: type[nn.Module], module: nn.Module) -> None:
        self.own, self._kind, self._module = own, kind, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.forward(self._module(), *args, **kwargs)


@dataclass(frozen=True)
class _Planned:
    """The forward that a plan has set on a module.

    Attributes:
        style: the name of the style's class; empty where the class is not transformers'.
        cells: the closure variables of the forward.
    """

    style: str
    cells: dict[str, types.CellType]

    def value(self, name: str) -> Any:
        """Returns a closure variable's value, or None."""
        return self.cells[name].cell_contents if name in self.cells else None

    @property
    def layouts(self) -> tuple[Any, Any]:
        """The layouts of the module's input and output, where the style has them."""
        style = self.value("self")
        return getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)


def instead_of(module: nn.Module) -> Any:
    """Returns the forward that other code has set on a module, even if one of this package replaces it, or None."""
    forward = vars(module).get("forward")
    return forward.own if isinstance(forward, _InPlace) else forward


def _planned(module: nn.Module) -> _Planned | None:
    forward = instead_of(module)
    if not isinstance(forward, types.FunctionType) or forward.__module__ != _TENSORS:
        return None
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    if not {"module", "original_forward"} <= set(cells) or cells["module"].cell_contents is not module:
        return None
    if "self" not in cells:
        return _Planned(forward.__qualname__.partition(".")[0], cells)
    kind = type(cells["self"].cell_contents)
    return _Planned(kind.__name__ if kind.__module__ == _TENSORS else "", cells)


def _calls_own(module: nn.Module, plan: _Planned) -> bool:
    """Whether the inner forward is the class's forward, or a forward of this package in its place."""
    inner = plan.value("original_forward")
    inner = inner.own if isinstance(inner, _InPlace) else inner
    return getattr(inner, "__func__", None) is original_class(module).forward


def gathered_over(head: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of the ranks whose parts of a linear layer's outputs its plan would gather; None: no such
    layer."""
    plan = _planned(head)
    if plan is None or plan.style != "ColwiseParallel" or not _calls_own(head, plan):
        return None
    whole = plan.layouts == (Replicate(), Replicate()) and plan.value("self").use_local_output
    mesh = plan.value("mesh")
    return mesh if whole and mesh.ndim == 1 and not getattr(head, "_hf_quantized_needs_local_tp", False) else None


# Styles that treat each token independently of all others.
_TOKEN_BY_TOKEN = frozenset((
    "AllReduceParallel", "ColwiseParallel", "EmbeddingParallel", "LocalParamsParallel", "MlaKvAProjParallel",
    "MoeExpertsParallel", "MoeIdentityParallel", "PackedColwiseParallel", "ReplicatedWithGradAllReduce",
    "RowwiseParallel",
))  # fmt: skip
# Styles that pass plain tensors to the inner forward: norms of the rank's own heads, and a rank's slices of experts.
_PLAIN_INSIDE = ("ReplicatedWithGradAllReduce", "MoeExpertsParallel")


def plain_inside(module: nn.Module) -> bool:
    """Whether the forward that a plan has set on a module calls the class's forward with plain tensors."""
    plan = _planned(module)
    return plan is not None and plan.style in _PLAIN_INSIDE and _calls_own(module, plan)


def mixes_tokens(module: nn.Module) -> str | None:
    """Returns why the forward set on a module may treat a packed row differently from a batch of the same tokens, or
    None. Plans split heads, columns, ids and experts; a plan that splits sequences shows it in its layouts."""
    if "forward" not in vars(module):
        return others_forward(module)
    plan = _planned(module)
    if plan is None:
        return None if getattr(instead_of(module), "__module__", None) == _EXPERTS else set_on_instance(module)
    splits = any(layout.dim != -1 for layout in plan.layouts if isinstance(layout, Shard))
    return "its plan may split sequences" if splits or plan.style not in _TOKEN_BY_TOKEN else None


def _at(module: nn.Module) -> types.CellType | None:
    """Returns the closure cell from which a plan's forward takes the inner forward."""
    plan = _planned(module)
    return None if plan is None else plan.cells["original_forward"]


def serve_inside(module: nn.Module, kind: type[nn.Module], undo: Undo) -> None:
    """Makes the forward that a plan has set on a module (`plain_inside`) call that of `kind` instead of the class's."""
    cell, there = _at(module), weakref.ref(module)
    if cell is None or isinstance(cell.cell_contents, _InPlace):
        return
    cell.cell_contents = _InPlace(cell.cell_contents, kind, module)

    def step() -> None:
        alive = there()
        cell = None if alive is None else _at(alive)
        if cell is not None and isinstance(cell.cell_contents, _InPlace):
            cell.cell_contents = cell.cell_contents.own

    undo.add(step)


def serve_instead(module: nn.Module, kind: type[nn.Module], undo: Undo) -> None:
    """Replaces the forward that a plan has set on a module by that of `kind`; `instead_of` returns the replaced one."""
    own, there = vars(module)["forward"], weakref.ref(module)
    if isinstance(own, _InPlace):
        return
    module.forward = _InPlace(own, kind, module)

    def step() -> None:
        alive = there()
        if alive is not None and isinstance(now := vars(alive).get("forward"), _InPlace):
            alive.forward = now.own

    undo.add(step)
