"""Applies a function of rows to slices of the rows, so that its intermediate tensors exist for one slice at a time.

    forward    y[s] = f(x[s]) slice by slice, without gradients; saves x
    backward   computes f(x[s]) of each slice again, then dx[s] and the slice's part of each parameter's gradient

`f` may be any code that treats each row separately: modules with adapters and hooks, autocast, dropout. Backward sums
the parts of a parameter's gradient in fp32, rounds the sum once and returns only the sum to autograd, so DDP and FSDP2
receive each gradient once.

**Inside a checkpoint.** Forward saves x before it computes anything, and afterwards writes the result into the tensor
that `_InSlices` has returned. `torch.utils.checkpoint` (`use_reentrant=False`) stops its recomputation at the last
tensor that the layer saves, which is x in a layer that ends with an MLP and a residual add. So `f` runs twice there, as
under a checkpoint without slices, and not a third time for a result that nothing reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from .host import autocasts, compute_dtype, contiguous_like, once_differentiable, promoted, stands_on

__all__ = ["in_slices"]

Rows = Callable[[torch.Tensor], torch.Tensor]
Parameters = Callable[[], Sequence[torch.Tensor]]


@dataclass
class _Work:
    """The state of one call.

    Attributes:
        function: a function of the rows `[n, H]` of a slice.
        parameters: returns the trained parameters that `function` reads.
        tokens: the maximum number of rows of a slice.
        draws: whether `function` may draw random numbers, which backward then draws again.
        numbers: the states of the generators before the first slice.
        autocast: autocast's dtype in forward; None if autocast was off.
    """

    function: Rows
    parameters: Parameters
    tokens: int
    draws: bool
    numbers: tuple[torch.Tensor, list[int], list[torch.Tensor]] | None = None
    autocast: torch.dtype | None = None

    def slices(self, rows: int) -> Iterator[slice]:
        """Returns as few slices as possible, of nearly equal length."""
        step = -(-rows // max(1, -(-rows // self.tokens)))
        return (slice(i, min(i + step, rows)) for i in range(0, rows, max(1, step)))

    def context(self, x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Restores forward's autocast, without its cache: torch 2.7 would return a weight that was cast here without
        gradients to other code that needs its gradient under the same autocast."""
        if x.device.type == "meta":
            return contextlib.nullcontext()
        return torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None,
                              cache_enabled=False)  # fmt: skip

    def write(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Writes the results of all slices to `out`. Returns False if they have another dtype."""
        if self.draws:
            self.numbers = (torch.get_rng_state(), *get_device_states(x))
        self.autocast = compute_dtype(x) if autocasts(x) else None
        rows, results = x.detach().reshape(-1, x.shape[-1]), out.detach().view(-1, out.shape[-1])
        with torch.no_grad(), self.context(x):
            for part in self.slices(rows.shape[0]):
                result = self.function(rows[part])
                if result.dtype != out.dtype:
                    return False
                results[part] = result
        return True

    @contextlib.contextmanager
    def again(self, x: torch.Tensor) -> Iterator[None]:
        """Restores autocast and the random generators as they were in forward."""
        with contextlib.ExitStack() as stack:
            if self.numbers is not None:
                host, devices, states = self.numbers
                kind = x.device.type
                stack.enter_context(torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind))
                torch.set_rng_state(host)
                set_device_states(devices, states, device_type=kind)
            stack.enter_context(self.context(x))
            yield


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, work: _Work, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.work, ctx.parameters = work, parameters
        stands_on(ctx, *parameters)
        return x.new_empty(*x.shape[:-1], width, dtype=compute_dtype(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        work: _Work = ctx.work
        needs_x, _, _, *needs = ctx.needs_input_grad
        now = work.parameters()
        if len(now) != len(ctx.parameters) or any(p is not q for p, q in zip(now, ctx.parameters, strict=True)):
            raise RuntimeError("parameters of an MLP in slices (tiled_mlp) were exchanged between forward and backward")
        trained = [p for p, needed in zip(now, needs, strict=True) if needed]
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = contiguous_like(rows) if needs_x else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with work.again(x):
            for part in work.slices(rows.shape[0]):
                given = rows[part].detach().requires_grad_(needs_x)
                with torch.enable_grad():
                    result = work.function(given)
                read = [given, *trained] if needs_x else trained
                found = list(torch.autograd.grad(result, read, dy[part], allow_unused=True))
                del result
                if dx is not None:
                    dx[part] = found.pop(0)
                sums = [_added(total, share) for total, share in zip(sums, found, strict=True)]
                del found
        rounded = (t if t is None else t.to(p.dtype) for t, p in zip(sums, trained, strict=True))
        gradients = (next(rounded) if needed else None for needed in needs)
        return None if dx is None else dx.view(x.shape), None, None, *gradients


def _added(total: torch.Tensor | None, share: torch.Tensor | None) -> torch.Tensor | None:
    """Adds in fp32, because rounding the sum after every slice would accumulate errors. The sum is a copy, because
    autograd may return one tensor as the gradient of two parameters."""
    if share is None:
        return total
    return share.to(promoted(share.dtype, torch.float32), copy=True) if total is None else total.add_(share)


def in_slices(
    function: Rows, x: torch.Tensor, parameters: Parameters, *, tokens: int, width: int, draws: bool
) -> torch.Tensor | None:
    """Computes `function(x)` over slices of at most `tokens` rows of x.

    Args:
        function: a function of the rows `[n, H]` of a slice; it must treat each row separately. It runs again in
            backward, with the parameters of that time.
        x: `[..., H]`.
        parameters: returns the trained parameters that `function` reads; called in forward and again in backward.
        tokens: the maximum number of rows of a slice.
        width: the number of columns of the result.
        draws: whether `function` may draw random numbers, which differ from those of a call without slices.

    Returns:
        `[..., width]`; None if the result of `function` has neither x's dtype nor autocast's.
    """
    work = _Work(function, parameters, tokens, draws)
    out = _InSlices.apply(x, width, work, *parameters())
    return out if work.write(x, out) else None
