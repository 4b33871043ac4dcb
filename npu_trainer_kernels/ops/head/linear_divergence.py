"""Distillation at the LM head: the divergence between a teacher's and a student's next-token distributions, from the
hidden states and heads of both.

For token i, with a head's own softcap, logit scale and temperature,

    z_i = softcap(logit_scale * (x_i W^T + bias)) / temperature
    p_i = softmax(z_i) of the student           q_i = softmax(z'_i) of the teacher

the divergence is the generalised Jensen-Shannon divergence of Agarwal et al., arXiv:2306.13649, equation 1, in the
convention of TRL's `DistillationTrainer`, `GKDTrainer` and `GOLDTrainer`:

    beta = 0       D_i = KL(q_i || p_i) = sum_v q_iv (log q_iv - log p_iv)                   forward KL
    beta = 1       D_i = KL(p_i || q_i) = sum_v p_iv (log p_iv - log q_iv)                   reverse KL
    0 < beta < 1   D_i = beta KL(q_i || m_i) + (1 - beta) KL(p_i || m_i)    with m_i = beta q_i + (1 - beta) p_i

The divergence for beta between 0 and 1 goes to 0 at both ends, so the ends are cases of their own, and not its limits.
The logits are divided by the temperature, and so the gradient with respect to them has a factor 1 / temperature; there
is no factor of temperature^2, as TRL has none. `ops/head/divergence.py` derives the gradient.

Forward has one chunk of each head's logits in memory at a time, and two matrix products. If the result is reduced,
forward also computes the gradients, with two products more, and backward only scales them. Per token, backward computes
the logits again (six products in total), unless weight and bias are frozen (three products).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ... import backends, device, tiling
from ...support.opaque import opaque
from ..checks import (
    check_choice,
    check_choices,
    check_head,
    check_num_items,
    check_plain,
    check_projection,
    check_range,
    check_same_device,
    is_number,
)
from ..host import compute_dtype
from .divergence import Teacher
from .engine import head_statistics
from .head_options import HeadOptions
from .linear_cross_entropy import valid_rows
from .objective import DivergenceObjective
from .reference import transformed_logits
from .statistics import HeadStatistics
from .vocabulary_slices import VocabSlice, own_part

__all__ = [
    "REDUCTIONS",
    "LinearDivergenceOutput",
    "Reduction",
    "Selected",
    "check_mask",
    "linear_divergence",
    "linear_divergence_reference",
]

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("log_prob", "entropy", "teacher_log_prob", "teacher_entropy")
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class LinearDivergenceOutput(NamedTuple):
    """The result of `linear_divergence` if `outputs` is not empty. All fields but the first are fp32, of x's leading
    shape, 0 for tokens that are not selected; None for those that were not requested.

    Attributes:
        divergence: the loss, as without outputs.
        log_prob: log p of the id; differentiable.
        entropy: entropy of p, in nats; differentiable.
        teacher_log_prob: log q of the id.
        teacher_entropy: entropy of q.
    """

    divergence: torch.Tensor
    log_prob: torch.Tensor | None
    entropy: torch.Tensor | None
    teacher_log_prob: torch.Tensor | None
    teacher_entropy: torch.Tensor | None


def linear_divergence_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    beta: float,
    mask: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_temperature: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> torch.Tensor | LinearDivergenceOutput:
    """Computes the op in plain PyTorch, on full logits of the selected tokens."""
    shape, vocab = x.shape[:-1], min(weight.shape[0], teacher_weight.shape[0])
    keep = torch.ones(shape, dtype=torch.bool, device=x.device) if mask is None else mask != 0

    def log_softmax(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, softcap: float | None,
        logit_scale: float,
    ) -> torch.Tensor:  # fmt: skip
        logits = torch.nn.functional.linear(x[keep], weight[:vocab], None if bias is None else bias[:vocab])
        z = transformed_logits(logits, logit_scale=logit_scale, softcap=softcap, temperature=temperature)
        return torch.log_softmax(z, -1)

    log_p = log_softmax(x, weight, bias, temperature, softcap, logit_scale)
    with torch.no_grad():
        log_q = log_softmax(
            teacher_x, teacher_weight, teacher_bias,
            temperature if teacher_temperature is None else teacher_temperature, teacher_softcap, teacher_logit_scale,
        )  # fmt: skip
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        divergence = (q * (log_q - log_p)).sum(-1)
    elif beta == 1:
        divergence = (p * (log_p - log_q)).sum(-1)
    else:
        b = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
        log_m = torch.logaddexp(log_q + b.log(), log_p + torch.log1p(-b))
        divergence = beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(shape).masked_scatter(keep, values)

    if reduction == "none":
        loss = spread(divergence)
    else:
        loss = divergence.sum()
        if reduction == "mean":
            loss = loss / (keep.sum().clamp(min=1) if num_items is None else num_items)
    if not outputs:
        return loss
    given: list[torch.Tensor | None] = []
    for log, its in ((log_p, p), (log_q, q)):
        prefix = "" if log is log_p else "teacher_"
        of_id = entropy = None
        if f"{prefix}log_prob" in outputs:
            assert ids is not None
            of_id = spread(log.gather(-1, ids[keep].long().unsqueeze(-1)).squeeze(-1))
        if f"{prefix}entropy" in outputs:
            entropy = spread(-(its * log).sum(-1))
        given += [of_id, entropy]
    return LinearDivergenceOutput(loss, *given)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> None:
    """Checks the tensors."""
    if ids is None:
        check_projection(x, weight, bias)
    else:
        check_head(x, weight, "ids", ids, bias)
    check_projection(teacher_x, teacher_weight, teacher_bias, prefix="teacher_")
    if teacher_x.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"teacher_x must have x's leading shape {list(x.shape[:-1])}; got {list(teacher_x.shape[:-1])}"
        )
    check_mask(mask, x)
    check_same_device(x=x, teacher_x=teacher_x, mask=mask)


def check_mask(mask: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raises unless `mask` is None, or bool or integers of x's leading shape."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask must be a tensor; got {type(mask).__name__}")
    if mask.dtype not in _MASKS:
        raise TypeError(f"mask must be bool or an integer dtype; got {mask.dtype}")
    check_plain("mask", mask)
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask must have x's leading shape {list(x.shape[:-1])}; got {list(mask.shape)}")


def _teacher_options(**options: object) -> HeadOptions:
    """Returns the transform of the teacher's logits; its errors name the arguments of the teacher."""
    try:
        return HeadOptions(**options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"teacher_{error}") from None


@dataclass(frozen=True)
class Reduction:
    """The reduction of a call. `early`: the objective contains the division of a mean; else the caller divides."""

    name: str
    num_items: int | float | torch.Tensor | None
    early: bool

    def scale(self, rows: torch.Tensor | None, tokens: int, where: torch.device) -> torch.Tensor | float:
        """Returns the factor of the sum over the selected tokens. `rows` are those, None for all `tokens`."""
        if self.name != "mean":
            return 1.0
        if isinstance(self.num_items, torch.Tensor):
            return 1.0 / self.num_items.detach().reshape(()).to(where, torch.float32)
        if self.num_items is not None:
            return 1.0 / float(self.num_items)
        return 1.0 / max(1, tokens if rows is None else rows.shape[0])


class Selected:
    """The selected tokens of a call. `rows` waits for the device at its first use, and finds them once."""

    def __init__(self, mask: torch.Tensor | None, ids: torch.Tensor | None, x: torch.Tensor) -> None:
        self.tokens = x[..., 0].numel()
        self._mask, self._ids, self._where = mask, ids, x.device
        self._rows: tuple[torch.Tensor | None] | None = None

    @property
    def rows(self) -> torch.Tensor | None:
        """The indices of the selected tokens; None for all."""
        if self._rows is None:
            self._rows = (None if self._mask is None else valid_rows(self._mask, 0),)
        return self._rows[0]

    @property
    def ids(self) -> torch.Tensor:
        """The ids of the selected tokens; zeros without ids."""
        if self._ids is None:
            count = self.tokens if self.rows is None else self.rows.shape[0]
            return torch.zeros(count, dtype=torch.int64, device=self._where)
        flat = self._ids.reshape(-1)
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def spread(self, values: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
        """Expands values of the selected tokens to all tokens, with 0 for the others."""
        if values is None:
            return None
        if self.rows is not None:
            values = values.new_zeros(self.tokens).index_copy(0, self.rows, values)
        return values.view(shape)


def _own_parts(
    weight: torch.Tensor, bias: torch.Tensor | None, teacher_weight: torch.Tensor, teacher_bias: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None], VocabSlice | None]:
    """Returns the parameters of both heads as plain tensors, and the slice if they are this rank's rows."""
    mine, mine_bias, part = own_part(weight, bias)
    if part is None or not isinstance(weight, DTensor):
        for name, tensor in (("teacher_weight", teacher_weight), ("teacher_bias", teacher_bias)):
            if tensor is not None and isinstance(tensor, DTensor):
                raise ValueError(f"{name} must be a plain tensor where weight is one; got a DTensor")
        return (weight, bias, teacher_weight, teacher_bias), None
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight must have the rows of a weight that ranks share, {weight.shape[0]}; got "
            f"{teacher_weight.shape[0]}"
        )
    if isinstance(teacher_weight, DTensor):
        its, its_bias, _ = own_part(teacher_weight, teacher_bias)
        if teacher_weight.device_mesh != weight.device_mesh:
            raise ValueError(
                f"teacher_weight must be on the mesh of weight, {weight.device_mesh}; got {teacher_weight.device_mesh}"
            )
        return (mine, mine_bias, its, its_bias), part
    if isinstance(teacher_bias, DTensor):
        raise ValueError("teacher_bias must be a plain tensor where teacher_weight is one; got a DTensor")
    its, its_bias = teacher_weight[part.start : part.start + part.width], teacher_bias
    return (mine, mine_bias, its, None if its_bias is None else part.of_columns(its_bias)), part


def _first(t: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the first rows. If these are all, it is the tensor itself: a saved parameter whose shards are released
    and gathered again between forward and backward is read where it is then."""
    return t if t.shape[0] == rows else t[:rows]


@opaque
def linear_divergence(
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    beta: float,
    mask: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_temperature: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    chunk_rows: int | None = None,
    low_memory: bool = False,
    backend: str | None = None,
) -> torch.Tensor | LinearDivergenceOutput:
    """Computes the divergence between the distributions of a student's and a teacher's head, with the logits of one
    chunk of tokens of each in memory at a time.

    Args:
        x: the student's hidden states `[..., H]`, fp32, bf16 or fp16, any strides. Products run in this dtype, or in
            autocast's, and logits are rounded to it, as a model's are.
        weight: `[V, H]`; cast to that dtype when it differs. Its gradient is accumulated in fp32 and returned in
            weight's dtype. A DTensor sharded by rows over ranks which all have the same x is computed as slices: see
            `ops/head/vocabulary_slices.py`.
        teacher_x: the teacher's hidden states `[..., H']` of the same tokens, with x's leading shape. They may have
            another dtype. The teacher's tensors get no gradient, whether they require one or not.
        teacher_weight: `[V', H']`. If V and V' differ, the distributions are those over the first min(V, V') ids, as
            for vocabularies that were padded to different sizes: the softmaxes leave out the other ids, and their rows
            of the weight get gradient zero. If weight is sharded, V' is V, and this one is sharded as weight is, or is
            whole on all ranks, each of which reads its rows of it.
        bias: `[V]` or None; sharded as weight is.
        teacher_bias: `[V']` or None.
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for the generalised Jensen-Shannon
            divergence with the mixture beta q + (1 - beta) p; see the module's formula.
        mask: bool or integers of x's leading shape, not 0 for the selected tokens; None for all. The other tokens cost
            nothing, whatever they contain.
        ids: int64 or int32 of x's leading shape, in `[0, min(V, V'))` for selected tokens (checked on the CPU; on an
            accelerator under NPU_KERNELS_DEBUG=1). Needed for outputs that are log-probabilities, and not read
            otherwise.
        reduction: "mean" over the selected tokens (zero, not NaN, if there are none), "sum", or "none" (per token, zero
            where not selected).
        num_items: divides the sum instead of the number of selected tokens (gradient accumulation, several ranks).
        temperature: divides the student's logits; positive.
        softcap: `softcap * tanh(logits / softcap)` before the temperature; None for no cap.
        logit_scale: multiplies the logits first.
        teacher_temperature: the same for the teacher; None for the student's.
        teacher_softcap: likewise; None for no cap.
        teacher_logit_scale: likewise.
        outputs: any of "log_prob", "entropy", "teacher_log_prob", "teacher_entropy".
        chunk_rows: the number of rows of a chunk of logits; None for a choice by device.
        low_memory: sum the chunks' weight gradients in weight's dtype, as in `fused_linear_cross_entropy`.
        backend: overrides the choice of `backends.choose("linear_divergence", ...)`.

    Returns:
        The divergence, fp32 (a scalar, or of x's leading shape for "none"); with `outputs`, `LinearDivergenceOutput`.
        All logits must be finite: one of -inf gives NaN, as it does in TRL.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not match, tensors on several devices, DTensors placed otherwise, options or ids out
            of range, a log-probability without ids.
    """
    _check(x, weight, bias, teacher_x, teacher_weight, teacher_bias, mask, ids)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choices("outputs", outputs, OUTPUTS)
    check_num_items(num_items, reduction)
    if not (is_number(beta) and 0 <= beta <= 1):
        raise ValueError(f"beta must lie in [0, 1]; got {beta!r}")
    if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
        raise ValueError(f"chunk_rows must be None or a positive int; got {chunk_rows!r}")
    wanted = [name for name in outputs if name.endswith("log_prob")]
    if wanted and ids is None:
        raise ValueError(f"outputs {', '.join(wanted)} need ids; got None")
    options = HeadOptions(temperature, softcap, logit_scale, entropy="entropy" in outputs)
    teacher_options = _teacher_options(
        temperature=temperature if teacher_temperature is None else teacher_temperature, softcap=teacher_softcap,
        logit_scale=teacher_logit_scale, entropy="teacher_entropy" in outputs,
    )  # fmt: skip
    vocab = min(weight.shape[0], teacher_weight.shape[0])
    selected = Selected(mask, ids if wanted else None, x)
    if wanted:
        check_range("ids", lambda: selected.ids, x.device, vocab)
    parameters, part = _own_parts(weight, bias, teacher_weight, teacher_bias)
    if part is None:
        parameters = tuple(None if t is None else _first(t, vocab) for t in parameters)  # type: ignore[assignment]
    weight, bias, teacher_weight, teacher_bias = parameters
    # fp16 gradients of a mean over many tokens would underflow, so divide after the products there.
    how = Reduction(reduction, num_items, torch.float16 not in (x.dtype, compute_dtype(x)))

    def scale() -> torch.Tensor | float:
        return how.scale(selected.rows, selected.tokens, x.device)

    total, s = head_statistics(
        x.reshape(-1, x.shape[-1]), weight, lambda: selected.ids, bias, options,
        rows=lambda: selected.rows,
        objective=None if reduction == "none" else DivergenceObjective(scale if how.early else lambda: 1.0),
        chunk_rows=chunk_rows, low_memory=low_memory,
        backend=_backend(x, weight, backend), part=part,
        teacher=Teacher(
            teacher_x.detach().reshape(-1, teacher_x.shape[-1]), teacher_weight, teacher_bias, teacher_options,
            float(beta), compute_dtype(teacher_x),
        ),
    )  # fmt: skip
    shape = x.shape[:-1]
    value = selected.spread(s.divergence, shape) if total is None else total if how.early else total * scale()
    assert value is not None
    return LinearDivergenceOutput(value, *_outputs(s, selected, shape, outputs)) if outputs else value


def _backend(x: torch.Tensor, weight: torch.Tensor, override: str | None) -> str:
    chosen = backends.choose("linear_divergence", x.device, override, at=lambda: backends.of_head(x, weight))
    asked = backends.asked_for("linear_divergence", override)
    if chosen == "triton" and not asked and tiling.divergence_unserved(device.spec(x.device)) is not None:
        return "torch"
    return chosen


def _outputs(
    s: HeadStatistics, selected: Selected, shape: torch.Size, outputs: Sequence[str]
) -> list[torch.Tensor | None]:
    return [selected.spread(getattr(s, name), shape) if name in outputs else None for name in OUTPUTS]
