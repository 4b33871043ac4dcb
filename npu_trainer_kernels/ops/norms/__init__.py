"""Norms. The file of each op has its formulas, its reference and its public function.

`rms_kernels.py` has the kernels of `rms_norm`, `add_rms_norm` and `linear_rms_norm`. `general_kernels.py` has the
kernels of `gated_rms_norm` and `layer_norm`, which support groups, a gate, a mean and a bias.
"""

from .add_rms_norm import add_rms_norm, add_rms_norm_reference
from .gated_rms_norm import CASTINGS as GATED_CASTINGS
from .gated_rms_norm import ORDERS, gated_rms_norm, gated_rms_norm_reference
from .general_kernels import ACTIVATIONS as NORM_GATES
from .layer_norm import layer_norm, layer_norm_reference
from .linear_rms_norm import linear_rms_norm, linear_rms_norm_reference
from .rms_kernels import CASTINGS, check_norm_options, normed_tile, sum_of_partials
from .rms_norm import rms_norm, rms_norm_reference

__all__ = [
    "CASTINGS",
    "GATED_CASTINGS",
    "NORM_GATES",
    "ORDERS",
    "add_rms_norm",
    "add_rms_norm_reference",
    "check_norm_options",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_rms_norm",
    "linear_rms_norm_reference",
    "normed_tile",
    "rms_norm",
    "rms_norm_reference",
    "sum_of_partials",
]
