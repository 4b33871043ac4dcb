"""The patches, by op, in the order in which they are applied."""

from .body import PaddingPatch
from .head import LmHeadPatch, TrlHeadPatch
from .modules import (
    AddRmsNormPatch,
    EmbeddingPatch,
    ExpertsPatch,
    GatedMlpPatch,
    GatedRmsNormPatch,
    LayerNormPatch,
    RmsNormPatch,
    RopePatch,
)
from .patch import Patch

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
