"""Causal attention inside the segments of one packed row.

    s_ij = scale q_i k_j                cap(s) = softcap tanh(s / softcap)            in each head; fp32
    p_ij = exp(s_ij) / (sum over the keys l that query i sees of exp(s_il) + exp(sink))      no sink: without that term
    o_i = sum over the keys j that query i sees of dropout(p_ij) v_j                 rounded once, to q's dtype

Query i of a segment with Lq queries and Lk keys sees its segment's keys 0 .. Lk - Lq + i, the last `window` of them
where there is a window, and no other segment's. A head of k and v serves Hq / Hk heads of q.

Segments may share keys: they are then taken from the packed row (`shared_rows.take`), and the gradient of a row that
several segments see is summed in fp32 in a fixed order.

Backend "vendor" is torch_npu's operator, "torch" what PyTorch has: flash attention where it serves the call, on CUDA
(`segment_kernels`), and else one segment after another, by `scaled_dot_product_attention` or, with a soft cap or
sinks, by the formula. Lengths are numbers on the host, so nothing waits for the device, and `torch.compile` calls the
op without tracing it: traced, each batch's lengths would be compiled anew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ... import backends, vendor
from ... import device as devices
from ...support.errors import one_line
from ...support.opaque import opaque
from ..checks import FLOATS, check_same_device, is_number
from ..fallback import falls_back
from ..host import autocasts
from ..trial import TRIAL_ERRORS, differs
from .segment_kernels import ByKernel, by_flash
from .segments import Options, Segments
from .shared_rows import Shared, take

__all__ = ["Segments", "Shared", "take", "trial", "unserved", "varlen_attention", "varlen_attention_reference"]

_DTYPES = (*FLOATS, torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# One segment after another
# ---------------------------------------------------------------------------------------------------------------------


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """`[queries, keys]`, which keys each query sees; None where it sees all."""
    narrow = window is not None and window < keys
    if queries == 1 and not narrow:
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen.triu_(keys - queries - window + 1) if narrow and window is not None else seen


def _by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """A segment, operation for operation: q `[Lq, Hq, D]`, k `[Lk, Hk, D]`, v `[Lk, Hk, Dv]`, sinks `[Lq, Hq]` in the
    dtype of scores -> `[Lq, Hq, Dv]`."""
    (queries, heads, size), (keys, shared, _) = q.shape, k.shape
    group = heads // shared
    # The heads that one head of k serves are more rows of q.
    rows = q.view(queries, shared, group, size).permute(1, 2, 0, 3).reshape(shared, group * queries, size)
    scores = torch.matmul(rows, k.permute(1, 2, 0)).to(torch.promote_types(q.dtype, torch.float32)) * options.scale
    scores = scores.view(shared, group, queries, keys)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    seen = _seen(queries, keys, options.window, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.view(queries, shared, group, 1).permute(1, 2, 0, 3)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    if options.dropout:
        p = F.dropout(p, options.dropout)
    out = torch.matmul(p.to(v.dtype).view(shared, group * queries, keys), v.transpose(0, 1))
    return out.view(shared, group, queries, v.shape[-1]).permute(2, 0, 1, 3).reshape(queries, heads, v.shape[-1])


def _by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """The same by PyTorch's own attention, of several segments of one size: q `[s, Lq, Hq, D]`, k and v likewise."""
    queries, keys = q.shape[1], k.shape[1]
    # Only where both lengths are the same do all of its backends mean the same by `is_causal`.
    causal = queries == keys > 1 and (options.window is None or options.window >= keys)
    seen = None if causal else _seen(queries, keys, options.window, q.device)
    group = q.shape[2] // k.shape[2]
    # In 16 bits the CPU's sums the gradients of the heads that share one in 16 bits: twice the error. Elsewhere what
    # serves fp32 and masks has no shared heads.
    in_groups = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    if group > 1 and not in_groups:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, options.dropout, causal,
        scale=options.scale, enable_gqa=group > 1 and in_groups,
    )  # fmt: skip
    return out.transpose(1, 2)


def _size_by_size(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], options: Options
) -> list[torch.Tensor]:
    """`_by_pytorch` of every segment. Short ones cost a call each rather than what they compute, so those of one size
    share it: completions and prompts of one batch have few sizes."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for i, (q, k, _) in enumerate(parts):
        sizes.setdefault((len(q), len(k)), []).append(i)
    done: dict[int, torch.Tensor] = {}
    for alike in sizes.values():
        if len(alike) == 1:
            q, k, v = (part.unsqueeze(0) for part in parts[alike[0]])
        else:
            q, k, v = (torch.stack(same) for same in zip(*(parts[i] for i in alike), strict=True))
        done.update(zip(alike, _by_pytorch(q, k, v, options), strict=True))
    return [done[i] for i in range(len(parts))]


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: Segments,
    options: Options, by_formula: bool,
) -> torch.Tensor:  # fmt: skip
    of_q, of_k = ([pair[i] for pair in segments.lengths] for i in (0, 1))
    # One split instead of a slice for each segment: its backward is one concatenation.
    parts = list(zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True))
    if not by_formula:
        return torch.cat(_size_by_size(parts, options))
    each: Sequence[torch.Tensor | None] = [None] * len(parts)
    if sinks is not None:
        # One for each query: the gradient is one sum over all of them and rounded once, not after every segment.
        each = sinks.to(torch.promote_types(q.dtype, torch.float32)).expand(len(q), -1).split(of_q)
    return torch.cat([_by_formula(*part, sink, options) for part, sink in zip(parts, each, strict=True)])


def varlen_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """The op in plain PyTorch: one segment after another, each by the formula."""
    if segments.keys is not None:
        index = torch.from_numpy(segments.keys.index).to(k.device)
        k, v = k[index], v[index]
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap, dropout)
    return _one_by_one(q, k, v, sinks, segments, options, True)


# ---------------------------------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------------------------------


def unserved(
    device: torch.device,
    dtype: torch.dtype,
    head_sizes: tuple[int, int],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dropout: float = 0.0,
    segments: int = 1,
    backend: str | None = None,
) -> str | None:
    """Why a layer's attention had better stay as it is on this device, in words for a report; None where the op serves
    it. Reads no tensor.

    Args:
        device: of q, k and v.
        dtype: of q, k and v.
        head_sizes: D of q and k, and of v.
        window: of the layer.
        softcap: of the layer.
        sinks: whether it has some.
        dropout: of the layer.
        segments: how many there are, or will be at most.
        backend: overrides the choice of `backends.choose`.
    """
    if dtype not in _DTYPES:
        return f"attention has no {str(dtype).removeprefix('torch.')}"
    if window is not None and window < 1:
        return f"its window is {window}"

    def uncovered() -> str | None:
        return vendor.uncovered_attention(
            dtype, head_sizes, heads=None, tokens=None, segments=segments, softcap=softcap, sinks=sinks
        )

    if devices.gains_by_segments_alone(device) or backends.asked_for("varlen_attention", backend):
        return None
    chosen, why = backends.explain("varlen_attention", device, backend, uncovered)
    return None if chosen == "vendor" else why


@functools.cache
def trial(
    device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, int], window: bool, softcap: float | None,
    sinks: bool, backend: str | None,
) -> str | None:  # fmt: skip
    """Tries attention by segments on a device, once for each kind of layer: output and gradients of a few tokens beside
    those of the reference. Why it had better not be used there, in words for a report, or None.

    What is called on an accelerator belongs to others, and its meaning may change from version to version. Here the
    host waits for the device; never again for the same arguments.

    Args:
        device: as for `unserved`.
        dtype: as for `unserved`.
        head_sizes: as for `unserved`.
        window: whether the layer has one.
        softcap: as for `unserved`.
        sinks: whether the layer has some.
        backend: as for `unserved`.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # A root, two that continue it, and one by itself.
    lengths, seen = [6, 4, 3, 5], [6, 10, 9, 5]
    index = np.array([*range(6), *range(10), *range(6), *range(10, 13), *range(13, 18)])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    def outcome(attention: Any, tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        q, k, v, *rest = tensors
        out = attention(q, k, v, segments, softcap=softcap, sinks=rest[0] if rest else None, **options)
        return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]

    # Nobody else is to see what is saved for these gradients: not a checkpoint that the layer stands in.
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), own:
            segments = Segments.make(lengths, device, seen, Shared.make(index, 18, device))
            size, value = head_sizes
            tensors = [drawn(18, 4, size), drawn(18, 2, size), drawn(18, 2, value), *([drawn(4)] if sinks else [])]
            upstream = torch.randn(18, 4, value, generator=generator).to(device)
            options = {"window": 4 if window else None}
            got = outcome(varlen_attention, tensors, **options, backend=backend)
            wide = [t.detach().float().requires_grad_() for t in tensors]
            wanted = outcome(varlen_attention_reference, wide, **options)
            return differs("attention by segments", got, wanted, dtype)
    except TRIAL_ERRORS as error:
        return f"attention by segments raises there: {one_line(error, 120)}"


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, sinks: torch.Tensor | None,
    options: Options,
) -> None:  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {tensor.dtype}")
    check_same_device(q=q, k=k, v=v, sinks=sinks, segments=segments.cu_q)
    n = segments.q_ends[-1]
    m = segments.k_ends[-1] if segments.keys is None else n
    if q.dim() != 3 or q.shape[0] != n:
        raise ValueError(f"q must have shape [{n}, Hq, D], a row for each query of the segments; got {list(q.shape)}")
    if k.dim() != 3 or k.shape[0] != m or k.shape[2] != q.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k must have shape [{m}, Hk, {q.shape[2]}] with Hk a divisor of {q.shape[1]}; got {list(k.shape)}"
        )
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must have shape [{m}, {k.shape[1]}, Dv]; got {list(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have shape [{q.shape[1]}], one for each head of q; got {list(sinks.shape)}")
    if not is_number(options.scale):
        raise ValueError(f"scale must be None or a finite number; got {options.scale!r}")
    if options.window is not None and (type(options.window) is not int or options.window < 1):
        raise ValueError(f"window must be None or a positive int; got {options.window!r}")
    if options.softcap is not None and not (is_number(options.softcap) and options.softcap > 0):
        raise ValueError(f"softcap must be None or a positive number; got {options.softcap!r}")
    if not (is_number(options.dropout) and 0 <= options.dropout < 1):
        raise ValueError(f"dropout must lie in [0, 1); got {options.dropout!r}")


@opaque
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal attention inside the segments of one packed row; formulas in the module's docstring.

    Args:
        q: `[n, Hq, D]`, fp32, bf16, fp16 or fp64; any strides. Under autocast q, k and v are cast as PyTorch's own
            attention casts them.
        k: `[n, Hk, D]`, of q's dtype, with Hk a divisor of Hq; where the segments have keys of their own (`k_lengths`
            without `keys`) as many rows as these.
        v: `[n, Hk, Dv]`, the same.
        segments: how the row falls into segments (`Segments.make`), and which keys they share.
        scale: of the scores; None: D ** -0.5.
        window: how many keys a query sees at most, its own among them; None: all before it.
        softcap: of the scaled scores; None: none.
        sinks: `[Hq]`, a logit for each head that takes part in the softmax and has no value; None: none.
        dropout: the share of the probabilities that become zero, as in training.
        backend: overrides the choice of `backends.choose`; no kernel is ours, so a mere `"triton"` changes nothing.

    Returns:
        `[n, Hq, Dv]` in q's dtype.

    Raises:
        TypeError: a dtype that is not allowed, or `segments` of another type.
        ValueError: shapes or dtypes that do not match, an option out of range, an unknown backend or one that does not
            cover the call.
    """
    if autocasts(q) and q.dtype != torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (q, k, v))
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap, dropout)
    if not isinstance(segments, Segments):
        raise TypeError(f"segments must be Segments; got {type(segments).__name__}")
    _check(q, k, v, segments, sinks, options)
    if window is not None and window >= segments.longest_k:
        options = replace(options, window=None)
    if segments.keys is not None:
        k, v = take(k, segments.keys), take(v, segments.keys)

    def uncovered() -> str | None:
        return vendor.uncovered_attention(
            q.dtype, (q.shape[-1], v.shape[-1]), heads=q.shape[1], tokens=k.shape[0], segments=len(segments),
            softcap=softcap, sinks=sinks is not None,
        )  # fmt: skip

    def at() -> backends.Shape:
        return q.dtype, q.shape[0], (q.shape[1], k.shape[1], q.shape[2])

    chosen = backends.choose("varlen_attention", q.device, backend, uncovered, at=at)
    return _attend(q, k, v, sinks, segments, options, chosen)


@falls_back("varlen_attention")
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: Segments,
    options: Options, backend: str,
) -> torch.Tensor:  # fmt: skip
    if backend == "vendor":
        return ByKernel.apply(q, k, v, sinks, segments, options, "vendor")
    out = by_flash(q, k, v, sinks, segments, options)
    if out is not None:
        return out
    return _one_by_one(q, k, v, sinks, segments, options, options.softcap is not None or sinks is not None)
