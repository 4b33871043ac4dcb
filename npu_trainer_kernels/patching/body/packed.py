"""Connects a packed row to transformers' attention: an object takes the place of its mask, and functions attend by it.

While a packed row goes through a body, the configuration that its modules read names functions of this module in
transformers' `AttentionMaskInterface` and `AttentionInterface`. The first makes a `PackedMask` of each mask that the
model requests; layers pass it on like every mask, also to the recomputation of a checkpointed layer, and the second
attends by segments. The model's own configuration is never written to: modules get classes whose `config` is a copy for
the duration of the call, on the thread that the call runs on.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...capture import Refused, unwatched
from ...ops.attention import BoundedSegments, Segments, needs_lengths, trial, unserved, varlen_attention
from ..classes import derived, original_class
from ..parallel import serve_inside
from ..undo import Undo
from .state_row import StateRow

__all__ = [
    "NAME",
    "Asked",
    "PackedMask",
    "Packing",
    "Unserved",
    "attend_by_segments",
    "foreign_attention",
    "make_mask",
    "packed_row",
    "packing_for",
    "row_under_way",
    "under_way",
    "why_not",
    "window_of",
]

NAME = "npu_kernels_segments"
_PYTORCHS = functional.scaled_dot_product_attention
_ELSEWHERE = frozenset((
    "position_ids", "cache_position", "num_items_in_batch", "sliding_window", "output_attentions",
    "output_hidden_states", "output_router_logits", "use_cache", "return_dict", "logits_to_keep",
))  # fmt: skip
"""Arguments that models pass to every attention function, and that need no check here: position ids are in queries and
keys, and a window is in the mask. Any other argument may say which keys are attended to."""


# Whether there is a sliding window, the soft cap, whether there are sinks.
Asked = tuple[bool, float | None, bool]


class Unserved(Exception):
    """A layer needs a feature that attention by segments lacks; the message names it.

    Attributes:
        lasts: whether the layer will need it in other batches too.
    """

    def __init__(self, reason: str, lasts: bool = True) -> None:
        super().__init__(reason)
        self.lasts = lasts


@dataclass
class Packing:
    """One packed row on its way through a body.

    Attributes:
        segments: the segments of the row; in a graph of the whole body, those of a table on the device.
        backend: the override for the op.
        by: the `Undo` that has prepared the body (`attend_by_segments`).
        named: the attention that the body's configuration names.
        attended: the classes of the modules that have attended.
        asked: the features of attention that they used.
        configs: by id, each configuration that was read, and its copy that names the functions of this module.
        carried: the classes of the modules that have carried a state by segments.
        carries: whether modules that can do so shall.
    """

    segments: Segments | BoundedSegments
    backend: str | None
    by: Any
    named: str
    attended: set[type[nn.Module]] = field(default_factory=set)
    asked: set[Asked] = field(default_factory=set)
    configs: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    carried: set[type[nn.Module]] = field(default_factory=set)
    carries: bool = False
    name: ClassVar[str] = NAME

    @functools.cached_property
    def states(self) -> StateRow:
        """The segments as modules with a state need them."""
        if not isinstance(self.segments, Segments):
            raise Refused("modules with a state go by lengths on the host")
        return StateRow(self.segments)

    @property
    def tokens(self) -> int:
        """The number of tokens of the row."""
        return self.segments.queries

    @property
    def longest(self) -> int:
        """The largest number of keys of a segment."""
        return self.segments.longest_k

    def options(
        self, module: Any, softcap: float | None, s_aux: torch.Tensor | None, is_causal: bool | None,
        others: dict[str, Any],
    ) -> tuple[float | None, torch.Tensor | None]:  # fmt: skip
        """Returns the soft cap and the sinks of an attention.

        Raises:
            Unserved: it is called with something else that may say which keys are attended to.
        """
        if is_causal is False or not getattr(module, "is_causal", True):
            raise Unserved("its attention is not causal")
        for name, given in others.items():
            if given is not None and type(given) is not bool and name not in _ELSEWHERE:
                raise Unserved(f"its attention is given {name}")
        # A row must attend as its batch would: some versions of transformers ignore these arguments under this name.
        # All other functions, and a model's own, apply them.
        if self.named == "sdpa":
            sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
            softcap = None if _ignores(sdpa, "softcap") else softcap
            s_aux = None if _ignores(sdpa, "s_aux") else s_aux
        return softcap, s_aux

    def naming(self, config: Any) -> Any:
        """Returns a copy of a configuration, and of those inside it, that names the functions of this module."""
        if id(config) not in self.configs:
            new = copy.copy(config)
            # The entry keeps the configuration alive, so that its id is not used again.
            self.configs[id(config)] = config, new
            for name, value in vars(config).items():
                if isinstance(value, PretrainedConfig):
                    vars(new)[name] = self.naming(value)
            vars(new)["_attn_implementation_internal"] = self.name
        return self.configs[id(config)][1]


class PackedMask:
    """Stands for a mask: causal inside each segment, with a sliding window or None.

    It is no dataclass, since wrappers of layers (FSDP1's) take those apart and pass on a copy.
    """

    __slots__ = ("packing", "window")

    def __init__(self, packing: Packing, window: int | None) -> None:
        self.packing, self.window = packing, window

    def __getitem__(self, index: Any) -> PackedMask:
        """Returns the mask itself for all of it: Gemma 4 cuts masks to the wanted logits, also where these are all."""
        for part in index if isinstance(index, tuple) else (index,):
            if type(part) is not slice or part not in (slice(None), slice(0, None)):
                raise Unserved("it cuts its mask")
        return self


_packing: contextvars.ContextVar[Packing | None] = contextvars.ContextVar("npu_kernels_packing", default=None)


def window_of(allowed: Callable[..., Any], length: int) -> int | None:
    """Returns the sliding window of a causal mask function, None where every earlier key is visible.

    The function is evaluated for three adjacent queries at the same distances, which include the first query's first
    key, so that a dependence on more than the distance shows.

    Raises:
        Unserved: the mask is another one.
    """
    if allowed is causal_mask_function:
        return None
    # On the CPU, whatever the default device is: the host must not wait for a device.
    with torch.device("cpu"):
        zero, far = torch.tensor(0), torch.arange(-1, length)
        queries = [torch.tensor(q) for q in (length - 1, length, length + 1)]
    try:
        rows = [allowed(zero, zero, q, q - far).expand(len(far)).tolist() for q in queries]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise Unserved("its mask looks at more than positions") from error
    row, seen = rows[0], sum(rows[0])
    if any(other != row for other in rows) or row[0] or row[1 : seen + 1] != [True] * seen:
        raise Unserved("its mask is neither causal nor a sliding window")
    return None if seen == length else seen


def make_mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> PackedMask:
    """Takes the place of the functions that make masks."""
    packing = _packing.get()
    if packing is None:
        raise RuntimeError(f"{NAME!r} makes masks for packed rows alone, and no packed row is on its way")
    with unwatched():  # a window is a constant of the model
        return PackedMask(packing, window_of(mask_function, packing.longest))


def why_not(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], window: int | None, softcap: float | None,
    sinks: bool, dropout: float, backend: str | None, segments: int = 1,
) -> str | None:  # fmt: skip
    """Returns why a layer should not attend by segments, or None; on an accelerator a trial run is made, once."""
    reason = unserved(
        device, dtype, sizes, window=window, softcap=softcap, sinks=sinks, dropout=dropout, segments=segments,
        backend=backend,
    )  # fmt: skip
    if reason is None and device.type not in ("cpu", "meta"):
        reason = trial(device, dtype, sizes, window is not None, softcap, sinks, backend)
    return reason


@functools.cache
def _ignores(attention: Any, option: str) -> bool:
    """Whether the code of an attention function never names an option that it may be called with."""
    code = inspect.unwrap(attention).__code__
    return option not in (*code.co_varnames, *code.co_consts)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Takes the place of the functions that attend; query, key and value are [1, heads, tokens, size]."""
    if type(attention_mask) is not PackedMask:
        raise Unserved("it attends to something else than its own tokens")
    packing, window = attention_mask.packing, attention_mask.window
    softcap, s_aux = packing.options(module, softcap, s_aux, is_causal, kwargs)
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == packing.tokens:
        raise Unserved("its attention takes other rows than the body was given")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    served = functools.partial(
        why_not, query.device, dtype, (query.shape[-1], value.shape[-1]), window, softcap, s_aux is not None, dropout,
        packing.backend,
    )  # fmt: skip
    if isinstance(packing.segments, BoundedSegments):
        sizes = query.shape[-1], value.shape[-1]
        by_host = needs_lengths(
            query.device, dtype, sizes, window=window, softcap=softcap, sinks=s_aux is not None,
            backend=packing.backend,
        )  # fmt: skip
        if by_host is not None:
            raise Refused(by_host)
    reason, lasts = served(segments=len(packing.segments)), True
    if reason is None and dtype is query.dtype and not query.dtype == key.dtype == value.dtype:
        reason = f"queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype}"
    elif reason is not None:
        lasts = served(segments=1) is not None
    if reason is not None:
        raise Unserved(reason, lasts)
    packing.attended.add(original_class(module))
    packing.asked.add((window is not None, softcap, s_aux is not None))
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = varlen_attention(
        q, k, v, packing.segments, scale=scaling, window=window, softcap=softcap, sinks=s_aux, dropout=dropout,
        backend=packing.backend,
    )  # fmt: skip
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, make_mask)


def foreign_attention(name: str) -> str | None:
    """Returns why a name of an attention no longer stands for the code of transformers and PyTorch, or None.

    Code that spreads a row over several ranks replaces it: DeepSpeed's Ulysses the function of that name, PyTorch's
    context parallelism the one below. A packed row would see no more than this rank's part.
    """
    function: Any = ALL_ATTENTION_FUNCTIONS.get(name)
    while isinstance(function, functools.partial):
        function = function.func
    if function is None or (function.__module__ or "").startswith("transformers."):
        function = functional.scaled_dot_product_attention
        if name != "sdpa" or function is _PYTORCHS:
            return None
    return f"its attention ({name}) is that of {function.__module__}"


def under_way() -> bool:
    """Whether a packed row is going through a body on this thread."""
    return _packing.get() is not None


def row_under_way() -> Packing | None:
    """Returns the packed row on its way on this thread if modules with a state go by its segments, else None."""
    packing = _packing.get()
    return packing if packing is not None and packing.carries else None


def packing_for(body: Any, text: Any, segments: Segments | BoundedSegments, backend: str | None) -> Packing:
    """Returns the `Packing` of a row for a body that was prepared.

    Args:
        body: the module that the row is passed to.
        text: the text-only body inside of it, or itself.
        segments: the segments of the row.
        backend: the override for the op.
    """
    return Packing(segments, backend, getattr(body, _BY), text.config._attn_implementation)


@contextlib.contextmanager
def packed_row(packing: Packing) -> Iterator[None]:
    """Sets the packed row that is on its way on this thread, inside the `with` block."""
    token = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(token)


# ---------------------------------------------------------------------------------------------------------------------
# How a body and its attention reach these functions
# ---------------------------------------------------------------------------------------------------------------------


_BY = "_npu_kernels_packs_by"
# Some versions of Dynamo (2.7 and 2.11 among them) take an entry of a module's `__dict__` for the property of that
# name, so the configuration has a second entry.
_OWN = "_npu_kernels_config"


def _config_of_call(by: Undo) -> property:
    """Returns the `config` property of modules through which packed rows go: a call on a thread reads its own copy, and
    nothing is written to a configuration, which other threads and models use too."""

    def get(module: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # no packed row goes through a graph
            return module._npu_kernels_config
        config = module.__dict__["config"]
        packing = _packing.get()
        return config if packing is None or packing.by is not by else packing.naming(config)

    def put(module: Any, config: Any) -> None:
        for name in ("config", _OWN):
            module.__dict__[name] = config

    return property(get, put)


def _without_own(there: weakref.ref[nn.Module]) -> None:
    module = there()
    if module is not None:
        vars(module).pop(_OWN, None)


def _mask_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedMask | None:
    # A loop: before torch 2.8 `next` with a default breaks a graph.
    for given in (kwargs.get("attention_mask"), *args):
        if type(given) is PackedMask:
            return given
    return None


def _attending(base: Any) -> Callable[..., Any]:
    """Returns the forward of an attention's class that finds the packed row also when a layer is recomputed later."""

    @functools.wraps(base.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        mask = _mask_in(args, kwargs)
        if mask is None:
            return base.forward(module, *args, **kwargs)
        with packed_row(mask.packing):
            return base.forward(module, *args, **kwargs)

    return forward


def _attends(kind: type[nn.Module]) -> bool:
    """Whether a class looks up in transformers which function attends."""
    methods = [inspect.unwrap(m) for cls in kind.__mro__ for m in vars(cls).values() if inspect.isfunction(m)]
    return any("ALL_ATTENTION_FUNCTIONS" in getattr(m, "__code__", _attends.__code__).co_names for m in methods)


def attend_by_segments(body: nn.Module, inner: str, undo: Undo) -> None:
    """Makes a body attend by segments while a packed row is on its way. It changes the body, the modules around the
    text-only body inside it, and all modules of the latter that make masks or attend.

    Args:
        body: the body to prepare.
        inner: the path of the text-only body.
        undo: records the changes; modules that it has changed already are skipped.
    """
    config = _config_of_call(undo)
    names = inner.split(".")[:-1] if inner else []
    around = [body.get_submodule(".".join(names[:i])) for i in range(len(names) + 1)] if inner else []
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in dict.fromkeys((*around, *body.get_submodule(inner).modules())):
        kind: Any = type(module)
        is_model = isinstance(module, PreTrainedModel)
        prepared = getattr(kind, _BY, None) is undo
        if prepared or "config" not in vars(module) or not (is_model or _attends(kind)):
            continue
        if kind not in classes:
            # A property of the class takes precedence over an instance attribute of that name.
            forward = {} if is_model else {"forward": _attending(kind)}
            classes[kind] = derived(kind, {"config": config, _BY: undo, **forward})
        undo.add(functools.partial(_without_own, weakref.ref(module)))
        vars(module)[_OWN] = vars(module)["config"]
        undo.set_class(module, classes[kind])
        serve_inside(module, classes[kind], undo)
