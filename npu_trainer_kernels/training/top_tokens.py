"""Serves TRL's losses on some tokens of the vocabulary by `ops.linear_topk_divergence`: IW-OPD with `loss_top_k`, and
IW-OPD and `ServerDistillationTrainer` with a server for the teacher.

Of two models, the support is the most probable tokens of one or of both (`top_log_probs`), and the logits of both are
promises. A server sends ids and log-probabilities. TRL's `compute_loss` then calls `log_softmax` on the student's
logits, and two methods of the trainer on the result; while the callback trains, the trainer has a `compute_loss` with
the same code, in which `log_softmax` returns a promise as it is, and methods of its own that compute the loss of it.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..ops.head import linear_topk_divergence, linear_topk_divergence_reference, top_log_probs
from ..ops.host import autocasts
from ..patching.head import PromisedLogits
from ..patching.patch import Site
from ..patching.undo import Undo

__all__ = ["ROWS", "Support", "differs", "loss_on_support", "of_whole_heads", "serve_methods", "unserved"]

ROWS = 64
"""The number of rows on which the op is compared with TRL's own function, once."""
_LOCAL, _SERVER_FORWARD = "_compute_local_sparse_top_1_divergence_loss", "_compute_server_forward_kl_loss"
_SERVER_TOP_1, _COMPUTE = "_compute_server_sparse_top_1_divergence_loss", "compute_loss"
_PARAMETERS = {
    _LOCAL: ("self", "student_logits", "teacher_logits", "completion_tokens", "labels", "num_items_in_batch"),
    _SERVER_FORWARD: ("self", "teacher_result", "student_log_probs", "labels"),
    _SERVER_TOP_1: ("self", "teacher_result", "student_log_probs", "completion_tokens", "labels"),
    _COMPUTE: ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
}
"""The methods that a trainer gets in place of TRL's, and their parameters."""
_CALLED = ("_compute_sparse_top_1_divergence_loss", "_get_reverse_kl_top_1_tokens", "_reduce_divergence_loss")
"""The methods that the methods of `_PARAMETERS` call."""
_Heads = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Support(NamedTuple):
    """The tokens that two models are compared on: the `of_teacher` most probable ones of the teacher, the `of_student`
    most probable ones of the student, and one token each, `[B, T]`, or None."""

    of_teacher: int
    of_student: int
    tokens: torch.Tensor | None = None


def differs(site: Site, own: Callable[[], Any], ours: Callable[[], Any]) -> bool:
    """Compares the op with its reference, if the site asks for it, and returns whether the op is off."""
    if site.look is not None:
        site.look(site, own, ours)
    if site.off is not None:
        site.declined[site.off] += 1
    return site.off is not None


def of_whole_heads(*calls: Any) -> str | None:
    """Returns why the heads of some calls have no whole weights, which the ops here need, or None."""
    return next((call.sharded for call in calls if call.sharded is not None), None)


def _selected(labels: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the tokens that have a label."""
    return torch.nonzero(labels.reshape(-1) != -100).squeeze(1)


def _loss(
    site: Site, student: PromisedLogits, labels: torch.Tensor, with_heads: Callable[..., Any], taught: _Heads,
    options: dict[str, Any], reduction: dict[str, Any], again: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:  # fmt: skip
    """Returns the loss of a promise and of what a teacher says about its rows, or None if the op is off.

    Args:
        with_heads: calls a function with the weight and bias of the student's head, and of the teacher's if it has one.
        taught: called with the rows, whether to use full logits, and these tensors; returns the rows' ids and the
            teacher's log-probabilities.
        options, reduction: the op's options.
        again: computes the same loss from ordinary logits of the student.
    """
    hidden = student.place.hidden.reshape(-1, student.place.hidden.shape[-1])
    rows = _selected(labels)
    options = {**options, **student.place.transform.options}

    def of(function: Callable[..., Any], rows: torch.Tensor, exact: bool, **more: Any) -> Any:
        def loss(w: Any, b: Any, *teacher: Any) -> Any:
            ids, log_probs = taught(rows, exact, w, b, *teacher)
            return function(hidden.index_select(0, rows), w, ids, log_probs, b, **options, **more)

        return with_heads(loss)

    if site.look is not None:
        some = rows[:ROWS]

        def own() -> Any:
            return of(linear_topk_divergence_reference, some, True, reduction="none")

        def ours() -> Any:
            return of(linear_topk_divergence, some, False, reduction="none", backend=site.backend)

        with torch.no_grad():
            if differs(site, own, ours):
                return None
    site.ran += 1
    found: torch.Tensor = student.loss(
        lambda: of(linear_topk_divergence, rows, False, backend=site.backend, **reduction), again
    )
    return found.to(torch.float32 if autocasts(labels) else student.dtype)


def loss_on_support(
    site: Site, student: PromisedLogits, teacher: PromisedLogits, labels: torch.Tensor, support: Support,
    options: dict[str, Any], reduction: dict[str, Any], again: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:  # fmt: skip
    """Returns the divergence of two promises on a support, or None if the op is off; see `_loss`."""
    mine, its = student.place, teacher.place
    temperature = options["temperature"]
    x, teacher_x = (t.detach().reshape(-1, t.shape[-1]) for t in (mine.hidden, its.hidden))

    def taught(rows: torch.Tensor, exact: bool, w: Any, b: Any, teacher_w: Any, teacher_b: Any) -> Any:
        others = None if support.tokens is None else support.tokens.reshape(-1, 1)[rows]
        if support.of_student:
            others, _ = top_log_probs(
                x, w, b, support.of_student, others, rows=rows, temperature=temperature, backend=site.backend,
                **mine.transform.options,
            )  # fmt: skip
        ids, log_probs = top_log_probs(
            teacher_x, teacher_w, teacher_b, support.of_teacher, others, rows=rows, temperature=temperature,
            backend=site.backend, **its.transform.options,
        )  # fmt: skip
        if exact:
            logits = its.transform(functional.linear(teacher_x[rows], teacher_w, teacher_b).float())
            log_probs = torch.log_softmax(logits / temperature, -1).gather(-1, ids)
        return ids, log_probs

    with_heads = functools.partial(mine.call.with_teacher, its.call)
    return _loss(site, student, labels, with_heads, taught, options, reduction, again)


# ---------------------------------------------------------------------------------------------------------------------
# Methods of the trainers
# ---------------------------------------------------------------------------------------------------------------------


def _methods_of(trainer: Any) -> list[str]:
    """Returns the names of the methods, beside `generalized_jsd_loss`, that compute the loss of this trainer with any
    values of the options that TRL reads at each micro-batch (`beta`, `loss_top_k`)."""
    given = vars(trainer)
    if given.get("teacher_client") is not None:
        return [_COMPUTE, _SERVER_TOP_1, _SERVER_FORWARD]
    return [_LOCAL] if "loss_top_k" in given else []


def unserved(trainer: Any, base: type, name: str) -> str | None:
    """Returns which methods of a trainer are not TRL's of this version, or None."""
    for method in _methods_of(trainer):
        found = inspect.getattr_static(type(trainer), method, None)
        if found is not vars(base).get(method) or method in vars(trainer):
            return f"{type(trainer).__name__} has a {method} of its own"
        if found is None or tuple(inspect.signature(found).parameters) != _PARAMETERS[method]:
            return f"TRL computes the loss of {name} in another way, in {method}"
    for method in _CALLED if _methods_of(trainer) else ():
        if inspect.getattr_static(trainer, method, None) is not vars(base).get(method):
            return f"{type(trainer).__name__} has a {method} of its own"
    return None


def _promised(logits: Any) -> bool:
    return isinstance(logits, PromisedLogits) and not logits.settled


def _local(site: Site, trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces TRL's loss on the teacher's most probable token and on one that the student has."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    a = types.SimpleNamespace(**given.arguments)
    student, teacher = a.student_logits, a.teacher_logits
    if not (_promised(student) and _promised(teacher)):
        reason: str | None = "logits that exist already"
    else:
        mine, its = student.place.call, teacher.place.call
        reason = site.off or of_whole_heads(mine, its) or mine.unlike(its)
    if reason is not None:
        site.declined[reason] += 1
        return original(*args, **kwargs)
    takes_best = trainer.reverse_kl_top_1_mode == "argmax"
    found = loss_on_support(
        site, student, teacher, a.labels,
        Support(int(trainer.beta < 1), int(takes_best), None if takes_best else a.completion_tokens),
        _options(trainer), {"num_items": a.num_items_in_batch},
        lambda logits: original(
            **{**given.arguments, "student_logits": logits, "teacher_logits": teacher.place.values()}
        ),
    )  # fmt: skip
    return original(*args, **kwargs) if found is None else found


def _options(trainer: Any) -> dict[str, Any]:
    """Returns the op's options that the trainer's attributes hold."""
    return {"beta": float(trainer.beta), "add_tail": trainer.loss_add_tail, "temperature": trainer.temperature}


def _served(site: Site, trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces both of TRL's losses of a server's log-probabilities. The student's log-probabilities are logits divided
    by the temperature if they are a promise, which `log_softmax` has returned as it is."""
    given = inspect.signature(original).bind(*args, **kwargs)
    a = types.SimpleNamespace(**given.arguments)
    student, sent, required = a.student_log_probs, a.teacher_result, a.labels != -100
    if not isinstance(student, PromisedLogits):
        return original(*args, **kwargs)

    def of_trl(logits: torch.Tensor) -> Any:
        return original(**{**given.arguments, "student_log_probs": functional.log_softmax(logits, dim=-1)})

    ids, log_probs = sent["topk_token_ids"], sent["topk_logprobs"]
    reason = "logits that exist already" if student.settled else site.off or student.place.call.sharded
    if trainer.beta > 0:
        # The tokens that were sampled, and the teacher's most probable ones before them.
        sampled, of_sampled = a.completion_tokens.unsqueeze(-1), sent["actual_logprobs"].unsqueeze(-1)
        both = trainer.beta < 1
        ids = torch.cat([ids, sampled], -1) if both else sampled
        log_probs = torch.cat([log_probs, of_sampled], -1) if both else of_sampled
        if not log_probs[required].isfinite().all():
            reason = reason or "log-probabilities that the server has not sent"  # TRL raises
    if reason is not None:
        site.declined[reason] += 1
        return of_trl(student)

    def taught(rows: torch.Tensor, exact: bool, *heads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return ids.reshape(-1, ids.shape[-1])[rows], log_probs.reshape(-1, ids.shape[-1])[rows]

    # The promise was divided by the temperature already.
    options = {**_options(trainer), "temperature": 1.0}
    found = _loss(site, student, a.labels, student.place.call.with_head, taught, options, {}, of_trl)
    return of_trl(student) if found is None else found


def _log_softmax(trainer: Any, input: Any, dim: int | None = None, **others: Any) -> Any:
    """Returns a promise as it is for the losses of `_served`; TRL calls them while the trainer has a server."""
    if _promised(input) and dim == -1 and not others and trainer.teacher_client is not None:
        return input
    return functional.log_softmax(input, dim, **others)


def _with_promises(trainer: Any, method: Any) -> Any:
    """Returns the same function with this `log_softmax`; a decorator around it, which TRL's profiling is, stays."""
    inside = getattr(method, "__wrapped__", None)
    if inside is None:
        ours: Any = functools.partial(_log_softmax, trainer)
        names = {**method.__globals__, "F": types.SimpleNamespace(**vars(functional) | {"log_softmax": ours})}
        code, cells = method.__code__, method.__closure__
    else:
        names, code = method.__globals__, method.__code__
        ours = _with_promises(trainer, inside)
        cells = tuple(types.CellType(ours) if c.cell_contents is inside else c for c in method.__closure__)
    return functools.wraps(method)(types.FunctionType(code, names, method.__name__, method.__defaults__, cells))


def serve_methods(trainer: Any, undo: Undo, site: Site) -> None:
    """Gives a trainer methods of its own in place of `_methods_of`."""
    for name in _methods_of(trainer):
        method = getattr(type(trainer), name)
        if name == _COMPUTE:
            made: Any = types.MethodType(_with_promises(trainer, method), trainer)
        else:
            loss = _local if name == _LOCAL else _served
            made = functools.partial(loss, site, trainer, functools.partial(method, trainer))
        undo.set_attribute(trainer, name, made)
