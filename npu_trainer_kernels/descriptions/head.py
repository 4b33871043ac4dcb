"""The LM head and its losses: cross-entropy, log-probabilities, distillation, GRPO."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops, tiling
from ..device import DeviceSpec
from ..ops.head import GrpoTokens, token_losses
from .base import (
    BACKEND,
    VOCABULARIES,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    ModelShapes,
    Outputs,
    Tensors,
    Work,
    Workload,
    randn,
    run_backward,
)

__all__ = ["DIVERGENCE_BETAS", "FORMS", "GATE", "GRPO_BETA", "GRPO_EPSILON", "grpo_lengths", "grpo_terms"]


GRPO_BETA, GRPO_EPSILON = 0.04, 0.2


_GRPO = ops.GrpoOptions(loss_type="bnpo", beta=GRPO_BETA, epsilon_low=GRPO_EPSILON, epsilon_high=GRPO_EPSILON)


def _head_sizes(model: ModelShapes, tokens: int) -> dict[str, int]:
    return {"BT": tokens, "H": model.hidden, "V": model.vocabulary}


def _head_weight(work: Workload, device: torch.device) -> Tensor:
    # Scaled so that the logits have a standard deviation near one.
    return randn(work, device, work.sizes["V"], work.sizes["H"], scale=work.sizes["H"] ** -0.5)


def _build_cross_entropy(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    x = randn(work, device, s["BT"], s["H"])
    target = torch.randint(s["V"], (s["BT"],), device=device)
    return Inputs({"x": x, "weight": _head_weight(work, device), "target": target}, ("x", "weight"))


def _cross_entropy_reference(t: Tensors) -> Outputs:
    return ops.linear_cross_entropy_reference(t["x"], t["weight"], t["target"])


def _cross_entropy(backend: str | None) -> Function:
    return lambda t: ops.fused_linear_cross_entropy(t["x"], t["weight"], t["target"], backend=backend)  # type: ignore[return-value]


def _build_logprob(work: Workload, device: torch.device) -> Inputs:
    inputs = _build_cross_entropy(work, device)
    inputs.tensors["ids"] = inputs.tensors.pop("target")
    inputs.grads = (torch.randn(work.sizes["BT"], device=device) / work.sizes["BT"],)
    return inputs


def _logprob_reference(t: Tensors) -> Outputs:
    return _log_prob_eager(t["x"], t["weight"], t["ids"])


def _logprob(backend: str | None) -> Function:
    return lambda t: ops.linear_logprob(t["x"], t["weight"], t["ids"], backend=backend).log_prob


def grpo_lengths(batch: int, length: int) -> Tensor:
    """Returns lengths of completions, 60% to 100% of `length` and 80% on average."""
    return (torch.linspace(0.6, 1.0, batch, dtype=torch.float64) * length).round().long()


def _build_grpo(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    shape = (s["B"], s["T"])
    x = randn(work, device, *shape, s["H"])
    weight = _head_weight(work, device)
    ids = torch.randint(s["V"], shape, device=device)
    mask = torch.arange(s["T"], device=device) < grpo_lengths(*shape).to(device).unsqueeze(1)
    with torch.no_grad():
        near = torch.stack([_log_prob_eager(x[b], weight, ids[b]) for b in range(s["B"])])
    tensors = {
        "x": x,
        "weight": weight,
        "ids": ids,
        "mask": mask,
        "advantages": torch.randn(s["B"], device=device),
        "old": near + 0.1 * torch.randn(shape, device=device),
        "ref": near + 0.1 * torch.randn(shape, device=device),
    }
    return Inputs(tensors, ("x", "weight"))


def _log_prob_eager(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Computes log-probabilities as a trainer without a fused head does. The ops' references would be a slower baseline
    and make all other implementations look better, because they compute more statistics."""
    logits = torch.nn.functional.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def grpo_terms(log_prob: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """Computes the loss of each token: clipped policy gradient plus the KL penalty."""
    unread = log_prob.new_empty(0)  # fields that a token-level loss does not read
    tokens = GrpoTokens(advantages, unread, unread, old, ref, None, None, None, unread, unread)
    return token_losses(log_prob, tokens, _GRPO)


def _grpo_reference(t: Tensors) -> Outputs:
    log_prob = _log_prob_eager(t["x"], t["weight"], t["ids"])
    terms = grpo_terms(log_prob, t["old"], t["ref"], t["advantages"].unsqueeze(1))
    return (terms * t["mask"]).sum() / t["mask"].sum()


def _grpo(backend: str | None) -> Function:
    def call(t: Tensors) -> Outputs:
        return ops.fused_linear_grpo_loss(
            t["x"], t["weight"], t["ids"], t["advantages"], completion_mask=t["mask"], old_log_prob=t["old"],
            ref_log_prob=t["ref"], options=_GRPO, backend=backend,
        ).loss  # fmt: skip

    return call


DIVERGENCE_BETAS = {"linear_divergence": 0.5, "linear_divergence_kl": 1.0}
"""The betas of the forms: the mixture in equal parts, whose formula has most to compute, and KL(student || teacher),
which is the default of TRL's DistillationTrainer."""


def _build_divergence(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    wide = s.get("H2", s["H"])
    tensors = {
        "x": randn(work, device, s["BT"], s["H"]),
        "weight": _head_weight(work, device),
        "teacher_x": randn(work, device, s["BT"], wide),
        "teacher_weight": randn(work, device, s["V"], wide, scale=wide**-0.5),
    }
    return Inputs(tensors, ("x", "weight"))


def _divergence_reference(beta: float) -> Function:
    def call(t: Tensors) -> Outputs:
        return ops.linear_divergence_reference(  # type: ignore[return-value]
            t["x"], t["weight"], t["teacher_x"], t["teacher_weight"], beta=beta
        )

    return call


def _divergence(beta: float) -> Callable[[str | None], Function]:
    def ours(backend: str | None) -> Function:
        def call(t: Tensors) -> Outputs:
            return ops.linear_divergence(  # type: ignore[return-value]
                t["x"], t["weight"], t["teacher_x"], t["teacher_weight"], beta=beta, backend=backend
            )

        return call

    return ours


def _divergence_work(case: Workload) -> dict[str, Work]:
    rows, hidden, vocab = _head_products(case)
    one = 2.0 * rows * hidden * vocab
    # The teacher has a size of its own if the sizes have an H2.
    forward = one + 2.0 * rows * case.sizes.get("H2", hidden) * vocab
    return {"forward": Work(forward), "backward": Work(2 * one), "both": Work(forward + 2 * one)}


def _head_products(case: Workload) -> tuple[int, int, int]:
    s = case.sizes
    return s["BT"], s["H"], s["V"]


def _grpo_products(case: Workload) -> tuple[int, int, int]:
    s = case.sizes
    return int(grpo_lengths(s["B"], s["T"]).sum()), s["H"], s["V"]


def _head_work(products: Callable[[Workload], tuple[int, int, int]]) -> Callable[[Workload], dict[str, Work]]:
    def work(case: Workload) -> dict[str, Work]:
        rows, hidden, vocab = products(case)
        one = 2.0 * rows * hidden * vocab
        return {"forward": Work(one), "backward": Work(2 * one), "both": Work(3 * one)}

    return work


def _cross_entropy_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    target = inputs.tensors["target"]
    return None, F.cross_entropy(logits, target[rows], reduction="sum") / target.numel()


def _logprob_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    log_prob = -F.cross_entropy(logits, inputs.tensors["ids"][rows], reduction="none")
    return log_prob.detach(), (log_prob * inputs.grads[0][rows]).sum()


def _grpo_rows(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    t = inputs.tensors
    log_prob = -F.cross_entropy(logits, t["ids"].flatten()[rows], reduction="none")
    advantages = t["advantages"].unsqueeze(1).expand_as(t["mask"]).flatten()[rows]
    terms = grpo_terms(log_prob, t["old"].flatten()[rows], t["ref"].flatten()[rows], advantages)
    return None, (terms * t["mask"].flatten()[rows]).sum() / t["mask"].sum()


def _divergence_rows(beta: float) -> Callable[[Tensor, Inputs, Tensor], tuple[Tensor | None, Tensor]]:
    def row_truth(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        t = inputs.tensors
        with torch.no_grad():
            x, weight = t["teacher_x"][rows].to(logits.dtype), t["teacher_weight"].to(logits.dtype)
            log_q = F.linear(x, weight).log_softmax(-1)
        log_p = logits.log_softmax(-1)
        if beta == 1.0:
            return None, F.kl_div(log_q, log_p, reduction="sum", log_target=True) / t["x"].shape[0]
        log_m = torch.log(beta * log_q.exp() + (1 - beta) * log_p.exp())
        of_q = F.kl_div(log_m, log_q, reduction="sum", log_target=True)
        of_p = F.kl_div(log_m, log_p, reduction="sum", log_target=True)
        return None, (beta * of_q + (1 - beta) * of_p) / t["x"].shape[0]

    return row_truth


FORMS = {
    "linear_cross_entropy": Form(
        _build_cross_entropy, _cross_entropy_reference, _cross_entropy, _head_sizes,
        _head_work(_head_products), _head_products, _cross_entropy_rows,
    ),
    "linear_logprob": Form(
        _build_logprob, _logprob_reference, _logprob, _head_sizes,
        _head_work(_head_products), _head_products, _logprob_rows,
    ),
    **{
        name: Form(
            _build_divergence, _divergence_reference(beta), _divergence(beta), _head_sizes, _divergence_work,
            row_truth=_divergence_rows(beta),
        ) for name, beta in DIVERGENCE_BETAS.items()
    },
    "fused_linear_grpo_loss": Form(
        _build_grpo, _grpo_reference, _grpo,
        lambda m, n: {"B": 8, "T": n // 8, "H": m.hidden, "V": m.vocabulary},
        _head_work(_grpo_products), _grpo_products, _grpo_rows,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


# Statistics and gradient together: 2.05 reads and 1 write of a row of logits.
_HEAD_LIMIT = 3.05 / 3


# The kernels see logits: any hidden size will do.
_HEAD_HIDDEN = 16


def _head_bytes(t: GateTensors, rows: int, vocabulary: int) -> Mapping[str, int]:
    row = rows * vocabulary * t.itemsize
    return {"_row_statistics_kernel": row, "_row_gradient_kernel": 2 * row}


def _cross_entropy_gate(has_weights: bool = False, **options: Any) -> Call:
    def call(t: GateTensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        x, weight = t.floats(rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
        class_weights = t.floats(vocabulary, dtype=torch.float32, grad=False) if has_weights else None
        everything = torch.arange(rows, device=t.where)  # `rows` is given, because no values can be read on meta
        result = ops.fused_linear_cross_entropy(
            x, weight, t.ids(rows, below=vocabulary),
            rows=everything, class_weights=class_weights, backend=BACKEND, **options,
        )  # fmt: skip
        run_backward(result if isinstance(result, torch.Tensor) else result.loss)
        return _head_bytes(t, rows, vocabulary)

    return call


def _logprob_gate(**options: Any) -> Call:
    def call(t: GateTensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        x, weight = t.floats(rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
        result = ops.linear_logprob(x, weight, t.ids(rows, below=vocabulary), backend=BACKEND, **options)
        run_backward(result.log_prob, result.entropy, result.mean_logit)
        return _head_bytes(t, rows, vocabulary)

    return call


def _divergence_gate(**options: Any) -> Call:
    def call(t: GateTensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        x, weight = t.floats(rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
        teacher = t.floats(rows, _HEAD_HIDDEN, grad=False), t.floats(vocabulary, _HEAD_HIDDEN, grad=False)
        ids = t.ids(rows, below=vocabulary)
        result = ops.linear_divergence(x, weight, *teacher, ids=ids, backend=BACKEND, **options)
        if isinstance(result, torch.Tensor):
            run_backward(result)
        else:
            run_backward(result.divergence, result.log_prob, result.entropy)
        row = rows * vocabulary * t.itemsize
        # A student's and a teacher's row are too long for the chip: the divergence is a sum over both, which the
        # gradient needs, unless that is p - q.
        both = 3 * row if options["beta"] == 0 else 5 * row
        return {"_row_statistics_kernel": 2 * row, "_row_divergence_kernel": both}

    return call


def _grpo_gate(fused: bool, **options: Any) -> Call:
    """With a KL, every number that a token can have is given."""

    def call(t: GateTensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        ids = t.ids(1, rows, below=vocabulary)
        numbers = ["old_log_prob", *(("ref_log_prob", "importance_ratio") if "beta" in options else ())]
        given: dict[str, Any] = {
            **{name: torch.zeros(1, rows) for name in numbers},
            "options": ops.GrpoOptions(**options),
            "temperature": 0.9,
            "entropy": True,
            "backend": BACKEND,
        }
        if fused:
            x, weight = t.floats(1, rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
            result = ops.fused_linear_grpo_loss(x, weight, ids, torch.ones(1), **given)
        else:
            result = ops.grpo_loss(t.floats(1, rows, vocabulary), ids, torch.ones(1), **given)
        run_backward(result.loss)
        # Of each token also log_prob, advantage and weight are read, its part of the loss and its gradient written.
        return {**_head_bytes(t, rows, vocabulary), "_token_kernel": (len(numbers) + 5) * 4 * rows}

    return call


def _head(op: str, call: Call, max_traffic: float | None = _HEAD_LIMIT) -> GateEntry:
    minima = _MINIMA.get(op, {})
    unserved = _divergence_unserved if op.startswith("linear_divergence") else None
    return GateEntry(
        op, VOCABULARIES, "vocabulary", call, share=2, max_traffic=max_traffic, minima=minima, unserved=unserved
    )


def _divergence_unserved(size: int, itemsize: int, spec: DeviceSpec) -> str | None:
    return tiling.divergence_unserved(spec)


def _head_of_values(op: str, call: Call, sizes: tuple[int, ...] = VOCABULARIES) -> GateEntry:
    return GateEntry(op, sizes, "vocabulary", call, 16, share=2, max_traffic=_HEAD_LIMIT, reads_values=True)


_EVERYTHING: dict[str, Any] = {
    "softcap": 30.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-4,
    "outputs": ("token_accuracy", "predicted_ids"),
}


_CORRECTED_KL: dict[str, Any] = {"beta": 0.1, "bias_corrected_kl": True}


# Vector instructions per element, counted by hand. A logit is converted to fp32, compared with the running maximum of
# its lane, shifted by it, raised and added up; a softcap is 2 outer sigmoid(2 inner x) - outer.
_STATISTICS, _GRADIENT = "_row_statistics_kernel", "_row_gradient_kernel"


_SOFTCAP = "scale, exp, + 1, divide, - outer"


# By entry and kernel.
_MINIMA: dict[str, dict[str, tuple[int, str]]] = {
    "linear_cross_entropy": {_STATISTICS: (5, "convert, maximum, subtract, exp, sum")},
    "linear_cross_entropy, label smoothing, z-loss": {_STATISTICS: (6, "plain, and the sum of logits")},
    "linear_logprob, entropy": {_STATISTICS: (8, "plain, scale by the temperature, p z and its sum")},
    "linear_cross_entropy, accuracy": {_STATISTICS: (8, "plain, compare, select a place, least place")},
    "linear_cross_entropy, softcap": {
        _STATISTICS: (10, f"plain and the softcap: {_SOFTCAP}"),
        # Of w = z + outer, so that nothing is taken from it: 1 - (z / outer)^2 is w (2 outer - w) / outer^2.
        _GRADIENT: (12, "convert, scale, exp, + 1, divide, subtract, exp, scale, times w (2 outer - w) (3), convert"),
    },
    "linear_logprob, everything": {
        _STATISTICS: (18, "softcap (10), p z and its sum, the sum of logits, p^2 and its sum, the maximum's place (3)"),
    },
}


GATE: tuple[GateEntry, ...] = (
    _head("linear_cross_entropy", _cross_entropy_gate()),
    _head("linear_cross_entropy, softcap", _cross_entropy_gate(softcap=30.0, logit_scale=0.5)),
    _head("linear_cross_entropy, label smoothing, z-loss", _cross_entropy_gate(label_smoothing=0.1, z_loss=1e-4)),
    _head("linear_cross_entropy, accuracy", _cross_entropy_gate(outputs=("token_accuracy",))),
    # A row of fp32 class weights is read beside each row of logits: to gather those alone that differ from 1, the host
    # would have to wait for their number.
    _head("linear_cross_entropy, class weights", _cross_entropy_gate(True, label_smoothing=0.1), None),
    _head("linear_cross_entropy, everything", _cross_entropy_gate(True, **_EVERYTHING), None),
    _head("linear_logprob", _logprob_gate()),
    _head("linear_logprob, entropy", _logprob_gate(temperature=0.7, outputs=("entropy",))),
    _head("linear_logprob, everything", _logprob_gate(softcap=30.0, temperature=0.7, outputs=(
        "entropy", "is_top1", "mean_logit", "log_sum_sq_probs"))),
    _head("linear_divergence", _divergence_gate(beta=0.5)),
    _head("linear_divergence, forward KL", _divergence_gate(beta=0)),
    _head("linear_divergence, reverse KL", _divergence_gate(beta=1)),
    _head("linear_divergence, everything", _divergence_gate(
        beta=0.5, reduction="none", softcap=30.0, teacher_softcap=30.0, temperature=0.7,
        outputs=("log_prob", "entropy", "teacher_log_prob", "teacher_entropy"))),
    _head_of_values("grpo_loss", _grpo_gate(fused=False)),
    _head_of_values("grpo_loss, fused with the projection", _grpo_gate(fused=True)),
    # What differs is the arithmetic on a token's numbers: one vocabulary will do.
    _head_of_values("grpo_loss, fused, everything", _grpo_gate(True, delta=2.0, **_CORRECTED_KL), VOCABULARIES[:1]),
    _head_of_values("grpo_loss, fused, cispo", _grpo_gate(True, loss_type="cispo", **_CORRECTED_KL), VOCABULARIES[:1]),
    _head_of_values("grpo_loss, fused, sapo", _grpo_gate(True, loss_type="sapo", **_CORRECTED_KL), VOCABULARIES[:1]),
)  # fmt: skip
