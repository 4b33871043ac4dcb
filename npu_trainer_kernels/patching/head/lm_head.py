"""The LM head of a causal language model: in training it promises its logits (`promise`) instead of computing them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from ...ops.head import unshared
from ...support.opaque import opaque
from ..call import CallSettings
from ..classes import forward_of, original_class, subclass_with_forward
from ..parallel import gathered_over, instead_of, serve_instead
from ..patch import UNREPORTED, HarmlessReason, Patch, Scene, Site, no_float, others_forward, set_on_instance
from ..undo import Undo
from .graphs import keep_out_of_graphs, may_promise
from .head_call import HeadCall, answer_of, is_asked, is_of_a_wrapper
from .promise import promise

__all__ = ["LmHeadPatch", "causal_lm", "promised_by_teachers"]


def causal_lm(model: nn.Module) -> tuple[str, Any]:
    """Returns the module inside `model` (or itself) that owns the LM head and the loss, with its path; or None."""
    return next(_owners(model), ("", None))


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        owns = hasattr(type(module), "get_output_embeddings") and hasattr(type(module), "loss_function")
        if owns and module.get_output_embeddings() is not None:
            yield path, module


_of_teachers: contextvars.ContextVar[bool] = contextvars.ContextVar("npu_kernels_of_teachers", default=False)


@contextlib.contextmanager
def promised_by_teachers() -> Iterator[None]:
    """Makes heads promise their logits without gradients, too, inside the `with` block: for a loss of two heads."""
    token = _of_teachers.set(True)
    try:
        yield
    finally:
        _of_teachers.reset(token)


# So many calls in a row that need their logits whole beside the fused loss: then the head keeps its own code.
_DOUBLED = 4


@dataclass
class Uses:
    """What becomes of the logits of a head's calls. A loss that is fused and logits that are formed all the same take
    six products of the vocabulary's size, where plain PyTorch takes three.

    Attributes:
        fused, real: whether the last call's loss was fused, and whether its logits were formed.
        doubled: the number of the last calls in a row that had both.
    """

    fused: bool = False
    real: bool = False
    doubled: int = 0

    def next_call(self) -> None:
        """Counts the last call."""
        if self.fused:
            self.doubled = self.doubled + 1 if self.real else 0
        self.fused = self.real = False


@dataclass(frozen=True)
class HeadForm:
    """A head whose logits may be promised.

    Attributes:
        within: the whole model, whose sharding wrapper may have to gather the head's parameters for a later use.
        mesh: the mesh of the ranks that hold slices of its vocabulary (`tp_plan`), or None.
        uses: what becomes of its logits.
    """

    within: weakref.ref[nn.Module]
    mesh: DeviceMesh | None = None
    uses: Uses = field(default_factory=Uses, compare=False)

    def __str__(self) -> str:
        return "" if self.mesh is None else f"{self.mesh.size()} ranks share its vocabulary out"


class LmHeadPatch(Patch):
    """Replaces the LM head and the cross-entropy of its logits by `ops.fused_linear_cross_entropy`."""

    op = "linear_cross_entropy"
    counts_later = True
    compared_later = True

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        # Includes heads that are left alone, of a second language model. Parts without a head return their embedding.
        first, *others = [owner.get_output_embeddings() for _, owner in _owners(scene.model)] or [scene.model]
        heads = [first, *(head for head in others if not isinstance(head, nn.Embedding))]
        return [(path, module) for path, module in scene.model.named_modules() if any(module is h for h in heads)]

    def recognise(self, module: nn.Module, scene: Scene) -> HeadForm | str:
        owner = causal_lm(scene.model)[1]
        if owner is None:
            return HarmlessReason("no causal language model found")
        if module is not owner.get_output_embeddings():
            return "it is the head of a second language model; that of the first is served"
        if (reason := others_forward(owner)) is not None:
            return f"{type(owner).__name__} computes its loss: {reason}"
        if not isinstance(module, nn.Linear) or original_class(module).forward is not nn.Linear.forward:
            return f"its head is a {type(module).__name__}, not a plain nn.Linear"
        mesh = gathered_over(module)
        if mesh is None and (reason := set_on_instance(module)) is not None:
            return reason
        return HeadForm(weakref.ref(scene.model), mesh)

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        if is_asked(module):
            return None
        site.form.uses.next_call()
        if site.form.uses.doubled >= _DOUBLED:
            return f"the last {_DOUBLED} calls formed their logits beside the fused loss, which costs twice as much"
        if len(args) != 1 or kwargs:
            return "it is given more than hidden states"
        if is_parametrized(module):
            return "its weight is computed anew whenever it is read (a parametrization)"
        hidden, weight, bias = args[0], module.weight, module.bias
        trains = may_promise(module) and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
        if not (trains or (_of_teachers.get() and not torch.is_grad_enabled())):
            return UNREPORTED
        if (reason := no_float(hidden)) is not None:
            return reason
        if isinstance(weight, DTensor) or site.form.mesh is not None:
            if not isinstance(weight, DTensor) or weight.device_mesh != site.form.mesh:
                return "it is sharded by columns or rows"
            if (reason := unshared(weight, bias)) is not None:
                return reason
        if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            return f"hidden states of {hidden.dtype} for a weight of {weight.dtype}"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values(),
                 *module._backward_pre_hooks.values()]  # fmt: skip
        # A sharding wrapper may hook the head: it is then called around the use of its logits, too.
        if not all(is_of_a_wrapper(hook) for hook in hooks):
            return "it has a hook"
        return None

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        answered = answer_of(module)
        if answered is not None:
            return answered
        (hidden,) = args
        uses: Uses = site.form.uses

        def on_real(reason: str) -> None:
            uses.real = True
            site.declined[f"logits that were {reason}"] += 1

        def on_fused() -> None:
            uses.fused = True
            site.ran += 1

        def compare(own: Callable[[], Any], served: Callable[[], Any]) -> str | None:
            if site.look is not None:
                site.look(site, own, served)
            return site.off

        compared = None if site.look is None else compare
        call = HeadCall(module, hidden, site.backend, on_real, on_fused, site.form.within, compared)
        return promise(call, hidden, module.weight, module.bias)

    def own(self, site: Site) -> Callable[..., Any]:
        if site.form.mesh is None:
            return forward_of(site.kind)
        return lambda module, *args, **kwargs: instead_of(module)(*args, **kwargs)

    def patched_class(self, site: Site) -> type[nn.Module]:
        own = self.own(site)
        called = opaque(super().patched_class(site).forward, in_full_graphs=own)

        @functools.wraps(site.kind.forward)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() and not may_promise(module):
                return own(module, *args, **kwargs)
            return called(module, *args, **kwargs)

        return subclass_with_forward(site.kind, forward)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        if site.form.mesh is not None:
            serve_instead(module, site.cls, undo)
        owner = causal_lm(site.form.within())[1]
        if owner is not None:
            keep_out_of_graphs(owner, module, undo)
