"""RMSNorm modules: found by what they compute, not by what they are called.

A module is a candidate when it has no submodules and at most one parameter, a vector named `weight`. Its forward is run
on a few random rows, with random weights, in fp32 and bf16 on the CPU, and compared bit for bit with every form of
`rms_norm_reference`. The form that equals it in both dtypes is what the module computes; where none does, it is left
alone.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _vendor, backends
from ..ops._norm import CASTINGS
from ..ops.rms_norm import rms_norm, rms_norm_reference
from ._classes import original_class
from ._patch import PROBE_ERRORS, QUIET, Patch, Scene, Site, keeps_own_code, no_float, no_plain, set_on_instance

__all__ = [
    "NormForm",
    "RmsNormPatch",
    "epsilons",
    "forms_of",
    "full_shape",
    "is_candidate",
    "norm_twin",
    "norms_of",
    "recognise_norm",
]

_ROWS = 4
# Where a module has no weight, its width does not matter.
_WIDTH_WITHOUT_WEIGHT = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class NormForm:
    """What an RMSNorm module computes: the arguments of `ops.rms_norm`."""

    eps: float
    offset: float
    casting: str
    weighted: bool

    def __str__(self) -> str:
        return f"casting={self.casting}, offset={self.offset:g}, eps={self.eps:g}" + (
            "" if self.weighted else ", no weight"
        )


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the shape of an RMSNorm: a leaf with one vector `weight`, or with nothing but an epsilon."""
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return False
    parameters = dict(module.named_parameters())
    if parameters:
        return list(parameters) == ["weight"] and len(full_shape(parameters["weight"])) == 1
    return "norm" in original_class(module).__name__.lower() and bool(epsilons(module))


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """DeepSpeed's ZeRO-3 leaves an empty tensor in a parameter's place, and notes its shape."""
    return getattr(parameter, "ds_shape", parameter.shape)


def epsilons(module: nn.Module) -> list[float]:
    """Every small positive float among the module's attributes: one of them is its epsilon."""
    found = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-1}
    # torch.nn.RMSNorm(eps=None) takes the input dtype's machine epsilon: not one number, so not a form of ours.
    return sorted(found)


def norm_twin(module: nn.Module, dtype: torch.dtype, parameters: dict[str, torch.Tensor]) -> nn.Module:
    """The module with other parameters, on the CPU, as a copy: works for meta and sharded modules too."""
    twin = copy.copy(module)
    twin.__class__ = original_class(module)
    given = {name: nn.Parameter(value.to(dtype), requires_grad=False) for name, value in parameters.items()}
    twin.__dict__ = {**module.__dict__, "_parameters": given, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    twin.__dict__.pop("forward", None)
    return twin


def recognise_norm(module: nn.Module) -> NormForm | str:
    """What a candidate computes, or why it is left alone."""
    parameter = dict(module.named_parameters()).get("weight")
    width = _WIDTH_WITHOUT_WEIGHT if parameter is None else full_shape(parameter)[0]
    # Dtype and device by name: a default device or dtype of the user's is nothing to a probe.
    generator = torch.Generator("cpu").manual_seed(0)
    given: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": _CPU}
    # Small enough that epsilon counts, and a weight far from 0 and 1 so that offsets show.
    x = 0.01 * torch.randn(_ROWS, width, **given)
    weights = {} if parameter is None else {"weight": torch.rand(width, **given) + 0.25}
    forms = [
        NormForm(eps, offset, casting, parameter is not None)
        for eps, offset, casting in itertools.product(
            epsilons(module), (0.0, 1.0) if parameter is not None else (0.0,), CASTINGS
        )
    ]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = x.to(dtype)
        w = weights["weight"].to(dtype) if weights else None
        try:
            with torch.no_grad(), torch.device("cpu"):
                expected = norm_twin(module, dtype, weights)(inputs)
        except PROBE_ERRORS as error:
            return f"its forward does not take one tensor ({type(error).__name__})"
        if not isinstance(expected, torch.Tensor):
            return "its forward does not return one tensor"
        forms = [
            f
            for f in forms
            if torch.equal(expected, rms_norm_reference(inputs, w, f.eps, offset=f.offset, casting=f.casting))
        ]
    if not forms:
        return "it does not compute an RMSNorm that rms_norm knows"
    return forms[0]


def norms_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module that look like norms, by name."""
    return {name: child for name, child in module.named_children() if is_candidate(child)}


def forms_of(norms: dict[str, nn.Module]) -> dict[str, NormForm]:
    """What is recognised of them."""
    return {name: form for name, child in norms.items() if isinstance(form := recognise_norm(child), NormForm)}


class RmsNormPatch(Patch):
    """Every RMSNorm of a model by `ops.rms_norm`."""

    op = "rms_norm"

    def recognise(self, module: nn.Module, scene: Scene) -> NormForm | str | None:
        if not is_candidate(module):
            return None
        return set_on_instance(module) or recognise_norm(module)

    def declines(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "more than one tensor is given"
        reason = no_float(args[0]) or (no_plain(module, "weight") if site.form.weighted else None)
        if reason is None and keeps_own_code(self.op, args[0], site.backend):
            return QUIET
        return reason

    def run(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        form = site.form
        weight = module._parameters["weight"] if form.weighted else None
        return rms_norm(args[0], weight, form.eps, offset=form.offset, casting=form.casting, backend=site.backend)

    def sizes(self, module: nn.Module, form: NormForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        weight = module._parameters.get("weight")
        return None if weight is None else (weight.dtype, tuple(full_shape(weight)))

    def served_by(self, site: Site, scene: Scene) -> tuple[str, str]:
        def uncovered() -> str | None:
            dtype = scene.dtype
            return _vendor.uncovered_norm(dtype, dtype if site.form.weighted else None, site.form.casting)

        return backends.explain(self.op, scene.where, scene.backend, uncovered)
