"""A decode step as one captured graph: a token of every row goes through the model, and the next one is chosen."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..capture import CapturedFunction, Reads, Watched, capture, recorder_for
from ..patching.body import packed_row
from ..support.foreign import CACHES
from .masked import MaskedDecoding, masks_of_rows
from .model_state import ModelState
from .on_device import OnDevice
from .rollout_cache import Decoding, RolloutCache, cached_rotations
from .sampling import Sampling
from .weights import Weights

__all__ = ["Rows", "Step", "arguments_of", "cache_name", "logits_of", "of_own_code"]


@dataclass
class Rows:
    """The state of all rows, on the device, for B rows that make at most N tokens.

    Attributes:
        token: [B, 1] long, a row's last token, which is not in the cache yet.
        written: [B] int32, the number of its keys in the cache.
        made: [B] int32, the number of tokens that it has made.
        most: [B] int32, the number that it may make.
        alive: [B] bool, whether it goes on.
        out: [B, N] long, what it has made.
        logprobs: [B, N] fp32, their log-probabilities under the scores that they were drawn from; None: not asked for.
        noise: [B, V] fp32 of an exponential distribution, filled before each step; None: the likeliest token is taken.
        least: [1] int32, the number of tokens before which a row must not end.
        eos: [E] long, the ids that end a row.
        pad: [1] long, the id of a row that has ended.
        ids: [B, V] bool, the ids that it has seen; None: nobody asks.
        tail: [B, K] long, its last ids, -1 where it has none; None: nobody asks.
    """

    token: torch.Tensor
    written: torch.Tensor
    made: torch.Tensor
    most: torch.Tensor
    alive: torch.Tensor
    out: torch.Tensor
    logprobs: torch.Tensor | None
    noise: torch.Tensor | None
    least: torch.Tensor
    eos: torch.Tensor
    pad: torch.Tensor
    ids: torch.Tensor | None
    tail: torch.Tensor | None

    @classmethod
    def make(
        cls, rows: int, tokens: int, sampling: Sampling, vocabulary: int, logprobs: bool, device: torch.device
    ) -> Rows:
        """Returns rows none of which is alive."""
        ints = torch.zeros(3, rows, dtype=torch.int32, device=device)
        return cls(
            token=torch.zeros(rows, 1, dtype=torch.long, device=device),
            written=ints[0].clone(), made=ints[1].clone(), most=ints[2].clone(),
            alive=torch.zeros(rows, dtype=torch.bool, device=device),
            out=torch.zeros(rows, tokens, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, tokens, device=device) if logprobs else None,
            noise=torch.ones(rows, vocabulary, device=device) if sampling.draws else None,
            least=torch.zeros(1, dtype=torch.int32, device=device),
            eos=torch.tensor(sampling.eos, dtype=torch.long, device=device),
            pad=torch.tensor([sampling.pad], device=device),
            ids=torch.zeros(rows, vocabulary, dtype=torch.bool, device=device) if sampling.ids else None,
            tail=torch.full((rows, sampling.tail), -1, device=device) if sampling.tail else None,
        )  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        """Returns those that there are."""
        return [t for f in fields(self) if (t := getattr(self, f.name)) is not None]

    def of_rows(self) -> list[torch.Tensor]:
        """Returns those that have an entry for each row, except for the noise, which is new for each step."""
        shared = (self.noise, self.least, self.eos, self.pad)
        return [t for t in self.tensors() if not any(t is each for each in shared)]

    def first(self, rows: int) -> Rows:
        """Returns the state of the first rows, which has the same memory, with noise of its own."""
        own = {id(t) for t in self.of_rows()}
        parts = {f.name: t[:rows] for f in fields(self) if id(t := getattr(self, f.name)) in own}
        return replace(self, **parts, noise=None if self.noise is None else torch.ones_like(self.noise[:rows]))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def choose(self, logits: torch.Tensor, active: torch.Tensor, sampling: Sampling) -> None:
        """Chooses the next token of the active rows.

        A token is drawn as `torch.multinomial` draws one, by the largest probability divided by exponential noise, but
        nothing is read on the host; with the same noise it is the same token.

        Args:
            logits: [B, V] fp32.
            active: [B] bool.
            sampling: how it is chosen.
        """
        scores = sampling.scores(logits, self)
        token = (scores if self.noise is None else scores.softmax(-1) / self.noise).argmax(-1)
        token = torch.where(active, token, self.pad)
        at = self.made.clamp(max=self.out.shape[1] - 1).long()[:, None]
        if self.logprobs is not None:
            found = scores.log_softmax(-1).gather(1, token[:, None])
            self.logprobs.scatter_(1, at, torch.where(active[:, None], found, self.logprobs.gather(1, at)))
        self.out.scatter_(1, at, torch.where(active[:, None], token[:, None], self.out.gather(1, at)))
        if self.ids is not None:
            self.ids.scatter_(1, token[:, None], active[:, None] | self.ids.gather(1, token[:, None]))
        if self.tail is not None:
            later = torch.cat((self.tail[:, 1:], token[:, None]), 1)
            self.tail.copy_(torch.where(active[:, None], later, self.tail))
        self.made += active
        ends = (token[:, None] == self.eos).any(1) | (self.made >= self.most)
        self.alive.copy_(torch.where(active, ~ends, self.alive))
        self.token.copy_(torch.where(active, token, self.token[:, 0])[:, None])


_ASKED = (*CACHES, "cache_position", "logits_to_keep", "num_logits_to_keep", "position_ids", "attention_mask")


def arguments_of(model: Any) -> frozenset[str]:
    """Returns which of the arguments that not every model has this one has."""
    return frozenset(inspect.signature(model.forward).parameters) & frozenset(_ASKED)


def cache_name(names: frozenset[str]) -> str:
    """Returns the name of the argument that takes a model's cache, given those of `arguments_of`."""
    return next((name for name in CACHES if name in names), CACHES[0])


def of_own_code(given: dict[str, Any], mask: torch.Tensor, names: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments that a model takes whose own code attends: with the mask of `generate`, which biases by
    position are made from, and without those that it does not have.

    Args:
        given: the arguments, `input_ids` among them.
        mask: which keys there are, [B, L] of zeros and ones.
        names: the names of `arguments_of`.
    """
    return {n: v for n, v in {**given, "attention_mask": mask}.items() if n in names or n == "input_ids"}


def logits_of(out: Any) -> torch.Tensor:
    """Returns the logits of a model's output."""
    logits: torch.Tensor = out[0] if isinstance(out, tuple) else out.logits
    return logits


class Step:
    """A captured decode step.

    Args:
        model: the causal model.
        cache: the cache of its rows, with room for them.
        rows: the state of its rows.
        sampling: how tokens are chosen.
        decoding: what its attention reads.
        copies: the copies that stand for parameters during the step.
        length: the number of places of a row.
        changed: of a step like it that was captured before for a model in this state, whose operators are not checked
            again: whether `OnDevice` has changed any of its calls; None: there was none.
        norms: a cache of the forms of norms.
        moves: whether the model's parameters are at other addresses in each rollout.
        known: the model's state with what a step like it has read, if this one is not looked at.

    Attributes:
        changed: whether `OnDevice` has changed any call of this one.
        state: the model's state, with all values that the code of the step reads.

    Raises:
        Refused, Unserved: the step cannot be captured.
    """

    def __init__(
        self, model: Any, cache: RolloutCache, rows: Rows, sampling: Sampling, decoding: Decoding,
        copies: Weights, length: int, *, changed: bool | None = None, norms: dict[Any, Any],
        moves: bool = False, known: ModelState | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.rows, self.sampling, self.length = cache, rows, sampling, length
        names, on_device = arguments_of(model), OnDevice(decoding.masked_places())

        def step(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            alive, written = rows.alive, rows.written
            decoding.places = torch.where(alive, written, -1)
            decoding.lengths = torch.where(alive, written + 1, 0)
            given: dict[str, Any] = {"input_ids": rows.token, "position_ids": written.long()[:, None]}
            if "cache_position" in names:
                given["cache_position"] = written[:1].long()
            on_its_way: Any = packed_row(decoding)
            if isinstance(decoding, MaskedDecoding):
                decoding.written = written
                given, on_its_way = of_own_code(given, decoding.mask(), names), masks_of_rows(decoding)
            alike = contextlib.nullcontext() if changed is False else on_device
            with cache.rotating(rotations), copies.on(), on_its_way, alike:
                out = model(**given, **{cache_name(names): cache}, use_cache=True, return_dict=True)
            logits = logits_of(out)[:, -1].float()
            written += alive
            rows.choose(logits, alive.clone(), sampling)
            return (logits,)

        recorder = recorder_for(rows.token.device)
        parameters = {p: p for p in (*model.parameters(), *copies.tensors())}
        inputs = [*rows.tensors(), *cache.tensors()]
        rotations = cached_rotations(model, norms)

        def watch(seen: Reads | None, settings: tuple[Any, ...]) -> Watched:
            self.state = ModelState(model, moves, seen, settings) if seen is not None or known is None else known
            return self.state.values

        with torch.no_grad(), cache.at(decoding):
            self._captured: CapturedFunction = capture(
                step, inputs, parameters, [*model.buffers(), *sampling.tensors], recorder,
                known=changed is not None, watch=watch,
            )  # fmt: skip
        self.changed = on_device.changed
        self._recorder = recorder

    def no_room(self) -> str | None:
        """Returns why there is too little memory to keep it, or None."""
        return self._recorder.no_room()

    def replay(self, noise: torch.Tensor | None = None, order: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the step; returns the logits [B, V], which the next step overwrites.

        Args:
            noise, order: of a step of the first rows, the noise of all rows and the places in it of these rows': noise
                is drawn for all of them, so that a row draws the same tokens in whatever step.
        """
        if self.rows.noise is not None:
            drawn = self.rows.noise if noise is None else noise
            drawn.exponential_()
            if noise is not None and order is not None:
                torch.index_select(noise, 0, order, out=self.rows.noise)
        return self._captured.replay()[0]
