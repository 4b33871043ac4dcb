"""Captures what a device repeats and replays it, so that it need not wait for Python.

- `graph`: a device's graphs, and the tapes that stand in for them on the CPU.
- `tape`: which operators a graph may hold, checked one by one, and the tape.
- `reads`: which Python code runs; `watched`: the values that it reads, compared before each replay.
- `replayed`: which replay wrote what a backward reads, and on which thread.
- `captured_function`: a function as one graph forward and one backward.

What is captured of a model, and when, is decided in `patching.bodies` and `rollouts`.
"""

from .captured_function import CapturedFunction, Refused, capture, recording_now, unwatched
from .graph import Graph, Recorder, recorder_for
from .reads import Reads, why_unseen
from .replayed import Owner, Reading, ReplayedMemory
from .tape import Nothing, Watch, parts_of
from .watched import SIMPLE, Watched

__all__ = [
    "SIMPLE", "CapturedFunction", "Graph", "Nothing", "Owner", "Reading", "Reads", "Recorder", "Refused",
    "ReplayedMemory", "Watch", "Watched", "capture", "parts_of", "recorder_for", "recording_now", "unwatched",
    "why_unseen",
]  # fmt: skip
