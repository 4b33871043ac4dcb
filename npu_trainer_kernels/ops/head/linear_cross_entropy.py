"""Linear projection and cross-entropy in one op, without the `[N, V]` logits.

    z_i = softcap(logit_scale * (x_i W^T + bias))        lse_i = log sum_j exp z_ij        K = sum_j k_j
    loss_i = k_y (1 - s) (lse_i - z_iy)  +  s / V (K lse_i - sum_j k_j z_ij)  +  zeta lse_i^2

with y = target_i, label smoothing s, class weights k (1 by default) and z-loss coefficient zeta, the definition of
`torch.nn.functional.cross_entropy` plus the z-loss of PaLM (arXiv:2204.02311). Rows with `target == ignore_index` are
left out before the projection and cost nothing.

The loss is a sum over rows divided by a number that does not depend on the logits. So forward computes the gradient
while a chunk's logits exist, with three matrix products in total (`ops/head/engine.py`, mode planned).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ... import backends, vendor
from ...support.opaque import opaque
from ..checks import (
    check_choice,
    check_choices,
    check_float,
    check_head,
    check_num_items,
    check_plain,
    check_range,
    check_same_device,
    has_values,
    is_number,
)
from ..host import compute_dtype
from .engine import head_statistics
from .head_options import HeadOptions
from .objective import LinearObjective, Objective
from .reference import transformed_logits
from .statistics import HeadStatistics
from .vocabulary_slices import own_part

__all__ = ["LinearCrossEntropyOutput", "fused_linear_cross_entropy", "linear_cross_entropy_reference", "valid_rows"]

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("token_accuracy", "predicted_ids")


class LinearCrossEntropyOutput(NamedTuple):
    """The result of `fused_linear_cross_entropy` if `outputs` is not empty.

    Attributes:
        loss: the loss.
        token_accuracy: fp32 scalar, the fraction of valid targets that are the argmax (0 without valid targets).
        predicted_ids: int64 of target's shape, the argmax; `ignore_index` where the target is ignored.
    """

    loss: torch.Tensor
    token_accuracy: torch.Tensor | None
    predicted_ids: torch.Tensor | None


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, on full logits, as a model followed by `cross_entropy` does."""
    logits = torch.nn.functional.linear(x, weight, bias).reshape(-1, weight.shape[0])
    flat = target.reshape(-1).long()
    z = transformed_logits(logits, logit_scale=logit_scale, softcap=softcap)
    k = None if class_weights is None else class_weights.to(z.dtype)
    loss = torch.nn.functional.cross_entropy(
        z, flat, k, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    valid = flat != ignore_index
    if z_loss:
        loss = loss + z_loss * torch.where(valid, torch.logsumexp(z, -1) ** 2, 0.0)
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    if num_items is None:
        num_items = valid.sum().clamp(min=1) if k is None else k[flat[valid]].sum().clamp(min=torch.finfo(k.dtype).tiny)
    return loss.sum() / num_items


def valid_rows(target: torch.Tensor, ignore_index: int) -> torch.Tensor | None:
    """Returns the rows with a valid target, int64 `[n]`, or None if all are valid. Waits for the device once."""
    if not has_values(target):
        return None
    rows = torch.nonzero(target.reshape(-1) != ignore_index).squeeze(1)
    return None if rows.shape[0] == target.numel() else rows


def _check_options(
    x: torch.Tensor,
    weight: torch.Tensor,
    ignore_index: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
    class_weights: torch.Tensor | None,
    outputs: Sequence[str],
    chunk_rows: int | None,
) -> None:
    if type(ignore_index) is not int or not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index must be a 64-bit int; got {ignore_index!r}")
    if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
        raise ValueError(f"chunk_rows must be None or a positive int; got {chunk_rows!r}")
    check_choice("reduction", reduction, REDUCTIONS)
    check_num_items(num_items, reduction)
    if not (is_number(label_smoothing) and 0.0 <= label_smoothing <= 1.0):
        raise ValueError(f"label_smoothing must lie in [0, 1]; got {label_smoothing!r}")
    if not (is_number(z_loss) and z_loss >= 0.0):
        raise ValueError(f"z_loss must be finite and not negative; got {z_loss!r}")
    if class_weights is not None:
        check_float("class_weights", class_weights)
        check_plain("class_weights", class_weights)
        if class_weights.shape != weight.shape[:1]:
            raise ValueError(f"class_weights must have shape [{weight.shape[0]}]; got {list(class_weights.shape)}")
        check_same_device(x=x, class_weights=class_weights)
    check_choices("outputs", outputs, OUTPUTS)


@dataclass(frozen=True)
class _Targets:
    """The targets of a call, and the rows with a valid target.

    The properties are computed at first use: `rows` waits for the device, which then idles until the first product.

    Attributes:
        flat: `[N]`, the targets of all rows.
        ignore_index: the target of rows that do not count.
        given_rows: the rows with a valid target, if the caller has computed them already.
        class_weights: k `[V]`, or None.
    """

    flat: torch.Tensor
    ignore_index: int
    given_rows: torch.Tensor | None
    class_weights: torch.Tensor | None

    @functools.cached_property
    def rows(self) -> torch.Tensor | None:
        """The rows with a valid target; None for all rows."""
        return valid_rows(self.flat, self.ignore_index) if self.given_rows is None else self.given_rows

    @functools.cached_property
    def ids(self) -> torch.Tensor:
        """`[n]`, the valid targets."""
        return self.flat if self.rows is None else self.flat.index_select(0, self.rows)

    @functools.cached_property
    def weights(self) -> torch.Tensor | None:
        """k_y `[n]`, or None without class weights."""
        return None if self.class_weights is None else self.class_weights[self.ids.long()]

    def spread(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Expands values of the valid rows `[n]` to all rows `[N]`, with `fill` for the others."""
        if self.rows is None:
            return values
        return values.new_full(self.flat.shape, fill).index_copy(0, self.rows, values)


@dataclass(frozen=True)
class _Loss:
    """The loss of the module's docstring, as a function of the statistics.

    Attributes:
        targets: the targets of the call.
        reduction, num_items, label_smoothing, z_loss: the options of the call.
        vocab: V.
        early: whether the objective contains the division of a mean; otherwise the caller divides the result.
    """

    targets: _Targets
    reduction: str
    num_items: int | float | torch.Tensor | None
    label_smoothing: float
    z_loss: float
    vocab: int
    early: bool

    def of_rows(self, s: HeadStatistics, chunk: slice) -> torch.Tensor:
        """Computes loss_i of the rows of a chunk."""
        k, k_id = self.targets.class_weights, self.targets.weights
        loss = -s.log_prob if k_id is None else -s.log_prob * k_id[chunk]
        if self.label_smoothing:
            assert s.mean is not None
            # The mean statistic is sum_j k_j z_j with class weights, and 1/V sum_j z_j without.
            mean = s.mean if k is None else s.mean / self.vocab
            k_mean = 1.0 if k is None else k.mean()
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * (k_mean * s.lse - mean)
        return loss + self.z_loss * s.lse * s.lse if self.z_loss else loss

    @functools.cached_property
    def scale(self) -> torch.Tensor | float | None:
        """The factor of the sum for a mean; None for other reductions."""
        return 1.0 / self._denominator() if self.reduction == "mean" else None

    def _denominator(self) -> torch.Tensor | float:
        ids, k_id, num_items = self.targets.ids, self.targets.weights, self.num_items
        if isinstance(num_items, torch.Tensor):
            return num_items.detach().reshape(()).to(ids.device, torch.float32)
        if num_items is not None:
            return float(num_items)
        return float(max(1, ids.shape[0])) if k_id is None else k_id.sum().clamp(min=torch.finfo(torch.float32).tiny)

    def scaled(self, sums: torch.Tensor) -> torch.Tensor:
        return sums if self.scale is None else sums * self.scale

    def objective(self) -> Objective | None:
        """Returns the objective for the engine; None if each row's gradient depends on the incoming one."""
        if self.reduction == "none":
            return None
        # With smoothing or a z-loss, the loss depends on more than log_prob.
        return self._of_chunk if self.label_smoothing or self.z_loss else LinearObjective(self._factor)

    def _of_chunk(self, s: HeadStatistics, chunk: slice) -> torch.Tensor:
        total = self.of_rows(s, chunk).sum()
        return self.scaled(total) if self.early else total

    def _factor(self) -> torch.Tensor:
        ids, k_id = self.targets.ids, self.targets.weights
        factor = -(torch.ones(ids.shape, dtype=torch.float32, device=ids.device) if k_id is None else k_id)
        return self.scaled(factor) if self.early else factor


@opaque
def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
    rows: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    low_memory: bool = False,
    backend: str | None = None,
) -> torch.Tensor | LinearCrossEntropyOutput:
    """Computes the cross-entropy of a linear head, with the logits of one token chunk in memory at a time.

    Args:
        x: hidden states `[..., H]`, fp32, bf16 or fp16, any strides. Products run in this dtype, or in autocast's.
        weight: `[V, H]`; cast to that dtype when it differs. Its gradient is accumulated in fp32 and returned in
            weight's dtype. If the vocabulary is sharded over ranks, a DTensor that is sharded by rows over a
            one-dimensional mesh: each rank computes with its rows, and all ranks must make the same call with the same
            x and target, and run its backward.
        target: int64 or int32 of x's leading shape, each in `[0, V)` or `ignore_index` (checked on the CPU; on an
            accelerator under NPU_KERNELS_DEBUG=1).
        bias: `[V]` or None; a DTensor with the placement of weight if weight is one.
        ignore_index: the target of rows that do not count.
        reduction: "mean" (over the valid targets, weighted by `class_weights`; zero, not NaN, if there are none),
            "sum", or "none" (per token, zero where ignored; costs a fourth product).
        num_items: divides the sum instead of the number of valid targets (gradient accumulation, several ranks).
        softcap: see the module's formula; None for no cap.
        logit_scale: likewise.
        label_smoothing: s in [0, 1].
        z_loss: zeta >= 0.
        class_weights: k, `[V]`.
        outputs: any of "token_accuracy", "predicted_ids".
        rows: the result of `valid_rows(target, ignore_index)`, if the caller has computed it already.
        chunk_rows: the number of rows of a chunk of logits; None for a choice by device.
        low_memory: sum the chunks' weight gradients in weight's dtype. This adds a rounding for each chunk and saves
            half an fp32 weight gradient.
        backend: overrides the choice of `backends.choose("linear_cross_entropy", ...)`.

    Returns:
        The loss, fp32 (a scalar, or of target's shape for "none"); with `outputs`, `LinearCrossEntropyOutput`.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not match, tensors on several devices, options or targets out of range, a call that
            does not suit `backend="vendor"`.
    """
    check_head(x, weight, "target", target, bias)
    _check_options(
        x, weight, ignore_index, reduction, num_items, label_smoothing, z_loss, class_weights, outputs, chunk_rows
    )
    k = None if class_weights is None else class_weights.detach().float().contiguous()
    targets = _Targets(target.reshape(-1), ignore_index, rows, k)
    check_range("target", lambda: targets.ids, x.device, weight.shape[0])
    vocab = weight.shape[0]
    weight, bias, part = own_part(weight, bias)
    # fp16 gradients of a mean over many tokens would underflow, so divide after the products there.
    early = torch.float16 not in (x.dtype, compute_dtype(x))
    loss = _Loss(targets, reduction, num_items, label_smoothing, z_loss, vocab, early)
    chosen = backends.choose(
        "linear_cross_entropy", x.device, backend,
        lambda: "a vocabulary that ranks share out" if part is not None else vendor.uncovered_cross_entropy(
            targets.ids.shape[0], softcap=softcap, logit_scale=logit_scale, label_smoothing=label_smoothing,
            z_loss=z_loss, outputs=outputs,
        ),
        at=lambda: backends.of_head(x, weight),
    )  # fmt: skip
    total, s = head_statistics(
        x.reshape(-1, x.shape[-1]), weight, lambda: targets.ids, bias,
        HeadOptions(softcap=softcap, logit_scale=logit_scale, mean=label_smoothing > 0, argmax=bool(outputs)),
        rows=lambda: targets.rows, class_weights=k, objective=loss.objective(), chunk_rows=chunk_rows,
        low_memory=low_memory, backend=chosen, part=part,
    )  # fmt: skip
    if total is None:
        value = targets.spread(loss.of_rows(s, slice(None)), 0.0).view(target.shape)
    else:
        value = total if early else loss.scaled(total)
    if not outputs:
        return value
    assert s.argmax is not None
    accuracy = predicted = None
    if "token_accuracy" in outputs:
        accuracy = (s.argmax == targets.ids).sum() / max(1, targets.ids.shape[0])
    if "predicted_ids" in outputs:
        predicted = targets.spread(s.argmax, ignore_index).view(target.shape)
    return LinearCrossEntropyOutput(value, accuracy, predicted)
