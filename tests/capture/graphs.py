"""A recorder whose graphs hold no tensor, for tests of what capturing keeps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_trainer_kernels.capture.graph import TapeRecorder
from npu_trainer_kernels.capture.tape import Tape, Watch

__all__ = ["Graphs"]


class _Made(TorchDispatchMode):
    """Notes the storages of all results."""

    def __init__(self, seen: list[StorageWeakRef]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self._seen += [StorageWeakRef(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


class Graphs(TapeRecorder):
    """Holds no tensor, as a device's graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StorageWeakRef] = []

    @contextlib.contextmanager
    def recording(self, watch: Watch, *, look: bool) -> Iterator[None]:
        with super().recording(watch, look=look), _Made(self.seen):
            yield

    def end(self) -> Any:
        super().end()
        return Tape()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)
