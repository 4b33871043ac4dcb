"""Leaves padding out of everything but the modules that mix tokens.

Some bodies cannot be called with one packed row: a state runs along their rows (Mamba, gated delta rule), or their
attention is code of their own. Between those modules a decoder layer works on each token by itself, though. So the body
is called with the padded batch, and makes its masks and positions as always; the first layer takes the live tokens out
of the hidden states, `[B, L, H]` to `[1, n, H]`, and each *mixer* is called with the padded batch again, zeros at
padding, by its own code. A mixer is a child of a decoder layer whose forward takes a mask, positions, a cache or a
state. The code needs to know nothing else about it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...ops.attention import Shared, take
from ...support.foreign import CACHES
from ..classes import derived, original_class
from ..undo import Undo
from .layout import Layout
from .packed import Unserved

__all__ = ["LiveRows", "leave_padding_to_mixers", "live_tokens_alone", "mixers_under_way"]

_GIVEN = frozenset((*CACHES, "past_key_value", "state"))
"""Parameters of modules that mix tokens, beside masks and positions of whatever name."""


@dataclass
class LiveRows:
    """The live tokens of a padded batch `[B, L]` on their way through a body.

    Attributes:
        shape: B and L.
        tokens: the number of live tokens, n.
        places: the position of each live token in the flattened batch.
        padded: the live token of each position of the flattened batch, -1 where there is none.
        mixers: the classes of the modules that were called with the padded batch.
    """

    shape: tuple[int, int]
    tokens: int
    places: Shared
    padded: Shared
    mixers: set[type[nn.Module]] = field(default_factory=set)

    @classmethod
    def of(cls, where: Layout, shape: tuple[int, int], device: torch.device) -> LiveRows:
        """Uploads a layout without shared prefixes."""
        n = len(where.places)
        places = Shared.make(where.places, shape[0] * shape[1], device)
        return cls(shape, n, places, Shared.make(where.tokens, n, device))

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the live tokens, `[B, L, ...]` to `[1, n, ...]`."""
        return take(values.reshape(self.shape[0] * self.shape[1], -1), self.places).view(
            1, self.tokens, *values.shape[2:]
        )

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the batch with zeros at padding, `[1, n, ...]` to `[B, L, ...]`."""
        return take(values.reshape(self.tokens, -1), self.padded).view(*self.shape, *values.shape[2:])

    def packed(self, values: Any) -> Any:
        """Returns `pack` of a tensor with the rows and positions of the padded batch, and another value as it is."""
        of_batch = isinstance(values, torch.Tensor) and values.shape[:2] == self.shape
        return self.pack(values) if of_batch and not self.are(values) else values

    def are(self, values: Any) -> bool:
        """Whether a value is a tensor of the live tokens."""
        return isinstance(values, torch.Tensor) and values.dim() > 2 and values.shape[:2] == (1, self.tokens)

    def have(self, values: Any) -> bool:
        """Whether a value is a tensor of the padded batch, with a vector for each position."""
        return isinstance(values, torch.Tensor) and values.dim() > 2 and values.shape[:2] == self.shape


_rows: contextvars.ContextVar[LiveRows | None] = contextvars.ContextVar("npu_kernels_rows", default=None)


def _under_way() -> LiveRows | None:
    """Returns the batch on its way on this thread; no graph has one in it."""
    return None if torch.compiler.is_compiling() else _rows.get()


def mixers_under_way() -> bool:
    """Whether a body's layers get live tokens alone on this thread."""
    return _under_way() is not None


@contextlib.contextmanager
def live_tokens_alone(rows: LiveRows | None) -> Iterator[None]:
    """Inside the `with` block the layers of prepared bodies compute the live tokens of a batch; None: all positions."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def leave_padding_to_mixers(body: nn.Module, undo: Undo) -> str | None:
    """Prepares the decoder layers of a text-only body for `live_tokens_alone`.

    Args:
        body: the body.
        undo: records the changes; modules that it has changed already are skipped.

    Returns:
        why it cannot, or None.
    """
    layers = [layer for child in body.children() if isinstance(child, nn.ModuleList) for layer in child]
    if not layers or not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        return "its layers are not transformers' own"
    by_layer = [_parts(layer) for layer in layers]
    mixing = [part for parts in by_layer for part, is_layer in parts if not is_layer]
    matrices = {id(p) for layer in layers for p in layer.parameters() if p.dim() > 1}
    if matrices and matrices <= {id(p) for mixer in mixing for p in mixer.parameters()}:
        names = ", ".join(sorted({original_class(mixer).__name__ for mixer in mixing}))
        return f"all matrices of its layers are in modules that mix tokens: {names}"
    classes: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
    for parts in by_layer:
        for module, is_layer in parts:
            kind: Any = type(module)
            if getattr(kind, _BY, None) is undo:
                continue
            if (kind, is_layer) not in classes:
                own = _of_layer(kind) if is_layer else {"forward": _mixing(kind)}
                classes[kind, is_layer] = derived(kind, {_BY: undo, **own})
            undo.set_class(module, classes[kind, is_layer])
    return None


_BY = "_npu_kernels_mixes_by"


def _parts(layer: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Returns a layer and those of its parts that are called otherwise, each with whether it is a layer, and not a
    mixer. Zamba has decoder layers inside of others."""
    found: list[tuple[nn.Module, bool]] = [(layer, True)] if isinstance(layer, GradientCheckpointingLayer) else []
    for child in filter(_mixes_tokens, layer.children()):
        found += _parts(child) if original_class(child).__name__.endswith("DecoderLayer") else [(child, False)]
    return found


def _mixes_tokens(module: nn.Module) -> bool:
    names = inspect.signature(original_class(module).forward).parameters
    return any(name in _GIVEN or "mask" in name or "position" in name for name in names)


_CHECKPOINT = "_gradient_checkpointing_func"


def _of_layer(kind: Any) -> dict[str, Any]:
    """Returns what a layer's class has of its own. What a checkpoint repeats finds the rows again, on any thread."""
    parameters = inspect.signature(kind.forward).parameters
    others = {name: i for i, name in enumerate(parameters, -1) if name == "input_ids" or name.endswith("hidden_states")}

    @functools.wraps(kind.__call__)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _under_way()
        if rows is None:
            return kind.__call__(layer, *args, **kwargs)
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        if not rows.are(hidden):
            if not rows.have(hidden):
                raise Unserved("its layers are not given the hidden states of its batch")
            packed = rows.pack(hidden)
            args, kwargs = ((packed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": packed})
        # Besides the hidden states, a layer may get the embeddings or the ids of all positions (Zamba, DeepSeek V4).
        places = set(others.values())
        args = tuple(rows.packed(each) if i in places else each for i, each in enumerate(args))
        kwargs = {name: rows.packed(each) if name in others else each for name, each in kwargs.items()}
        return kind.__call__(layer, *args, **kwargs)

    def get(layer: Any) -> Any:
        try:
            checkpoint = vars(layer)[_CHECKPOINT]
        except KeyError:
            raise AttributeError(_CHECKPOINT) from None
        rows = _under_way()
        if rows is None:
            return checkpoint
        return lambda function, *args: checkpoint(functools.partial(_with_rows, rows, function), *args)

    def put(layer: Any, value: Any) -> None:
        vars(layer)[_CHECKPOINT] = value

    return {"__call__": call, _CHECKPOINT: property(get, put)}


def _with_rows(rows: LiveRows, function: Callable[..., Any], *args: Any) -> Any:
    with live_tokens_alone(rows):
        return function(*args)


def _mixing(base: Any) -> Callable[..., Any]:
    """Returns the forward of a mixer's class that is called with the padded batch."""

    @functools.wraps(base.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _under_way()
        if rows is None:
            return base.forward(module, *args, **kwargs)
        if not any(map(rows.are, (*args, *kwargs.values()))):
            raise Unserved(f"its {original_class(module).__name__} is not given the hidden states of its tokens")
        args = tuple(rows.pad(value) if rows.are(value) else value for value in args)
        kwargs = {name: rows.pad(value) if rows.are(value) else value for name, value in kwargs.items()}
        with live_tokens_alone(None):
            out = base.forward(module, *args, **kwargs)
        rows.mixers.add(original_class(module))
        if isinstance(out, tuple):
            return tuple(rows.pack(value) if i == 0 and rows.have(value) else value for i, value in enumerate(out))
        return rows.pack(out) if rows.have(out) else out

    return forward
