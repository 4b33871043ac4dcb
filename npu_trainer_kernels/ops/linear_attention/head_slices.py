"""The chunked form of the gated delta rule as an autograd function, one slice of heads after another.

The function keeps its inputs alone for backward, which runs a slice forward again and differentiates it. Autograd by
itself would keep every matrix of every chunk of a layer until its backward; here they exist for one slice at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ... import device
from ...support.opaque import opaque
from ..attention import Segments
from ..host import autocasts, once_differentiable
from .delta_rule_chunks import chunked, numbers_of_a_chunk
from .grid import Grid

__all__ = ["in_chunks"]

# What a slice may take in backward, for a moment: with the least a layer of Qwen3-Next with 2,048 tokens is one slice.
# Each slice has about 120 operators forward and 290 backward, whose number in torch grows with the logarithm of its
# tokens. On a card with more memory slices are larger, and there are fewer of them.
_LEAST_SLICE_BYTES = device.GIB
_SLICES_OF_A_DEVICE = 16


def _slice_bytes(spec: device.DeviceSpec) -> int:
    return max(_LEAST_SLICE_BYTES, spec.memory_bytes // _SLICES_OF_A_DEVICE)


class _Slices:
    """The heads of a call, in slices that fit `_SLICE_BYTES`; a slice has one key head at least.

    Args:
        q, v, g, beta, segments, scale, normalize: see `gated_delta_rule`.
        backend: `"torch"` or `"triton"`.
    """

    def __init__(
        self, q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, segments: Segments | None,
        scale: float, normalize: bool, backend: str,
    ) -> None:  # fmt: skip
        def numbers(length: int) -> int:
            return numbers_of_a_chunk(length, q.shape[3], v.shape[3], beta is not None, g.dim() == 4)

        self.tokens, self.heads = q.shape[1:3]
        self.group = v.shape[2] // self.heads
        self.options = scale, normalize, backend
        self.grid = Grid.of(v, segments, numbers)
        whole = 4 * v.shape[2] * self.grid.count * numbers(self.grid.length)
        # A graph has all heads at once, and none of the lookup in it.
        slices = 1 if torch.compiler.is_compiling() else -(-whole // _slice_bytes(device.spec(v.device)))
        self.number = min(self.heads, slices)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """The key heads and the value heads of each slice."""
        ends = [self.heads * i // self.number for i in range(self.number + 1)]
        for begin, end in itertools.pairwise(ends):
            yield slice(begin, end), slice(begin * self.group, end * self.group)

    def split(self, t: torch.Tensor, heads: slice, of_keys: bool) -> torch.Tensor:
        """Returns heads of `[B, L, H, ...]` as chunks `[h, n, count, C, ...]`."""
        t = t[:, :, heads]
        chunks = self.grid.split(t if t.dim() == 4 else t.unsqueeze(-1))
        return chunks.unflatten(0, (-1, 1 if of_keys else self.group))

    def join(self, t: torch.Tensor) -> torch.Tensor:
        """Returns chunks `[h, n, count, C, D]` as `[B, L, h n, D]`."""
        return self.grid.join(t.flatten(0, 1), self.tokens)

    def split_states(self, t: torch.Tensor, values: slice) -> torch.Tensor:
        """Returns states of heads of `[rows, Hv, Dk, Dv]` as `[h, n, rows, Dk, Dv]`."""
        return t[:, values].transpose(0, 1).unflatten(0, (-1, self.group))

    def join_states(self, t: torch.Tensor) -> torch.Tensor:
        """Returns states `[h, n, rows, Dk, Dv]` as `[rows, h n, Dk, Dv]`."""
        return t.flatten(0, 1).transpose(0, 1)

    def inputs(self, given: tuple[torch.Tensor | None, ...], keys: slice, values: slice) -> list[torch.Tensor | None]:
        """Returns the chunks of q, k, v, g and beta, and the states."""
        chunks = [
            None if t is None else self.split(t, keys if i < 2 else values, i < 2) for i, t in enumerate(given[:5])
        ]
        state = given[5]
        return [*chunks, None if state is None else self.split_states(state, values)]

    def run(self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked(q, k, v, g, beta, state, self.grid, *self.options)


def _in_fp32(t: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leaves autocast, in which products of matrices run in 16 bits."""
    return torch.autocast(t.device.type, enabled=False) if autocasts(t) else contextlib.nullcontext()


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
                beta: torch.Tensor | None, state: torch.Tensor | None, segments: Segments | None, scale: float,
                normalize: bool, return_state: bool, backend: str) -> Any:  # fmt: skip
        given = q, k, v, g, beta, state
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        o, last = torch.empty_like(v, memory_format=torch.contiguous_format), None
        if return_state:
            rows = v.shape[0] if segments is None else len(segments)
            last = v.new_zeros(rows, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        ctx.slices = _Slices(q, v, g, beta, segments, scale, normalize, backend) if v.numel() else ()
        if not v.numel() and last is not None and state is not None:
            last.copy_(state)
        with _in_fp32(v):
            for keys, values in ctx.slices:
                chunks, states = ctx.slices.run(*ctx.slices.inputs(given, keys, values))
                o[:, :, values] = ctx.slices.join(chunks)
                if last is not None:
                    last[:, values] = ctx.slices.join_states(states)
        return o if last is None else (o, last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dlast: torch.Tensor | None = None) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        needs = ctx.needs_input_grad[:6]
        grads = [torch.zeros_like(t) if need else None for t, need in zip(given, needs, strict=True)]
        if not ctx.slices and grads[5] is not None and dlast is not None:
            grads[5].copy_(dlast)
        with _in_fp32(given[2]):
            for keys, values in ctx.slices:
                _differentiate(ctx.slices, given, grads, do, dlast, keys, values)
        return *grads, None, None, None, None, None


def _differentiate(
    slices: _Slices, given: tuple[torch.Tensor | None, ...], grads: list[torch.Tensor | None], do: torch.Tensor | None,
    dlast: torch.Tensor | None, keys: slice, values: slice,
) -> None:  # fmt: skip
    """Runs a slice of heads forward again and writes its gradients to `grads`."""
    leaves = [
        t if t is None else t.detach().requires_grad_(grad is not None)
        for t, grad in zip(slices.inputs(given, keys, values), grads, strict=True)
    ]
    outputs, upstream = [], []
    # Hide the tensors of this graph from outer hooks, such as those of a checkpoint around the layer.
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), own:
        o, last = slices.run(*leaves)
    for output, grad in ((o, do), (last, dlast)):
        if grad is not None and output.requires_grad:
            outputs.append(output)
            upstream.append(slices.split(grad, values, False) if output is o else slices.split_states(grad, values))
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not outputs or not wanted:
        return
    found = iter(torch.autograd.grad(outputs, wanted, upstream, allow_unused=True))
    for i, grad in enumerate(grads):
        part = None if grad is None else next(found)
        if grad is None or part is None:
            continue
        if i == 5:
            grad[:, values] = slices.join_states(part)
        else:
            to = grad[:, :, keys if i < 2 else values]
            to.copy_(slices.join(part).view_as(to))


def _traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None,
    state: torch.Tensor | None, segments: Segments | None, scale: float, normalize: bool, return_state: bool,
    backend: str,
) -> Any:  # fmt: skip
    """Computes all heads at once in operators that a compiler differentiates, for a graph that must not break."""
    slices = _Slices(q, v, g, beta, segments, scale, normalize, backend)
    every = slice(None)
    with torch.autocast(v.device.type, enabled=False):
        o, last = slices.run(*slices.inputs((q, k, v, g, beta, state), every, every))
    o = slices.join(o).to(v.dtype)
    return (o, slices.join_states(last)) if return_state else o


def _apply(*args: Any) -> Any:
    return _GatedDeltaRule.apply(*args)


in_chunks = opaque(_apply, in_full_graphs=_traced)
