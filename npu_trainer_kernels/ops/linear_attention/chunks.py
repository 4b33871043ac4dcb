"""The gated delta rule in chunks of tokens, in plain PyTorch.

Inside a chunk, with b_t the sum of the logs of decays up to t and E the state that enters the chunk,

    S_t = diag(exp(b_t)) E + sum over j <= t of diag(exp(b_t - b_j)) k_j u_j^T
    u_t = beta_t (v_t - (exp(b_t) k_t)^T E) - sum over j < t of A_tj u_j    A_tj = beta_t k_t^T diag(exp(b_t - b_j)) k_j

so that U = T (V - K E) with T = (I + A)^-1 diag(beta) and the rows exp(b_t) k_t of K, and the state that leaves is

    X = M E + N        M = diag(exp(b_C)) - R^T T K        N = R^T T V        R_j = exp(b_C - b_j) k_j

Without beta U = V, and M is diagonal. Everything but E is computed for all chunks at once. A scan then composes pairs
of chunks, M_b M_a and M_b N_a + N_b, pairs of pairs and so on, and goes back down: two times log2 of the number of
chunks steps of batched products. A loop over groups of chunks, with about as many steps as the root of that number,
would compose as many matrices, but has more steps.

No sum of logs is a difference of two larger ones, because with strong gates such a difference has few digits left:
logs between two tokens are summed from one to the other. All of them are sums of numbers <= 0, so that no exponential
overflows, and a gate of -inf (the state is forgotten) is as good as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..attention import Segments, once_for_segments, uploaded

__all__ = ["Grid", "chunked", "normalized", "numbers_of_a_chunk"]

# 64 is where the work inside of chunks (it grows with their length) about equals that on states of 128 x 128 numbers.
_LENGTHS = (64, 32, 16)
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
# Rows and segments as chunks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Grid:
    """The chunks of rows of one length, or of the segments of a packed row. A chunk belongs to one of them; the last
    chunk of each is filled up with tokens whose numbers are all zero, which leave the state as it is.

    Attributes:
        rows: the number of rows or segments.
        length: the number of tokens of a chunk.
        count: the number of chunks.
        places: the place in the chunks of each token of a packed row; None for rows, which are padded.
        first, last: `[rows]`, the first and the last chunk of each row or segment.
        begins: `[count]` bool, whether a chunk is the first one of a row; None if there is only one row.
        levels: `[log2(length), length, length]` bool, false where `_inverse` reads a matrix in each of its steps.
    """

    rows: int
    length: int
    count: int
    places: torch.Tensor | None
    first: torch.Tensor
    last: torch.Tensor
    begins: torch.Tensor | None
    levels: torch.Tensor

    @classmethod
    def of(cls, v: torch.Tensor, segments: Segments | None, numbers: Callable[[int], int]) -> Grid:
        """Returns the chunks of v `[B, L, Hv, Dv]`, of the length that needs the least memory: `numbers` are those of a
        chunk by its length. The indexes of segments are made once for all layers that share them."""

        rows, tokens = v.shape[:2]
        lengths = None if segments is None else np.diff((0, *segments.q_ends))

        def chunks(length: int) -> int:
            return rows * -(-tokens // length) if lengths is None else int((-(-lengths // length)).sum())

        length = min(_LENGTHS, key=lambda each: chunks(each) * numbers(each))
        if segments is None:
            of_row, count = -(-tokens // length), chunks(length)
            first = torch.arange(0, count, of_row, device=v.device)
            begins = torch.arange(count, device=v.device) % of_row == 0 if rows > 1 else None
            return cls(rows, length, count, None, first, first + (of_row - 1), begins, _levels(length, v.device))

        def make(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> Grid:
            number = -(-(ends - begins) // length)
            last = np.cumsum(number) - 1
            first = last - number + 1
            is_first = np.zeros(last[-1] + 1, np.bool_)
            is_first[first] = True
            places = np.arange(ends[-1]) + np.repeat(first * length - begins, ends - begins)
            return cls(
                len(ends), length, len(is_first), uploaded(places, where), uploaded(first, where),
                uploaded(last, where), uploaded(is_first, where) if len(ends) > 1 else None, _levels(length, where),
            )  # fmt: skip

        return once_for_segments(segments, ("delta rule", length), make)

    def split(self, t: torch.Tensor) -> torch.Tensor:
        """Returns t `[B, L, H, D]` in fp32 as chunks `[H, count, length, D]`."""
        if self.places is None:
            t = F.pad(t, (0, 0, 0, 0, 0, self.count * self.length // t.shape[0] - t.shape[1]))
        else:
            t = t.new_zeros(self.count * self.length, *t.shape[2:]).index_copy_(0, self.places, t[0])
        t = t.reshape(self.count, self.length, *t.shape[-2:]).permute(2, 0, 1, 3)
        return t.to(torch.float32, memory_format=torch.contiguous_format)

    def join(self, t: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns chunks `[H, count, length, D]` as `[B, L, H, D]`, with `tokens` for L; the inverse of `split`."""
        t = t.permute(1, 2, 0, 3)
        if self.places is None:
            return t.reshape(self.rows, -1, *t.shape[2:])[:, :tokens]
        return t.flatten(0, 1).index_select(0, self.places).unsqueeze(0)


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


def _levels(size: int, device: torch.device) -> torch.Tensor:
    """Returns where the matrices are not read that join blocks of 1, 2, 4 ... tokens with the next ones."""
    at = torch.arange(size, device=device)
    apart = at.unsqueeze(1) ^ at  # its highest bit says in which doubling two tokens get into one block
    return apart >> torch.arange(size.bit_length() - 1, device=device).view(-1, 1, 1) != 1


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


# ---------------------------------------------------------------------------------------------------------------------
# From chunk to chunk
# ---------------------------------------------------------------------------------------------------------------------


def _scan(
    m: torch.Tensor, n: torch.Tensor, start: torch.Tensor, begins: torch.Tensor | None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Returns the states that enter the chunks, E_0 = start and E_(i+1) = M_i E_i + N_i, or those that enter groups.

    In a chunk with which a row begins M_i is zero, and what is multiplied with it is set to zero, so that a NaN of one
    row gets neither into the states of the next one nor back with a gradient. What enters that chunk itself is wrong.
    """
    count = n.shape[-3]
    if count == 1:
        return start
    if count % 2:
        rest = None if begins is None else begins[:-1]
        states = _scan(m[..., :-1, :, :], n[..., :-1, :, :], start, rest, product)
        before = _cleared(states[..., -1:, :, :], None if rest is None else rest[-1:])
        return torch.cat((states, product(m[..., -2:-1, :, :], before) + n[..., -2:-1, :, :]), -3)
    (m_a, m_b), (n_a, n_b) = (t.unflatten(-3, (-1, 2)).unbind(-3) for t in (m, n))
    of_a = of_b = of_both = None
    if begins is not None:
        of_a, of_b = begins.unflatten(0, (-1, 2)).unbind(-1)
        of_both = of_a | of_b
    states = start
    if count > 2:
        both = product(m_b, _cleared(n_a, of_b)) + n_b
        states = _scan(_cleared(product(m_b, m_a), of_both), both, start, of_both, product)
    behind = product(m_a, _cleared(states, of_a)) + n_a
    return torch.stack((states, behind), -3).flatten(-4, -3)


def _cleared(t: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    return t if where is None else t.masked_fill(where.view(-1, 1, 1), 0)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    state: torch.Tensor | None, grid: Grid, scale: float, normalize: bool,
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

    Returns:
        o, of v's shape, and the states after the rows or segments, of the shape of `state`.
    """
    if normalize:
        q, k = normalized(q), normalized(k)
    q = q * scale
    kk, qk, before, after = (_by_head if g.shape[-1] == 1 else _by_channel)(q, k, g, beta is not None)
    enters = before.exp()
    read, written = k * enters, (k * after.exp()).transpose(-1, -2)
    m = enters[..., -1, :].unsqueeze(-1)
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul if beta is None else torch.matmul
    u = v
    if beta is not None:
        assert kk is not None
        solved = _inverse((kk * beta).tril(-1), grid.levels) * beta.transpose(-1, -2)
        u, read = solved @ v, solved @ read
        m = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) * m - written @ read
    n = written @ u
    if state is None:
        state = n.new_zeros(*n.shape[:2], grid.rows, *n.shape[3:])
    if grid.begins is None:
        entering = _scan(m, n, state, None, product)
    else:
        begun = n.index_add(2, grid.first, product(m.index_select(2, grid.first), state))
        entering = _scan(_cleared(m, grid.begins), begun, state[:, :, :1], grid.begins, product)
        entering = entering.index_copy(2, grid.first, state)
    if beta is not None:
        u = u - read @ entering
    m_last, n_last, e_last = (t.index_select(2, grid.last) for t in (m, n, entering))
    return (q * enters) @ entering + qk @ u, product(m_last, e_last) + n_last
