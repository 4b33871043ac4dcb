"""Batches that a collator has packed: several rows in one, which position ids tell apart, and no mask.

TRL's `packing` and `padding_free` and transformers' `DataCollatorWithFlattening` make such batches. transformers reads
the position ids as this module does: a row ends where the next position id is not the next number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["ARGUMENTS", "first_rows", "lengths_of_rows", "may_be_packed", "rows_apart"]

ARGUMENTS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""Arguments that say again what position ids say."""


def may_be_packed(given: dict[str, Any]) -> bool:
    """Whether the arguments of a body may be those of a packed batch."""
    positions = given.get("position_ids")
    rows = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if not isinstance(rows, torch.Tensor) or not isinstance(positions, torch.Tensor):
        return False
    unread = isinstance(positions, FakeTensor) or positions.device.type == "meta" or not positions.numel()
    of_tokens = positions.dim() == 2 and positions.shape == rows.shape[:2]
    return given.get("attention_mask") is None and of_tokens and not unread


def lengths_of_rows(positions: torch.Tensor) -> list[int]:
    """Returns the lengths of the rows in position ids `[B, L]`, one row of the batch after the other. The host waits
    for the device, once."""
    found = positions.cpu().numpy()
    begins = np.ones(found.shape, bool)
    begins[:, 1:] = np.diff(found, axis=1) != 1
    places = np.flatnonzero(begins)
    return [int(n) for n in np.diff(np.append(places, found.size))]


def rows_apart(given: dict[str, Any], lengths: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments with the first rows of a packed batch alone, and with these rows padded to one length,
    under a mask.

    Args:
        given: the arguments of a body, for which `may_be_packed` holds.
        lengths: the lengths of these rows.
    """
    tokens = sum(lengths)
    others = {n: v for n, v in given.items() if n not in ARGUMENTS and not isinstance(v, torch.Tensor)}
    packed, padded = dict(others), dict(others)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        value = given.get(name)
        if value is not None:
            flat = value.flatten(0, 1)[:tokens]
            packed[name], padded[name] = flat.unsqueeze(0), pad_sequence(flat.split(lengths), batch_first=True)
    ones = torch.ones(tokens, dtype=torch.long, device=given["position_ids"].device)
    padded["attention_mask"] = pad_sequence(ones.split(lengths), batch_first=True)
    return packed, padded


def first_rows(given: dict[str, Any], most: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns `rows_apart` of the first rows, if a collator has packed several into a row of the batch, else None."""
    if not may_be_packed(given):
        return None
    lengths = lengths_of_rows(given["position_ids"])
    return None if len(lengths) == len(given["position_ids"]) else rows_apart(given, lengths[:most])
