"""Says whether a body's own code keeps apart the rows that a collator has packed.

The position ids of such a batch say where a row ends, and not all code reads them: some bodies make their masks without
them, transformers does so for every body that is called with a cache, and a state runs on into the next row. With the
kernels a row is always by itself, so that the loss is another one than without them. A miniature of the body's class
computes two rows side by side and one by one; by the difference the report can say whose loss is which.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..classes import original_class
from ..patch import PROBE_ERRORS
from ..probe import VOCABULARY, repeatable
from .batch import hidden_of
from .proof import TOLERANCE, key_of, miniature_of, small_of

__all__ = ["whose_loss"]

_LENGTHS = (7, 10)
_OTHER_LOSS = "without the kernels the loss is another one, and not that of these rows"
_NEVER = "which the model's own code does not take"
_ALWAYS = f"which the model's own code mixes: {_OTHER_LOSS}"
_CACHED = f"which the model's own code mixes unless it is called with use_cache=False: {_OTHER_LOSS}"

_found: dict[Any, str] = {}


def whose_loss(body: Any, inner: str, caches: bool) -> str:
    """Returns what the own code of a body does to packed rows, as a relative clause; empty if it keeps them apart, as
    the kernels do. Computed once for a class and a configuration.

    Args:
        body: the body.
        inner: the path of the text-only body inside of it; empty: itself.
        caches: whether the call asks for a cache, by name or by the configuration.
    """
    text = body.get_submodule(inner)
    if "position_ids" not in inspect.signature(original_class(body).forward).parameters:
        return _ALWAYS
    if "flash" in text.config._attn_implementation:  # it reads position ids by itself
        return ""
    small = small_of(text)
    key = (*key_of(body, small), caches)
    if key not in _found:
        _found[key] = _said(body, inner, small, caches)
    return _found[key]


def _said(body: Any, inner: str, small: Any, caches: bool) -> str:
    made = miniature_of(body, inner, small).eval()
    try:
        if _mixes(made, use_cache=False):
            return _ALWAYS
        return _CACHED if caches and _mixes(made, use_cache=True) else ""
    except PROBE_ERRORS:
        return _NEVER


def _mixes(made: Any, use_cache: bool) -> bool:
    """Whether rows side by side differ from rows one by one."""
    generator = torch.Generator("cpu").manual_seed(6)
    ids = torch.randint(3, VOCABULARY, (1, sum(_LENGTHS)), generator=generator, device="cpu")
    positions = torch.cat([torch.arange(length, device="cpu") for length in _LENGTHS]).unsqueeze(0)

    def hidden(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with repeatable():
            return hidden_of(made(input_ids=ids, position_ids=positions, use_cache=use_cache))[0]

    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        together = hidden(ids, positions)
        parts = zip(ids.split(_LENGTHS, 1), positions.split(_LENGTHS, 1), strict=True)
        apart = torch.cat([hidden(*part) for part in parts])
    return bool((together - apart).abs().max() > TOLERANCE * apart.abs().max())
