"""The gated delta rule, the state of linear-attention layers, and the same state without the delta rule (Mamba 2).

    S'_t = diag(exp(g_t)) S_{t-1}                              [Dk, Dv] for each value head
    u_t  = beta_t (v_t - S'_t^T k_t)                           or u_t = v_t without beta
    S_t  = S'_t + k_t u_t^T
    o_t  = scale S_t^T q_t

The gate g_t <= 0 is one number for a head (Qwen3-Next, Mamba 2) or one for each channel of the key (Kimi-Linear). Each
key head serves Hv / Hk neighbouring value heads. With `normalize`, q and k are divided by their L2 norms,
x rsqrt(sum of x^2 + 1e-6). For Mamba 2, k is B, q is C, v is dt x, g is dt A and scale is 1. All of it is computed in
fp32, also under autocast, and o is rounded once.

The op runs in chunks of tokens (`delta_rule_chunks.py`), one slice of heads after another (`head_slices.py`). All of
it is in torch but for the states that enter the chunks (`chunk_states.py`), for which backend "triton" has a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from ..attention import Segments
from ..checks import check_float, check_same_device, is_number
from .delta_rule_chunks import normalized
from .fla import by_fla, choose
from .head_slices import in_chunks

__all__ = ["gated_delta_rule", "gated_delta_rule_reference"]


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    segments: Segments | None = None,
    state: torch.Tensor | None = None,
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the op in plain PyTorch, one token after another, in fp32 or in fp64 if v is fp64."""
    if segments is not None:
        lengths = [length for length, _ in segments.lengths]
        parts = [(None,) * len(lengths) if t is None else t.split(lengths, 1) for t in (q, k, v, g, beta)]
        states = [None] * len(lengths) if state is None else state.split(1)
        options: dict[str, Any] = {"scale": scale, "normalize": normalize, "return_state": True}
        of_segments = [
            gated_delta_rule_reference(*part, state=s, **options) for *part, s in zip(*parts, states, strict=True)
        ]
        o, last = torch.cat([each[0] for each in of_segments], 1), torch.cat([each[1] for each in of_segments])
        return (o, last) if return_state else o
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    q, k, v, g = (t.to(wide) for t in (q, k, v, g))
    if normalize:
        q, k = normalized(q), normalized(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    if g.dim() == 3:
        g = g.unsqueeze(-1)
    s = v.new_zeros(v.shape[0], *v.shape[2:3], k.shape[3], v.shape[3]) if state is None else state.to(wide)
    outputs = []
    for t in range(v.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        u = v[:, t]
        if beta is not None:
            u = beta[:, t].to(wide).unsqueeze(-1) * (u - (s * k[:, t].unsqueeze(-1)).sum(-2))
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append((s * q[:, t].unsqueeze(-1)).sum(-2))
    o = (torch.stack(outputs, 1) if outputs else v).to(dtype)
    return (o, s) if return_state else o


# ---------------------------------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------------------------------


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    scale: float | None, segments: Segments | None, state: torch.Tensor | None,
) -> None:  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g)):
        check_float(name, tensor)
    for name, optional in (("beta", beta), ("state", state)):
        if optional is not None:
            check_float(name, optional)
    if q.dim() != 4 or not q.shape[2] or not q.shape[3]:
        raise ValueError(f"q must have shape [B, L, Hk, Dk]; got {list(q.shape)}")
    rows, tokens, heads, size = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {list(q.shape)}; got {list(k.shape)}")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or not v.shape[2] or v.shape[2] % heads or not v.shape[3]:
        raise ValueError(
            f"v must have shape [{rows}, {tokens}, Hv, Dv] with Hv a multiple of {heads}; got {list(v.shape)}"
        )
    of_heads = v.shape[:3]
    if g.shape not in (of_heads, (*of_heads, size)):
        raise ValueError(f"g must have shape {list(of_heads)} or {[*of_heads, size]}; got {list(g.shape)}")
    if beta is not None and beta.shape != of_heads:
        raise ValueError(f"beta must have shape {list(of_heads)}; got {list(beta.shape)}")
    if scale is not None and not is_number(scale):
        raise ValueError(f"scale must be None or a finite number; got {scale!r}")
    if segments is not None:
        if not isinstance(segments, Segments):
            raise TypeError(f"segments must be None or a Segments; got {type(segments).__name__}")
        if segments.k_ends != segments.q_ends or segments.keys is not None:
            raise ValueError("segments must share no keys: the tokens before a segment are in its state")
        if rows != 1 or segments.q_ends[-1] != tokens:
            raise ValueError(
                f"q must have shape [1, {segments.q_ends[-1]}, Hk, Dk] with these segments; got {list(q.shape)}"
            )
        rows = len(segments)
    expected = [rows, v.shape[2], size, v.shape[3]]
    if state is not None and (list(state.shape) != expected or state.dtype != torch.float32):
        raise ValueError(f"state must have shape {expected} and be float32; got {list(state.shape)} of {state.dtype}")
    check_same_device(q=q, k=k, v=v, g=g, beta=beta, state=state, segments=None if segments is None else segments.cu_q)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    segments: Segments | None = None,
    state: torch.Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the state of a linear-attention layer and what its queries read from it. The module's docstring has the
    formulas. q, k, v, g, beta and state have gradients; so has the state that is returned.

    Args:
        q: `[B, L, Hk, Dk]`, fp32, bf16 or fp16; any strides.
        k: of q's shape.
        v: `[B, L, Hv, Dv]`, with Hv a multiple of Hk. Each key head serves Hv / Hk neighbouring value heads.
        g: the logs of the decays, <= 0 (which is not checked): `[B, L, Hv]`, or `[B, L, Hv, Dk]` for each channel.
        beta: `[B, L, Hv]`, or None for no delta rule.
        scale: the factor of o; None for Dk ** -0.5.
        normalize: whether q and k are divided by their L2 norms first.
        segments: the segments of a packed row (B = 1), each of which is a row of its own; None if each row is one. They
            must share no keys.
        state: `[B, Hv, Dk, Dv]`, or with segments one for each, `[n, Hv, Dk, Dv]`, fp32: the state before each row or
            segment; None for zeros.
        return_state: whether to return the state after each row or segment, too.
        backend: `"fla"` (flash-linear-attention, on an accelerator where it is installed and computes the same, see
            `unserved_by_fla`), or overrides the choice of `backends.choose`; None for fla if it serves the call and no
            backend is named in the environment, and else that choice.

    Returns:
        o `[B, L, Hv, Dv]` in v's dtype; with return_state, (o, the state, with the shape and dtype of `state`).

    Raises:
        TypeError: a dtype that is not allowed, segments of another type.
        ValueError: shapes that do not match, a state that is not fp32, a scale that is no finite number, segments that
            share keys, tensors on several devices, an unknown backend, or fla where it does not serve the call.
    """
    _check(q, k, v, g, beta, scale, segments, state)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    chosen = choose(q, k, v, g, beta, bool(normalize), backend)
    given = q, k, v, g, beta, state, segments, scale, bool(normalize), bool(return_state)
    return by_fla(*given) if chosen == "fla" else in_chunks(*given, chosen)
