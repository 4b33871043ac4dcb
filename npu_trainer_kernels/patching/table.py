"""The patches, by op, in the order in which they are applied."""

from ._embeddings import EmbeddingPatch
from ._experts import ExpertsPatch
from ._head import LmHeadPatch
from ._mlps import GatedMlpPatch
from ._norms import GatedRmsNormPatch, LayerNormPatch, RmsNormPatch
from ._padding import PaddingPatch
from ._patch import Patch
from ._residuals import AddRmsNormPatch
from ._rope import RopePatch
from ._trl import TrlHeadPatch

__all__ = ["PATCHES"]

PATCHES: dict[str, Patch] = {
    patch.op: patch
    for patch in (
        RmsNormPatch(),
        GatedRmsNormPatch(),
        LayerNormPatch(),
        AddRmsNormPatch(),
        EmbeddingPatch(),
        GatedMlpPatch(),
        ExpertsPatch(),
        RopePatch(),
        PaddingPatch(),
        LmHeadPatch(),
        TrlHeadPatch(),
    )
}
