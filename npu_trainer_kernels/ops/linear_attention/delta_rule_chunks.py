"""The gated delta rule in chunks of tokens.

Inside a chunk, with b_t the sum of the logs of decays up to t and E the state that enters the chunk,

    S_t = diag(exp(b_t)) E + sum over j <= t of diag(exp(b_t - b_j)) k_j u_j^T
    u_t = beta_t (v_t - (exp(b_t) k_t)^T E) - sum over j < t of A_tj u_j    A_tj = beta_t k_t^T diag(exp(b_t - b_j)) k_j

so that U = T (V - K E) with T = (I + A)^-1 diag(beta) and the rows exp(b_t) k_t of K, and the state that leaves is

    X = diag(exp(b_C)) E + R^T U        R_j = exp(b_C - b_j) k_j

Without beta U = V. T V, T K and all else but E are computed for all chunks at once; `chunk_states.py` computes E.

No sum of logs is a difference of two larger ones, because with strong gates such a difference has few digits left:
logs between two tokens are summed from one to the other. All of them are sums of numbers <= 0, so that no exponential
overflows, and a gate of -inf (the state is forgotten) is as good as any other.
"""

from __future__ import annotations

import torch

from .chunk_states import states
from .grid import Grid

__all__ = ["chunked", "normalized", "numbers_of_a_chunk"]

_EPS = 1e-6


def numbers_of_a_chunk(length: int, key: int, value: int, delta: bool, by_channel: bool) -> int:
    """Returns about how many fp32 numbers the backward of a chunk keeps at its peak, for a value head of these sizes.
    The factors are those of `benchmarks/linear_attention.py` at 4,096 tokens and sizes of 128."""
    tokens = 6 * length * (key + value) + 8 * length * length + 18 * length * key * by_channel
    return tokens + 4 * key * (value + key * delta)


def normalized(t: torch.Tensor) -> torch.Tensor:
    """Returns vectors divided by their L2 norms."""
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _EPS)


# ---------------------------------------------------------------------------------------------------------------------
# Inside of chunks
# ---------------------------------------------------------------------------------------------------------------------


def _by_head(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, delta: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns k_t^T diag(decay) k_j (for the delta rule) and q_t^T diag(decay) k_j for j <= t, and the logs of the
    decay from the chunk's begin to each token and from there to its end, for one gate a head."""
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    between = g.expand(*g.shape[:-1], size).masked_fill(~later, 0).cumsum(-2)
    decay = between.masked_fill(later.t(), -torch.inf).exp()
    kk = (k @ k.transpose(-1, -2)) * decay if delta else None
    return kk, (q @ k.transpose(-1, -2)) * decay, g.cumsum(-2), between[..., -1, :].unsqueeze(-1)


def _by_channel(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, delta: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for a gate a channel, which no product of matrices has as a factor. The chunk is made from single tokens
    by doubling: a block of tokens and the next one meet at their border, and both factors of a decay from one token
    over the border to another one are <= 1."""
    before, after = g, torch.zeros_like(g)  # from the block's begin to a token, from the token to the block's end
    rows = [k, q] if delta else [q]
    blocks = [(row * k).sum(-1)[..., None, None].expand(*g.shape[:-1], 1, 1) for row in rows]
    size = 1
    while size < g.shape[-2]:
        pairs = (-1, 2, size)
        (b0, b1), (a0, a1) = (t.unflatten(-2, pairs).unbind(-3) for t in (before, after))
        enters = b1.exp()
        right = torch.cat([row.unflatten(-2, pairs).select(-3, 1) * enters for row in rows], -2)
        crossing = right @ (k.unflatten(-2, pairs).select(-3, 0) * a0.exp()).transpose(-1, -2)
        for i, low in enumerate(crossing.chunk(len(rows), -2)):
            t0, t1 = blocks[i].unflatten(-3, (-1, 2)).unbind(-3)
            blocks[i] = torch.cat((torch.cat((t0, torch.zeros_like(t0)), -1), torch.cat((low, t1), -1)), -2)
        before = torch.stack((b0, b1 + b0[..., -1:, :]), -3).flatten(-4, -2)
        after = torch.stack((a0 + b1[..., -1:, :], a1), -3).flatten(-4, -2)
        size *= 2
    *kk, qk = (t.squeeze(-3) for t in blocks)
    return kk[0] if kk else None, qk, before, after


def _inverse(a: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Returns (I + a)^-1 of strictly lower triangular matrices `[..., C, C]`, C a power of two.

    The inverse of twice as large diagonal blocks follows from that of their halves X: it is X - X a' X, with a' the
    part of a between the halves. The series of powers of a would be as short, but its terms grow beyond the inverse
    and cancel. The last step X + X (I - (I + a) X) is one of Newton's; as a function of a, with X constant, it has the
    gradient of the inverse, so that autograd keeps nothing of the doubling.
    """
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    with torch.no_grad():
        first, *others = levels.unbind()
        x = one - a.masked_fill(first, 0)
        for level in others:
            x = x - x @ (a.masked_fill(level, 0) @ x)
    return x + x @ (one - (x + a @ x))


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    state: torch.Tensor | None, grid: Grid, scale: float, normalize: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Computes the op on chunks of C tokens, of n value heads for each of h key heads, in differentiable operators.

    Args:
        q, k: `[h, 1, count, C, Dk]`. Chunks are next to their matrices, so that every other chunk is no other layout.
        v: `[h, n, count, C, Dv]`.
        g: `[h, n, count, C, Dk]`, or 1 for Dk.
        beta: `[h, n, count, C, 1]`, or None.
        state: `[h, n, rows, Dk, Dv]`, or None for zeros.
        grid: the chunks.
        scale, normalize: see `gated_delta_rule`.
        backend: `"torch"` or `"triton"`, which computes the states that enter the chunks.

    Returns:
        o, of v's shape, and the states after the rows or segments, of the shape of `state`.
    """
    if normalize:
        q, k = normalized(q), normalized(k)
    q = q * scale
    kk, qk, before, after = (_by_head if g.shape[-1] == 1 else _by_channel)(q, k, g, beta is not None)
    enters = before.exp()
    read, u = None, v
    if beta is not None:
        assert kk is not None
        solved = _inverse((kk * beta).tril(-1), grid.levels) * beta.transpose(-1, -2)
        u, read = solved @ v, solved @ (k * enters)
    entering, u, last = states(u, read, k * after.exp(), enters[..., -1, :], state, grid, backend)
    return (q * enters) @ entering + qk @ u, last
