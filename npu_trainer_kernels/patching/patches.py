"""The patches, by op, in the order in which they are applied: those of layers, of the body, of the head."""

from . import modules
from .body import PaddingPatch
from .head import LmHeadPatch, TrlHeadPatch
from .patch import Patch

__all__ = ["PATCHES"]

PATCHES: dict[str, Patch] = {
    patch.op: patch for patch in (*modules.PATCHES, PaddingPatch(), LmHeadPatch(), TrlHeadPatch())
}
