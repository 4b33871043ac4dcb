"""What the vendor's operators are documented to compute, for tensors on the CPU: the package's own references under
the operators' names and signatures.

The formulas are in prose (https://www.hiascend.com, op-plugin's `docs/context/torch_npu-npu_*.md`); where the norms
round is in the kernels and golden functions of CANN's ops-nn (`norm/rms_norm`, `norm/add_rms_norm`). Backward of a norm
is the package's torch twin, which `tests/ops` holds to the reference: the operator is given rstd, but no epsilon.

Defaults are the schemas': PyTorch leaves arguments out that have their default value.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.ops.head.reference import logits_statistics_reference
from npu_trainer_kernels.ops.norms.rms_kernels import _normed, norm_backward
from npu_trainer_kernels.ops.rope import rope_reference
from npu_trainer_kernels.ops.swiglu import swiglu_reference


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed(x, gamma, epsilon, 0.0, "gemma")


def _add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x1 + x2
    return *_normed(s, gamma, epsilon, 0.0, "llama"), s


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dgamma = norm_backward(
        x, None, gamma.float(), rstd.reshape(-1), dy, None, 0.0, "gemma", 1.0, True, True, "torch"
    )  # fmt: skip
    assert dx is not None
    assert dgamma is not None
    return dx, dgamma


def _joined_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert x.is_contiguous(), "npu_swiglu takes no tensor with gaps"
    assert x.numel(), "npu_swiglu takes no empty tensor"
    gate, up = x.float().chunk(2, dim)
    return swiglu_reference(gate, up).to(x.dtype)


def _joined_swiglu_backward(dy: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.func.vjp(lambda t: _joined_swiglu(t, dim).float(), x)[1](dy.float())[0]


def _rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
    assert r1.shape[1] == r2.shape[1] == 1, "11SD or B1SD"
    tables = r1.squeeze(1).float(), r2.squeeze(1).float()
    return rope_reference(x.float(), x.float(), *tables)[0].to(x.dtype)


def _losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -logits_statistics_reference(logits, target, HeadOptions()).log_prob


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> tuple[torch.Tensor, ...]:
    assert (weight, reduction, target.dtype) == (None, "none", torch.int64)
    log_probs = logits.log_softmax(-1)
    # The last two are for z-loss, and empty without it.
    return _losses(logits, target).to(logits.dtype), log_probs, logits.new_empty(0), logits.new_empty(0)


def _cross_entropy_backward(
    d_loss: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
    d_z_loss: torch.Tensor | None = None, lse: torch.Tensor | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    assert (weight, d_z_loss, lse, reduction) == (None, None, None, "none")
    # Logits are log-probabilities up to a number per row, which the loss does not see.
    return torch.func.vjp(lambda t: _losses(t, target), log_probs)[1](d_loss)[0]


_ENDLESS = 2147483647


def _segments(
    ends_q: Sequence[int], ends_k: Sequence[int], *tensors: tuple[torch.Tensor, bool]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The parts of tensors `[T, ...]`, each with whether it has the queries' lengths; all in fp32."""
    starts_q, starts_k = (0, *ends_q), (0, *ends_k)
    for i in range(len(ends_q)):
        q, k = slice(starts_q[i], ends_q[i]), slice(starts_k[i], ends_k[i])
        yield tuple(tensor[q if of_queries else k].float() for tensor, of_queries in tensors)


def _hidden(queries: int, keys: int, mask: torch.Tensor, mode: int, before: int, behind: int) -> torch.Tensor:
    """What a query does not see, by the page's "parameters start at the lower right": in mode 3 what is behind the
    diagonal that ends there, in mode 4 also what is more than `before` before it, or more than `behind` behind it."""
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "modes 3 and 4 take that mask alone"
    assert queries <= keys, "a row that sees nothing is not supported in mode 3"
    assert mode in (3, 4)
    distance = torch.arange(keys) - (keys - queries) - torch.arange(queries).unsqueeze(1)
    return distance > 0 if mode == 3 else (distance > behind) | (distance < -before)


def _check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head_num: int, layout: str,
                     keep_prob: float, ends_q: Sequence[int] | None, ends_k: Sequence[int] | None,
                     sink: torch.Tensor | None) -> None:  # fmt: skip
    assert layout == "TND"
    assert keep_prob == 1.0, "the stand-in has no dropout"
    assert k.shape == v.shape
    assert q.shape[1] == head_num <= 256
    assert head_num % k.shape[1] == 0
    assert q.shape[2] == k.shape[2] <= 768
    assert ends_q is not None
    assert ends_k is not None
    assert all(type(end) is int for end in (*ends_q, *ends_k))
    assert len(ends_q) == len(ends_k) <= 1024
    assert (ends_q[-1], ends_k[-1]) == (len(q), len(k))
    assert sink is None or (sink.dtype == torch.float32 and sink.shape == (head_num,) and q.dtype != torch.float32)


def _fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str,
    pse: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None, atten_mask: torch.Tensor | None = None,
    scale: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = _ENDLESS, next_tockens: int = _ENDLESS,
    inner_precise: int = 0, prefix: Sequence[int] | None = None, actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:  # fmt: skip
    _check_attention(query, key, value, head_num, input_layout, keep_prob, actual_seq_qlen, actual_seq_kvlen, sink)
    assert (pse, padding_mask, prefix, dropout_mask, inner_precise) == (None, None, None, None, 0)
    assert actual_seq_qlen is not None
    assert actual_seq_kvlen is not None
    assert atten_mask is not None
    group = head_num // key.shape[1]
    outs, maxima, sums = [], [], []
    for q, k, v in _segments(actual_seq_qlen, actual_seq_kvlen, (query, True), (key, False), (value, False)):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = _hidden(len(q), len(k), atten_mask, sparse_mode, pre_tockens, next_tockens)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -math.inf)
        m = scores.amax(-1)
        if sink is not None:
            m = torch.maximum(m, sink.unsqueeze(1))
        weights = (scores - m.unsqueeze(-1)).exp()
        total = weights.sum(-1)
        if sink is not None:
            total = total + (sink.unsqueeze(1) - m).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights / total.unsqueeze(-1), v))
        maxima.append(m)
        sums.append(total)
    # Heads before tokens, each number eight times.
    saved = (torch.cat(part, 1).unsqueeze(-1).repeat(1, 1, 8) for part in (maxima, sums))
    return torch.cat(outs).to(query.dtype), *saved, query.new_empty(0), 0, 0, 0


def _fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str, *,
    pse: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None, atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None, softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None, attention_in: torch.Tensor | None = None, scale_value: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = _ENDLESS, next_tockens: int = _ENDLESS, inner_precise: int = 0,
    seed: int = 0, offset: int = 0, numels: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    _check_attention(query, key, value, head_num, input_layout, keep_prob, actual_seq_qlen, actual_seq_kvlen, sink)
    assert dy.shape == query.shape
    for given in (actual_seq_qlen, actual_seq_kvlen, atten_mask, softmax_max, softmax_sum, attention_in):
        assert given is not None
    group = head_num // key.shape[1]
    m, total = (part[..., 0].t() for part in (softmax_max, softmax_sum))  # type: ignore[union-attr]
    grads: list[list[torch.Tensor]] = [[], [], []]
    d_sink = None if sink is None else torch.zeros_like(sink)
    parts = _segments(
        actual_seq_qlen, actual_seq_kvlen, (query, True), (key, False), (value, False), (dy, True),  # type: ignore[arg-type]
        (attention_in, True), (m, True), (total, True),  # type: ignore[arg-type]
    )  # fmt: skip
    for q, k, v, g, out, of_m, of_total in parts:
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = _hidden(len(q), len(k), atten_mask, sparse_mode, pre_tockens, next_tockens)  # type: ignore[arg-type]
        scores = (torch.einsum("qhd,khd->hqk", q, wide_k) * scale_value).masked_fill(hidden, -math.inf)
        p = (scores - of_m.t().unsqueeze(-1)).exp() / of_total.t().unsqueeze(-1)
        dots = (g * out).sum(-1).t()
        ds = p * (torch.einsum("qhd,khd->hqk", g, wide_v) - dots.unsqueeze(-1)) * scale_value
        grads[0].append(torch.einsum("hqk,khd->qhd", ds, wide_k))
        for into, left, right in ((grads[1], ds, q), (grads[2], p, g)):
            wide = torch.einsum("hqk,qhd->khd", left, right)
            into.append(wide.view(len(k), -1, group, wide.shape[-1]).sum(2))
        if sink is not None and d_sink is not None:
            d_sink -= ((sink.unsqueeze(1) - of_m.t()).exp() / of_total.t() * dots).sum(1)
    dq, dk, dv = (torch.cat(part).to(query.dtype) for part in grads)
    return dq, dk, dv, query.new_empty(0), query.new_empty(0) if d_sink is None else d_sink


def _grouped_matmul(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], *, bias: Sequence[torch.Tensor] | None = None,
    scale: None = None, offset: None = None, antiquant_scale: None = None, antiquant_offset: None = None,
    per_token_scale: None = None, group_list: torch.Tensor | None = None, activation_input: None = None,
    activation_quant_scale: None = None, activation_quant_offset: None = None, split_item: int = 0,
    group_type: int | None = None, group_list_type: int = 0, act_type: int = 0, tuning_config: None = None,
    output_dtype: int | None = None, x_dtype: int | None = None, weight_dtype: int | None = None,
    scale_dtype: int | None = None, per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """One tensor of each; what nobody has written is NaN. Where the axis that is summed over lies in groups, so is what
    belongs to a group without any of it: no page says what that gets."""
    unused = (
        bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input,
        activation_quant_scale, activation_quant_offset, tuning_config, output_dtype, x_dtype, weight_dtype,
        scale_dtype, per_token_scale_dtype,
    )  # fmt: skip
    assert all(given is None for given in unused)
    assert (len(x), len(weight), act_type, group_list_type) == (1, 1, 0, 0)
    assert split_item in (2, 3), "one tensor comes out"
    (a,), (b,) = x, weight
    assert a.dtype == b.dtype
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert group_list.dim() == 1
    assert len(group_list) <= 1024
    for factor in x:
        # The last axis in memory.
        assert factor.shape[factor.stride().index(1)] < 1 << 16
    ends = group_list.tolist()
    assert ends == sorted(ends)
    groups = [(g, start, end) for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if start < end]
    if group_type == 0:
        assert a.is_contiguous(), "x is not transposed where M lies in groups"
        assert b.dim() == 3
        assert len(b) == len(ends)
        y = torch.full((a.shape[0], b.shape[2]), math.nan, dtype=a.dtype)
        for g, start, end in groups:
            y[start:end] = (a[start:end].float() @ b[g].float()).to(a.dtype)
        return [y]
    assert group_type == 2
    assert a.t().is_contiguous(), "x is transposed where K lies in groups"
    assert b.is_contiguous(), "and weight is not"
    y = torch.full((len(ends), a.shape[0], b.shape[1]), math.nan, dtype=a.dtype)
    for g, start, end in groups:
        y[g] = (a[:, start:end].float() @ b[start:end].float()).to(a.dtype)
    return [y]


ON_CPU: dict[str, Callable[..., object]] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_swiglu": _joined_swiglu,
    "npu_swiglu_backward": _joined_swiglu_backward,
    "npu_rotary_mul": _rotary_mul,
    "npu_cross_entropy_loss": _cross_entropy,
    "npu_cross_entropy_loss_backward": _cross_entropy_backward,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_fusion_attention": _fusion_attention,
    "npu_fusion_attention_grad": _fusion_attention_grad,
}


@contextmanager
def defined(schemas: dict[str, str]) -> Iterator[None]:
    """Inside the `with` block there are operators with torch_npu's names and schemas, where torch_npu is not."""
    missing = [name for name in schemas if not hasattr(torch.ops.npu, name)]
    library = torch.library.Library("npu", "FRAGMENT")
    for name in missing:
        library.define(f"{name}{schemas[name]}")
    try:
        yield
    finally:
        library._destroy()
        for name in missing:
            # What was looked up stays there.
            vars(torch.ops.npu).pop(name, None)


@contextmanager
def on_cpu(names: Sequence[str] = tuple(ON_CPU)) -> Iterator[None]:
    """Inside the `with` block torch_npu's operators of these names take CPU tensors."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    for name in names:
        library.impl(name, ON_CPU[name])
    try:
        yield
    finally:
        library._destroy()
