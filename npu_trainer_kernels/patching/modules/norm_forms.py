"""Finds which formula a norm computes, by running it, whatever its name.

A candidate has no submodules, and at most a vector `weight` and a vector `bias` as parameters. Its forward runs on a
few random rows with random weights, in fp32 and bf16 on the CPU, and the result is compared bit for bit with every form
of the norms' references: RMSNorm, layer norm, RMSNorm with a gate or in groups. The module computes the form that is
equal in both dtypes and agrees in training, in evaluation and in its gradients; a module without such a form is left
alone.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from ...ops import gated_rms_norm, layer_norm, rms_norm
from ...ops.norms import (
    CASTINGS,
    GATED_CASTINGS,
    NORM_GATES,
    ORDERS,
    gated_rms_norm_reference,
    layer_norm_reference,
    rms_norm_reference,
)
from ..bound_forwards import has_other_forward
from ..classes import has_hooks, original_class
from ..patch import PROBE_ERRORS, no_plain
from ..probe import MODES, Settings, agree, changed, repeatable, settings_of, trace_of, unseen

__all__ = [
    "Form",
    "GatedNormForm",
    "LayerNormForm",
    "NormForm",
    "exchanged",
    "forms_of",
    "full_shape",
    "is_candidate",
    "is_gated",
    "norms_of",
    "of_other_dtypes",
    "recognise_norm",
]

# Inputs have three dimensions, as in a model, so that a norm over the second one is recognised as different.
_ROWS = (2, 3)
# The width where a module has no weight; any will do, unless the module states one.
_WIDTH_WITHOUT_WEIGHT = 64
# For modules without an epsilon among their attributes, as Olmo's.
_EPS_WITHOUT_NAME = 1e-5
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class NormForm:
    """The arguments of `ops.rms_norm` that compute an RMSNorm module.

    Attributes, as in the other forms:
        one_dtype: whether the form holds only if the parameters have the input's dtype.
        settings: the values that the module's code read when it was recognised.
        code: the forward of its class when it was recognised.
    """

    eps: float
    offset: float
    casting: str
    weighted: bool
    one_dtype: bool = False
    settings: Settings = field(default=(), repr=False)
    code: Any = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the op is given."""
        return ("weight",) if self.weighted else ()

    def __str__(self) -> str:
        return f"casting={self.casting}, offset={self.offset:g}, eps={self.eps:g}" + (
            "" if self.weighted else ", no weight"
        )

    def run(self, module: nn.Module, x: torch.Tensor, backend: str | None) -> torch.Tensor:
        """Runs the op in place of the module."""
        weight = module._parameters["weight"] if self.weighted else None
        return rms_norm(x, weight, self.eps, offset=self.offset, casting=self.casting, backend=backend)


@dataclass(frozen=True)
class LayerNormForm:
    """The arguments of `ops.layer_norm` that compute a layer norm.

    Attributes:
        fused: whether the module's own code is `torch.nn.functional.layer_norm`.
    """

    eps: float
    offset: float
    weighted: bool
    biased: bool
    fused: bool
    one_dtype: bool = False
    settings: Settings = field(default=(), repr=False)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the op is given."""
        return tuple(name for name, has in (("weight", self.weighted), ("bias", self.biased)) if has)

    def __str__(self) -> str:
        lacks = [name for name, has in (("weight", self.weighted), ("bias", self.biased)) if not has]
        return f"offset={self.offset:g}, eps={self.eps:g}" + "".join(f", no {name}" for name in lacks)

    def run(self, module: nn.Module, x: torch.Tensor, backend: str | None) -> torch.Tensor:
        """Runs the op in place of the module."""
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        return layer_norm(x, weight, bias, self.eps, offset=self.offset, backend=backend)


@dataclass(frozen=True)
class GatedNormForm:
    """The arguments of `ops.gated_rms_norm` that compute an RMSNorm with a gate or in groups.

    Attributes:
        gated: whether the module takes a gate; `needs_gate`: whether it requires one.
    """

    eps: float
    offset: float
    order: str
    activation: str
    casting: str
    groups: int
    gated: bool
    needs_gate: bool
    one_dtype: bool = False
    settings: Settings = field(default=(), repr=False)
    parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __str__(self) -> str:
        gate = f"{self.order}, {self.activation}, " if self.gated else ""
        return f"{gate}casting={self.casting}, offset={self.offset:g}, groups={self.groups}, eps={self.eps:g}"

    def run(
        self, module: nn.Module, x: torch.Tensor, backend: str | None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the op in place of the module."""
        weight: Any = module._parameters["weight"]
        return gated_rms_norm(x, gate, weight, self.eps, backend=backend, **self.options)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The op's arguments except eps."""
        names = ("offset", "order", "activation", "casting", "groups")
        return {name: getattr(self, name) for name in names}


Form = NormForm | LayerNormForm | GatedNormForm


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns a parameter's shape, also where DeepSpeed's ZeRO-3 leaves an empty tensor and notes the shape."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like a norm of one tensor: a leaf with a vector `weight` and perhaps a `bias`, or without
    parameters but with the name of a norm."""
    return _is_leaf(module) and not is_gated(module)


def is_gated(module: nn.Module) -> bool:
    """Whether a module looks like a norm, and its forward takes a gate besides the tensor."""
    return _is_leaf(module) and len(_arguments(module)) == 2 and "gate" in _arguments(module)[1]


def _is_leaf(module: nn.Module) -> bool:
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return False
    parameters = dict(module.named_parameters())
    if parameters:
        vectors = all(len(full_shape(p)) == 1 for p in parameters.values())
        return list(parameters) in (["weight"], ["weight", "bias"]) and vectors
    name = original_class(module).__name__.lower()
    return "layernorm" in name or ("norm" in name and bool(_epsilons(module)))


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's forward."""
    function: Callable[..., Any] = original_class(module).forward
    return tuple(inspect.signature(function).parameters)[1:]


def _epsilons(module: nn.Module) -> dict[str, float]:
    """Returns the small positive floats among the module's attributes, by name: one of them is its epsilon."""
    # torch.nn.RMSNorm(eps=None) takes the input dtype's machine epsilon, which is not one number and so no form.
    return {name: v for name, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-1}


def of_other_dtypes(module: nn.Module, form: Form, *given: torch.Tensor) -> str | None:
    """Returns why a form does not hold for the dtypes of a call, or None."""
    if form.one_dtype:
        parameters = (module._parameters[name] for name in form.parameters)
        if len({t.dtype for t in (*given, *parameters) if t is not None}) > 1:
            return "parameters of another dtype than what is normed"
    return None


def exchanged(norm: nn.Module, kind: Any, form: NormForm) -> str | None:
    """Returns why a norm inside another module's forward must be called as a module, or None."""
    if has_hooks(norm) or has_other_forward(norm) or original_class(norm) is not kind:
        return "a norm has hooks, or has been exchanged"
    if kind.forward is not form.code:
        return "the class of a norm has been given another forward"
    return no_plain(norm, *form.parameters) or changed(norm, form.settings)


def _groups(module: nn.Module, width: int) -> list[int]:
    """Returns the possible numbers of groups, 1 first: the module's integers may be their number or their size."""
    sizes = {v for v in vars(module).values() if type(v) is int and 1 < v <= width and width % v == 0}
    return [1, *sorted({n for size in sizes for n in (size, width // size)} - {1})]


def _twin(module: nn.Module, parameters: dict[str, torch.Tensor], training: bool) -> nn.Module:
    """Returns a copy of the module with other parameters, on the CPU; works for meta and sharded modules too."""
    twin = copy.copy(module)
    twin.__class__ = original_class(module)
    given = {**dict.fromkeys(module._parameters), **parameters}
    hooks: dict[str, Any] = {"_forward_hooks": {}, "_forward_pre_hooks": {}}
    twin.__dict__ = {**module.__dict__, **hooks, "_parameters": given, "training": training}
    twin.__dict__.pop("forward", None)
    return twin


def _rms_norms(module: nn.Module, names: list[str], width: int) -> Iterator[tuple[Form, Any]]:
    def reference(form: NormForm) -> Any:
        return lambda x, w=None: rms_norm_reference(x, w, form.eps, offset=form.offset, casting=form.casting)

    offsets = (0.0, 1.0) if names else (0.0,)
    for eps, offset, casting in itertools.product(_epsilons(module).values(), offsets, CASTINGS):
        form = NormForm(eps, offset, casting, bool(names), code=original_class(module).forward)
        yield form, reference(form)


def _layer_norms(module: nn.Module, names: list[str], width: int) -> Iterator[tuple[Form, Any]]:
    """Yields eager code, PyTorch's operator, and that operator on tensors cast to fp32."""

    def eager(form: LayerNormForm) -> Any:
        return lambda x, w=None, b=None: layer_norm_reference(x, w, b, form.eps, offset=form.offset)

    def fused(form: LayerNormForm) -> Any:
        def run(x: torch.Tensor, w: Any = None, b: Any = None) -> torch.Tensor:
            w = w + form.offset if form.offset else w
            return F.layer_norm(x, x.shape[-1:], w, b, form.eps)

        return run

    def fused_in_fp32(form: LayerNormForm) -> Any:
        return lambda x, *given: fused(form)(x.float(), *(p.float() for p in given)).to(x.dtype)

    offsets = (0.0, 1.0) if names else (0.0,)
    for eps, offset in itertools.product(_epsilons(module).values() or [_EPS_WITHOUT_NAME], offsets):
        for way in (eager, fused, fused_in_fp32):
            form = LayerNormForm(eps, offset, "weight" in names, "bias" in names, way is not eager)
            yield form, way(form)


def _grouped_norms(module: nn.Module, names: list[str], width: int) -> Iterator[tuple[Form, Any]]:
    def reference(form: GatedNormForm) -> Any:
        return lambda x, w: gated_rms_norm_reference(x, None, w, form.eps, **form.options)

    if names != ["weight"]:
        return
    ways = itertools.product(_epsilons(module).values(), (0.0, 1.0), GATED_CASTINGS, _groups(module, width)[1:])
    for eps, offset, casting, groups in ways:
        form = GatedNormForm(eps, offset, ORDERS[0], NORM_GATES[0], casting, groups, False, False)
        yield form, reference(form)


def _gated_norms(module: nn.Module, names: list[str], width: int) -> Iterator[tuple[Form, Any]]:
    def reference(form: GatedNormForm) -> Any:
        return lambda x, w, gate: gated_rms_norm_reference(x, gate, w, form.eps, **form.options)

    if names != ["weight"]:
        return
    groups = _groups(module, width)
    for eps, order, activation, casting, n in itertools.product(
        _epsilons(module).values(), ORDERS, NORM_GATES, GATED_CASTINGS, groups
    ):
        form = GatedNormForm(eps, 0.0, order, activation, casting, n, True, True)
        yield form, reference(form)


Known = dict[Any, "Form | str"]
"""Forms by everything that a module has except its parameters' values, since layers repeat each other."""


def recognise_norm(module: nn.Module, known: Known | None = None) -> Form | str:
    """Returns a candidate's form, or why it is left alone. `known` is a cache of earlier results."""
    looks = None if known is None else _looks(module)
    if known is None or looks is None:
        return _recognise(module)
    if looks not in known:
        known[looks] = _recognise(module)
    return known[looks]


def _looks(module: nn.Module) -> Any:
    """Returns everything that a leaf has except its parameters' values; None where that cannot be compared."""
    own = [(name, type(v), v) for name, v in vars(module).items() if name not in _OF_EVERY_MODULE]
    if any(not isinstance(v, int | float | str | None) for _, _, v in own):
        return None
    kind: Any = original_class(module)
    shapes = [(name, full_shape(p)) for name, p in module._parameters.items() if p is not None]
    return kind, kind.forward, module.training, tuple(shapes), tuple(own)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _recognise(module: nn.Module) -> Form | str:
    parameters = dict(module.named_parameters())
    if (reason := trace_of(module, hooks=False)) is not None:
        return reason
    names = list(parameters)
    width = full_shape(parameters["weight"])[0] if names else _own_width(module)
    # Explicit dtype and device: the user may have set other defaults.
    generator = torch.Generator("cpu").manual_seed(0)
    given: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": _CPU}
    # Rows are small enough that epsilon counts, except for two in which a clamp shows; weights are far from 0 and 1, so
    # that offsets show.
    sizes = torch.tensor([0.01, 0.01, 0.01, 0.01, 1.0, 1e4], dtype=torch.float32, device=_CPU)
    x = sizes.view(*_ROWS, 1) * torch.randn(*_ROWS, width, **given)
    values = {name: torch.rand(width, **given) + 0.25 for name in names}
    if is_gated(module):
        gate = 2 * torch.randn(*_ROWS, width, **given)
        found = _equal_forms(module, (_gated_norms,), width, x, values, gate)
        if isinstance(found, GatedNormForm):
            return _without_gate(module, found, x, values)
        return found or "it does not compute a gated RMSNorm that gated_rms_norm knows"
    if "bias" in names:
        found = _equal_forms(module, (_layer_norms,), width, x, values)
        return found or "it does not compute a layer norm that layer_norm knows"
    found = _equal_forms(module, (_rms_norms, _layer_norms, _grouped_norms), width, x, values)
    return found or "it does not compute an RMSNorm that rms_norm knows"


def _own_width(module: nn.Module) -> int:
    shape = getattr(module, "normalized_shape", ())
    return shape[-1] if isinstance(shape, tuple) and len(shape) == 1 else _WIDTH_WITHOUT_WEIGHT


def _equal_forms(
    module: nn.Module,
    kinds: tuple[Callable[[nn.Module, list[str], int], Iterator[tuple[Form, Any]]], ...],
    width: int,
    x: torch.Tensor,
    values: dict[str, torch.Tensor],
    *gate: torch.Tensor,
) -> Form | str | None:
    """Returns the first form that the module computes, None where there is none, or why the module cannot be run."""
    names, inputs = list(values), (x, *values.values(), *gate)
    forms = [way for kind in kinds for way in kind(module, names, width)]
    own = _own(module, names, module.training)
    for dtype in _DTYPES:
        given = [t.to(dtype) for t in inputs]
        try:
            with torch.no_grad(), torch.device("cpu"), repeatable():
                expected = own(*given)
        except PROBE_ERRORS as error:
            return f"its forward cannot be probed ({type(error).__name__})"
        if not isinstance(expected, torch.Tensor):
            return "its forward does not return one tensor"
        forms = [(f, run) for f, run in forms if _same(expected, run(*given))]
    forms = [(f, run) for f, run in forms if _agrees(module, names, run, *inputs)]
    if not forms:
        return None
    # Forms that are equal in one dtype may differ for mixed dtypes.
    mixed = (form for form, run in forms if _holds_mixed(own, run, inputs, len(names)))
    found = next(mixed, None) or replace(forms[0][0], one_dtype=True)
    return unseen(module) or replace(found, settings=settings_of(module))


def _holds_mixed(
    own: Callable[..., Any], run: Callable[..., Any], inputs: tuple[torch.Tensor, ...], parameters: int
) -> bool:
    """Whether a form holds for all dtypes of the input, the parameters and the gate."""
    for of_x, of_parameters, of_gate in itertools.product(_DTYPES, repeat=3):
        dtypes = [of_x, *(of_parameters if i < parameters else of_gate for i in range(len(inputs) - 1))]
        given = [t.to(dtype) for t, dtype in zip(inputs, dtypes, strict=True)]
        try:
            with torch.no_grad(), torch.device("cpu"), repeatable():
                if len(set(dtypes)) > 1 and not _same(own(*given), run(*given)):
                    return False
        except PROBE_ERRORS:
            return False
    return True


def _own(module: nn.Module, names: list[str], training: bool) -> Callable[..., Any]:
    """Returns the module as a function of its input, its parameters and its gate."""

    def own(x: torch.Tensor, *given: torch.Tensor) -> Any:
        count = len(names)
        return _twin(module, dict(zip(names, given, strict=False)), training)(x, *given[count:])

    return own


def _agrees(module: nn.Module, names: list[str], run: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    with repeatable():
        return all(agree(_own(module, names, training), run, *inputs) for training in MODES)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _without_gate(
    module: nn.Module, form: GatedNormForm, x: torch.Tensor, values: dict[str, torch.Tensor]
) -> GatedNormForm:
    """Returns the form with `needs_gate=False` if it also holds without a gate, else the form itself."""
    alone = replace(form, needs_gate=False)

    def reference(form: GatedNormForm) -> Any:
        return lambda x, w: gated_rms_norm_reference(x, None, w, form.eps, **form.options)

    found = _equal_forms(module, (lambda module, names, width: iter([(alone, reference(alone))]),), 0, x, values)
    return alone if found == alone else form


def norms_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the children of a module that look like RMSNorms, by name."""
    return {
        name: child
        for name, child in module.named_children()
        if is_candidate(child) and "bias" not in child._parameters
    }


def forms_of(norms: dict[str, nn.Module], known: Known | None = None) -> dict[str, NormForm]:
    """Returns the forms of those that are RMSNorms."""
    found = {name: recognise_norm(child, known) for name, child in norms.items()}
    return {name: form for name, form in found.items() if isinstance(form, NormForm)}
