"""Finds which formula a model's gate computes, by running it.

    gate_of(act_fn) -> "silu", "gelu", "gelu_tanh", "relu2" or None        an activation, module or function
    gate_form(lambda gate, up: ..., numbers) -> GateForm or None           the product of both
    joined_gate_form(lambda both: ..., numbers) -> GateForm or None        the same of one tensor, as experts have it

Activations are compared at every bf16 number, in bf16 and in fp32, bit for bit with those of transformers: an
activation may be written in several ways that round differently, and `ops.swiglu` is as accurate as any of them.
Products are compared with `ops.swiglu` itself. Limits and factors are not guessed: each number among the module's
attributes (`numbers`) is tried as a limit and as a factor.
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

# The names in transformers of each activation's variants.
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
    """A gate as options of `ops.swiglu`.

    Attributes:
        activation, alpha, limit, offset: options of `ops.swiglu`.
        joined: the layout of gate and up in one tensor, or None.
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
    """Returns all finite numbers of bf16, as `dtype`."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    numbers = (bits << 16).view(torch.float32)
    return numbers[numbers.isfinite()].to(dtype)


@functools.cache
def _spelt(name: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = ACT2FN[name](_every_number(dtype))
    return result


def _same(found: object, expected: torch.Tensor) -> bool:
    """Whether a result equals the expected one exactly; NaN equals NaN."""
    if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def gate_of(activation: Callable[..., Any]) -> str | None:
    """Returns the activation of `ops.swiglu` that a module or function computes, or None."""
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
    """Returns the numbers among a module's instance attributes."""
    values = (v for v in vars(module).values() if isinstance(v, int | float) and not isinstance(v, bool))
    return tuple(sorted({float(v) for v in values}))


def gate_form(function: Callable[..., Any], numbers: Iterable[float] = ()) -> GateForm | None:
    """Returns the form that equals `function(gate, up)` bit for bit, or None. `numbers` may be its limit or factor."""
    return _form(lambda given: function(*given), (None,), tuple(numbers))


def joined_gate_form(function: Callable[..., Any], numbers: Iterable[float] = ()) -> GateForm | None:
    """Returns the same for `function(gate_up)`."""

    return _form(lambda given: function(given[0]), JOINED, tuple(numbers))


def _probes(dtype: torch.dtype, joined: str | None) -> tuple[torch.Tensor, ...]:
    """Returns gate and up `[rows, columns]`, or both in one: every bf16 number as a gate and as an up, next to numbers
    of usual size; the last rows have only the latter."""
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
        # Both sides get tensors of the same strides: on a CPU torch rounds differently if elements are not contiguous.
        probes = [_probes(dtype, joined) for dtype in _DTYPES]
        try:
            with torch.no_grad():
                found = [function(tuple(t.clone() for t in probe)) for probe in probes]
        except PROBE_ERRORS:
            return None
        for form in _candidates(numbers, joined):
            # Most candidates already differ in numbers of usual size, which come last.
            if _computes(form, [tuple(map(_last, probe)) for probe in probes], map(_last, found)) and _computes(
                form, probes, found
            ):
                return form
    return None


def _last(t: Any) -> Any:
    """Returns the last rows of a tensor, and anything else unchanged."""
    return t[-_FEW:] if isinstance(t, torch.Tensor) and t.dim() else t


def _computes(form: GateForm, probes: Iterable[tuple[torch.Tensor, ...]], found: Iterable[Any]) -> bool:
    return all(_same(y, swiglu_reference(*probe, **form.options)) for probe, y in zip(probes, found, strict=True))


def _candidates(numbers: tuple[float, ...], joined: str | None) -> Iterator[GateForm]:
    limits = (None, *(n for n in numbers if 0 < n < float("inf")))
    alphas = (1.0, *(n for n in numbers if n != 1.0))
    for activation, limit, offset in itertools.product(ACTIVATIONS, limits, (0.0, 1.0)):
        for alpha in alphas if activation == "silu" else (1.0,):
            yield GateForm(activation, alpha, limit, offset, joined)
