"""The kernels of the convolution, and their launches; `causal_conv1d.py` has the formulas. A program walks along the
tokens of chunks for a block of channels.

Numbers 0 .. 7 of a variable belong to the current token and to those before it (x, g), or to the taps of these tokens
(w, and d for its gradient); the first K exist. Triton has no lists that a loop carries, and triton-ascend 3.2 no
tuples. v is w in the other order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import device, tiling
from ...support.triton import jit, tl
from ..attention import Segments
from ..blocks import load_fp32, store
from ..gates import activated, slope
from ..launch import launch
from ..norms import sum_of_partials
from .places import chunks_of

__all__ = ["MOST_TAPS", "ConvolutionForm", "Gradients", "launch_backward", "launch_forward"]

MOST_TAPS = 8
"""The maximum number of taps: a kernel has a variable for each."""
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of x, weight, bias and state."""


@dataclass(frozen=True)
class ConvolutionForm:
    """The options of a call, and the number of taps."""

    taps: int
    silu: bool
    segments: Segments | None


@jit
def _sum_of_products(
    total, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, TAPS: tl.constexpr
):  # fmt: skip
    total += a0 * b0
    if TAPS > 1:
        total += a1 * b1
    if TAPS > 2:
        total += a2 * b2
    if TAPS > 3:
        total += a3 * b3
    if TAPS > 4:
        total += a4 * b4
    if TAPS > 5:
        total += a5 * b5
    if TAPS > 6:
        total += a6 * b6
    if TAPS > 7:
        total += a7 * b7
    return total


@jit
def _tap(weight, channels, stride, tap_stride, found, MASKED: tl.constexpr, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Returns one tap of all channels as fp32, or of those that do not exist anything."""
    if TAP >= 0 and TAP < TAPS:
        return load_fp32(weight + channels * stride + TAP * tap_stride, found, MASKED)
    else:
        return 0.0


@jit
def _before(x, token_stride, state, place_stride, place, found, COLS: tl.constexpr, MASKED: tl.constexpr,
            HAS_STATE: tl.constexpr, BACK: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Returns the input `BACK` places before a chunk, whose first token x points to and is the `place`-th of its row or
    segment, from the tokens or from the state; of an input that no tap reads anything."""
    if BACK < TAPS:
        value = tl.zeros([COLS], tl.float32)
        if place >= BACK:
            value = load_fp32(x - BACK * token_stride, found, MASKED)
        elif HAS_STATE:
            value = load_fp32(state + (TAPS - 1 - BACK + place) * place_stride, found, MASKED)
        return value
    else:
        return 0.0


@jit
def _chunk(chunks, task, per_row, length, HAS_SEGMENTS: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the row or segment, the chunk's first token and its end, and those of the row or segment."""
    if HAS_SEGMENTS:
        at = chunks + task * 5
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    else:
        row = task // per_row
        begin = (task - row * per_row) * TOKENS
        end = begin + TOKENS
        if end > length:
            end = length
        return row, begin, end, 0, length


@jit
def _row_offset(row, stride, ALIGNED: tl.constexpr):
    """Returns the offset of a row of x. With ALIGNED the stride counts 16 numbers, so that the compiler knows that
    loads may be wide; a kernel must not be specialised on a stride that depends on lengths."""
    if ALIGNED:
        return tl.cast(row, tl.int64) * stride * 16
    else:
        return tl.cast(row, tl.int64) * stride


@jit
def _lanes(channels, stride, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Returns the offsets of channels. With UNIT they lie side by side; with WIDE an offset may exceed 2^31."""
    if UNIT:
        return channels
    elif WIDE:
        return channels.to(tl.int64) * stride
    else:
        return channels * stride


@jit(lengths=("x_row", "x_channel", "y_row", "y_channel", "n_tasks", "per_row", "length"))
def _forward_kernel(
    x,  # [B, CHANNELS, length] with strides x_row, x_channel, x_token; likewise y; one row if HAS_SEGMENTS
    weight,  # [CHANNELS, TAPS] with strides w_channel, w_tap
    bias,  # [CHANNELS], read if HAS_BIAS
    state,  # [rows or segments, CHANNELS, TAPS - 1] with strides s_row, s_channel, s_place, read if HAS_STATE
    chunks,  # [n_tasks, 5] int32, read if HAS_SEGMENTS
    y,
    x_row,
    x_channel,
    x_token,
    w_channel,
    w_tap,
    s_row,
    s_channel,
    s_place,
    y_row,
    y_channel,
    y_token,
    n_tasks,
    per_row,  # chunks of a row
    length,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    X_UNIT: tl.constexpr,  # channels of x lie side by side; likewise Y_UNIT
    Y_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,  # row strides count 16 numbers
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    MASKED: tl.constexpr = CHANNELS % COLS != 0
    channels = tl.program_id(1) * COLS + tl.arange(0, COLS)
    found = channels < CHANNELS
    w0 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 1, TAPS)
    w1 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 2, TAPS)
    w2 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 3, TAPS)
    w3 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 4, TAPS)
    w4 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 5, TAPS)
    w5 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 6, TAPS)
    w6 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 7, TAPS)
    w7 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 8, TAPS)
    start = 0.0
    if HAS_BIAS:
        start = load_fp32(bias + channels, found, MASKED)
    x += _lanes(channels, x_channel, X_UNIT, WIDE)
    y += _lanes(channels, y_channel, Y_UNIT, WIDE)
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        row, begin, end, first, _last = _chunk(chunks, task, per_row, length, HAS_SEGMENTS, TOKENS)
        of_x = x + _row_offset(row, x_row, ALIGNED)
        of_y = y + _row_offset(row, y_row, ALIGNED)
        of_state = state + tl.cast(row, tl.int64) * s_row + channels * s_channel
        at = of_x + tl.cast(begin, tl.int64) * x_token
        place = begin - first
        x1 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 1, TAPS)
        x2 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 2, TAPS)
        x3 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 3, TAPS)
        x4 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 4, TAPS)
        x5 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 5, TAPS)
        x6 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 6, TAPS)
        x7 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 7, TAPS)
        for token in range(begin, end):
            x0 = load_fp32(of_x + tl.cast(token, tl.int64) * x_token, found, MASKED)
            p = _sum_of_products(start, w0, w1, w2, w3, w4, w5, w6, w7, x0, x1, x2, x3, x4, x5, x6, x7, TAPS)
            if SILU:
                p, _s = activated(p, "silu", 1.0)
            store(of_y + tl.cast(token, tl.int64) * y_token, p, found, MASKED)
            if TAPS > 7:
                x7 = x6
            if TAPS > 6:
                x6 = x5
            if TAPS > 5:
                x5 = x4
            if TAPS > 4:
                x4 = x3
            if TAPS > 3:
                x3 = x2
            if TAPS > 2:
                x2 = x1
            if TAPS > 1:
                x1 = x0


@jit
def _store_gradient(
    g, of_dx, x_token, of_dstate, s_place, token, begin, first, found, MASKED: tl.constexpr, TAPS: tl.constexpr,
    STORE_DX: tl.constexpr, STORE_DSTATE: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the oldest input that the token's output depends on, if it is one of the chunk's."""
    oldest = token - (TAPS - 1)
    if STORE_DX:  # noqa: SIM102  a constant
        if oldest >= begin:
            store(of_dx + tl.cast(oldest, tl.int64) * x_token, g, found, MASKED)
    if STORE_DSTATE:  # noqa: SIM102  a constant
        if oldest < first:
            store(of_dstate + (oldest - first + TAPS - 1) * s_place, g, found, MASKED)


@jit(lengths=("x_row", "x_channel", "dy_row", "dy_channel", "dx_row", "dx_channel", "n_tasks", "per_row", "length"))
def _backward_kernel(
    dy,  # [B, CHANNELS, length] with strides as in forward; likewise x, read if LOAD_X, and dx
    x,
    weight,  # as in forward; likewise bias, state and chunks
    bias,
    state,
    chunks,
    dx,  # written if STORE_DX
    dstate,  # [rows or segments, TAPS - 1, CHANNELS] contiguous, written if STORE_DSTATE
    sums,  # [programs, TAPS + 1, CHANNELS] fp32, of the weight's gradient and the bias's, written if STORE_DW
    dy_row,
    dy_channel,
    dy_token,
    x_row,
    x_channel,
    x_token,
    w_channel,
    w_tap,
    s_row,
    s_channel,
    s_place,
    dx_row,
    dx_channel,
    dx_token,
    n_tasks,
    per_row,
    length,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    LOAD_X: tl.constexpr,
    STORE_DX: tl.constexpr,
    STORE_DSTATE: tl.constexpr,
    STORE_DW: tl.constexpr,
    DY_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    DX_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,  # row strides count 16 numbers
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    MASKED: tl.constexpr = CHANNELS % COLS != 0
    channels = tl.program_id(1) * COLS + tl.arange(0, COLS)
    found = channels < CHANNELS
    w0 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 1, TAPS)
    w1 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 2, TAPS)
    w2 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 3, TAPS)
    w3 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 4, TAPS)
    w4 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 5, TAPS)
    w5 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 6, TAPS)
    w6 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 7, TAPS)
    w7 = _tap(weight, channels, w_channel, w_tap, found, MASKED, TAPS - 8, TAPS)
    # The same in the other order, for the gradient of an input.
    v0 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 0, TAPS)
    v1 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 1, TAPS)
    v2 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 2, TAPS)
    v3 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 3, TAPS)
    v4 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 4, TAPS)
    v5 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 5, TAPS)
    v6 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 6, TAPS)
    v7 = _tap(weight, channels, w_channel, w_tap, found, MASKED, 7, TAPS)
    start = 0.0
    if HAS_BIAS:
        start = load_fp32(bias + channels, found, MASKED)
    x += _lanes(channels, x_channel, X_UNIT, WIDE)
    dy += _lanes(channels, dy_channel, DY_UNIT, WIDE)
    dx += _lanes(channels, dx_channel, DX_UNIT, WIDE)
    zeros = tl.zeros([COLS], tl.float32)
    db = zeros
    d0 = zeros
    d1 = zeros
    d2 = zeros
    d3 = zeros
    d4 = zeros
    d5 = zeros
    d6 = zeros
    d7 = zeros
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        row, begin, end, first, last = _chunk(chunks, task, per_row, length, HAS_SEGMENTS, TOKENS)
        of_dy = dy + _row_offset(row, dy_row, ALIGNED)
        of_x = x + _row_offset(row, x_row, ALIGNED)
        of_dx = dx + _row_offset(row, dx_row, ALIGNED)
        of_state = state + tl.cast(row, tl.int64) * s_row + channels * s_channel
        of_dstate = dstate + tl.cast(row, tl.int64) * ((TAPS - 1) * CHANNELS) + channels
        # Each has a value of its own: where two variables have one value before a loop, Triton (3.6, 3.9) takes
        # `x2 = x1` inside of it for no change, and does not carry x2 from one token to the next.
        x0 = tl.zeros([COLS], tl.float32)
        x1 = tl.zeros([COLS], tl.float32)
        x2 = tl.zeros([COLS], tl.float32)
        x3 = tl.zeros([COLS], tl.float32)
        x4 = tl.zeros([COLS], tl.float32)
        x5 = tl.zeros([COLS], tl.float32)
        x6 = tl.zeros([COLS], tl.float32)
        x7 = tl.zeros([COLS], tl.float32)
        if LOAD_X:
            at = of_x + tl.cast(begin, tl.int64) * x_token
            place = begin - first
            x1 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 1, TAPS)
            x2 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 2, TAPS)
            x3 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 3, TAPS)
            x4 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 4, TAPS)
            x5 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 5, TAPS)
            x6 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 6, TAPS)
            x7 = _before(at, x_token, of_state, s_place, place, found, COLS, MASKED, HAS_STATE, 7, TAPS)
        g1 = tl.zeros([COLS], tl.float32)
        g2 = tl.zeros([COLS], tl.float32)
        g3 = tl.zeros([COLS], tl.float32)
        g4 = tl.zeros([COLS], tl.float32)
        g5 = tl.zeros([COLS], tl.float32)
        g6 = tl.zeros([COLS], tl.float32)
        g7 = tl.zeros([COLS], tl.float32)
        # The outputs of the K - 1 tokens behind the chunk also depend on its inputs, if those tokens exist.
        stop = end
        if STORE_DX or STORE_DSTATE:
            stop = end + TAPS - 1
        real = stop
        if real > last:
            real = last
        for PHASE in tl.static_range(3):
            from_token = begin if PHASE == 0 else end if PHASE == 1 else real
            to_token = end if PHASE == 0 else real if PHASE == 1 else stop
            for token in range(from_token, to_token):
                g0 = zeros
                if PHASE < 2:
                    g0 = load_fp32(of_dy + tl.cast(token, tl.int64) * dy_token, found, MASKED)
                    if LOAD_X:
                        x0 = load_fp32(of_x + tl.cast(token, tl.int64) * x_token, found, MASKED)
                    if SILU:
                        p = _sum_of_products(start, w0, w1, w2, w3, w4, w5, w6, w7, x0, x1, x2, x3, x4, x5, x6, x7,
                                             TAPS)  # fmt: skip
                        a, s = activated(p, "silu", 1.0)
                        g0 = g0 * slope(p, a, s, "silu", 1.0)
                if PHASE == 0 and STORE_DW:
                    db += g0
                    d0 += g0 * x0
                    if TAPS > 1:
                        d1 += g0 * x1
                    if TAPS > 2:
                        d2 += g0 * x2
                    if TAPS > 3:
                        d3 += g0 * x3
                    if TAPS > 4:
                        d4 += g0 * x4
                    if TAPS > 5:
                        d5 += g0 * x5
                    if TAPS > 6:
                        d6 += g0 * x6
                    if TAPS > 7:
                        d7 += g0 * x7
                if STORE_DX or STORE_DSTATE:
                    d = _sum_of_products(zeros, v0, v1, v2, v3, v4, v5, v6, v7, g0, g1, g2, g3, g4, g5, g6, g7, TAPS)
                    _store_gradient(d, of_dx, dx_token, of_dstate, CHANNELS, token, begin, first, found, MASKED, TAPS,
                                    STORE_DX, STORE_DSTATE)  # fmt: skip
                if TAPS > 7:
                    x7 = x6
                    g7 = g6
                if TAPS > 6:
                    x6 = x5
                    g6 = g5
                if TAPS > 5:
                    x5 = x4
                    g5 = g4
                if TAPS > 4:
                    x4 = x3
                    g4 = g3
                if TAPS > 3:
                    x3 = x2
                    g3 = g2
                if TAPS > 2:
                    x2 = x1
                    g2 = g1
                if TAPS > 1:
                    x1 = x0
                    g1 = g0
    if STORE_DW:
        of_sums = sums + tl.cast(tl.program_id(0), tl.int64) * ((TAPS + 1) * CHANNELS) + channels
        store(of_sums + (TAPS - 1) * CHANNELS, d0, found, MASKED)
        if TAPS > 1:
            store(of_sums + (TAPS - 2) * CHANNELS, d1, found, MASKED)
        if TAPS > 2:
            store(of_sums + (TAPS - 3) * CHANNELS, d2, found, MASKED)
        if TAPS > 3:
            store(of_sums + (TAPS - 4) * CHANNELS, d3, found, MASKED)
        if TAPS > 4:
            store(of_sums + (TAPS - 5) * CHANNELS, d4, found, MASKED)
        if TAPS > 5:
            store(of_sums + (TAPS - 6) * CHANNELS, d5, found, MASKED)
        if TAPS > 6:
            store(of_sums + (TAPS - 7) * CHANNELS, d6, found, MASKED)
        if TAPS > 7:
            store(of_sums + (TAPS - 8) * CHANNELS, d7, found, MASKED)
        store(of_sums + TAPS * CHANNELS, db, found, MASKED)


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def _by_channels(t: torch.Tensor, spec: device.DeviceSpec) -> torch.Tensor:
    """Returns a tensor that the kernels can read on the device: on an NPU neighbouring channels must lie side by
    side."""
    if t.stride(1) == 1 or not spec.has_buffer:
        return t
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _state_of(state: torch.Tensor, spec: device.DeviceSpec) -> torch.Tensor:
    # An NPU would wait for the conversion before it loads the next token.
    return _by_channels(state.float(), spec) if spec.has_buffer else state


def _empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialised tensor in the order of t's strides, without gaps."""
    if t.stride(1) == 1 or t.stride(2) != 1:
        return t.new_empty(t.shape[0], t.shape[2], t.shape[1], dtype=dtype).transpose(1, 2)
    return t.new_empty(t.shape, dtype=dtype)


def _tasks(x: torch.Tensor, form: ConvolutionForm, tokens: int) -> tuple[torch.Tensor, int, int]:
    """Returns the chunks of segments (or anything), the number of chunks of a row, and that of all."""
    if form.segments is not None:
        chunks = chunks_of(form.segments, tokens)
        return chunks, 0, chunks.shape[0]
    per_row = -(-x.shape[2] // tokens)
    return x, per_row, x.shape[0] * per_row


def _strides(t: torch.Tensor, aligned: bool) -> tuple[int, int, int]:
    row, channel, token = t.stride()
    # The stride of a single row is no number of the model.
    return (0 if t.shape[0] == 1 else row // 16 if aligned else row), channel, token


def _are_aligned(*tensors: torch.Tensor) -> bool:
    return all(t.shape[0] == 1 or t.stride(0) % 16 == 0 for t in tensors)


def _is_wide(*tensors: torch.Tensor) -> bool:
    return any(t.shape[1] * t.stride(1) >= 1 << 31 for t in tensors)


def _taps_of(weight: torch.Tensor, spec: device.DeviceSpec) -> torch.Tensor:
    """Returns the weight as the kernels can read it: on an NPU the channels of a tap must lie side by side."""
    return weight.t().contiguous().t() if spec.has_buffer else weight


def launch_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None, form: ConvolutionForm
) -> torch.Tensor:
    """Returns y."""
    spec = device.spec(x.device)
    x, weight = _by_channels(x, spec), _taps_of(weight, spec)
    y = _empty_like(x, x.dtype)
    if not y.numel():
        return y
    has_state = state is not None and form.taps > 1
    before = x if state is None or not has_state else _state_of(state, spec)
    tile = tiling.convolution_tile(x.shape[1], form.taps, False, spec)
    chunks, per_row, tasks = _tasks(x, form, tile.rows)
    aligned = _are_aligned(x, y)
    launch(
        _forward_kernel, (tiling.programs(tasks, spec, tile.blocks), tile.blocks),
        (x, weight, x if bias is None else bias.contiguous(), before, chunks, y, *_strides(x, aligned),
         *weight.stride(), *(before.stride() if has_state else (0, 0, 0)), *_strides(y, aligned), tasks, per_row,
         x.shape[2]),
        {"CHANNELS": x.shape[1], "TAPS": form.taps, "SILU": form.silu, "HAS_BIAS": bias is not None,
         "HAS_STATE": has_state, "HAS_SEGMENTS": form.segments is not None, "X_UNIT": x.stride(1) == 1,
         "Y_UNIT": y.stride(1) == 1, "ALIGNED": aligned, "WIDE": _is_wide(x, y), "TOKENS": tile.rows,
         "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    return y


def launch_backward(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    state: torch.Tensor | None, form: ConvolutionForm, needs: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Returns the gradients of x, weight, bias and state, or None. `needs` says whether those of x, of weight and bias
    and of the state are wanted; x is None if no wanted one depends on it."""
    needs_dx, needs_dw, needs_dstate = needs
    rows, (channels, taps) = dy.shape[0] if form.segments is None else len(form.segments), weight.shape
    spec = device.spec(dy.device)
    dy, given = _by_channels(dy, spec), _taps_of(weight, spec)
    of_x = dy if x is None else _by_channels(x, spec)
    dx = _empty_like(of_x, dy.dtype) if needs_dx else None
    dstate = dy.new_empty(rows, taps - 1, channels) if needs_dstate else None
    if not dy.numel():
        if dstate is not None:
            dstate.zero_()
        zeros = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        return dx, *(zeros if needs_dw else (None, None)), None if dstate is None else dstate.transpose(1, 2)
    has_state = state is not None and taps > 1
    before = dy if state is None or not has_state else _state_of(state, spec)
    tile = tiling.convolution_tile(channels, taps, True, spec)
    chunks, per_row, tasks = _tasks(dy, form, tile.rows)
    # Many short segments share programs, so that the sums of programs stay small beside x.
    most = tasks if not needs_dw else max(1, -(-dy.shape[0] * dy.shape[2] // tile.rows))
    programs = tiling.programs(min(tasks, most), spec, tile.blocks)
    sums = dy.new_empty(programs, (taps + 1) * channels, dtype=torch.float32) if needs_dw else None
    like = of_x if dx is None else dx
    aligned = _are_aligned(dy, of_x, like)
    launch(
        _backward_kernel, (programs, tile.blocks),
        (dy, of_x, given, dy if bias is None else bias.contiguous(), before, chunks, like,
         dy if dstate is None else dstate, dy if sums is None else sums, *_strides(dy, aligned),
         *_strides(of_x, aligned), *given.stride(), *(before.stride() if has_state else (0, 0, 0)),
         *_strides(like, aligned), tasks, per_row, dy.shape[2]),
        {"CHANNELS": channels, "TAPS": taps, "SILU": form.silu, "HAS_BIAS": bias is not None, "HAS_STATE": has_state,
         "HAS_SEGMENTS": form.segments is not None, "LOAD_X": x is not None, "STORE_DX": needs_dx,
         "STORE_DSTATE": needs_dstate and taps > 1, "STORE_DW": needs_dw, "DY_UNIT": dy.stride(1) == 1,
         "X_UNIT": of_x.stride(1) == 1, "DX_UNIT": like.stride(1) == 1, "ALIGNED": aligned,
         "WIDE": _is_wide(dy, of_x, like), "TOKENS": tile.rows, "COLS": tile.cols, **tile.options},
    )  # fmt: skip
    dw = db = None
    if sums is not None:
        total = sum_of_partials(sums, torch.float32, spec).view(taps + 1, channels)
        dw = total[:taps].t().contiguous().to(weight.dtype)
        db = None if bias is None else total[taps].to(bias.dtype)
    return dx, dw, db, None if dstate is None else dstate.transpose(1, 2)
