"""Says where transformers' own attention drops what the layers of a body ask of it.

transformers passes an option to a flash attention whose function has a parameter of that name, and drops it without a
word elsewhere. Its function for NPUs (`integrations/npu_flash_attention.py`) has none of them. Attention by segments
has them, so the two differ, and the comparison on the first batch would put it down to this package.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ... import device
from .packed import foreign_attention
from .proof import Proof

__all__ = ["dropped_options"]

_NAME = "flash_attention_2"
_OPTIONS = {"window_size": "sliding windows", "softcap": "soft caps", "s_aux": "attention sinks"}


def dropped_options(kind: type, config: Any, proof: Proof, where: torch.device) -> str | None:
    """Returns a warning that names what is dropped and what to choose, or None.

    Args:
        kind: the class of a body.
        config: the configuration of its text-only body.
        proof: its proof, which knows what its attention was asked for.
        where: the device that it is on.
    """
    if config._attn_implementation != _NAME or foreign_attention(_NAME) or not device.has_flash_of_its_own(where):
        return None
    from transformers.integrations.npu_flash_attention import npu_flash_attn_func, npu_flash_attn_varlen_func

    both = npu_flash_attn_func, npu_flash_attn_varlen_func
    known = set.intersection(*(set(inspect.signature(function).parameters) for function in both))
    asked = {
        "window_size": any(window for window, _, _ in proof.asked),
        "softcap": any(softcap for _, softcap, _ in proof.asked),
        "s_aux": any(sinks for _, _, sinks in proof.asked),
    }
    dropped = [_OPTIONS[name] for name, wanted in asked.items() if wanted and name not in known]
    if not dropped:
        return None
    # PyTorch's attention in transformers has windows alone.
    other = "sdpa" if dropped == [_OPTIONS["window_size"]] else "eager"
    return (
        f'with attn_implementation="{_NAME}" transformers drops the {" and ".join(dropped)} of {kind.__name__} on this '
        "device, without a word: the model's own results are wrong. This package's attention has them, and the "
        f'comparison on the first batch takes it out, because it differs. Choose attn_implementation="{other}"'
    )
