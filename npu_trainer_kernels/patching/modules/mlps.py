"""Replaces gated MLPs: `down(act(gate(x)) * up(x))`, however they name and store their three projections.

A candidate has two or three projections (children with parameters); all other children are leaves without parameters,
its activation among them (`gate_forms`). Only with three projections may the activation be missing: the code then calls
a function of torch. A probe runs the forward with the projections replaced by constants. The projection called last is
`down`, and its input is compared bit for bit with the product of that activation's own result and up, for every way to
store gate and up in the outputs of the others.

If `down` is a bare linear layer, its product is part of the op (`swiglu_linear`), which keeps one tensor less for
backward. Each call checks this, since hooks, adapters and sharding may come after the patch; otherwise the layer is
called.

The MLP treats each row independently, so on request it also runs over slices of its rows (`ops/slices.py`).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...ops.checks import FLOATS
from ...ops.gates import JOINED
from ...ops.host import autocasts
from ...ops.slices import in_slices
from ...ops.swiglu import swiglu, swiglu_linear, swiglu_reference, unserved
from ..bound_forwards import has_other_forward
from ..call import CallSettings
from ..classes import has_hooks, original_class
from ..patch import PLAIN, PROBE_ERRORS, LateRefusal, Patch, Scene, Site, no_float, set_on_instance
from ..probe import MODES, Settings, agree, changed, repeatable, settings_of, trace_of, unseen
from ..undo import Undo
from .gate_forms import GateForm, gate_form, gate_of, joined_gate_form, numbers_of

__all__ = ["GatedMlpPatch", "is_bare_linear", "parameter_of"]

_ROWS, _COLS = (2, 3), 8


@dataclass(frozen=True)
class MlpForm:
    """The roles of an MLP's children.

    Attributes:
        gate, up: the names of these projections; equal if one projection returns both in one tensor.
        down: the name of the last projection.
        swapped: whether that tensor has up in its first half.
        leaves: the names, classes and settings of the other children, which the op replaces.
        product: the function of gate and up.
        settings: the values that the module's code read when it was recognised.
        tokens: the maximum number of rows of a slice; 0: all rows at once.
    """

    gate: str
    up: str
    down: str
    swapped: bool
    leaves: tuple[tuple[str, type[nn.Module], Settings], ...]
    product: GateForm
    settings: Settings
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.product}" + (", up before gate" if self.swapped else "")


@dataclass
class Slices:
    """Counts the calls of MLPs that are to run over slices of so many tokens.

    Attributes:
        tokens: the maximum number of rows of a slice.
        ran: the number of calls that ran in slices; shorter calls have nothing to slice.
        whole: the number of longer calls that did not, by reason.
    """

    tokens: int
    ran: int = 0
    whole: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        said = [f"{self.ran} of them in slices of {self.tokens} tokens" if self.ran else
                f"longer ones than {self.tokens} tokens in slices"]  # fmt: skip
        return ", ".join([*said, *(f"{calls} not: {reason}" for reason, calls in self.whole.items())])


def is_bare_linear(module: nn.Module) -> bool:
    """Whether calling a module is `functional.linear` of its parameters and nothing else: no subclass (adapters,
    quantisation, FSDP units, parametrisations), no hooks, no forward set on the instance, no tensor subclass as a
    parameter except those in `PLAIN`."""
    if type(module) is not nn.Linear or has_hooks(module) or has_other_forward(module):
        return False
    for parameter in module._parameters.values():
        if parameter is not None and type(parameter) not in PLAIN:
            return False
    return True


def _children(module: nn.Module) -> tuple[list[str], list[str]] | None:
    """Returns the names of a candidate's projections and leaves. It has no other children: a probe calls its forward,
    and a sharding wrapper would take that for the model's first call."""
    if any(True for _ in module.parameters(recurse=False)):
        return None
    projections, leaves = [], []
    for name, child in module.named_children():
        if _is_projection(child):
            projections.append(name)
        elif any(True for _ in child.parameters()) or any(True for _ in child.children()):
            return None
        else:
            leaves.append(name)
    # Two projections and nothing else belong to an adapter, or to an MLP without a gate.
    return (projections, leaves) if len(projections) == 3 or (len(projections) == 2 and leaves) else None


def _is_projection(child: nn.Module) -> bool:
    """Whether a child is a linear layer, however its weight is stored, or an adapter around one."""
    return isinstance(child, nn.Linear) or (hasattr(child, "in_features") and hasattr(child, "out_features"))


class _Otherwise(Exception):
    """The input of a projection is not the MLP's input."""


def _reached(
    module: Any, projections: list[str], constants: tuple[torch.Tensor, ...], training: bool
) -> tuple[list[str], Any]:
    """Returns the projections in the order of their calls, and the last one's input when the others return constants.

    Raises:
        _Otherwise: the input of another projection is not the MLP's input.
    """
    calls: list[str] = []
    x = torch.linspace(-2, 3, _COLS, dtype=constants[0].dtype, device="cpu").expand(*_ROWS, _COLS)

    def stand_in(name: str) -> Callable[[Any], Any]:
        def forward(given: Any) -> Any:
            calls.append(name)
            if len(calls) == len(projections):
                return given
            if given is not x:
                raise _Otherwise
            return constants[len(calls) - 1]

        return forward

    undo = Undo()
    try:
        for part in module.modules():
            undo.set_attribute(part, "training", training)
        for name in projections:
            child = module._modules[name]
            undo.silence(child)
            undo.set_attribute(child, "forward", stand_in(name))
        with torch.device("cpu"), repeatable():
            return calls, original_class(module).forward(module, x)
    finally:
        undo.restore()


def _recognise(module: nn.Module, projections: list[str], leaves: list[str]) -> MlpForm | str:
    if any(isinstance(leaf := module._modules[name], nn.Dropout) and leaf.p > 0 for name in leaves):
        return "it drops out"
    others = [(name, module.get_submodule(name)) for name in leaves]
    if reason := next(filter(None, map(unseen, (module, *(leaf for _, leaf in others)))), None):
        return reason  # before a probe that would change the module
    traces = (trace_of(module, hooks=False), *(trace_of(leaf) for _, leaf in others))
    if (reason := next(filter(None, traces), None)) is not None:
        return reason
    stands_for = tuple((name, original_class(leaf), settings_of(leaf)) for name, leaf in others)
    probe = torch.ones(*_ROWS, 2 * _COLS, device="cpu", dtype=torch.float32)
    try:
        with torch.no_grad():
            calls, out = _reached(module, projections, (probe, probe), module.training)
    except _Otherwise:
        return "its projections are given something else than its input"
    except PROBE_ERRORS as error:
        return f"its forward cannot be probed ({type(error).__name__})"
    if sorted(calls) != sorted(projections) or not isinstance(out, torch.Tensor):
        return "its forward does not call each of its projections once"

    def reaches(*constants: torch.Tensor, training: bool = module.training) -> Any:
        return _reached(module, projections, constants, training)[1]

    known = [(gate, leaf) for _, leaf in others if (gate := gate_of(leaf)) is not None]
    for gate, up, swapped, function, joined in _ways(calls, reaches):
        product = _product(function, joined, known, numbers_of(module))
        if product is not None and _agrees(function, product):
            return MlpForm(gate, up, calls[-1], swapped, stands_for, product, settings_of(module))
    return "it does not compute down(act(gate(x)) * up(x)) with an act that swiglu knows"


def _ways(calls: list[str], reaches: Callable[..., Any]) -> Iterator[tuple[str, str, bool, Callable[..., Any], bool]]:
    """Yields possible roles of projections: (gate, up, swapped, the function of them, whether it takes one tensor)."""
    first, second = calls[0], calls[1]
    if len(calls) == 2:
        yield first, first, False, reaches, True
        yield first, first, True, lambda gate, up, **mode: reaches(torch.cat((up, gate), -1), **mode), False
    else:
        yield first, second, False, reaches, False
        yield second, first, False, lambda gate, up, **mode: reaches(up, gate, **mode), False


def _product(
    function: Callable[..., Any], joined: bool, known: list[tuple[str, nn.Module]], numbers: tuple[float, ...]
) -> GateForm | None:
    """Returns the formula: the module's own activation times up, however that rounds, or the op's formula."""
    for activation, leaf in known:
        for layout in JOINED if joined else (None,):
            if all(_is_product(function, layout, leaf, dtype) for dtype in (torch.bfloat16, torch.float32)):
                return GateForm(activation, joined=layout)
    return joined_gate_form(function, numbers) if joined else gate_form(function, numbers)


def _agrees(function: Callable[..., Any], product: GateForm) -> bool:
    def reference(*given: torch.Tensor) -> torch.Tensor:
        return swiglu_reference(*given, **product.options)

    given = _probes(torch.float32, product.joined)
    return all(agree(functools.partial(function, training=mode), reference, *given) for mode in MODES)


def _probes(dtype: torch.dtype, layout: str | None) -> tuple[torch.Tensor, ...]:
    """Returns gate and up, or both in one tensor."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (*_ROWS, _COLS if layout is None else 2 * _COLS)
    given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    # Some rows are large, so that a clamp shows, as some code has for fp16.
    sizes = torch.tensor([1, 3, 3, 6, 300, 1e5], **given).view(*_ROWS, 1)
    count = 2 if layout is None else 1
    return tuple((sizes * torch.randn(shape, generator=generator, **given)).to(dtype) for _ in range(count))


def _is_product(function: Callable[..., Any], layout: str | None, leaf: nn.Module, dtype: torch.dtype) -> bool:
    given = _probes(dtype, layout)
    gate, up = given if layout is None else gate_and_up(given[0], layout)
    try:
        with torch.no_grad():
            out = function(*given)
            return isinstance(out, torch.Tensor) and torch.equal(out, leaf(gate) * up)
    except PROBE_ERRORS:
        return False


def gate_and_up(both: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of one tensor, as views."""
    if layout == "interleaved":
        return both[..., ::2], both[..., 1::2]
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def parameter_of(module: nn.Module, name: str) -> Any:
    """Returns `getattr(module, name)`, in a fraction of the time. A sharding wrapper may have put a plain tensor in the
    parameter's place."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _is_cast_for(down: Any, gate: torch.Tensor) -> bool:
    """Whether a model has to cast the input of its last projection, as T5 does, which keeps that projection in fp32."""
    weight = down._parameters.get("weight")
    if weight is None and hasattr(down, "base_layer"):  # an adapter wraps it
        weight = down.base_layer._parameters.get("weight")
    return weight is not None and weight.dtype is not gate.dtype and weight.dtype in FLOATS and not autocasts(gate)


def _no_slices(module: nn.Module) -> str | None:
    """Returns why backward of a slice could not find the gradients of an MLP's parameters, or None."""
    for name, child in module.named_modules():
        # FSDP's first version and the like replace parameters by tensors while a layer runs.
        known = "weight" in child._parameters or hasattr(child, "parametrizations")
        if isinstance(child, nn.Linear) and not known:
            return f"its {name} has no parameter of its own"
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id") and not parameter.numel():
            return "DeepSpeed gathers its projections one by one"
        if isinstance(parameter, DTensor):
            return "its parameters are sharded while it runs"
    return None


class GatedMlpPatch(Patch):
    """Replaces gated MLPs by `ops.swiglu` and `ops.swiglu_linear`, on request over slices of their rows."""

    op = "swiglu"

    def asked_for(self, scene: Scene) -> bool:
        return scene.tiled_mlp > 0

    def recognise(self, module: nn.Module, scene: Scene) -> MlpForm | str | None:
        children = _children(module)
        if children is None:
            return None
        found = set_on_instance(module) or _recognise(module, *children)
        return found if isinstance(found, str) else replace(found, tokens=scene.tiled_mlp)

    def install(self, site: Site, module: nn.Module, undo: Undo, settings: CallSettings) -> None:
        super().install(site, module, undo, settings)
        if site.form.tokens and site.progress is None:
            site.progress = Slices(site.form.tokens)

    def declines(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "more than one tensor is given"
        form: MlpForm = site.form
        for name, cls, settings in form.leaves:
            leaf: Any = module._modules[name]
            if type(leaf) is not cls or has_hooks(leaf) or has_other_forward(leaf):
                return f"its {name} has hooks, or has been exchanged"
            if (reason := changed(leaf, settings)) is not None:
                return f"{reason} in its {name}"
        reason = no_float(args[0]) or changed(module, form.settings)
        if reason is None and form.product.joined == "interleaved":
            down: Any = module._modules[form.down]
            reason = unserved(args[0], down.in_features, site.backend)
        return reason

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        form: MlpForm = site.form
        x = args[0]
        if form.tokens and x.numel() > form.tokens * x.shape[-1]:
            reason = _no_slices(module)
            out = None if reason is not None else self._in_slices(site, module, x)
            if out is not None:
                site.progress.ran += 1
                return out
            site.progress.whole[reason or "its projections return another dtype"] += 1
        return self._at_once(site, module, x)

    def _in_slices(self, site: Site, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        form: MlpForm = site.form
        projections = [module._modules[name] for name in (form.gate, form.up, form.down)]

        def of_slice(rows: torch.Tensor) -> torch.Tensor:
            result = self._at_once(site, module, rows)
            return site.kind.forward(module, rows) if type(result) is LateRefusal else result

        return in_slices(
            of_slice, x, lambda: [p for p in module.parameters() if p.requires_grad], tokens=form.tokens,
            width=projections[-1].out_features, draws=not all(map(is_bare_linear, projections)),
        )  # fmt: skip

    def _at_once(self, site: Site, module: Any, x: torch.Tensor) -> Any:
        form: MlpForm = site.form
        modules = module._modules
        down = modules[form.down]
        gate, up = modules[form.gate](x), None
        if form.up != form.gate:
            up = modules[form.up](x)
        elif form.swapped:
            up, gate = gate.chunk(2, dim=-1)
        if no_float(gate) or (up is not None and (type(up) not in PLAIN or up.dtype is not gate.dtype)):
            return LateRefusal("its projections return no plain tensors of one dtype")
        if _is_cast_for(down, gate):
            return LateRefusal("its last projection is of another dtype than the others")
        options = {**form.product.options, "backend": site.backend}
        if not is_bare_linear(down):
            return down(swiglu(gate, up, **options))
        # Nothing else uses the outputs of bare linear layers, so the op may overwrite them.
        ours = is_bare_linear(modules[form.gate]) and is_bare_linear(modules[form.up])
        weight, bias = parameter_of(down, "weight"), parameter_of(down, "bias")
        return swiglu_linear(gate, up, weight, bias, overwrite=ours, **options)

    def sizes(self, module: nn.Module, form: MlpForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        down = module._modules[form.down]
        return (down.weight.dtype, (down.in_features,)) if isinstance(down, nn.Linear) else None
