"""Generates completions by captured decode steps.

A rollout is, in this order:

1. `sampling.py`: how tokens are chosen, from what `generate` has prepared.
2. The prompts go through the model as one packed row without padding, each different prompt once; their keys and values
   go to the rows that begin with them (`rollout_cache.py`), and each row's first token is chosen.
3. `decode.py`: one captured step is replayed until all rows have ended. Rows beyond the cache's room wait, and take the
   places of rows that have ended. When no row waits and at most half of them go on, these are moved to the first
   places, and a step of as many rows is captured for the rest, if it is expected to save more time than that takes.

At the first rollout the logits of the prompts and of two replays are compared with the model's own forward over the
same tokens (`logits_trial.py`). What differs by more than rounding, or cannot be captured, is left to `generate`.

A model whose attention takes no packed row attends by its own code, with a mask of each row (`masked.py`): its prompts
go through it one by one. Its last logits are compared, too, since its code may do something else with longer rows.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import device
from ..capture import Reads, Refused, why_unseen
from ..ops.attention import Segments, uploaded
from ..patching.body import Packing, Unserved, attend_by_segments, packed_row, packing_for
from ..patching.patch import PLAIN, PROBE_ERRORS
from ..patching.probe import remembered, trace_of_all
from ..patching.undo import Undo
from ..support.errors import one_line
from .decode import Rows, Step, arguments_of, cache_name, logits_of, of_own_code
from .generators import Generators
from .logits_trial import Differs
from .masked import MaskedDecoding
from .model_state import ModelState
from .rollout_cache import Decoding, RolloutCache, places_for
from .turns import Rollout, Turns
from .weights import Weights, WeightUses

__all__ = ["Engine", "free_bytes"]

_FEWEST = 8
"""A step of fewer rows takes as long as one of these: it reads the same weights."""
_CAPTURE = 0.3
"""The seconds that the capture of a step is expected to take, until one was measured."""


_FAILURES = 3
"""After so many failures of one kind in one state of the model the engine takes it that the code is the cause, and not
the moment (a library had no memory for its workspace)."""
_STATES = 4
"""Of so many states of a model (modes, adapters) it is remembered what was found out."""


class _Draws(Refused):
    """A generator of the host has another state after a forward; another thread may have drawn from it."""


class _Unseen(Refused):
    """A profiler watches the thread, which may end."""


@dataclass
class Known:
    """What is known of a model in one state, so that the next rollout in this state need not find it out again.

    Attributes:
        uses: how it uses its weights; None: not seen yet.
        norms: the forms of its norms (`cached_rotation`).
        steps: what steps were captured for, whose operators are not checked again; and whether `OnDevice` has changed
            any call of theirs.
        paces: by the number of rows of a step, the seconds of a token.
        capturing: the seconds that the last capture of a step in `steps` took.
        tried: the kinds of rollouts that were compared with the model's own forward.
        masked: whether the model's own code attends.
        unserved: why it has to.
        reads: the code that has run in its step; None: not seen yet.
        signature: a number for the model's state, with the values that this code reads.
        refused: why no rollout is made in this state; None: it may be.
        failures: errors that may have been the moment's, by their reason.
    """

    uses: WeightUses | None = None
    norms: dict[Any, Any] = field(default_factory=dict)
    steps: dict[Any, bool] = field(default_factory=dict)
    paces: dict[int, float] = field(default_factory=dict)
    capturing: float = _CAPTURE
    tried: set[Any] = field(default_factory=set)
    masked: bool = False
    unserved: str | None = None
    reads: Reads | None = None
    signature: int = 0
    refused: str | None = None
    failures: Counter[str] = field(default_factory=Counter)

    def fails(self, error: BaseException) -> str:
        """Notes that a rollout has failed; returns why."""
        reason = _reason(error)
        if isinstance(error, _Unseen):
            return reason
        if isinstance(error, Unserved | Refused) and not isinstance(error, _Draws):
            self.refused = reason if self.unserved is None or isinstance(error, Differs) else self.unserved
            return self.refused
        if self.unserved is not None and not self.steps:  # its own code has not attended in any step
            reason = self.unserved
        self.failures[reason] += 1
        if self.failures[reason] >= _FAILURES:
            self.refused = reason
        self._begins_anew()
        return reason

    def attends_itself(self, error: BaseException) -> None:
        """Notes that a packed row has failed, so that the model's own code is to attend. All else is found out anew."""
        self._begins_anew()
        self.masked, self.unserved = True, str(error) if isinstance(error, Unserved) else None

    def _begins_anew(self) -> None:
        self.uses, self.norms, self.steps, self.paces, self.tried, self.reads = None, {}, {}, {}, set(), None
        self.masked, self.unserved = False, None


class Engine:
    """Generates for one model.

    Attributes:
        rollouts, tokens: the number of rollouts, and of tokens in them.
        seconds: the time that they took.
        capturing: the part of it that was spent on capturing.
        reasons: why `generate` ran, with the number of its calls.
    """

    def __init__(
        self, model: nn.Module, undo: Undo, backend: str | None, most_rows: int | None = None, keep: bool = False
    ) -> None:
        self._model = weakref.ref(model)
        self._undo, self._backend, self._most_rows, self._keep = undo, backend, most_rows, keep
        self._step: Step | None = None
        self._fewer: dict[int, Step] = {}  # steps of the first rows
        self._step_key: Any = None
        self._state: ModelState | None = None  # the model's when the step was captured, or is to be
        self._around: Any = None  # the surroundings at that time
        self._states: list[Known] = []  # the latest last
        self._known = Known()
        self._copies = Weights()
        self._moves = False  # whether the weights are at other addresses in each rollout
        self._turn, self._counting, self._running = threading.Lock(), threading.Lock(), 0
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
        if not self.rollouts and not self.reasons:
            return "none yet"
        calls = self.rollouts + self.reasons.total()
        lines = [
            f"{self.rollouts} of {calls} ({self.tokens} tokens in {self.seconds:.1f} s, "
            f"{self.capturing:.1f} of them spent on capturing)"
        ]
        return "\n".join([*lines, *(f"  {count} by generate: {reason}" for reason, count in self.reasons.items())])

    def serves(self, model: Any) -> bool:
        """Whether a model is the one that it was made for, and not a copy of it."""
        return self._model() is model

    def forget(self) -> None:
        """Lets go of the captured step and of all memory."""
        self._step = self._step_key = self._state = None
        self._fewer = {}
        self._copies = Weights()

    def declined(self, reason: str) -> None:
        """Counts a call that `generate` serves."""
        with self._counting:
            self.reasons[reason] += 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the `with` block no other thread makes a rollout; a thread that comes meanwhile waits.

        Raises:
            Refused: this thread makes a rollout already, whose code has called `generate`.
        """
        if self._running == threading.get_ident():
            raise Refused("its own code generates while it generates")
        with self._turn:
            self._running = threading.get_ident()
            try:
                yield
            finally:
                self._running = 0

    # -- one rollout -------------------------------------------------------------------------------------------------

    def run(
        self, model: Any, rollout: Rollout, moves: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Generates, without gradients. It is called inside of `alone`.

        Args:
            model: the model.
            rollout: what is generated.
            moves: whether the weights are at other addresses in each rollout, so that no step can be kept.

        Returns:
            tokens [B, N], their number in each row [B], and their log-probabilities [B, N] or None.

        Raises:
            Refused: it cannot be done for this model in this state, or its results differ from those of the model's own
                code.
        """
        begun = time.perf_counter()
        where = next(model.parameters()).device
        if (reason := self.why_refused(model, moves)) is not None:
            raise Refused(reason)
        self._prepare(model, where)
        generators, put_back = Generators(where), remembered(model)
        while True:
            try:
                with torch.no_grad():
                    found = self._run(model, rollout, where)
                break
            except (Unserved, Refused, *PROBE_ERRORS) as error:
                self._known.tried.clear()  # the comparison may not have come to its end
                self.forget()
                put_back()
                generators.set_back()
                if device.is_out_of_memory(error):  # a shorter rollout may fit
                    raise Refused("its caches do not fit into the device's memory") from error
                if isinstance(error, Refused) or self._known.masked:
                    raise Refused(self._known.fails(error) + _of_weights(model)) from error
                # Its own code may attend with a mask of each row, if it takes no packed one.
                self._known.attends_itself(error)
                self._prepare(model, where)
            except BaseException:  # somebody stops it (Ctrl-C, a timeout): the next rollout begins anew
                self._known.tried.clear()
                self.forget()
                put_back()
                raise
        self.seconds += time.perf_counter() - begun
        self.rollouts += 1
        self._give_back()
        return found

    def why_refused(self, model: Any, moves: bool) -> str | None:
        """Looks at the model's state; returns why no rollout is made in it, or None."""
        self._moves = moves
        where = next(model.parameters()).device
        states = [self._state, *(step.state for step in (self._step, *self._fewer.values()) if step is not None)]
        if self._around != _surroundings(where) or not all(s is not None and s.holds(model) for s in states):
            self._look_at(model, where)
        return None if self._known.refused is None else self._known.refused + _of_weights(model)

    def _look_at(self, model: Any, where: torch.device) -> None:
        """Takes the model as it is now."""
        self.forget()
        self._around = _surroundings(where)
        for known in reversed(self._states):
            state = ModelState(model, self._moves, known.reads)
            if hash((state.signature(), self._around)) == known.signature:
                self._states.remove(known)
                break
        else:
            state, known = ModelState(model, self._moves), Known()
            known.signature = hash((state.signature(), self._around))
            known.refused = trace_of_all(model)
        self._state, self._known = state, known
        self._states = [*self._states, known][-_STATES:]

    def _prepare(self, model: Any, where: torch.device) -> None:
        """Lets the model attend by segments, unless its own code attends."""
        changes = len(self._undo)
        if not self._known.masked:
            attend_by_segments(model, "", self._undo)
        if self._state is None or len(self._undo) != changes:
            masked, unserved = self._known.masked, self._known.unserved
            self._look_at(model, where)
            self._known.masked, self._known.unserved = masked, unserved

    def _give_back(self) -> None:
        """Keeps the step only if that is asked for, and memory has room for it."""
        step = self._step
        if step is not None and (not self._keep or self._moves or step.no_room() is not None):
            self.forget()

    def _run(self, model: Any, rollout: Rollout, where: torch.device) -> Any:
        longest = max(map(len, rollout.prompts)) + rollout.most
        step = self._step
        if step is not None:
            fits = step.length >= longest and step.rows.out.shape[1] >= rollout.most
            if not (fits and self._step_key == _key(rollout, where)):
                self._look_at(model, where)
        if self._step is None:
            if self._known.uses is not None:
                self._copies.make(model, self._known.uses, free_bytes(where, 4))
        else:
            self._copies.fill()
        return Turns(self, model, rollout, where, longest).all()

    def prefill(
        self, model: Any, cache: RolloutCache, prompts: Sequence[tuple[int, ...]], where: torch.device
    ) -> torch.Tensor:
        """Computes different prompts as one packed row (one by one where layers have states, or the model's own code
        attends), whose keys and values the cache gets; returns the logits after each."""
        if (cache.has_states or self._known.masked) and len(prompts) > 1:
            return torch.cat([self.prefill(model, cache, [prompt], where) for prompt in prompts])
        lengths = [len(prompt) for prompt in prompts]
        ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
        positions = np.concatenate([np.arange(n) for n in lengths])
        last = uploaded(np.cumsum(lengths) - 1, where)
        packing = None if self._known.masked else self._packing(model, Segments.make(lengths, where))
        given: dict[str, Any] = {
            "input_ids": uploaded(ids, where).unsqueeze(0), "position_ids": uploaded(positions, where).unsqueeze(0),
        }  # fmt: skip
        names = arguments_of(model)
        given.update((name, last) for name in names if name.endswith("logits_to_keep"))
        if "cache_position" in names:
            given["cache_position"] = given["position_ids"][0]
        if packing is None:
            given = of_own_code(given, torch.ones_like(given["input_ids"]), names)
        row = contextlib.nullcontext() if packing is None else packed_row(packing)
        looking = None if self._copies.uses is not None else self._copies.looking(model)
        generators = Generators(where)
        with row, self._copies.on(), looking or contextlib.nullcontext():
            out = model(**given, **{cache_name(names): cache}, use_cache=True, return_dict=True)
        if looking is not None:
            if (drawn_from := generators.drawn_from()) is not None:
                raise _Draws(f"its code draws from {drawn_from} generator of random numbers")
            self._known.uses = self._copies.uses
            assert self._known.uses is not None
            self._copies.make(model, self._known.uses, free_bytes(where, 4))
        cache.next_prompt()
        logits = logits_of(out)[0]
        if logits.shape[0] != len(lengths):
            logits = logits[last]
        return logits.float()

    def _packing(self, model: Any, segments: Segments) -> Packing:
        return packing_for(model, model, segments, self._backend)

    def capture(
        self, model: Any, cache: RolloutCache, rollout: Rollout, longest: int, vocabulary: int, where: torch.device
    ) -> Step:
        """Captures a step for the cache's first prompts, and keeps it."""
        length = places_for(longest)
        rows = min(len(rollout.prompts), self._most_rows or len(rollout.prompts), _room(cache, length, where))
        cache.allocate(rows, length)
        state = Rows.make(rows, rollout.most, rollout.sampling, vocabulary, rollout.logprobs, where)
        self._step_key = _key(rollout, where)
        self._step = self._captured(model, cache, state, rollout, length)
        return self._step

    def _captured(self, model: Any, cache: RolloutCache, state: Rows, rollout: Rollout, length: int) -> Step:
        begun = time.perf_counter()
        where, known = state.token.device, self._known
        kind_of = MaskedDecoding if self._known.masked else Decoding
        packing = self._packing(model, Segments.make([1], where))
        decoding = kind_of(packing.by, packing.named, length, self._backend)
        kind = self._step_key, len(state.alive), length, rollout.most
        changed = known.steps.pop(kind, None)
        if changed is None and (reason := why_unseen()) is not None:
            raise _Unseen(reason)
        step = Step(
            model, cache, state, rollout.sampling, decoding, self._copies, length, changed=changed, norms=known.norms,
            moves=self._moves, known=None if known.reads is None else self._state,
        )  # fmt: skip
        known.steps[kind] = step.changed
        known.reads = step.state.reads
        known.signature = hash((step.state.signature(), self._around))
        seconds = time.perf_counter() - begun
        if changed is not None:
            known.capturing = seconds
        self.capturing += seconds
        return step

    def fewer_rows(self, rows: int, going_on: int, made: int, left: int) -> int | None:
        """Returns of how many rows the step should be that goes on after one of `rows`, or None: it stays.

        A row that has made some tokens is expected to make as many again, but no more than it may. So much time is
        saved as the smaller step was faster before; of one that was not seen yet, half of its rows' share is expected.

        Args:
            rows: the number of rows of the step.
            going_on: the number of them that have not ended.
            made: the number of tokens that they have made.
            left: the number that they may make.
        """
        fewer = max(_FEWEST, 1 << max(going_on - 1, 0).bit_length())
        if self._known.masked or 2 * fewer > rows:
            return None
        if fewer in self._fewer:
            return fewer
        known = self._known
        pace = known.paces.get(rows)
        if pace is None:
            return None
        saved = pace - known.paces.get(fewer, pace * (1 + fewer / rows) / 2)
        return fewer if saved * min(made, left) > 2 * known.capturing else None

    def step_of_fewer(self, model: Any, rollout: Rollout, rows: int) -> Step:
        """Returns the step of the first rows, which are those of the whole step and stay as they are."""
        step = self._step
        assert step is not None
        if rows not in self._fewer:
            cache, state = step.cache.first(rows), step.rows.first(rows)
            # What is captured may be computed as well. Rows that have ended change nothing but the states of layers.
            changed = [state.alive, *cache.states()]
            before = [t.clone() for t in changed]
            state.alive.zero_()
            self._fewer[rows] = self._captured(model, cache, state, rollout, step.length)
            for t, value in zip(changed, before, strict=True):
                t.copy_(value)
        return self._fewer[rows]

    def paced(self, rows: int, seconds: float) -> None:
        """Notes the seconds of a token of so many rows."""
        self._known.paces[rows] = seconds

    def tried(self, model: Any, rollout: Rollout, fewer: int | None = None) -> bool:
        """Whether such a rollout was compared with the model's own forward; if not, it counts as compared now.

        Code of the model's own that attends may go by the number of places, so each number is compared; and so is each
        step of `fewer` rows."""
        places = self._step.length if self._known.masked and self._step is not None else None
        key = type(model), rollout.sampling.draws, places, fewer
        known = key in self._known.tried
        self._known.tried.add(key)
        return known

    @property
    def masked(self) -> bool:
        """Whether the model's own code attends."""
        return self._known.masked

    @property
    def step(self) -> Step | None:
        """The captured step, if there is one."""
        return self._step


def _reason(error: BaseException) -> str:
    """Returns why a rollout has failed."""
    if isinstance(error, Unserved | Refused):
        return str(error)
    return f"its decode step raises {type(error).__name__}: {one_line(error, 120)}"


def _of_weights(model: nn.Module) -> str:
    """Returns a remark for a reason, if weights are of another class than torch's own."""
    kind = next((type(p).__name__ for p in model.parameters() if type(p) not in PLAIN), None)
    return "" if kind is None else f" (some of its weights are quantised: {kind})"


def _key(rollout: Rollout, where: torch.device) -> Any:
    s = rollout.sampling
    asked = s.draws, tuple(s.key), s.eos, s.pad, s.tail, s.ids, rollout.logprobs
    return len(rollout.prompts), *asked, _surroundings(where)


def _surroundings(where: torch.device) -> Any:
    """Returns what decides, beside the model, which operators a step has."""
    return _autocasts_to(where), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _autocasts_to(where: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(where.type) if torch.is_autocast_enabled(where.type) else None


def _room(cache: RolloutCache, length: int, where: torch.device) -> int:
    """Returns how many rows may be at once: their caches get half of the free memory at most."""
    free = free_bytes(where, 2)
    rows = 1 << 30 if free is None else cache.rows_in(length, free)
    if rows < 1:
        raise torch.OutOfMemoryError(f"the cache of a row of {length} tokens does not fit into half of the free memory")
    return rows


def free_bytes(where: torch.device, parts: int) -> int | None:
    """Returns one of so many equal parts of the device's free memory; None on a CPU."""
    if where.type == "cpu":
        return None
    module = torch.get_device_module(where)
    free = module.mem_get_info(where)[0] + module.memory_reserved(where) - module.memory_allocated(where)
    return int(free) // parts
