"""Tracks the memory of a step: every tensor storage from its allocation until it is freed.

Fake tensors have the lifetimes of real ones, since Python and autograd free both. The largest number of bytes alive at
one time is therefore the peak of the real step, except for memory outside of tensors that the step sees: temporary
tensors inside operators (`scratch`), and memory of libraries.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PARTS", "Ledger"]

PARTS = ("weights", "gradients", "optimiser", "activations", "head", "attention", "rollouts", "graphs", "other")
"""The purposes of memory. `rollouts`: caches, the state of rows and copies of weights while completions are generated;
`graphs`: the pool of captured bodies; `other`: memory of libraries, and the additional memory of several devices."""

# The CUDA allocator allocates multiples of this; so does torch_npu's, which derives from it.
_ROUNDED_TO = 512


def _rounded(size: float) -> int:
    """Returns the bytes that the allocator allocates for a size."""
    return math.ceil(size / _ROUNDED_TO) * _ROUNDED_TO


class Ledger(TorchDispatchMode):
    """Counts the bytes that are alive while the mode is active, and records the parts at their peak.

    Args:
        vocabulary: an activation with a dimension of this size belongs to the head.
        scratch: returns the bytes of temporary tensors inside an operator, for the operator and its arguments.

    Attributes:
        alive: the current bytes, by part.
            Those of `graphs` are the most that its storages have had: a pool gives nothing back.
        total: the current bytes; counted separately, for a comparison with the sum of the parts.
        pooled: the current bytes of the storages in the pool.
        peak: the bytes by part when their sum was largest.
    """

    def __init__(
        self, vocabulary: int, scratch: Callable[[Any, tuple[Any, ...]], int] = lambda function, args: 0
    ) -> None:
        super().__init__()
        self._vocabulary, self._scratch = vocabulary, scratch
        self._blocks: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        # A new storage belongs to the part of the innermost region, and counts with that region's share of its size.
        self._regions: list[tuple[str, float]] = []
        self.alive = dict.fromkeys(PARTS, 0)
        self.total = 0
        self.pooled = 0
        self.peak = dict(self.alive)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that were alive at one time."""
        return sum(self.peak.values())

    @property
    def blocks(self) -> int:
        """The number of storages that are alive."""
        return len(self._blocks)

    def forget_peak(self) -> None:
        """Restarts the search for the peak."""
        self.peak = dict(self.alive)

    def enter(self, part: str, share: float = 1.0) -> None:
        """Begins a region: new storages belong to this part, and this device has a share of their bytes."""
        self._regions.append((part, share))

    def leave(self) -> None:
        """Ends the innermost region."""
        self._regions.pop()

    @contextlib.contextmanager
    def within(self, part: str, share: float = 1.0) -> Iterator[None]:
        """Applies `enter` and `leave` to a `with` block."""
        self.enter(part, share)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def holding(self, part: str, size: int) -> Iterator[None]:
        """Counts bytes that belong to no tensor, inside a `with` block."""
        self._add(part, size)
        try:
            yield
        finally:
            self._add(part, -size)

    def belongs(self, tensor: torch.Tensor, part: str, share: float = 1.0) -> None:
        """Moves a tensor's storage to this part.

        Raises:
            ValueError: the storage was not allocated while this ledger was active.
        """
        storage = tensor.untyped_storage()
        found = self._blocks.get(id(storage))
        if found is None:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} was not born under this ledger")
        reference, before, size = found
        self._add(before, -size)
        size = _rounded(storage.nbytes() * share)
        self._blocks[id(storage)] = (reference, part, size)
        self._add(part, size)

    def _add(self, part: str, size: int) -> None:
        if part == "graphs":
            self.pooled += size
            size = max(0, self.pooled - self.alive["graphs"])
        self.alive[part] += size
        self.total += size
        if size > 0 and self.total > self.peak_bytes:
            self.peak = dict(self.alive)

    def _die(self, key: int) -> None:
        _, part, size = self._blocks.pop(key)
        self._add(part, -size)

    def _part_of(self, tensor: torch.Tensor) -> tuple[str, float]:
        part, share = self._regions[-1] if self._regions else ("activations", 1.0)
        # Logits belong to the head, whichever module computes them.
        logits = part in ("activations", "attention") and self._vocabulary in tensor.shape
        return ("head" if logits else part), share

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._blocks or tensor.device.type == "meta":
            return
        part, share = self._part_of(tensor)
        size = _rounded(storage.nbytes() * share)
        self._blocks[key] = (weakref.ref(storage, lambda _: self._die(key)), part, size)
        self._add(part, size)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:
            # Two thirds of all calls ask fake tensors for their device.
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        attends = "attention" in function.__name__
        with contextlib.ExitStack() as stack:
            if attends:
                # In backward there are no module hooks that enter the region.
                stack.enter_context(self.within("attention"))
                stack.enter_context(self.holding("attention", self._scratch(function, args)))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return result
