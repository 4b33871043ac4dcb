"""Functions that rotate queries and keys, known by what they compute."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.rope import rope, rope_reference
from ._patch import PROBE_ERRORS, no_float

__all__ = ["RopeForm", "rope_form", "rotated"]


@dataclass(frozen=True)
class RopeForm:
    """How a function rotates."""

    def __str__(self) -> str:
        return ""

    def declines(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call is not for the op, or None."""
        if len(args) != 4 or kwargs:
            return "more than queries, keys and tables is given"
        q, k, cos, sin = args
        for tensor in args:
            if (reason := no_float(tensor)) is not None:
                return reason
        if cos.requires_grad or sin.requires_grad:
            return "tables that learn"
        if (
            q.dim() != 4
            or k.dim() != 4
            or cos.dim() != 3
            or cos.shape[-1] != q.shape[-1]
            or cos.shape[-2] != q.shape[-2]
        ):
            return "heads, or tables, in another place or of another width"
        return None


@functools.cache
def rope_form(function: Callable[..., Any]) -> RopeForm | None:
    """The form of a function that computes what `rope` does, bit for bit, on bf16 and fp32."""
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, cos, sin = (
        torch.randn(s, generator=generator, dtype=torch.float32, device="cpu")
        for s in ((2, 3, 4, 8), (2, 1, 4, 8), (2, 4, 8), (2, 4, 8))
    )
    for dtype in (torch.float32, torch.bfloat16):
        arguments = [t.to(dtype) for t in (q, k, cos, sin)]
        try:
            out = function(*arguments)
        except PROBE_ERRORS:
            return None
        expected = rope_reference(*arguments)
        if not (isinstance(out, tuple) and len(out) == 2 and all(map(torch.equal, out, expected))):
            return None
    return RopeForm()


def rotated(form: RopeForm, *args: Any, backend: str | None, **kwargs: Any) -> Any:
    """An accepted call by `ops.rope`."""
    return rope(*args, backend=backend)
