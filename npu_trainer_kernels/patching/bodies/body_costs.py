"""Which bucket of captured graphs a row runs in, or none, by what was measured of the body.

Three forwards are timed: how long the host takes for one, and, in one whose queue is full meanwhile, how long the
device. From then on the time of a step is known for each number of tokens: eagerly the slower of the two is the limit,
in graphs the device alone, which then also computes what fills the row up to its bucket.

A bucket is captured when it pays: when the rows that have run without it have lost as much time as capturing takes, or
when they will have within `_HORIZON` calls if they come as often as they have come so far. So a run loses at most
what its captures cost, and a body whose limit is the device is never captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import device as devices
from ...ops.attention import Room

__all__ = ["ByCosts", "Costs", "PowersOfTwo", "timed"]

_HORIZON = 50
"""Within how many calls a bucket has to save what its capture costs."""
_CAPTURE_STEPS = 10
"""How many eager steps capturing is expected to take until it has been measured."""
_QUARTERS = 4
"""How many buckets there are from one power of two to the next."""
_OTHERS = 4
"""How many rows of other lengths are taken for granted before a bucket that few lengths have is captured."""
_TIMED = 3
_MARGIN = 1.2
"""By how much a bucket must be faster than own code to be captured: costs of one forward are not quite those of all."""
_HEAD_START = 0.25
"""For how many seconds the device is kept busy."""


@dataclass(frozen=True)
class Costs:
    """What a body's part of a step costs, its recomputation and its backward included.

    Attributes:
        host: the seconds that the host needs to run it eagerly, whatever the number of tokens.
        token: the seconds that the device needs, per token.
    """

    host: float
    token: float

    @classmethod
    def of(cls, body: nn.Module, tokens: int, host: float, device: float) -> Costs:
        """Returns the costs of a step from those of one forward.

        A backward takes the host as long as a forward, and the device twice as long. A checkpoint repeats the forward.

        Args:
            body: the module.
            tokens: the number of tokens of the forward.
            host, device: the seconds that it took.
        """
        if not torch.is_grad_enabled():
            return cls(host, device / tokens)
        again = any(getattr(module, "gradient_checkpointing", False) for module in body.modules())
        return cls(host * (2 + again), device * (3 + again) / tokens)

    def eager(self, tokens: int) -> float:
        """Returns the seconds of a row that runs the body's own code."""
        return max(self.host, self.replay(tokens))

    def replay(self, tokens: int) -> float:
        """Returns the seconds of a row in a bucket of so many tokens."""
        return self.token * tokens


class PowersOfTwo:
    """Every row runs in graphs. The methods are those of `ByCosts`."""

    def bucket(self, row: Room, _: Sequence[Room]) -> int:
        """Returns the number of tokens that a row is filled up to."""
        return Room.bucket(row.tokens)

    def captured(self, tokens: int, shares: bool, seconds: float) -> None:
        """Notes nothing."""

    def replayed(self, tokens: int, bucket: int) -> None:
        """Notes nothing."""


class ByCosts:
    """Chooses the buckets of one body, called in one way.

    Attributes:
        costs: what a step costs; None: it is not known yet.
        calls: the number of rows for which a bucket was chosen.
        saved: the seconds that replays have saved, by these costs.
    """

    def __init__(self) -> None:
        self.costs: Costs | None = None
        self._timed: list[Costs] = []
        self.calls = 0
        self.saved = 0.0
        self._lost: dict[tuple[int, bool], float] = {}  # for want of a bucket
        self._captures: list[float] = []

    @property
    def fills_queue(self) -> bool:
        """Whether the device is kept busy ahead of the next forward that is timed, so that it does not wait for the
        host. The host then waits for the device where its queue has no room for a whole forward."""
        return len(self._timed) == 1

    def measured(self, costs: Costs) -> None:
        """Takes the costs of a forward. The lowest of three count: what is done for the first time takes longer."""
        self._timed.append(costs)
        if len(self._timed) == _TIMED:
            self.costs = Costs(min(each.host for each in self._timed), min(each.token for each in self._timed))

    def captured(self, tokens: int, shares: bool, seconds: float) -> None:
        """Notes that a bucket was captured.

        Args:
            tokens: its number of tokens.
            shares: whether its segments share keys.
            seconds: the time that this took.
        """
        self._captures.append(seconds)
        self._lost.pop((tokens, shares), None)

    def replayed(self, tokens: int, bucket: int) -> None:
        """Notes that a row of so many tokens was replayed in a bucket."""
        assert self.costs is not None
        self.saved += self.costs.eager(tokens) - self.costs.replay(bucket)

    def bucket(self, row: Room, rooms: Sequence[Room]) -> int | None:
        """Returns the number of tokens of the bucket that a row runs in; if no room has as many, it is worth capturing.
        None: the body's own code is faster, or a bucket has not been worth its capture yet.

        Args:
            row: the row.
            rooms: the bounds of what was captured that the row has room in.
        """
        assert self.costs is not None
        self.calls += 1
        costs, shares = self.costs, row.keys > 0
        eager = costs.eager(row.tokens)
        there = min((room.tokens for room in rooms), default=None)
        best = there if there is not None and costs.replay(there) < eager else None
        without = eager if best is None else costs.replay(best)  # what the row costs without the bucket in question
        for tokens, others in zip(_buckets(row.tokens), (0, _OTHERS), strict=False):
            gain = without - costs.replay(tokens)
            pays = costs.replay(tokens) * _MARGIN < eager and gain > 0 and tokens != there
            if pays and self._is_worth(tokens, shares, gain, others):
                return tokens
            without = min(without, costs.replay(tokens)) if pays else without
        return best

    def _is_worth(self, tokens: int, shares: bool, gain: float, others: int) -> bool:
        """Whether a bucket is captured now, since a row would gain so many seconds in it, after so many `others` that
        would have gained nothing."""
        assert self.costs is not None
        key = tokens, shares
        self._lost[key] = self._lost.get(key, 0.0) + gain
        known = self._captures
        price = sum(known) / len(known) if known else _CAPTURE_STEPS * self.costs.host
        return self._lost[key] * max(1.0, _HORIZON / (self.calls + others)) > price

    def __str__(self) -> str:
        assert self.costs is not None
        return (
            f"a step without graphs takes the host {1e3 * self.costs.host:.0f} ms, and the device "
            f"{1e6 * self.costs.token:.1f} us for a token; replays have saved about {self.saved:.1f} s"
        )


def _buckets(tokens: int) -> list[int]:
    """Returns the buckets that a row may have: a power of two, and the next quarter of the way to it."""
    coarse = Room.bucket(tokens)
    step = max(coarse // 2 // _QUARTERS, 1)
    return list(dict.fromkeys((coarse, max(-(-tokens // step) * step, Room.bucket(1)))))


def timed(where: torch.device, run: Callable[[], Any], fills_queue: bool) -> tuple[Any, float, float]:
    """Runs a function once and waits for the device.

    Args:
        where: the device.
        run: the function.
        fills_queue: whether the device is kept busy ahead of it.

    Returns:
        the function's result, the seconds that the host took, and those that the device took.
    """
    module: Any = torch.get_device_module(where)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    devices.synchronize(where)
    if fills_queue:
        devices.occupy(where, _HEAD_START)
    begin.record()
    begun = time.perf_counter()
    result = run()
    host = time.perf_counter() - begun
    end.record()
    devices.synchronize(where)
    return result, host, begin.elapsed_time(end) / 1e3
