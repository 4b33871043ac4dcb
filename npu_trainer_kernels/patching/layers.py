"""Decoder layers as captured pieces: what is captured, when, and what is looked at before a replay.

Between two attentions a decoder layer depends on the number of its tokens alone. So a layer is captured as the pieces
before and after its attention (`capture.pieces`), with transformers' attention interface as the seam between them, and
nothing is known of the family. A layer is captured when it is called for the second time with as many tokens, in the
same mode; numbers of tokens are rounded up (`bucket`), which the packed body fills with tokens of no segment.

A graph remembers addresses and nothing else. So all that Python could decide otherwise is compared at every call: the
modules of the layer with their attributes, hooks, classes and configurations (adapters that are switched off, modes,
patches), parameters with their addresses and whether they are trained, autocast, gradient mode, arguments. A layer
that differs runs its own code. There are three kinds of graphs with a pool each: those of training forwards, whose
results stay until their backward; those of layers that a checkpoint repeats; and those without gradients.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
import time
import weakref
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import device
from ..capture import Pieces, Recorder, Refused, capture, recorder_for, recording_now
from ..support.errors import one_line
from .body import PackedMask, Recorded
from .call import current_call, generates
from .classes import GLOBAL_HOOKS, derived
from .patch import PLAIN, Site, is_transformed
from .undo import Undo

__all__ = ["CAPTURE_MODES", "LayerCapture", "bucket", "check_capture"]

CAPTURE_MODES = ("auto", "on", "off")


def check_capture(name: str, mode: object) -> None:
    """Raises ValueError unless `mode` says when layers are captured."""
    if mode not in CAPTURE_MODES:
        raise ValueError(f"{name} must be one of {', '.join(CAPTURE_MODES)}; got {mode!r}")


_STEPS = 16
"""Buckets from a power of two to the next one. The step is a sixteenth of the lower one, so a bucket has between 0 and
6.2% more tokens than were asked for, 2.2% on average over evenly spread numbers; 32 would halve that and double the
number of captures."""
_LEAST_STEP = 16


def bucket(tokens: int) -> int:
    """Returns the number of tokens that a row with so many is filled up to."""
    step = max((1 << tokens.bit_length() - 1) // _STEPS, _LEAST_STEP)
    return -(-tokens // step) * step


_MOST_GRAPHS = 8192
"""The number of graphs of one model; beyond it the longest unused number of tokens is given up."""
_MOST_VARIANTS = 4
"""The number of states of one layer (adapter on, adapter off) that are kept for the same arguments."""


@dataclass
class Turn:
    """One training forward of the captured layers, until its backward.

    Attributes:
        spot: the bucket of its layers.
        pending: the layers whose backward is to come.
        over: whether another turn has begun, which overwrites what this one's backward reads.
    """

    spot: _Bucket
    pending: set[int] = field(default_factory=set)
    over: bool = False


class _Input:
    """A buffer that a graph reads, and the tensor that was written to it last."""

    __slots__ = ("buffer", "path", "source", "turn", "version")

    def __init__(self, path: Any, buffer: torch.Tensor) -> None:
        self.path, self.buffer = path, buffer
        self.source: Callable[[], torch.Tensor | None] = lambda: None
        self.version = -1
        self.turn: Callable[[], Turn | None] = lambda: None

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version

    def load(self, tensor: torch.Tensor, turn: Turn | None) -> None:
        if tensor.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(tensor)
        self.source, self.version = weakref.ref(tensor), tensor._version
        self.turn = (lambda: None) if turn is None else weakref.ref(turn)


class _State:
    """What decides how a layer's code runs, as it was when the layer was captured."""

    def __init__(self, layer: nn.Module) -> None:
        configs = {id(c): c for m in layer.modules() if (c := vars(m).get("config")) is not None}
        self._objects = [_attributes(each) for each in (*layer.modules(), *configs.values())]
        self._parameters = [
            (owner._parameters, name, p, None if p is None else (p.data_ptr(), p.requires_grad))
            for owner in layer.modules() for name, p in owner._parameters.items()
        ]  # fmt: skip
        self._buffers = [
            (owner._buffers, name, b, None if b is None else b.data_ptr())
            for owner in layer.modules() for name, b in owner._buffers.items()
        ]  # fmt: skip

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        for each, cls, own, size, plain, values, others, same in self._objects:
            if each.__class__ is not cls or len(own) != size or plain(own) != values:
                return False
            if not all(map(operator.is_, others(own), same)):
                return False
        for where, name, p, known in self._parameters:
            if where.get(name) is not p or (p is not None and (p.data_ptr(), p.requires_grad) != known):
                return False
        return all(where.get(name) is b and (b is None or b.data_ptr() == at) for where, name, b, at in self._buffers)


def _repeats(layer: Any) -> bool:
    """Whether a checkpoint repeats the calls of a layer."""
    return torch.is_grad_enabled() and bool(layer.training and getattr(layer, "gradient_checkpointing", False))


_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(value, _SIMPLE)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DICTS = (*_HOOKS, "_modules")
_ELSEWHERE = ("_parameters", "_buffers", "_gradient_checkpointing_func")
"""Attributes that are compared in another way, or read around a layer's forward alone. TRL switches checkpointing off
and on for each batch, with a new function each time."""


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that gets the values of a dict for these names."""
    if len(names) < 2:
        return lambda own: tuple(own[name] for name in names)
    return operator.itemgetter(*names)


def _attributes(each: Any) -> tuple[Any, ...]:
    """Returns an object's attributes: values that may be changed in place as copies, others as they are."""
    own = each.__dict__
    names = [name for name in own if name not in _ELSEWHERE]
    equal = [name for name in names if name in _DICTS or _is_plain(own[name])]
    plain, others = _getter(equal), _getter([name for name in names if name not in equal])
    values = tuple(
        value.copy() if name in _DICTS else copy.deepcopy(value) for name, value in zip(equal, plain(own), strict=True)
    )
    return each, each.__class__, own, len(own), plain, values, others, others(own)


def _recorder_of_outputs() -> Any:
    """Returns what transformers collects from hooks at present (router logits, hidden states), or None."""
    collector = _collector()
    return None if collector is None else collector.get()


@functools.cache
def _collector() -> Any:
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5 it gives modules another forward instead
        return None
    return _active_collector


def _hooked(layer: nn.Module) -> bool:
    """Whether other code has hooked the layer or a module of it."""
    return any(map(_has_foreign_hooks, layer.modules()))


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether other code than transformers' collector of outputs, which is asked whether it collects, has hooked a
    module."""
    own = module.__dict__
    return any(
        getattr(hook, "__name__", "") != "output_capturing_hook" for name in _HOOKS for hook in own[name].values()
    )


@dataclass
class _Captured:
    """A layer in one state, for one kind of call: its pieces, or why there are none."""

    state: _State
    place: int
    calls: int = 1
    forward: int = 0
    """The forward of the bucket in which it was called last."""
    pieces: Pieces | None = None
    inputs: list[_Input] = field(default_factory=list)
    output: Any = None
    reason: str = ""
    ran: list[tuple[Site, int]] = field(default_factory=list)


@dataclass
class _Bucket:
    """The captured layers of one number of tokens, in one mode."""

    layers: dict[Any, list[_Captured]] = field(default_factory=dict)
    inputs: list[_Input] = field(default_factory=list)
    results: set[int] = field(default_factory=set)
    """The addresses of results that stay until their backward: the next layer reads them where they are."""
    last: int = -1
    """The place of the layer that was captured last."""
    forward: int = 0
    called: int = -1
    """The place of the layer that was called last. The next one is behind it, or begins another forward."""
    released: bool = False
    restarts: int = 0

    def notes(self, one: _Captured) -> None:
        """Notes a call."""
        if one.place <= self.called:
            self.forward += 1
        self.called, one.forward = one.place, self.forward

    def earlier_is_coming(self, one: _Captured) -> bool:
        """Whether an earlier layer of this forward has no graphs yet, and may get some."""
        return any(
            other.place < one.place and other.forward == self.forward and other.pieces is None and not other.reason
            for each in self.layers.values() for other in each
        )  # fmt: skip

    def release(self) -> None:
        """Lets the graphs of other buckets use the memory of these."""
        self.released = True
        for each in self.layers.values():
            for one in each:
                if one.pieces is not None:
                    one.pieces.release()

    def restart(self) -> None:
        """Gives all graphs up."""
        self.layers, self.inputs, self.results, self.last = {}, [], set(), -1
        self.released = False
        self.restarts += 1

    @property
    def graphs(self) -> int:
        return sum(c.pieces.graphs for each in self.layers.values() for c in each if c.pieces is not None)


@dataclass
class _Mode:
    """The graphs of one mode, which share a pool."""

    recorder: Recorder
    keeps: bool
    most: int | None
    buckets: OrderedDict[tuple[Any, ...], _Bucket] = field(default_factory=OrderedDict)
    open: _Bucket | None = None
    turn: Callable[[], Turn | None] = lambda: None

    def may_capture(self, spot: _Bucket, place: int) -> str | None:
        """Returns why a layer is not captured now, or None.

        Where results stay until their backward, the layers of a bucket are captured in the order of their forward:
        what a layer's backward computes in between takes memory that was free then, and must not be what an earlier
        layer has saved. Buckets share the memory, so only the one that was captured last may get more graphs.

        Args:
            spot: the bucket.
            place: the place of the layer in its list.
        """
        if not self.keeps:
            return None
        if self.open is not spot and self.open is not None:
            self.open.release()
        self.open = spot
        if not spot.released and spot.last <= place:
            return None
        if spot.restarts == _MOST_RESTARTS:
            return f"its layers were captured {_MOST_RESTARTS} times, and differ each time"
        spot.restart()
        return ""


_MOST_RESTARTS = 3


@functools.cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that a forward takes by position, the module apart."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(forward).parameters.items() if p.kind in positional)[1:]


_MAPPINGS = (dict, UserDict)


class _Flat:
    """The arguments of a call: tensors with their paths, and the rest, which has to be equal; of the latter, the dicts,
    which layers write to for other layers."""

    __slots__ = ("_names", "_reads_mask", "args", "kwargs", "maps", "mask", "rest", "tensors")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reads_mask: bool
    ) -> None:
        self._reads_mask = reads_mask
        self.tensors: list[tuple[Any, torch.Tensor]] = []
        self.rest: list[Any] = []
        self.maps: list[Any] = []
        self.mask: Any = None
        self.args, self.kwargs, self._names = args, kwargs, _parameter_names(function)
        for i, value in enumerate(args):
            self._add(self._name(i), value)
        for name, value in kwargs.items():
            self._add(name, value)

    def _name(self, i: int) -> Any:
        return self._names[i] if i < len(self._names) else i

    def _add(self, path: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # A mask that attention alone reads is not copied.
            if path == "attention_mask" and not self._reads_mask:
                self.mask = value
                self.rest.append((path, "a mask", value.dim(), value.dtype))
            else:
                self.tensors.append((path, value))
        elif type(value) is PackedMask:
            self.mask = value
            self.rest.append((path, "a packed row"))
        elif type(value) in (tuple, list):
            for i, each in enumerate(value):
                self._add((path, i), each)
        elif isinstance(value, _MAPPINGS):
            self.rest.append((path, type(value), tuple(value)))
            self.maps.append(value)
            for name, each in value.items():
                self._add((path, name), each)
        elif isinstance(value, _SIMPLE):
            self.rest.append((path, value))
        else:
            raise Refused(f"it is given {path} of type {type(value).__name__}")

    def key(self) -> tuple[Any, ...]:
        specs = [(path, t.shape, t.stride(), t.dtype, t.requires_grad) for path, t in self.tensors]
        return tuple(specs), tuple(self.rest)

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, list[dict[Any, Any]]]:
        """Calls a function with other tensors in the places of these.

        Returns:
            what it returns, and what it has written to each of `maps`.
        """
        at = {path: tensor for (path, _), tensor in zip(self.tensors, tensors, strict=True)}
        given: list[tuple[Any, dict[Any, Any]]] = []

        def put(path: Any, value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(put((path, i), each) for i, each in enumerate(value))
            if isinstance(value, _MAPPINGS):
                made = copy.copy(value)
                given.append((made, {}))
                known = given[-1][1]
                known.update({name: put((path, name), each) for name, each in value.items()})
                made.update(known)
                return made
            return at.get(path, value)

        args = [put(self._name(i), value) for i, value in enumerate(self.args)]
        out = function(*args, **{name: put(name, value) for name, value in self.kwargs.items()})
        if any(name not in made for made, known in given for name in known):
            raise Refused("it takes entries out of what it is given")
        return out, [{k: v for k, v in made.items() if k not in known or v is not known[k]} for made, known in given]


@dataclass(frozen=True)
class Now:
    """What a seam is called with at a replay: the mask, and the tensors of the call."""

    mask: Any
    tensors: Sequence[torch.Tensor]


def _outputs(out: Any, written: list[dict[Any, Any]]) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Returns the tensors that a layer returns and writes to dicts, and a function that puts other ones in their
    places: it is called with them and the dicts, and returns what the layer returns."""
    leaves, spec = tree_flatten((out, written))
    at, count = [i for i, leaf in enumerate(leaves) if leaf is not None], len(leaves)
    tensors = [leaves[i] for i in at]
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            raise Refused(f"it returns {type(leaf).__name__}")

    def put(results: Sequence[torch.Tensor], maps: list[Any]) -> Any:
        filled: list[Any] = [None] * count
        for i, result in zip(at, results, strict=True):
            filled[i] = result
        returned, entries = tree_unflatten(filled, spec)
        for each, new in zip(maps, entries, strict=True):
            each.update(new)
        return returned

    return tensors, put


class _Waits:
    """Finds out whether the device waits for the host.

    When the host begins a layer it looks whether the device has begun the layer before, too: then the device has less
    than a layer's work ahead of it, and will wait. The first forwards are not looked at (they compile kernels and fill
    caches). Nothing is waited for.

    Attributes:
        for_host: whether the device waited at more than half of the layers.
    """

    _UNSEEN, _CALLS = 3, 240

    def __init__(self) -> None:
        self._event: Any = None
        self._begun: Counter[int] = Counter()
        self._calls = self._waiting = 0

    @property
    def for_host(self) -> bool:
        return 2 * self._waiting > self._calls

    def seen(self, layer: int, hidden: Any) -> bool:
        """Looks at a call of a layer; returns whether enough calls were seen."""
        if not isinstance(hidden, torch.Tensor) or hidden.device.type in ("cpu", "meta"):
            return False
        self._begun[layer] += 1
        if self._begun[layer] <= self._UNSEEN:
            return False
        module: Any = torch.get_device_module(hidden.device)
        if self._event is not None:
            self._calls += 1
            self._waiting += self._event.query()
        self._event = module.Event()
        self._event.record(module.current_stream(hidden.device))
        return self._calls >= self._CALLS


@contextlib.contextmanager
def _exchanged(layer: nn.Module, others: dict[int, nn.Parameter]) -> Iterator[None]:
    """Inside the `with` block a layer has other parameters, given by the id of its own."""
    own = [(m._parameters, name, p) for m in layer.modules() for name, p in m._parameters.items() if p is not None]
    try:
        for where, name, p in own:
            where[name] = others[id(p)]
        yield
    finally:
        for where, name, p in own:
            where[name] = p


_BY = "_npu_kernels_captures_by"


class LayerCapture:
    """Captures the decoder layers of a model and replays them.

    Attributes:
        on: whether layers are captured and replayed at present.
        replayed, eager: the numbers of calls of layers.
        reasons: why layers ran their own code, with the number of calls.
        seconds: the time spent on capturing.
    """

    def __init__(self, undo: Undo, sites: Callable[[], list[Site]], busy: Callable[[], bool]) -> None:
        self.on = False
        self.waits: _Waits | None = None
        self.replayed = self.eager = 0
        self.reasons: Counter[str] = Counter()
        self.seconds = 0.0
        self.captured = 0
        self._undo, self._sites, self._busy = undo, sites, busy
        self._modes: dict[Any, _Mode] = {}
        self._reads_mask: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._readers = WeakIdKeyDictionary()
        self._joined: set[tuple[int, Any]] = set()
        self._next: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._shared: set[int] = set()
        self._lists: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._places: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: object) -> LayerCapture:
        """A copy of a model has classes that name this object; its layers are not captured."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as a plain dict."""
        buckets = {rows[0] for mode in self._modes.values() for rows, spot in mode.buckets.items() if spot.graphs}
        graphs = sum(spot.graphs for mode in self._modes.values() for spot in mode.buckets.values())
        return {
            "on": self.on, "replayed": self.replayed, "own_code": self.eager, "graphs": graphs, "buckets": len(buckets),
            "captured": self.captured, "seconds": round(self.seconds, 3), "reasons": dict(self.reasons),
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.on:
            return "captured layers: none; " + (
                "the device did not wait for the host" if self.waits is None else "not decided yet"
            )
        seen = self.as_dict()
        calls = self.replayed + self.eager
        lines = [
            f"captured layers: {self.replayed / max(calls, 1):.0%} of {calls} calls replayed; {seen['graphs']} graphs "
            f"for {seen['buckets']} numbers of tokens; {self.seconds:.1f} s spent on capturing"
        ]
        return "\n".join([*lines, *(f"  {calls} calls: {reason}" for reason, calls in self.reasons.items())])

    def tokens(self, live: int) -> int | None:
        """Returns the number of tokens that a packed row is filled up to, or None: it stays as it is."""
        return bucket(live) if self.on else None

    # -- installation ------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module, mode: str) -> None:
        """Gives the decoder layers of a model classes whose forward may be replayed. Layers that have them keep them.

        Args:
            model: the model.
            mode: `"on"`, or `"auto"`: once the device was seen to wait for the host.
        """
        if mode == "on":
            self.on = True
        elif not self.on and self.waits is None:
            self.waits = _Waits()
        inside: set[nn.Module] = set()
        owners: Counter[int] = Counter()
        layers: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module not in inside:
                layers.append(module)
                inside.update(module.modules())
        for layer in layers:
            owners.update({id(p) for p in layer.parameters()})
        outside = {id(p) for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}
        self._shared = {at for at, count in owners.items() if count > 1} | outside
        for listed in model.modules():
            if isinstance(listed, nn.ModuleList):
                self._lists.update((layer, id(listed)) for layer in listed if layer is not None)
                self._places.update((layer, i) for i, layer in enumerate(listed) if layer is not None)
                pairs = itertools.pairwise(listed)
                self._next.update({a: weakref.ref(b) for a, b in pairs if a is not None and b is not None})
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        if layers:
            self._undo.add(self._forget)
        self._layers.update(layers)
        for layer in layers:
            kind: Any = type(layer)
            if getattr(kind, _BY, None) is self:
                continue
            if kind not in classes:
                classes[kind] = derived(kind, {"forward": self._forward(kind), _BY: self})
            self._undo.set_class(layer, classes[kind])

    def _forget(self) -> None:
        """Lets go of everything that was captured; the counts stay."""
        self._modes.clear()
        self._layers.clear()

    def _forward(self, base: Any) -> Callable[..., Any]:
        original: Any = base.forward

        @functools.wraps(original)
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recording_now():
                return original(layer, *args, **kwargs)
            if not self.on:
                if self.waits is not None and args and torch.is_grad_enabled() and self.waits.seen(id(layer), args[0]):
                    self.on, self.waits = self.waits.for_host, None
                self._runs_own(layer, args[0] if args else None)
                return original(layer, *args, **kwargs)
            return self.call(layer, original, args, kwargs)

        return forward

    # -- a call ------------------------------------------------------------------------------------------------------

    def call(self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays a layer, or runs its own code."""
        hidden = next(iter((*args, *kwargs.values())), None)
        repeats = _repeats(layer) and isinstance(hidden, torch.Tensor)
        ready: Callable[[], Any] | str = ""
        # Where a checkpoint repeats a call that ran the layer's code, it must do the same.
        if not (repeats and id(layer) in self._own.get(hidden, ())):
            try:
                ready = self._ready(layer, original, args, kwargs)
            except Refused as error:
                ready = str(error)
        if isinstance(ready, str):
            self.eager += 1
            if ready:
                self.reasons[ready] += 1
            if repeats:
                self._runs_own(layer, hidden)
            elif self._is_static(hidden):
                # Its code (a hook) may keep what it is given beyond the next replay of the layer before.
                own = cast("torch.Tensor", hidden).clone()
                args, kwargs = ((own, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): own})
            return original(layer, *args, **kwargs)
        self.replayed += 1
        return ready()

    def _runs_own(self, layer: Any, hidden: Any) -> None:
        """Notes that a layer runs its own code: where a checkpoint repeats this call, it must do the same."""
        if _repeats(layer) and isinstance(hidden, torch.Tensor):
            self._own.setdefault(hidden, set()).add(id(layer))

    def _ready(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | str:
        """Returns what replays a call, or why its own code runs; an empty reason is not reported."""
        if generates() or is_transformed() or self._busy():
            return ""
        if layer not in self._layers:
            return "it is a copy of a layer that the kernels were applied to"
        if any(GLOBAL_HOOKS):
            return "other code has hooked every module"
        if _recorder_of_outputs():
            return "outputs of its modules are asked for"
        call = current_call()
        if call is not None and call.collects:
            return "hidden states are asked for"  # models that collect them by themselves keep them
        flat = _Flat(original, args, kwargs, layer in self._reads_mask)
        if not flat.tensors:
            return "it is given no tensor"
        hidden = flat.tensors[0][1]
        kind = hidden.device.type
        if type(hidden) is not torch.Tensor or kind == "meta":
            return ""  # a rehearsal
        if torch.is_inference_mode_enabled() or any(t.is_inference() for _, t in flat.tensors):
            return "inference mode is on"  # its tensors do not say whether they were written to
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        graded = torch.is_grad_enabled()
        repeats = _repeats(layer)
        if repeats and flat.maps:
            return "a checkpoint repeats it, by when other layers may have written to the dict that it is given"
        mode = self._mode(hidden.device, graded, repeats, self._lists.get(layer, 0))
        rows = tuple(hidden.shape), cast, layer.training
        spot = mode.buckets.get(rows)
        if spot is None:
            spot = mode.buckets[rows] = _Bucket()
        elif next(reversed(mode.buckets)) != rows:
            mode.buckets.move_to_end(rows)
        key = id(layer), cast, flat.key()
        variants = spot.layers.setdefault(key, [])
        found = next((each for each in variants if each.state.holds()), None)
        new = found is None
        if found is None:
            if len(variants) == _MOST_VARIANTS:
                return f"its modules or parameters change: {_MOST_VARIANTS} states of it are captured"
            found = _Captured(_State(layer), self._places.get(layer, 0))
            variants.append(found)
        spot.notes(found)
        if graded and found.pieces is None:
            self._note_readers(layer, flat)
        return "" if new else self._ready_for(layer, original, flat, mode, spot, found)

    def _ready_for(
        self, layer: Any, original: Callable[..., Any], flat: _Flat, mode: _Mode, spot: _Bucket,
        found: _Captured,
    ) -> Callable[[], Any] | str:  # fmt: skip
        """As `_ready`, of a call that was made before."""
        if found.pieces is None:
            if found.reason:
                return found.reason
            found.calls += 1
            turn = mode.turn()
            if turn is not None and turn.pending and mode.keeps and turn.spot is not spot:
                return "another forward awaits its backward"
            if mode.keeps and spot.earlier_is_coming(found):
                return ""
            later = mode.may_capture(spot, found.place)
            if later is not None:
                found.reason = later
                return later
            self._capture(layer, original, flat, mode, spot, found)
            if found.pieces is None:
                return found.reason
            spot.last = found.place
        return self._replay(layer, flat, mode, spot, found)

    def _note_readers(self, layer: nn.Module, flat: _Flat) -> None:
        """Notes which arguments have gradients that several layers, or one at two places, add to."""
        for path, tensor in flat.tensors:
            if tensor.requires_grad:
                place = id(layer), path
                first = self._readers.setdefault(tensor, place)
                if first != place:
                    self._joined.update((first, place))

    def _mode(self, where: torch.device, graded: bool, repeats: bool, listed: int) -> _Mode:
        """Returns the mode of a call. Results that stay until a backward are those of one list of layers, whose numbers
        of tokens are the same in a forward: those of images in another tower have a mode of their own."""
        key = where, graded, repeats, listed if graded and not repeats else None
        if key not in self._modes:
            self._modes[key] = _Mode(recorder_for(where), graded and not repeats, device.most_graphs(where))
        return self._modes[key]

    def _replay(self, layer: Any, flat: _Flat, mode: _Mode, spot: _Bucket, found: _Captured) -> Any:
        turn: Turn | None = None
        if mode.keeps:
            turn = mode.turn()
            if turn is not None and turn.pending and (turn.spot is not spot or id(layer) in turn.pending):
                return "another forward awaits its backward"
            if turn is None or not turn.pending:
                if turn is not None:
                    turn.over = True
                turn = Turn(spot)
                mode.turn = weakref.ref(turn)
        tensors = [t for _, t in flat.tensors]
        late = [(i, t) for i, t in zip(found.inputs, tensors, strict=True) if not i.holds(t)]
        if turn is not None and any(i.turn() is turn for i, _ in late):
            return "its arguments are others than those of the layers before it"
        pieces, mask = found.pieces, flat.mask
        assert pieces is not None

        def replay() -> Any:
            with torch.no_grad():
                for place, tensor in late:
                    place.load(tensor, turn)
            if turn is not None:
                turn.pending.add(id(layer))
            tokens = mask.packing.live if type(mask) is PackedMask else None
            done = None if turn is None else functools.partial(turn.pending.discard, id(layer))
            results = pieces.run(tensors, Now(mask, tensors), turn, tokens, done)
            for site, calls in found.ran:
                site.ran += calls
            if not mode.keeps or self._is_seen_after(layer):
                results = tuple(t.clone() for t in results)
            return found.output(results, flat.maps)

        return replay

    def _is_seen_after(self, layer: Any) -> bool:
        """Whether other code than the next layer may see a layer's results, and keep them beyond the next replay."""
        follower = self._next.get(layer)
        after = None if follower is None else follower()
        return after is None or _has_foreign_hooks(after)

    def _is_static(self, hidden: Any) -> bool:
        """Whether a tensor is where a graph writes its results."""
        if type(hidden) is not torch.Tensor or hidden.device.type == "meta" or is_transformed():
            return False
        spots = (spot for mode in self._modes.values() if mode.keeps for spot in mode.buckets.values())
        results = [spot.results for spot in spots if spot.results]
        return bool(results) and any(hidden.data_ptr() in each for each in results)

    # -- capturing ---------------------------------------------------------------------------------------------------

    def _why_not(self, layer: nn.Module) -> str | None:
        """Returns why a layer is not captured, or None."""
        if any(isinstance(module, FSDPModule) for module in layer.modules()):
            return "its parameters move (FSDP)"
        if _hooked(layer):
            return "other code has hooked it or a module of it"
        if any("forward" in vars(module) for module in layer.modules()):
            return "a forward was set on a module of it"
        for parameter in layer.parameters():
            if type(parameter) not in PLAIN:
                return f"a parameter of it is a {type(parameter).__name__}"
            if id(parameter) in self._shared:
                return "other modules have parameters of it, too"
            if parameter._backward_hooks:
                return "a parameter of it has a hook"
        return None

    def _capture(
        self, layer: Any, original: Callable[..., Any], flat: _Flat, mode: _Mode, spot: _Bucket, found: _Captured
    ) -> None:
        reason = self._why_not(layer) or mode.recorder.no_room()
        if reason is not None:
            found.reason = reason
            return
        begun = time.perf_counter()
        inputs = [self._input(path, tensor, mode, spot, found) for path, tensor in flat.tensors]
        buffers = [place.buffer for place in inputs]
        joined = [place.buffer for place, (path, _) in zip(inputs, flat.tensors, strict=True)
                  if (id(layer), path) in self._joined]  # fmt: skip
        outputs: list[Any] = []
        # A layer may have a parameter in two of its modules.
        stand_ins = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in layer.parameters()}
        originals = {id(stand_ins[id(p)]): p for p in layer.parameters()}

        def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mask = flat.mask
            recorded = Recorded(Now(mask, [t for _, t in flat.tensors]), tensors, originals)
            with recorded.on(), _exchanged(layer, stand_ins):
                results, put = _outputs(*flat.call(functools.partial(original, layer), tensors))
            given = {t.untyped_storage()._cdata for t in tensors}
            if any(t.untyped_storage()._cdata in given for t in results):
                raise Refused("it returns what it is given")
            outputs.append(put)
            return tuple(results)

        sites = self._sites()
        counts = [(site, site.ran, site.declined.copy()) for site in sites]
        try:
            found.pieces = capture(
                function, buffers, {new: originals[id(new)] for new in stand_ins.values()}, list(layer.buffers()),
                mode.recorder, joined=joined, keeps=mode.keeps,
            )  # fmt: skip
        except Refused as error:
            if isinstance(flat.mask, torch.Tensor) and flat.mask.untyped_storage()._cdata in error.unknown:
                self._reads_mask.add(layer)  # from the next call on its mask is a tensor like others
            else:
                found.reason = str(error)
            return
        except RuntimeError as error:  # of the device, or of code that cannot be captured: the layer's own code goes on
            found.reason = f"it could not be captured: {one_line(error, 120)}"
            return
        finally:
            for site, ran, declined in counts:
                # It ran twice, and has computed nothing that is used.
                found.ran += [(site, (site.ran - ran) // 2)] if site.ran > ran else []
                site.ran, site.declined = ran, declined
        found.inputs, found.output = inputs, outputs[-1]
        if mode.keeps:
            spot.results |= {t.data_ptr() for t in found.pieces.pieces[-1].outputs}
        known = {id(place) for place in spot.inputs}
        spot.inputs += [place for place in inputs if id(place) not in known]
        self.captured += found.pieces.graphs
        self.seconds += time.perf_counter() - begun
        self._bound(mode, spot)

    def _input(self, path: Any, tensor: torch.Tensor, mode: _Mode, spot: _Bucket, found: _Captured) -> _Input:
        """Returns the buffer for an input. Layers share it if they are given the same tensor; where results need not
        stay until a backward they share it in any case."""
        for place in spot.inputs:
            fits = place.buffer.shape == tensor.shape and place.buffer.dtype == tensor.dtype
            fits = fits and place.buffer.requires_grad == tensor.requires_grad
            if fits and (place.holds(tensor) if mode.keeps else place.path == path):
                return place
        buffer = tensor.detach()
        if tensor.data_ptr() not in spot.results:
            buffer = buffer.clone(memory_format=torch.preserve_format)
        return _Input(path, buffer.requires_grad_(tensor.requires_grad))

    def _bound(self, mode: _Mode, current: _Bucket) -> None:
        """Gives up the buckets that were not used for longest, if there are too many graphs."""
        most = _MOST_GRAPHS if mode.most is None else min(mode.most, _MOST_GRAPHS)
        graphs = sum(spot.graphs for each in self._modes.values() for spot in each.buckets.values())
        turn = mode.turn()
        while graphs > most:
            for rows, spot in mode.buckets.items():
                if (
                    spot is not current
                    and spot.graphs
                    and not (turn is not None and turn.pending and turn.spot is spot)
                ):
                    graphs -= spot.graphs
                    del mode.buckets[rows]
                    break
            else:
                return
