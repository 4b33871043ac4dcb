"""Embedding modules: `nn.Embedding`, and those that multiply its rows by a scale (Gemma)."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.embedding import embedding
from ._agreement import MODES, agree, repeatable
from ._classes import original_class
from ._patch import PLAIN, PROBE_ERRORS, Patch, Scene, Site, no_plain, set_on_instance

__all__ = ["EmbeddingPatch"]

_PROBE_IDS, _PROBE_ROWS, _PROBE_COLS = (3, 0, 6, 3), 7, 8
_IDS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class EmbeddingForm:
    """What an embedding multiplies its rows by; None: nothing."""

    scale: float | None

    def __str__(self) -> str:
        return "" if self.scale is None else f"scale={self.scale:g}"


def _numbers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, b) for name, b in module.named_buffers() if b.numel() == 1 and b.device.type != "meta"]


def _scales(module: nn.Module) -> list[float]:
    """Every number that a module could multiply by: its float attributes and its one-element buffers."""
    return [v for v in vars(module).values() if isinstance(v, float)] + [float(b) for _, b in _numbers(module)]


def _asks_for_more(module: nn.Embedding) -> str | None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it uses max_norm, scale_grad_by_freq or sparse gradients"
    return None


def _recognise(module: nn.Embedding) -> EmbeddingForm | str:
    if reason := _asks_for_more(module):
        return reason
    if original_class(module).forward is nn.Embedding.forward:
        return EmbeddingForm(None)
    with torch.device("cpu"):
        weight = torch.randn(_PROBE_ROWS, _PROBE_COLS, generator=torch.Generator("cpu").manual_seed(0)).bfloat16()
        buffers = {name: torch.tensor(float(b), dtype=torch.float32) for name, b in _numbers(module)}
        ids = torch.tensor(_PROBE_IDS, dtype=torch.int64)

    def own(weight: torch.Tensor, training: bool = module.training) -> Any:
        twin: Any = copy.copy(module)
        twin.__class__ = original_class(module)
        given = {"_parameters": {"weight": weight}, "_buffers": buffers, "padding_idx": None, "training": training}
        twin.__dict__ = {**module.__dict__, **given}
        return twin.forward(ids)  # without hooks, which are called beside the op as well

    with repeatable():
        try:
            with torch.no_grad(), torch.device("cpu"):
                out = own(weight)
        except PROBE_ERRORS as error:
            return f"its forward cannot be probed ({type(error).__name__})"
        for scale in _scales(module):
            if isinstance(out, torch.Tensor) and torch.equal(out, weight[ids] * _rounded(scale, weight.dtype)):
                found = functools.partial(_scaled, ids=ids, scale=scale)
                if all(agree(functools.partial(own, training=mode), found, weight.float()) for mode in MODES):
                    return EmbeddingForm(scale)
    return "it is not an embedding times a scale"


def _scaled(weight: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    return weight[ids] * scale


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """The scale as the model has it: rounded to its weight's dtype."""
    return torch.tensor(scale, device="cpu", dtype=torch.float64).to(dtype).item()


class EmbeddingPatch(Patch):
    """Token embeddings by `ops.embedding`."""

    op = "embedding"

    def recognise(self, module: nn.Module, scene: Scene) -> EmbeddingForm | str | None:
        if not isinstance(module, nn.Embedding):
            return None
        return set_on_instance(module) or _recognise(module)

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "it is given something else than ids"
        if reason := _asks_for_more(module):
            return reason
        ids = args[0]
        if type(ids) not in PLAIN or ids.dtype not in _IDS:
            return "its ids are no plain int64 or int32 tensor"
        return no_plain(module, "weight")

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module._parameters["weight"]
        scale = None if site.form.scale is None else _rounded(site.form.scale, weight.dtype)
        return embedding(args[0], weight, padding_idx=module.padding_idx, scale=scale, backend=site.backend)

    def sizes(self, module: nn.Embedding, form: EmbeddingForm) -> tuple[torch.dtype, tuple[int, ...]]:
        return module.weight.dtype, (module.num_embeddings, module.embedding_dim)

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        return next((t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), 0)
