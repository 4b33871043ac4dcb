"""Generates completions by captured decode steps.

A rollout is, in this order:

1. `sampling.py`: how tokens are chosen, from what `generate` has prepared.
2. The prompts go through the model as one packed row without padding, each different prompt once; their keys and values
   go to the rows that begin with them (`cache.py`), and each row's first token is chosen.
3. `decode.py`: one captured step is replayed until all rows have ended. Rows beyond the cache's room wait, and take the
   places of rows that have ended.

At the first rollout the logits of the prompts and of two replays are compared with the model's own forward over the
same tokens (`trial.py`). What differs by more than rounding, or cannot be captured, is left to `generate`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import device
from ..capture import Refused
from ..ops.attention import Segments, uploaded
from ..patching.body import Unserved, attend_by_segments, packed, packing_for
from ..patching.patch import PROBE_ERRORS
from ..patching.undo import Undo
from ..support.errors import one_line
from .cache import Decoding, Places, RolloutCache
from .decode import Rows, Step, arguments_of, logits_of
from .sampling import Sampling
from .trial import differs
from .weights import Casts

__all__ = ["Engine", "Rollout"]

_ROOM = 256
"""Caches have a multiple of so many places for a row, so that the next rollout's prompts fit into them as well."""
_AT_ONCE = 16384
"""The most tokens of prompts that go through the model at once."""
_LOOKS = 4
"""After so many steps the host asks which rows have ended; the answer is read as many steps later, without waiting."""


@dataclass
class Rollout:
    """What is generated.

    Attributes:
        prompts: for each row, its tokens.
        most: the number of tokens that each row may make.
        sampling: how they are chosen.
        logprobs: whether their log-probabilities are asked for.
    """

    prompts: Sequence[tuple[int, ...]]
    most: int
    sampling: Sampling
    logprobs: bool = False


class _Ended:
    """Asks the device which rows go on, and reads the answer to the question before."""

    def __init__(self, where: torch.device) -> None:
        self._module = None if where.type == "cpu" else torch.get_device_module(where)
        self._asked: tuple[torch.Tensor, Any] | None = None

    def ask(self, alive: torch.Tensor) -> np.ndarray | None:
        before = self._asked
        if self._module is None:
            self._asked = alive.clone(), None
        else:
            answer = torch.empty(alive.shape, dtype=torch.bool, pin_memory=True)
            answer.copy_(alive, non_blocking=True)
            event = self._module.Event()
            event.record()
            self._asked = answer, event
        if before is None:
            return None
        answer, event = before
        if event is not None:
            event.synchronize()
        return answer.numpy()


class Engine:
    """Generates for one model.

    Attributes:
        rollouts, tokens: the number of rollouts, and of tokens in them.
        seconds: the time that they took.
        capturing: the part of it that was spent on capturing.
        reasons: why `generate` ran, with the number of its calls.
    """

    def __init__(self, model: nn.Module, undo: Undo, backend: str | None) -> None:
        self._model = weakref.ref(model)
        self._undo, self._backend = undo, backend
        self._step: Step | None = None
        self._step_key: Any = None
        self._casts = Casts()
        self._tried: set[Any] = set()
        self._refused: str | None = None
        self._seen_update = False
        self.rollouts = self.tokens = 0
        self.seconds = self.capturing = 0.0
        self.reasons: Counter[str] = Counter()

    def __deepcopy__(self, memo: object) -> Engine:
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as a plain dict."""
        return {
            "rollouts": self.rollouts, "tokens": self.tokens, "seconds": round(self.seconds, 3),
            "capturing": round(self.capturing, 3), "reasons": dict(self.reasons),
        }  # fmt: skip

    def __str__(self) -> str:
        calls = self.rollouts + self.reasons.total()
        lines = [
            f"{self.rollouts} of {calls} by captured steps ({self.tokens} tokens in {self.seconds:.1f} s, "
            f"{self.capturing:.1f} of them spent on capturing)"
        ]
        return "\n".join([*lines, *(f"  {count} by generate: {reason}" for reason, count in self.reasons.items())])

    def serves(self, model: Any) -> bool:
        """Whether a model is the one that it was made for, and not a copy of it."""
        return self._model() is model

    def forget(self) -> None:
        """Lets go of the captured step and of all memory."""
        self._step = self._step_key = None
        self._casts = Casts()

    # -- one rollout -------------------------------------------------------------------------------------------------

    def run(self, model: Any, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Generates, without gradients.

        Returns:
            tokens [B, N], their number in each row [B], and their log-probabilities [B, N] or None.

        Raises:
            Refused: it cannot be done for this model, or its results differ from those of the model's own code.
        """
        if self._refused is not None:
            raise Refused(self._refused)
        begun = time.perf_counter()
        where = next(model.parameters()).device
        random = _random_state(where)
        try:
            with torch.no_grad():
                found = self._run(model, rollout, where)
        except (Unserved, Refused, *PROBE_ERRORS) as error:
            if device.is_out_of_memory(error):
                self.forget()
                _set_random_state(where, random)
                raise Refused("its caches do not fit into the device's memory") from error
            self.forget()
            _set_random_state(where, random)
            own = isinstance(error, Unserved | Refused)
            self._refused = str(error) if own else f"its decode step raises {type(error).__name__}: {one_line(error, 120)}"
            raise Refused(self._refused) from error
        self.seconds += time.perf_counter() - begun
        self.rollouts += 1
        self._give_back()
        return found

    def _give_back(self) -> None:
        """Keeps the step only if updates of the weights have been seen to leave room for it."""
        step, seen = self._step, self._seen_update
        self._seen_update = True
        if step is not None and (not seen or step.no_room() is not None):
            self.forget()

    def _run(self, model: Any, rollout: Rollout, where: torch.device) -> Any:
        longest = max(map(len, rollout.prompts)) + rollout.most
        rows = len(rollout.prompts)
        step = self._step
        usable = step is not None and self._step_key == self._key(rollout, rows, where) and step.holds(model)
        if usable and step is not None:
            room = next(iter(step.cache.keys.values())).shape[2]
            usable = room >= longest and step.rows.out.shape[1] >= rollout.most
        if not usable:
            self.forget()
        self._casts.fill()
        waiting = list(range(rows))
        cache = RolloutCache() if self._step is None else self._step.cache
        first = self._prefill(model, cache, rollout, waiting)
        if self._step is None:
            self._step = self._capture(model, cache, rollout, rows, longest, first, where)
            self._step_key = self._key(rollout, rows, where)
        return self._decode(model, self._step, rollout, first)

    def _key(self, rollout: Rollout, rows: int, where: torch.device) -> Any:
        s = rollout.sampling
        kind = where.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return rows, s.draws, tuple(s.key), s.eos, s.pad, s.tail, s.ids, rollout.logprobs, cast

    def _prefill(
        self, model: Any, cache: RolloutCache, rollout: Rollout, rows: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[int, list[int]]], torch.Tensor]:
        """Computes the prompts of some rows.

        Returns:
            the logits after each different prompt, the prompts' lengths and rows, and by row its prompt.
        """
        prompts: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            prompts.setdefault(rollout.prompts[row], []).append(row)
        where = next(model.parameters()).device
        lengths = [len(prompt) for prompt in prompts]
        ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
        positions = np.concatenate([np.arange(n) for n in lengths])
        ends = np.cumsum(lengths) - 1
        attend_by_segments(model, "", self._undo)
        segments = Segments.make(lengths, where)
        packing = packing_for(model, model, segments, self._backend, len(ids))
        given: dict[str, Any] = {
            "input_ids": uploaded(ids, where).unsqueeze(0), "position_ids": uploaded(positions, where).unsqueeze(0),
        }  # fmt: skip
        names = arguments_of(model)
        last = uploaded(ends, where)
        keep = next((name for name in ("logits_to_keep", "num_logits_to_keep") if name in names), None)
        if keep is not None:
            given[keep] = last
        if "cache_position" in names:
            given["cache_position"] = given["position_ids"][0]
        looking = contextlib.nullcontext() if self._casts.found else self._casts.looking(model)
        with packed(packing), self._casts.on(), looking:
            out = model(**given, past_key_values=cache, use_cache=True, return_dict=True)
        logits = logits_of(out)[0]
        if logits.shape[0] != len(lengths):
            logits = logits[last]
        self._casts.fill()
        of = np.empty(len(rollout.prompts), dtype=np.int64)
        for i, each in enumerate(prompts.values()):
            of[each] = i
        return logits.float(), list(zip(lengths, prompts.values(), strict=True)), uploaded(of, where)

    def _capture(
        self, model: Any, cache: RolloutCache, rollout: Rollout, rows: int, longest: int, first: Any,
        where: torch.device,
    ) -> Step:  # fmt: skip
        begun = time.perf_counter()
        length = -(-longest // _ROOM) * _ROOM
        cache.allocate(rows, length)
        state = Rows.make(rows, rollout.most, rollout.sampling, first[0].shape[-1], rollout.logprobs, where)
        packing = packing_for(model, model, Segments.make([1], where), self._backend, 1)
        decoding = Decoding(packing.by, packing.named, length, self._backend)
        with self._casts.on():
            step = Step(model, cache, state, rollout.sampling, decoding, self._casts.tensors())
        self.capturing += time.perf_counter() - begun
        return step

    def _decode(self, model: Any, step: Step, rollout: Rollout, first: Any) -> Any:
        state, where = step.rows, step.rows.token.device
        self._begin(state, rollout, where)
        self._enter(step, rollout, first, range(len(rollout.prompts)))
        key = type(model), rollout.sampling.draws
        tried = key in self._tried
        seen: list[torch.Tensor] = [] if tried else [first[0][first[2]]]
        ended = _Ended(where)
        for turn in range(1, rollout.most):
            logits = step.replay()
            if not tried and turn <= 2:
                seen.append(logits.clone())
            if not tried and (turn == 2 or rollout.most == 2):
                self._try(model, rollout, state, seen)
                self._tried.add(key)
                tried = True
            if turn % _LOOKS == 0 and (alive := ended.ask(state.alive)) is not None and not alive.any():
                break
        made = state.made.cpu().numpy()
        width = int(made.max())
        self.tokens += int(made.sum())
        out = state.out[:, :width].clone()
        logprobs = None if state.logprobs is None else state.logprobs[:, :width].clone()
        return out, state.made.clone(), logprobs

    def _begin(self, state: Rows, rollout: Rollout, where: torch.device) -> None:
        state.alive.zero_()
        state.made.zero_()
        state.most.fill_(rollout.most)
        state.out.fill_(rollout.sampling.pad)
        state.least.fill_(rollout.sampling.least)
        if state.logprobs is not None:
            state.logprobs.zero_()

    def _enter(self, step: Step, rollout: Rollout, first: Any, rows: Sequence[int]) -> None:
        """Rows begin with their prompts, and get their first tokens."""
        logits, prompts, of = first
        state = step.rows
        where = state.token.device
        step.cache.put(Places(prompts, where))
        lengths = np.asarray([len(p) for p in rollout.prompts], dtype=np.int32)
        state.written.copy_(uploaded(lengths, where))
        if state.ids is not None:
            seen = np.zeros(state.ids.shape, dtype=bool)
            for row, prompt in enumerate(rollout.prompts):
                seen[row, list(prompt)] = True
            state.ids.copy_(uploaded(seen, where))
        if state.tail is not None:
            count = state.tail.shape[1]
            tail = [([-1] * count + list(prompt))[-count:] for prompt in rollout.prompts]
            state.tail.copy_(uploaded(np.asarray(tail), where))
        if state.noise is not None:
            state.noise.exponential_()
        state.choose(logits[of], torch.ones_like(state.alive), rollout.sampling)

    def _try(self, model: Any, rollout: Rollout, state: Rows, seen: list[torch.Tensor]) -> None:
        """Compares the first logits of some rows with the model's own, over the same tokens."""
        why = differs(model, rollout.prompts, state.out[:, :2].tolist(), state.made.tolist(), seen)
        if why is not None:
            raise Refused(why)


def _random_state(where: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if where.type == "cpu" else torch.get_device_module(where).get_rng_state(where)


def _set_random_state(where: torch.device, state: torch.Tensor) -> None:
    if where.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)

