"""The body of a model, from the embedding to the last norm, computes live tokens alone: those that are not padding.

For each batch, in this order:

1. `padding.py`: the patch of the body decides whether a call may skip its padding.
2. `layout.py`: finds by mask, ids and labels which tokens are computed, and which rows share a prefix (numpy, host).
3. `batch.py`: calls the body with one row of live tokens, and restores the padded shape of its output.
4. `packed.py`: attention, by the segments of that row; `states.py`: modules that carry a state along a row, likewise
   (`state_forms.py` recognises their functions, `state_row.py` knows where states begin and end); or `mixers.py`:
   modules that take no such row get the padded batch.
5. `caches.py`: computes the KV cache that a training forward was asked for, when other code reads it.

Batches that a collator has packed already (`user_rows.py`) begin with the third step; `mixed_rows.py` says whether the
body's own code keeps their rows apart. `dropped_options.py` says where its own attention drops what it is given.

Once for each class of body, `proof.py` compares both ways on a miniature of it.
"""

from .batch import Batch, BodyForward
from .dropped_options import dropped_options
from .layout import MIN_SAVED
from .packed import (
    PackedMask,
    Packing,
    Unserved,
    attend_by_segments,
    foreign_attention,
    make_mask,
    packed_row,
    packing_for,
    under_way,
)
from .padding import PaddingPatch, draws_for_tokens, outermost_body
from .user_rows import first_rows

__all__ = [
    "MIN_SAVED",
    "Batch",
    "BodyForward",
    "PackedMask",
    "Packing",
    "PaddingPatch",
    "Unserved",
    "attend_by_segments",
    "draws_for_tokens",
    "dropped_options",
    "first_rows",
    "foreign_attention",
    "make_mask",
    "outermost_body",
    "packed_row",
    "packing_for",
    "under_way",
]  # fmt: skip
