"""Serves the loss of TRL's DistillationTrainer by `ops.linear_divergence`.

TRL's method `_compute_loss` calls the student's and the teacher's bodies, and then a function of its module on hidden
states and the weights of both heads. While the callback trains, the trainer has a method of its own: the same code, in
which the name of that function is this package's. TRL's module and class stay as they are.
"""

import functools
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import backends
from ..ops.checks import FLOATS
from ..ops.head import LinearDivergenceOutput, linear_divergence, linear_divergence_reference
from ..patching.patch import Site
from ..patching.undo import Undo

__all__ = ["serve_divergence"]

_MODULE, _CLASS = "trl.trainer.distillation_trainer", "DistillationTrainer"
_METHOD, _FUNCTION = "_compute_loss", "_chunked_divergence_loss"
_PARAMETERS = (
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias",
    "student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping", "teacher_final_logit_softcapping",
    "temperature",
)  # fmt: skip
_ROWS = 64
"""The rows that are compared with TRL's own function, once."""


def _whole(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """Returns a head's parameters as TRL gathers them where they are sharded."""
    if isinstance(weight, DTensor):
        weight = weight.full_tensor().to(dtype)
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    return weight, bias


def _divergence_loss(site: Site, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces TRL's function: same arguments, same results."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    a = types.SimpleNamespace(**given.arguments)
    tensors = (a.student_hidden_states, a.teacher_hidden_states, a.student_lm_head_weight, a.teacher_lm_head_weight)
    if others := {t.dtype for t in tensors}.difference(FLOATS):
        site.declined[f"{', '.join(str(d).removeprefix('torch.') for d in others)} values"] += 1
        return original(*args, **kwargs)
    if site.off is not None:
        site.declined[site.off] += 1
        return original(*args, **kwargs)
    x, teacher_x = a.student_hidden_states, a.teacher_hidden_states
    weight, bias = _whole(a.student_lm_head_weight, a.student_lm_head_bias, x.dtype)
    teacher_weight, teacher_bias = _whole(a.teacher_lm_head_weight, a.teacher_lm_head_bias, teacher_x.dtype)
    options = {
        "beta": a.beta, "temperature": a.temperature, "softcap": a.student_final_logit_softcapping,
        "logit_scale": a.student_logit_scale, "teacher_softcap": a.teacher_final_logit_softcapping,
        "teacher_logit_scale": a.teacher_logit_scale,
    }  # fmt: skip
    mask = a.completion_mask != 0
    if site.look is not None:
        rows = torch.nonzero(mask.reshape(-1)).squeeze(1)[:_ROWS]
        some = x.reshape(-1, x.shape[-1])[rows], teacher_x.reshape(-1, teacher_x.shape[-1])[rows]

        def each(function: Callable[..., Any], **backend: Any) -> Any:
            return function(
                some[0], weight, some[1], teacher_weight, bias, teacher_bias, reduction="none", **options, **backend
            )

        site.look(
            site, lambda: each(linear_divergence_reference), lambda: each(linear_divergence, backend=site.backend)
        )
        if site.off is not None:
            site.declined[site.off] += 1
            return original(*args, **kwargs)
    site.ran += 1
    out = linear_divergence(
        x, weight, teacher_x, teacher_weight, bias, teacher_bias, mask=mask, num_items=a.num_items_in_batch,
        outputs=("entropy",), backend=site.backend, **options,
    )  # fmt: skip
    assert isinstance(out, LinearDivergenceOutput)
    assert out.entropy is not None
    return out.divergence, out.entropy.detach().sum(), mask.sum()


def _original(trainer: Any) -> Any:
    """Returns TRL's method that computes the loss, None for another trainer, or why it is not served."""
    module = sys.modules.get(_MODULE)
    base = None if module is None else getattr(module, _CLASS, None)
    if base is None or not isinstance(trainer, base):
        return None
    function = getattr(module, _FUNCTION, None)
    if function is None or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        version = importlib.metadata.version("trl")
        return f"TRL {version} computes the divergence of {_CLASS} in another way: the op linear_divergence is not used"
    method = vars(type(trainer)).get(_METHOD) or getattr(type(trainer), _METHOD)
    if method is not vars(base).get(_METHOD) or _METHOD in vars(trainer):
        return f"{type(trainer).__name__} has a {_METHOD} of its own: the op linear_divergence is not used"
    return method


def serve_divergence(trainer: Any, undo: Undo, backend: str | None) -> Site | str | None:
    """Has the loss of a trainer computed by the op, if it is TRL's DistillationTrainer.

    Args:
        trainer: any trainer.
        undo: takes the change back.
        backend: the override that the callback was called with.

    Returns:
        the site that counts the calls, None for another trainer, or why this one is not served.
    """
    method = _original(trainer)
    if method is None or isinstance(method, str):
        return method
    where = next(trainer.model.parameters()).device
    served = backends.explain("linear_divergence", where, backend)[0]
    site = Site("linear_divergence", type(trainer), (), backend, served=served, paths=[_METHOD], late=True)
    names = {**method.__globals__, _FUNCTION: functools.partial(_divergence_loss, site, method.__globals__[_FUNCTION])}
    ours = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    ours.__kwdefaults__ = method.__kwdefaults__
    undo.set_attribute(trainer, _METHOD, types.MethodType(functools.wraps(method)(ours), trainer))
    return site
