"""Causal attention inside the segments of one packed row.

    s_ij = scale q_i k_j                cap(s) = softcap tanh(s / softcap)            in each head; fp32
    p_ij = exp(s_ij) / (sum over the keys l that query i sees of exp(s_il) + exp(sink))      no sink: without that term
    o_i = sum over the keys j that query i sees of dropout(p_ij) v_j                 rounded once, to q's dtype

Query i of a segment with Lq queries and Lk keys sees the keys 0 .. Lk - Lq + i of its segment, with a window the last
`window` of them, and no keys of other segments. Hq / Hk heads of q share a head of k and v.

Segments may share keys. The op then gathers the keys from the packed row (`shared_rows.take`) and sums the gradient of
a key that several segments see in fp32, in a fixed order.

Backend "vendor" is torch_npu's operator. Backend "torch" uses flash attention on CUDA if that supports the call
(`segment_kernels`). Otherwise it processes one segment after another, with `scaled_dot_product_attention` or, with a
soft cap or sinks, with the formula. Lengths are numbers on the host, so the host does not wait for the device.
A device's graph cannot go by numbers of the host. In one the op goes by `BoundedSegments`: flash attention reads where
segments end from the device, and on a CPU, where tapes stand in for graphs, a mask that is computed from there serves
all segments at once.
`torch.compile` calls the op without tracing it, because a traced op would be recompiled for each batch's lengths.
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
from .bounded_segments import BoundedSegments
from .segment_kernels import ByKernel, by_flash, flash_serves
from .segments import Options, Segments
from .shared_rows import Shared, take

__all__ = [
    "Segments", "Shared", "needs_lengths", "take", "trial", "unserved", "varlen_attention",
    "varlen_attention_reference",
]  # fmt: skip

_DTYPES = (*FLOATS, torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# One segment after another
# ---------------------------------------------------------------------------------------------------------------------


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the mask `[queries, keys]` of the keys that each query sees; None if it sees all."""
    narrow = window is not None and window < keys
    if queries == 1 and not narrow:
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen.triu_(keys - queries - window + 1) if narrow and window is not None else seen


def _by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, options: Options,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes a segment by the formula: q `[Lq, Hq, D]`, k `[Lk, Hk, D]`, v `[Lk, Hk, Dv]`, sinks `[Lq, Hq]` in the
    dtype of the scores -> `[Lq, Hq, Dv]`. With a mask `[Lq, Lk]` it says which keys each query sees."""
    (queries, heads, size), (keys, shared, _) = q.shape, k.shape
    group = heads // shared
    # The heads of q that share a head of k become additional rows of q.
    rows = q.view(queries, shared, group, size).permute(1, 2, 0, 3).reshape(shared, group * queries, size)
    scores = torch.matmul(rows, k.permute(1, 2, 0)).to(torch.promote_types(q.dtype, torch.float32)) * options.scale
    scores = scores.view(shared, group, queries, keys)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    seen = _seen(queries, keys, options.window, q.device) if mask is None else mask
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


def _by_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes several segments of one size with PyTorch's attention: q `[s, Lq, Hq, D]`, k and v likewise. With a mask
    `[Lq, Lk]` it says which keys each query sees."""
    queries, keys = q.shape[1], k.shape[1]
    # All backends of PyTorch's attention agree on `is_causal` only if both lengths are equal.
    causal = mask is None and queries == keys > 1 and (options.window is None or options.window >= keys)
    seen = mask if causal or mask is not None else _seen(queries, keys, options.window, q.device)
    group = q.shape[2] // k.shape[2]
    # In 16 bits the CPU's attention sums the gradients of heads that share keys in 16 bits, with twice the error. On
    # other devices the backends for fp32 and for masks do not support shared heads.
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
    """Calls `_by_pytorch` for every segment. The call itself dominates the time of a short segment, so segments of one
    size share a call: completions and prompts of one batch have few sizes."""
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
    # Split once instead of slicing for each segment: the backward of a split is one concatenation.
    parts = list(zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True))
    if not by_formula:
        return torch.cat(_size_by_size(parts, options))
    each: Sequence[torch.Tensor | None] = [None] * len(parts)
    if sinks is not None:
        # Expand the sinks to one per query, so that their gradient is one sum and is rounded once, not per segment.
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
    """Computes the op in plain PyTorch: one segment after another, each by the formula."""
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
    """Returns why the op should not replace a layer's attention on this device, for a report, or None if it may.

    Args:
        device: the device of q, k and v.
        dtype: the dtype of q, k and v.
        head_sizes: D of q and k, and D of v.
        window: the window of the layer.
        softcap: the soft cap of the layer.
        sinks: whether the layer has sinks.
        dropout: the dropout of the layer.
        segments: the maximum number of segments.
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
    # On an NPU nobody has measured that one segment after another is faster than the padded batch.
    chosen, why = backends.explain("varlen_attention", device, backend, uncovered)
    return None if chosen == "vendor" else why


def needs_lengths(
    device: torch.device,
    dtype: torch.dtype,
    head_sizes: tuple[int, int],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    backend: str | None = None,
) -> str | None:
    """Returns why the op cannot go by `BoundedSegments` on a device, for a report, or None if it can. A mask of all
    queries and keys serves tests on a CPU; on an accelerator its size would be the square of the tokens.

    Args:
        device, dtype, head_sizes, window, softcap, sinks, backend: as for `unserved`.
    """
    if backends.explain("varlen_attention", device, backend)[0] == "vendor":
        return "torch_npu's attention takes the lengths of segments from the host"
    if device.type == "cpu" or flash_serves(device, dtype, head_sizes, Options(1.0, window, softcap), sinks):
        return None
    name = str(dtype).removeprefix("torch.")
    cap = "" if softcap is None else " with a soft cap"
    return f"no flash attention serves {name}{cap} with heads of {head_sizes[0]}, and others go by lengths on the host"


@functools.cache
def trial(
    device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, int], window: bool, softcap: float | None,
    sinks: bool, backend: str | None,
) -> str | None:  # fmt: skip
    """Compares attention by segments on a device with the reference: output and gradients of a few tokens. Returns a
    reason for a report if they differ, else None.

    The kernels on an accelerator belong to PyTorch or the vendor, and their behaviour may change between versions. The
    comparison waits for the device; its result is cached.

    Args:
        device: as for `unserved`.
        dtype: as for `unserved`.
        head_sizes: as for `unserved`.
        window: whether the layer has a window.
        softcap: as for `unserved`.
        sinks: whether the layer has sinks.
        backend: as for `unserved`.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # A shared prefix, two segments that continue it, and one separate segment.
    lengths, seen = [6, 4, 3, 5], [6, 10, 9, 5]
    index = np.array([*range(6), *range(10), *range(6), *range(10, 13), *range(13, 18)])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    def outcome(attention: Any, tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        q, k, v, *rest = tensors
        out = attention(q, k, v, segments, softcap=softcap, sinks=rest[0] if rest else None, **options)
        return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]

    # Hide the tensors that these gradients save from outer hooks, such as those of a checkpoint around the layer.
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments | BoundedSegments,
    sinks: torch.Tensor | None, options: Options,
) -> None:  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {tensor.dtype}")
    check_same_device(q=q, k=k, v=v, sinks=sinks, segments=segments.cu_q)
    n, m = segments.queries, segments.key_rows
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
    segments: Segments | BoundedSegments,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes causal attention inside the segments of one packed row. The module's docstring has the formulas.

    Args:
        q: `[n, Hq, D]`, fp32, bf16, fp16 or fp64; any strides. Under autocast q, k and v are cast as PyTorch's
            attention casts them.
        k: `[n, Hk, D]`, of q's dtype, with Hk a divisor of Hq; if the segments have `k_lengths` without `keys`, it has
            as many rows as the sum of `k_lengths`.
        v: `[n, Hk, Dv]`, likewise.
        segments: the segments of the row (`Segments.make`), and the keys that they share; in a graph, the
            `BoundedSegments` that a table on the device describes.
        scale: factor of the scores; None for D ** -0.5.
        window: the maximum number of keys that a query sees, including the one at its position; None for all.
        softcap: soft cap of the scaled scores, or None.
        sinks: `[Hq]`, one additional logit per head in the softmax, without a value; or None.
        dropout: the fraction of probabilities that are set to zero, as in training.
        backend: overrides the choice of `backends.choose`. The package has no kernel of its own for this op, so
            `"triton"` without an op name changes nothing.

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
    if not isinstance(segments, Segments | BoundedSegments):
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    segments: Segments | BoundedSegments, options: Options, backend: str,
) -> torch.Tensor:  # fmt: skip
    if backend == "vendor":
        return ByKernel.apply(q, k, v, sinks, segments, options, "vendor")
    out = by_flash(q, k, v, sinks, segments, options)
    if out is not None:
        return out
    by_formula = options.softcap is not None or sinks is not None
    if isinstance(segments, BoundedSegments):
        return _by_mask(q, k, v, sinks, segments, options, by_formula)
    return _one_by_one(q, k, v, sinks, segments, options, by_formula)


def _by_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, segments: BoundedSegments,
    options: Options, by_formula: bool,
) -> torch.Tensor:  # fmt: skip
    """Computes all segments at once, with a mask of all queries and keys that the device computes. Queries in no
    segment get NaNs, since the kernels that this stands in for leave there what the memory had before."""
    seen = segments.seen(options.window)
    if by_formula:
        sink = None if sinks is None else sinks.to(torch.promote_types(q.dtype, torch.float32)).expand(len(q), -1)
        out = _by_formula(q, k, v, sink, options, seen)
    else:
        out = _by_pytorch(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), options, seen)[0]
    return out.masked_fill(~seen.any(1)[:, None, None], torch.nan)
