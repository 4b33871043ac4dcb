"""Captures the packed body of a model, attention and recomputation included, as one graph forward and one backward.

Attention need not go by lengths of the host: where segments end, and which tokens are keys, stands in a table on the
device (`ops.attention.BoundedSegments`), which is filled before each replay. So one pair of graphs serves every batch
that has room in its bounds, whatever the lengths of its rows. Bounds are powers of two, so there are few pairs.

A body is captured when it is called for the second time in one way (mode, dtype, kinds of arguments), and later for
batches that have no room yet. What is compared before a replay, and which memory a backward may read, are the rules of
`body_state` and `modes`. What they do not allow runs the body's own code, and the report says why.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from ... import device as devices
from ...capture import (
    CapturedFunction,
    Owner,
    Reading,
    Reads,
    Refused,
    ReplayedMemory,
    Watched,
    capture,
    recorder_for,
    recording_now,
    why_unseen,
)
from ...ops.attention import BoundedSegments, Room, table_of, uploaded
from ...support.errors import one_line
from ..body import Batch, BodyForward, Unserved, packed_row, packing_for
from ..call import current_call, generates
from ..classes import GLOBAL_HOOKS
from ..patch import PLAIN, PROBE_ERRORS, Site, is_transformed
from ..undo import Undo
from .body_costs import ByCosts, Costs, PowersOfTwo, timed
from .body_state import (
    CHECKPOINT,
    ON_ANOTHER_THREAD,
    SAVED_ELSEWHERE,
    BodyState,
    collected_outputs,
    has_foreign_hooks,
    is_saved_elsewhere,
)
from .call_arguments import CallArguments, outputs_of
from .counts import Counts, calls_apart
from .modes import MOST_VARIANTS, NUMBERS, Mode, Turn
from .stand_ins import Exchanged, without_part

__all__ = ["BodyCapture"]


@dataclass
class _Captured:
    """A body in one state, with one set of bounds: its graphs, or why there are none."""

    room: Room
    state: BodyState
    number: int
    """The number of the state: the graphs of one state with several bounds have the same."""
    kinds: Any
    """The kinds of its arguments."""
    function: CapturedFunction | None = None
    output: Any = None
    reason: str = ""
    ran: list[tuple[Site, int]] = field(default_factory=list)


@dataclass
class _Inputs:
    """What a body is given.

    Attributes:
        flat: the arguments of its forward.
        ids: the ids among them; None: it is given embeddings.
        table: the module that has embedded them.
        embedded: its result.
    """

    flat: CallArguments
    ids: torch.Tensor | None
    table: nn.Module | None
    embedded: torch.Tensor | None

    @property
    def kinds(self) -> Any:
        """The kinds of the arguments, and whether tokens are embedded before, and with a gradient."""
        embedded = None if self.embedded is None else (self.embedded.requires_grad, self.embedded.dtype)
        return self.flat.kinds(), embedded

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*(t for _, t in self.flat.tensors), *([] if self.embedded is None else [self.embedded])]

    def call(self, forward: BodyForward, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the body with other tensors in the places of these."""
        function = functools.partial(forward.kind.forward, forward.body)
        if self.table is None:
            return self.flat.call(function, tensors)
        place = next(i for i, (_, t) in enumerate(self.flat.tensors) if t is self.ids)
        with without_part(forward.body, self.table, tensors[place], tensors[-1]):
            return self.flat.call(function, tensors[:-1])


@dataclass
class _Way:
    """The graphs of one way to call a body.

    Attributes:
        moves: whether its parameters are somewhere else at each call: then there are no graphs.
        choice: chooses the buckets.
    """

    moves: bool
    choice: ByCosts | PowersOfTwo
    captured: list[_Captured] = field(default_factory=list)

    def with_room(self, row: Room) -> list[_Captured]:
        """Returns the graphs that a row has room in, those with the fewest tokens and segments first."""
        fits = [one for one in self.captured if one.function is not None and one.room.for_row(row) is None]
        return sorted(fits, key=lambda one: (one.room.tokens, one.room.segments))


class BodyCapture(Counts):
    """Captures the bodies of a model and replays them.

    Args:
        undo: takes back what is done to the model.
        sites: where ops serve modules.
        busy: whether the model is being compared with its own code.
        auto: whether a body runs in graphs only where its costs say that this is faster (`ByCosts`).

    Attributes:
        without_memory: whether bodies are also captured with tensors that have no memory, for `npu-kernels fit`.
    """

    without_memory = False

    def __init__(
        self, undo: Undo, sites: Callable[[], list[Site]], busy: Callable[[], bool], *, auto: bool = False
    ) -> None:
        super().__init__()
        self.auto = auto
        self._undo, self._sites, self._busy = undo, sites, busy
        self._bodies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._modes: dict[Any, Mode] = {}
        self._ways: dict[Any, _Way] = {}
        self._owner = Owner()
        self._costs: list[ByCosts] = []  # of all ways, also after the model was restored
        self._last = 0, 0  # what there was until then
        self._saved_before = 0.0

    def __deepcopy__(self, memo: object) -> BodyCapture:
        """A copy of a model is not captured."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as a plain dict."""
        graphs, buckets = self._there() or self._last
        return {
            "replayed": self.replayed, "own_code": self.eager, "graphs": graphs, "buckets": buckets,
            "captured": self.captured, "seconds": round(self.seconds, 3), "saved_seconds": round(self.saved, 3),
            "reasons": dict(self.reasons),
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.replayed + self.eager:
            return "body graphs: none yet"
        seen = self.as_dict()
        line = (
            f"{self.replayed_line('body graphs')}; {seen['graphs']} graphs for {seen['buckets']} buckets; "
            f"{self.seconds:.1f} s spent on capturing"
        )
        costs = [f"  {each}" for each in self._costs if each.costs is not None]
        return "\n".join([line, *costs, *self.reason_lines()])

    @property
    def saved(self) -> float:
        """The seconds that replays have saved, by what was measured of own code, less those spent on capturing."""
        return sum(each.saved for each in self._costs) - self.seconds

    def saved_since(self) -> float:
        """Returns the seconds that were saved since the last question."""
        before, self._saved_before = self._saved_before, self.saved
        return self._saved_before - before

    def _there(self) -> tuple[int, int] | None:
        """Returns the number of graphs, and of their bounds; None: there are none."""
        rooms = {one.room for way in self._ways.values() for one in way.captured if one.function is not None}
        return (sum(each.graphs for each in self._graphs()), len(rooms)) if rooms else None

    def _graphs(self) -> list[CapturedFunction]:
        return [one.function for way in self._ways.values() for one in way.captured if one.function is not None]

    def install(self, model: nn.Module) -> None:
        """Lets the bodies in a model be captured. The patch that leaves padding out asks for it at each call."""
        if not len(self._bodies):
            self._undo.add(self._forget)
        self._bodies.update(model.modules())

    def _forget(self) -> None:
        """Discards all graphs; the counts stay."""
        self._last = self._there() or self._last
        self._bodies.clear()
        self._modes.clear()
        self._ways.clear()

    # -- a call ------------------------------------------------------------------------------------------------------

    def call(self, batch: Batch, forward: BodyForward) -> Any:
        """Returns a body's output for a batch, in the batch's shape; None: its own code has to run.

        Raises:
            Unserved: the output cannot be given this shape.
        """
        try:
            found = self._output(batch, forward)
        except Refused as error:
            found = str(error)
        if not isinstance(found, str):
            return found
        self.eager += 1
        if found:
            self.reasons[found] += 1
        return None

    def _output(self, batch: Batch, forward: BodyForward) -> Any:
        """Returns the same as `call`, or why the body's own code runs; no report has an empty reason."""
        if (reason := self._why_not_now(batch, forward)) is not None:
            return reason
        where, device = batch.layout, batch.device
        mode = self._mode(device, torch.is_grad_enabled())
        if mode.keeps and is_saved_elsewhere():
            return SAVED_ELSEWHERE
        if mode.awaits() is not None:
            return "another forward awaits its backward"
        way = self._way(forward, device, mode)
        if way is None:
            return ""  # what this call needs of libraries and memory is known the next time
        if way.moves:
            return "its parameters move (FSDP2)"
        refused = next((one.reason for one in way.captured if one.reason and one.state.holds()), None)
        if refused is not None:
            return refused
        if isinstance(way.choice, ByCosts) and way.choice.costs is None:
            return self._timed(way.choice, batch, forward)
        row = Room.needed(where.lengths, where.key_lengths, where.keys)
        fits = way.with_room(row)
        tokens = way.choice.bucket(row, [one.room for one in fits])
        if tokens is None:
            return OWN_CODE_IS_FASTER
        new = batch.arguments(tokens, forward.by_columns)
        flat = CallArguments(new)
        # Tables of embeddings are large, and so are their gradients; and other code sets hooks on them.
        ids = new["input_ids"] if new.get("inputs_embeds") is None else None
        table = None if ids is None else _embeddings(forward)
        inputs = _Inputs(flat, ids, table, None if table is None else table(ids))
        alike = (one for one in fits if one.room.tokens == tokens and one.kinds == inputs.kinds)
        found = next((one for one in alike if one.state.holds()), None)
        found = found or self._another(way, row, tokens, forward, inputs, mode)
        if found.function is None:
            return found.reason
        segments = uploaded(table_of(found.room, where.lengths, where.key_lengths, where.keys), device)
        self.replayed += 1
        way.choice.replayed(row.tokens, tokens)
        return batch.restored(self._replayed(found, forward.body, inputs, segments, mode), tokens)

    def _way(self, forward: BodyForward, device: torch.device, mode: Mode) -> _Way | None:
        """Returns what is known of the way in which a body is called; None: it is called so for the first time."""
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        body = forward.body
        key = id(body), forward.inner, forward.backend, device, mode.keeps, cast, body.training
        if key not in self._ways:
            moves = any(isinstance(module, FSDPModule) for module in body.modules())
            if self.auto:
                self._costs.append(ByCosts())
            self._ways[key] = _Way(moves, self._costs[-1] if self.auto else PowersOfTwo())
            return None
        return self._ways[key]

    def _timed(self, choice: ByCosts, batch: Batch, forward: BodyForward) -> Any:
        """Runs a body's own code and measures what it costs."""

        def run() -> Any:
            return batch.through(forward.kind, forward.body, forward.inner, forward.by_columns, forward.backend)[0]

        out, host, device = timed(batch.device, run, choice.fills_queue)
        choice.measured(Costs.of(forward.body, batch.computed, host, device))
        self.eager += 1
        return out

    def _why_not_now(self, batch: Batch, forward: BodyForward) -> str | None:
        """Returns why a body is not replayed in this call, whatever the lengths, or None."""
        given = [each for each in batch.given.values() if torch.is_tensor(each)]
        if any((isinstance(each, FakeTensor) and not self.without_memory) or each.is_meta for each in given):
            return ""  # a rehearsal
        if torch.is_inference_mode_enabled() or any(each.is_inference() for each in given):
            return "inference mode is on"
        if generates() or is_transformed() or recording_now() or self._busy():
            return ""
        if devices.is_capturing(batch.device):
            return "other code is capturing a graph"
        if not self._owner.is_here():
            return ON_ANOTHER_THREAD
        if forward.body not in self._bodies:
            return "it is a copy of a body that the kernels were applied to"
        if any(GLOBAL_HOOKS):
            return "other code has hooked every module"
        call = current_call()
        if collected_outputs() or (call is not None and call.collects):
            return "outputs of its layers are asked for"
        if forward.mixes:
            return "modules that mix tokens get the padded batch, whose shape is another one at each step"
        return "modules with a state go by lengths on the host" if forward.carries else None

    def _mode(self, where: torch.device, keeps: bool) -> Mode:
        """Returns the graphs' memory: one for forwards whose results stay until their backward, one for others."""
        if (where, keeps) not in self._modes:
            self._modes[where, keeps] = Mode(recorder_for(where), keeps, ReplayedMemory())
        return self._modes[where, keeps]

    def _another(
        self, way: _Way, row: Room, tokens: int, forward: BodyForward, inputs: _Inputs, mode: Mode
    ) -> _Captured:  # fmt: skip
        """Captures a body for a row that has no room in the graphs that the body has in its present state.

        Raises:
            Refused: the code cannot be seen at present.
        """
        if (unseen := why_unseen()) is not None:
            raise Refused(unseen)
        alike = [one for one in way.captured if one.state.holds() and one.kinds == inputs.kinds]
        states = {one.number for one in way.captured}
        number = alike[0].number if alike else next(NUMBERS)
        room = Room.around(row, tokens, [one.room for one in alike])
        made = _Captured(room, BodyState(forward.body), number, inputs.kinds)
        if len(states - {number}) >= MOST_VARIANTS:
            made.reason = f"its modules or parameters change: {MOST_VARIANTS} states of it are captured"
            return made
        made.reason = _why_not(forward.body, inputs.table) or mode.recorder.no_room() or ""
        if not made.reason:
            if mode.keeps:
                for each in self._graphs():
                    each.release()
            self._capture(made, way, forward, inputs, mode)
        # Where there is more room now, the graphs with less of it are needed no longer.
        narrow = [one for one in alike if made.room.covers(one.room)]
        way.captured = [*(one for one in way.captured if all(one is not each for each in narrow)), made]
        return made

    def _replayed(
        self, found: _Captured, body: nn.Module, inputs: _Inputs, segments: torch.Tensor, mode: Mode
    ) -> Any:  # fmt: skip
        function = found.function
        assert function is not None
        tensors = [*inputs.tensors, segments]
        with torch.no_grad():
            for buffer, tensor in zip(function.inputs, tensors, strict=True):
                buffer.copy_(tensor)
        turn, done = None, None
        mode.memory.turn = next(NUMBERS)
        if mode.keeps:
            turn = Turn(pending={id(body)})
            mode.begins(turn)
            done = functools.partial(turn.pending.discard, id(body))
        # What is restored from the results is a copy.
        results = function.run(tensors, Reading((mode.memory,), turn), done)
        for site, calls in found.ran:
            site.ran += calls
        return found.output(results)

    # -- capturing ---------------------------------------------------------------------------------------------------

    def _capture(self, made: _Captured, way: _Way, forward: BodyForward, inputs: _Inputs, mode: Mode) -> None:
        """Captures a body with bounds, or notes why that cannot be done."""
        begun = time.perf_counter()
        body, room = forward.body, made.room
        buffers = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs.tensors]
        # The row that is computed meanwhile has all tokens in segments, too.
        segment = min(room.longest, room.tokens)
        lengths = [min(segment, room.tokens - at) for at in range(0, room.tokens, segment)]
        index = np.arange(room.tokens) if room.keys else None
        buffers.append(uploaded(table_of(room, lengths, lengths, index), buffers[0].device).clone())
        stand_ins = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in body.parameters()}
        originals: dict[torch.Tensor, torch.Tensor] = {stand_ins[id(p)]: p for p in body.parameters()}
        exchanged = Exchanged(body, stand_ins)
        puts: list[Any] = []

        def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            segments = BoundedSegments(tensors[-1], room)
            packing = packing_for(body, body.get_submodule(forward.inner), segments, forward.backend)

            @contextlib.contextmanager
            def inside() -> Iterator[None]:
                with packed_row(packing), exchanged():
                    yield

            with inside(), _repeated_inside(body, inside):
                out = inputs.call(forward, tensors[:-1])
            results, put = outputs_of(out)
            puts.append(put)
            return tuple(results)

        def watch(reads: Reads | None, settings: tuple[Any, ...]) -> Watched:
            made.state = BodyState(body, reads, settings)
            return made.state.values

        before = made.state
        try:
            with calls_apart(self._sites(), made.ran):
                captured = capture(function, buffers, originals, list(body.buffers()), mode.recorder, watch=watch)
        except (Refused, Unserved) as error:
            made.state, made.reason = before, str(error)
            return
        except PROBE_ERRORS as error:  # of the device, or of code that cannot be captured: the body's own code goes on
            made.state, made.reason = before, f"it could not be captured: {one_line(error, 120)}"
            return
        if not before.holds():
            made.reason = "a call of it changes its modules or parameters"
            return
        made.function, made.output = captured, puts[-1]
        self.captured += captured.graphs
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        way.choice.captured(room.tokens, room.keys > 0, seconds)


OWN_CODE_IS_FASTER = "its own code is expected to be faster, or graphs are not expected to be worth their capture yet"


def _embeddings(forward: BodyForward) -> Any:
    """Returns the module that embeds the ids of a body."""
    try:
        table = forward.body.get_submodule(forward.inner).get_input_embeddings()
    except NotImplementedError:
        table = None
    if table is None or all(module is not table for module in forward.body.modules()):
        raise Refused("it does not say which of its modules embeds ids")
    return table


def _why_not(body: nn.Module, table: nn.Module | None) -> str | None:
    """Returns why a body is not captured, or None. What its `table` of embeddings does is no part of its graphs."""
    apart = {body, *(() if table is None else table.modules())}
    for module in (each for each in body.modules() if each not in apart):
        if has_foreign_hooks(module):
            return "other code has hooked a module of it"
        # Neither its code nor, of the second kind, its attributes can be seen.
        if "_orig_mod" in module._modules or isinstance(module, torch.jit.ScriptModule):
            return f"a module of it is compiled ({type(module).__name__})"
        if "forward" in vars(module):
            return "a forward was set on a module of it"
    for parameter in body.parameters():
        if type(parameter) not in PLAIN:
            return f"a parameter of it is a {type(parameter).__name__}"
        if parameter._backward_hooks:
            return "a parameter of it has a hook"
    return None


@contextlib.contextmanager
def _repeated_inside(
    body: nn.Module, inside: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:  # fmt: skip
    """Inside the `with` block checkpoints of a body's layers are made for a graph: they repeat the layers where the
    function runs, and keep no state of generators, from which nothing that is captured draws.

    Args:
        body: the body.
        inside: makes the context of the function.
    """

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), inside()

    made = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    own = [(vars(module), vars(module)[CHECKPOINT]) for module in body.modules() if CHECKPOINT in vars(module)]
    try:
        for where, _ in own:
            where[CHECKPOINT] = made
        yield
    finally:
        for where, function in own:
            where[CHECKPOINT] = function
