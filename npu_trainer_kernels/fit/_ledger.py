"""Memory as a step takes it and gives it back: every storage of a tensor, from its birth to its death.

Tensors without numbers live and die as real ones do, since it is Python and autograd that let go of them. So the most
that is alive at one time is the peak of the real step, up to what no tensor stands for: what an operator takes and
gives back inside itself (`scratch`), and what libraries hold.
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

PARTS = ("weights", "gradients", "optimiser", "activations", "head", "attention", "other")
"""What memory is for. `other`: what libraries hold, and what several devices add."""

# The CUDA allocator hands out multiples of it; so does the one of torch_npu, which comes from it.
_ROUNDED_TO = 512


def _rounded(size: float) -> int:
    """Bytes that the allocator takes for so many."""
    return math.ceil(size / _ROUNDED_TO) * _ROUNDED_TO


class Ledger(TorchDispatchMode):
    """Counts what is alive while it is on, and keeps the parts of the moment at which that was most.

    Args:
        vocabulary: a tensor with a dimension of this size belongs to the head, unless it is something that lasts.
        scratch: bytes that an operator takes and gives back inside itself, from the operator and its arguments.

    Attributes:
        alive: bytes now, by part.
        total: bytes now; counted by itself, so that it can be held against the sum of the parts.
        peak: the parts at the moment when they were most in all.
    """

    def __init__(
        self, vocabulary: int, scratch: Callable[[Any, tuple[Any, ...]], int] = lambda function, args: 0
    ) -> None:
        super().__init__()
        self._vocabulary, self._scratch = vocabulary, scratch
        self._blocks: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        # What is born belongs to the innermost of these, and counts for a share of its size.
        self._regions: list[tuple[str, float]] = []
        self.alive = dict.fromkeys(PARTS, 0)
        self.total = 0
        self.peak = dict(self.alive)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at one time."""
        return sum(self.peak.values())

    @property
    def blocks(self) -> int:
        """How many storages are alive."""
        return len(self._blocks)

    def forget_peak(self) -> None:
        """The peak is looked for from here on."""
        self.peak = dict(self.alive)

    def enter(self, part: str, share: float = 1.0) -> None:
        """What is born from now on is of this part; of its bytes this device holds a share."""
        self._regions.append((part, share))

    def leave(self) -> None:
        """Ends the innermost region."""
        self._regions.pop()

    @contextlib.contextmanager
    def within(self, part: str, share: float = 1.0) -> Iterator[None]:
        """See `enter`; for the length of a `with` block."""
        self.enter(part, share)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def holding(self, part: str, size: int) -> Iterator[None]:
        """Counts bytes that no tensor stands for, for the length of a `with` block."""
        self._add(part, size)
        try:
            yield
        finally:
            self._add(part, -size)

    def belongs(self, tensor: torch.Tensor, part: str, share: float = 1.0) -> None:
        """From now on a tensor's storage is of this part, whatever it was born for.

        Raises:
            ValueError: it was not born under this ledger.
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
        self.alive[part] += size
        self.total += size
        if size > 0 and self.total > self.peak_bytes:
            self.peak = dict(self.alive)

    def _die(self, key: int) -> None:
        _, part, size = self._blocks.pop(key)
        self._add(part, -size)

    def _part_of(self, tensor: torch.Tensor) -> tuple[str, float]:
        part, share = self._regions[-1] if self._regions else ("activations", 1.0)
        # Whatever module asks for logits, they are the head's.
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
            # Two thirds of all calls: fake tensors are asked where they are.
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        attends = "attention" in function.__name__
        with contextlib.ExitStack() as stack:
            if attends:
                # In backward no module says whose turn it is.
                stack.enter_context(self.within("attention"))
                stack.enter_context(self.holding("attention", self._scratch(function, args)))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return result
