"""Verifies that a body may be called with one packed row.

This happens where the kernels are applied, and not with the body's own weights, which may be sharded, quantised or not
loaded yet: a miniature of its class (`probe.miniature`), on a CPU in fp32, computes a batch that is padded on both
sides, padded and packed, in evaluation and in training. A body that carries state along a row, counts positions in
another way or attends by code of its own gives other numbers, or raises, and is left alone. So is a body with a module
that its miniature lacks. Every call checks for later changes of a body.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import Cache

from ...support.errors import one_line
from ..classes import GLOBAL_HOOKS, has_hooks, original_class
from ..parallel import mixes_tokens
from ..patch import PROBE_ERRORS, Attempts, Reason
from ..probe import (
    MODES,
    VOCABULARY,
    agree,
    beyond_one_run,
    miniature,
    miniature_around,
    repeatable,
    small_config,
    trace_of_class,
    trace_of_function,
)
from ..undo import Undo
from .batch import Batch, hidden_of, routers_of
from .caches import cache_of
from .mixers import leave_padding_to_mixers
from .packed import Asked, Unserved, attend_by_segments, foreign_attention, why_not
from .states import carry_by_segments

__all__ = [
    "OUTPUTS",
    "ROUTED",
    "TOLERANCE",
    "Proof",
    "in_the_way",
    "key_of",
    "miniature_of",
    "parts_of",
    "proof_of",
    "small_of",
    "unproven",
    "unserved_layers",
]

ROUTED = "output_router_logits"
OUTPUTS = ("output_hidden_states", "output_attentions", ROUTED)
"""Outputs that a body may be asked for and that have padded positions."""

TOLERANCE = 1e-4
"""The allowed difference between a miniature's two results in fp32, relative to the largest value. Rounding makes about
1e-6, and a token that attends to a wrong one more than 1e-2, for which the weights are made large enough."""
_LONG = 160
"""The length of the longest row that is compared. Longer ones would show more rules and take more time; what begins
beyond it is seen on the first batch (`patching.audit`)."""


@dataclass(frozen=True)
class Proof:
    """The result of a verification.

    Attributes:
        by_columns: whether position ids count columns, padding included; else live tokens. None: it takes none.
        attention: the classes of the modules that attend.
        classes: the classes of all its modules, each with its forward at that time.
        asked: the features that its attention uses.
        routed: whether it can also return its routers' logits, for an auxiliary loss.
        cache: the class of the KV cache that it returns on request, or None.
        mixes: whether it is called with the padded batch, and the modules of `attention` compute padding (`mixers`).
        leading: whether padding before a row's last token is taken for tokens: a state runs through it.
        carried: the classes of the modules that carry a state by segments (`states`).
        attempts: the ways to call it that have failed before this one, each with its reason.
    """

    by_columns: bool | None
    attention: frozenset[type[nn.Module]] = frozenset()
    classes: frozenset[tuple[type[nn.Module], Any]] = frozenset()
    asked: frozenset[Asked] = frozenset()
    routed: bool = False
    cache: type[Cache] | None = None
    mixes: bool = False
    leading: bool = False
    carried: frozenset[type[nn.Module]] = frozenset()
    attempts: Attempts = ()


def _probe() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of a batch padded left, right and on both sides; its prefixes form a tree of two levels."""
    ids = torch.randint(3, VOCABULARY, (6, 24), generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    mask = torch.ones_like(ids)
    for row, (begin, end) in enumerate(((5, 24), (5, 20), (5, 23), (0, 13), (3, 20), (0, 24))):
        mask[row, :begin] = mask[row, end:] = 0
    ids[1, :14], ids[2, :18] = ids[0, :14], ids[0, :18]
    return ids, mask


def _long_probe() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of two long rows, each padded on one side: rules that begin at a place, or choose so many of
    a row, are seen up to its length."""
    ids = torch.randint(3, VOCABULARY, (2, _LONG), generator=torch.Generator("cpu").manual_seed(4), device="cpu")
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, _LONG // 3 :] = 0
    return ids, mask


def small_of(text: Any) -> Any:
    """Returns the configuration of a miniature of a text-only body."""
    small = small_config(text.config)
    vars(small).update({name: False for name in OUTPUTS if name in vars(small)})
    # Code that has replaced an attention may need other ranks for it.
    plain = text.config._attn_implementation == "sdpa" and foreign_attention("sdpa") is None
    small._attn_implementation = "sdpa" if plain else "eager"
    return small


def key_of(body: Any, small: Any) -> tuple[type, Any, str]:
    """Returns what a miniature of a body depends on: its class, its forward, which some libraries exchange, and the
    small configuration."""
    kind: Any = original_class(body)
    return kind, kind.forward, json.dumps(small.to_dict(), sort_keys=True, default=str) + small._attn_implementation


_proofs: dict[tuple[type, Any, str], Proof | str] = {}


def proof_of(body: Any, inner: str) -> Proof | str:
    """Returns the proof for a body, or why it is left alone; computed once for a class and a configuration."""
    if (reason := trace_of_class(original_class(body), body.modules())) is not None:
        return reason  # not remembered, since it goes by what others have set
    text = body.get_submodule(inner)
    small = small_of(text)
    key = key_of(body, small)
    if key not in _proofs:
        states = getattr(original_class(text), "_is_stateful", False)
        _proofs[key] = _tried(functools.partial(_shown, body, inner, small), inner, states)
    return _proofs[key]


_WAYS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("with one row of live tokens", {"mixes": False}),
    ("with the padding of its mixers alone", {"mixes": True}),
    ("with the padding of its mixers, and with what is before a row's tokens", {"mixes": True, "leading": True}),
)
"""The ways to call a body, in the order in which they are tried."""


def _tried(shown: Callable[..., Proof | str], inner: str, states: bool) -> Proof | str:
    """Returns the proof of the first way that a body can be called, with the attempts before it; or why there is none,
    by the first attempt, or for a body of states by the last, with all of them."""
    failed: list[tuple[str, str]] = []
    for way, options in _WAYS:
        # A module around a body must not take over what the body inside may do better.
        if options.get("leading") and (inner or not failed[-1][1].startswith(_OTHER_NUMBERS)):
            continue
        found = shown(**options)
        if not isinstance(found, str):
            return dataclasses.replace(found, attempts=tuple(failed))
        failed.append((way, found))
    # Of a body of states the reason is what is in the way of leaving padding to its mixers.
    return Reason(failed[-1 if states else 0][1], tuple(failed))


def miniature_of(body: Any, inner: str, small: Any) -> Any:
    """Returns a miniature of a body, whose text-only body has a small configuration, with random weights on the CPU."""
    made = miniature(original_class(body.get_submodule(inner)), small)
    if not inner:
        return made
    config = copy.deepcopy(body.config)
    text = config.get_text_config()
    vars(config).update({name: small for name, value in vars(config).items() if value is text})
    return miniature_around(original_class(body), config, inner, made)


_OTHER_NUMBERS = "tokens of a packed row are not what they are in their own"
_STATES = "state runs along its rows"


def _shown(real: Any, inner: str, small: Any, *, mixes: bool, leading: bool = False) -> Proof | str:
    try:
        body = miniature_of(real, inner, small)
    except PROBE_ERRORS as error:
        return f"no miniature of it can be made: {one_line(error, 120)}"
    for module in body.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a packed row draws other numbers
    text = body.get_submodule(inner)
    if not mixes:
        attend_by_segments(body, inner, Undo())
        if not carry_by_segments(text, Undo()) and getattr(original_class(text), "_is_stateful", False):
            return _STATES
    elif (reason := leave_padding_to_mixers(text, Undo())) is not None:
        return reason
    found = _in_all_modes(body, original_class(real), inner, routed=False, mixes=mixes, leading=leading)
    if isinstance(found, str) or ROUTED not in vars(small):
        return found
    routed = _in_all_modes(body, original_class(real), inner, routed=True, mixes=mixes, leading=leading)
    return found if isinstance(routed, str) else routed


def _in_all_modes(body: Any, kind: Any, inner: str, *, routed: bool, mixes: bool, leading: bool) -> Proof | str:
    found: Proof | str = ""
    for training in MODES:
        with repeatable():
            found = _compared(body.train(training), kind, inner, routed, mixes, leading, _probe())
        if isinstance(found, str):
            return found
    with repeatable():
        long = _compared(body, kind, inner, routed, mixes, leading, _long_probe())
    return long if isinstance(long, str) else found


def _of_tokens(out: Any, live: torch.Tensor) -> list[torch.Tensor]:
    """Returns the hidden states of the live tokens and, where there are some, their routers' logits."""
    return [values.flatten(0, -2)[live.flatten()] for values in (hidden_of(out), *routers_of(out))]


def _compared(
    body: Any, kind: Any, inner: str, routed: bool, mixes: bool, leading: bool,
    probe: tuple[torch.Tensor, torch.Tensor],
) -> Proof | str:  # fmt: skip
    """Compares both ways in one mode on one batch, with or without routers' logits."""
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    ids, mask = probe
    live = mask.bool()
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "labels" in names:
        given["labels"] = ids.masked_fill(~live, -100)
    if routed:
        given[ROUTED] = True
    try:
        with torch.no_grad(), torch.device("cpu"):
            plain = body(**given)
            hidden, routers = hidden_of(plain), routers_of(plain)
            each = hidden.shape[:2] == ids.shape and all(r.shape[:-1].numel() == ids.numel() for r in routers)
    except PROBE_ERRORS as error:
        return f"a miniature of it takes no padded batch: {one_line(error, 120)}"
    if not each:
        return "a miniature of it gives no hidden state for each token"
    if routed and not routers:
        return "a miniature of it gives no router_logits"
    wanted = _of_tokens(plain, live)
    if not all(values.isfinite().all() for values in wanted):
        return "a miniature of it gives hidden states that are no numbers"
    reason = ""
    ways: tuple[bool | None, ...] = (True, False) if "position_ids" in names else (None,)
    for by_columns in ways[:1] if mixes else ways:
        try:
            with torch.no_grad(), torch.device("cpu"):
                batch = Batch.of(given, None, share=not mixes, leading=leading)
                got = (
                    batch.beside_mixers(kind, body) if mixes else batch.through(kind, body, inner, by_columns, "torch")
                )
        except Unserved as error:
            return str(error)
        except PROBE_ERRORS as error:
            return f"its code takes no packed row: {one_line(error, 120)}"
        out, packing = got
        attended = frozenset(packing.mixers if mixes else packing.attended)
        carried = frozenset(() if mixes else packing.carried)
        if not attended and not carried:
            return "its attention is not transformers' own"
        pairs = zip(_of_tokens(out, live), wanted, strict=True)
        far = torch.stack([(got - want).abs().max() / want.abs().max() for got, want in pairs]).max()
        if far <= TOLERANCE:
            parts = map(original_class, body.get_submodule(inner).modules())
            classes = frozenset((kind, kind.forward) for kind in parts)
            asked = frozenset(() if mixes else packing.asked)
            # Mixers fill the model's own cache.
            cache = None if mixes else _cache(body, given)
            return Proof(by_columns, attended, classes, asked, routed, cache, mixes, leading, carried)
        reason = f"{_OTHER_NUMBERS} (differs by {far:.0e})"
    return reason


def _cache(body: Any, given: dict[str, Any]) -> type[Cache] | None:
    try:
        with torch.no_grad(), torch.device("cpu"):
            return cache_of(body(**{**given, "use_cache": True}))
    except PROBE_ERRORS:
        return None


def unserved_layers(
    proof: Proof, body: nn.Module, where: torch.device, dtype: torch.dtype, backend: str | None
) -> str | None:
    """Returns why the device cannot attend by segments as the layers need, or None, before any of them has begun."""
    layers: set[tuple[int, int, float]] = set()
    for module in body.modules():
        if _unsharded(module) in proof.attention:
            size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
            if type(size) is int:  # else the first call finds out
                value = getattr(module, "v_head_dim", None) or size
                dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
                layers.add((size, value, dropout if isinstance(dropout, float) else 0.0))
    return next(filter(None, (
        why_not(where, dtype, (size, value), 1 if window else None, softcap, sinks, dropout, backend)
        for window, softcap, sinks in proof.asked for size, value, dropout in layers
    )), None)  # fmt: skip


_linear: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The forwards that other code has set on linear layers of adapters and that were verified to be a plain product."""


def _mixes(module: nn.Module) -> str | None:
    """Calls `mixes_tokens`, except for a forward that was verified to be a plain product."""
    reason = mixes_tokens(module)
    if reason is None or (module in _linear and _linear[module]() is vars(module)["forward"]):
        return None
    return reason


def _still_linear(module: nn.Linear) -> bool:
    """Whether a forward that was set on a linear layer is its product and nothing else, tested with other weights on
    the CPU: its own may be zeros, or be sharded. ms-swift sets one that moves its input to a device."""
    function = getattr(vars(module)["forward"], "__func__", vars(module)["forward"])
    if not isinstance(function, types.FunctionType) or beyond_one_run(function) is not None:
        return False
    if trace_of_function(vars(module)["forward"]) is not None:
        return False
    generator = torch.Generator("cpu").manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    weight = nn.Parameter(drawn(module.out_features, module.in_features))
    bias = None if module.bias is None else nn.Parameter(drawn(module.out_features))
    undo = Undo()
    try:
        undo.set_attribute(module, "_parameters", {"weight": weight, "bias": bias})
        for training in MODES:
            undo.set_attribute(module, "training", training)
            for shape in ((1, 12), (3, 4)):
                with repeatable():
                    x = drawn(*shape, module.in_features)
                    if not agree(module.forward, lambda x: functional.linear(x, weight, bias), x):
                        return False
        return True
    finally:
        undo.restore()


_MIXING = "peft.tuners.lily."
"""Adapters whose experts are weighted by the mean over all tokens, padding among them."""


def unproven(body: nn.Module, proof: Proof) -> str | None:
    """Returns which module of a body its miniature lacks, as a reason, or None.

    Linear layers of any kind (quantised, with adapters) need no proof: they mix no tokens, those of `_MIXING` apart.
    """
    adapters: tuple[type, ...] = ()
    around: tuple[type, ...] = (nn.ModuleList, nn.ModuleDict)
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        # A wrapper calls the trained copy of its module: both are checked.
        adapters, around = (BaseTunerLayer,), (*around, AuxiliaryTrainingWrapper)
    except ImportError:
        pass
    proven = dict(proof.classes)
    inside: set[nn.Module] = set()
    brought: set[nn.Module] = set()  # by adapters
    for path, module in body.named_modules():
        kind = _unsharded(module)
        base = next((cls for cls in kind.__mro__ if cls in proven), None)
        if module in brought and type(module) is nn.Linear and "forward" in vars(module) and _still_linear(module):
            _linear[module] = weakref.ref(vars(module)["forward"])
        if module is not body and (reason := _mixes(module)) is not None:
            return f"{path}: {reason}"
        if module in inside or isinstance(module, around):
            continue
        if isinstance(module, adapters) and kind.__module__.startswith(_MIXING):
            return f"the adapter of its {path} looks at all tokens at once, padding among them"
        if isinstance(module, adapters):
            brought.update(part for part in module.modules() if part is not module.get_base_layer())  # type: ignore[attr-defined]
        if isinstance(module, adapters) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
            inside.update(module.modules())
        elif base is None or kind.forward is not proven[base]:
            return f"its {path} is a {kind.__name__}, which was not proven"
    return None


def _unsharded(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module below the class that FSDP2 has derived from it."""
    kind = original_class(module)
    return kind if not issubclass(kind, FSDPModule) else next(cls for cls in kind.__bases__ if cls is not FSDPModule)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHAPELESS = frozenset(("npu_trainer_kernels", "torch", "transformers", "accelerate", "deepspeed", "trl"))
"""Packages whose hooks treat a packed row like a batch; NEFTune's, in transformers, does not."""


def parts_of(body: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the layers with their parts, and the body's other children. Below a layer's children only the first layer
    is searched, since every call does this."""
    beside = [child for child in body._modules.values() if child is not None]
    layers = [layer for child in beside if isinstance(child, nn.ModuleList) for layer in child]
    inner = [part for layer in layers[1:] for part in (layer, *layer._modules.values()) if part is not None]
    return [*(layers[0].modules() if layers else ()), *inner], beside


def in_the_way(body: nn.Module, proof: Proof) -> str | None:
    """Returns which change of a body since its proof rules out a packed row, or None."""
    layers, beside = parts_of(body)
    for part in layers:
        # A graph has no packed row in it: it would be compiled anew for each.
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            return "its layers are compiled"
        if (reason := _mixes(part)) is not None:
            return f"its {original_class(part).__name__}: {reason}"
        if type(part) in proof.attention:
            return f"a {type(part).__name__} has come into it since"
    if (whose := _whose(hook for hooks in GLOBAL_HOOKS for hook in hooks.values())) is not None:
        return f"a hook of {whose} on all modules may look at rows"
    for part in filter(has_hooks, (*layers, *beside)):
        if (whose := _whose(hook for name in _HOOKS for hook in getattr(part, name).values())) is not None:
            return f"a hook of {whose} on its {original_class(part).__name__} may look at rows"
    return None


def _whose(hooks: Iterable[Any]) -> str | None:
    """Returns the package of the first hook that may look at rows, or None."""
    for hook in hooks:
        function = getattr(hook, "func", hook)
        whose = (getattr(function, "__module__", None) or "").partition(".")[0]
        if whose not in _SHAPELESS or getattr(function, "__name__", "") == "neftune_post_forward_hook":
            return whose
    return None
