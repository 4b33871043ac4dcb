"""Replaces norms by the op of the formula that they compute (`norm_forms`)."""

from typing import Any

import torch
from torch import nn

from ... import backends, vendor
from ...ops.host import autocasts
from ..call import CallSettings
from ..parallel import plain_inside, serve_inside
from ..patch import UNREPORTED, Patch, Scene, Site, keeps_own_code, no_float, no_plain, set_on_instance
from ..probe import changed
from ..undo import Undo
from .norm_forms import (
    Form,
    GatedNormForm,
    LayerNormForm,
    NormForm,
    full_shape,
    is_candidate,
    is_gated,
    of_other_dtypes,
    recognise_norm,
)

__all__ = ["GatedRmsNormPatch", "LayerNormPatch", "RmsNormPatch"]


class _NormPatch(Patch):
    """The part that the three patches have in common.

    A patch ignores a candidate that computes another op's norm. A candidate that computes no known norm is reported
    once, by the patch whose op has its parameters and arguments (`_is_at_home`).
    """

    form: type[Form]

    def _is_at_home(self, module: nn.Module) -> bool:
        raise NotImplementedError

    def recognise(self, module: nn.Module, scene: Scene) -> Form | str | None:
        home = self._is_at_home(module)
        if not home and not is_candidate(module):
            return None
        aside = None if plain_inside(module) else set_on_instance(module)
        found = aside or recognise_norm(module, scene.norms)
        if isinstance(found, str):
            return found if home else None
        return found if isinstance(found, self.form) else None

    def declines(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "it is given something else than one tensor"
        return self._declines(site, module, args[0])

    def _declines(self, site: Site, module: nn.Module, x: Any) -> str | None:
        form = site.form
        reason = no_float(x) or no_plain(module, *form.parameters) or changed(module, form.settings)
        reason = reason or of_other_dtypes(module, form, x)
        if reason is None and keeps_own_code(site, x):
            return UNREPORTED
        return reason

    def run(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return site.form.run(module, args[0], site.backend)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        if plain_inside(module):
            serve_inside(module, site.cls, undo)

    def sizes(self, module: nn.Module, form: Form) -> tuple[torch.dtype, tuple[int, ...]] | None:
        weight = module._parameters.get("weight")
        return None if weight is None else (weight.dtype, tuple(full_shape(weight)))


class RmsNormPatch(_NormPatch):
    """Replaces every RMSNorm of a model by `ops.rms_norm`."""

    op = "rms_norm"
    form = NormForm

    def _is_at_home(self, module: nn.Module) -> bool:
        return is_candidate(module) and "bias" not in module._parameters

    def served_by(self, site: Site, scene: Scene) -> tuple[str, str]:
        def uncovered() -> str | None:
            dtype = scene.dtype
            return vendor.uncovered_norm(dtype, dtype if site.form.weighted else None, site.form.casting)

        return backends.explain(self.op, scene.where, scene.backend, uncovered)


class LayerNormPatch(_NormPatch):
    """Replaces layer norms in eager code by `ops.layer_norm`; PyTorch's own operator only where the op is requested."""

    op = "layer_norm"
    form = LayerNormForm

    def _is_at_home(self, module: nn.Module) -> bool:
        return is_candidate(module) and "bias" in module._parameters

    def sizes(self, module: nn.Module, form: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        # The measurements compare with eager code.
        return None if form.fused else super().sizes(module, form)

    def keeps_plain(self, form: LayerNormForm, scene: Scene) -> str | None:
        return backends.keeps_plain(self.op, scene.where, scene.backend, fused=form.fused)

    def _declines(self, site: Site, module: nn.Module, x: Any) -> str | None:
        if site.form.fused and no_float(x) is None and autocasts(x):
            return "autocast runs torch.nn.functional.layer_norm in float32"
        return super()._declines(site, module, x)


class GatedRmsNormPatch(_NormPatch):
    """Replaces RMSNorms with a gate, or in groups, by `ops.gated_rms_norm`."""

    op = "gated_rms_norm"
    form = GatedNormForm

    def _is_at_home(self, module: nn.Module) -> bool:
        return is_gated(module)

    def declines(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        form: GatedNormForm = site.form
        if not form.gated:
            return super().declines(site, module, *args, **kwargs)
        if len(args) + len(kwargs) > 2 or not args or (kwargs and "gate" not in kwargs):
            return "more than one tensor and a gate are given"
        x, gate = args[0], _gate(args, kwargs)
        if gate is None:
            return "no gate is given" if form.needs_gate else self._declines(site, module, x)
        reason = self._declines(site, module, x) or no_float(gate) or of_other_dtypes(module, form, x, gate)
        return "x and gate of two shapes" if reason is None and gate.shape != x.shape else reason

    def run(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        form: GatedNormForm = site.form
        return form.run(module, args[0], site.backend, _gate(args, kwargs))


def _gate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("gate")
