"""Simulates a trace on in-order units, to compare versions of a kernel. Results are ratios, never times.

A vector core has a scalar unit, which issues everything, and units that work in parallel: the vector unit, one for
loads (MTE2) and one for stores (MTE3). Each executes its instructions in order; flags and barriers synchronise them.
`simulate` runs a trace on this model with the vendor's single-core rates (`rates.json` names the source). The model has
no caches, no launch cost and no memory traffic of other cores: the cycles of two versions of a kernel can be compared,
but they are not microseconds of a chip and are never shown as times.
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

# Costs in cycles. `_ISSUE` stands for the scalar unit's address arithmetic between two instructions: 6 to 19 in traces
# of whole kernels with every scalar instruction counted. Without the other constants small tiles would not be slower.
_ISSUE = 10.0
_FEWEST = 3.0  # the minimum for a vector instruction
_SHORT_PIECE = 4.0  # for each piece of a transfer whose pieces are shorter than 512 bytes
_LATENCY = {"V": 20.0, "MTE2": 100.0, "MTE3": 100.0}
_SCALAR_ACCESS = {"gm": 300.0, "ub": 20.0}
_UNIT = {"vector": "V", "load": "MTE2", "store": "MTE3"}


@dataclass(frozen=True)
class Busy:
    """The result of `simulate`, in simulated cycles.

    Attributes:
        cycles: the cycles from the first instruction to the end of the last unit.
        vector, loads, stores: the busy cycles of each unit.
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
    """Simulates a trace.

    Args:
        events: the events of one program, see `trace.trace`.
        chip: a chip for which `rates.json` has the memory bandwidth of a core.

    Raises:
        ValueError: `rates.json` has no bandwidth for this chip, or no rate for an instruction.
    """
    known = _rates()["hbm_bytes_per_cycle"]
    if chip not in known:
        raise ValueError(f"chip must be one of {', '.join(known)}; got {chip!r}")
    now = 0.0  # the clock of the scalar unit
    free: dict[str, float] = defaultdict(float)  # when a unit can begin its next instruction
    done: dict[str, float] = defaultdict(float)  # when the last result of a unit is complete
    channel = {"load": 0.0, "store": 0.0}  # when the core's share of the memory bandwidth is free, in each direction
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
