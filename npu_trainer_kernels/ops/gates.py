"""The gates of gated MLPs: y = cast(a(min(gate, limit))) (clamp(up, -limit, limit) + offset); limits are optional.

    silu         a = g s      s = 1 / (1 + exp(-alpha g))       a' = s + alpha a (1 - s)
    gelu         a = g s      s = (1 + erf(g / sqrt 2)) / 2     a' = s + g exp(-g^2 / 2) / sqrt(2 pi)
    gelu_tanh    a = g s      s = 1 / (1 + exp(-2 z)), which is (1 + tanh z) / 2, z = c (g + d g^3)
                              a' = s + 2 a (1 - s) z', z' = c (1 + 3 d g^2)
    relu2        a = s^2      s = max(g, 0)                     a' = 2 s

with c = sqrt(2 / pi) and d = 0.044715. silu with alpha 1.702 is known as quick GELU. GPT-OSS computes it with limit 7
and offset 1 (https://huggingface.co/openai/gpt-oss-20b). As in `torch.clamp`, a value beyond its limit has gradient 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..support.triton import ON_ASCEND, jit, tl
from .checks import check_choice, is_number

__all__ = ["ACTIVATIONS", "JOINED", "Gate", "activated", "bounded_gate", "bounded_up", "gate_options", "slope",
           "within_limit"]  # fmt: skip

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
JOINED = ("halves", "interleaved")
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


@dataclass(frozen=True)
class Gate:
    """The checked options of a gate.

    Attributes:
        activation: one of `ACTIVATIONS`.
        alpha: factor of the gate inside silu's sigmoid.
        limit: upper bound of the gate, and bound of up's absolute value; None for no bound.
        offset: the number that is added to up.
        joined: the layout of gate and up in one tensor, one of `JOINED`; None if they are two tensors.
        flags: the constants of the kernels.
        is_swiglu: whether y is silu(gate) * up.
    """

    activation: str
    alpha: float
    limit: float | None
    offset: float
    joined: str | None
    flags: dict[str, Any] = field(compare=False, repr=False)
    is_swiglu: bool = field(compare=False, repr=False)

    def parts(self, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gate and up as two tensors; they are views if one tensor contains both."""
        if self.joined is None:
            assert up is not None
            return gate, up
        if self.joined == "halves":
            first, second = gate.chunk(2, -1)
            return first, second
        return gate[..., ::2], gate[..., 1::2]

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Computes y, operation for operation as models do."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return self.activate(gate) * (up + self.offset if self.offset else up)

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        """Computes a."""
        if self.activation == "silu":
            return torch.nn.functional.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(gate * self.alpha)
        if self.activation == "relu2":
            return torch.nn.functional.relu(gate).square()
        return torch.nn.functional.gelu(gate, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def gradients(self, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes (dgate, dup) in fp32, in plain PyTorch."""
        g, u, d = gate.float(), up.float(), dy.float()
        if self.limit is not None:
            g, u = g.clamp(max=self.limit), u.clamp(min=-self.limit, max=self.limit)
        if self.activation == "silu":
            s = torch.sigmoid(self.alpha * g)
            a = g * s
            da = s.add_(self.alpha * a * (1 - s))
        elif self.activation == "gelu":
            s = 0.5 * (1 + torch.erf(_SQRT_HALF * g))
            a = g * s
            da = s.add_(g * torch.exp(-0.5 * g * g) * (0.5 * _SQRT_2_PI))
        elif self.activation == "gelu_tanh":
            z = 2 * _SQRT_2_PI * (g + _CUBIC * g * g * g)
            s = torch.sigmoid(z)
            a = g * s
            da = s.add_(2 * _SQRT_2_PI * a * torch.sigmoid(-z) * (1 + 3 * _CUBIC * g * g))
        else:
            s = torch.relu(g)
            a = s * s
            da = 2 * s
        dup = d * a
        dgate = d.mul(u + self.offset if self.offset else u).mul_(da)
        if self.limit is not None:
            dgate = torch.where(gate <= self.limit, dgate, 0.0)
            dup = torch.where(up.abs() <= self.limit, dup, 0.0)
        return dgate, dup


def gate_options(activation: str, alpha: float, limit: float | None, offset: float, joined: str | None) -> Gate:
    """Checks the options of a call and returns them as a `Gate`.

    Raises:
        ValueError: an option that is not allowed, or alpha with an activation other than silu.
    """
    key = activation, alpha, limit, offset, joined
    try:
        form = _known.get(key)
    except TypeError:
        # An option that cannot be hashed is not allowed either; `_checked` names it in its error.
        form = None
    if form is None:
        form = _checked(*key)
        if not torch.compiler.is_compiling() and len(_known) < _MOST_KNOWN:
            _known[key] = form
    return form


_known: dict[tuple[Any, ...], Gate] = {}
_MOST_KNOWN = 256


def _checked(activation: str, alpha: float, limit: float | None, offset: float, joined: str | None) -> Gate:
    check_choice("activation", activation, ACTIVATIONS)
    if joined is not None:
        check_choice("joined", joined, JOINED)
    if not is_number(alpha) or (activation != "silu" and alpha != 1.0):
        raise ValueError(f"alpha must be a finite number, and 1 with another activation than silu; got {alpha!r}")
    if limit is not None and not (is_number(limit) and limit > 0):
        raise ValueError(f"limit must be None or a positive finite number; got {limit!r}")
    if not is_number(offset):
        raise ValueError(f"offset must be a finite number; got {offset!r}")
    # Convert to float, so that Triton compiles one kernel for 7 and 7.0.
    flags = {
        "ACTIVATION": activation,
        "ALPHA": float(alpha),
        "LIMIT": 0.0 if limit is None else float(limit),
        "OFFSET": float(offset),
        "JOINED": JOINED.index(joined) + 1 if joined is not None else 0,
    }
    is_swiglu = (activation, alpha, limit, offset) == ("silu", 1.0, None, 0.0)
    limit = None if limit is None else float(limit)
    return Gate(activation, float(alpha), limit, float(offset), joined, flags, is_swiglu)


# ---------------------------------------------------------------------------------------------------------------------
# In kernels, all in fp32
#
# On an NPU the number of vector instructions decides the time. Instructions per bf16 element, forward / backward. Each
# has 5 conversions (of inputs, outputs and the rounded a) and one product / three products (a u / dy a, dy u, dy u a'):
#     silu        -g, exp, + 1, divide for a / g - a, + 1, divide for a'                                     10 / 15
#     gelu_tanh   g^2, factor, - c, times g, exp, + 1, divide / the other side's sign, exp, + 1, divide;
#                 z' (2) and its product, 1 / (1 + exp), sum                                                 13 / 24
#     gelu        factor, erf (24), 1 + erf and its half, times g / exp(-g^2 / 2) (3), factor, times g, sum  34 / 42
#     relu2       maximum, square / 2 s                                                                       8 / 11
#     silu with alpha, limit, offset: 3 bounds, + offset more / times alpha and `within_limit` of both more  14 / 31
# A backward that also computes y has 4 more. tests/ascend/test_gates.py compares these numbers with the traced plan.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def bounded_gate(g, LIMIT: tl.constexpr):
    """Returns the gate with its upper bound; a LIMIT of 0 is no bound."""
    if LIMIT > 0:
        # Propagate NaN, as torch does. The other rule takes 7 operations on an NPU.
        return tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        return g


@jit
def bounded_up(u, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Returns the factor of the activated gate: up with its bounds, plus the offset."""
    if LIMIT > 0:
        u = tl.minimum(u, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if OFFSET != 0:
        u += OFFSET
    return u


@jit
def within_limit(gradient, value, bounded, LIMIT: tl.constexpr, BOTH: tl.constexpr):
    """Returns the gradient where the value equals its bounded value, else zero. BOTH adds a lower bound.

    On an NPU each `tl.where` makes the scalar unit wait, and with it the next loads. There the kernel multiplies the
    gradient by 1 or 0: 1e30 times the smallest possible distance from the limit is far larger than 1. A gradient that
    is not finite therefore does not become zero there.
    """
    if ON_ASCEND:
        beyond = value - bounded
        if BOTH:
            beyond = tl.abs(beyond)
        return gradient * tl.maximum(1.0 + beyond * -1e30, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif BOTH:
        return tl.where(tl.abs(value) <= LIMIT, gradient, 0.0)
    else:
        return tl.where(value <= LIMIT, gradient, 0.0)


@jit
def _sigmoid(negated):
    """Returns the sigmoid of -negated. A separate negation would be two operations on an NPU."""
    return 1.0 / (1.0 + tl.exp(negated))


@jit
def _negated_z(g):
    """Returns -2 z of gelu_tanh."""
    return g * (-0.07135481627260025 * (g * g) - 1.5957691216057308)


@jit
def activated(g, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """Returns (a, s) of the module's docstring. On an NPU the product with s = 1 / t becomes a division by t."""
    if ACTIVATION == "relu2":
        s = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return s * s, s
    else:
        if ACTIVATION == "gelu":
            s = 0.5 + 0.5 * tl.math.erf(0.7071067811865476 * g)
        elif ACTIVATION == "gelu_tanh":
            s = _sigmoid(_negated_z(g))
        else:
            s = _sigmoid(g * -ALPHA)
        return g * s, s


@jit
def slope(g, a, s, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """Returns a'. It computes a (1 - s) as s (g - a), which does not need 1 - s."""
    if ACTIVATION == "relu2":
        return 2.0 * s
    elif ACTIVATION == "gelu":
        return s + g * (0.3989422804014327 * tl.exp(-0.5 * g * g))
    elif ACTIVATION == "gelu_tanh":
        # g - a loses digits where s is close to 1, and z' is large there. So compute 1 - s as the sigmoid of -2 z.
        negated = _negated_z(g)
        # CUDA's compiler reuses the exponential that s was computed from. Where it is infinite, s and a are 0.
        rest = _sigmoid(-1.0 * negated) if ON_ASCEND else tl.minimum(tl.exp(negated), 1e38) * s
        return s + a * rest * (1.5957691216057308 + 0.21406444881780076 * (g * g))
    elif ALPHA == 1.0:
        return s * (1.0 + (g - a))
    else:
        return s * (1.0 + ALPHA * (g - a))
