"""Embedding modules: `nn.Embedding`, and those that multiply its rows by a scale (Gemma)."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..ops.embedding import embedding
from ._classes import original_class, subclass_with_forward

__all__ = ["patched_embedding_class", "recognise_embedding"]

_PROBE_IDS, _PROBE_ROWS, _PROBE_COLS = (3, 0, 6, 3), 7, 8


def _numbers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, b) for name, b in module.named_buffers() if b.numel() == 1 and b.device.type != "meta"]


def _scales(module: nn.Module) -> list[float]:
    """Every number that a module could multiply by: its float attributes and its one-element buffers."""
    return [v for v in vars(module).values() if isinstance(v, float)] + [float(b) for _, b in _numbers(module)]


def recognise_embedding(module: nn.Embedding) -> float | str | None:
    """The scale of an embedding (None: none), or why it is left alone (a sentence)."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it uses max_norm, scale_grad_by_freq or sparse gradients"
    if original_class(module).forward is nn.Embedding.forward:
        return None
    twin: Any = copy.copy(module)
    twin.__class__ = original_class(module)
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(_PROBE_ROWS, _PROBE_COLS, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    buffers = {name: torch.tensor(float(b), dtype=torch.float32, device="cpu") for name, b in _numbers(module)}
    twin.__dict__ = {
        **module.__dict__,
        "_parameters": {"weight": nn.Parameter(weight, requires_grad=False)},
        "_buffers": buffers,
        "padding_idx": None,
    }
    ids = torch.tensor(_PROBE_IDS, device="cpu")
    try:
        with torch.no_grad():
            out = twin(ids)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"its forward cannot be probed ({type(error).__name__})"
    for scale in _scales(module):
        if isinstance(out, torch.Tensor) and torch.equal(out, weight[ids] * _rounded(scale, weight.dtype)):
            return scale
    return "it is not an embedding times a scale"


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """The scale as the model has it: rounded to its weight's dtype."""
    return torch.tensor(scale, dtype=torch.float32, device="cpu").to(dtype).item()


@functools.cache
def _forward(scale: float | None, backend: str | None) -> Callable[..., Any]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        rounded = None if scale is None else _rounded(scale, self.weight.dtype)
        return embedding(input, self.weight, padding_idx=self.padding_idx, scale=rounded, backend=backend)

    return forward


def patched_embedding_class(module: nn.Module, scale: float | None, backend: str | None) -> type[nn.Module]:
    """The class to give to a recognised module."""
    cls: Any = original_class(module)
    return subclass_with_forward(cls, _forward(scale, backend))
