"""Captures what a device repeats and replays it, so that it need not wait for Python.

- `graph`: a device's graphs, and the tapes that stand in for them on the CPU.
- `tape`: which operators a graph may hold, checked one by one, and the tape.
- `reads`: which Python code runs; `watched`: the values that it reads, compared before each replay.
- `replayed`: which replay wrote what a backward reads, on which thread, and who keeps what it has returned.
- `pieces`: a function as captured pieces, forward and backward, with eager code between them.

What is captured of a model, and when, is decided in `patching.layers`.
"""

from .graph import Graph, Recorder, recorder_for
from .pieces import Pieces, Refused, capture, recording_now, seam, unwatched
from .reads import Reads, why_unseen
from .replayed import Outlets, Owner, Reading, ReplayedMemory
from .tape import Nothing, Watch, parts_of
from .watched import SIMPLE, Watched

__all__ = [
    "SIMPLE", "Graph", "Nothing", "Outlets", "Owner", "Pieces", "Reading", "Reads", "Recorder", "Refused",
    "ReplayedMemory", "Watch", "Watched", "capture", "parts_of", "recorder_for", "recording_now", "seam", "unwatched",
    "why_unseen",
]  # fmt: skip
