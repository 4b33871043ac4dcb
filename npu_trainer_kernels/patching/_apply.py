"""`apply_npu_kernels`: from a model to its handle."""

import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import _vendor, backends, device
from ._call import CallSettings, track_calls
from ._classes import is_patched_class, original_class
from ._embeddings import patched_embedding_class, recognise_embedding
from ._head import patch_head, recognise_head
from ._measured import described, model_sizes, switching_class
from ._mlps import is_bare_linear, is_gated_mlp, patched_mlp_class, recognise_mlp
from ._norms import NormForm, is_candidate, patched_norm_class, recognise_norm
from ._report import LeftAlone, Replaced, Report
from ._rewrites import (
    normed_projections,
    patched_layer_class,
    patched_rope_class,
    recognise_layer,
    recognise_rope,
)
from ._trl import seam
from ._undo import Undo

__all__ = ["PATCHES", "NpuKernels", "apply_npu_kernels"]

# In this order: a decoder layer's rewrite needs its norms, and both name the same modules.
PATCHES = ("rms_norm", "add_rms_norm", "embedding", "swiglu", "rope", "linear_cross_entropy", "linear_logprob")

_handles: "weakref.WeakKeyDictionary[nn.Module, NpuKernels]" = weakref.WeakKeyDictionary()


class NpuKernels:
    """What `apply_npu_kernels` returns: says what was replaced, and puts it back.

    A context manager: leaving it restores. Applying again to the same model returns the same handle.
    """

    def __init__(
        self, model: nn.Module, ops: tuple[str, ...], by_name: bool, backend: str | None, strict: bool
    ) -> None:
        self._model = weakref.ref(model)
        self._by_name = by_name
        self._ops, self._backend, self._strict = ops, backend, strict
        self._undo = Undo()
        self._report = Report()
        self._settings = CallSettings(trl_backend=backend)
        self._tracked: set[int] = set()
        self._head_detail = ""
        self._where = torch.device("cpu")
        self._plain: str | None = None  # why models keep their own code for the op that is being looked at

    @property
    def active(self) -> bool:
        """Whether anything is replaced at present."""
        return len(self._undo) > 0

    @property
    def serves_trl(self) -> bool:
        """Whether ours answers in place of TRL's fused head."""
        return self._settings.serves_trl

    @property
    def tokens(self) -> int:
        """Input tokens that training forwards of the patched model have seen, on this process."""
        return self._settings.tokens

    def report(self) -> Report:
        """What was replaced and what was left alone, and which kernels have failed since; it stays after `restore`."""
        for op, reason in backends.failures().items():
            self._report.note(f"{op} runs in torch since a kernel failed: {reason}")
        return self._report

    def restore(self) -> None:
        """Puts everything back as it was: classes, attributes, hooks, TRL's names. Does nothing the second time."""
        self._undo.restore()
        self._tracked.clear()
        self._settings.serves_trl = False
        model = self._model()
        if model is not None and _handles.get(model) is self:
            del _handles[model]

    def __repr__(self) -> str:
        # What notebooks and consoles show of a value.
        return str(self.report())

    def __enter__(self) -> "NpuKernels":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def refresh(self) -> None:
        """Patches what has been added, exchanged or set otherwise in the model since; the rest stays as it is."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model that these kernels were applied to no longer exists")
        where = next((p.device for p in model.parameters()), torch.device("cpu"))
        if where.type == "meta":
            where = torch.device(device.accelerator())
        self._where = where
        earlier = self._report
        self._report = Report(
            device=device.spec(where).name, notes=earlier.notes, note_ops=earlier.note_ops, unused=earlier.unused
        )
        try:
            if self._strict and not self.active:
                self._undo.add(backends.require_strict())
            for op in self._ops:
                plain = None if self._by_name else backends.keeps_plain(op, where, self._backend)
                if plain is not None and not backends.every_measurement(op, where, self._backend):
                    self._report.left_alone.append(LeftAlone("", "", op, plain, counts=False))
                    continue
                self._plain = plain
                name, reason = backends.explain(op, where, self._backend)
                self._report.reasons[op] = reason
                getattr(self, f"_patch_{op}")(model, name)
        except BaseException:
            self.restore()
            raise

    def _replace(self, path: str, module: nn.Module, op: str, backend: str, detail: str, cls: type[nn.Module]) -> None:
        at = None if self._by_name else model_sizes(op, module)
        entries = () if at is None else backends.measurements(op, self._where, self._backend, *at)
        if self._plain is not None and all(entry.plain_wins for entry in entries):
            measured = "; ".join(f"plain PyTorch is faster, {entry}" for entry in entries)
            return self._leave(path, module, op, measured or self._plain, counts=False)
        cls = switching_class(module, cls, op, entries, self._plain is not None)
        # Another of ours where the model has changed since; what somebody has put on top of ours stays.
        if original_class(module) is type(module) or (is_patched_class(type(module)) and type(module) is not cls):
            self._undo.set_class(module, cls)
        kind = original_class(module).__name__
        self._report.replaced.append(Replaced(path, kind, op, backend, detail, described(entries)))

    def _leave(self, path: str, module: nn.Module, op: str, reason: str, counts: bool = True) -> None:
        self._report.left_alone.append(LeftAlone(path, original_class(module).__name__, op, reason, counts))

    def _patch_rms_norm(self, model: nn.Module, backend: str) -> None:
        for path, module in model.named_modules():
            if not is_candidate(module):
                continue
            form = recognise_norm(module)
            if isinstance(form, str):
                self._leave(path, module, "rms_norm", form)
            else:
                cls = patched_norm_class(module, form, self._backend)
                served, why = self._norm_backend(module, form)
                detail = str(form) if served == backend else f"{form}; {why}"
                self._replace(path, module, "rms_norm", served, detail, cls)

    def _norm_backend(self, module: Any, form: NormForm) -> tuple[str, str]:
        """What serves a norm when it is given values of its weight's dtype, and why."""

        def uncovered() -> str | None:
            dtype = module.weight.dtype if form.weighted else None
            return _vendor.uncovered_norm(dtype or torch.float32, dtype, form.casting)

        return backends.explain("rms_norm", self._where, self._backend, uncovered)

    def _patch_add_rms_norm(self, model: nn.Module, backend: str) -> None:
        for path, module in model.named_modules():
            found = recognise_layer(module)
            if isinstance(found, str):
                self._leave(path, module, "add_rms_norm", found)
            elif found is not None:
                cls = patched_layer_class(module, found, self._backend)
                self._replace(path, module, "add_rms_norm", backend, ", ".join(name for name, _ in found[1]), cls)

    def _patch_embedding(self, model: nn.Module, backend: str) -> None:
        for path, module in model.named_modules():
            if not isinstance(module, nn.Embedding):
                continue
            scale = recognise_embedding(module)
            if isinstance(scale, str):
                self._leave(path, module, "embedding", scale)
            else:
                cls = patched_embedding_class(module, scale, self._backend)
                self._replace(path, module, "embedding", backend, "" if scale is None else f"scale={scale:g}", cls)

    def _patch_swiglu(self, model: nn.Module, backend: str) -> None:
        for path, module in model.named_modules():
            if not is_gated_mlp(module):
                continue
            reason = recognise_mlp(module)
            if reason is not None:
                self._leave(path, module, "swiglu", reason)
            else:
                detail = "with down_proj" if is_bare_linear(module.down_proj) else "down_proj apart"
                self._replace(path, module, "swiglu", backend, detail, patched_mlp_class(module, self._backend))

    def _patch_rope(self, model: nn.Module, backend: str) -> None:
        keeps_no_products = self._keeps_no_products(model)
        for path, module in model.named_modules():
            found = recognise_rope(module)
            if isinstance(found, str):
                self._leave(path, module, "rope", found)
            elif found is not None:
                forms = normed_projections(module, found) if keeps_no_products else ()
                detail = f"no product kept before {', '.join(name for name, _ in forms)}" if forms else ""
                cls = patched_rope_class(module, found, forms, self._backend)
                self._replace(path, module, "rope", backend, detail, cls)

    def _keeps_no_products(self, model: nn.Module) -> bool:
        """Whether memory counts for more than a matrix product: where layers are checkpointed that is said already."""
        checkpoints = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
        return checkpoints and "rms_norm" in self._ops

    def _track(self, *modules: nn.Module) -> None:
        # PEFT and prompt wrappers are given the labels first, and some call the inner model's forward directly.
        for module in modules:
            if id(module) not in self._tracked:
                track_calls(module, self._settings, self._undo)
                self._tracked.add(id(module))

    def _patch_linear_cross_entropy(self, model: nn.Module, backend: str) -> None:
        path, causal_lm = _causal_lm(model)
        if causal_lm is None:
            self._report.left_alone.append(LeftAlone("", "", "linear_cross_entropy", "no causal language model found"))
            return
        kind = original_class(causal_lm).__name__
        head = causal_lm.get_output_embeddings()
        if head is None or original_class(head) is type(head):
            found = recognise_head(causal_lm)
            if isinstance(found, str):
                self._report.left_alone.append(LeftAlone(path, kind, "linear_cross_entropy", found))
                return
            head, form = found
            patch_head(causal_lm, head, form, self._backend, self._undo)
            self._head_detail = str(form)
        self._track(model, causal_lm)
        self._report.replaced.append(Replaced(path, kind, "linear_cross_entropy", backend, self._head_detail))
        self._report.note(
            "while training with labels the model returns its loss, and logits of width 0", "linear_cross_entropy"
        )

    def _patch_linear_logprob(self, model: nn.Module, backend: str) -> None:
        reason = seam.unsupported()
        path, causal_lm = _causal_lm(model)
        if reason is None and causal_lm is None:
            reason = "no causal language model found"
        if reason is not None or causal_lm is None:
            # A process that has not imported TRL does not train with it.
            counts = "trl" in sys.modules
            self._report.left_alone.append(LeftAlone("", "", "linear_logprob", reason or "", counts))
            return
        if not self._settings.serves_trl:
            seam.acquire()
            self._undo.add(seam.release)
            self._settings.serves_trl = True
        self._track(model, causal_lm)
        self._report.replaced.append(Replaced(path, original_class(causal_lm).__name__, "linear_logprob", backend))


def _causal_lm(model: nn.Module) -> tuple[str, Any]:
    """The module inside `model` (or itself) that owns the LM head and the loss."""
    for path, module in model.named_modules():
        owns = hasattr(type(module), "get_output_embeddings") and hasattr(type(module), "loss_function")
        if owns and module.get_output_embeddings() is not None:
            return path, module
    return "", None


def apply_npu_kernels(
    model: nn.Module, *, ops: Sequence[str] | None = None, backend: str | None = None, strict: bool = False
) -> NpuKernels:
    """Puts the fused kernels into a model, in place, on this instance alone.

    - `rms_norm`: every RMSNorm module, recognised by what it computes;
    - `add_rms_norm`: a residual add right before a norm in a decoder layer;
    - `embedding`, `swiglu`, `rope`: token embeddings, gated MLPs, rotary position embedding in attention;
    - `linear_cross_entropy`: LM head and loss, when the model is trained with labels;
    - `linear_logprob`: the head that TRL's trainers add (SFT, DPO, KTO, RLOO, GRPO).

    Parameters, names, `state_dict` keys and dtypes stay as they are, so a checkpoint saved while patched loads
    unpatched and the other way round.

    Args:
        model: a `transformers` model, or a PEFT model around one.
        ops: which of `PATCHES`; None: all that are worth it on the model's device.
        backend: overrides the choice of backend, as `"torch"` or `"rms_norm=torch,linear_logprob=triton"`.
        strict: a kernel that cannot be compiled or launched raises `KernelError`, in this process and until `restore`;
            otherwise torch takes over for its op, with a warning and a note in the report.

    Returns:
        The handle; also usable as a context manager. A second call for the same model returns the same handle after
        looking for modules that were added since.

    Raises:
        TypeError: `model` is not a module.
        ValueError: unknown op or backend, a backend that cannot run on the model's device, or the model is patched
            already with other options.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    chosen = PATCHES if ops is None else tuple(ops)
    unknown = [op for op in chosen if op not in PATCHES]
    if isinstance(ops, str) or unknown:
        raise ValueError(f"ops must be a sequence of {', '.join(PATCHES)}; got {ops!r}")
    handle = _handles.get(model)
    if handle is None:
        handle = NpuKernels(model, chosen, ops is not None, backend, strict)
    elif (handle._ops, handle._backend, handle._strict) != (chosen, backend, strict):
        raise ValueError(
            f"this model is patched already with ops={handle._ops}, backend={handle._backend!r}, "
            f"strict={handle._strict}; restore that first, or ask for the same (got ops={chosen}, "
            f"backend={backend!r}, strict={strict})"
        )
    handle.refresh()
    _handles[model] = handle
    return handle
