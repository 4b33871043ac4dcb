"""Whether the device waits for the host, which decides for `capture="auto"`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

__all__ = ["DeviceWaits"]


class DeviceWaits:
    """Finds out whether the device waits for the host.

    When the host begins a layer it looks whether the device has begun the layer before, too: then the device has less
    than a layer's work ahead of it, and will wait. The first forwards are not looked at (they compile kernels and fill
    caches). Nothing is waited for.

    Attributes:
        for_host: whether the device waited at more than half of the layers.
    """

    _UNSEEN, _CALLS = 3, 240

    def __init__(self) -> None:
        self._event: Any = None
        self._begun: Counter[int] = Counter()
        self._calls = self._waiting = 0

    @property
    def for_host(self) -> bool:
        return 2 * self._waiting > self._calls

    def seen(self, layer: int, hidden: Any) -> bool:
        """Looks at a call of a layer; returns whether enough calls were seen."""
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
