"""Packs a padded batch before the body, and pads the body's output again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...ops.attention import Segments, Shared, take, uploaded
from ..call import Scored
from ..patch import Site
from .layout import DEAD, PREDICTS, READ, Layout, layout
from .mixers import LiveRows, live_tokens_alone
from .packed import Unserved, packed_row, packing_for
from .user_rows import ARGUMENTS, lengths_of_rows

__all__ = ["Batch", "BodyForward", "hidden_of", "routers_of"]


@dataclass(frozen=True)
class BodyForward:
    """How a packed row is passed to a body.

    Attributes:
        kind: the class whose forward is called.
        body: the module that it is called with.
        inner: the path of the text-only body in it.
        by_columns: whether position ids count columns, padding included; None: the body takes none.
        backend: the override for attention.
        carries: whether modules of it carry a state by segments.
        mixes: whether modules of it get the padded batch.
    """

    kind: Any
    body: Any
    inner: str
    by_columns: bool | None
    backend: str | None
    carries: bool
    mixes: bool

    @classmethod
    def of(cls, site: Site, module: Any) -> BodyForward:
        """Returns how a row is passed to a body that a site serves."""
        proof = site.form.proof
        return cls(
            site.kind, module, site.form.inner, proof.by_columns, site.backend, bool(proof.carried), proof.mixes
        )  # fmt: skip


def hidden_of(out: Any) -> torch.Tensor:
    """Returns the hidden states of a body's output."""
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out.last_hidden_state
    return hidden


def routers_of(out: Any) -> tuple[torch.Tensor, ...]:
    """Returns the logits of every layer's router, if a body was asked for them."""
    return getattr(out, "router_logits", None) or ()


def _positions(where: Layout, shape: tuple[int, int], by_columns: bool) -> np.ndarray:
    """Returns the position id of each packed token in its own row."""
    rows, width = shape
    columns: np.ndarray = where.places % width
    if by_columns:
        return columns
    begins = (where.tokens.reshape(rows, width) >= 0).argmax(1)
    return columns - begins[where.places // width]


def _read(ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Returns the code of each position for the case that it has no token: `READ` if a classifier may read it, else
    `DEAD`. A classifier may read a position with another id than padding; in a row without one, the first position."""
    other = ids != padding
    other[:, 0] |= ~other.any(1)
    return torch.where(other, READ, DEAD)


@dataclass(frozen=True)
class Batch:
    """The arguments of a body's call, and the layout of its tokens."""

    given: dict[str, Any]
    layout: Layout
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, given: dict[str, Any], labels: torch.Tensor | None, *, share: bool, padding: int | None = None,
        label_shift: int = 1, scored: Scored | None = None, leading: bool = False,
    ) -> Any:  # fmt: skip
        """Packs a batch, or returns why it cannot, as a sentence; the host waits for the device, once for a forward.

        Args:
            given: the arguments of the body.
            labels: the labels that the model was called with, where there are some.
            share: whether common prefixes may be computed once.
            padding: the only id that a position without a token may have; None: any.
            label_shift: the number of positions between a label and the position that predicts it.
            scored: the positions that TRL's head scores, which are read with the layout; None: they are not needed.
            leading: whether padding before a row's last token is taken for tokens.
        """
        mask, ids = given["attention_mask"], given.get("input_ids")
        alive = mask.bool()
        if leading:
            alive = alive.flip(1).cummax(1).values.flip(1)
        if ids is None:
            seen = alive.long() - 1
        else:
            seen = torch.where(alive, ids.long(), DEAD if padding is None else _read(ids, padding))
        positions = given.get("position_ids")
        if share and ids is not None and positions is not None and len(positions) > 1:
            # Tokens are equal only if their position ids are.
            seen = torch.where(alive, seen | (positions.long() & 0x7FFF_FFFF) << 32, seen)
        if labels is not None and labels.shape == mask.shape:
            predicting = slice(0, mask.shape[1] - label_shift)
            lost = (labels[:, label_shift:] != -100) & ~alive[:, predicting]
            seen[:, predicting].masked_fill_(lost, PREDICTS)
        if isinstance(seen, FakeTensor):
            return "its ids or mask have no numbers (FakeTensorMode)"
        if scored is not None and scored.labels.shape != mask.shape:
            scored = None
        if scored is not None:
            # Bit 31 is above an id, and below its position id.
            wanted, live = scored.mask, alive[:, : scored.shape[1]]
            seen[:, : scored.shape[1]] |= (wanted & live).long() << 31
            if scored.labels is not labels:
                seen[:, : scored.shape[1]].masked_fill_(wanted & ~live, PREDICTS)
        read = seen.cpu().numpy()
        if scored is not None:
            marks = (read >= 0) & (read >> 31 & 1 > 0)
            read = np.where(marks, read & ~(1 << 31), read)
        found = layout(read, share=share and ids is not None)
        if scored is not None and not isinstance(found, str):
            # Other positions are not scored: a label to be predicted at padding has no layout.
            scored.places = np.flatnonzero(marks[:, : scored.shape[1]])
        return found if isinstance(found, str) else cls(given, found, tuple(mask.shape))

    @classmethod
    def of_packed(cls, given: dict[str, Any]) -> Batch:
        """Takes a batch that a collator has packed; the host waits for the device, once.

        Args:
            given: the arguments of the body, for which `may_be_packed` holds.
        """
        positions = given["position_ids"]
        tokens = np.arange(positions.numel())
        lengths = lengths_of_rows(positions)
        return cls(given, Layout(tokens, lengths, lengths, None, tokens, len(tokens)), tuple(positions.shape))

    @classmethod
    def full(cls, given: dict[str, Any]) -> Batch:
        """Takes a batch of rows without padding, whose ids or embeddings nobody reads."""
        embeddings = given.get("inputs_embeds")
        rows, width = (given["input_ids"] if embeddings is None else embeddings).shape[:2]
        tokens, lengths = np.arange(rows * width), [width] * rows
        return cls(given, Layout(tokens, lengths, lengths, None, tokens, len(tokens)), (rows, width))

    @property
    def device(self) -> torch.device:
        """The device of its tokens."""
        embedded = self.given.get("inputs_embeds")
        where: torch.device = (self.given["input_ids"] if embedded is None else embedded).device
        return where

    @property
    def computed(self) -> int:
        """The number of tokens that go through the body."""
        return len(self.layout.places)

    def through(self, kind: Any, body: Any, inner: str, by_columns: bool | None, backend: str | None) -> Any:
        """Returns the body's output with its hidden states in the batch's shape, and the `Packing` of the packed row.

        Args:
            kind: the class whose forward is called.
            body: the module that it is called with.
            inner: the path of the text-only body.
            by_columns: whether position ids count columns, padding included; None: the body takes none.
            backend: the override for the op.

        Raises:
            Unserved: a layer needs a feature that attention by segments lacks.
        """
        where, n = self.layout, self.computed
        new = self.arguments(n, by_columns)
        device = new["attention_mask"].device
        keys = None if where.keys is None else Shared.make(where.keys, n, device)
        segments = Segments.make(where.lengths, device, None if keys is None else where.key_lengths, keys)
        packing = packing_for(body, body.get_submodule(inner), segments, backend)
        packing.carries = True
        with packed_row(packing):
            out = kind.forward(body, **new)
        return self.restored(out, n), packing

    def arguments(self, n: int, by_columns: bool | None) -> dict[str, Any]:
        """Returns the arguments of a body's call with one row.

        Args:
            n: the number of tokens of the row. Behind the batch's own there are copies of one token, with numbers that
                are finite.
            by_columns: as for `through`.
        """
        given, where, (rows, width) = self.given, self.layout, self.shape
        embedded = given.get("inputs_embeds")
        device = self.device
        # Labels are for the head; the proof would have shown a body that uses them.
        new = {name: v for name, v in given.items() if name != "labels" and name not in ARGUMENTS}
        ones = torch.ones(1, n, dtype=torch.long, device=device)
        new |= {"attention_mask": ones, "use_cache": False}
        if embedded is None:
            places = uploaded(_filled(where.places, n), device)
            new["input_ids"] = given["input_ids"].reshape(-1).index_select(0, places).unsqueeze(0)
        else:
            packed_rows = Shared.make(_filled(where.places, n, -1), rows * width, embedded.device)
            new["inputs_embeds"] = take(embedded.reshape(rows * width, -1), packed_rows).unsqueeze(0)
        positions = given.get("position_ids")
        if by_columns is None:
            new.pop("position_ids", None)
        elif positions is None:
            counted = _positions(where, self.shape, by_columns)
            new["position_ids"] = uploaded(_filled(counted, n), device).unsqueeze(0)
        else:
            places = uploaded(_filled(where.places, n), positions.device)
            new["position_ids"] = positions.expand(rows, width).reshape(-1).index_select(0, places).unsqueeze(0)
        return new

    def restored(self, out: Any, n: int) -> Any:
        """Returns the output of a body's call with one row of n tokens in the batch's shape.

        Raises:
            Unserved: it has something that cannot be given this shape.
        """
        where, (rows, width) = self.layout, self.shape
        known = ("last_hidden_state", "router_logits")
        others = () if isinstance(out, tuple) else (name for name in out if name not in known)
        if (isinstance(out, tuple) and any(o is not None for o in out[1:])) or (name := next(iter(others), None)):
            raise Unserved(f"it returns {'more than hidden states' if isinstance(out, tuple) else name}")
        hidden = hidden_of(out)
        if hidden.dim() != 3 or hidden.shape[:2] != (1, n):
            # A module has added a tensor with the batch's rows, none of which is the packed one.
            raise Unserved(
                f"of one packed row of {n} tokens its layers make a tensor of shape {list(hidden.shape)}", False
            )
        places_of = Shared.make(where.tokens, n, hidden.device)
        padded = take(hidden[0], places_of).view(rows, width, -1)
        if isinstance(out, tuple):
            out = (padded, *out[1:])
        else:
            out.last_hidden_state = padded
            if routed := routers_of(out):
                out.router_logits = tuple(_padded_logits(logits, places_of, self.shape) for logits in routed)
        return out

    def beside_mixers(self, kind: Any, body: Any, packed: tuple[int, int] | None = None) -> Any:
        """Returns the body's output in the batch's shape, and its `LiveRows`; only its mixers compute padding.

        Args:
            kind: the class whose forward is called.
            body: the module that it is called with.
            packed: the shape of the batch of live tokens that a collator has made of this one, which the output gets in
                the place of the batch's.

        Raises:
            Unserved: its layers do not work on each token by itself.
        """
        rows = LiveRows.of(self.layout, self.shape, self.given["attention_mask"].device)
        with live_tokens_alone(rows):
            out = kind.forward(body, **{name: v for name, v in self.given.items() if name != "labels"})
        hidden = hidden_of(out)
        # What a body makes of its hidden states (BERT's pooler) has other rows.
        others = enumerate(out) if isinstance(out, tuple) else out.items()
        named = (name for name, v in others if isinstance(v, torch.Tensor) and v is not hidden)
        if (name := next(named, None)) is not None:
            raise Unserved(f"it returns {'more than hidden states' if isinstance(out, tuple) else name}")
        if not rows.are(hidden):
            raise Unserved(f"its layers give hidden states of shape {list(hidden.shape)} for {rows.tokens} tokens")
        padded = rows.pad(hidden) if packed is None else hidden.view(*packed, -1)
        if isinstance(out, tuple):
            return (padded, *out[1:]), rows
        out.last_hidden_state = padded
        if packed is None and (routed := routers_of(out)):
            out.router_logits = tuple(_padded_logits(logits, rows.padded, self.shape) for logits in routed)
        return out, rows


def _filled(places: np.ndarray, tokens: int, value: int = 0) -> np.ndarray:
    """Returns the array with so many entries, by copies of a value."""
    if len(places) == tokens:
        return places
    return np.concatenate([places, np.full(tokens - len(places), value, places.dtype)])


def _padded_logits(logits: torch.Tensor, tokens: Shared, shape: tuple[int, int]) -> torch.Tensor:
    """Returns a router's logits for the batch. The auxiliary loss, which reads them, ignores masked positions."""
    if logits.dim() == 3 and logits.shape[:2] == (1, tokens.n):
        return take(logits[0], tokens).unflatten(0, shape)
    if logits.dim() != 2 or logits.shape[0] != tokens.n:
        raise Unserved("its router_logits are not of its tokens")
    return take(logits, tokens)
