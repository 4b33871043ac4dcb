"""Serves the losses between two heads in TRL's trainers by `ops.linear_divergence`.

`DistillationTrainer`: TRL's method `_compute_loss` calls the student's and the teacher's bodies, and then a function of
its module on hidden states and the weights of both heads. While the callback trains, the trainer has a method of its
own: the same code, in which the name of that function is this package's.

GKD, GOLD and IW-OPD: TRL's `compute_loss` calls both models, and then `self.generalized_jsd_loss` on their logits. In
these trainers the teacher's head promises its logits, too (`patching/head`), and the trainer has a function of its own
of that name, which computes the divergence of two promises. Logits that are no promises go to TRL's function. IW-OPD's
losses on some tokens of the vocabulary are in `top_tokens`, and so are all losses of `ServerDistillationTrainer`.

TRL's modules and classes stay as they are.
"""

import functools
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import backends
from ..ops.checks import FLOATS
from ..ops.head import LinearDivergenceOutput, linear_divergence, linear_divergence_reference
from ..ops.host import autocasts
from ..patching.head import PromisedLogits, promised_by_teachers
from ..patching.patch import Site
from ..patching.undo import Undo
from .top_tokens import ROWS, Support, differs, loss_on_support, of_whole_heads, serve_methods, unserved

__all__ = ["DistillationRehearsal", "rehearsal", "serve_divergence"]

_MODULE, _CLASS = "trl.trainer.distillation_trainer", "DistillationTrainer"
_METHOD, _FUNCTION = "_compute_loss", "_chunked_divergence_loss"
_BODY = "_get_last_hidden_state"
_PARAMETERS = (
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias",
    "student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping", "teacher_final_logit_softcapping",
    "temperature",
)  # fmt: skip
_JSD = "generalized_jsd_loss"
_LOGITS = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction")
_OF_LOGITS = {
    ("trl.experimental.gkd.gkd_trainer", "GKDTrainer"): (*_LOGITS, "num_items_in_batch"),
    ("trl.experimental.gold.gold_trainer", "GOLDTrainer"): (*_LOGITS, "logits_are_probs", "num_items_in_batch"),
    ("trl.experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer"): (*_LOGITS, "top_k", "add_tail", "num_items_in_batch"),
}
"""The trainers whose loss is a function of both models' logits, and its parameters."""
_SOME_TOKENS = "IWOPDTrainer"
"""The trainer of these that has losses on some tokens of the vocabulary as well."""
_OF_SERVERS = "trl.experimental.server_distillation.server_distillation_trainer", "ServerDistillationTrainer"
"""The trainer that has those losses alone: a `DistillationTrainer` that calls neither `_compute_loss` nor a teacher."""
_ASYNC = "trl.experimental.async_distillation.async_distillation_trainer", "AsyncDistillationTrainer"
_ASYNC_OWN = (
    "the loss of AsyncDistillationTrainer logs the entropy of whole distributions beside a divergence on some tokens, "
    "from chunks of fp32 logits: the op linear_divergence is not used"
)
"""Why the loss of that trainer is left to TRL: the op for some tokens has no entropies."""
_REDUCTIONS = {"batchmean": "mean", "sum": "sum"}
"""TRL's reductions, and those of the op."""


def _whole(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """Returns a head's parameters as TRL gathers them where they are sharded."""
    if isinstance(weight, DTensor):
        weight = weight.full_tensor().to(dtype)
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    return weight, bias


def _differs(site: Site, some: Sequence[torch.Tensor], call: Callable[..., Any], **options: Any) -> bool:
    """Compares the op with its reference on some rows, if the site asks for it, and returns whether the op is off.

    Args:
        some: the hidden states of these rows, the student's and the teacher's.
        call: calls a function with the other tensors of both heads: weight, bias, and those of the teacher.
    """

    def each(function: Callable[..., Any], **backend: Any) -> Any:
        x, teacher_x = some

        def loss(w: Any, b: Any, teacher_w: Any, teacher_b: Any) -> Any:
            return function(x, w, teacher_x, teacher_w, b, teacher_b, reduction="none", **options, **backend)

        return call(loss)

    return differs(
        site, lambda: each(linear_divergence_reference), lambda: each(linear_divergence, backend=site.backend)
    )


def _some(mask: torch.Tensor, *hidden: torch.Tensor) -> list[torch.Tensor]:
    """Returns the first selected rows of hidden states."""
    rows = torch.nonzero(mask.reshape(-1)).squeeze(1)[:ROWS]
    return [each.detach().reshape(-1, each.shape[-1])[rows] for each in hidden]


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
    if site.look is not None and _differs(
        site, _some(mask, x, teacher_x), lambda loss: loss(weight, bias, teacher_weight, teacher_bias), **options
    ):
        return original(*args, **kwargs)
    site.ran += 1
    out = linear_divergence(
        x, weight, teacher_x, teacher_weight, bias, teacher_bias, mask=mask, num_items=a.num_items_in_batch,
        outputs=("entropy",), backend=site.backend, **options,
    )  # fmt: skip
    assert isinstance(out, LinearDivergenceOutput)
    assert out.entropy is not None
    return out.divergence, out.entropy.detach().sum(), mask.sum()


def _is(trainer: Any, module: str, name: str) -> bool:
    """Whether a trainer is of a class of TRL's, in a module that is imported if it is."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(trainer, cls)


def _original(trainer: Any) -> Any:
    """Returns TRL's method that computes the loss, None for another trainer, or why it is not served."""
    if not _is(trainer, _MODULE, _CLASS) or _is(trainer, *_OF_SERVERS):
        return None
    module = sys.modules[_MODULE]
    base = getattr(module, _CLASS)
    function = getattr(module, _FUNCTION, None)
    if function is None or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        version = importlib.metadata.version("trl")
        return f"TRL {version} computes the divergence of {_CLASS} in another way: the op linear_divergence is not used"
    method = vars(type(trainer)).get(_METHOD) or getattr(type(trainer), _METHOD)
    if method is not vars(base).get(_METHOD) or _METHOD in vars(trainer):
        return f"{type(trainer).__name__} has a {_METHOD} of its own: the op linear_divergence is not used"
    return method


def _no_divergence(a: Any) -> str | None:
    """Returns why the op cannot compute a divergence of logits, or None."""
    student, teacher = a.student_logits, a.teacher_logits
    if getattr(a, "logits_are_probs", False):
        return "probabilities"
    if a.labels is None or a.reduction not in _REDUCTIONS:
        return "all positions, or a mean over the vocabulary"
    if not all(isinstance(t, PromisedLogits) and not t.settled for t in (student, teacher)):
        return "logits that exist already"
    if student.shape != teacher.shape or a.labels.shape != student.shape[:-1]:
        return "logits of two shapes"
    mine, its = student.place.call, teacher.place.call
    return (of_whole_heads(mine, its) if _is_of_some(a) else None) or mine.unlike(its)


def _is_of_some(a: Any) -> bool:
    """Whether a divergence of logits is one on some tokens of the vocabulary."""
    return bool(0 < getattr(a, "top_k", 0) < a.student_logits.shape[-1])


def _loss_of_logits(site: Site, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces TRL's `generalized_jsd_loss`: same arguments, same result."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    a = types.SimpleNamespace(**given.arguments)
    reason = site.off or _no_divergence(a)
    if reason is not None:
        site.declined[reason] += 1
        return original(*args, **kwargs)
    student, teacher = a.student_logits.place, a.teacher_logits.place
    reduction = {"reduction": "mean" if a.num_items_in_batch is not None else _REDUCTIONS[a.reduction],
                 "num_items": a.num_items_in_batch}  # fmt: skip

    def again(logits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = original(
            **{**given.arguments, "student_logits": logits, "teacher_logits": teacher.values()}
        )
        return found

    if _is_of_some(a):
        support = Support(0 if a.beta == 1 else a.top_k, 0 if a.beta == 0 else a.top_k)
        some = {"beta": float(a.beta), "add_tail": a.add_tail, "temperature": a.temperature}
        of_some = loss_on_support(site, a.student_logits, a.teacher_logits, a.labels, support, some, reduction, again)
        return original(*args, **kwargs) if of_some is None else of_some
    of_teacher = {f"teacher_{name}": value for name, value in teacher.transform.options.items()}
    options = {"beta": float(a.beta), "temperature": a.temperature, **student.transform.options, **of_teacher}
    mask = a.labels != -100
    both = functools.partial(student.call.with_teacher, teacher.call)
    # The reference takes whole weights.
    looks = site.look is not None and of_whole_heads(student.call, teacher.call) is None
    if looks and _differs(site, _some(mask, student.hidden, teacher.hidden), both, **options):
        return original(*args, **kwargs)
    options |= reduction

    def fused() -> torch.Tensor:
        def loss(w: Any, b: Any, teacher_w: Any, teacher_b: Any) -> Any:
            return linear_divergence(
                student.hidden, w, teacher.hidden, teacher_w, b, teacher_b, mask=mask, backend=site.backend, **options
            )

        found: torch.Tensor = both(loss)
        return found

    site.ran += 1
    found: torch.Tensor = a.student_logits.loss(fused, again)
    return found.to(torch.float32 if autocasts(mask) else a.student_logits.dtype)


def _other_loss(trainer: Any) -> str | None:
    """Returns which loss a trainer computes instead of the divergence of whole distributions, or None."""
    given = vars(trainer)
    if given.get("use_uld_loss") and given.get("teacher_tokenizer") is not None:
        return "probabilities of two tokenizers, sorted by size (ULD)"
    if given.get("distillation_objective") == "iw_opd":
        return "log-probabilities of the sampled tokens, by importance weights"
    return None


def _function_of_logits(trainer: Any) -> Any:
    """Returns TRL's function of two models' logits, None for another trainer, or why it is not served."""
    for (name, cls), parameters in _OF_LOGITS.items():
        if not _is(trainer, name, cls):
            continue
        base = getattr(sys.modules[name], cls)
        function = inspect.getattr_static(type(trainer), _JSD, None)
        if function is not vars(base).get(_JSD) or _JSD in vars(trainer):
            return f"{type(trainer).__name__} has a {_JSD} of its own: the op linear_divergence is not used"
        if not isinstance(function, staticmethod) or tuple(inspect.signature(function).parameters) != parameters:
            version = importlib.metadata.version("trl")
            return (
                f"TRL {version} computes the divergence of {cls} in another way: the op linear_divergence is not used"
            )
        if (other := _other_loss(trainer)) is not None:
            return f"the loss of {cls} compares {other}: the op linear_divergence is not used"
        if cls == _SOME_TOKENS and (reason := unserved(trainer, base, cls)) is not None:
            return f"{reason}: the op linear_divergence is not used"
        return function.__func__
    return None


def _serve_logits(trainer: Any, undo: Undo, backend: str | None) -> Site | str | None:
    function = _function_of_logits(trainer)
    if function is None or isinstance(function, str):
        return function
    site = _site(trainer, backend, _JSD)
    serve_methods(trainer, undo, site)
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def promised(*args: Any, **kwargs: Any) -> Any:
        with promised_by_teachers():
            return compute_loss(*args, **kwargs)

    undo.set_attribute(trainer, "compute_loss", promised)
    undo.set_attribute(trainer, _JSD, functools.partial(_loss_of_logits, site, function))
    return site


def _serve_server(trainer: Any, undo: Undo, backend: str | None) -> Site | str:
    module, name = _OF_SERVERS
    reason = unserved(trainer, getattr(sys.modules[module], name), name)
    if reason is not None:
        return f"{reason}: the op linear_divergence is not used"
    site = _site(trainer, backend, "compute_loss")
    serve_methods(trainer, undo, site)
    return site


def _site(trainer: Any, backend: str | None, path: str) -> Site:
    where = next(trainer.model.parameters()).device
    served = backends.explain("linear_divergence", where, backend)[0]
    return Site("linear_divergence", type(trainer), (), backend, served=served, paths=[path], late=True)


def serve_divergence(trainer: Any, undo: Undo, backend: str | None, ops: Sequence[str] | None) -> Site | str | None:
    """Has the loss of a trainer computed by the op, if it is a divergence of two heads.

    Args:
        trainer: any trainer.
        undo: takes the change back.
        backend: the override that the callback was called with.
        ops: the ops that it was called with: `DistillationTrainer` is served with `linear_logprob`, and the trainers
            that compute logits with `linear_cross_entropy`, which promises them.

    Returns:
        the site that counts the calls, None for another trainer, or why this one is not served.
    """
    if _is(trainer, *_ASYNC):
        return _ASYNC_OWN
    method = _original(trainer) if ops is None or "linear_logprob" in ops else None
    if method is None and (ops is None or "linear_cross_entropy" in ops):
        serve = _serve_server if _is(trainer, *_OF_SERVERS) else _serve_logits
        return serve(trainer, undo, backend)
    if method is None or isinstance(method, str):
        return method
    site = _site(trainer, backend, _METHOD)
    names = {**method.__globals__, _FUNCTION: functools.partial(_divergence_loss, site, method.__globals__[_FUNCTION])}
    ours = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    ours.__kwdefaults__ = method.__kwdefaults__
    undo.set_attribute(trainer, _METHOD, types.MethodType(functools.wraps(method)(ours), trainer))
    return site


class DistillationRehearsal(nn.Module):
    """The loss of a `DistillationTrainer` on a batch of ids, as a model of it: with ids that are fake tensors, the
    kernels of a step can be compiled before the first batch (`warmup`).

    Attributes:
        student, teacher: the trainer's models, whose parameters this module has.
    """

    def __init__(self, trainer: Any, site: Site, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, trainer.teacher_model
        self._trainer, self._site = trainer, site

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Returns an object with the loss; the second half of each row is its completion. The site counts no call, and
        compares none. The bodies are given no mask, which would have no numbers: all rows are full."""
        prompts, completions = input_ids.chunk(2, 1)
        inputs = {
            "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
        }  # fmt: skip
        site, undo = self._site, Undo()
        body, ran = getattr(self._trainer, _BODY), site.ran

        def of_full_rows(model: Any, ids: torch.Tensor, mask: torch.Tensor, *args: Any) -> torch.Tensor:
            hidden: torch.Tensor = body(model, ids, None, *args)
            return hidden

        try:
            undo.set_attribute(self._trainer, _BODY, of_full_rows)
            undo.set_attribute(site, "look", None)
            loss = getattr(self._trainer, _METHOD)(self.student, inputs, completions.numel())[0]
        finally:
            undo.restore()
            site.ran = ran
        return types.SimpleNamespace(loss=loss)


def rehearsal(trainer: Any, site: Site, student: nn.Module) -> DistillationRehearsal | None:
    """Returns a model that rehearses a trainer's loss; None for a trainer of `experimental`, which computes logits."""
    return DistillationRehearsal(trainer, site, student) if site.paths == [_METHOD] else None
