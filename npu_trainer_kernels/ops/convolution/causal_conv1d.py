"""Depthwise causal convolution of few taps, with an activation: the mixing of neighbours in state-space and
linear-attention layers.

    p_t = bias + sum over j < K of w_j x_{t-j}        y_t = a(p_t)        w_j = weight[:, K - 1 - j]

for each channel, in fp32 and rounded once, with a = silu or no activation. A place before the first one of a row, or of
a segment of a packed row, has the state: x_{-i} = state[:, K - 1 - i] for i = 1 .. K - 1, or zero without a state.

    g_t = dy_t a'(p_t)        dx_t = sum over j < K of w_j g_{t+j}
    dw_j = sum over t of g_t x_{t-j}        dbias = sum over t of g_t

with g zero after the last place; dstate is dx of the places before the first one. Backward computes p again, and adds
up in fp32 and in a fixed order: each program writes its own sums, and one kernel adds them.

A program walks along the tokens of a *chunk*, a part of one row or segment, for a block of channels. It keeps the last
K - 1 inputs (and in backward the last K - 1 values of g) on the chip, so that it reads each number once, but for the
K - 1 places beside a chunk. No token needs a mask, because a chunk lies inside of one segment. The host knows the
lengths of segments, and uploads their chunks once for all layers.

The kernels take any strides. They load and store whole vectors if neighbouring channels lie side by side, as in a
transposed `[B, L, C]`; an NPU would move one number at a time otherwise, so tensors of another layout are copied there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from ... import backends, device
from ...support.opaque import opaque
from ..attention import Segments
from ..checks import check_float, check_same_device
from ..fallback import falls_back
from ..host import once_differentiable
from ..launch import KernelError
from ..trial import differs
from .convolution_kernels import MOST_TAPS, ConvolutionForm, Gradients, launch_backward, launch_forward
from .places import add_gradient_of_last, extended_places, last_inputs

__all__ = ["causal_conv1d", "causal_conv1d_reference"]


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    segments: Segments | None = None,
    state: torch.Tensor | None = None,
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the op in plain PyTorch, one segment after another."""
    keep = weight.shape[1] - 1
    rows: tuple[torch.Tensor, ...] = (x,)
    states: tuple[torch.Tensor | None, ...] = (state,)
    if segments is not None:
        rows = x.split([length for length, _ in segments.lengths], 2)
        states = (None,) * len(rows) if state is None else state.split(1)
    outputs, last = [], []
    for row, before in zip(rows, states, strict=True):
        row = torch.cat((row.new_zeros(*row.shape[:2], keep) if before is None else before, row), 2)
        y = F.conv1d(row.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
        outputs.append((y if activation is None else F.silu(y)).to(x.dtype))
        last.append(row[..., row.shape[2] - keep :])
    y = torch.cat(outputs, 2)
    return (y, torch.cat(last)) if return_state else y


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward, by Triton or in torch
# ---------------------------------------------------------------------------------------------------------------------


def _extended(x: torch.Tensor, state: torch.Tensor | None, form: ConvolutionForm) -> torch.Tensor:
    """Returns x with the K - 1 places before each row or segment."""
    keep = form.taps - 1
    if form.segments is None:
        return torch.cat((x.new_zeros(*x.shape[:2], keep) if state is None else state, x), 2)
    places = extended_places(form.segments, form.taps)
    extended = x.new_zeros(1, x.shape[1], places.size).index_copy_(2, places.tokens, x)
    if state is not None:
        extended.index_copy_(2, places.before, state.transpose(0, 1).reshape(1, x.shape[1], -1))
    return extended


def _sums(
    extended: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: ConvolutionForm
) -> torch.Tensor:
    """Returns p in fp32 at the ends of all windows of K places, also of those that end before a segment's begin."""
    wide = torch.promote_types(extended.dtype, torch.float32)
    length = extended.shape[2] - form.taps + 1
    p = extended.new_zeros((), dtype=wide) if bias is None else bias.to(wide).unsqueeze(1)
    for k in range(form.taps):
        p = p + weight[:, k : k + 1].to(wide) * extended[..., k : k + length].to(wide)
    return p


def _in_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None, form: ConvolutionForm
) -> torch.Tensor:
    p = _sums(_extended(x, state, form), weight, bias, form)
    if form.segments is not None:
        p = p.index_select(2, extended_places(form.segments, form.taps).tokens - (form.taps - 1))
    return (F.silu(p) if form.silu else p).to(x.dtype)


def _backward_in_torch(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    state: torch.Tensor | None, form: ConvolutionForm, needs: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    needs_dx, needs_dw, needs_dstate = needs
    taps, keep = form.taps, form.taps - 1
    places = None if form.segments is None else extended_places(form.segments, taps)
    g = dy.float()
    if places is not None:
        g = g.new_zeros(1, g.shape[1], places.size - keep).index_copy_(2, places.tokens - keep, g)
    length = g.shape[2]
    extended = None if x is None else _extended(x, state, form)
    if form.silu:
        assert extended is not None
        p = _sums(extended, weight, bias, form)
        s = torch.sigmoid(p)
        g = g * (s * (1 + p * (1 - s)))
        if places is not None:
            # Of windows without an output g is zero, whatever is in them.
            g = g.new_zeros(g.shape).index_copy_(2, places.tokens - keep, g.index_select(2, places.tokens - keep))
    dw = db = dx = dstate = None
    if needs_dw:
        assert extended is not None
        if places is not None:
            at = places.tokens - keep
            windows = [(g.index_select(2, at), extended.index_select(2, at + k)) for k in range(taps)]
        else:
            windows = [(g, extended[..., k : k + length]) for k in range(taps)]
        dw = torch.stack([(d * window).sum((0, 2)) for d, window in windows], 1).to(weight.dtype)
        db = None if bias is None else g.sum((0, 2)).to(bias.dtype)
    if needs_dx or needs_dstate:
        d = g.new_zeros(*g.shape[:2], length + keep)
        for k in range(taps):
            d[..., k : k + length] += weight[:, k : k + 1].float() * g
        d = d.to(dy.dtype)
        if places is None:
            dx, dstate = d[..., keep:].contiguous(), d[..., :keep]
        else:
            dx = d.index_select(2, places.tokens)
            dstate = d.index_select(2, places.before).view(d.shape[1], places.rows, keep).transpose(0, 1)
        # In the layout that the kernels write.
        dstate = dstate.transpose(1, 2).contiguous().transpose(1, 2)
    return dx if needs_dx else None, dw, db, dstate if needs_dstate else None


@falls_back("causal_conv1d")
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None, form: ConvolutionForm,
    backend: str,
) -> torch.Tensor:  # fmt: skip
    return (_in_torch if backend == "torch" else launch_forward)(x, weight, bias, state, form)


@falls_back("causal_conv1d")
def _backward(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    state: torch.Tensor | None, form: ConvolutionForm, needs: tuple[bool, bool, bool], backend: str,
) -> Gradients:  # fmt: skip
    return (_backward_in_torch if backend == "torch" else launch_backward)(dy, x, weight, bias, state, form, needs)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                state: torch.Tensor | None,
                form: ConvolutionForm, return_state: bool, backend: str) -> Any:  # fmt: skip
        # Without an activation x is for the gradient of the weight alone.
        keeps_x = form.silu or ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(*((x, weight, bias, state) if keeps_x else (None, weight, None, None)))
        ctx.of_state = None if state is None else state.shape
        ctx.of_x, ctx.dtype = x.shape, x.dtype
        ctx.form, ctx.backend = form, backend
        ctx.set_materialize_grads(False)
        y = _forward(x, weight, bias, state, form, backend)
        return (y, last_inputs(x, state, form.segments, form.taps)) if return_state else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dlast: torch.Tensor | None = None) -> tuple[Any, ...]:
        x, weight, bias, state = ctx.saved_tensors
        needs_dx, needs_weight, needs_bias, needs_dstate = ctx.needs_input_grad[:4]
        if dy is None:
            dy = weight.new_zeros(ctx.of_x, dtype=ctx.dtype)
        needs = needs_dx, needs_weight or needs_bias, needs_dstate
        dx, dw, db, dstate = _backward(dy, x, weight, bias, state, ctx.form, needs, ctx.backend)
        if dlast is not None:
            add_gradient_of_last(dx, dstate, dlast, ctx.form.segments, dy.shape[2])
        return dx, dw if needs_weight else None, db if needs_bias else None, dstate, None, None, None


@opaque
def _of_segments_outside_of_graphs(*args: Any) -> Any:
    return _CausalConv1d.apply(*args)


def _after_trial(backend: str, where: torch.device, *form: Any) -> str:
    """Returns the backend, or "torch" on a device where its kernels have failed their trial. The gate executes what the
    Ascend compiler makes; what other compilers make is tried on the user's own device."""
    if backend == "torch" or where.type == "cpu" or not device.spec(where).has_warps:
        return backend
    reason = _trial(where, *form, backend)
    if reason is None:
        return backend
    if backends.is_strict(backend):
        raise KernelError(f"causal_conv1d: {reason}")
    backends.record_failure(("causal_conv1d",), where, reason)
    return "torch"


@functools.cache
def _trial(
    where: torch.device, dtype: torch.dtype, of_weight: torch.dtype, taps: int, silu: bool, biased: bool, backend: str
) -> str | None:
    """Returns why the kernels must not compute calls of a form on a device, or None. They are tried once, on two
    segments with states before them: the compiler of Triton 3.6 and 3.9 has dropped a part of a gradient without an
    error, where its interpreter has not."""
    generator = torch.Generator("cpu").manual_seed(0)
    channels, lengths = 48, (3, 40)
    shapes = [(1, channels, sum(lengths)), (channels, taps), (channels,), (len(lengths), channels, taps - 1)]
    drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator, device="cpu").to(where, dtype)
    form = ConvolutionForm(taps, silu, Segments.make(lengths, where))

    def outcome(by: str, wide: bool) -> list[torch.Tensor]:
        rounded = [t.to(where, dtype if i in (0, 3) else of_weight) for i, t in enumerate(drawn)]
        x, weight, bias, state = ((t.float() if wide else t).requires_grad_() for t in rounded)
        given = [x, weight, *([bias] if biased else []), *([state] if taps > 1 else [])]
        y = _CausalConv1d.apply(x, weight, bias if biased else None, state if taps > 1 else None, form, False, by)
        return [y, *torch.autograd.grad(y, given, upstream.to(y.dtype))]

    # Outer hooks, such as those of a checkpoint around the layer, must not see what these gradients save.
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(where.type, enabled=False), own:
        least = min(dtype, of_weight, key=lambda each: -torch.finfo(each).eps)
        return differs("its kernel", outcome(backend, False), outcome("torch", True), least)


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    segments: Segments | None, state: torch.Tensor | None,
) -> None:  # fmt: skip
    check_float("x", x)
    check_float("weight", weight)
    if x.dim() != 3:
        raise ValueError(f"x must have shape [B, C, L]; got {list(x.shape)}")
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= MOST_TAPS or not channels:
        raise ValueError(
            f"weight must have shape [{max(1, channels)}, K], as x's channels, with 1 <= K <= {MOST_TAPS}; "
            f"got {list(weight.shape)}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu'; got {activation!r}")
    rows = x.shape[0]
    if segments is not None:
        if not isinstance(segments, Segments):
            raise TypeError(f"segments must be None or a Segments; got {type(segments).__name__}")
        if segments.k_ends != segments.q_ends or segments.keys is not None:
            raise ValueError("segments must share no keys: the inputs before a segment are its state")
        if rows != 1 or segments.q_ends[-1] != x.shape[2]:
            raise ValueError(
                f"x must have shape [1, C, {segments.q_ends[-1]}] with these segments; got {list(x.shape)}"
            )
        rows = len(segments)
    if bias is not None:
        check_float("bias", bias)
        if bias.shape != (channels,) or bias.dtype != weight.dtype:
            raise ValueError(f"bias must have shape [{channels}] and weight's dtype {weight.dtype}; "
                             f"got {list(bias.shape)} of {bias.dtype}")  # fmt: skip
    if state is not None:
        check_float("state", state)
        expected = [rows, channels, weight.shape[1] - 1]
        if list(state.shape) != expected or state.dtype != x.dtype:
            raise ValueError(f"state must have shape {expected} and x's dtype {x.dtype}; "
                             f"got {list(state.shape)} of {state.dtype}")  # fmt: skip
    check_same_device(x=x, weight=weight, bias=bias, state=state, segments=None if segments is None else segments.cu_q)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    segments: Segments | None = None,
    state: torch.Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the depthwise causal convolution of each channel, `act(bias[c] + sum over k of weight[c, k] x[b, c, t -
    K + 1 + k])`. The module's docstring has the formulas. x, weight, bias and state have gradients.

    Args:
        x: `[B, C, L]`, fp32, bf16 or fp16; any strides. The kernels are made for neighbouring channels side by side, as
            in `[B, L, C].transpose(1, 2)`; on an NPU another layout is copied.
        weight: `[C, K]` with K up to 8, of any of these dtypes. The last tap belongs to the token itself.
        bias: `[C]` in weight's dtype, or None.
        activation: `"silu"`, or None.
        segments: the segments of a packed row x `[1, C, L]`, each of which is a row of its own; None if each row of x
            is one. They must share no keys.
        state: `[B, C, K - 1]`, or with segments one for each, `[n, C, K - 1]`, in x's dtype: the inputs before each row
            or segment, the latest one last; None for zeros.
        return_state: whether to return the last K - 1 inputs of each row or segment, too. Of fewer tokens than that,
            the state's latest inputs (or zeros) come first.
        backend: overrides the choice of `backends.choose`.

    Returns:
        y `[B, C, L]` in x's dtype; with return_state, (y, the state that the next tokens need, with the shape and dtype
        of `state`).

    Raises:
        TypeError: a dtype that is not allowed, segments of another type.
        ValueError: shapes or dtypes that do not match, more than 8 taps, an unknown activation or backend, segments
            that share keys, tensors on several devices.
        KernelError: with `strict`, kernels that give other numbers on this device than torch does.
    """
    _check(x, weight, bias, activation, segments, state)
    taps = weight.shape[1]
    form = ConvolutionForm(taps, activation is not None, segments)

    def at() -> backends.Shape:
        return x.dtype, x.shape[0] * x.shape[2], (x.shape[1], taps)

    chosen = backends.choose("causal_conv1d", x.device, backend, at=at)
    chosen = _after_trial(chosen, x.device, x.dtype, weight.dtype, taps, form.silu, bias is not None)
    if torch.compiler.is_compiling() and segments is None:
        y = _in_torch(x, weight, bias, state, form)
        return (y, last_inputs(x, state, None, taps)) if return_state else y
    apply = _CausalConv1d.apply if segments is None else _of_segments_outside_of_graphs
    return apply(x, weight, bias, state, form, bool(return_state), chosen)
