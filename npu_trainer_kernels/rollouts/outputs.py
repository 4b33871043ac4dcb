"""What `generate` gives besides tokens: the cache of what it has generated.

A rollout has a cache of its own, without padding, for as long as it runs. If the caller has handed in a cache, or asks
for an output with names, which has one, a forward of the model over all tokens but the last one fills it: the keys and
values are those of `generate`, up to rounding, also of padding.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from ..support.foreign import CACHES
from .decode import arguments_of, cache_name

__all__ = ["given_cache", "notes_new_caches", "output_of"]

_made: contextvars.ContextVar[weakref.ref[Any] | None] = contextvars.ContextVar("npu_kernels_new_cache", default=None)


def given_cache(given: dict[str, Any]) -> Any:
    """Returns the cache among the arguments of the sampling loop, or None."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def notes_new_caches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model's `_prepare_cache_for_generation`, which notes the cache that `generate` makes if it was handed
    none."""

    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        handed = given_cache(model_kwargs)
        found = original(self, generation_config, model_kwargs, *args, **kwargs)
        cache = given_cache(model_kwargs) if handed is None else None
        _made.set(None if cache is None else weakref.ref(cache))
        return found

    return prepare


def output_of(model: Any, sequences: torch.Tensor, given: dict[str, Any], config: Any) -> Any:
    """Returns what `generate` returns, and fills a cache that the caller will look at.

    Args:
        model: the causal model.
        sequences: the prompts and what was generated, [B, L].
        given: the arguments of the sampling loop.
        config: the merged configuration of the generation.
    """
    cache, made = given_cache(given), _made.get()
    named = bool(config.return_dict_in_generate)
    if cache is not None and (named or made is None or made() is not cache):
        _fill(model, sequences, given.get("attention_mask"), cache)
    if not named:
        return sequences
    field = next(each.name for each in fields(GenerateDecoderOnlyOutput) if each.name in CACHES)
    return GenerateDecoderOnlyOutput(**{"sequences": sequences, field: cache})


def _fill(model: Any, sequences: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> None:
    """Computes all tokens but the last one with a cache."""
    ids, names = sequences[:, :-1], arguments_of(model)
    seen = torch.ones_like(ids)
    if mask is not None:
        seen[:, : mask.shape[1]] = mask[:, : ids.shape[1]].to(ids.device) != 0
    positions = (seen.cumsum(-1) - 1).masked_fill(seen == 0, 0)
    given: dict[str, Any] = {
        "attention_mask": seen,
        "position_ids": positions,
        "cache_position": torch.arange(ids.shape[1]).to(ids),
    }
    given.update((name, 1) for name in names if name.endswith("logits_to_keep"))
    given = {name: value for name, value in given.items() if name in names}
    with torch.no_grad():
        model(input_ids=ids, **given, **{cache_name(names): cache}, use_cache=True, return_dict=True)
