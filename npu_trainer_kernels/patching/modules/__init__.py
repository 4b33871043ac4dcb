"""The patches of a model's layers.

For each kind of module one file has the patch (`recognise`, `declines`, `run` of `..patch.Patch`):

1. `norms.py`: RMSNorms, layer norms, gated norms. `norm_forms.py` finds by a probe which formula a norm computes.
2. `residuals.py`: a residual addition and the norm after it, as one op; needs the norms' formulas.
3. `embeddings.py`: token embeddings.
4. `mlps.py`: gated MLPs. `gate_forms.py` finds the formula of the gate.
5. `experts.py`: the experts of a mixture, with the same gates.
6. `rotations.py`: the rotation of queries and keys. `rotation_forms.py` finds the formula of a rotating function.

`cached_rotations.py` is no patch: it finds the attentions in which generation may compute the norms of queries and
keys, their rotation and the update of the cache at once.

`PATCHES` has them in the order in which they are applied.
"""

from .cached_rotations import NAME as CACHED_ROTATION
from .cached_rotations import CachedRotation, cached_rotation
from .embeddings import EmbeddingPatch
from .experts import ExpertsPatch
from .mlps import GatedMlpPatch
from .norms import GatedRmsNormPatch, LayerNormPatch, RmsNormPatch
from .residuals import AddRmsNormPatch
from .rotation_forms import rope_form, rotation_call, rotations_of
from .rotations import RopePatch

__all__ = ["CACHED_ROTATION", "PATCHES", "CachedRotation", "GatedMlpPatch", "RopePatch", "cached_rotation", "rope_form",
           "rotation_call", "rotations_of"]  # fmt: skip

PATCHES = (
    RmsNormPatch(), GatedRmsNormPatch(), LayerNormPatch(), AddRmsNormPatch(), EmbeddingPatch(), GatedMlpPatch(),
    ExpertsPatch(), RopePatch(),
)  # fmt: skip
"""In the order in which they are applied: a residual addition needs what was found of norms."""
