"""Where the segments of a packed row lie, as the kernels, the torch form and the returned state need it.

The host knows the lengths of segments. It computes every index once for all layers that share a `Segments`, and uploads
it, so that it never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..attention import Segments, once_for_segments, uploaded

__all__ = ["Extended", "add_gradient_of_last", "chunks_of", "extended_places", "last_inputs"]


def chunks_of(segments: Segments, tokens: int) -> torch.Tensor:
    """Returns the chunks of at most so many tokens, `[n, 5]` int32: the segment, the first and the end of the chunk's
    tokens, and those of the segment's."""

    def make(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> torch.Tensor:
        number = -(-(ends - begins) // tokens)
        of = np.repeat(np.arange(len(ends)), number)
        begin = begins[of] + tokens * (np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number))
        chunks = np.stack((of, begin, np.minimum(begin + tokens, ends[of]), begins[of], ends[of]), 1)
        return uploaded(chunks.astype(np.int32), where)

    return once_for_segments(segments, ("chunks", tokens), make)


@dataclass(frozen=True, eq=False)
class Extended:
    """The packed row with K - 1 places before each segment: where the tokens lie in it, and where those places.

    Attributes:
        rows: the number of segments.
        size: the number of places.
        tokens: `[T]`, the place of each token.
        before: `[rows (K - 1)]`, the places before segments.
    """

    rows: int
    size: int
    tokens: torch.Tensor
    before: torch.Tensor


def extended_places(segments: Segments, taps: int) -> Extended:
    def make(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> Extended:
        keep = taps - 1
        of = np.repeat(np.arange(len(ends)), ends - begins)
        tokens = np.arange(ends[-1]) + keep * (of + 1)
        before = (begins + keep * np.arange(len(ends)))[:, None] + np.arange(keep)
        size = int(ends[-1]) + keep * len(ends)
        return Extended(len(ends), size, uploaded(tokens, where), uploaded(before.reshape(-1), where))

    return once_for_segments(segments, ("extended", taps), make)


@dataclass(frozen=True, eq=False)
class _Last:
    """The last K - 1 inputs of all segments, `[n (K - 1)]`: which of them are tokens, and of which places; and which
    are numbers of the state, `[n (K - 1)]`, in segments of fewer tokens."""

    of_tokens: torch.Tensor
    tokens: torch.Tensor
    of_state: torch.Tensor
    state: torch.Tensor


def _last_places(segments: Segments, taps: int) -> _Last:
    def make(begins: np.ndarray, ends: np.ndarray, where: torch.device) -> _Last:
        places = (ends[:, None] - (taps - 1) + np.arange(taps - 1)).reshape(-1)
        first = np.repeat(begins, taps - 1)
        of_tokens, of_state = np.flatnonzero(places >= first), np.flatnonzero(places < first)
        # The state's last number belongs to the place before the segment's first one.
        row = of_state // max(1, taps - 1)
        state = (row + 1) * (taps - 1) + places[of_state] - begins[row]
        return _Last(*(uploaded(found, where) for found in (of_tokens, places[of_tokens], of_state, state)))

    return once_for_segments(segments, ("last", taps), make)


def last_inputs(x: torch.Tensor, state: torch.Tensor | None, segments: Segments | None, taps: int) -> torch.Tensor:
    """Returns the last K - 1 inputs of each row or segment."""
    keep, length = taps - 1, x.shape[2]
    if segments is None:
        if length >= keep:
            return x[..., length - keep :].clone()
        before = x.new_zeros(x.shape[0], x.shape[1], keep) if state is None else state
        return torch.cat((before[..., length:], x), 2)
    places, channels = _last_places(segments, taps), x.shape[1]
    last = x.new_zeros(len(segments) * keep, channels)
    last.index_copy_(0, places.of_tokens, x[0].t().index_select(0, places.tokens))
    if state is not None:
        numbers = state.transpose(1, 2).reshape(-1, channels)
        last.index_copy_(0, places.of_state, numbers.index_select(0, places.state))
    return last.view(len(segments), keep, channels).transpose(1, 2)


def add_gradient_of_last(
    dx: torch.Tensor | None, dstate: torch.Tensor | None, d: torch.Tensor, segments: Segments | None, length: int
) -> None:
    """Adds d, the gradient of the last inputs, to the gradients of x and of the state, in place."""
    keep = d.shape[2]
    if segments is None:
        n = min(length, keep)
        if dx is not None:
            dx[..., length - n :] += d[..., keep - n :]
        if dstate is not None and n < keep:
            dstate[..., n:] += d[..., : keep - n]
        return
    places, channels = _last_places(segments, keep + 1), d.shape[1]
    rows = d.transpose(1, 2).reshape(-1, channels)
    # No index is there twice, so that sums have no order.
    if dx is not None:
        dx[0].t().index_add_(0, places.tokens, rows.index_select(0, places.of_tokens))
    if dstate is not None:
        flat = dstate.transpose(1, 2).view(-1, channels)
        flat.index_add_(0, places.state, rows.index_select(0, places.of_state))
