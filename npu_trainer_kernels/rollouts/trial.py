"""Compares a rollout's first logits with the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..patching.audit import distance
from ..support.rounding import Rounded

__all__ = ["differs"]

_ROWS = 3
"""How many rows are compared: those with the shortest and the longest prompts, and one between them."""


def differs(
    model: Any, prompts: Sequence[tuple[int, ...]], out: list[list[int]], made: list[int], seen: list[torch.Tensor]
) -> str | None:
    """Returns how a rollout's logits differ from those of the model's own forward over the same tokens, or None.

    The model's forward is called for one row at a time without a cache, as always and with every operator's result
    moved by about as much as rounding does. By that measure (`patching.audit`) the rollout's logits may be as far away
    as those of an op.

    Args:
        model: the causal model.
        prompts: the tokens of each row's prompt.
        out: the first tokens that each row has made.
        made: the number of them.
        seen: the logits [B, V] that the first tokens were chosen from, and the next ones.
    """
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    rows = sorted({order[0], order[len(order) // 2], order[-1]})[:_ROWS]
    where = seen[0].device
    own, rounded, found = [], [], []
    for row in rows:
        steps = min(len(seen), made[row])
        ids = torch.tensor([[*prompts[row], *out[row][: steps - 1]]], device=where)
        for into, mode in ((own, None), (rounded, Rounded(0, in_place=False))):
            with torch.no_grad():
                if mode is None:
                    logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
                else:
                    with mode:
                        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            into.append(logits[0, len(prompts[row]) - 1 :].float())
        found.append(torch.stack([each[row] for each in seen[:steps]]))
    far = distance(torch.cat(found), torch.cat(own), torch.cat(rounded))
    return None if far <= 1 else f"its logits differ from those of its own forward by {far:.3g} times what rounding does"
