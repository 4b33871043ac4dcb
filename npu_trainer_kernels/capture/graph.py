"""What records operators and replays them: a device's graphs, or tapes on the CPU.

`recorder_for(device)` returns a recorder: `recording()` prepares the device, `begin` and `end` enclose what one graph
holds, and `end` returns it. Graphs of one recorder share a memory pool: a block that is free when a graph is captured
may be used by it, although graphs that were captured before use it, too. So what must outlive a replay has to be alive
while all later graphs are captured (`captured_function`).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..device import graph_class
from .tape import Refused, Tape, Watch

__all__ = ["Graph", "Recorder", "recorder_for", "uncollected"]


class Graph(Protocol):
    """Something that was recorded."""

    def replay(self) -> None:
        """Runs it again, on the current stream of its device."""


class Recorder(Protocol):
    """Records graphs."""

    def recording(self, watch: Watch, *, look: bool) -> contextlib.AbstractContextManager[None]:
        """One function is looked at (with `look`: the watch is on, nothing is recorded) or recorded inside of it."""

    def begin(self, likes: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor | None]:
        """Begins a graph with what comes next.

        Args:
            likes: tensors, for each of which a buffer like it is returned, which the graph reads.
        """

    def end(self) -> Graph:
        """Ends it."""

    def abandon(self) -> None:
        """Ends a graph that failed, if one was begun."""

    def no_room(self) -> str | None:
        """Returns why there is too little memory for what graphs keep, or None."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor at the same address, which does not keep its memory from later graphs of this recorder."""


class TapeRecorder:
    """Records tapes, on any device; see `tape`. Their tensors keep their own memory."""

    def __init__(self) -> None:
        self._watch: Watch | None = None

    @contextlib.contextmanager
    def recording(self, watch: Watch, *, look: bool) -> Iterator[None]:
        self._watch = watch
        try:
            with watch:
                yield
        finally:
            self._watch = None

    def no_room(self) -> str | None:
        return None

    def begin(self, likes: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor | None]:
        assert self._watch is not None
        buffers = [None if like is None else torch.zeros_like(like.detach()) for like in likes]
        self._watch.target = Tape()
        return buffers

    def end(self) -> Tape:
        assert self._watch is not None
        tape, self._watch.target = self._watch.target, None
        assert isinstance(tape, Tape)
        return tape

    def abandon(self) -> None:
        if self._watch is not None:
            self._watch.target = None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:  # without memory
            return tensor.detach()
        return from_dlpack(to_dlpack(tensor.detach()))


_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside the `with` block nothing is collected: graphs must not be destroyed during a capture, and what the
    collector calls (`gc.callbacks`, `__del__`) is no code of the function. And no other thread captures, which would
    switch the collector on again, and which the device's generator cannot bear."""
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class DeviceRecorder:
    """Records graphs of CUDA (`torch.cuda.CUDAGraph`) or of an NPU (`torch.npu.NPUGraph`), in a pool of their own."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._new = graph_class(device)
        if self._new is None:
            raise Refused(f"torch.{device.type} has no graphs in this version")
        # Tensors of a look are made in the pool as well, so that capturing takes no more memory than the graphs do.
        self._memory = getattr(self._module, "MemPool", None)
        if self._memory is None:
            self._pool = self._module.graph_pool_handle()
        else:
            self._memory = self._memory()
            self._pool = self._memory.id
        self._stream = self._module.Stream(device)
        self._device = device
        self._graph: Any = None
        self._random: torch.Tensor | None = None

    @contextlib.contextmanager
    def recording(self, watch: Watch, *, look: bool) -> Iterator[None]:
        self._module.synchronize(self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        # A capture belongs to a thread, and gradients of a device are computed on another one otherwise.
        threads = torch.autograd.set_multithreading_enabled(False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(uncollected())
            stack.enter_context(self._module.stream(self._stream))
            stack.enter_context(threads)
            if look:
                if self._memory is not None:
                    stack.enter_context(self._module.use_mem_pool(self._memory, self._device))
                stack.enter_context(watch)
            yield
        self._module.current_stream(self._device).wait_stream(self._stream)

    def no_room(self) -> str | None:
        module, where = self._module, self._device
        allocated = module.memory_allocated(where)
        # What a step has needed beyond this moment: activations, at most all of them. Graphs keep as much again, since
        # theirs are not given back to the optimizer.
        needed = 2 * (module.max_memory_allocated(where) - allocated)
        free = module.mem_get_info(where)[0] + module.memory_reserved(where) - allocated
        if needed <= free:
            return None
        return f"memory is short ({free / (1 << 30):.1f} GiB are free, and steps have needed {needed / (2 << 30):.1f})"

    def begin(self, likes: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor | None]:
        self._graph = self._new()
        self._random = self._module.get_rng_state(self._device)
        # Other threads (that of a data loader pins memory) may go on.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        # In the pool, like everything that a graph reads.
        return [None if like is None else torch.empty_like(like.detach()) for like in likes]

    def end(self) -> Graph:
        graph, self._graph = self._graph, None
        graph.capture_end()
        made: Graph = graph
        return made

    def abandon(self) -> None:
        if self._graph is None:
            return
        try:
            self.end()
        except RuntimeError:  # it was invalid; the error that is raised already is the cause
            # The generator believes that it is captured, for ever. Another one takes its place, with the same state.
            generator = self._module.default_generators[self._module.current_device()]
            fresh = torch.Generator(self._device)
            assert self._random is not None
            fresh.set_state(self._random)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())


def recorder_for(device: torch.device) -> Recorder:
    """Returns the recorder for a device."""
    return TapeRecorder() if device.type == "cpu" else DeviceRecorder(device)
