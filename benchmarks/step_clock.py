"""The time of training steps, on the device's own clock."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["Clock"]


class Clock:
    """When the steps ended, and what of them was preparation; by events that an accelerator passes in its own time."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._ends: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._pauses: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        import torch

        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1e3

    def tick(self) -> None:
        """A step has ended."""
        self._ends.append((self._now(), self._pauses))
        self._pauses = []

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """What happens inside does not count."""
        start = self._now()
        try:
            yield
        finally:
            self._pauses.append((start, self._now()))

    def seconds(self) -> list[float]:
        """Of every step but the first, which has no beginning. Waits for the device."""
        from npu_trainer_kernels import device as devices

        devices.synchronize(self.device)
        return [
            self._between(before, end) - sum(self._between(*pause) for pause in pauses)
            for (before, _), (end, pauses) in itertools.pairwise(self._ends)
        ]
