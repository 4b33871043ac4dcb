"""Forwards that transformers has set on modules when it loaded a model by a plan for several ranks (`tp_plan`).

Such a forward (`tp_forward`, of a *style*) brings its arguments to the style's layout, calls the forward that the
module had, and brings the result to another layout. What is computed in the midst of it on plain tensors, as by the
norm of a rank's own heads, is served there: the forward that it calls is exchanged, and everything around it (a
gradient that is added up over the ranks) stays. A head whose logits would be gathered is served in its place.

A style's parts are variables of a closure. Transformers hands them out in no other way, and a version that names them
otherwise has no plan that is known here: its modules are left alone, as are all whose forward somebody else has set.
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
from .patch import set_on_instance
from .undo import Undo

__all__ = ["gathered_over", "instead_of", "mixes_tokens", "plain_inside", "serve_inside", "serve_instead"]

_TENSORS, _EXPERTS = "transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel"


class _InPlace:
    """A forward of this package's, where a module has another one's. It keeps that one, so that no record of what is to
    be undone keeps the module alive."""

    __slots__ = ("_kind", "_module", "own")

    def __init__(self, own: Callable[..., Any], kind: type[nn.Module], module: nn.Module) -> None:
        self.own, self._kind, self._module = own, kind, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.forward(self._module(), *args, **kwargs)


@dataclass(frozen=True)
class _Planned:
    """What a plan has set on a module.

    Attributes:
        style: the name of its class; empty where that is none of transformers'.
        cells: the variables of its forward.
    """

    style: str
    cells: dict[str, types.CellType]

    def value(self, name: str) -> Any:
        """A variable's, or None."""
        return self.cells[name].cell_contents if name in self.cells else None

    @property
    def layouts(self) -> tuple[Any, Any]:
        """Of what the module is given and of what it returns, where the style has them."""
        style = self.value("self")
        return getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)


def instead_of(module: nn.Module) -> Any:
    """The forward that was set on a module by somebody else, or None; also where one of ours is in its place."""
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
    """Whether the forward inside is the one that the module's class has, or one of ours in its place."""
    inner = plan.value("original_forward")
    inner = inner.own if isinstance(inner, _InPlace) else inner
    return getattr(inner, "__func__", None) is original_class(module).forward


def gathered_over(head: nn.Module) -> DeviceMesh | None:
    """The ranks that have parts of a linear layer's outputs each, which its plan would gather; None where it is no such
    layer."""
    plan = _planned(head)
    if plan is None or plan.style != "ColwiseParallel" or not _calls_own(head, plan):
        return None
    whole = plan.layouts == (Replicate(), Replicate()) and plan.value("self").use_local_output
    mesh = plan.value("mesh")
    return mesh if whole and mesh.ndim == 1 and not getattr(head, "_hf_quantized_needs_local_tp", False) else None


# Styles that do with each token what they do with any other.
_TOKEN_BY_TOKEN = frozenset((
    "AllReduceParallel", "ColwiseParallel", "EmbeddingParallel", "LocalParamsParallel", "MlaKvAProjParallel",
    "MoeExpertsParallel", "MoeIdentityParallel", "PackedColwiseParallel", "ReplicatedWithGradAllReduce",
    "RowwiseParallel",
))  # fmt: skip
# Styles that hand plain tensors to the forward inside: a norm of the rank's own heads, and a rank's slice of each
# expert.
_PLAIN_INSIDE = ("ReplicatedWithGradAllReduce", "MoeExpertsParallel")


def plain_inside(module: nn.Module) -> bool:
    """Whether what a plan has set on a module calls the class's forward with plain tensors."""
    plan = _planned(module)
    return plan is not None and plan.style in _PLAIN_INSIDE and _calls_own(module, plan)


def mixes_tokens(module: nn.Module) -> str | None:
    """Why what was set on a module may do something else to a row than to a batch of the same tokens, or None: plans
    split heads, columns, ids and experts, and one that splits sequences says so."""
    if "forward" not in vars(module):
        return None
    plan = _planned(module)
    if plan is None:
        return None if getattr(instead_of(module), "__module__", None) == _EXPERTS else set_on_instance(module)
    splits = any(layout.dim != -1 for layout in plan.layouts if isinstance(layout, Shard))
    return "its plan may split sequences" if splits or plan.style not in _TOKEN_BY_TOKEN else None


def _at(module: nn.Module) -> types.CellType | None:
    """Where what a plan has set on a module finds the forward inside."""
    plan = _planned(module)
    return None if plan is None else plan.cells["original_forward"]


def serve_inside(module: nn.Module, kind: type[nn.Module], undo: Undo) -> None:
    """Makes what a plan has set on a module (`plain_inside`) call the forward of `kind` in place of the class's."""
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
    """Puts the forward of `kind` in the place of what a plan has set on a module; `instead_of` says what that was."""
    own, there = vars(module)["forward"], weakref.ref(module)
    if isinstance(own, _InPlace):
        return
    module.forward = _InPlace(own, kind, module)

    def step() -> None:
        alive = there()
        if alive is not None and isinstance(now := vars(alive).get("forward"), _InPlace):
            alive.forward = now.own

    undo.add(step)
