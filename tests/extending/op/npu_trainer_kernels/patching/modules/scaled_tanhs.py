"""Replaces modules that compute scale * tanh(x / scale), whatever their names."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.scaled_tanh import scaled_tanh, scaled_tanh_reference
from ..classes import original_class
from ..patch import PROBE_ERRORS, UNREPORTED, Patch, Scene, Site, keeps_own_code, no_float, set_on_instance
from ..probe import MODES, Settings, agree, changed, repeatable, settings_of, unseen

__all__ = ["ScaledTanhPatch"]

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class ScaledTanhForm:
    """The scale of a module.

    Attributes:
        scale: the number.
        settings: the values that its code reads, when it was recognised.
    """

    scale: float
    settings: Settings

    def __str__(self) -> str:
        return f"scale={self.scale:g}"


def _own(module: nn.Module, training: bool, x: torch.Tensor) -> Any:
    """Runs the module's own code, without hooks."""
    twin: Any = copy.copy(module)
    twin.__class__ = original_class(module)
    twin.__dict__ = {**module.__dict__, "training": training}
    return twin.forward(x)


def _computes(module: nn.Module, scale: float) -> bool:
    """Whether a module computes the op bit for bit, in both modes, with the gradient."""
    reference = functools.partial(scaled_tanh_reference, scale=scale)
    x = torch.linspace(-4.0, 4.0, 65, dtype=torch.float32, device="cpu") * scale
    try:
        for dtype in _DTYPES:
            with torch.no_grad(), torch.device("cpu"):
                found = _own(module, module.training, x.to(dtype))
            if not isinstance(found, torch.Tensor) or not torch.equal(found, reference(x.to(dtype))):
                return False
    except PROBE_ERRORS:
        return False
    return all(agree(functools.partial(_own, module, mode), reference, x) for mode in MODES)


def _is_leaf(module: nn.Module) -> bool:
    return not (module._parameters or module._buffers or module._modules)


class ScaledTanhPatch(Patch):
    """Replaces such modules by `ops.scaled_tanh`."""

    op = "scaled_tanh"

    def recognise(self, module: nn.Module, scene: Scene) -> ScaledTanhForm | str | None:
        numbers = [v for v in vars(module).values() if isinstance(v, float) and v > 0] if _is_leaf(module) else []
        with repeatable():
            scale = next((number for number in numbers if _computes(module, number)), None)
        if scale is None:
            return None
        return set_on_instance(module) or unseen(module) or ScaledTanhForm(scale, settings_of(module))

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "it is given something else than one tensor"
        reason = no_float(args[0]) or changed(module, site.form.settings)
        return UNREPORTED if reason is None and keeps_own_code(site, args[0]) else reason

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return scaled_tanh(args[0], site.form.scale, backend=site.backend)
