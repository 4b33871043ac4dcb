"""Replaces mixtures of experts with transformers' experts interface by `ops.moe_experts`.

A candidate has the flags that `use_experts_implementation` sets (gate, biases, transposed weights, a norm after each
expert). They determine the names of its parameters and its formula; transformers' own implementations read nothing
else. A probe shows that the class computes this formula: its eager code runs on a few rows, with small weights in place
of its own, and the result is compared with the op's. So the real weights may be sharded, quantised or not loaded yet.
The gate is compared bit for bit (`gate_forms`); an unknown gate runs its original code between the op's products.

While PEFT's adapters of expert parameters are on, the op gets the weights that PEFT makes of both, as the module's own
code does, and the gradients of these weights go on to the adapters.

Experts outside of the interface have no common code that an op could replace: they are left alone, and the report says
so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...ops.checks import FLOATS
from ...ops.experts import moe_experts, unserved
from ...ops.host import autocasts, compute_dtype
from ...support.configs import SLOTS, setting
from ..bound_forwards import has_other_forward
from ..call import CallSettings
from ..classes import has_hooks, original_class
from ..parallel import plain_inside, serve_inside
from ..patch import PLAIN, PROBE_ERRORS, Patch, Scene, Site, no_float, no_plain, set_on_instance
from ..probe import MODES, Settings, agree, changed, repeatable, settings_of, trace_of, unseen
from ..undo import Undo
from .gate_forms import GateForm, gate_of, joined_gate_form, numbers_of
from .norm_forms import full_shape

# By name, the implementations that the op replaces besides the eager one. Transformers before 5 has no such interface,
# and so no module with its flags.
_STOCK: dict[str, Any] = {}
_interface: Any = {}
try:
    from transformers.integrations import moe

    _STOCK = {"grouped_mm": moe.grouped_mm_experts_forward, "batched_mm": moe.batched_mm_experts_forward}
    _interface = moe.ALL_EXPERTS_FUNCTIONS
except ImportError:
    pass

__all__ = ["ExpertsPatch"]

_FLAGS = ("has_gate", "has_bias", "is_transposed")
_IDS = (torch.int64, torch.int32)
# Sizes of the probe, in which one expert has no row.
_EXPERTS, _COLS, _INNER = 4, 8, 12
_CHOSEN = ((0, 2), (2, 0), (0, 3), (3, 2), (2, 3))


@dataclass(frozen=True)
class ExpertsForm:
    """The formula of an experts module.

    Attributes:
        arguments: the names of rows, experts and routing weights in its forward.
        gate: the formula between the two products; None: the module's own code computes it.
        gated: whether the first product has a gate and an up.
        transposed: whether weights are stored `[experts, in, out]`.
        biased: whether both products have a bias.
        normed: whether a norm follows each expert.
        code: the class's function for the gate.
        activation: the class of its activation, where that is a module.
        settings: the values that the code of the gate, and of an activation module, read when they were recognised.
        refused: by device and dtype, why the device does not serve the products, or None.
        dispatching: the objects that bring rows to these modules from other ranks, and that call the op.
    """

    arguments: tuple[str, str, str]
    gate: GateForm | None
    gated: bool
    transposed: bool
    biased: bool
    normed: bool
    code: Any = field(repr=False)
    activation: Any = field(repr=False)
    settings: tuple[Settings, Settings] = field(repr=False)
    refused: dict[tuple[str, torch.dtype], str | None] = field(default_factory=dict, compare=False, repr=False)
    dispatching: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, compare=False, repr=False)

    @functools.cached_property
    def weights(self) -> tuple[str, str]:
        """The names of both weights."""
        return "gate_up_proj" if self.gated else "up_proj", "down_proj"

    @functools.cached_property
    def biases(self) -> tuple[str, ...]:
        """The names of both biases, if there are any."""
        return tuple(f"{name}_bias" for name in self.weights) if self.biased else ()

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The op's arguments that are neither tensors nor code of the module."""
        options: dict[str, Any] = {"gated": self.gated, "transposed": self.transposed}
        if self.gate is not None:
            given = dict(self.gate.options)
            options |= {"gate": given.pop("activation"), "interleaved": given.pop("joined") == "interleaved", **given}
        return options

    def sizes(self, module: Any) -> tuple[int, int]:
        """Returns the width of rows, and the width between the two products."""
        shape = full_shape(_weight(module, "down_proj"))
        return (shape[2], shape[1]) if self.transposed else (shape[1], shape[2])

    def serve(
        self, module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, backend: str | None
    ) -> torch.Tensor:
        """Runs the op with the parameters of a module."""
        first, second = (_weight(module, name) for name in self.weights)
        first_bias, second_bias = (_weight(module, name) for name in self.biases) if self.biased else (None, None)
        code: dict[str, Any] = {}
        if self.gate is None:
            code["gate"] = module._apply_gate if self.gated else module.act_fn
        if self.normed:
            code["post_norm"] = module.post_expert_norm
        return moe_experts(
            x, ids, weights, first, second, gate_up_bias=first_bias, down_bias=second_bias, backend=backend,
            **self.options, **code,
        )  # fmt: skip

    def __str__(self) -> str:
        said = ["its own gate" if self.gate is None else str(self.gate)]
        said += ["no gate"] if self.gate is not None and not self.gated else []
        flags = {"transposed": self.transposed, "biases": self.biased, "a norm behind each expert": self.normed}
        return ", ".join([*said, *(name for name, there in flags.items() if there)])


_ADAPTERS = "peft."
"""The beginning of the modules whose parametrisations are adapted weights, which do not change during a call."""


def _weight(module: Any, name: str) -> Any:
    """Returns a parameter, or the weight that adapters have put in its place: PEFT adds theirs while the module is
    called, and computes the sum once for a call. Its gradient goes on to the adapters."""
    own = module._parameters.get(name)
    return getattr(module, name) if own is None and _is_adapted(module, name) else own


def _is_adapted(module: Any, name: str) -> bool:
    parametrisations = module._modules.get("parametrizations")
    if parametrisations is None or name not in parametrisations:
        return False
    return all(type(each).__module__.startswith(_ADAPTERS) for each in parametrisations[name])


def _no_weights(module: Any, *names: str) -> str | None:
    """Returns why the op cannot read the weights of a call, or None."""
    adapted = [name for name in names if _is_adapted(module, name)]
    if adapted and any(
        type(_weight(module, n)) not in PLAIN or _weight(module, n).dtype not in FLOATS for n in adapted
    ):
        return "its adapted weights are no plain float32, bfloat16 or float16 tensors"
    return no_plain(module, *(name for name in names if name not in adapted))


def _has_flags(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def _dispatchers(module: Any) -> list[Any]:
    """Returns the objects that bring rows to a module from other ranks under transformers' expert parallelism. The
    forward set on the instance calls one of them, and that calls the class's forward with unsharded weights."""
    forward = vars(module).get("forward")
    if getattr(forward, "__module__", None) != "transformers.distributed.expert_parallel":
        return []
    outer = inspect.getclosurevars(forward).nonlocals.get("implementation")
    # An implementation may hold others, and choose between them.
    return [] if outer is None else [p for p in (outer, *vars(outer).values()) if hasattr(p, "experts_forward")]


def _implementation(module: Any) -> str | None:
    """Returns why the op must not replace the implementation that a module's configuration requests, or None."""
    name = module.config._experts_implementation
    if name in (None, "eager") or (name in _STOCK and _interface[name] is _STOCK[name]):
        return None
    return f"its configuration asks for experts_implementation={name!r}, which stays"


def _activation(module: Any) -> nn.Module | None:
    """Returns a module's activation, if it is a module."""
    found: nn.Module | None = module._modules.get("act_fn")
    return found


def _gate(module: Any, kind: Any) -> GateForm | None:
    """Returns the formula between a module's products, if the op has it."""
    if unseen(module, "_apply_gate" if module.has_gate else "act_fn"):
        return None
    if not module.has_gate:
        known = gate_of(module.act_fn)
        return None if known is None else GateForm(known)
    return joined_gate_form(lambda both: kind._apply_gate(module, both), numbers_of(module))


def _recognise(module: Any) -> ExpertsForm | str:
    kind: Any = original_class(module)
    arguments = tuple(inspect.signature(kind.forward).parameters)[1:]
    if len(arguments) != 3:
        return f"its forward takes {', '.join(arguments)}"
    activation = _activation(module)
    traces = trace_of(module, hooks=False), None if activation is None else trace_of(activation)
    if (reason := next(filter(None, traces), None)) is not None:
        return reason
    form = ExpertsForm(
        arguments=arguments,
        gate=None if "_apply_gate" in vars(module) else _gate(module, kind),
        gated=module.has_gate,
        transposed=module.is_transposed,
        biased=module.has_bias,
        normed=getattr(module, "has_post_expert_norm", False),
        code=getattr(kind, "_apply_gate", None),
        activation=None if activation is None else original_class(activation),
        settings=(
            settings_of(module, "_apply_gate" if module.has_gate else "act_fn"),
            () if activation is None else settings_of(activation),
        ),
    )
    absent = [name for name in (*form.weights, *form.biases) if module._parameters.get(name) is None]
    if absent:
        return f"it has no parameter {absent[0]} (adapters and quantisation put theirs in the place of it)"
    odd = next((name for name in form.weights if module._parameters[name].dtype not in FLOATS), None)
    if odd is not None:
        return f"its {odd} is quantised ({str(module._parameters[odd].dtype).removeprefix('torch.')})"
    # The interface's decorator states that the flags describe all of a forward; a derived class states nothing.
    derived = None if hasattr(kind.forward, "__wrapped__") else unseen(module)
    return _unproven(module, kind, form) or derived or form


class _Squares(nn.Module):
    """Takes the place of the norm after each expert in a probe: squares do not commute with a weighted sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def _twin(module: Any, kind: Any, form: ExpertsForm) -> Any:
    """Returns a copy of the module with small random weights on the CPU in fp32."""
    generator = torch.Generator("cpu").manual_seed(0)

    def parameter(*shape: int) -> nn.Parameter:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return nn.Parameter(values, requires_grad=False)

    wide = 2 * _INNER if form.gated else _INNER
    shapes = ((wide, _COLS), (_COLS, _INNER))
    parameters = {
        name: parameter(_EXPERTS, *(reversed(shape) if form.transposed else shape))
        for name, shape in zip(form.weights, shapes, strict=True)
    }
    parameters.update({name: parameter(_EXPERTS, shape[0]) for name, shape in zip(form.biases, shapes, strict=False)})
    twin = kind.__new__(kind)
    twin.__dict__ = {
        **module.__dict__,
        "_parameters": {**module._parameters, **parameters},
        "_modules": {**module._modules, **({"post_expert_norm": _Squares()} if form.normed else {})},
        "num_experts": _EXPERTS,
        "config": SimpleNamespace(_experts_implementation="eager"),
    }
    return twin


def _unproven(module: Any, kind: Any, form: ExpertsForm) -> str | None:
    """Returns how a run on a few rows contradicts a form, or None."""
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(len(_CHOSEN), _COLS, generator=generator, dtype=torch.float32, device="cpu")
    ids = torch.tensor(_CHOSEN, device="cpu", dtype=torch.int64)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu")

    def ours(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return form.serve(_twin(module, kind, form), x, ids, weights, "torch")

    def own(training: bool, x: torch.Tensor, weights: torch.Tensor) -> Any:
        twin = _twin(module, kind, form)
        twin.training = training
        return kind.forward(twin, x, ids.clone(), weights)

    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), repeatable():
            own(module.training, x.clone(), weights.clone())
    except PROBE_ERRORS as error:
        return f"its forward cannot be probed ({type(error).__name__})"
    with repeatable():
        if all(agree(functools.partial(own, training), ours, x, weights) for training in MODES):
            return None
    return "its own code computes something else than its flags say"


class ExpertsPatch(Patch):
    """Replaces experts of transformers' interface by `ops.moe_experts`."""

    op = "moe_experts"

    def candidates(self, scene: Scene) -> Iterable[tuple[str, nn.Module]]:
        # Other experts, recognised by their path, are candidates too, so the report says why they are left alone.
        for path, module in scene.model.named_modules():
            if _has_flags(module) or path.rpartition(".")[2] == "experts":
                yield path, module

    def misses(self, scene: Scene) -> bool:
        # No measurement favours the models' own code, so a user whose model has experts should learn of the op.
        return any(_has_flags(module) for module in scene.model.modules())

    def recognise(self, module: Any, scene: Scene) -> ExpertsForm | str | None:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return "its experts are modules of their own, each with its own products"
        if not _has_flags(module):
            if any(map(_has_flags, module.modules())):
                return None  # a wrapper of adapters: the experts in it are a candidate
            return "its code is its own: it does not come through transformers' experts interface"
        aside = None if _dispatchers(module) or plain_inside(module) else set_on_instance(module)
        found = aside or _implementation(module) or _recognise(module)
        if isinstance(found, str):
            return found
        weight = module._parameters[found.weights[0]]
        return unserved(scene.where, weight.dtype, *found.sizes(module), backend=scene.backend) or found

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        if plain_inside(module):
            serve_inside(module, site.cls, undo)
        there = weakref.ref(module)  # the undo record must not keep the module alive

        def experts_forward(*args: Any, **kwargs: Any) -> Any:
            return site.cls.forward(there(), *args, **kwargs)

        for dispatcher in _dispatchers(module):
            if dispatcher not in site.form.dispatching:
                site.form.dispatching.add(dispatcher)
                undo.set_attribute(dispatcher, "experts_forward", experts_forward)

    def sizes(self, module: Any, form: ExpertsForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        chosen = setting(module.config, *SLOTS)
        if type(chosen) is not int or not form.gated:
            return None
        weight = module._parameters["down_proj"]
        return weight.dtype, (*form.sizes(module), full_shape(weight)[0], chosen)

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        form: ExpertsForm = site.form
        given = _given(form, args, kwargs)
        if len(given) != 3 or len(args) + len(kwargs) != 3:
            return "it is given something else than rows, experts and routing weights"
        x, ids, weights = given
        if (reason := no_float(x) or no_float(weights)) is not None:
            return reason
        if type(ids) not in PLAIN or ids.dtype not in _IDS:
            return "its experts are chosen by no plain int64 or int32 tensor"
        if x.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or len(ids) != len(x):
            return "rows, experts and routing weights of shapes that do not go together"
        return (
            _no_weights(module, *form.weights, *form.biases)
            or _other_dtype(module, form, x)
            or _implementation(module)
            or _exchanged(module, form)
            or _unserved(site, module, x)
        )

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        form: ExpertsForm = site.form
        x, ids, weights = _given(form, args, kwargs)
        dtype = _dtype_of_products(module, form, x)
        if dtype is compute_dtype(x):
            return form.serve(module, x, ids, weights, site.backend)
        with torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext():
            return form.serve(module, x.to(dtype), ids, weights, site.backend).to(x.dtype)


def _given(form: ExpertsForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the rows, experts and routing weights that a call has, positional or by name."""
    if not kwargs:
        return args
    return *args, *(kwargs[name] for name in form.arguments[len(args) :] if name in kwargs)


def _in_weights_dtype(module: Any) -> bool:
    """Whether products run in the dtype of the weights, whatever that of the rows: transformers' grouped implementation
    ignores autocast and casts the rows. Called only where it matters, since reading a configuration is slow."""
    return module.config._experts_implementation == "grouped_mm"


def _dtype_of_products(module: Any, form: ExpertsForm, x: torch.Tensor) -> torch.dtype:
    dtype, own = compute_dtype(x), _weight(module, form.weights[0]).dtype
    return own if dtype is not own and _in_weights_dtype(module) else dtype


def _unserved(site: Site, module: Any, x: torch.Tensor) -> str | None:
    """Returns why the device does not serve products in this call's dtype, or None; computed once for each dtype."""
    form: ExpertsForm = site.form
    dtype = _dtype_of_products(module, form, x)
    key = x.device.type, dtype
    if key not in form.refused:
        form.refused[key] = unserved(x.device, dtype, *form.sizes(module), backend=site.backend)
    return form.refused[key]


def _other_dtype(module: Any, form: ExpertsForm, x: torch.Tensor) -> str | None:
    """Returns why the products have no common dtype, or None."""
    (first, *others) = (_weight(module, name).dtype for name in (*form.weights, *form.biases))
    if any(dtype is not first for dtype in others):
        return "its parameters are of several dtypes"
    if first is not x.dtype and not autocasts(x) and not _in_weights_dtype(module):
        return "its weights and its rows are of two dtypes"
    return None


def _exchanged(module: Any, form: ExpertsForm) -> str | None:
    """Returns how a gate that the op has differs from the one that was recognised, or None."""
    if form.gate is None:
        return None
    if getattr(type(module), "_apply_gate", None) is not form.code:
        return "its gate has been exchanged"
    own, of_activation = form.settings
    leaf = _activation(module)
    if leaf is None:
        return changed(module, own) if form.activation is None else "its act_fn has been exchanged"
    if original_class(leaf) is not form.activation or has_hooks(leaf) or has_other_forward(leaf):
        return "its act_fn has hooks, or has been exchanged"
    return changed(module, own) or changed(leaf, of_activation)
