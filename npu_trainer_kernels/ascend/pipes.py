"""A trace played on in-order units: which version of a kernel keeps them busier. Ratios, never times.

A vector core has a scalar unit, which issues everything, and units that work beside each other: the vector unit, one
for loads (MTE2) and one for stores (MTE3). Each does its instructions in order; flags and barriers couple them.
`simulate` plays a trace on this model with the vendor's single-core rates (`rates.json` says whose they are). The state
of caches, the cost of a launch and what other cores do to the memory are not in it: the cycles of two versions of one
kernel compare, but they are not microseconds of a chip and are never shown as such.
"""

import bisect
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .device_library import Event

__all__ = ["Busy", "simulate"]

# Cycles. The scalar unit's for whatever it issues stand for the address arithmetic between two instructions: 6 to 19 in
# traces of whole kernels with every scalar instruction counted. The rest is what makes small tiles slow at all.
_ISSUE = 10.0
_FEWEST = 3.0  # a vector instruction, however short
_SHORT_PIECE = 4.0  # a piece of a transfer below 512 bytes
_LATENCY = {"V": 20.0, "MTE2": 100.0, "MTE3": 100.0}
_SCALAR_ACCESS = {"gm": 300.0, "ub": 20.0}
_UNIT = {"vector": "V", "load": "MTE2", "store": "MTE3"}


@dataclass(frozen=True)
class Busy:
    """What `simulate` found, in simulated cycles.

    Attributes:
        cycles: from the first instruction to the last unit's end.
        vector, loads, stores: how long each unit worked.
    """

    cycles: float
    vector: float
    loads: float
    stores: float


@cache
def _rates() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("rates.json").read_text())
    return found


def _transfer_cycles(event: Event) -> float:
    points = _rates()[event.kind]
    sizes, cycles = [size * 1024 for size, _ in points], [spent for _, spent in points]
    if event.bytes <= sizes[0]:
        spent = cycles[0]
    elif event.bytes >= sizes[-1]:
        spent = event.bytes * cycles[-1] / sizes[-1]
    else:
        after = bisect.bisect(sizes, event.bytes)
        part = (event.bytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        spent = cycles[after - 1] + part * (cycles[after] - cycles[after - 1])
    short = event.repeats > 1 and event.bytes < 512 * event.repeats
    return float(max(spent, _SHORT_PIECE * event.repeats) if short else spent)


def _cycles(event: Event) -> float:
    if event.kind != "vector":
        return _transfer_cycles(event)
    rates = _rates()["cycles_per_repeat"]
    if event.name not in rates:
        raise ValueError(f"rates.json must have a rate of every instruction; it has none of {event.name!r}")
    return max(_FEWEST, float(rates[event.name]) * event.repeats)


def simulate(events: Sequence[Event], chip: str) -> Busy:
    """Plays a trace.

    Args:
        events: of one program, see `trace.trace`.
        chip: a chip of which `rates.json` has the memory's bandwidth for each core.

    Raises:
        ValueError: it has none of this chip, or no rate of an instruction.
    """
    known = _rates()["hbm_bytes_per_cycle"]
    if chip not in known:
        raise ValueError(f"chip must be one of {', '.join(known)}; got {chip!r}")
    now = 0.0  # of the scalar unit
    free: dict[str, float] = defaultdict(float)  # when a unit can begin its next instruction
    done: dict[str, float] = defaultdict(float)  # when the last result of a unit is there
    channel = {"load": 0.0, "store": 0.0}  # the core's share of the memory, in each direction
    worked: dict[str, float] = defaultdict(float)
    flags: dict[tuple[str, str, int], deque[float]] = defaultdict(deque)
    for event in events:
        now += _ISSUE
        if event.kind in _UNIT:
            unit = _UNIT[event.kind]
            begin = max(now, free[unit])
            end = begin + _cycles(event)
            if event.kind in channel:
                end = max(end, max(channel[event.kind], begin) + event.bytes / known[chip])
                channel[event.kind] = end
            worked[unit] += end - begin
            free[unit], done[unit] = end, max(done[unit], end + _LATENCY[unit])
        elif event.kind == "set":
            ready = now if event.name == "S" else max(now, free[event.name], done[event.name])
            flags[event.name, event.waits, event.flag].append(ready)
        elif event.kind == "wait":
            waiting = flags[event.name, event.waits, event.flag]
            ready = waiting.popleft() if waiting else now
            if event.waits == "S":
                now = max(now, ready)
            else:
                free[event.waits] = max(free[event.waits], now, ready)
        elif event.kind == "barrier":
            if event.name == "ALL":
                now = max(now, *free.values(), *done.values(), 0.0)
            else:
                free[event.name] = max(free[event.name], done[event.name], now)
        else:
            now += _SCALAR_ACCESS[event.name]
    return Busy(max(now, *free.values(), *done.values(), 0.0), worked["V"], worked["MTE2"], worked["MTE3"])
