"""`apply_npu_kernels` replaces computations in a model and returns a handle that restores them."""

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import backends, device
from ..options import check_capture, check_ops, check_tiled_mlp
from ..support.switch import check_switch
from ..support.tested import newer_torch
from .audit import Audit
from .bodies import BodyCapture
from .body import PaddingPatch, draws_for_tokens, dropped_options, outermost_body
from .bound_forwards import BoundForwards, kernel_of_package
from .call import CallSettings, leave_calls, track_calls
from .classes import leaves_out_hooks, original_class
from .head import causal_lm
from .modules import GatedMlpPatch
from .patch import HarmlessReason, Patch, Reason, Scene, Site, others_forward, serves_tokens
from .patches import PATCHES
from .probe import repeatable
from .report import LeftAlone, Report
from .stand_aside import STAYS, StandAside
from .undo import Undo

__all__ = ["NpuKernels", "apply_npu_kernels", "handle_of"]

_handles: "weakref.WeakKeyDictionary[nn.Module, NpuKernels]" = weakref.WeakKeyDictionary()


class NpuKernels:
    """The handle that `apply_npu_kernels` returns: it reports what was replaced, and restores it.

    It is a context manager: leaving the outermost `with` block restores the model. A second `apply_npu_kernels` for the
    same model returns the same handle. The handle keeps neither the model nor its weights alive.
    """

    def __init__(
        self, model: nn.Module, ops: tuple[str, ...], by_name: bool, backend: str | None, strict: bool, tiled_mlp: int,
        capture: str,
    ) -> None:  # fmt: skip
        self._model = weakref.ref(model)
        self.options = (ops, backend, strict, tiled_mlp, capture)
        self._patches = [PATCHES[op] for op in PATCHES if op in ops]
        self._by_name = by_name
        self._backend = backends.strict_override(backend) if strict else backend
        self._undo = Undo()
        self._aside = StandAside(self._undo)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._report = Report()
        self.settings = CallSettings()
        self._tracked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._there: Counter[type[nn.Module]] = Counter()
        self._bound = BoundForwards()
        self._entered = 0
        self._audit: Audit | None = None
        # Undoes changes outside the model (names in TRL) when the model is garbage-collected without `restore`.
        weakref.finalize(model, self._undo.restore).atexit = False

    @property
    def active(self) -> bool:
        """Whether anything is replaced at present."""
        return len(self._undo) > 0

    @property
    def model(self) -> nn.Module | None:
        """The model, or None after it was garbage-collected."""
        return self._model()

    @property
    def undo(self) -> Undo:
        """The record of all changes, which `restore` undoes."""
        return self._undo

    @property
    def backend(self) -> str | None:
        """The override for the choice of backends."""
        return self._backend

    @property
    def serves_trl(self) -> bool:
        """Whether this package's op replaces TRL's fused head."""
        return self.settings.trl is not None

    @property
    def shares_beginnings(self) -> bool:
        """Whether training computes the common prefix of a batch's rows once, with the dropout that it has now."""
        model = self._model()
        if model is None or not self.settings.shares:
            return False
        body: Any = outermost_body(model)
        return not draws_for_tokens(body.config.get_text_config(), body.modules())

    @property
    def tokens(self) -> int:
        """The number of input tokens, padding included, in this process's training forwards of the patched model."""
        return self.settings.tokens

    @property
    def live_tokens(self) -> int:
        """The number of `tokens` that masks do not mark as padding. The host waits for the device."""
        return int(self.settings.live)

    @property
    def positions(self) -> tuple[int, int, int]:
        """The numbers of positions, of positions with a token, and of tokens that the body computed, of all batches
        that `varlen_attention` served. The second is smaller by padding, the third also by shared beginnings."""
        served = [site.progress for site in self._report.sites if site.op == PaddingPatch.op]
        return sum(s.positions for s in served), sum(s.live for s in served), sum(s.computed for s in served)

    @property
    def rollouts(self) -> Any:
        """What the report says of rollouts, without a look at the model; None: they are not served."""
        return self._report.rollouts

    def report(self) -> Report:
        """Returns the report: which modules were replaced, how often each op has run, and which kernels have failed. It
        stays available after `restore`."""
        for op, reason in backends.failures().items():
            self._report.note(f"{op} runs in torch since a kernel failed: {reason}")
        self._report.plans = [self.settings.learned]
        self._report.gone = [] if self._model() is None or not self.active else list(self._gone())
        return self._report

    def audit(self, tell: Callable[[str], None] = warnings.warn, *, training: bool = True) -> None:
        """Compares the patched model with its original code on the batch of the next forward, before that forward runs.

        Some rows of the batch go through the body three times without gradients. The first pass runs the original code,
        and compares each op with the modules that it replaces on the same inputs. The second pass runs the original
        code while every operator's result is perturbed within its rounding error, which shows how much results may
        differ. The third pass runs the ops, without padding. Heads are compared where their loss is computed. Whatever
        differs by more than rounding explains (`patching.audit`) is disabled; `report().audits` has the results.
        Forwards of a new kind (other arguments, another dtype, rows more than twice as long) are compared as well, and
        so are modules that `refresh` adds. Random states, and what modules hold, are the same afterwards.

        A model with code that may leave another trace (`probe.traces`) is not run: its ops are compared in its own next
        forward, those whose modules leave none.

        Not compared are compiled forwards, forwards with a cache, models whose parameters DeepSpeed's ZeRO-3
        partitions, and, with FSDP2, all forwards but the first.

        Args:
            tell: called with a sentence for each thing that is disabled.
            training: True compares only forwards in training mode with gradients, False all but those of generation.

        Raises:
            RuntimeError: nothing is patched.
        """
        model = self._model()
        if model is None or not self.active:
            raise RuntimeError("there is nothing to compare: this handle was restored, or its model is gone")
        if self._audit is not None:
            self._audit.again()
            return
        self._audit = Audit(lambda: self._report.sites, PaddingPatch.op, self._report.audits, tell, training)
        self._audit.watch(outermost_body(model), self._undo)

    def _gone(self) -> Iterator[str]:
        """Yields a sentence for each class of which patched modules are no longer in the model."""
        classes = self._classes_now()
        for site in self._report.sites:
            there = classes[site.cls]
            if there < self._there[site.cls]:
                yield (
                    f"{self._there[site.cls] - there} {site.kind.__name__} that {site.op} served "
                    "is no longer in the model; what is in its place runs its own code until refresh() is called"
                )
        yield from self._hidden()

    def _hidden(self) -> Iterator[str]:
        """Yields a sentence for each kernel that the package `kernels` has set on replaced modules since."""
        model, hidden = self._model(), Counter[tuple[str, str, str]]()
        for module in () if model is None else model.modules():
            if (whose := kernel_of_package(module)) is not None:
                served = [site.op for site in self._report.sites if site.cls in type(module).__mro__]
                hidden.update((original_class(module).__name__, op, whose) for op in served)
        for (kind, op, whose), count in hidden.items():
            yield f"{count} {kind} that {op} served now have another forward, {whose}"

    def _classes_now(self) -> "Counter[type[nn.Module]]":
        """Counts the model's modules by class, each under every class that it derives from."""
        model = self._model()
        modules = () if model is None else model.modules()
        return Counter(cls for module in modules for cls in type(module).__mro__)

    def restore(self) -> None:
        """Restores everything that was replaced: classes, attributes, hooks, names in TRL. A second call does nothing.

        Attributes that other code has set in the meantime stay.

        Raises:
            ExceptionGroup: something could not be restored; everything else was.
        """
        model = self._model()
        if model is not None and _handles.get(model) is self:
            del _handles[model]
        self._aside.stop()
        leave_calls(self.settings)
        if model is not None:
            self._bound.take_out(model)  # what has come back since the last forward is bound to replaced classes
        self._tracked.clear()
        self._audit = None
        for site in self._sites.values():
            site.look = None
        self.settings.trl, self.settings.shares, self.settings.bodies = None, False, None
        self._undo.restore()

    def __repr__(self) -> str:
        # Notebooks and consoles show this.
        return str(self.report())

    def __enter__(self) -> "NpuKernels":
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered -= 1
        if self._entered == 0:
            self.restore()

    def refresh(self) -> None:
        """Patches modules that were added, exchanged or changed since; after `restore`, patches all of them.

        Raises:
            RuntimeError: the model no longer exists, or another call has patched it since.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the model that these kernels were applied to no longer exists")
        if _handles.get(model, self) is not self:
            raise RuntimeError("this handle was restored, and the model has another one since: refresh that")
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        where = parameters[0].device if parameters else torch.device("cpu")
        if where.type == "meta":
            where = torch.device(device.accelerator())
        dtype = parameters[0].dtype if parameters else torch.float32
        tiled_mlp, mode = self.options[-2:]
        scene = Scene(model, tuple(patch.op for patch in self._patches), where, dtype, self._backend, tiled_mlp)
        earlier = self._report
        self._report = Report(
            device=device.spec(where).name, notes=earlier.notes, note_ops=earlier.note_ops, unused=earlier.unused,
            audits=earlier.audits, rollouts=earlier.rollouts, beside=earlier.beside,
        )  # fmt: skip
        for site in self._sites.values():
            site.paths.clear()
            if not self.active:
                site.off = None
        if not self.active:
            self._undo.add(self._bound.put_back)
        self._bound.take_out(model)
        try:
            for module in dict.fromkeys((model, causal_lm(model)[1] or model)):
                # PEFT calls the inner model's `forward` directly, so the inner model's hooks alone would not run.
                if module not in self._tracked:
                    track_calls(module, self.settings, self._aside, self._undo)
                    self._bound.watch(module, self._undo)
                    self._tracked.add(module)
            with repeatable(where if where.type == device.accelerator() else None):
                for patch in self._patches:
                    self._apply(patch, scene)
            for module in self._tracked:
                leaves_out_hooks(module, self._undo)
            self._capture_bodies(model, mode, where)
        except BaseException:
            self.restore()
            raise
        for site in self._sites.values():
            if site.paths:
                self._report.sites.append(site)
        if tiled_mlp and all(site.op != GatedMlpPatch.op for site in self._report.sites):
            self._report.note(f"tiled_mlp={tiled_mlp} does nothing: {GatedMlpPatch.op} serves no module of this model")
        if mode == "on" and all(site.op != PaddingPatch.op for site in self._report.sites):
            self._report.note(f"capture='on' does nothing: {PaddingPatch.op} serves no body of this model")
        self._note_others(model)
        self._warn_of_attention(model, where)
        if (newer := newer_torch(str(torch.__version__))) is not None:
            self._report.note(newer)
        self._there = self._classes_now()
        _handles[model] = self

    def _note_others(self, model: nn.Module) -> None:
        """Says of modules with another package's forward that they may compute what the replaced modules in them do."""
        replaced = {path for site in self._report.sites for path in site.paths}
        for path, module in model.named_modules():
            reason = others_forward(module)
            if reason is not None and any(each.startswith(f"{path}." if path else "") for each in replaced - {path}):
                kind = original_class(module).__name__
                self._report.note(f"what is replaced inside {kind} may have no calls: {reason}")

    def _warn_of_attention(self, model: nn.Module, where: torch.device) -> None:
        """Warns, once, where the model's own attention drops what its layers ask for."""
        for site in self._report.sites:
            for path in site.paths if site.op == PaddingPatch.op else ():
                body: Any = model.get_submodule(path)
                text = dropped_options(site.kind, body.config.get_text_config(), site.form.proof, where)
                if text is not None and text not in self._report.notes:
                    self._report.note(text)
                    warnings.warn(f"NPU kernels: {text}", stacklevel=2)

    def _capture_bodies(self, model: nn.Module, mode: str, where: torch.device) -> None:
        """Has the model's bodies captured, last of all: what is captured is the patched body."""
        if mode == "off":
            return
        if mode == "auto" and not device.captures_unasked(where):
            if where.type != "cpu":
                self._report.note(
                    f"no body is captured on {where.type}, where that was not measured; capture='on' captures bodies"
                )
            return
        if self.settings.bodies is None:
            self.settings.bodies = BodyCapture(
                self._undo, lambda: self._report.sites, self._is_comparing, auto=mode == "auto"
            )
        self._report.capture = self.settings.bodies
        self.settings.bodies.install(model)

    def _is_comparing(self) -> bool:
        return self._audit is not None and self._audit.busy

    def _apply(self, patch: Patch, scene: Scene) -> None:
        op, by_name = patch.op, self._by_name or patch.asked_for(scene)
        plain = None if by_name else backends.keeps_plain(op, scene.where, scene.backend)
        if plain is not None and not backends.every_measurement(op, scene.where, scene.backend):
            self._report.left_alone.append(LeftAlone("", "", op, plain, counts=patch.misses(scene)))
            return
        self._report.reasons[op] = backends.explain(op, scene.where, scene.backend)[1]
        for path, module in patch.candidates(scene):
            form = patch.recognise(module, scene)
            if form is not None and not isinstance(form, str):
                form = self._install(patch, scene, path, module, form, plain, by_name)
            if isinstance(form, str):
                attempts = form.attempts if isinstance(form, Reason) else ()
                kind = "" if module is scene.model else original_class(module).__name__
                self._report.left_alone.append(
                    LeftAlone(path, kind, op, str(form), not isinstance(form, HarmlessReason), attempts)
                )

    def _install(
        self, patch: Patch, scene: Scene, path: str, module: nn.Module, form: Any, plain: str | None, by_name: bool
    ) -> str | None:
        """Adds a recognised module to its site, or returns a sentence that says why not. `plain` says why the module's
        original code is as fast on this device; a measurement or an op requested by name overrules it."""
        other = next((s for s in self._sites.values() if s.cls in type(module).__mro__ and s.op != patch.op), None)
        if other is not None and other.paths:
            return f"{other.op} is in its forward already"
        if plain is None and not by_name:
            plain = patch.keeps_plain(form, scene)
        at = None if by_name else patch.sizes(module, form)
        entries = () if at is None else backends.measurements(patch.op, scene.where, scene.backend, *at)
        if plain is not None and all(entry.plain_wins for entry in entries):
            return HarmlessReason("; ".join(f"plain PyTorch is faster, {entry}" for entry in entries) or plain)
        kind = original_class(module)
        key = (patch.op, kind, form, entries)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(
                patch.op, kind, form, self._backend, entries, plain is not None, late=patch.compared_later
            )  # fmt: skip
            site.attempts = patch.attempts(form)
            site.cls = patch.patched_class(site)
            setattr(site.cls, STAYS, staticmethod(functools.partial(serves_tokens, site)))
        site.served, why = patch.served_by(site, scene)
        site.detail = patch.detail(site)
        if site.served != backends.explain(patch.op, scene.where, scene.backend)[0]:
            site.detail = "; ".join(filter(None, (site.detail, why)))
        site.paths.append(path)
        patch.install(site, module, self._undo, self.settings)
        return None


def handle_of(model: nn.Module) -> NpuKernels | None:
    """Returns the handle of a patched model, or None."""
    return _handles.get(model)


def apply_npu_kernels(
    model: nn.Module, *, ops: Sequence[str] | None = None, backend: str | None = None, strict: bool = False,
    tiled_mlp: int = 0, capture: str = "auto",
) -> NpuKernels:  # fmt: skip
    """Replaces computations of one model instance by fused kernels, in place.

    - `rms_norm`, `gated_rms_norm`: every RMSNorm module, recognised by what it computes;
    - `layer_norm`: layer norms in eager code; `torch.nn.LayerNorm` only if the op is requested by name;
    - `add_rms_norm`: a residual addition right before a norm in a decoder layer;
    - `embedding`, `swiglu`, `rope`: token embeddings, gated MLPs, rotary position embedding in attention;
    - `moe_experts`: the experts of a mixture;
    - `varlen_attention`: the body skips padding, and computes a common prefix of a batch's rows once;
    - `linear_cross_entropy`: the LM head and the cross-entropy of its logits, in training;
    - `linear_logprob`: the head that TRL's trainers add (SFT, DPO, KTO, RLOO, GRPO).

    Every call of a replaced module is checked before the op serves it; the module's original code runs the calls that
    the op does not support. Parameters, names, `state_dict` keys and dtypes stay as they are, so a checkpoint saved
    while patched loads unpatched and the other way round.

    Args:
        model: a `transformers` model, or a PEFT model around one.
        ops: names in `PATCHES`, at least one; None: all ops that are worthwhile on the model's device.
        backend: overrides the choice of backend, as `"torch"` or `"rms_norm=torch,linear_logprob=triton"`.
        strict: whether a kernel that cannot be compiled or launched raises `KernelError`; otherwise torch takes over
            for its op, with a warning and a note in the report.
        tiled_mlp: the maximum number of tokens that gated MLPs compute at once; they save only their input for
            backward, which recomputes them slice by slice. 0: all tokens at once.
        capture: whether the body is captured as one graph forward and one backward, and replayed where nothing has
            changed, whatever the lengths of a batch's rows (`patching.bodies`): `"auto"` (on CUDA, where
            that is faster by what was measured in the first steps), `"on"` or `"off"`. On an NPU no body is captured so
            far, since attention there takes lengths from the host. On a CPU `"on"` replays tapes, which is slower and
            is there for tests.

    Returns:
        The handle, which is also a context manager. A second call for the same model patches modules that were added
        since, and returns the same handle.

    Raises:
        TypeError: `model` is not a module.
        ValueError: an unknown op or backend, no op, a backend that cannot run on the model's device, a negative
            `tiled_mlp` or one without its op in `ops`, an environment variable with an invalid value, or a model that
            is already patched with other options.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    check_ops(ops)
    check_switch("strict", strict)
    backends.parse_override("" if backend is None else backend)
    backends.is_strict()  # refuses an invalid environment variable now, not hours later when a kernel fails
    chosen = tuple(PATCHES) if ops is None else tuple(ops)
    check_tiled_mlp("tiled_mlp", tiled_mlp, ops)
    check_capture("capture", capture)
    handle, options = _handles.get(model), (chosen, backend, strict, tiled_mlp, capture)
    if handle is None:
        handle = NpuKernels(model, chosen, ops is not None, backend, strict, tiled_mlp, capture)
    elif handle.options != options:
        before = handle.options
        raise ValueError(
            f"this model is patched already with ops={before[0]}, backend={before[1]!r}, strict={before[2]}, "
            f"tiled_mlp={before[3]}, capture={before[4]!r}; restore that first, or ask for the same (got ops={chosen}, "
            f"backend={backend!r}, strict={strict}, tiled_mlp={tiled_mlp}, capture={capture!r})"
        )
    handle.refresh()
    return handle
