"""Times training steps with the device's clock."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["Clock"]


class Clock:
    """Records the ends of steps and their preparation, on an accelerator with events, without waiting for it."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._ends: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._pauses: list[tuple[Any, Any]] = []
        self._on_the_host = 0.0
        # How many seconds the host prepared each step.
        self.prepared: list[float] = []

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
        """Records the end of a step."""
        self._ends.append((self._now(), self._pauses))
        self.prepared.append(self._on_the_host)
        self._pauses, self._on_the_host = [], 0.0

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Excludes the time inside the block."""
        start, begun = self._now(), time.perf_counter()
        try:
            yield
        finally:
            self._on_the_host += time.perf_counter() - begun
            self._pauses.append((start, self._now()))

    def seconds(self) -> list[float]:
        """Returns the seconds of every step except the first, whose beginning is not recorded. Waits for the device."""
        from npu_trainer_kernels import device as devices

        devices.synchronize(self.device)
        return [
            self._between(before, end) - sum(self._between(*pause) for pause in pauses)
            for (before, _), (end, pauses) in itertools.pairwise(self._ends)
        ]
