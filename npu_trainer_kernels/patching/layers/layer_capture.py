"""Captures the decoder layers of a model, and decides at each call whether a layer is replayed.

A layer is captured when it is called for the second time with as many tokens, in the same mode and the same state. A
layer that differs runs its own code, and the report says why.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import device
from ...capture import (
    Owner,
    Reading,
    Reads,
    Refused,
    ReplayedMemory,
    Watched,
    capture,
    recorder_for,
    recording_now,
    why_unseen,
)  # fmt: skip
from ...support.errors import one_line
from ..body import PackedMask, RecordedCall
from ..call import current_call, generates
from ..classes import GLOBAL_HOOKS, derived
from ..patch import PLAIN, Site, is_transformed
from ..probe import trace_of_function
from ..undo import Undo
from .buckets import MOST_VARIANTS, Bucket, Captured, Input, Mode, Turn, bucket
from .call_arguments import CallArguments, Now, outputs_of
from .counts import Counts, calls_apart
from .device_waits import DeviceWaits
from .layer_state import (
    CHECKPOINT,
    ON_ANOTHER_THREAD,
    SAVED_ELSEWHERE,
    LayerState,
    attentions_of,
    collected_outputs,
    collects_into,
    has_foreign_hooks,
    hooked,
    is_checkpointed,
    is_saved_elsewhere,
)
from .repeated_calls import Repeated, number_now, repeatable, repeated_now
from .stand_ins import exchanged
from .weight_slots import WeightSlots

__all__ = ["LayerCapture"]

_MOST_GRAPHS = 8192
_MOST_BUCKETS = 512
"""The largest number of graphs of one model, and of buckets of one mode, most of which may be waiting for their second
call. Beyond these numbers the capture discards the least recently used bucket."""


_BY = "_npu_kernels_captures_by"


class LayerCapture(Counts):
    """Captures the decoder layers of a model and replays them.

    Attributes:
        waited: the share of layers at which the device waited for the host, once `auto` has decided.
        without_memory: whether layers are also captured with tensors that have no memory, for `npu-kernels fit`.
    """

    without_memory = False

    def __init__(self, undo: Undo, sites: Callable[[], list[Site]], busy: Callable[[], bool]) -> None:
        super().__init__()
        self.waits: DeviceWaits | None = None
        self.waited: float | None = None
        self._undo, self._sites, self._busy = undo, sites, busy
        self._modes: dict[Any, Mode] = {}
        self._reads_mask: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._readers = WeakIdKeyDictionary()
        self._joined: set[tuple[int, Any]] = set()
        self._next: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._shared: set[int] = set()
        self._listed: weakref.WeakSet[nn.ModuleList] = weakref.WeakSet()
        self._lists: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owner = Owner()
        self._within_forward = False  # captures begin with a forward
        self._followers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._slots: dict[Any, WeightSlots] = {}

    def __deepcopy__(self, memo: object) -> LayerCapture:
        """A copy of a model has classes that name this object; its layers are not captured."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as a plain dict."""
        buckets = {rows[0] for mode in self._modes.values() for rows, spot in mode.buckets.items() if spot.graphs}
        graphs = sum(spot.graphs for mode in self._modes.values() for spot in mode.buckets.values())
        return {
            "on": self.on, "replayed": self.replayed, "own_code": self.eager, "graphs": graphs, "buckets": len(buckets),
            "captured": self.captured, "seconds": round(self.seconds, 3), "waited": self.waited,
            "reasons": dict(self.reasons),
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.on:
            return "captured layers: none; " + (
                "not decided yet" if self.waited is None else
                f"the device waited for the host at {self.waited:.0%} of the layers"
            )  # fmt: skip
        seen = self.as_dict()
        line = (
            f"{self.replayed_line('captured layers')}; {seen['graphs']} graphs for {seen['buckets']} numbers of "
            f"tokens; {self.seconds:.1f} s spent on capturing"
        )
        return "\n".join([line, *self.reason_lines()])

    def tokens(self, live: int) -> int | None:
        """Returns the number of tokens that a packed row is filled up to, or None: it stays as it is."""
        return bucket(live) if self.on else None

    # -- installation ------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module, mode: str) -> None:
        """Gives the decoder layers of a model classes whose forward may be replayed. A layer that has such a class
        keeps it.

        Args:
            model: the model.
            mode: `"on"`: layers are captured from now on; `"auto"`: once the device is found to wait for the host.
        """
        if mode == "on":
            self.on = True
        elif not self.on and self.waits is None and self.waited is None:
            self.waits = DeviceWaits()
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
        self._listed.update(listed for listed in model.modules() if isinstance(listed, nn.ModuleList))
        self._read_lists()
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        if layers:
            self._undo.add(self._forget)
        self._layers.update(layers)
        for layer in layers:
            kind: Any = type(layer)
            if getattr(kind, _BY, None) is self:
                continue
            if kind not in classes:
                namespace = {"forward": self._forward(kind), "__call__": self._named(kind), _BY: self}
                classes[kind] = derived(kind, namespace)
            self._undo.set_class(layer, classes[kind])

    def _read_lists(self) -> None:
        """Notes which layers follow each other."""
        self._next.clear()
        self._followers.clear()
        for listed in self._listed:
            self._lists.update((layer, id(listed)) for layer in listed if layer is not None)
            pairs = itertools.pairwise(listed)
            self._next.update({a: weakref.ref(b) for a, b in pairs if a is not None and b is not None})
            self._followers.update(layer for layer in listed[1:] if layer is not None)

    def _forget(self) -> None:
        """Discards all captured layers; the counts stay."""
        self._modes.clear()
        self._layers.clear()
        self._slots.clear()

    def _named(self, base: Any) -> Callable[..., Any]:
        """Returns the `__call__` of a layer's class, which tells a checkpoint's repetitions from new calls."""
        original: Any = base.__call__

        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            own = layer.__dict__
            if torch.compiler.is_compiling() or CHECKPOINT not in own or not is_checkpointed(layer):
                return original(layer, *args, **kwargs)
            if not self._owner.is_here():
                return original(layer, *args, **kwargs)
            checkpoint, repeated, thread = own[CHECKPOINT], Repeated(layer), threading.get_ident()

            def named(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
                if threading.get_ident() == thread:  # others may find this function meanwhile
                    function = functools.partial(repeatable, repeated, function)
                return checkpoint(function, *given, **options)

            own[CHECKPOINT] = named
            try:
                return original(layer, *args, **kwargs)
            finally:
                own[CHECKPOINT] = checkpoint

        return call

    def _forward(self, base: Any) -> Callable[..., Any]:
        original: Any = base.forward

        @functools.wraps(original)
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recording_now():
                return original(layer, *args, **kwargs)
            if not self.on:
                if self.waits is not None and args and torch.is_grad_enabled() and self.waits.seen(id(layer), args[0]):
                    self.on, self.waited, self.waits = self.waits.for_host, self.waits.share, None
                    self._within_forward = True
                self._runs_own(layer)
                return original(layer, *args, **kwargs)
            return self.call(layer, original, args, kwargs)

        return forward

    # -- a call ------------------------------------------------------------------------------------------------------

    def call(self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays a layer, or runs its own code."""
        hidden = next(iter((*args, *kwargs.values())), None)
        ready: Callable[[], Any] | str = ""
        repeats = is_checkpointed(layer)
        first = repeated_now() if repeats else None
        owned = (first is not None and first.layer is layer) or self._owner.is_here()
        names = tuple(collected_outputs() or ())
        if first is not None and first.replayed is not None and not names:
            names = first.collects  # transformers' hooks collect nothing while a call is repeated
        if not owned:
            ready = ON_ANOTHER_THREAD
        elif repeats and (first is None or first.layer is not layer):
            ready = "a checkpoint repeats its forward instead of its call"
        elif first is None or first.replayed is not False:
            try:
                ready = self._ready(layer, original, args, kwargs, names)
            except Refused as error:
                ready = str(error)
        if isinstance(ready, str):
            self.eager += 1
            if ready:
                self.reasons[ready] += 1
            self._runs_own(layer)
            if not repeats and self._is_static(hidden):
                # The layer's code (a hook) may keep its input beyond the next replay of the layer before it.
                own = cast("torch.Tensor", hidden).clone()
                args, kwargs = ((own, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): own})
            return original(layer, *args, **kwargs)
        self.replayed += 1
        if first is not None:
            first.replayed, first.collects = True, names
        return ready()

    def _runs_own(self, layer: nn.Module) -> None:
        """Notes that a layer runs its own code: a checkpoint's repetition of this call must run it, too. (The first
        call of a reentrant checkpoint has no gradients; its repetition may be a replay.)"""
        repeated = repeated_now()
        if repeated is not None and repeated.layer is layer and repeated.replayed is None and is_checkpointed(layer):
            repeated.replayed = False

    def _ready(
        self, layer: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        collects: tuple[str, ...],
    ) -> Callable[[], Any] | str:  # fmt: skip
        """Returns a function that replays a call, or why the layer runs its own code; no report has an empty reason.

        Args:
            layer, original, args, kwargs: the layer, its forward, and the arguments of the call.
            collects: the names of the outputs that transformers' hooks collect from the layer's modules.
        """
        if generates() or is_transformed() or self._busy():
            return ""
        if self._within_forward:
            if layer in self._followers:
                return ""
            self._within_forward = False
        if layer not in self._layers:
            return "it is a copy of a layer that the kernels were applied to"
        if any(GLOBAL_HOOKS):
            return "other code has hooked every module"
        call = current_call()
        if "hidden_states" in collects or (call is not None and call.collects):
            return "hidden states are asked for"  # models that collect them by themselves keep them
        flat = CallArguments(original, args, kwargs, layer in self._reads_mask)
        if not flat.tensors:
            return "it is given no tensor"
        hidden = flat.tensors[0][1]
        kind = hidden.device.type
        if kind == "meta" or not self._is_real(hidden):
            return ""  # a rehearsal
        if torch.is_inference_mode_enabled() or any(t.is_inference() for _, t in flat.tensors):
            return "inference mode is on"  # its tensors do not say whether they were written to
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        graded = torch.is_grad_enabled()
        repeats = is_checkpointed(layer)
        if repeats and flat.maps:
            return "a checkpoint repeats it, by when other layers may have written to the dict that it is given"
        mode = self._mode(hidden.device, graded, repeats, self._lists.get(layer, 0))
        rows = tuple(hidden.shape), cast, layer.training
        spot = mode.buckets.get(rows)
        if spot is None:
            spot = mode.buckets[rows] = Bucket()
            self._bound(mode, spot)
        elif next(reversed(mode.buckets)) != rows:
            mode.buckets.move_to_end(rows)
        if spot.disordered and mode.awaits() is None and spot.restarts_in_order():
            self._read_lists()
        key = id(layer), cast, collects, flat.key()
        variants = spot.layers.setdefault(key, [])
        found = next((each for each in variants if each.state is None or each.state.holds()), None)
        new = found is None
        if found is None:
            if len(variants) == MOST_VARIANTS:
                return f"its modules or parameters change: {MOST_VARIANTS} states of it are captured"
            found = Captured(id(layer), ReplayedMemory() if mode.keeps else mode.memory)
            variants.append(found)
        spot.notes(found)
        if graded and found.pieces is None:
            self._note_readers(layer, flat)
        return "" if new else self._ready_for(layer, original, flat, mode, spot, found, collects)

    def _ready_for(
        self, layer: Any, original: Callable[..., Any], flat: CallArguments, mode: Mode, spot: Bucket,
        found: Captured, collects: tuple[str, ...],
    ) -> Callable[[], Any] | str:  # fmt: skip
        """Returns the same as `_ready`, for a call that the layer has had before."""
        if found.pieces is None:
            if found.reason:
                return found.reason
            found.calls += 1
            # Whoever asks for captured layers (`"on"`) gets them the second time.
            if self.waited is not None and not mode.comes_often(spot, found.calls):
                return ""
            turn = mode.awaits()
            if turn is not None and mode.keeps and turn.spot is not spot:
                return "another forward awaits its backward"
            if mode.keeps and spot.earlier_is_coming(found):
                return ""
            if (unseen := why_unseen()) is not None:
                return unseen
            later = mode.may_capture(spot, found.place)
            if later is not None:
                found.reason = later
                return later
            self._capture(layer, original, flat, mode, spot, found, collects)
            if found.pieces is None:
                return found.reason
            found.index, spot.captured, spot.last = spot.captured, spot.captured + 1, found.place
        return self._replay(layer, flat, mode, spot, found)

    def _note_readers(self, layer: nn.Module, flat: CallArguments) -> None:
        """Notes which arguments have gradients that several layers, or one at two places, add to."""
        for path, tensor in flat.tensors:
            if tensor.requires_grad:
                place = id(layer), path
                first = self._readers.setdefault(tensor, place)
                if first != place:
                    self._joined.update((first, place))

    def _mode(self, where: torch.device, graded: bool, repeats: bool, listed: int) -> Mode:
        """Returns the mode of a call. If its results stay until their backward, a mode has the layers of one list
        alone: all of them get the same number of tokens in a forward. The layers of an image tower get other numbers,
        and have another mode."""
        keeps = graded and not repeats
        key = where, graded, repeats, listed if keeps else None
        if key not in self._modes:
            # Where nothing stays after a call, the graphs of all modes may use the same memory.
            alike = () if keeps else (mode for (at, *_), mode in self._modes.items() if at == where and not mode.keeps)
            other = next(iter(alike), None)
            recorder, memory = (
                (recorder_for(where), ReplayedMemory()) if other is None else (other.recorder, other.memory)
            )
            self._modes[key] = Mode(recorder, keeps, device.most_graphs(where), memory)
        return self._modes[key]

    def _replay(self, layer: Any, flat: CallArguments, mode: Mode, spot: Bucket, found: Captured) -> Any:
        turn: Turn | None = None
        if mode.keeps:
            if is_saved_elsewhere():
                return SAVED_ELSEWHERE
            turn = mode.awaits()
            if turn is not None and (turn.spot is not spot or id(layer) in turn.pending):
                return "another forward awaits its backward"
            if turn is not None and found.index <= turn.last:
                spot.disordered = True
                return "layers come in another order than they were captured in"
        tensors = [t for _, t in flat.tensors]
        late = [(i, t) for i, t in zip(found.inputs, tensors, strict=True) if not i.holds(t)]
        if turn is not None and any(i.memory.turn == turn.number and not i.is_at(t) for i, t in late):
            spot.disordered = True
            return "it gets other arguments than the layers before it"
        if mode.keeps and turn is None:
            if mode.is_kept(tensors, found.memory):
                return "other code keeps a result of a layer beyond the forward"
            turn = Turn(spot)
            mode.begins(turn)
        pieces, mask, number = found.pieces, flat.mask, number_now() if turn is None else turn.number
        assert pieces is not None

        def replay() -> Any:
            with torch.no_grad():
                for place, tensor in late:
                    place.load(tensor, number)
            found.memory.turn = mode.memory.turn = number
            done = None
            if turn is not None:
                turn.pending.add(id(layer))
                turn.last, done = found.index, functools.partial(turn.pending.discard, id(layer))
            tokens = mask.packing.live if type(mask) is PackedMask else None
            reading = Reading((mode.memory, found.memory, *(i.memory for i in found.inputs)), turn)
            results = pieces.run(tensors, Now(mask, tensors), reading, tokens, done)
            for site, calls in found.ran:
                site.ran += calls
            own = len(results) - len(found.collected)
            # The outputs that hooks collect are read after other layers have run.
            copies = own if mode.keeps and id(layer) not in mode.copied and not self._is_seen_after(layer) else 0
            if copies:
                mode.returned.append(found)
            results = (*results[:copies], *(t.clone() for t in results[copies:]))
            lists = collected_outputs()
            if lists is not None:
                for name, each in zip(found.collected, results[own:], strict=True):
                    lists[name].append(each)
            return found.output(results[:own], flat.maps)

        return replay

    def _is_seen_after(self, layer: Any) -> bool:
        """Whether other code than the next layer may see a layer's results, and keep them beyond the next replay."""
        follower = self._next.get(layer)
        after = None if follower is None else follower()
        return after is None or has_foreign_hooks(after)

    def _is_real(self, hidden: Any) -> bool:
        """Whether this is a tensor with values, and not one of a rehearsal."""
        return type(hidden) is torch.Tensor or (self.without_memory and isinstance(hidden, FakeTensor))

    def _is_static(self, hidden: Any) -> bool:
        """Whether a tensor is where a graph writes its results."""
        if not self._is_real(hidden) or hidden.device.type == "meta" or is_transformed():
            return False
        spots = (spot for mode in self._modes.values() if mode.keeps for spot in mode.buckets.values())
        results = [spot.results for spot in spots if spot.results]
        return bool(results) and any(hidden.data_ptr() in each for each in results)

    # -- capturing ---------------------------------------------------------------------------------------------------

    def _why_not(self, layer: nn.Module) -> str | None:
        """Returns why a layer is not captured, or None."""
        if any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer):
            return "parameters of a module of it move (FSDP)"
        if hooked(layer):
            return "other code has hooked it or a module of it"
        for module in layer.modules():
            # Neither its code nor, of the second kind, its attributes can be seen.
            if "_orig_mod" in module._modules or isinstance(module, torch.jit.ScriptModule):
                return f"a module of it is compiled ({type(module).__name__})"
        if any("forward" in vars(module) for module in layer.modules()):
            return "a forward was set on a module of it"
        if any(is_checkpointed(module) for module in layer.modules() if module is not layer):
            return "a checkpoint repeats a module of it"
        for attention in attentions_of(layer):
            # It is called once more while the layer is looked at, and what it is given is memory of graphs.
            if (trace := trace_of_function(attention)) is not None:
                return f"of its attention {trace}"
        for parameter in layer.parameters():
            if type(parameter) not in PLAIN:
                return f"a parameter of it is a {type(parameter).__name__}"
            if id(parameter) in self._shared:
                return "other modules share parameters with it"
            if parameter._backward_hooks:
                return "a parameter of it has a hook"
        return None

    def _capture(
        self, layer: Any, original: Callable[..., Any], flat: CallArguments, mode: Mode, spot: Bucket,
        found: Captured, collects: tuple[str, ...],
    ) -> None:  # fmt: skip
        moves = isinstance(layer, FSDPModule)
        found.state = LayerState(layer, moves)
        reason = self._why_not(layer) or mode.recorder.no_room()
        if reason is None and mode.keeps and is_saved_elsewhere():
            reason = SAVED_ELSEWHERE
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
        parameters = list(layer.parameters())
        places: Sequence[torch.Tensor] = parameters
        if moves:
            alike = WeightSlots.key(parameters)
            if alike not in self._slots:
                self._slots[alike] = WeightSlots(parameters)
            slots = self._slots[alike]
            slots.load(layer, parameters, again=False)
            places = slots.buffers
        stand_ins = {
            id(p): nn.Parameter(at.detach(), p.requires_grad) for p, at in zip(parameters, places, strict=True)
        }
        originals = {id(stand_ins[id(p)]): p for p in layer.parameters()}

        def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mask = flat.mask
            recorded = RecordedCall(Now(mask, [t for _, t in flat.tensors]), tensors, originals)
            lists: dict[str, list[Any]] = {name: [] for name in collects}
            with recorded.on(), exchanged(layer, stand_ins), collects_into(lists):
                results, put = outputs_of(*flat.call(functools.partial(original, layer), tensors))
            found.collected = [name for name, each in lists.items() for _ in each]
            results += [each for every in lists.values() for each in every]
            if not all(isinstance(each, torch.Tensor) for each in results):
                raise Refused("an output that hooks collect from its modules is no tensor")
            given = {t.untyped_storage()._cdata for t in tensors}
            if any(t.untyped_storage()._cdata in given for t in results):
                raise Refused("it returns one of its arguments")
            outputs.append(put)
            return tuple(results)

        def watch(reads: Reads | None, settings: tuple[Any, ...]) -> Watched:
            states.append(LayerState(layer, moves, reads=reads, settings=settings))
            return states[-1].values

        states = [found.state]
        try:
            with calls_apart(self._sites(), found.ran):
                found.pieces = capture(
                    function, buffers, {new: originals[id(new)] for new in stand_ins.values()}, list(layer.buffers()),
                    mode.recorder, joined=joined, keeps=mode.keeps, watch=watch,
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
        if not found.state.holds():
            found.pieces, found.reason = None, "a call of it changes its modules or parameters"
            return
        found.state = states[-1]
        if moves:
            found.pieces.prepare = functools.partial(slots.load, layer, parameters)
        found.inputs, found.output = inputs, outputs[-1]
        if mode.keeps:
            spot.results.update((t.data_ptr(), (t, found.memory)) for t in found.pieces.results)
        known = {id(place) for place in spot.inputs}
        spot.inputs += [place for place in inputs if id(place) not in known]
        self.captured += found.pieces.graphs
        self.seconds += time.perf_counter() - begun
        self._bound(mode, spot)

    def _input(self, path: Any, tensor: torch.Tensor, mode: Mode, spot: Bucket, found: Captured) -> Input:
        """Returns the buffer for an input. Layers that get the same tensor share a buffer; in a mode whose results need
        not stay until a backward all layers share one."""
        for place in spot.inputs:
            fits = place.buffer.shape == tensor.shape and place.buffer.dtype == tensor.dtype
            fits = fits and place.buffer.requires_grad == tensor.requires_grad
            if fits and (place.holds(tensor) if mode.keeps else place.path == path):
                return place
        result, memory = spot.results.get(tensor.data_ptr(), (None, None if mode.keeps else mode.memory))
        if result is None:
            buffer = tensor.detach().clone(memory_format=torch.preserve_format)
        else:
            buffer = result.as_strided(tensor.shape, tensor.stride())
        return Input(path, buffer.requires_grad_(tensor.requires_grad), memory)

    def _bound(self, mode: Mode, current: Bucket) -> None:
        """Discards the least recently used buckets, if there are too many graphs or buckets."""
        most = _MOST_GRAPHS if mode.most is None else min(mode.most, _MOST_GRAPHS)
        graphs = sum(spot.graphs for each in self._modes.values() for spot in each.buckets.values())
        turn = mode.awaits()
        in_use = None if turn is None else turn.spot
        while graphs > most or len(mode.buckets) > _MOST_BUCKETS:
            for rows, spot in mode.buckets.items():
                if spot is not current and spot is not in_use and (spot.graphs or graphs <= most):
                    graphs -= spot.graphs
                    del mode.buckets[rows]
                    break
            else:
                return
