"""The body of a model, from the embedding to the last norm, computes live tokens alone.

For each batch, in this order:

1. `padding.py`: the patch of the body decides whether a call may leave its padding out.
2. `layout.py`: from mask, ids and labels, which tokens are computed, and which rows begin alike (numpy, on the host).
3. `batch.py`: hands the body one row of live tokens, and puts what comes back into the padded shape again.
4. `packed.py`: attention, which alone knows the segments of that row.
5. `caches.py`: keys and values that a forward in training was asked for are computed when somebody reads them.

Once for each class of a body `proof.py` compares both ways on a miniature of it.
"""

from .layout import MIN_SAVED
from .packed import foreign_attention, under_way
from .padding import PaddingPatch, draws_for_tokens, outermost_body

__all__ = ["MIN_SAVED", "PaddingPatch", "draws_for_tokens", "foreign_attention", "outermost_body", "under_way"]
