"""Nothing is computed for padding: the body of a model is handed one row of live tokens.

The body is what makes `last_hidden_state`. A batch `[B, L]` with a mask becomes `[1, n]` before the embedding and
`[B, L, H]` again after the last norm, with zeros where there was padding; a beginning that rows have in common is
computed once (`_layout`). Attention alone knows of segments (`_packed`), and nothing outside of the body knows at all.
What reads images beside text and has such a body inside is a body, too, for batches of text alone: some of them make
the masks for the one inside.

Whether a body's code allows that is proven where the kernels are applied, and not on its own weights, which may be
sharded, quantised or not there yet: a miniature of its class (`_miniature`), on a CPU in fp32, is given a batch that is
padded on both sides, the one way and the other. What carries state along a row, counts positions in another way or
attends by code of its own gives other numbers, or raises, and stays as it is. So does a body with a module that its
miniature lacks.
"""

from __future__ import annotations

import copy
import inspect
import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from .._opaque import paused, traced
from ..ops._segments import Segments
from ..ops._shared_rows import Shared, take, uploaded
from ..ops.varlen_attention import unserved
from ._call import CallSettings, current_call
from ._classes import original_class
from ._head import causal_lm
from ._layout import DEAD, PREDICTS, READ, Layout, layout
from ._miniature import VOCABULARY, miniature, miniature_around, small_config
from ._packed import Asked, Packing, Unserved, attend_by_segments, packed, under_way
from ._patch import PROBE_ERRORS, QUIET, Aside, Late, Patch, Scene, Site, set_on_instance
from ._undo import Undo

__all__ = ["BodyForm", "PaddingPatch", "Savings"]

_BATCH = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
_TOLERANCE = 1e-4
"""Of the greatest value, between the two ways of a miniature in fp32. Rounding makes about 1e-6 of it, and a token that
sees what it must not see more than 1e-2: its weights are as large as that needs."""


@dataclass
class Savings:
    """What became of the positions of the batches that were packed.

    Attributes:
        positions: all of them.
        live: those with a token.
        computed: tokens that went through the body.
    """

    positions: int = 0
    live: int = 0
    computed: int = 0

    def __str__(self) -> str:
        if not self.positions:
            return ""
        shared = 1 - self.computed / self.live
        return f"{self.live / self.positions:.0%} of the positions were live" + (
            f", {shared:.0%} of their tokens in a shared beginning" if shared else ""
        )


@dataclass(frozen=True)
class Proof:
    """What a miniature has shown.

    Attributes:
        by_columns: whether positions count columns, padding included; else live tokens.
        attention: the classes of the modules that attend.
        classes: of all of its modules, each with the forward that it had.
        asked: what its attention asked for.
    """

    by_columns: bool
    attention: frozenset[type[nn.Module]] = frozenset()
    classes: frozenset[tuple[type[nn.Module], Any]] = frozenset()
    asked: frozenset[Asked] = frozenset()


@dataclass(frozen=True)
class BodyForm:
    """A body that may be handed one row.

    Attributes:
        proof: of its class.
        names: the parameters of its forward, in order.
        inner: path of the body of text alone; empty: itself.
        classifies: whether what is read outside is found by ids: the last one that is no padding.
        drops: whether numbers are drawn for each token in training (dropout).
        longest: columns beyond which its rotation depends on how far positions go; None: none.
        refused: reasons that a first call has shown, or None, by the circumstances of the call.
        hooked: attention modules that attend by segments.
    """

    proof: Proof
    names: tuple[str, ...]
    inner: str
    classifies: bool
    drops: bool
    longest: int | None
    refused: dict[Any, str | None] = field(default_factory=dict, compare=False)
    hooked: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet, compare=False)

    def __str__(self) -> str:
        return f"positions count {'columns' if self.proof.by_columns else 'live tokens'}"


# ---------------------------------------------------------------------------------------------------------------------
# The proof
# ---------------------------------------------------------------------------------------------------------------------


def _probe() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a batch padded left, right and on both sides; some rows begin alike, in a tree of two levels."""
    ids = torch.randint(3, VOCABULARY, (6, 24), generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    mask = torch.ones_like(ids)
    for row, (begin, end) in enumerate(((5, 24), (5, 20), (5, 23), (0, 13), (3, 20), (0, 24))):
        mask[row, :begin] = mask[row, end:] = 0
    ids[1, :14], ids[2, :18] = ids[0, :14], ids[0, :18]
    return ids, mask


def _hidden(out: Any) -> torch.Tensor:
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out.last_hidden_state
    return hidden


def _as_key(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


_proofs: dict[tuple[type, Any, str], Proof | str] = {}


def _proof(body: Any, inner: str) -> Proof | str:
    """What a miniature of a class shows, or why the class is left alone; shown once for a class and a configuration."""
    kind, text = original_class(body), body.get_submodule(inner)
    small = small_config(text.config)
    vars(small).update({name: False for name in _OUTPUTS if name in vars(small)})
    small._attn_implementation = "sdpa" if text.config._attn_implementation == "sdpa" else "eager"
    # Some libraries exchange the forwards of classes.
    key = (kind, kind.forward, _as_key(small) + small._attn_implementation)
    if key not in _proofs:
        _proofs[key] = _shown(body, inner, small)
    return _proofs[key]


def _miniature(body: Any, inner: str, small: Any) -> Any:
    made = miniature(original_class(body.get_submodule(inner)), small)
    if not inner:
        return made
    config = copy.deepcopy(body.config)
    text = config.get_text_config()
    vars(config).update({name: small for name, value in vars(config).items() if value is text})
    return miniature_around(original_class(body), config, inner, made)


def _shown(real: Any, inner: str, small: Any) -> Proof | str:
    kind: Any = original_class(real)
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    ids, mask = _probe()
    live = mask.bool()
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "labels" in names:
        given["labels"] = ids.masked_fill(~live, -100)
    try:
        body = _miniature(real, inner, small)
        with torch.no_grad(), torch.device("cpu"):
            wanted = _hidden(body(**given))
    except PROBE_ERRORS as error:
        return f"no miniature of it can be made: {_line(error)}"
    if wanted.shape[:2] != ids.shape or not wanted[live].isfinite().all():
        return "a miniature of it gives no hidden state for each token"
    reason = ""
    for by_columns in (True, False):
        form = BodyForm(Proof(by_columns), names, inner, False, False, None)
        try:
            with torch.no_grad(), torch.device("cpu"):
                got = _Batch.of(given, None, share=True).through(kind, body, form, "torch")
        except Unserved as error:
            return str(error)
        except PROBE_ERRORS as error:
            return f"its code takes no packed row: {_line(error)}"
        out, packing = got
        if not packing.attended:
            return "its attention is not transformers' own"
        far = (_hidden(out)[live] - wanted[live]).abs().max() / wanted[live].abs().max()
        if far <= _TOLERANCE:
            parts = map(original_class, body.get_submodule(inner).modules())
            classes = frozenset((kind, kind.forward) for kind in parts)
            return Proof(by_columns, frozenset(packing.attended), classes, frozenset(packing.asked))
        reason = f"tokens of a packed row are not what they are in their own (differs by {far:.0e})"
    return reason


def _unserved(
    proof: Proof, body: nn.Module, where: torch.device, dtype: torch.dtype, backend: str | None
) -> str | None:
    """Why the device cannot attend by segments as the layers ask for, known before any of them has begun."""
    layers: set[tuple[int, int, float]] = set()
    for module in body.modules():
        if _unsharded(module) in proof.attention:
            size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
            if type(size) is int:  # else the first call tells
                value = getattr(module, "v_head_dim", None) or size
                dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
                layers.add((size, value, dropout if isinstance(dropout, float) else 0.0))
    return next(filter(None, (
        unserved(where, dtype, (size, value), window=1 if window else None, softcap=softcap, sinks=sinks,
                 dropout=dropout, backend=backend)
        for window, softcap, sinks in proof.asked for size, value, dropout in layers
    )), None)  # fmt: skip


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _unproven(body: nn.Module, proof: Proof) -> str | None:
    """What a body has that its miniature has not, as a reason; None where there is nothing.

    Linear layers are that in whatever form (quantised, with adapters): they mix no tokens.
    """
    adapters: tuple[type, ...] = ()
    around: tuple[type, ...] = (nn.ModuleList, nn.ModuleDict)
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        # A wrapper calls the copy of its module that is trained: both are looked at.
        adapters, around = (BaseTunerLayer,), (*around, AuxiliaryTrainingWrapper)
    except ImportError:
        pass
    proven = dict(proof.classes)
    inside: set[nn.Module] = set()
    for path, module in body.named_modules():
        kind = _unsharded(module)
        base = next((cls for cls in kind.__mro__ if cls in proven), None)
        if module is not body and (reason := set_on_instance(module)) is not None:
            return f"{path}: {reason}"
        if module in inside or isinstance(module, around):
            continue
        if isinstance(module, adapters) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
            inside.update(module.modules())
        elif base is None or kind.forward is not proven[base]:
            return f"its {path} is a {kind.__name__}, which was not proven"
    return None


def _unsharded(module: nn.Module) -> type[nn.Module]:
    """The class of a module below what FSDP2 has derived from it."""
    kind = original_class(module)
    return kind if not issubclass(kind, FSDPModule) else next(cls for cls in kind.__bases__ if cls is not FSDPModule)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHAPELESS = frozenset(("npu_trainer_kernels", "torch", "transformers", "accelerate", "deepspeed"))
"""Packages whose hooks do with a packed row what they do with a batch; NEFTune's, in transformers, does not."""


def _parts(body: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Layers and what they are made of, and what stands beside them in a body. Below that the first layer stands for
    all, since this is looked at in every call."""
    beside = [child for child in body._modules.values() if child is not None]
    layers = [layer for child in beside if isinstance(child, nn.ModuleList) for layer in child]
    inner = [part for layer in layers[1:] for part in (layer, *layer._modules.values()) if part is not None]
    return [*(layers[0].modules() if layers else ()), *inner], beside


def _in_the_way(body: nn.Module) -> str | None:
    """What has been done to a body since it was proven that leaves no room for a packed row, or None."""
    layers, beside = _parts(body)
    for part in layers:
        # A graph has no packed row in it: it would be compiled anew for each.
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            return "its layers are compiled"
        if (reason := set_on_instance(part)) is not None:
            return f"its {original_class(part).__name__}: {reason}"
    for part in (*layers, *beside):
        for name in _HOOKS:
            for hook in getattr(part, name).values():
                function = getattr(hook, "func", hook)
                whose = (function.__module__ or "").partition(".")[0]
                if whose not in _SHAPELESS or getattr(function, "__name__", "") == "neftune_post_forward_hook":
                    return f"a hook of {whose} on its {original_class(part).__name__} may look at rows"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A batch
# ---------------------------------------------------------------------------------------------------------------------


def _positions(where: Layout, shape: tuple[int, int], by_columns: bool) -> np.ndarray:
    """The position that each packed token has in its own row."""
    rows, width = shape
    columns: np.ndarray = where.places % width
    if by_columns:
        return columns
    begins = (where.tokens.reshape(rows, width) >= 0).argmax(1)
    return columns - begins[where.places // width]


@dataclass(frozen=True)
class _Batch:
    """What a body was called with, and where its tokens go."""

    given: dict[str, Any]
    layout: Layout
    shape: tuple[int, int]

    @classmethod
    def of(cls, given: dict[str, Any], labels: torch.Tensor | None, *, share: bool, padding: int | None = None) -> Any:
        """Or why there is no layout, as a sentence; here the host waits for the device, once for a forward.

        Args:
            given: to the body.
            labels: given to the model, where there are some.
            share: whether beginnings may be shared.
            padding: the only id that a place without a token may have; None: any.
        """
        mask, ids = given["attention_mask"], given.get("input_ids")
        alive = mask.bool()
        if ids is None:
            seen = alive.long() - 1
        else:
            dead = DEAD if padding is None else torch.where(ids == padding, DEAD, READ)
            seen = torch.where(alive, ids.long(), dead)
        positions = given.get("position_ids")
        if share and ids is not None and positions is not None and len(positions) > 1:
            # Tokens are alike where they are told to stand at the same position.
            seen = torch.where(alive, seen | (positions.long() & 0x7FFF_FFFF) << 32, seen)
        if labels is not None and labels.shape == mask.shape:
            # The place before a label predicts it.
            lost = (labels[:, 1:] != -100) & ~alive[:, :-1]
            seen[:, :-1].masked_fill_(lost, PREDICTS)
        found = layout(seen.cpu().numpy(), share=share and ids is not None)
        return found if isinstance(found, str) else cls(given, found, tuple(mask.shape))

    @property
    def computed(self) -> int:
        """Tokens that go through the body."""
        return len(self.layout.places)

    def through(self, kind: Any, body: Any, form: BodyForm, backend: str | None) -> Any:
        """The body's output with its hidden states in the batch's shape, and what became of the packed row.

        Raises:
            Unserved: a layer asks for what attention by segments does not do.
        """
        given, where, (rows, width) = self.given, self.layout, self.shape
        mask = given["attention_mask"]
        device, n = mask.device, len(where.places)
        # Labels are for the head: what a body may do with them the proof would have shown.
        new = {name: v for name, v in given.items() if name != "labels"}
        new |= {"attention_mask": mask.new_ones(1, n), "use_cache": False}
        if given.get("inputs_embeds") is None:
            places = uploaded(where.places, device)
            new["input_ids"] = given["input_ids"].reshape(-1).index_select(0, places).unsqueeze(0)
        else:
            embedded = given["inputs_embeds"]
            packed_rows = Shared.make(where.places, rows * width, embedded.device)
            new["inputs_embeds"] = take(embedded.reshape(rows * width, -1), packed_rows).unsqueeze(0)
        positions = given.get("position_ids")
        if positions is None:
            counted = _positions(where, self.shape, form.proof.by_columns)
            new["position_ids"] = uploaded(counted, device).unsqueeze(0)
        else:
            places = uploaded(where.places, positions.device)
            new["position_ids"] = positions.expand(rows, width).reshape(-1).index_select(0, places).unsqueeze(0)
        keys = None if where.keys is None else Shared.make(where.keys, n, device)
        segments = Segments.make(where.lengths, device, None if keys is None else where.key_lengths, keys)
        packing = Packing(segments, backend)
        with packed((body.config.get_text_config(), body.get_submodule(form.inner).config), packing):
            out = kind.forward(body, **new)
        others = () if isinstance(out, tuple) else (name for name in out if name != "last_hidden_state")
        if (isinstance(out, tuple) and any(o is not None for o in out[1:])) or (name := next(iter(others), None)):
            raise Unserved(f"it returns {'more than hidden states' if isinstance(out, tuple) else name}")
        hidden = _hidden(out)
        tokens = Shared.make(where.tokens, n, hidden.device)
        padded = take(hidden[0], tokens).view(rows, width, -1)
        if isinstance(out, tuple):
            out = (padded, *out[1:])
        else:
            out.last_hidden_state = padded
        return out, packing


# ---------------------------------------------------------------------------------------------------------------------
# The patch
# ---------------------------------------------------------------------------------------------------------------------


def body_of(model: nn.Module) -> Any:
    """The module that makes `last_hidden_state`, or None."""
    owner = causal_lm(model)[1]
    if owner is None:
        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    body = None if owner is None or not hasattr(owner, "get_decoder") else owner.get_decoder()
    # Where there is no head transformers 4 does not know of a decoder.
    body = owner.base_model if body is None and isinstance(owner, PreTrainedModel) else body
    # Some call the text part of their model, head included, their decoder.
    if isinstance(body, PreTrainedModel) and body.get_output_embeddings() is not None:
        return body.base_model
    return body


def _wraps(module: nn.Module, body: Any) -> bool:
    """Whether a module reads something else beside text, and has the body for text inside."""
    if not isinstance(module, PreTrainedModel) or not isinstance(body, PreTrainedModel):
        return False
    composite = type(module.config) is not type(body.config) and module.get_output_embeddings() is None
    return composite and module is not body and any(part is body for part in module.modules())


def _longest(config: Any) -> int | None:
    """Columns beyond which a rotation depends on the longest position of a batch."""
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    text = json.dumps(rotation, default=str)
    if "dynamic" not in text and "longrope" not in text:
        return None
    lengths = [v for v in (rotation.get("original_max_position_embeddings"),
                           getattr(config, "original_max_position_embeddings", None),
                           getattr(config, "max_position_embeddings", None)) if isinstance(v, int)]  # fmt: skip
    return min(lengths, default=0)


def _drops(config: Any, modules: Iterable[nn.Module]) -> bool:
    """Whether numbers are drawn for each token in training: what rows share would then have the same for all."""
    numbers = (v for name, v in vars(config).items() if ("drop" in name or "jitter" in name) and isinstance(v, float))
    return any(numbers) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules)


class PaddingPatch(Patch):
    """The body of a model, by `ops.varlen_attention`."""

    op = "varlen_attention"

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        body = body_of(scene.model)
        if body is None:
            return [("", scene.model)]
        return [
            (path, module) for path, module in scene.model.named_modules() if module is body or _wraps(module, body)
        ]

    def recognise(self, module: Any, scene: Scene) -> BodyForm | str | None:
        kind: Any = original_class(module)
        if not isinstance(module, PreTrainedModel):
            return Aside("no body of a transformers model found")
        names = tuple(inspect.signature(kind.forward).parameters)[1:]
        if not {"input_ids", "attention_mask", "position_ids"} <= set(names):
            return "its forward takes no ids, mask and positions"
        if getattr(module.config, "is_encoder_decoder", False):
            return "it has an encoder"
        if getattr(kind, "_is_stateful", False):
            return "state runs along its rows"
        if (reason := set_on_instance(module)) is not None:
            return reason
        body: Any = body_of(scene.model)
        inner = next(path for path, part in module.named_modules() if part is body)
        proof = _proof(module, inner)
        if not isinstance(proof, str):
            proof = _unproven(body, proof) or proof
        if isinstance(proof, str):
            # Of what is around a body the report need not speak: that has its own line.
            return Aside(proof) if inner else proof
        owners = (original_class(m).__name__ for m in scene.model.modules() if isinstance(m, PreTrainedModel))
        classifies = any(name.endswith("ForSequenceClassification") for name in owners)
        drops = _drops(body.config, body.modules())
        return BodyForm(proof, names, inner, classifies, drops, _longest(body.config))

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        site.progress = site.progress or Savings()
        settings.shares = not site.form.drops
        for part in module.modules():
            if original_class(part) in site.form.proof.attention and part not in site.form.hooked:
                site.form.hooked.add(part)
                attend_by_segments(part, undo)

    def own(self, site: Site) -> Callable[..., Any]:
        # In a compiled model the forward around a body is no part of its graphs (`_compiled`), and the body is one.
        return traced(super().own(site))

    def detail(self, site: Site) -> str:
        return str(site.form)

    def tokens(self, *args: Any) -> int:
        return 0

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        form: BodyForm = site.form
        given = dict(zip(form.names, args, strict=False), **kwargs)
        mask, config = given.get("attention_mask"), module.config.get_text_config()
        if paused():
            return "it is compiled"
        if mask is None or under_way():
            return QUIET
        if given.get("past_key_values") is not None:
            return "it is given keys and values (past_key_values)" if torch.is_grad_enabled() else QUIET
        ids = given.get("input_ids")
        rows = ids if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return "its mask is none of tokens" if torch.is_grad_enabled() else QUIET
        if not isinstance(rows, torch.Tensor) or rows.shape[:2] != mask.shape or (ids is not None and rows is not ids):
            return "its mask is not of the shape of its tokens"
        if _caches(module, config, given.get("use_cache")):
            return "a cache is asked for (use_cache)" if torch.is_grad_enabled() else QUIET
        for name in _OUTPUTS:
            asked = given.get(name)
            if asked or (asked is None and getattr(config, name, False)):
                return f"its {name.removeprefix('output_')} are asked for"
        positions = given.get("position_ids")
        if positions is not None and (positions.dim() != 2 or positions.shape[-1] != mask.shape[-1]):
            return "it is given positions in several dimensions"
        for name, value in given.items():
            numbers = value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, dict | list | tuple)
            if numbers and name not in _BATCH:
                return f"it is given {name}"
        if getattr(module, "_is_replica", False):
            return "threads run copies of it, which share a configuration (DataParallel)"
        if form.longest is not None and mask.shape[-1] > form.longest:
            return "its rotation depends on the longest row"
        if form.classifies and (ids is None or config.pad_token_id is None):
            return "what is classified is found by ids, and here are none, or no padding"
        if (reason := _in_the_way(module.get_submodule(form.inner))) is not None:
            return reason
        circumstances = _circumstances(module, rows)
        if circumstances not in form.refused:
            # Under autocast and with FSDP2's mixed precision layers attend in another dtype than their parameters have;
            # the latter shows when they do.
            dtype = circumstances[-1] or next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            if dtype is not None and not isinstance(module, FSDPModule):
                text = module.get_submodule(form.inner)
                form.refused[circumstances] = _unserved(form.proof, text, rows.device, dtype, site.backend)
        return form.refused.get(circumstances)

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        form: BodyForm = site.form
        given = dict(zip(form.names, args, strict=False), **kwargs)
        call = current_call()
        labels = None if call is None else call.labels
        # Adapters may have come since, with a dropout of their own.
        config = module.config.get_text_config()
        drops = module.training and (form.drops or _drops(config, _parts(module.get_submodule(form.inner))[0]))
        padding = config.pad_token_id if form.classifies else None
        batch = _Batch.of(given, labels, share=not drops, padding=padding)
        if isinstance(batch, str):
            return Late(batch)
        positions = batch.shape[0] * batch.shape[1]
        if batch.computed == positions:
            return Late(QUIET)
        try:
            out, _ = batch.through(site.kind, module, form, site.backend)
        except Unserved as error:
            rows = given.get("inputs_embeds")
            if error.lasts:
                form.refused[_circumstances(module, given["input_ids"] if rows is None else rows)] = str(error)
            return Late(str(error))
        savings = site.progress
        savings.positions += positions
        savings.live += batch.layout.live
        savings.computed += batch.computed
        return out


def _caches(module: nn.Module, config: Any, asked: bool | None) -> bool:
    """Whether a call returns keys and values."""
    if asked is not None or not config.use_cache:
        return bool(asked)
    call = current_call()
    unread = getattr(module, "gradient_checkpointing", False) or (call is not None and not call.settings.caches)
    return not (module.training and unread)


def _circumstances(module: nn.Module, rows: torch.Tensor) -> tuple[Any, ...]:
    """What decides, beside the module, whether its layers can attend by segments."""
    kind = rows.device.type
    return kind, module.training, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
