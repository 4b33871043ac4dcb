"""Whether the device waits for the host, which decides for `capture="auto"`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

__all__ = ["DeviceWaits"]


class DeviceWaits:
    """Finds out whether the device waits for the host.

    When the host begins a layer it looks whether the device has begun the layer before, too: then the device has less
    than a layer's work ahead of it, and will wait. The first forwards do not count, since they compile kernels and fill
    caches. The host itself waits for nothing here.

    The host is what a step waits for if the device waited at nearly all layers. Where it waited at fewer, for example
    only until the host was ahead of it in each step, graphs would gain little and cost memory.
    """

    _UNSEEN, _CALLS = 3, 240
    _SHARE = 0.75

    def __init__(self) -> None:
        self._event: Any = None
        self._begun: Counter[int] = Counter()
        self._calls = self._waiting = 0

    @property
    def share(self) -> float:
        """The share of layers at which the device waited."""
        return self._waiting / max(self._calls, 1)

    @property
    def for_host(self) -> bool:
        """Whether the host is what a step waits for."""
        return self.share > self._SHARE

    def seen(self, layer: int, hidden: Any) -> bool:
        """Counts a call of a layer; returns whether the calls suffice for a decision."""
        if not isinstance(hidden, torch.Tensor) or hidden.device.type in ("cpu", "meta"):
            return False
        self._begun[layer] += 1
        if self._begun[layer] <= self._UNSEEN:
            return False
        module: Any = torch.get_device_module(hidden.device)
        if self._event is not None:
            self._calls += 1
            self._waiting += self._event.query()
        self._event = module.Event()
        self._event.record(module.current_stream(hidden.device))
        return self._calls >= self._CALLS
