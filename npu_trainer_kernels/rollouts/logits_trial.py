"""Compares a rollout's first logits with the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ..capture import Refused
from ..patching.audit import distance
from ..support.rounding import Rounded
from .decode import arguments_of, cache_name

__all__ = ["Differs", "differs"]

_ROWS = 3
"""How many rows are compared: those with the shortest and the longest prompts, and one between them."""


class Differs(Refused):
    """A rollout's logits are not those of the model's own forward."""


def differs(
    model: Any, prompts: Sequence[tuple[int, ...]], out: list[list[int]], made: list[int], seen: list[torch.Tensor],
    ends: bool = False,
) -> str | None:  # fmt: skip
    """Returns how a rollout's logits differ from those of the model's own forward over the same tokens, or None.

    The model's forward is called for one row at a time without a cache, as always and with every operator's result
    moved by about as much as rounding does. By that measure (`patching.audit`) the rollout's logits may be as far away
    as those of an op. Some layers (Mamba 2) compute one token by another formula than many, which differs by more: such
    a rollout is held to the model's own forwards with a cache, which `generate` would call.

    Args:
        model: the causal model.
        prompts: the tokens of each row's prompt.
        out: the first tokens that each row has made, or all of them.
        made: the number of them.
        seen: the logits [B, V] that the first tokens were chosen from, and the next ones; or with `ends` alone those
            that the last ones were chosen from.
        ends: whether the logits of the last tokens are compared, not those of the first.
    """
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    rows = sorted({order[0], order[len(order) // 2], order[-1]})[:_ROWS]
    steps = [min(len(seen), made[row]) for row in rows]
    known = [(made[row] if ends else n) - 1 for row, n in zip(rows, steps, strict=True)]
    given = [[*prompts[row], *out[row][:n]] for row, n in zip(rows, known, strict=True)]
    own = _logits(model, given, steps, seen[0].device)
    with Rounded(0, in_place=False):
        rounded = _logits(model, given, steps, seen[0].device)
    found = torch.cat([torch.stack([each[row] for each in seen[:n]]) for row, n in zip(rows, steps, strict=True)])
    far = distance(found, own, rounded)
    if far > 1:
        cached = _logits(model, given, steps, seen[0].device, [len(prompts[row]) for row in rows])
        if distance(found, cached, cached + (rounded - own)) <= 1:
            return None
    return (
        None if far <= 1 else f"its logits differ from those of its own forward by {far:.3g} times what rounding does"
    )


def _logits(
    model: Any, given: list[list[int]], steps: list[int], where: torch.device, cached: list[int] | None = None
) -> torch.Tensor:
    """Returns the last logits of rows, as many as there are steps, by forwards of the model's own: of all tokens, or of
    the first ones (`cached` of them) with a cache and then of one token each."""
    found, name = [], cache_name(arguments_of(model))
    with torch.no_grad():
        for at, (row, n) in enumerate(zip(given, steps, strict=True)):
            ids = torch.tensor([row], device=where)
            if cached is None:
                found.append(model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -n:].float())
                continue
            begin, cache, parts = cached[at], DynamicCache(config=model.config.get_text_config(decoder=True)), []
            for part in (ids[:, :begin], *ids[:, begin:].split(1, 1)):
                logits = model(input_ids=part, **{name: cache}, use_cache=True, return_dict=True).logits
                parts.append(logits[0, -1:].float())
            found += parts[-n:]
    return torch.cat(found)
