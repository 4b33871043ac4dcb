"""Decoder layers as captured pieces, and whole bodies as captured functions.

Between two attentions a decoder layer depends on the number of its tokens alone. So a layer is captured as the pieces
before and after its attention (`capture.pieces`), with transformers' attention interface as the seam between them. The
code needs to know nothing about the model's family. For each call of a layer, in this order:

1. `layer_capture.py`: the forward of the layer's class asks whether the call is replayed, captured, or left alone.
2. `call_arguments.py`: takes the tensors out of the arguments.
3. `buckets.py`: the graphs of the call's mode and number of tokens, which the packed body rounds up (`bucket`).
4. `layer_state.py`: whether the layer is as it was when it was captured.

`body_capture.py` captures the whole body instead, attention included, by the same rules.

Before that, `device_waits.py` finds out whether the device waits for the host.
"""

from .body_capture import BodyCapture
from .buckets import bucket
from .layer_capture import LayerCapture
from .layer_state import LayerState

__all__ = ["BodyCapture", "LayerCapture", "LayerState", "bucket"]
