"""One rollout: which row is at which place of the step's batch, and what has been made.

`Turns.all` admits rows with their prompts, replays the engine's step, asks from time to time which rows have ended, and
gives their places to rows that wait, or goes on with a step of fewer rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..ops.attention import uploaded
from .decode import Rows, Step
from .generators import Draws
from .logits_trial import Differs, differs
from .rollout_cache import Places, RolloutCache
from .sampling import Sampling

__all__ = ["AT_ONCE", "Rollout", "Turns"]

AT_ONCE = 16384
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


class _Pace:
    """The seconds of a token, by the host's clock while it waits for answers of `_Ended`."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None

    def of(self, turn: int) -> float | None:
        """Returns them, if enough steps were made since the first call. The host runs ahead at first, so only the
        answers count."""
        now = time.perf_counter()
        if self._since is None:
            self._since = now, turn
            return None
        begun, first = self._since
        return (now - begun) / (turn - first) if turn - first >= 4 * _LOOKS else None


class Turns:
    """One rollout: which row is at which place of the step's batch, and what has been made.

    Args:
        engine: the `Engine`, which computes prompts, captures steps and counts.
        model: its model.
        rollout: what is generated.
        where: the device.
        longest: the number of tokens of the longest prompt and its completion.
    """

    def __init__(self, engine: Any, model: Any, rollout: Rollout, where: torch.device, longest: int) -> None:
        self._engine, self._model, self._rollout, self._where = engine, model, rollout, where
        self._longest = longest
        self._waiting = deque(range(len(rollout.prompts)))
        self._row_at: list[int] = []  # the row at each place, -1: none
        self._fewer: Step | None = None  # the step of the first places that goes on
        self._order = np.zeros(0, dtype=np.int64)  # for each place, which noise is its row's
        self._ordered: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._draws = Draws(where, 4 * _LOOKS)
        self._began: dict[int, int] = {}  # for each row, the number of draws before its first token

    def all(self) -> Any:
        """Generates all rows; returns as `Engine.run`."""
        engine, rollout, sampling = self._engine, self._rollout, self._rollout.sampling
        first = self._admit(self._free())
        step = engine.step
        assert step is not None
        state = step.rows
        tried = engine.tried(self._model, rollout)
        seen = [] if tried else [first]
        # Of the model's own code the last logits of each row are compared, too: it may change with a row's length.
        last = first if engine.masked and not tried else None
        ended, left, turn = _Ended(self._where), rollout.most - 1, 0
        pace, compared = _Pace(), True
        while True:
            if left > 0:
                goes_on = None if last is None and compared else state.alive.clone()
                logits = self._replay()
                if last is not None and goes_on is not None:
                    last = torch.where(goes_on[:, None], logits, last)
                if not compared and goes_on is not None:
                    self._try(state, [logits], ends=True, among=goes_on.tolist())
                    compared, pace = True, _Pace()
                left -= 1
                turn += 1
            if not tried:
                seen += [logits.clone()] if turn else []
                if turn == 2 or left == 0:
                    self._try(state, seen)
                    tried = True
            if self._waiting and (left == 0 or turn % _LOOKS == 0):
                alive = state.alive.cpu().numpy() if left == 0 else ended.ask(state.alive)
                free = [] if alive is None else np.flatnonzero(~alive).tolist()
                if free:
                    self._leave(free)
                    free = free[: len(self._waiting)]
                    begun = self._admit(free)
                    if last is not None:
                        last[free] = begun[free]
                    ended, left, pace = _Ended(self._where), rollout.most - 1, _Pace()
            elif left == 0:
                break
            elif turn % _LOOKS == 0 and (alive := ended.ask(state.alive)) is not None:
                if not alive.any():
                    break
                rows, seconds = len(alive), pace.of(turn)
                if seconds is not None:
                    engine.paced(rows, seconds)
                fewer = engine.fewer_rows(rows, int(alive.sum()), rollout.most - left, left) if tried else None
                if fewer is not None:
                    state = self._go_on_with(fewer, alive)
                    compared = engine.tried(self._model, rollout, fewer)
                    ended, pace = _Ended(self._where), _Pace()
        if last is not None:
            self._try(state, [last], ends=True)
        self._leave(range(len(self._row_at)))
        assert self._out is not None
        made = self._made.cpu().numpy()
        width = int(made.max())
        self._draws.go_back_to(max(self._began[row] + n for row, n in enumerate(made.tolist())))
        engine.tokens += int(made.sum())
        out = torch.where(
            torch.arange(width, device=self._where) < self._made[:, None], self._out[:, :width], sampling.pad
        )
        return out, self._made, None if self._logprobs is None else self._logprobs[:, :width]

    def _replay(self) -> torch.Tensor:
        """Makes one token of each row; returns the logits."""
        step = self._engine.step
        assert step is not None
        logits = step.replay() if self._fewer is None else self._fewer.replay(step.rows.noise, self._ordered)
        if step.rows.noise is not None:
            self._draws.made_one()
        return logits

    def _go_on_with(self, fewer: int, alive: np.ndarray) -> Rows:
        """Moves the rows that go on to the first places; returns the state of these, of which the step is then made.

        Args:
            fewer: the number of places.
            alive: for each place of the step until now, whether its row goes on. It may have ended since.
        """
        step = self._engine.step
        assert step is not None
        self._leave(np.flatnonzero(~alive).tolist())
        going_on = np.flatnonzero(alive)
        sources = going_on[going_on >= fewer]
        places = np.flatnonzero(~alive[:fewer])[: len(sources)]
        if len(sources):
            source, place = uploaded(sources, self._where), uploaded(places, self._where)
            for t in (*step.cache.tensors(), *step.rows.of_rows()):
                t[place] = t[source]
        for source, place in zip(sources.tolist(), places.tolist(), strict=True):
            self._row_at[place], self._row_at[source] = self._row_at[source], -1
            self._order[place] = self._order[source]
        self._ordered = uploaded(self._order[:fewer], self._where)
        self._fewer = self._engine.step_of_fewer(self._model, self._rollout, fewer)
        return self._fewer.rows

    def _free(self) -> list[int]:
        """Returns the places of the first rows."""
        step, rows = self._engine.step, len(self._rollout.prompts)
        return list(range(rows if step is None else min(rows, step.rows.alive.shape[0])))

    def _parts(self, places: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """Yields the next rows with their places, as many at a time as go through the model at once."""
        part: list[tuple[int, int]] = []
        prompts: set[tuple[int, ...]] = set()
        for place in places:
            prompt = self._rollout.prompts[self._waiting[0]]
            if part and prompt not in prompts and sum(map(len, prompts)) + len(prompt) > AT_ONCE:
                yield part
                part, prompts = [], set()
            part.append((place, self._waiting.popleft()))
            prompts.add(prompt)
        yield part

    def _admit(self, places: list[int]) -> torch.Tensor:
        """Waiting rows begin at these places with their prompts, and get their first tokens.

        Returns:
            the logits [B, V] of the prompts' ends.
        """
        engine, rollout, where = self._engine, self._rollout, self._where
        step, logits, begun = engine.step, None, []
        for part in self._parts(places):
            cache = RolloutCache(self._model) if step is None else step.cache
            at: dict[tuple[int, ...], list[int]] = {}
            for place, row in part:
                at.setdefault(rollout.prompts[row], []).append(place)
            found = engine.prefill(self._model, cache, list(at), where)
            if step is None:
                step = engine.capture(self._model, cache, rollout, self._longest, found.shape[-1], where)
            rows = len(step.rows.alive)
            if logits is None:
                logits = found.new_zeros(rows, found.shape[-1])
            if not self._row_at:
                self._start(step.rows)
            # The cache may have fewer places than there are rows, which is known only now.
            for place, row in reversed(part):
                if place >= rows:
                    self._waiting.appendleft(row)
            at = {prompt: kept for prompt, each in at.items() if (kept := [p for p in each if p < rows])}
            step.cache.put(Places([(len(prompt), each) for prompt, each in at.items()], where))
            of = {place: i for i, each in enumerate(at.values()) for place in each}
            logits[uploaded(np.asarray(list(of)), where)] = found[uploaded(np.asarray(list(of.values())), where)]
            begun += [(place, row) for place, row in part if place < rows]
            if len(begun) < len(places) and any(place >= rows for place, _ in part):
                break
        assert step is not None
        assert logits is not None
        self._begin(step.rows, begun)
        active = np.zeros(len(step.rows.alive), dtype=bool)
        active[[place for place, _ in begun]] = True
        self._began.update((row, self._draws.count) for _, row in begun)
        if step.rows.noise is not None:
            step.rows.noise.exponential_()
            self._draws.made_one()
        step.rows.choose(logits, uploaded(active, where), rollout.sampling)
        return logits

    def _start(self, state: Rows) -> None:
        rollout, where, rows = self._rollout, self._where, len(self._rollout.prompts)
        state.alive.zero_()
        state.least.fill_(rollout.sampling.least)
        self._row_at = [-1] * len(state.alive)
        self._order = np.arange(len(state.alive))
        self._out = torch.zeros(rows, rollout.most, dtype=torch.long, device=where)
        self._made = torch.zeros(rows, dtype=torch.int32, device=where)
        self._logprobs = torch.zeros(rows, rollout.most, device=where) if rollout.logprobs else None

    def _begin(self, state: Rows, begun: list[tuple[int, int]]) -> None:
        """Sets the state of rows that begin."""
        where, prompts = self._where, [self._rollout.prompts[row] for _, row in begun]
        for place, row in begun:
            self._row_at[place] = row
        at = uploaded(np.asarray([place for place, _ in begun]), where)
        state.written[at] = uploaded(np.asarray([len(p) for p in prompts], dtype=np.int32), where)
        state.made[at] = 0
        state.most[at] = self._rollout.most
        if state.ids is not None:
            seen = np.zeros((len(prompts), state.ids.shape[1]), dtype=bool)
            for i, prompt in enumerate(prompts):
                seen[i, list(prompt)] = True
            state.ids[at] = uploaded(seen, where)
        if state.tail is not None:
            count = state.tail.shape[1]
            tail = [([-1] * count + list(prompt))[-count:] for prompt in prompts]
            state.tail[at] = uploaded(np.asarray(tail), where)

    def _leave(self, places: Sequence[int]) -> None:
        """Takes what the rows at these places have made, all of which have ended."""
        step = self._engine.step
        assert step is not None
        assert self._out is not None
        pairs = [(place, self._row_at[place]) for place in places if self._row_at[place] >= 0]
        if not pairs:
            return
        at, rows = (uploaded(np.asarray(each), self._where) for each in zip(*pairs, strict=True))
        most = self._rollout.most
        self._out[rows] = step.rows.out[at, :most]
        self._made[rows] = step.rows.made[at]
        if self._logprobs is not None and step.rows.logprobs is not None:
            self._logprobs[rows] = step.rows.logprobs[at, :most]
        for place, _ in pairs:
            self._row_at[place] = -1

    def _try(
        self, state: Rows, seen: list[torch.Tensor], ends: bool = False, among: Sequence[bool] | None = None
    ) -> None:
        """Compares the first logits of some rows with the model's own, over the same tokens; or the last ones. `among`
        says of each place whether its row is compared; None: all are."""
        at = [place for place, row in enumerate(self._row_at) if row >= 0 and (among is None or among[place])]
        if not at:
            return
        prompts = [self._rollout.prompts[self._row_at[place]] for place in at]
        out, made = (state.out if ends else state.out[:, :2]).tolist(), state.made.tolist()
        why = differs(
            self._model, prompts, [out[place] for place in at], [made[place] for place in at],
            [each[uploaded(np.asarray(at), self._where)] for each in seen], ends,
        )  # fmt: skip
        if why is not None:
            raise Differs(why)
