"""Calls the body of a model with one row of live tokens, so that nothing is computed for padding.

The body is the module that returns `last_hidden_state`. A batch `[B, L]` with a mask becomes `[1, n]` before the
embedding and `[B, L, H]` again after the last norm, with zeros at padding; a common prefix of rows is computed once
(`layout`). Attention alone knows the segments (`packed`), and code outside of the body sees no difference. A multimodal
module with such a body inside is a body, too, for batches of text alone: some of them make the masks of the inner one.

`proof` decides which bodies may be called with one row.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ...ops.attention import uploaded
from ...support.errors import one_line
from ...support.foreign import CACHES, drops_cache_without_gradients
from ...support.opaque import paused, traced
from ..call import CallSettings, current_call, generates
from ..classes import forward_of, original_class
from ..head import causal_lm
from ..patch import UNREPORTED, Attempts, HarmlessReason, LateRefusal, Patch, Reason, Scene, Site, set_on_instance
from ..undo import Undo
from .batch import Batch, BodyForward, hidden_of
from .caches import cache_field, can_promise, promised_cache
from .layout import Layout
from .mixed_rows import whose_loss
from .mixers import leave_padding_to_mixers, mixers_under_way
from .packed import Unserved, attend_by_segments, foreign_attention, under_way
from .proof import OUTPUTS, ROUTED, Proof, in_the_way, parts_of, proof_of, unproven, unserved_layers
from .savings import Savings
from .states import carry_by_segments, has_own_state_code
from .user_rows import ARGUMENTS, may_be_packed, rows_apart

__all__ = ["PaddingPatch", "draws_for_tokens", "outermost_body"]

_BATCH = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")


@dataclass(frozen=True)
class BodyForm:
    """A body that may be called with one row.

    Attributes:
        proof: the proof of its class.
        names: the parameters of its forward, in order.
        inner: the path of the text-only body; empty: itself.
        classifies: whether a classifier finds the position that it reads by ids: the last one that is no padding.
        label_shift: the number of positions between a label and the position that predicts it; 0: each token has a
            class.
        drops: whether training draws random numbers for each token (dropout).
        longest: the number of columns beyond which its rotation depends on the largest position; None: no limit.
        slow: whether its modules carry states by transformers' own operators.
        refused: by the circumstances of a call, the reason that a first call has shown, or None.
    """

    proof: Proof
    names: tuple[str, ...]
    inner: str
    classifies: bool
    label_shift: int
    drops: bool
    longest: int | None
    slow: bool = False
    refused: dict[Any, str | None] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        if self.proof.mixes:
            before = "; what is before a row's tokens by all modules" if self.proof.leading else ""
            return f"padding is computed by {', '.join(sorted(each.__name__ for each in self.proof.attention))}{before}"
        parts = []
        if self.proof.by_columns is not None:
            parts.append(f"positions count {'columns' if self.proof.by_columns else 'live tokens'}")
        if self.proof.carried:
            parts.append(f"states by segments in {', '.join(sorted(each.__name__ for each in self.proof.carried))}")
        return "; ".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The patch
# ---------------------------------------------------------------------------------------------------------------------


def body_of(model: nn.Module) -> Any:
    """Returns the module that computes `last_hidden_state`, or None."""
    owner = causal_lm(model)[1]
    if owner is None:
        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    body = None if owner is None or not hasattr(owner, "get_decoder") else owner.get_decoder()
    # transformers 4 returns no decoder for a model without a head.
    body = owner.base_model if body is None and isinstance(owner, PreTrainedModel) else body
    # Some models return their text model, head included, as their decoder.
    if isinstance(body, PreTrainedModel) and body.get_output_embeddings() is not None:
        return body.base_model
    return body


def _wraps(module: nn.Module, body: Any) -> bool:
    """Whether a module is multimodal and has a text-only body inside."""
    if not isinstance(module, PreTrainedModel) or not isinstance(body, PreTrainedModel):
        return False
    composite = type(module.config) is not type(body.config) and module.get_output_embeddings() is None
    return composite and module is not body and any(part is body for part in module.modules())


def outermost_body(model: nn.Module) -> nn.Module:
    """Returns the outermost module that reads a batch before its loss; the model itself where that is not known."""
    body = body_of(model)
    return next((part for part in model.modules() if part is body or _wraps(part, body)), model)


def _longest(config: Any) -> int | None:
    """Returns the number of columns beyond which a rotation depends on the largest position of a batch, or None."""
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    text = json.dumps(rotation, default=str)
    if "dynamic" not in text and "longrope" not in text:
        return None
    lengths = [v for v in (rotation.get("original_max_position_embeddings"),
                           getattr(config, "original_max_position_embeddings", None),
                           getattr(config, "max_position_embeddings", None)) if isinstance(v, int)]  # fmt: skip
    return min(lengths, default=0)


def draws_for_tokens(config: Any, modules: Iterable[nn.Module]) -> bool:
    """Whether training draws random numbers for each token: rows that share tokens would share them."""
    numbers = (v for name, v in vars(config).items() if ("drop" in name or "jitter" in name) and isinstance(v, float))
    return any(numbers) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules)


class PaddingPatch(Patch):
    """Makes the body of a model skip padding, with `ops.varlen_attention`."""

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
            return HarmlessReason("no body of a transformers model found")
        names = tuple(inspect.signature(kind.forward).parameters)[1:]
        if not {"input_ids", "attention_mask"} <= {*names, *_passed_on(kind)}:
            return _NO_BATCH
        if getattr(module.config, "is_encoder_decoder", False):
            return "it has an encoder"
        if (reason := set_on_instance(module)) is not None:
            return reason
        body: Any = body_of(scene.model)
        inner = next(path for path, part in module.named_modules() if part is body)
        if inner and "position_ids" not in names:
            return HarmlessReason("its forward takes no positions: the text-only body inside decides for itself")
        proof = proof_of(module, inner)
        if not isinstance(proof, str):
            proof = unproven(body, proof) or proof
        if isinstance(proof, str):
            # The short report omits a module around a body, since the body has its own line.
            return HarmlessReason(proof, proof.attempts if isinstance(proof, Reason) else ()) if inner else proof
        owners = [original_class(m).__name__ for m in scene.model.modules() if isinstance(m, PreTrainedModel)]
        classifies, tokens, answers = (
            any(name.endswith(f"For{task}") for name in owners)
            for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
        )
        if answers:
            return "its head compares all places of a row, padding among them"
        drops = draws_for_tokens(body.config, body.modules())
        slow = bool(proof.carried) and has_own_state_code(body)
        return BodyForm(proof, names, inner, classifies, int(not tokens), drops, _longest(body.config), slow)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        if site.progress is None:
            site.beside = str(site.form) if site.form.proof.mixes else ""
            site.progress = Savings(beside=site.beside)
            _savings[:] = [*(ref for ref in _savings if ref() is not None), weakref.ref(site.progress)]
        settings.shares = not site.form.drops and not site.form.proof.mixes
        if site.form.proof.mixes:
            leave_padding_to_mixers(module.get_submodule(site.form.inner), undo)
        else:
            attend_by_segments(module, site.form.inner, undo)
            if site.form.proof.carried:
                carry_by_segments(module.get_submodule(site.form.inner), undo)

    def own(self, site: Site) -> Callable[..., Any]:
        # In a compiled model the forward around a body is no part of its graphs (`head.graphs`), and the body is one.
        return traced(forward_of(site.kind))

    def detail(self, site: Site) -> str:
        return str(site.form)

    def attempts(self, form: BodyForm) -> Attempts:
        return form.proof.attempts

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        form: BodyForm = site.form
        if site.progress.read:
            return str(site.progress.read)
        given = _given(form, args, kwargs)
        mask, config = given.get("attention_mask"), module.config.get_text_config()
        packed, full = mask is None, _taken_for_full(form, given)
        if paused():
            return "it is compiled"
        if under_way() or mixers_under_way() or generates() or (packed and not full and not may_be_packed(given)):
            return UNREPORTED
        ids, rows = given.get("input_ids"), _rows_of(given)
        # Under fit another function counts what PyTorch's allocates.
        counted = full and isinstance(rows, FakeTensor)
        if not counted and (reason := foreign_attention(config._attn_implementation)) is not None:
            return reason
        if any(given.get(name) is not None for name in CACHES):
            return "it is given a cache of keys and values" if torch.is_grad_enabled() else UNREPORTED
        if mask is None:
            # Of the shape that a mask would have.
            mask = given["position_ids"] if not full else rows if rows.dim() == 2 else rows[..., 0]
        elif not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return "its mask does not mark tokens" if torch.is_grad_enabled() else UNREPORTED
        if not isinstance(rows, torch.Tensor) or rows.shape[:2] != mask.shape or (ids is not None and rows is not ids):
            return "its mask is not of the shape of its tokens"
        mixes = form.proof.mixes
        if (
            not mixes
            and _caches(module, config, given.get("use_cache"))
            and not _may_promise(form, module, config, given)
        ):
            return "a cache is asked for (use_cache)" if torch.is_grad_enabled() else UNREPORTED
        for name in OUTPUTS:
            asked = given.get(name)
            if asked is None:
                asked = getattr(config, name, False)
            if asked and not (name == ROUTED and form.proof.routed):
                return f"its {name.removeprefix('output_')} are asked for"
        positions = given.get("position_ids")
        if not mixes and positions is not None and (positions.dim() != 2 or positions.shape[-1] != mask.shape[-1]):
            return "it is given positions in several dimensions"
        for name, value in given.items():
            numbers = value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, dict | list | tuple)
            if numbers and name not in _BATCH and not (packed and name in ARGUMENTS):
                # The text-only body inside gets no images, and decides for itself.
                return UNREPORTED if form.inner else f"it is given {name}"
        if getattr(module, "_is_replica", False):
            return "threads run copies of it, which share a configuration (DataParallel)"
        if not mixes and form.longest is not None and mask.shape[-1] > form.longest:
            return "its rotation depends on the longest row"
        if form.classifies and (ids is None or config.pad_token_id is None):
            return "the classifier finds its token by ids, and this call has none, or no padding"
        if (reason := in_the_way(module.get_submodule(form.inner), form.proof)) is not None:
            return reason
        circumstances = _circumstances(module, rows)
        if not mixes and circumstances not in form.refused:
            # Under autocast and with FSDP2's mixed precision layers attend in another dtype than that of their
            # parameters; for the latter it is known only when they do.
            dtype = circumstances[-1] or next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            if dtype is not None and not isinstance(module, FSDPModule):
                text = module.get_submodule(form.inner)
                form.refused[circumstances] = unserved_layers(form.proof, text, rows.device, dtype, site.backend)
        return form.refused.get(circumstances)

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        form: BodyForm = site.form
        given = _given(form, args, kwargs)
        call = current_call()
        labels = None if call is None else call.labels
        # Adapters with a dropout of their own may have been added since.
        config = module.config.get_text_config()
        drops = module.training and (
            form.drops or draws_for_tokens(config, parts_of(module.get_submodule(form.inner))[0])
        )
        padding = config.pad_token_id if form.classifies else None
        scored = None if call is None else call.scored
        share = not drops and not form.proof.mixes
        packed = given.get("attention_mask") is None
        batch: Any
        if full := _taken_for_full(form, given):
            batch = Batch.full(given)
        elif packed:
            batch = Batch.of_packed(given)
        else:
            batch = Batch.of(
                given, labels, share=share, padding=padding, label_shift=form.label_shift, scored=scored,
                leading=form.proof.leading,
            )  # fmt: skip
        if isinstance(batch, str):
            return LateRefusal(batch)
        positions = batch.shape[0] * batch.shape[1]
        saved = positions - batch.computed
        worth = saved > 0 if not form.proof.mixes else saved >= _WORTH * positions
        # The model's own code may not keep apart rows that a collator has packed.
        worth = worth or _is_slow(form, _rows_of(given)) or (packed and len(batch.layout.lengths) > batch.shape[0])
        bodies = None if call is None else call.settings.bodies
        try:
            out = None if bodies is None else bodies.call(batch, BodyForward.of(site, module))
            if out is not None:
                pass
            elif not worth:
                return LateRefusal(UNREPORTED)
            elif form.proof.mixes and packed:
                _, apart = rows_apart(given, batch.layout.lengths)
                if "position_ids" not in {*form.names, *kwargs}:
                    del apart["position_ids"]
                out, _ = Batch.of(apart, None, share=False).beside_mixers(site.kind, module, batch.shape)
            elif form.proof.mixes:
                out, _ = batch.beside_mixers(site.kind, module)
            else:
                out, _ = batch.through(site.kind, module, form.inner, form.proof.by_columns, site.backend)
        except Unserved as error:
            rows = given.get("inputs_embeds")
            if error.lasts:
                form.refused[_circumstances(module, given["input_ids"] if rows is None else rows)] = str(error)
            return LateRefusal(str(error))
        except (RuntimeError, IndexError) as error:
            # Tensors of the batch's shape that a module adds do not go with a row. Running out of memory, and other
            # subclasses of these errors, are no matter of shapes.
            if type(error) not in (RuntimeError, IndexError):
                raise
            return LateRefusal(f"its code takes no packed row: {one_line(error, 120)}")
        if form.proof.cache is not None and _caches(module, config, given.get("use_cache")):
            cache = promised_cache(site.kind, form.proof.cache, module, given)
            out = type(out)(**{**out, cache_field(out): cache})
        savings = site.progress
        savings.positions += positions
        savings.live += batch.layout.live
        savings.computed += batch.computed
        if packed and (rows := len(batch.layout.lengths)) > batch.shape[0] and not full:
            savings.packed += rows
            savings.mixed = whose_loss(module, form.inner, _caches(module, config, given.get("use_cache")))
        if saved and hidden_of(out).requires_grad:
            savings.trained += 1
            if savings.trained <= _FIRST or savings.trained % _EVERY == 0:
                return _watched(out, batch.layout)
        return out


def _given(form: BodyForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a body's call by name. Without a mask, position ids that the model got and did not pass
    on are among them, because they may separate rows."""
    given = dict(zip(form.names, args, strict=False), **kwargs)
    call = current_call()
    kept = None if call is None or "position_ids" in form.names else call.positions
    if kept is not None and given.get("attention_mask") is None:
        given.setdefault("position_ids", kept)
    return given


def _taken_for_full(form: BodyForm, given: dict[str, Any]) -> bool:
    """Whether rows with neither a mask nor position ids are packed, since none of them has padding. `fit`, whose ids
    have no numbers and no device, asks for what an accelerator computes."""
    rows, call = _rows_of(given), current_call()
    if given.get("attention_mask") is not None or form.proof.mixes:
        return False
    captured = call is not None and call.settings.bodies is not None  # such rows alone are captured
    if isinstance(rows, FakeTensor):
        return call is not None and call.settings.full and (captured or form.slow)
    return (captured or _is_slow(form, rows)) and given.get("position_ids") is None and torch.is_grad_enabled()


def _passed_on(kind: Any) -> tuple[str, ...]:
    """Returns the arguments that a model passes to its body although the body's forward has no parameter of that name:
    the mask of xLSTM, which reads none."""
    takes_any = inspect.Parameter.VAR_KEYWORD in (p.kind for p in inspect.signature(kind.forward).parameters.values())
    return ("attention_mask",) if takes_any and getattr(kind, "_is_stateful", False) else ()


_DROPS_ANYWAY = drops_cache_without_gradients()
_NO_BATCH = "its forward takes no ids and mask"
_WORTH = 0.1
"""The fraction of positions that must be padding for mixers to be called apart. Around a mixer the
hidden states are copied twice, which must cost less than what is saved. The fraction is a guess, and not measured."""
_READ = "the loss reads hidden states of padding (a gradient arrived at their positions)"
_FIRST, _EVERY = 2, 64
"""The backward passes that are observed: the first ones, and one in so many. The host waits for each of these."""
_savings: list[weakref.ref[Savings]] = []


def _watched(out: Any, where: Layout) -> Any:
    """Returns the output with a hook that looks for gradients at padding. Padding gets the hidden state of a token:
    between the zeros of two models a loss may have no gradient."""
    hidden = hidden_of(out)
    empty = uploaded(where.tokens < 0, hidden.device).view(*hidden.shape[:-1], 1)
    token = hidden.detach().flatten(0, -2)[int(where.places[0])]
    hidden = torch.where(empty, token, hidden)
    hidden.register_hook(functools.partial(_arrived, empty))
    if isinstance(out, tuple):
        return (hidden, *out[1:])
    out.last_hidden_state = hidden
    return out


def _arrived(empty: torch.Tensor, gradient: torch.Tensor) -> None:
    """Makes all patched bodies compute padding from then on: a loss that reads padding in one model compares it with
    that of others (a reference, a teacher)."""
    if isinstance(gradient, FakeTensor) or gradient.device.type == "meta":
        return
    # After an overflow a masked position may have a NaN: 0 times infinity.
    if not bool(((gradient != 0) & gradient.isfinite() & empty).any()):
        return
    for each in filter(None, (ref() for ref in _savings)):
        each.read = _READ
    warnings.warn(
        f"{_READ}; padding was left out so far, and this step's gradients lack it. From the next forward on padding "
        "is computed, in every patched model of this process. Give the loss a mask, or leave varlen_attention out of "
        "ops.",
        RuntimeWarning,
        stacklevel=2,
    )


def _rows_of(given: dict[str, Any]) -> Any:
    return given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]


def _is_slow(form: BodyForm, rows: Any) -> bool:
    """Whether rows without padding are worth packing, too: transformers' own operators of a state keep 15 times the
    memory on an accelerator (docs/padding.md). `fit`, whose ids have no device, asks for an accelerator's."""
    if isinstance(rows, FakeTensor):
        call = current_call()
        return form.slow and call is not None and call.settings.full
    return form.slow and isinstance(rows, torch.Tensor) and _device_of(rows).type != "cpu"


def _device_of(rows: torch.Tensor) -> torch.device:
    return rows.device


def _caches(module: nn.Module, config: Any, asked: bool | None) -> bool:
    """Whether a call returns a KV cache."""
    if asked is not None or not config.use_cache:
        return bool(asked)
    call = current_call()
    if not module.training:
        return call is None or call.settings.eval_caches
    checkpoints = getattr(module, "gradient_checkpointing", False) and (torch.is_grad_enabled() or _DROPS_ANYWAY)
    return not (checkpoints or (call is not None and not call.settings.caches))


def _may_promise(form: BodyForm, module: nn.Module, config: Any, given: dict[str, Any]) -> bool:
    """Whether a cache that was not requested by name may be computed when code reads it."""
    asked = given.get("return_dict")
    named = vars(module)["config"].return_dict if asked is None else bool(asked)
    trains = module.training and torch.is_grad_enabled() and given.get("use_cache") is None
    return bool(trains and named and form.proof.cache is not None and can_promise(module))


def _circumstances(module: nn.Module, rows: torch.Tensor) -> tuple[Any, ...]:
    """Returns the properties of a call that decide, besides the module, whether its layers can attend by segments."""
    kind = rows.device.type
    return kind, module.training, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
