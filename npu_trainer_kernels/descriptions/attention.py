"""Attention by segments of one row of tokens, which has no kernel of ours, and the attention of generation."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..ops.attention import Options, attend_in_parts
from .base import (
    BACKEND,
    HEAD_DIMS,
    ROW_LIMIT,
    Call,
    Form,
    Function,
    GateEntry,
    GateTensors,
    Inputs,
    Outputs,
    Tensors,
    Work,
    Workload,
    attention_lengths,
    randn,
)

__all__ = ["FORMS", "GATE"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """A batch with padding, and its packed row of tokens.

    Attributes:
        segments: the segments of the packed row.
        padded: for each position of the batch its token in the packed row, or -1 for padding.
        packed: for each token of the packed row its (first) position in the batch.
        seen: `[B, 1, L, L]`, the attention mask.
        batch: B.
    """

    segments: ops.Segments
    padded: ops.Shared
    packed: ops.Shared
    seen: Tensor
    batch: int


@functools.lru_cache(maxsize=4)
def _rows(lengths: tuple[int, ...], device: torch.device) -> _Rows:
    """Makes the batch once, as all layers of a forward share it. `lengths` has the length of the part that all rows
    share, then that of the rest of each row."""
    shared, *own = lengths
    ends = np.cumsum(own) + shared
    widest, first = shared + max(own), np.arange(shared)
    padded = np.full((len(own), widest), -1)
    keys = [first] if shared else []
    for row, (end, length) in enumerate(zip(ends, own, strict=True)):
        tokens = np.concatenate((first, np.arange(end - length, end)))
        padded[row, : shared + length] = tokens
        keys.append(tokens)
    n = int(ends[-1])
    several = ops.Shared.make(np.concatenate(keys), n, device) if shared else None
    segments = ops.Segments.make(
        [shared, *own] if shared else own, device, [len(part) for part in keys] if shared else None, several
    )
    flat = padded.reshape(-1)
    places = np.flatnonzero(flat >= 0)
    _, at = np.unique(flat[places], return_index=True)
    live = torch.from_numpy(padded >= 0).to(device)
    seen = torch.ones(widest, widest, dtype=torch.bool, device=device).tril() & live[:, None, None, :]
    return _Rows(
        segments, ops.Shared.make(flat, n, device), ops.Shared.make(places[at], flat.size, device), seen, len(own)
    )


def _rows_of(t: Tensors) -> _Rows:
    return _rows(tuple(t["lengths"].tolist()), t["q"].device)


def _build_attention(work: Workload, device: torch.device) -> Inputs:
    s = work.sizes
    lengths = s["shared"], *attention_lengths(s["B"], s["T"], s["live"], s["shared"])
    n = sum(lengths)
    tensors = {
        "q": randn(work, device, n, s["Q"], s["D"]),
        "k": randn(work, device, n, s["K"], s["D"]),
        "v": randn(work, device, n, s["K"], s["D"]),
        "lengths": torch.tensor(lengths),
    }
    return Inputs(tensors, ("q", "k", "v"), (randn(work, device, n, s["Q"], s["D"]),))


def _attention_reference(t: Tensors) -> Outputs:
    """Computes attention of the padded batch with a mask and repeated heads, as models do. It computes a shared token
    once in each row. Padding and packing take a few percent of its time."""
    rows = _rows_of(t)

    def batch(x: Tensor) -> Tensor:
        return ops.take(x, rows.padded).view(rows.batch, -1, *x.shape[1:]).transpose(1, 2)

    q, k, v = (batch(t[name]) for name in ("q", "k", "v"))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, rows.seen).transpose(1, 2)
    return ops.take(out.reshape(-1, *out.shape[2:]), rows.packed)


def _attention(backend: str | None) -> Function:
    return lambda t: ops.varlen_attention(t["q"], t["k"], t["v"], _rows_of(t).segments, backend=backend)


def _attention_work(case: Workload) -> dict[str, Work]:
    """Products of what is seen: two forward, five backward; q, k, v and o, and their gradients."""
    s = case.sizes
    lengths = attention_lengths(s["B"], s["T"], s["live"], s["shared"])
    # Every token sees itself and what is before it in its row; what rows share is there once.
    seen = s["shared"] * (s["shared"] + 1) / 2 + sum(n * s["shared"] + n * (n + 1) / 2 for n in lengths)
    product = 2.0 * seen * s["Q"] * s["D"]
    size = float((s["shared"] + sum(lengths)) * s["D"] * case.torch_dtype.itemsize)
    forward, backward = size * 2 * (s["Q"] + s["K"]), size * 4 * (s["Q"] + s["K"])
    return {
        "forward": Work(2 * product, forward),
        "backward": Work(5 * product, backward),
        "both": Work(7 * product, forward + backward),
    }


def _decode_work(case: Workload) -> dict[str, Work]:
    """Two products of what is seen; keys and values of the live places are read once."""
    s = case.sizes
    seen = sum(attention_lengths(s["B"], s["T"], 78)[1:])
    return {"forward": Work(4.0 * seen * s["Q"] * s["D"], 2.0 * seen * s["K"] * s["D"] * case.torch_dtype.itemsize)}


def _build_decode(work: Workload, device: torch.device) -> Inputs:
    """A cache of rows of several lengths, of which the first row is dead. There is no gradient."""
    s = work.sizes
    lengths = (0, *attention_lengths(s["B"], s["T"], 78)[1:])
    tensors = {
        "q": randn(work, device, s["B"], s["Q"], s["D"]),
        "keys": randn(work, device, s["B"], s["K"], s["T"], s["D"]),
        "values": randn(work, device, s["B"], s["K"], s["T"], s["D"]),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    return Inputs(tensors, ())


def _decode_reference(t: Tensors) -> Outputs:
    return ops.decode_attention_reference(t["q"], t["keys"], t["values"], t["lengths"])


def _decode(backend: str | None) -> Function:
    return lambda t: ops.decode_attention(t["q"], t["keys"], t["values"], t["lengths"], backend=backend)


FORMS = {
    "varlen_attention": Form(
        _build_attention, _attention_reference, _attention,
        lambda m, n: {
            "B": 8, "T": n // 8, "live": 37, "shared": max(1, n // 256), "Q": m.heads, "K": m.kv_heads, "D": m.head_dim,
        },
        _attention_work,
    ),
    "decode_attention": Form(
        _build_decode, _decode_reference, _decode,
        lambda m, n: {"B": 8, "T": n // 8, "Q": m.heads, "K": m.kv_heads, "D": m.head_dim},
        _decode_work,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What the Ascend compiler is given
# ---------------------------------------------------------------------------------------------------------------------


def _decode_gate(t: GateTensors, batch: int, heads: int, groups: int, places: int, size: int) -> tuple[Tensor, ...]:
    """Returns q, keys, values and lengths of full rows."""
    lengths = torch.full((batch,), places, dtype=torch.int32, device=t.where)
    shapes = (batch, heads, size), *[(batch, groups, places, size)] * 2
    return *(t.floats(*shape, grad=False) for shape in shapes), lengths


def _grouped(t: GateTensors, keys: int, size: int) -> Mapping[str, int]:
    """Qwen3's heads, in a batch for which each row has one program for each head of keys, and the step's token written
    to the cache before."""
    q, cache, values, lengths = _decode_gate(t, 4, 16, 8, keys // 4, size)
    token = t.floats(4, 8, size, grad=False)
    ops.append_to_cache(token, token, cache, values, lengths - 1, backend=BACKEND)
    ops.decode_attention(q, cache, values, lengths, backend=BACKEND)
    return {"_append_kernel": 4 * token.nbytes, "_attend_kernel": 2 * cache.nbytes + 2 * q.nbytes}


def _everything(t: GateTensors, keys: int, size: int) -> Mapping[str, int]:
    """GPT-OSS's heads, or half of them if they are twice as wide, with every option, in one row of four parts. The op
    itself would choose the number of parts by the number of cores, and the traced core is alone."""
    heads = 64 * 64 // size
    q, cache, values, lengths = _decode_gate(t, 1, heads, 8, keys, size)
    sinks = t.floats(heads, grad=False)
    options = Options(size**-0.5, keys * 3 // 4, 50.0)
    attend_in_parts(q, cache, values, lengths, sinks, options, splits=4)
    parts = heads * 4 * (size + 2 * 8) * 4
    return {
        "_attend_kernel": 2 * cache.nbytes // keys * (keys * 3 // 4) + q.nbytes + 4 * heads + parts,
        "_merge_kernel": parts + q.nbytes,
    }


def _token_gate(t: GateTensors, keys: int, size: int, heads: int, norm: bool) -> Mapping[str, int]:
    """One token of each row of a batch, all of whose rows live, with queries, keys and values in one product."""
    batch, groups, places = keys // 64, 8, 16
    product = t.floats(batch, (heads + 2 * groups) * size, grad=False)
    q, k, v = (part.view(batch, -1, size) for part in product.split([heads * size, groups * size, groups * size], 1))
    cos, sin = (t.floats(batch, size, grad=False) for _ in range(2))
    cache, values = (t.floats(batch, groups, places, size, grad=False) for _ in range(2))
    norms = ops.QkNorm(t.floats(size, grad=False), t.floats(size, grad=False)) if norm else None
    at = torch.zeros(batch, dtype=torch.int32, device=t.where)
    ops.qk_norm_rope_append(q, k, v, cos, sin, cache, values, at, norm=norms, backend=BACKEND)
    return {"_prepare_kernel": 2 * product.nbytes + cos.nbytes + sin.nbytes}


def _token(t: GateTensors, keys: int, size: int) -> Mapping[str, int]:
    """Qwen3's heads, with their norms."""
    return _token_gate(t, keys, size, 16, True)


def _token_without_norm(t: GateTensors, keys: int, size: int) -> Mapping[str, int]:
    """Llama's heads."""
    return _token_gate(t, keys, size, 32, False)


# Each part of a token's heads reads the row's tables and the weights of its norm again, 11% of all bytes.
_TOKEN_LIMIT = 1.12
_GATE_CALLS: tuple[tuple[str, tuple[int, ...], Call, float], ...] = (
    ("decode_attention", HEAD_DIMS, _grouped, ROW_LIMIT),
    ("decode_attention, everything", (64, 128), _everything, ROW_LIMIT),
    ("decode_attention, a token", HEAD_DIMS, _token, _TOKEN_LIMIT),
    ("decode_attention, a token without norms", (64, 128), _token_without_norm, _TOKEN_LIMIT),
)
GATE: tuple[GateEntry, ...] = tuple(
    # Rows are keys of the cache. Lengths say how often the kernel's loops run.
    GateEntry(op, sizes, "head", call, 16384, max_traffic=limit, follows_ids=True)
    for op, sizes, call, limit in _GATE_CALLS
)
