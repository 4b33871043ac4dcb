"""Recognises the functions by which modules of transformers carry a state along a row, and computes them by segments.

Their modules call functions of the module's file: a short convolution (`causal_conv1d_fn`), a gated delta rule with a
gate for each head or for each channel (Qwen3-Next, Kimi), and the scan of Mamba 2. Functions are found by name, and
recognised by what they compute on random numbers, values and gradients, in fp32.

With flash-linear-attention, causal-conv1d or mamba-ssm installed, transformers' decorator calls these instead of the
function; what is recognised is the function, which they stand for.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ...ops.attention import Segments
from ...ops.convolution import causal_conv1d
from ...ops.linear_attention import gated_delta_rule
from ..patch import PROBE_ERRORS
from ..probe import agree, repeatable, trace_of_function
from .state_row import StateRow

__all__ = ["OtherCall", "StateForm", "arguments_of", "compute", "state_form"]


class OtherCall(Exception):
    """A call has an argument that the forms do not cover; the message names it."""


@dataclass(frozen=True)
class StateForm:
    """What a function computes.

    Attributes:
        name: `"convolution"`, `"delta rule"`, `"scan"`, or `"shortcut"`: a function that returns None, in the place of
            which another package computes a whole module.
        rank: the number of dimensions of the delta rule's gate: 3 for one of a head, 4 for one of a channel.
    """

    name: str
    rank: int = 0

    @property
    def returns_state(self) -> bool:
        """Whether the function returns a state, or None, beside its result."""
        return self.name == "delta rule"


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a recognised function by name, with its defaults.

    Raises:
        OtherCall: it is given segments by the caller.
    """
    given = _signature(inspect.unwrap(function)).bind(*args, **kwargs)
    given.apply_defaults()
    others = given.arguments.pop("kwargs", {})
    named = next((name for name in ("cu_seqlens", "seq_idx") if others.get(name) is not None), None)
    if named is not None:
        raise OtherCall(named)
    return dict(given.arguments)


def compute(form: StateForm, given: dict[str, Any], row: StateRow | None, backend: str | None = None) -> torch.Tensor:
    """Computes a recognised function by the segments of a row.

    Args:
        form: the function's form; not a shortcut.
        given: its arguments, those of one packed row.
        row: the row; None: each row of the batch is one segment.
        backend: the override for the ops.

    Raises:
        OtherCall: an argument that the form does not cover.
    """
    return _COMPUTE[form.name](row, backend, **given)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _convolution(
    row: StateRow | None, backend: str | None, hidden_states: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    if activation not in _ACTIVATIONS:
        raise OtherCall(f"activation={activation!r}")
    options: dict[str, Any] = {"activation": _ACTIVATIONS[activation], "backend": backend}
    if row is None:
        return causal_conv1d(hidden_states, weight, bias, **options)  # type: ignore[return-value]
    state = row.inputs_before(hidden_states, weight.shape[1] - 1)
    return causal_conv1d(  # type: ignore[return-value]
        hidden_states, weight, bias, segments=row.segments, state=state, **options
    )


_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _rule(row: StateRow | None, backend: str | None, tensors: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    """Computes a gated delta rule of q, k, v, g and perhaps beta."""
    if row is None:
        return gated_delta_rule(*tensors, backend=backend, **options)  # type: ignore[return-value]

    def carry(
        parts: tuple[torch.Tensor, ...], segments: Segments, state: torch.Tensor | None, ends: bool
    ) -> tuple[torch.Tensor, Any]:
        out: Any = gated_delta_rule(
            *parts, segments=segments, state=state, return_state=ends, backend=backend, **options
        )
        return out if ends else (out, None)

    return row.run(carry, *tensors)


def _delta_rule(
    row: StateRow | None, backend: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    g: torch.Tensor, beta: torch.Tensor, chunk_size: int = 0, initial_state: torch.Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:  # fmt: skip
    if initial_state is not None or output_final_state:
        raise OtherCall("a state of its own")
    return _rule(row, backend, (query, key, value, g, beta), normalize=use_qk_l2norm_in_kernel)


def _scan(
    row: StateRow | None, backend: str | None, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, C: torch.Tensor, chunk_size: int = 0, D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None, initial_states: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
) -> torch.Tensor:  # fmt: skip
    if initial_states is not None or return_final_states:
        raise OtherCall("a state of its own")
    x = hidden_states.float()
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    step = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    out = _rule(row, backend, (C.float(), B.float(), x * step[..., None], A.float() * step), scale=1.0)
    return out if D is None else out + D[:, None] * x


_COMPUTE: dict[str, Callable[..., Any]] = {"convolution": _convolution, "delta rule": _delta_rule, "scan": _scan}


# ---------------------------------------------------------------------------------------------------------------------
# Recognising
# ---------------------------------------------------------------------------------------------------------------------

# More than a chunk of these functions (64, or the size that the probe passes), and no multiple of one.
_LENGTH = 70


@functools.cache
def state_form(function: types.FunctionType) -> StateForm | None:
    """Returns what a function of a module's file computes; None: nothing that carries a state, or nothing known."""
    own: Any = inspect.unwrap(function)
    name, parameters = own.__name__, set(_signature(own).parameters)
    if trace_of_function(function) is not None:
        return None
    if "split_conv1d" in name:
        return StateForm("shortcut") if _returns_none(own) else None
    if "conv1d" in name and "update" not in name and {"hidden_states", "weight", "bias", "activation"} <= parameters:
        return StateForm("convolution") if _is_convolution(own) else None
    if {"query", "key", "value", "g", "beta", "initial_state"} <= parameters and "chunk" in name:
        forms = (StateForm("delta rule", rank) for rank in (3, 4))
        return next((form for form in forms if _is_delta_rule(own, form)), None)
    if {"hidden_states", "dt", "A", "B", "C", "initial_states"} <= parameters:
        return StateForm("scan") if _is_scan(own) else None
    return None


def _returns_none(function: types.FunctionType) -> bool:
    """Whether a function does nothing but return None."""
    steps = [(each.opname, each.argval) for each in dis.get_instructions(function) if each.opname != "RESUME"]
    return {name for name, _ in steps} <= {"LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"} and not any(
        value is not None for _, value in steps
    )


def _drawn(*shape: int, seed: int = 11) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed + sum(shape)), device="cpu")


def _same(function: Callable[..., Any], form: StateForm, names: tuple[str, ...], inputs: list[torch.Tensor],
          **options: Any) -> bool:  # fmt: skip
    """Whether a function's first result, and its gradients, are the form's."""

    def theirs(*given: torch.Tensor) -> torch.Tensor:
        out = function(**dict(zip(names, given, strict=True)), **options)
        result: torch.Tensor = out[0] if form.returns_state else out
        return result

    def ours(*given: torch.Tensor) -> torch.Tensor:
        named = {**dict(zip(names, given, strict=True)), **options}
        return compute(form, arguments_of(function, (), named), None, "torch")

    try:
        with repeatable():
            return agree(theirs, ours, *inputs)
    except (OtherCall, *PROBE_ERRORS):
        return False


def _is_convolution(function: types.FunctionType) -> bool:
    x, weight, bias = _drawn(2, 6, 9), _drawn(6, 4), _drawn(6)
    names = ("hidden_states", "weight", "bias")
    form = StateForm("convolution")
    return all(_same(function, form, names, [x, weight, bias], activation=each) for each in (None, "silu")) and _same(
        function, form, names[:2], [x, weight]
    )


def _is_delta_rule(function: types.FunctionType, form: StateForm) -> bool:
    # In transformers 5.17 the modules repeat the heads of keys, and the functions take equal numbers of heads.
    heads_of_values = (4, 2) if form.rank == 3 else (2,)
    return any(_is_rule_of(function, form, heads) for heads in heads_of_values)


def _is_rule_of(function: types.FunctionType, form: StateForm, heads: int) -> bool:
    q, k = _drawn(2, _LENGTH, 2, 8), _drawn(2, _LENGTH, 2, 8, seed=12) / 4
    v = _drawn(2, _LENGTH, heads, 5)
    gate = _drawn(2, _LENGTH, heads, *((8,) if form.rank == 4 else ()), seed=13)
    beta = _drawn(2, _LENGTH, heads).sigmoid()
    names = ("query", "key", "value", "g", "beta")
    inputs = [q, k, v, -functional.softplus(gate), beta]
    return all(_same(function, form, names, inputs, use_qk_l2norm_in_kernel=each) for each in (False, True))


def _is_scan(function: types.FunctionType) -> bool:
    x, dt, a = _drawn(2, _LENGTH, 4, 6), _drawn(2, _LENGTH, 4), -_drawn(4).exp()
    b, c, d, bias = _drawn(2, _LENGTH, 2, 8), _drawn(2, _LENGTH, 2, 8, seed=12), _drawn(4), _drawn(4, seed=14)
    names = ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias")
    form, options = StateForm("scan"), {"chunk_size": 16, "dt_softplus": True}
    return _same(function, form, names, [x, dt, a, b, c, d, bias], **options) and _same(
        function, form, names[:5], [x, functional.softplus(dt), a, b, c], chunk_size=16, dt_limit=(0.1, 2.0)
    )
