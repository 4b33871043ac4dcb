"""The short causal convolution of layers with a state.

`causal_conv1d.py` has the formulas, the reference, the torch form and the public function. `convolution_kernels.py`
has the kernels and their launches. `places.py` computes where segments lie.
"""

from .causal_conv1d import causal_conv1d, causal_conv1d_reference
from .convolution_kernels import MOST_TAPS

__all__ = ["MOST_TAPS", "causal_conv1d", "causal_conv1d_reference"]
