"""Replaces `nn.Embedding`, and embeddings that multiply its rows by a scale (Gemma)."""

import copy
import functools
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from ...ops.embedding import embedding
from ..classes import original_class
from ..patch import PLAIN, PROBE_ERRORS, Patch, Scene, Site, no_plain, set_on_instance
from ..probe import MODES, Settings, agree, changed, repeatable, settings_of, trace_of, unseen

__all__ = ["EmbeddingPatch"]

_PROBE_IDS, _PROBE_ROWS, _PROBE_COLS = (3, 0, 6, 3), 7, 8
_IDS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class EmbeddingForm:
    """The scale that an embedding multiplies its rows by.

    Attributes:
        scale: the scale, if it is an attribute; without `scale` and `buffer` there is none.
        buffer: the buffer with the scale, which is read after each write to it, not at every call.
        settings: the other values that its code reads, when it was recognised.
    """

    scale: float | None
    buffer: str | None
    settings: Settings

    def __str__(self) -> str:
        if self.buffer is not None:
            return f"scale={self.buffer}"
        return "" if self.scale is None else f"scale={self.scale:g}"


def _asks_for_more(module: nn.Embedding) -> str | None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "it uses max_norm, scale_grad_by_freq or sparse gradients"
    return None


def _recognise(module: nn.Embedding) -> EmbeddingForm | str:
    if (reason := _asks_for_more(module)) is not None:
        return reason
    if original_class(module).forward is nn.Embedding.forward:
        return EmbeddingForm(None, None, settings_of(module))
    if (reason := trace_of(module, hooks=False)) is not None:
        return reason
    # Each buffer has a different number, so the result shows which one is the scale.
    numbers = {1.5 + i: name for i, (name, b) in enumerate(module.named_buffers()) if b.numel() == 1}
    with torch.device("cpu"):
        weight = torch.randn(_PROBE_ROWS, _PROBE_COLS, generator=torch.Generator("cpu").manual_seed(0)).bfloat16()
        buffers = {name: torch.tensor(number, dtype=torch.float32) for number, name in numbers.items()}
        ids = torch.tensor(_PROBE_IDS, dtype=torch.int64)

    def own(weight: torch.Tensor, training: bool = module.training) -> Any:
        twin: Any = copy.copy(module)
        twin.__class__ = original_class(module)
        given = {"_parameters": {"weight": weight}, "_buffers": buffers, "padding_idx": None, "training": training}
        twin.__dict__ = {**module.__dict__, **given}
        return twin.forward(ids)  # without hooks, which also run around the op

    with repeatable():
        try:
            with torch.no_grad(), torch.device("cpu"):
                out = own(weight)
        except PROBE_ERRORS as error:
            return f"its forward cannot be probed ({type(error).__name__})"
        for scale in (*numbers, *(v for v in vars(module).values() if isinstance(v, float))):
            if isinstance(out, torch.Tensor) and torch.equal(out, weight[ids] * _rounded(scale, weight.dtype)):
                found = functools.partial(_scaled, ids=ids, scale=scale)
                if all(agree(functools.partial(own, training=mode), found, weight.float()) for mode in MODES):
                    buffer = numbers.get(scale)
                    reason = unseen(module, known=buffer)
                    return reason or EmbeddingForm(scale if buffer is None else None, buffer, settings_of(module))
    return "it is not an embedding times a scale"


def _scaled(weight: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    return weight[ids] * scale


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Returns the scale as the model uses it: rounded to the weight's dtype."""
    return torch.tensor(scale, device="cpu", dtype=torch.float64).to(dtype).item()


_read: MutableMapping[torch.Tensor, tuple[int | None, float]] = WeakIdKeyDictionary()


def _number(buffer: Any) -> float | None:
    """Returns the value of a buffer with one number, read again only after a write; None: it cannot be read."""
    if type(buffer) is FakeTensor and buffer.numel() == 1:
        return 1.0  # a fake tensor computes nothing, and the kernels take any number
    if type(buffer) is not torch.Tensor or buffer.numel() != 1 or buffer.is_meta:
        return None
    known, version = _read.get(buffer), None if buffer.is_inference() else buffer._version
    if known is None or known[0] != version:
        known = _read[buffer] = version, float(buffer)
    return known[1]


class EmbeddingPatch(Patch):
    """Replaces token embeddings by `ops.embedding`."""

    op = "embedding"

    def recognise(self, module: nn.Module, scene: Scene) -> EmbeddingForm | str | None:
        if not isinstance(module, nn.Embedding):
            return None
        return set_on_instance(module) or _recognise(module)

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "it is given something else than ids"
        ids, form = args[0], site.form
        if type(ids) not in PLAIN or ids.dtype not in _IDS:
            return "its ids are no plain int64 or int32 tensor"
        if form.buffer is not None and _number(module._buffers.get(form.buffer)) is None:
            return f"its {form.buffer} has no number that can be read"
        return no_plain(module, "weight") or changed(module, form.settings)

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight, form = module._parameters["weight"], site.form
        scale = form.scale if form.buffer is None else _number(module._buffers[form.buffer])
        scale = None if scale is None else _rounded(scale, weight.dtype)
        return embedding(args[0], weight, padding_idx=module.padding_idx, scale=scale, backend=site.backend)

    def sizes(self, module: nn.Embedding, form: EmbeddingForm) -> tuple[torch.dtype, tuple[int, ...]]:
        return module.weight.dtype, (module.num_embeddings, module.embedding_dim)

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        return next((t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), 0)
