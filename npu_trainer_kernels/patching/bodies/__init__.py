"""Whole bodies as captured functions: a body is replayed as one graph forward and one backward.

For each call of a body that gets one packed row, in this order:

1. `body_capture.py`: whether the call is replayed, captured, or left alone, and in which bounds.
2. `call_arguments.py`: takes the tensors out of the arguments.
3. `modes.py`: the memory of its graphs, and the forward whose backward is to come.
4. `body_state.py`: whether the body is as it was when it was captured.

`stand_ins.py` has what takes the place of parameters and parts while a body is captured; `counts.py` counts for the
report.
"""

from .body_capture import BodyCapture
from .body_state import BodyState

__all__ = ["BodyCapture", "BodyState"]
