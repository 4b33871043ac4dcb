"""The states that enter the chunks, in torch and by a kernel.

A chunk gets the state E, corrects u by what it reads from E, and leaves X:

    U' = U - P E        X = diag(d) E + W^T U'        P `read` [C, Dk], W `written` [C, Dk], d `decay` [Dk] or [1]

with U' = U without P. E of a row's first chunk is the row's state or zero, and of each other one X of the chunk before.
With dE and dU' the gradients that come from outside and dX that of the next chunk's E, or of the state that is left,

    dU = dU' + W dX     dE <- dE + diag(d) dX - P^T dU     dP = -dU E^T     dW = U' dX^T     dd = sum over Dv of E dX

The kernel does this for one chunk after another of each row. In torch a scan has fewer steps. It takes X = M E + N with
M = diag(d) - W^T P and N = W^T U, composes pairs of chunks, M_b M_a and M_b N_a + N_b, pairs of pairs and so on, and
goes back down: two times log2 of the number of chunks steps of batched products. A loop over groups of chunks, with
about as many steps as the root of that number, would compose as many matrices, but has more steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..fallback import falls_back
from ..host import once_differentiable
from .delta_rule_kernels import launch_backward, launch_forward
from .grid import Grid

__all__ = ["states"]

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


def _in_torch(
    u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None,
    grid: Grid,
) -> States:  # fmt: skip
    """Computes `states` in differentiable operators."""
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul if read is None else torch.matmul
    m, into = decay.unsqueeze(-1), written.transpose(-1, -2)
    if read is not None:
        m = torch.eye(read.shape[-1], dtype=read.dtype, device=read.device) * m - into @ read
    n = into @ u
    if state is None:
        state = n.new_zeros(*n.shape[:2], grid.rows, *n.shape[3:])
    if grid.begins is None:
        entering = _scan(m, n, state, None, product)
    else:
        begun = n.index_add(2, grid.first, product(m.index_select(2, grid.first), state))
        entering = _scan(_cleared(m, grid.begins), begun, state[:, :, :1], grid.begins, product)
        entering = entering.index_copy(2, grid.first, state)
    if read is not None:
        u = u - read @ entering
    m_last, n_last, e_last = (t.index_select(2, grid.last) for t in (m, n, entering))
    return entering, u, product(m_last, e_last) + n_last


# ---------------------------------------------------------------------------------------------------------------------
# By a kernel
# ---------------------------------------------------------------------------------------------------------------------


@falls_back("gated_delta_rule")
def _forward(
    u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None,
    grid: Grid, backend: str,
) -> States:  # fmt: skip
    if backend == "torch":
        return _in_torch(u, read, written, decay, state, grid)
    return launch_forward(u, read, written, decay, state, grid.first, grid.last)


@falls_back("gated_delta_rule")
def _backward(
    u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None,
    entering: torch.Tensor, corrected: torch.Tensor, d_entering: torch.Tensor, d_corrected: torch.Tensor,
    d_left: torch.Tensor | None, grid: Grid, backend: str,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of u, read, written, decay and state."""
    if backend == "torch":
        given: list[Any] = [
            None if t is None else t.detach().requires_grad_() for t in (u, read, written, decay, state)
        ]
        with torch.enable_grad():
            outputs = _in_torch(given[0], given[1], given[2], given[3], given[4], grid)
        upstream = (d_entering, d_corrected, torch.zeros_like(outputs[2]) if d_left is None else d_left)
        found = iter(torch.autograd.grad(outputs, [t for t in given if t is not None], upstream))
        return tuple(None if t is None else next(found) for t in given)
    du, d_leaving, d_decay, d_state = launch_backward(
        read, written, decay, entering, d_entering, d_corrected, d_left, grid.first, grid.last
    )
    d_read = None if read is None else (du @ entering.transpose(-1, -2)).neg_()
    return du, d_read, corrected @ d_leaving.transpose(-1, -2), d_decay, None if state is None else d_state


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor,
                state: torch.Tensor | None, grid: Grid, backend: str) -> Any:  # fmt: skip
        entering, corrected, left = _forward(u, read, written, decay, state, grid, backend)
        ctx.save_for_backward(u, read, written, decay, state, entering, None if read is None else corrected)
        ctx.grid, ctx.backend = grid, backend
        ctx.set_materialize_grads(False)
        return entering, None if read is None else corrected, left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: torch.Tensor | None, d_corrected: torch.Tensor | None,
                 d_left: torch.Tensor | None) -> tuple[Any, ...]:  # fmt: skip
        u, read, written, decay, state, entering, corrected = ctx.saved_tensors
        # Of the state that is left alone they are zero.
        d_entering = torch.zeros_like(entering) if d_entering is None else d_entering
        d_corrected = torch.zeros_like(u) if d_corrected is None else d_corrected
        corrected = u if corrected is None else corrected
        grads = _backward(u, read, written, decay, state, entering, corrected, d_entering, d_corrected, d_left,
                          ctx.grid, ctx.backend)  # fmt: skip
        return *grads, None, None


def states(
    u: torch.Tensor, read: torch.Tensor | None, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None,
    grid: Grid, backend: str,
) -> States:  # fmt: skip
    """Returns the states E that enter the chunks, `[h, n, count, Dk, Dv]`, U' of u's shape, and the states that rows or
    segments leave, `[h, n, rows, Dk, Dv]`; all are differentiable.

    Args:
        u: `[h, n, count, C, Dv]` fp32.
        read: `[h, n, count, C, Dk]`, or None.
        written: `[h, n, count, C, Dk]`.
        decay: `[h, n, count, Dk]`, or 1 for Dk.
        state: `[h, n, rows, Dk, Dv]`, or None for zeros.
        grid: the chunks.
        backend: `"torch"` or `"triton"`.
    """
    if backend == "torch":
        return _in_torch(u, read, written, decay, state, grid)
    entering, corrected, left = _States.apply(u, read, written, decay, state, grid, backend)
    return entering, u if corrected is None else corrected, left
