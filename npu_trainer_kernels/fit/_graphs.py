"""Captures layers on tensors without memory: the package's own code captures and replays, and its recorder only counts.

On a device everything that a graph allocates is in the pool of its recorder. A graph may use the blocks that are free
while it is captured, and the pool returns no memory to the device. So the pool is as large as the most bytes that were
alive in it at one time, which the ledger counts as the part `graphs`.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from ..capture import Graph, Nothing, Watch
from ._ledger import Ledger

__all__ = ["PoolRecorder", "capturing"]


class _Counted:
    """A graph whose memory the ledger has counted."""

    def replay(self) -> None:
        """Computes nothing."""


class PoolRecorder:
    """Attributes what a device's recorder would allocate in its pool to the ledger's part `graphs`.

    Args:
        ledger: the ledger, which is active.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._watch: Watch | None = None
        self._open = False

    @contextlib.contextmanager
    def recording(self, watch: Watch, *, look: bool) -> Iterator[None]:
        self._watch = watch
        try:
            # What a look allocates is in the pool as well.
            with self._ledger.within("graphs") if look else contextlib.nullcontext(), watch:
                yield
        finally:
            self._watch = None

    def no_room(self) -> str | None:
        return None

    def begin(self, likes: Sequence[torch.Tensor | None] = (), *, apart: bool = False) -> list[torch.Tensor | None]:
        assert self._watch is not None
        self._ledger.enter("graphs")
        self._open = True
        buffers = [None if like is None else torch.empty_like(like.detach()) for like in likes]
        self._watch.target = Nothing()
        return buffers

    def end(self) -> Graph:
        assert self._watch is not None
        self._watch.target = None
        self._ledger.leave()
        self._open = False
        return _Counted()

    def abandon(self) -> None:
        if self._open:
            self.end()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # A new tensor that has no bytes in the ledger, because it must not keep the storage alive.
        with self._ledger.within("graphs", 0.0):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _recorder(ledger: Ledger, device: torch.device) -> PoolRecorder:
    return PoolRecorder(ledger)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


@contextlib.contextmanager
def capturing(ledger: Ledger) -> Iterator[None]:
    """Inside the `with` block layers are captured in a pool that the ledger counts. A tensor without memory has no
    address; that of its storage object stands for it."""
    layers = importlib.import_module("npu_trainer_kernels.patching.bodies.body_capture")
    with (
        mock.patch.object(layers, "recorder_for", functools.partial(_recorder, ledger)),
        mock.patch.object(layers.LayerCapture, "without_memory", True),
        mock.patch.object(torch.Tensor, "data_ptr", _address),
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
    ):
        yield
