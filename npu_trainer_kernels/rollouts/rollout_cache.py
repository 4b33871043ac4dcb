"""The keys and values of a rollout, and attention to them.

Every row has its own places, from 0 on: the key of its token at position p is at place p. So nothing is padded, and a
row's window is a range of places that its length gives. A row that has ended has length 0, and nothing of it is read.

Layers with a state that runs along a row (convolutions, linear attention) keep transformers' own cache layers, whose
states have one size: a step updates them in place. A state has no segments, so prompts of such a model are computed one
by one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from ..ops.attention import (
    Segments,
    append_to_cache,
    decode_attention,
    qk_norm_rope_append,
    rotated_dtype,
    uploaded,
)
from ..ops.host import autocasts, compute_dtype
from ..ops.rope import rotation
from ..patching.body import PackedMask, Packing, Unserved, make_mask
from ..patching.modules import CACHED_ROTATION, CachedRotation, cached_rotation, rotation_call

__all__ = ["Decoding", "Places", "RolloutCache", "cached_rotations", "places_for", "states_of"]

_NAME = "npu_kernels_decode"


_ROOM = 256
"""Caches have a multiple of so many places for a row, so that the next rollout's prompts fit into them as well."""


def places_for(longest: int) -> int:
    """Returns the places of a row of so many tokens."""
    return -(-longest // _ROOM) * _ROOM


class Decoding(Packing):
    """One token of each row on its way through a body.

    Attributes:
        places: [B] int32, where the token's key is written; -1: nowhere.
        lengths: [B] int32, the number of keys that the token attends to.
    """

    name: ClassVar[str] = _NAME
    places: torch.Tensor
    lengths: torch.Tensor

    def __init__(self, by: Any, named: str, longest: int, backend: str | None) -> None:
        super().__init__(Segments.make([1], torch.device("cpu")), backend, by, named)
        self._longest = longest

    @property
    def longest(self) -> int:
        return self._longest

    def seen(self) -> int:
        """Returns how many tokens came before, for code that asks the cache: none, since positions are given."""
        return 0

    def masked_places(self) -> int | None:
        """Returns how many places of the cache a mask is about; None: masks are no tensors."""
        return None


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attends from one token of each row, query [B, heads, 1, size], to its keys in the cache."""
    if type(attention_mask) is not PackedMask or type(attention_mask.packing) is not Decoding:
        raise Unserved("it attends to something else than its own tokens")
    decoding, window = attention_mask.packing, attention_mask.window
    softcap, s_aux = decoding.options(module, softcap, s_aux, is_causal, kwargs)
    if dropout:
        raise Unserved("its attention drops out")
    if query.shape[2] != 1 or key.shape[0] != query.shape[0] or key.shape[2] == 1:
        raise Unserved("its attention takes other keys than its cache has")
    query = _in_dtype_of_products(query)
    if not query.dtype == key.dtype == value.dtype:
        raise Unserved(f"queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype}")
    out = decode_attention(
        query[:, :, 0], key, value, decoding.lengths, scale=scaling, window=window, softcap=softcap,
        sinks=s_aux, backend=decoding.backend,
    )  # fmt: skip
    return out.unsqueeze(1), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, make_mask)


def _in_dtype_of_products(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(compute_dtype(tensor))


def states_of(layer: Any) -> list[tuple[Any, Any, torch.Tensor]]:
    """Returns the states of a cache layer, [rows, ...], each with the dict that it is in and its name there."""
    found: list[tuple[Any, Any, torch.Tensor]] = []
    for where in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
        found += [
            (where, name, value) for name, value in where.items() if isinstance(value, torch.Tensor) and value.dim() > 1
        ]
    return found


def _with_states(layer: Any, states: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of a cache layer with other tensors in the place of its states."""
    made = copy.copy(layer)
    vars(made).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    for where, name, state in states_of(made):
        where[name] = states(state)
    return made


class Places:
    """Which token of a packed row of prompts goes to which place of the cache: a prompt goes to all rows that begin
    with it.

    Args:
        prompts: for each prompt, its number of tokens and the rows that begin with it.
        device: the device of the cache.
    """

    def __init__(self, prompts: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> None:
        begins = np.cumsum([0, *(tokens for tokens, _ in prompts)])
        parts = [
            (np.full(tokens, row), np.arange(tokens), begin + np.arange(tokens))
            for begin, (tokens, rows) in zip(begins[:-1], prompts, strict=True) for row in rows
        ]  # fmt: skip
        self.rows = [uploaded(np.asarray(rows), device) for _, rows in prompts]
        row, place, source = (np.concatenate(each) for each in zip(*parts, strict=True))
        self.row, self.place, self.source = (uploaded(each, device) for each in (row, place, source))


def cached_rotations(model: nn.Module, norms: dict[Any, Any]) -> list[tuple[nn.Module, CachedRotation]]:
    """Returns the attentions of a model whose forward allows `RolloutCache.rotating`. `norms`: known forms of norms."""
    return [(module, each) for module in model.modules() if (each := cached_rotation(module, norms)) is not None]


def _on_this_thread(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that is `forward` on this thread, and the forward of the module's class on others."""
    thread = threading.get_ident()

    def chosen(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(module).forward if threading.get_ident() != thread else forward
        return own(module, *args, **kwargs)

    return chosen


class RolloutCache(Cache):
    """Keys and values of all rows at fixed addresses, `[B, heads, L, size]` for each layer.

    While it has `decoding`, a layer's keys and values are written at its places, and the layer gets those of all
    places. Otherwise a packed row of prompts is on its way, whose keys and values are kept as they are until `put`.

    Args:
        model: the causal model.
    """

    def __init__(self, model: Any) -> None:
        self.layer_class_to_replicate = None
        self.offloading = False
        self.decoding: Decoding | None = None
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._prompts: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._config = model.config.get_text_config(decoder=True)
        self.layers = self._new_layers()
        self.has_states = any(hasattr(layer, "conv_states") for layer in self.layers)
        self._rows_of_states: list[Any] = []
        self._states: list[list[torch.Tensor]] = []

    def _new_layers(self) -> list[Any]:
        return list(DynamicCache(config=self._config).layers)

    def next_prompt(self) -> None:
        """The prompt that was computed last is complete, and the next one begins."""
        if self.has_states:
            self._states.append([state for layer in self.layers for *_, state in states_of(layer)])
            self._seen, self.layers = self.layers, self._new_layers()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.decoding is None:
            for states in (key_states, value_states):
                if states.dim() != 4 or states.shape[0] != 1:
                    raise Unserved(f"it writes a tensor of shape {list(states.shape)} to its cache")
            # Under autocast attention computes in its dtype.
            for kept, states in zip(
                self._prompts.setdefault(layer_idx, ([], [])), (key_states, value_states), strict=True
            ):
                kept.append(_in_dtype_of_products(states))
            return key_states, value_states
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        append_to_cache(
            key_states[:, :, 0].to(keys.dtype), value_states[:, :, 0].to(values.dtype), keys, values,
            self.decoding.places, backend=self.decoding.backend,
        )  # fmt: skip
        return keys, values

    def rotate_and_update(
        self, attention: CachedRotation, cache: Any, options: dict[str, Any], value: torch.Tensor, layer: int,
        q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Computes what an attention does with its queries, keys and values before it attends: rotates the first two,
        and updates its cache. One launch does this, and the norms before it, for a step of this cache.

        Args:
            attention: the attention, which is given.
            cache: the cache that its forward got.
            options: the keywords of the update, which this cache does not read.
            value: [B, Hk, 1, Dv].
            layer: the layer's index.
            q, k, args, kwargs: the arguments of its rotation: queries [B, Hq, 1, D], keys [B, Hk, 1, D] and tables.

        Returns:
            the queries, and the keys and values of all places.
        """
        if cache is self and self._serves(attention, value, layer, q, k, *args, **kwargs):
            assert self.decoding is not None
            call = rotation_call(attention.form, (q, k, *args), kwargs)
            assert call is not None
            assert call.k is not None
            keys, values = self.keys[layer], self.values[layer]
            cos, sin = (t[:, 0].expand(len(keys), -1) for t in (call.cos, call.sin))
            out = qk_norm_rope_append(
                q[:, :, 0], k[:, :, 0], value[:, :, 0], cos, sin, keys, values, self.decoding.places,
                norm=attention.qk_norm(), tables=attention.form.tables, casting=attention.form.casting,
                backend=self.decoding.backend,
            )  # fmt: skip
            return out.unsqueeze(2), keys, values
        q, k = attention.rotate(*attention.normed(q, k), *args, **kwargs)
        if cache is not None:
            k, value = cache.update(k, value, layer, **options)
        return q, k, value

    def _serves(
        self, attention: CachedRotation, value: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor,
        *args: Any, **kwargs: Any,
    ) -> bool:  # fmt: skip
        """Whether the op computes what the separate calls would."""
        call = rotation_call(attention.form, (q, k, *args), kwargs)
        if self.decoding is None or layer not in self.keys or call is None or call.heads != 1 or call.one_sequence:
            return False
        keys, values = self.keys[layer], self.values[layer]
        if any(t.dim() != 4 or t.shape[2] != 1 for t in (q, k, value)):
            return False
        if any((*t.shape[:2], t.shape[3]) != (*to.shape[:2], to.shape[3]) for t, to in ((k, keys), (value, values))):
            return False
        norm, form = attention.qk_norm(), rotation(heads=1, **attention.form.options)
        if norm is not None and not norm.q_weight.shape == norm.k_weight.shape == q.shape[3:]:
            return False
        rotated = rotated_dtype(q.dtype, call.cos.dtype, norm, form)
        # Attention takes queries in the dtype of products.
        return keys.dtype is (compute_dtype(q) if autocasts(q) else rotated)

    @contextlib.contextmanager
    def rotating(self, rotations: list[tuple[nn.Module, CachedRotation]]) -> Iterator[None]:
        """Inside the `with` block attentions call `rotate_and_update`, which is one launch, for their norms, rotation
        and update of the cache; on other threads they run their own forward. `rotations`: see `cached_rotations`."""
        for module, attention in rotations:
            vars(module)["forward"] = types.MethodType(_on_this_thread(attention.forward), module)
            vars(module)[CACHED_ROTATION] = functools.partial(self.rotate_and_update, attention)
        try:
            yield
        finally:
            for module, _ in rotations:
                # A rollout of another model that has this attention, too, may have taken them away.
                vars(module).pop("forward", None)
                vars(module).pop(CACHED_ROTATION, None)

    def allocate(self, rows: int, length: int) -> None:
        """Makes room for so many rows of so many places, as the prompts that it was given need."""
        if not self._prompts and not self.has_states:
            raise Unserved("it writes nothing to its cache")
        for layer, pair in self._prompts.items():
            for made, (like, *_) in zip((self.keys, self.values), pair, strict=True):
                made[layer] = like.new_zeros(rows, like.shape[1], length, like.shape[3])

        if self.has_states:
            self._rows_of_states = [
                _with_states(layer, lambda state: state.new_zeros(rows, *state.shape[1:])) for layer in self._seen
            ]

    def first(self, rows: int) -> RolloutCache:
        """Returns a cache of the first rows, which has the same memory."""
        made = copy.copy(self)
        made.keys, made.values = ({layer: t[:rows] for layer, t in each.items()} for each in (self.keys, self.values))
        made._rows_of_states = [_with_states(layer, lambda state: state[:rows]) for layer in self._rows_of_states]
        return made

    def put(self, places: Places) -> None:
        """Copies the prompts that it was given to their rows."""
        if self._prompts.keys() != self.keys.keys():
            raise Unserved("its layers do not all write to its cache each time")
        for layer, pair in self._prompts.items():
            for to, kept in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                states = kept[0][0] if len(kept) == 1 else torch.cat([each[0] for each in kept], 1)
                to.transpose(1, 2)[places.row, places.place] = states.transpose(0, 1)[places.source].to(to.dtype)
        self._prompts = {}
        for of_prompt, rows in zip(self._states, places.rows, strict=True) if self.has_states else ():
            for to, state in zip(self.states(), of_prompt, strict=True):
                to[rows] = state.to(to.dtype)
        self._states = []

    def states(self) -> list[torch.Tensor]:
        """Returns the states of all rows, [rows, ...], of all layers."""
        return [state for layer in self._rows_of_states for *_, state in states_of(layer)]

    @contextlib.contextmanager
    def at(self, decoding: Decoding) -> Iterator[None]:
        """Inside the `with` block one token of each row goes through the body."""
        before, self.decoding = self.layers, decoding
        if self.has_states:
            self.layers = self._rows_of_states
        try:
            yield
        finally:
            self.layers, self.decoding = before, None

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of all layers."""
        return [*self.keys.values(), *self.values.values(), *self.states()]

    def bytes_per_place(self) -> int:
        """Returns the bytes of a place of a row, of all layers, as the prompts that it was given need."""
        kept = (each[0] for pair in self._prompts.values() for each in pair)
        return max(1, sum(t.shape[1] * t.shape[3] * t.element_size() for t in kept))

    def rows_in(self, length: int, free: int) -> int:
        """Returns how many rows of so many places fit into so many bytes."""
        return free // (self.bytes_per_place() * length)

    # What models ask a cache besides: no token was seen, since positions are given and masks stand for lengths.

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0 if self.decoding is None else self.decoding.seen()

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        if self.decoding is not None and (places := self.decoding.masked_places()) is not None:
            return places, 0
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_cache_shape(self, *args: Any, **kwargs: Any) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_initialized(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.layers)
