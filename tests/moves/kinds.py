"""The moves by name, as `python -m tests.moves --kinds` takes them."""

from collections.abc import Mapping, Sequence

from .names import arguments_renamed, attributes_renamed, cache_renamed, rotation_renamed
from .shapes import base_class_between, forwards_decorated, forwards_outlined, helpers_inlined, rotations_inlined
from .sources import Move
from .statements import children_called_by_name, keywords_added, statements_inserted, statements_reordered

__all__ = ["KINDS", "SAME_GRADIENTS"]

KINDS: Mapping[str, Sequence[Move]] = {
    "cache": (cache_renamed,),
    "arguments": (arguments_renamed,),
    "rotation": (rotation_renamed,),
    "attributes": (attributes_renamed,),
    "decorators": (forwards_decorated,),
    "keywords": (keywords_added,),
    "called by name": (children_called_by_name,),
    "inserted": (statements_inserted,),
    "reordered": (statements_reordered,),
    "inlined": (helpers_inlined,),
    "rotation inlined": (rotations_inlined,),
    "outlined": (forwards_outlined,),
    "base class": (base_class_between,),
}
SAME_GRADIENTS = frozenset(KINDS) - {"reordered"}
"""The moves after which gradients have the same bits; after others they are added up in another order."""
