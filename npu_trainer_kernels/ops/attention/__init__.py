"""Attention by segments of one row of tokens.

`varlen_attention.py` has the formulas, the reference and the public function; `segments.py` says which tokens a
segment has; `segment_kernels.py` calls the kernels of PyTorch or of the vendor for them; `shared_rows.py` takes rows
that several segments share, and adds up their gradients.
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
