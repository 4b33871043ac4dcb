"""Timing of calls: warm-up, then single timed calls, of which it reports median and quartiles.

On an accelerator a call is timed between two device events. The queue is filled first, so that Python's time is hidden
(it is measured separately), and calls rotate through inputs several times as large as the cache, so that every call
starts cold. On a CPU a call is timed by the wall clock. Backward is timed alone, after an untimed forward.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import device as devices
from .descriptions import Inputs, Outputs
from .support.summary import Summary, summarise

__all__ = ["QUICK", "Settings", "Summary", "Timer", "is_accelerator", "measure", "rotation", "summarise"]

Function = Callable[[Mapping[str, Tensor]], Outputs]
# The size of all rotating inputs: four times the 50 MB L2 of an H100 or H200, and more than any Ascend chip's 192 MB.
COLD_BYTES = 256 << 20
MAX_SETS = 8


@dataclass(frozen=True)
class Settings:
    """The number of timed calls.

    Attributes:
        seconds: the time for the timed calls of one row and mode, which decides their number within the bounds.
        least, most: the bounds of the number of timed calls.
        warmup: the number of calls before the first timed one.
    """

    seconds: float = 0.6
    least: int = 10
    most: int = 200
    warmup: int = 3


QUICK = Settings(seconds=0.15, least=5, most=30, warmup=2)


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


class Timer:
    """Measures the milliseconds of a call by device events or by the clock. `host` collects Python's seconds."""

    def __init__(self, device: torch.device, head_start: bool) -> None:
        self.device = device
        self.head_start = head_start
        self.host: list[float] = []

    def __call__(self, region: Callable[[], Any]) -> float:
        if not is_accelerator(self.device):
            start = time.perf_counter()
            region()
            return (time.perf_counter() - start) * 1e3
        module = torch.get_device_module(self.device)
        before, after = module.Event(enable_timing=True), module.Event(enable_timing=True)
        if self.head_start:
            devices.occupy(self.device)
        before.record()
        start = time.perf_counter()
        kept = region()
        self.host.append(time.perf_counter() - start)
        after.record()
        after.synchronize()
        del kept
        return float(before.elapsed_time(after))


def _round(fn: Function, sets: list[Inputs], mode: str, timer: Timer) -> list[float]:
    """Times one call for each set of inputs."""
    for inputs in sets:
        inputs.drop_grads()
    if mode == "forward":
        return [timer(lambda inputs=inputs: fn(inputs.tensors)) for inputs in sets]  # type: ignore[misc]
    if mode == "both":
        return [timer(lambda inputs=inputs: inputs.backward(fn(inputs.tensors))) for inputs in sets]  # type: ignore[misc]
    # Run all forwards first: their reads and writes evict the earlier sets from the cache.
    outputs = [fn(inputs.tensors) for inputs in sets]
    times = []
    for inputs in sets:
        pending = outputs.pop(0)
        times.append(timer(lambda inputs=inputs, pending=pending: inputs.backward(pending)))  # type: ignore[misc]
    return times


def rotation(device: torch.device, bytes_of_one: int) -> int:
    """Returns the number of input sets to rotate through, for a call whose time depends on memory."""
    if not is_accelerator(device):
        return 1
    return max(2, min(MAX_SETS, math.ceil(COLD_BYTES / bytes_of_one) + 1))


def measure(
    fn: Function, sets: list[Inputs], mode: str, device: torch.device, settings: Settings, cold: bool
) -> tuple[Summary, float | None]:
    """Times a call in mode `"forward"`, `"backward"` or `"both"`.

    Returns:
        The milliseconds, and the median microseconds that Python takes to enqueue a call on an accelerator (else None).
    """
    timer = Timer(device, head_start=cold)
    for _ in range(max(1, math.ceil(settings.warmup / len(sets)))):
        estimate = min(_round(fn, sets, mode, timer))
    calls = settings.seconds * 1e3 / max(estimate, 1e-3)
    rounds = math.ceil(max(settings.least, min(settings.most, calls)) / len(sets))
    timer.host.clear()
    samples: list[float] = []
    for _ in range(rounds):
        samples += _round(fn, sets, mode, timer)
    for inputs in sets:
        inputs.drop_grads()
    return summarise(samples), summarise(timer.host).median * 1e6 if timer.host else None
