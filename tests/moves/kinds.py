"""The moves by name, as `python -m tests.moves --kinds` takes them."""

from collections.abc import Mapping, Sequence

from .names import arguments_renamed, attributes_renamed, cache_renamed, rotation_renamed
from .shapes import base_class_between, forwards_decorated, forwards_outlined, helpers_inlined, rotations_inlined
from .sources import Move
from .statements import children_called_by_name, keywords_added, statements_inserted, statements_reordered

__all__ = ["KINDS", "QUICK", "SAME_GRADIENTS"]

_ALONE: Mapping[str, Move] = {
    "arguments": arguments_renamed,
    "cache": cache_renamed,
    "rotation": rotation_renamed,
    "attributes": attributes_renamed,
    "keywords": keywords_added,
    "called by name": children_called_by_name,
    "inserted": statements_inserted,
    "reordered": statements_reordered,
    "inlined": helpers_inlined,
    "decorators": forwards_decorated,
    "base class": base_class_between,
    "rotation inlined": rotations_inlined,
    "outlined": forwards_outlined,
}
_LOSING = ("rotation inlined", "outlined")  # an op whose place is moved into other functions is not served
KINDS: Mapping[str, Sequence[Move]] = {
    **{name: (move,) for name, move in _ALONE.items()},
    "together": tuple(move for name, move in _ALONE.items() if name not in _LOSING),
}
"""The moves, alone; and together, but for those after which ops have no place."""
SAME_GRADIENTS = frozenset(KINDS) - {"reordered", "together"}
"""The moves after which gradients have the same bits; after others they are added up in another order."""
QUICK: Sequence[tuple[str, str]] = (
    ("causal", "llama"), ("causal", "qwen3"), ("causal", "qwen3_moe"), ("causal", "gemma4_text"), ("causal", "gpt_oss"),
    ("causal", "deepseek_v3"), ("causal", "falcon_h1"), ("causal", "lfm2_moe"), ("causal", "qwen3_5"),
    ("image-text", "paligemma"),
)  # fmt: skip
"""The families that every change is tried on: one of each kind of layer that people train most."""
