"""What a model's own gate computes, found by running it.

    gate_of(act_fn) -> "silu", "gelu", "gelu_tanh", "relu2" or None        an activation, module or function
    gate_form(lambda gate, up: ..., numbers) -> GateForm or None           the product of both
    joined_gate_form(lambda both: ..., numbers) -> GateForm or None        the same of one tensor, as experts have it

Activations are compared on every number that bf16 has, in bf16 and in fp32, bit for bit with those of transformers: an
activation may be spelt in several ways that round differently, and `ops.swiglu` is as close to the truth as any of
them. Products are compared with `ops.swiglu` itself. Limits and factors are not guessed: `numbers` are those that the
module has, and each that could be a limit or a factor is tried.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.activations import ACT2FN

from ...ops.gates import ACTIVATIONS, JOINED
from ...ops.swiglu import swiglu_reference
from ..patch import PROBE_ERRORS

__all__ = ["GateForm", "gate_form", "gate_of", "joined_gate_form", "numbers_of"]

# By transformers' names.
_SPELLINGS = {
    "silu": ("silu",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    "relu2": ("relu2",),
}
_DTYPES = (torch.bfloat16, torch.float32)
_FEW = 16


@dataclass(frozen=True)
class GateForm:
    """A gate in the words of `ops.swiglu`.

    Attributes:
        activation, alpha, limit, offset: options of `ops.swiglu`.
        joined: how gate and up lie in one tensor, or None.
    """

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    joined: str | None = None

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        """Arguments of `ops.swiglu`."""
        return {
            "activation": self.activation,
            "alpha": self.alpha,
            "limit": self.limit,
            "offset": self.offset,
            "joined": self.joined,
        }

    def __str__(self) -> str:
        given = [(name, value) for name, value in self.options.items() if value != getattr(GateForm, name)]
        return ", ".join([self.activation, *(f"{n}={v}" for n, v in given if n != "activation")])


@functools.cache
def _every_number(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of bf16, as `dtype`."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    numbers = (bits << 16).view(torch.float32)
    return numbers[numbers.isfinite()].to(dtype)


@functools.cache
def _spelt(name: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = ACT2FN[name](_every_number(dtype))
    return result


def _same(found: object, expected: torch.Tensor) -> bool:
    """Whether a result has the bits that are expected; NaN is NaN."""
    if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def gate_of(activation: Callable[..., Any]) -> str | None:
    """The activation of `ops.swiglu` that a module or function computes, or None."""
    found = []
    for dtype in _DTYPES:
        try:
            with torch.no_grad():
                found.append(activation(_every_number(dtype).clone()))
        except PROBE_ERRORS:
            return None
    for name, spellings in _SPELLINGS.items():
        for spelling in spellings:
            if all(_same(y, _spelt(spelling, dtype)) for y, dtype in zip(found, _DTYPES, strict=True)):
                return name
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


def numbers_of(module: object) -> tuple[float, ...]:
    """The numbers that a module has as attributes of its own."""
    values = (v for v in vars(module).values() if isinstance(v, int | float) and not isinstance(v, bool))
    return tuple(sorted({float(v) for v in values}))


def gate_form(function: Callable[..., Any], numbers: Iterable[float] = ()) -> GateForm | None:
    """The form whose bits `function(gate, up)` has, or None; `numbers`: what may be its limit or its factor."""
    return _form(lambda given: function(*given), (None,), tuple(numbers))


def joined_gate_form(function: Callable[..., Any], numbers: Iterable[float] = ()) -> GateForm | None:
    """Likewise of `function(gate_up)`."""

    return _form(lambda given: function(given[0]), JOINED, tuple(numbers))


def _probes(dtype: torch.dtype, joined: str | None) -> tuple[torch.Tensor, ...]:
    """Gate and up `[rows, columns]`, or both in one: every number that bf16 has as a gate and as an up, and usual ones
    beside it."""
    generator = torch.Generator("cpu").manual_seed(0)
    every = _every_number(torch.float32)
    usual = [torch.randn(len(every), generator=generator, device="cpu") * scale for scale in (1, 6, 6, 1)]
    parts = torch.cat([every, usual[0], usual[1]]), torch.cat([usual[2], every, usual[3]])
    gate, up = (t.view(-1, 32).to(dtype) for t in parts)
    if joined is None:
        return gate, up
    return (torch.cat((gate, up), -1) if joined == "halves" else torch.stack((gate, up), -1).flatten(-2),)


def _form(
    function: Callable[[tuple[torch.Tensor, ...]], Any], layouts: tuple[str | None, ...], numbers: tuple[float, ...]
) -> GateForm | None:
    for joined in layouts:
        # Both sides are given the same memory: on a CPU torch rounds elsewhere where elements have gaps between them.
        probes = [_probes(dtype, joined) for dtype in _DTYPES]
        try:
            with torch.no_grad():
                found = [function(tuple(t.clone() for t in probe)) for probe in probes]
        except PROBE_ERRORS:
            return None
        for form in _candidates(numbers, joined):
            # Most candidates differ in usual numbers already, which come last.
            if _computes(form, [tuple(map(_last, probe)) for probe in probes], map(_last, found)) and _computes(
                form, probes, found
            ):
                return form
    return None


def _last(t: Any) -> Any:
    """The last rows; what is no tensor of rows stays as it is."""
    return t[-_FEW:] if isinstance(t, torch.Tensor) and t.dim() else t


def _computes(form: GateForm, probes: Iterable[tuple[torch.Tensor, ...]], found: Iterable[Any]) -> bool:
    return all(_same(y, swiglu_reference(*probe, **form.options)) for probe, y in zip(probes, found, strict=True))


def _candidates(numbers: tuple[float, ...], joined: str | None) -> Iterator[GateForm]:
    limits = (None, *(n for n in numbers if 0 < n < float("inf")))
    alphas = (1.0, *(n for n in numbers if n != 1.0))
    for activation, limit, offset in itertools.product(ACTIVATIONS, limits, (0.0, 1.0)):
        for alpha in alphas if activation == "silu" else (1.0,):
            yield GateForm(activation, alpha, limit, offset, joined)
