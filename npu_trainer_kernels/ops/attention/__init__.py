"""Attention inside the segments of one packed row of tokens.

`varlen_attention.py` has the formulas, the reference and the public function. `segments.py` describes which tokens
belong to a segment. `segment_kernels.py` calls the attention kernels of PyTorch or of the vendor. `shared_rows.py`
gathers rows that several segments share and sums their gradients.
"""

from .segments import Segments
from .shared_rows import Shared, take, uploaded
from .varlen_attention import trial, unserved, varlen_attention, varlen_attention_reference

__all__ = [
    "Segments",
    "Shared",
    "take",
    "trial",
    "unserved",
    "uploaded",
    "varlen_attention",
    "varlen_attention_reference",
]
