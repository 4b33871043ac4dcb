"""A function as captured pieces, forward and backward, with code between them that runs as always.

A decoder layer is `x -> q, k, v`, attention, `x, attention -> y`. What comes before and after attention depends on the
number of tokens alone and is captured: two graphs forward and two backward. Attention depends on the lengths of rows,
masks and windows, and is called eagerly in between (a *seam*). Its backward runs eagerly between the two graphs of the
layer's backward, since the layer's backward is one backward that is interrupted where it reaches the seam: gradients
that join (a residual's and attention's) are summed in the same order as without graphs, so results have the same bits.

    capture:  [graph x -> q, k, v] seam [graph -> y]   backward: [graph dy -> d attention] seam [graph dq, dk, dv -> dx]
    replay:   fill x; replay; attend(q, k, v); fill attention; replay -> y; and the same way back

Each piece is a node of autograd by itself, so that gradients of parameters arrive as early as without graphs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ops.checks import values_unread
from ..ops.host import refused
from .graph import Graph, Recorder, uncollected
from .reads import Reads
from .replayed import Outlets
from .tape import Nothing, Refused, Watch
from .watched import Watched, torch_settings

__all__ = ["Attend", "Pieces", "Refused", "capture", "recording_now", "seam", "unwatched"]

Attend = Callable[[Sequence[torch.Tensor], Any], torch.Tensor]
"""Computes the result of a seam: it is called with the tensors that the seam was given, and with what `Pieces.run` was
given for this replay."""


@dataclass
class _Piece:
    """One graph forward and, where gradients are asked for, one backward.

    Attributes:
        forward: the graph of the piece.
        outputs: where its results are: those of the function, or what the next seam is given.
        differs: for each of them, whether gradients flow into it.
        dims: for each of them, the dimension of its tokens, if the seam behind it takes live tokens alone; None: it has
            no such dimension.
        entry: what the seam ahead of it returned, a buffer to fill; None for the first piece.
        backward: the graph of its gradients; None: nothing of it has any.
        grads: for each output, the buffer of its gradient to fill, or None.
        entry_grad: where the gradient of `entry` is, or None.
        leaves: the inputs and parameters whose gradient this piece completes, by index.
        leaf_grads: where these gradients are.
        written: those of `outputs` that it writes: not what an earlier piece has returned, too, or an input.
    """

    forward: Graph
    outputs: list[torch.Tensor]
    differs: list[bool]
    dims: list[int | None] | None = None
    entry: torch.Tensor | None = None
    entry_dim: int | None = None
    backward: Graph | None = None
    grads: list[torch.Tensor | None] = field(default_factory=list)
    entry_grad: torch.Tensor | None = None
    leaves: list[int] = field(default_factory=list)
    leaf_grads: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)


def _fill(buffer: torch.Tensor, value: torch.Tensor | None, dim: int | None = None) -> None:
    """Writes a value into a buffer; a value with fewer tokens is followed by zeros."""
    if value is None:
        buffer.zero_()
    elif dim is None or value.shape[dim] == buffer.shape[dim]:
        buffer.copy_(value)
    else:
        tokens = value.shape[dim]
        buffer.narrow(dim, 0, tokens).copy_(value)
        buffer.narrow(dim, tokens, buffer.shape[dim] - tokens).zero_()


class _Run(torch.autograd.Function):
    """Replays one piece, and its backward."""

    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, piece: _Piece, turn: Any, done: Any, tokens: int | None, *tensors: Any
    ) -> Any:
        ctx.pieces, ctx.piece, ctx.turn, ctx.done = pieces, piece, turn, done
        ctx.set_materialize_grads(False)
        # A checkpoint that wraps the function recomputes it when a saved tensor is read, and has no other sign. The
        # inputs are saved for second derivatives, which depend on them.
        ctx.save_for_backward(pieces.sign, *(t for t in tensors if not isinstance(t, torch.nn.Parameter)))
        outputs = pieces.replay(piece, tensors[0] if piece.entry is not None else None, tokens)
        ctx.mark_non_differentiable(*(o for o, differs in zip(outputs, piece.differs, strict=True) if not differs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            outputs = _Run._back(ctx, *grads)
        if not torch.is_grad_enabled():
            return outputs
        return refused(outputs, (*grads, *saved, *ctx.pieces.parameters(ctx.piece)))

    @staticmethod
    def _back(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        piece: _Piece = ctx.piece
        given: tuple[None, ...] = (None,) * (5 + (piece.entry is not None))
        if piece.backward is None:
            return *given, *(None for _ in piece.leaf_grads)
        _may_go_back(ctx.turn)
        for i, (buffer, grad) in enumerate(zip(piece.grads, grads, strict=True)):
            if buffer is not None:
                _fill(buffer, grad, piece.dims[i] if piece.dims is not None else None)
        if ctx.pieces.prepare is not None:
            ctx.pieces.prepare(True)
        piece.backward.replay()
        if piece.entry_grad is not None:
            increment_version(piece.entry_grad)
        # A graph that is kept (`retain_graph`) may be differentiated once more.
        if piece is ctx.pieces.first and ctx.done is not None and not _keeps_graph():
            ctx.done()
        first: tuple[torch.Tensor | None, ...] = ()
        if piece.entry is not None:
            grad = piece.entry_grad
            if grad is not None and piece.entry_dim is not None and ctx.pieces.tokens is not None:
                grad = grad.narrow(piece.entry_dim, 0, ctx.pieces.tokens)
            first = (grad,)
        # Autograd keeps them: as `.grad`, or until a sum is complete, while other replays write to the same memory.
        return None, None, None, None, None, *first, *_copies(piece.leaf_grads)


def _copies(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len(tensors) < 2 or tensors[0].device.type == "cpu":
        return [t.clone() for t in tensors]
    # One call for all of them; a product with 1 keeps every bit.
    return torch._foreach_mul(tensors, 1.0)


_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def _may_go_back(turn: Any) -> None:
    """Raises RuntimeError if another forward has overwritten what the backward of a turn reads."""
    if turn is not None and turn.over:
        raise RuntimeError(
            "captured layers ran forward again before the backward of an earlier forward, and what that reads is gone "
            "(capture='off' keeps it)"
        )


class Pieces:
    """A captured function.

    Attributes:
        sign: what pieces save for their backward, in the place of everything that a graph has saved.
        first: the first piece with a backward, whose backward is the last one; None: no piece has one.
        tokens: the number of live tokens of the last forward; None: all.
        prepare: called before a forward (with False) and before each graph of its backward (with True); it puts
            parameters that move to where the graphs read them. None: parameters stay where they are.
        results: where its results are, for other graphs, which read them there.
        outlets: what the caller is given.
        watched: what the code of the function has read; replays are right as long as it holds. None: nobody asked.
    """

    def __init__(
        self, inputs: list[torch.Tensor], leaves: list[Any], pieces: list[_Piece], seams: list[Attend],
        results: list[torch.Tensor], keeps: Any,
    ) -> None:  # fmt: skip
        self.inputs, self.pieces, self.results = inputs, pieces, results
        # A checkpoint compares shapes: a function that was captured with other results is not taken for this one.
        self.sign = torch.empty(0, len(pieces[-1].outputs))
        self.tokens: int | None = None
        self.prepare: Callable[[bool], None] | None = None
        self.watched: Watched | None = None
        self.outlets = Outlets(pieces[-1].outputs)
        known = {t.untyped_storage().data_ptr() for t in inputs}
        for piece in pieces:
            piece.written = [o for o in piece.outputs if o.untyped_storage().data_ptr() not in known]
            known.update(o.untyped_storage().data_ptr() for o in piece.outputs)
        # The piece whose backward is the last one.
        self.first = next((piece for piece in pieces if piece.backward is not None), None)
        self._leaves, self._seams, self._keeps = leaves, seams, keeps

    def release(self) -> None:
        """Lets the graphs that will be captured use the memory that was kept for backward. From then on this function
        and theirs must not have a forward whose backward is to come at the same time."""
        self._keeps = None

    @property
    def graphs(self) -> int:
        """The number of graphs."""
        return sum(1 + (piece.backward is not None) for piece in self.pieces)

    def parameters(self, piece: _Piece) -> Iterator[torch.Tensor]:
        """Yields the parameters whose gradient a piece completes."""
        return (leaf for i in piece.leaves if type(leaf := self._leaves[i]) is not int)

    def replay(self, piece: _Piece, entry: torch.Tensor | None, tokens: int | None) -> list[torch.Tensor]:
        """Replays a piece and returns its results, without gradients."""
        if piece.entry is not None:
            assert entry is not None
            _fill(piece.entry, entry, piece.entry_dim)
        piece.forward.replay()
        # What somebody has saved for a backward of his own shows that it was overwritten.
        increment_version(piece.written)
        if tokens is None or piece.dims is None:
            return [o.detach() for o in piece.outputs]
        found = zip(piece.outputs, piece.dims, strict=True)
        return [o.detach() if d is None else o.detach().narrow(d, 0, tokens) for o, d in found]

    def run(
        self, inputs: Sequence[torch.Tensor], now: Any, turn: Any = None, tokens: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Computes the function. Its inputs have been written to `self.inputs` by the caller.

        Args:
            inputs: the inputs themselves, whose gradients are asked for.
            now: what seams are called with.
            turn: what the backward of this forward reads (`Reading`); the backward raises an error if that is `over`.
                None: nothing else is replayed before the backward.
            tokens: the number of tokens that seams get; None: all.
            done: called after the backward, unless its graph is kept for another one.
        """
        self.tokens = tokens
        if self.prepare is not None:
            self.prepare(False)
        entry: tuple[torch.Tensor, ...] = ()
        outputs: Any = ()
        graded = torch.is_grad_enabled()
        for i, piece in enumerate(self.pieces):
            if graded:
                leaves = (inputs[leaf] if type(leaf := self._leaves[j]) is int else leaf for j in piece.leaves)
                outputs = _Run.apply(self, piece, turn, done, tokens, *entry, *leaves)
            else:
                outputs = self.replay(piece, entry[0] if entry else None, tokens)
            if i < len(self._seams):
                entry = (self._seams[i](outputs, now),)
        return tuple(outputs)


# ---------------------------------------------------------------------------------------------------------------------
# Capturing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _SeamLayout:
    """What is known of a seam after a look: how its result and the gradients of its tensors lie in memory."""

    result: torch.Tensor
    grads: list[torch.Tensor | None]


class _Recording:
    """A function that is being looked at (`recorder` is None), or captured."""

    def __init__(
        self, watch: Watch, recorder: Recorder | None, layouts: list[_SeamLayout], keeps: bool = False
    ) -> None:
        self.watch, self.recorder, self.layouts, self.keeps = watch, recorder, layouts, keeps
        self.seams: list[tuple[Attend, list[int | None] | None, int | None]] = []
        self.pieces: list[_Piece] = []
        self.entries: list[torch.Tensor] = []
        self.back = 0  # the piece whose backward is running

    def forget(self) -> None:
        """Lets go of all tensors: nodes of autograd, which may live as long as the graphs, keep the recording."""
        self.layouts, self.seams, self.pieces, self.entries = [], [], [], []

    def seam(
        self, attend: Attend, tensors: Sequence[torch.Tensor], now: Any, dims: list[int | None] | None, dim: int | None
    ) -> torch.Tensor:
        self.seams.append((attend, dims, dim))
        made: torch.Tensor = _Joint.apply(self, len(self.seams) - 1, now, *tensors)
        return made


class _Joint(torch.autograd.Function):
    """A seam in a function that is being looked at or captured."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, index: int, now: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.recording, ctx.index, ctx.tensors = recording, index, tensors
        watch, recorder = recording.watch, recording.recorder
        ctx.set_materialize_grads(False)
        if recorder is None:
            watch.target = None
            with torch.enable_grad(), _set(None):
                # Under no_grad the function has no gradients, and these are of no use to anybody.
                inner = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
                ctx.result = recording.seams[index][0](inner, now)
            ctx.inner = inner
            result = ctx.result.detach().clone(memory_format=torch.preserve_format)
            # An alias: what is returned refers to this node, which refers to the recording.
            recording.layouts.append(_SeamLayout(result.detach(), [None] * len(tensors)))
            watch.knows((result,))
            watch.target = Nothing()
            return result
        piece = _Piece(recorder.end(), list(tensors), [t.requires_grad for t in tensors], recording.seams[index][1])
        recording.pieces.append(piece)
        (result,) = recorder.begin([recording.layouts[index].result])
        assert result is not None
        recording.entries.append(result)
        watch.knows((result,))
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        recording: _Recording = ctx.recording
        watch, recorder, layout = recording.watch, recording.recorder, recording.layouts[ctx.index]
        wanted = [i for i, t in enumerate(ctx.tensors) if t.requires_grad]
        grads: list[torch.Tensor | None] = [None] * len(ctx.tensors)
        if recorder is None:
            watch.target = None
            given = torch.zeros_like(ctx.result) if grad is None else grad.to(ctx.result.dtype)
            found = torch.autograd.grad(ctx.result, [ctx.inner[i] for i in wanted], given, allow_unused=True)
            for i, each in zip(wanted, found, strict=True):
                grads[i] = layout.grads[i] = each
            watch.knows(t for t in grads if t is not None)
            watch.target = Nothing()
            return None, None, None, *grads
        after = recording.pieces[ctx.index + 1]
        after.backward, after.entry_grad = recorder.end(), grad
        before = recording.pieces[ctx.index]
        before.grads = recorder.begin(layout.grads, apart=recording.keeps)
        watch.knows(t for t in before.grads if t is not None)
        recording.back = ctx.index
        return None, None, None, *before.grads


_recording: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("npu_kernels_recording", default=None)


def recording_now() -> bool:
    """Whether a function is being looked at or captured on this thread."""
    return _recording.get() is not None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside the `with` block the host computes constants by itself, which operators are not checked for nor kept."""
    recording = _recording.get()
    if recording is None:
        yield
        return
    target, recording.watch.target = recording.watch.target, None
    try:
        yield
    finally:
        recording.watch.target = target


def seam(
    attend: Attend, tensors: Sequence[torch.Tensor], now: Any, dims: list[int | None] | None = None,
    dim: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Ends a piece of the function that is being captured, and begins the next one.

    Args:
        attend: computes the result, now and at every replay.
        tensors: what it is given.
        now: its second argument, this time.
        dims: the dimension of tokens of each tensor (None: it has none), if live tokens alone will do.
        dim: the dimension of tokens of its result.
    """
    recording = _recording.get()
    assert recording is not None
    return recording.seam(attend, tensors, now, dims, dim)


@contextlib.contextmanager
def _set(recording: _Recording | None) -> Iterator[None]:
    token = _recording.set(recording)
    try:
        yield
    finally:
        _recording.reset(token)


def capture(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: list[torch.Tensor],
    parameters: dict[torch.Tensor, torch.Tensor],
    buffers: Sequence[torch.Tensor],
    recorder: Recorder,
    *,
    joined: Sequence[torch.Tensor] = (),
    keeps: bool = True,
    known: bool = False,
    watch: Callable[[Reads | None, tuple[Any, ...]], Watched] | None = None,
) -> Pieces:
    """Captures a function, with its gradients if gradients are enabled.

    It runs twice: once as always while every operator is checked (on the values that `inputs` have), and once recorded.
    What it computes then is of no use; the caller fills the inputs and calls `Pieces.run`.

    Args:
        function: takes the inputs and returns tensors. Code in it may call `seam`.
        inputs: the buffers that will be filled before each replay; those whose gradient is asked for require one.
        parameters: what else has gradients: the leaves that the function reads during the capture, and the parameters
            at the same addresses that get their gradients later. They must not be the same tensors: a leaf that was
            used before belongs to the stream that it was used on, and autograd would have that wait for the capture.
        buffers: what else the function may read, at addresses that stay.
        recorder: records the graphs.
        joined: the inputs that others read, too: the sum of their gradients has the same order only if the function
            adds no more than one gradient.
        keeps: whether several such functions run forward before the backward of the first one; otherwise (each is
            repeated by a checkpoint right before its backward) they may share the memory of what they save.
        known: whether the same function, without a seam, was captured before, with inputs of the same shapes; then it
            runs once, since its operators were checked.
        watch: makes a watch of what the function's code reads (`Pieces.watched`), from the code that ran (None: it was
            not looked at) and PyTorch's settings.

    Raises:
        Refused: the function cannot be captured.
    """
    graded, settings = torch.is_grad_enabled(), torch_settings()
    trained = [leaf for leaf in parameters if leaf.requires_grad]
    leaves: list[Any] = [i for i, t in enumerate(inputs) if t.requires_grad]
    wanted = [*(inputs[i] for i in leaves), *trained] if graded else []
    leaves += [parameters[leaf] for leaf in trained]
    fixed = (*parameters, *buffers)
    layouts: list[_SeamLayout] = []
    # A cast that autocast keeps was made outside of the graph, or would be kept beyond it.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    # What is saved here is no matter of a checkpoint around the function.
    unpacked = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself)
    try:
        with unpacked, values_unread():
            reads = None if known else _look(function, inputs, wanted, fixed, recorder, layouts, joined)
            watched = None if watch is None else _watched(watch(reads, settings), reads, inputs)
            pieces = _record(function, inputs, leaves, wanted, fixed, recorder, layouts, keeps)
    finally:
        torch.set_autocast_cache_enabled(cached)
    # The function ran once more since its code's values were noted.
    if watched is not None and not watched.holds():
        raise Refused(f"a call of it changes {watched.differs}")
    pieces.watched = watched
    return pieces


def _watched(watched: Watched, reads: Reads | None, inputs: Sequence[torch.Tensor]) -> Watched:
    """Returns the watch of a function, unless its code does what a replay would not do, or cannot be compared."""
    if watched.reason is not None:
        raise Refused(watched.reason)
    given = {t.untyped_storage()._cdata for t in inputs}
    for path, tensor in watched.tensors.items():
        if tensor.untyped_storage()._cdata in given:
            raise Refused(f"a call of it keeps its input as {path}")
    for each in () if reads is None else reads.changed.values():
        if watched.reaches(each):
            raise Refused(f"a call of it changes a {type(each).__name__} in place")
    return watched


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _uses(outputs: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Returns the number of gradients that are summed for each leaf that results depend on."""
    # A result may be a leaf itself, which the function was given.
    uses: Counter[torch.Tensor] = Counter(o for o in outputs if o.grad_fn is None)
    nodes: list[Any] = [o.grad_fn for o in outputs if o.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:
        for other, _ in node.next_functions:
            if hasattr(other, "variable"):
                uses[other.variable] += 1
            elif other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
    return uses


def _look(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], wanted: list[Any],
    fixed: Sequence[torch.Tensor], recorder: Recorder, layouts: list[_SeamLayout], joined: Sequence[torch.Tensor],
) -> Reads:  # fmt: skip
    """Runs the function with every operator and all of its code checked. What it starts (libraries, compilers) is
    started then. Returns the code that ran."""
    watch = Watch(inputs, fixed)
    recording = _Recording(watch, None, layouts)
    reads = Reads(lambda: watch.target is None)
    try:
        with uncollected(), reads, recorder.recording(watch, look=True), _set(recording):
            watch.target = Nothing()
            outputs = function(*inputs)
            differ = [o for o in outputs if o.requires_grad]
            uses = _uses(differ) if wanted else {}
            if any(uses.get(t, 0) > 1 for t in joined):
                raise Refused("it reads an argument twice that other layers read, too, and that has a gradient")
            if wanted and differ:
                given = [torch.zeros_like(o) for o in differ]
                watch.knows(given)
                torch.autograd.grad(differ, wanted, given, allow_unused=True)
            watch.target = None
    except RuntimeError as error:
        if reads.reason is not None:  # code that cannot be captured may fail while it is looked at
            raise Refused(reads.reason) from error
        raise
    return reads


@contextlib.contextmanager
def _abandoned(recorder: Recorder) -> Iterator[None]:
    """Ends the graph that an error inside of the `with` block leaves behind."""
    try:
        yield
    except BaseException:
        recorder.abandon()
        raise


def _record(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], leaves: list[Any], wanted: list[Any],
    fixed: Sequence[torch.Tensor], recorder: Recorder, layouts: list[_SeamLayout], keeps: bool,
) -> Pieces:  # fmt: skip
    watch = Watch(inputs, fixed)
    recording = _Recording(watch, recorder, layouts, keeps)
    pieces = recording.pieces
    completed: dict[int, int] = {}

    def arrived(index: int) -> Callable[[torch.Tensor], None]:
        return lambda grad: completed.__setitem__(index, recording.back)

    hooks = [leaf.register_hook(arrived(i)) for i, leaf in enumerate(wanted)]
    try:
        with recorder.recording(watch, look=False), _set(recording), _abandoned(recorder):
            recorder.begin()
            outputs = function(*inputs)
            last = _Piece(recorder.end(), list(outputs), [o.requires_grad for o in outputs])
            pieces.append(last)
            for piece, entry, (_, _, dim) in zip(pieces[1:], recording.entries, recording.seams, strict=True):
                piece.entry, piece.entry_dim = entry, dim
            differ = [o for o in outputs if o.requires_grad]
            grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if wanted and differ:
                last.grads = recorder.begin([o if o.requires_grad else None for o in outputs], apart=keeps)
                given = [g for g in last.grads if g is not None]
                watch.knows(given)
                recording.back = len(pieces) - 1
                grads = torch.autograd.grad(differ, wanted, given, retain_graph=True, allow_unused=True)
                pieces[recording.back].backward = recorder.end()
    finally:
        for hook in hooks:
            hook.remove()
    for i, grad in enumerate(grads):
        if grad is not None:
            if i not in completed:  # torch 2.7 calls no hook of a leaf that an autograd.Function was given
                raise Refused("this version of torch does not tell which graph completes a gradient")
            piece = pieces[completed[i]]
            piece.leaves.append(i)
            piece.leaf_grads.append(grad)
    keeps_alive: Any = None
    if wanted and keeps:
        # What backward reads must not be used by the graphs of other layers: autograd's graph keeps what it has saved;
        # what seams are given, and the results, may be saved by those that get them.
        keeps_alive = [o.grad_fn for o in outputs], [[o.detach() for o in piece.outputs] for piece in pieces]
    results = [recorder.alias(o) for o in outputs]
    for piece in pieces:
        piece.outputs = [recorder.alias(o) for o in piece.outputs]
        piece.leaf_grads = [recorder.alias(grad) for grad in piece.leaf_grads]
        piece.grads = [None if grad is None else recorder.alias(grad) for grad in piece.grads]
        piece.entry = None if piece.entry is None else recorder.alias(piece.entry)
        piece.entry_grad = None if piece.entry_grad is None else recorder.alias(piece.entry_grad)
    seams = [attend for attend, *_ in recording.seams]
    recording.forget()
    return Pieces(inputs, leaves, pieces, seams, results, keeps_alive)
