"""Attention inside the segments of one packed row of tokens.

`varlen_attention.py` has the formulas, the reference and the public function. `segments.py` describes which tokens
belong to a segment. `segment_kernels.py` calls the attention kernels of PyTorch or of the vendor. `shared_rows.py`
gathers rows that several segments share and sums their gradients. `bounded_segments.py` describes segments for a
device's graph: in a table on the device, with upper bounds.

`decode_attention.py` is the attention of generation, of one query for each row to the row's cache, and
`append_to_cache.py` writes the key and the value of a token to this cache. `qk_norm_rope_append.py` does this, and the
norm and the rotation before it, at once.
"""

from .append_to_cache import append_to_cache
from .bounded_segments import BoundedSegments, Room, table_of
from .decode_attention import attend_in_parts, decode_attention, decode_attention_reference
from .qk_norm_rope_append import QkNorm, qk_norm_rope_append, rotated_dtype
from .segments import Options, Segments, once_for_segments
from .shared_rows import Shared, take, uploaded
from .varlen_attention import needs_lengths, trial, unserved, varlen_attention, varlen_attention_reference

__all__ = [
    "BoundedSegments",
    "Options",
    "QkNorm",
    "Room",
    "Segments",
    "Shared",
    "append_to_cache",
    "attend_in_parts",
    "decode_attention",
    "decode_attention_reference",
    "needs_lengths",
    "once_for_segments",
    "qk_norm_rope_append",
    "rotated_dtype",
    "table_of",
    "take",
    "trial",
    "unserved",
    "uploaded",
    "varlen_attention",
    "varlen_attention_reference",
]
