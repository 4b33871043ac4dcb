"""A function as captured graphs: one for what it computes, and one for its gradients.

    capture:  [graph x -> y] [graph dy -> dx, dw]
    replay:   fill x; replay -> y; and in the backward: fill dy; replay -> dx, dw

The two graphs are one node of autograd, whose backward replays the second one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ops.checks import values_unread
from ..ops.host import refused
from .graph import Graph, Recorder, uncollected
from .reads import Reads
from .replayed import Reading
from .tape import Nothing, Refused, Watch
from .watched import Watched, torch_settings

__all__ = ["CapturedFunction", "Refused", "capture", "recording_now", "unwatched"]


class _Replay(torch.autograd.Function):
    """Replays a function, and its backward."""

    @staticmethod
    def forward(ctx: Any, function: CapturedFunction, reading: Reading | None, done: Any, *tensors: Any) -> Any:
        ctx.function, ctx.reading, ctx.done = function, reading, done
        ctx.set_materialize_grads(False)
        # A checkpoint that wraps the function recomputes it when a saved tensor is read, and has no other sign. The
        # inputs are saved for second derivatives, which depend on them.
        ctx.save_for_backward(function.sign, *(t for t in tensors if not isinstance(t, torch.nn.Parameter)))
        outputs = function.replay()
        ctx.mark_non_differentiable(*(o for o, differs in zip(outputs, function.differs, strict=True) if not differs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            outputs = (None, None, None, *_Replay._back(ctx, *grads))
        return refused(outputs, (*grads, *saved, *ctx.function.parameters()))

    @staticmethod
    def _back(ctx: Any, *grads: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        back: _Backward | None = ctx.function.backward
        if back is None:
            return ()
        _may_go_back(ctx.reading)
        for buffer, grad in zip(back.grads, grads, strict=True):
            if buffer is not None:
                _fill(buffer, grad)
        back.graph.replay()
        # A graph that is kept (`retain_graph`) may be differentiated once more.
        if ctx.done is not None and not _keeps_graph():
            ctx.done()
        # Autograd keeps them: as `.grad`, or until a sum is complete, while other replays write to the same memory.
        return _copies(back.leaf_grads)


def _fill(buffer: torch.Tensor, value: torch.Tensor | None) -> None:
    """Writes a gradient into a buffer; None stands for zeros."""
    if value is None:
        buffer.zero_()
    else:
        buffer.copy_(value)


def _copies(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len(tensors) < 2 or tensors[0].device.type == "cpu":
        return [t.clone() for t in tensors]
    # One call for all of them; a product with 1 keeps every bit.
    return torch._foreach_mul(tensors, 1.0)


_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def _may_go_back(reading: Reading | None) -> None:
    """Raises RuntimeError if another forward has overwritten what a backward reads."""
    if reading is not None and reading.over:
        raise RuntimeError(
            "captured graphs ran forward again before the backward of an earlier forward, and what that reads is gone "
            "(capture='off' keeps it)"
        )


@dataclass
class _Backward:
    """The graph of a function's gradients.

    Attributes:
        graph: the graph.
        grads: for each result of the function, the buffer of its gradient to fill, or None.
        leaves: the inputs (by index) and parameters that have a gradient.
        leaf_grads: where these gradients are.
    """

    graph: Graph
    grads: list[torch.Tensor | None]
    leaves: list[Any]
    leaf_grads: list[torch.Tensor]


class CapturedFunction:
    """A captured function.

    Attributes:
        inputs: the buffers that are filled before each replay.
        outputs: where its results are.
        differs: for each of them, whether gradients flow into it.
        backward: its gradients; None: nothing of it has any.
        sign: what is saved for its backward, in the place of everything that a graph has saved.
        watched: what the code of the function has read; replays are right as long as it holds. None: nobody asked.
    """

    def __init__(
        self, inputs: list[torch.Tensor], forward: Graph, outputs: list[torch.Tensor], differs: list[bool],
        backward: _Backward | None, keeps: Any,
    ) -> None:  # fmt: skip
        self.inputs, self.outputs, self.differs, self.backward = inputs, outputs, differs, backward
        # A checkpoint compares shapes: a function that was captured with other results is not taken for this one.
        self.sign = torch.empty(0, len(outputs))
        self.watched: Watched | None = None
        given = {t.untyped_storage().data_ptr() for t in inputs}
        self._written = [o for o in outputs if o.untyped_storage().data_ptr() not in given]
        self._forward, self._keeps = forward, keeps

    def release(self) -> None:
        """Lets the graphs that will be captured use the memory that was kept for backward. From then on this function
        and theirs must not have a forward whose backward is to come at the same time."""
        self._keeps = None

    @property
    def graphs(self) -> int:
        """The number of graphs."""
        return 1 + (self.backward is not None)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yields the parameters that have a gradient."""
        return (leaf for leaf in (() if self.backward is None else self.backward.leaves) if type(leaf) is not int)

    def replay(self) -> list[torch.Tensor]:
        """Replays the function and returns its results, without gradients."""
        self._forward.replay()
        # What somebody has saved for a backward of his own shows that it was overwritten.
        increment_version(self._written)
        return [o.detach() for o in self.outputs]

    def run(
        self, inputs: Sequence[torch.Tensor], reading: Reading | None = None, done: Callable[[], None] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Computes the function. Its inputs have been written to `self.inputs` by the caller.

        Args:
            inputs: the inputs themselves, whose gradients are asked for.
            reading: what the backward of this forward reads; the backward raises an error if that is `over`. None:
                nothing else is replayed before the backward.
            done: called after the backward, unless its graph is kept for another one.
        """
        if not torch.is_grad_enabled():
            return tuple(self.replay())
        own = () if self.backward is None else self.backward.leaves
        leaves = (inputs[leaf] if type(leaf) is int else leaf for leaf in own)
        outputs: tuple[torch.Tensor, ...] = _Replay.apply(self, reading, done, *leaves)
        return outputs


# ---------------------------------------------------------------------------------------------------------------------
# Capturing
# ---------------------------------------------------------------------------------------------------------------------


_recording: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("npu_kernels_recording", default=None)
"""The watch of the function that is being looked at or captured on this thread."""


def recording_now() -> bool:
    """Whether a function is being looked at or captured on this thread."""
    return _recording.get() is not None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside the `with` block the host computes constants by itself, which operators are not checked for nor kept."""
    watch = _recording.get()
    if watch is None:
        yield
        return
    target, watch.target = watch.target, None
    try:
        yield
    finally:
        watch.target = target


@contextlib.contextmanager
def _set(watch: Watch) -> Iterator[None]:
    token = _recording.set(watch)
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
    known: bool = False,
    watch: Callable[[Reads | None, tuple[Any, ...]], Watched] | None = None,
) -> CapturedFunction:
    """Captures a function, with its gradients if gradients are enabled.

    It runs twice: once as always while every operator is checked (on the values that `inputs` have), and once recorded.
    What it computes then is of no use; the caller fills the inputs and calls `CapturedFunction.run`.

    Args:
        function: takes the inputs and returns tensors.
        inputs: the buffers that will be filled before each replay; those whose gradient is asked for require one.
        parameters: what else has gradients: the leaves that the function reads during the capture, and the parameters
            at the same addresses that get their gradients later. They must not be the same tensors: a leaf that was
            used before belongs to the stream that it was used on, and autograd would have that wait for the capture.
        buffers: what else the function may read, at addresses that stay.
        recorder: records the graphs.
        known: whether the same function was captured before, with inputs of the same shapes; then it runs once, since
            its operators were checked.
        watch: makes a watch of what the function's code reads (`CapturedFunction.watched`), from the code that ran
            (None: it was not looked at) and PyTorch's settings.

    Raises:
        Refused: the function cannot be captured.
    """
    graded, settings = torch.is_grad_enabled(), torch_settings()
    trained = [leaf for leaf in parameters if leaf.requires_grad]
    leaves: list[Any] = [i for i, t in enumerate(inputs) if t.requires_grad]
    wanted = [*(inputs[i] for i in leaves), *trained] if graded else []
    leaves += [parameters[leaf] for leaf in trained]
    fixed = (*parameters, *buffers)
    # A cast that autocast keeps was made outside of the graph, or would be kept beyond it.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    # What is saved here is no matter of a checkpoint around the function.
    unpacked = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself)
    try:
        with unpacked, values_unread():
            reads = None if known else _look(function, inputs, wanted, fixed, recorder)
            watched = None if watch is None else _watched(watch(reads, settings), reads, inputs)
            captured = _record(function, inputs, leaves, wanted, fixed, recorder)
    finally:
        torch.set_autocast_cache_enabled(cached)
    # The function ran once more since its code's values were noted.
    if watched is not None and not watched.holds():
        raise Refused(f"a call of it changes {watched.differs}")
    captured.watched = watched
    return captured


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


def _look(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], wanted: list[Any],
    fixed: Sequence[torch.Tensor], recorder: Recorder,
) -> Reads:  # fmt: skip
    """Runs the function with every operator and all of its code checked. What it starts (libraries, compilers) is
    started then. Returns the code that ran."""
    watch = Watch(inputs, fixed)
    reads = Reads(lambda: watch.target is None)
    try:
        with uncollected(), reads, recorder.recording(watch, look=True), _set(watch):
            watch.target = Nothing()
            outputs = function(*inputs)
            differ = [o for o in outputs if o.requires_grad]
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
    fixed: Sequence[torch.Tensor], recorder: Recorder,
) -> CapturedFunction:  # fmt: skip
    watch = Watch(inputs, fixed)
    graph: Graph | None = None
    grads: Sequence[torch.Tensor | None] = ()
    found: Sequence[torch.Tensor | None] = ()
    with recorder.recording(watch, look=False), _set(watch), _abandoned(recorder):
        recorder.begin()
        outputs = function(*inputs)
        forward = recorder.end()
        differ = [o for o in outputs if o.requires_grad]
        if wanted and differ:
            grads = recorder.begin([o if o.requires_grad else None for o in outputs])
            given = [g for g in grads if g is not None]
            watch.knows(given)
            found = torch.autograd.grad(differ, wanted, given, retain_graph=True, allow_unused=True)
            graph = recorder.end()
    differs, results = [o.requires_grad for o in outputs], [recorder.alias(o) for o in outputs]
    if graph is None:
        return CapturedFunction(inputs, forward, results, differs, None, None)
    completed = [(leaf, grad) for leaf, grad in zip(leaves, found, strict=True) if grad is not None]
    backward = _Backward(
        graph,
        [None if grad is None else recorder.alias(grad) for grad in grads],
        [leaf for leaf, _ in completed],
        [recorder.alias(grad) for _, grad in completed],
    )
    # What backward reads must not be used by graphs that are captured later: autograd's graph keeps what it has saved;
    # the results may be saved by those that get them.
    keeps = [o.grad_fn for o in differ], [o.detach() for o in outputs]
    return CapturedFunction(inputs, forward, results, differs, backward, keeps)
