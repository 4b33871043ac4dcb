"""Gated MLPs: `down(act(gate(x)) * up(x))`, however they name and store their three projections.

A candidate has two or three projections (children with parameters) and otherwise nothing but leaves without parameters,
its activation among them (`_gates`). What it computes is found by running its forward with the projections replaced by
constants: the last one that is called is `down`, and what reaches it is compared bit for bit with the product of that
activation's own result, for every way to store gate and up in what the others return.

Where `down` is a bare linear layer its product is part of the op (`swiglu_linear`), which keeps one tensor less for
backward. That is asked at every call: hooks, adapters and sharding may come after the patch; then the layer is called
as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops._gates import ACTIVATIONS
from ..ops.swiglu import swiglu, swiglu_linear, swiglu_reference
from ._classes import has_hooks, original_class
from ._gates import gate_of
from ._patch import PLAIN, PROBE_ERRORS, Late, Patch, Scene, Site, no_float, set_on_instance
from ._undo import Undo

__all__ = ["GatedMlpPatch", "is_bare_linear"]

_ROWS, _COLS = 2, 8


@dataclass(frozen=True)
class MlpForm:
    """Which children do what.

    Attributes:
        gate, up: projections; the same one where both come in one tensor.
        down: the last projection.
        layout: of that tensor: `"halves"` (gate first), `"swapped"` (up first), `"interleaved"`; `"apart"` for two.
        leaves: names and types of the other children, which the op stands for.
        activation: of the op.
    """

    gate: str
    up: str
    down: str
    layout: str
    leaves: tuple[tuple[str, type[nn.Module]], ...]
    activation: str

    def __str__(self) -> str:
        return self.activation + ("" if self.layout == "apart" else f", gate and up in one: {self.layout}")


def is_bare_linear(module: nn.Module) -> bool:
    """Whether calling a module is `functional.linear` of its parameters and nothing else: no subclass (adapters,
    quantisation, FSDP units, parametrisations), no hooks, no forward of its own, no tensor subclass as its weight but
    the fake one, which stands for the parameter that it was made of."""
    return (
        type(module) is nn.Linear
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and all(type(p) in PLAIN for p in module._parameters.values() if p is not None)
    )


def _children(module: nn.Module) -> tuple[list[str], list[str]] | None:
    """Names of the projections and of the leaves of a candidate."""
    projections = [name for name, child in module.named_children() if _is_projection(child)]
    leaves = [name for name, _ in module.named_children() if name not in projections]
    plain = all(not any(True for _ in module._modules[name].parameters()) for name in leaves)  # type: ignore[union-attr]
    if len(projections) not in (2, 3) or not plain or any(True for _ in module.parameters(recurse=False)):
        return None
    return (projections, leaves) if leaves or _known_by_name(projections) else None


def _is_projection(child: nn.Module) -> bool:
    return isinstance(child, nn.Linear) or any(True for _ in child.parameters())


def _known_by_name(names: list[str]) -> bool:
    return {"gate_proj", "up_proj", "down_proj"} <= set(names)


_JOINED = ("halves", "swapped", "interleaved")


def _operands(both: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor | None, str | None]:
    """One tensor with gate and up as the op takes it: (gate, up, joined)."""
    if layout != "swapped":
        return both, None, layout
    up, gate = both.chunk(2, dim=-1)
    return gate, up, None


def _reached(module: Any, projections: list[str], constants: list[torch.Tensor]) -> tuple[list[str], Any]:
    """The projections in the order of their calls, and what reaches the last one."""
    calls: list[str] = []

    def stand_in(name: str) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            calls.append(name)
            return x if len(calls) == len(projections) else constants[len(calls) - 1]

        return forward

    undo = Undo()
    try:
        for name in projections:
            child = module._modules[name]
            undo.silence(child)
            undo.set_attribute(child, "forward", stand_in(name))
        with torch.no_grad(), torch.device("cpu"):
            x = torch.zeros(_ROWS, _COLS, dtype=constants[0].dtype)
            return calls, original_class(module).forward(module, x)
    finally:
        undo.restore()


def _recognise(module: nn.Module, projections: list[str], leaves: list[str]) -> MlpForm | str:
    dropouts = [leaf for name in leaves if isinstance(leaf := module._modules[name], nn.Dropout)]
    if any(leaf.p > 0 for leaf in dropouts):
        return "it drops out"
    types = tuple((name, original_class(module._modules[name])) for name in leaves)  # type: ignore[arg-type]
    products = _products(module, leaves)
    found: set[tuple[str, str, str, str, str]] | None = None
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator("cpu").manual_seed(0)
        width = 2 * _COLS if len(projections) == 2 else _COLS
        constants = [
            (3 * torch.randn(_ROWS, width, generator=generator, dtype=torch.float32, device="cpu")).to(dtype)
            for _ in range(2)
        ]
        try:
            calls, out = _reached(module, projections, constants)
        except PROBE_ERRORS as error:
            return f"its forward cannot be probed ({type(error).__name__})"
        if sorted(calls) != sorted(projections) or not isinstance(out, torch.Tensor):
            return "its forward does not call each of its projections once"
        equal = {
            (gate, up, calls[-1], layout, activation)
            for gate, up, layout, operands in _ways(calls, constants)
            for activation, product in products
            if torch.equal(out, product(*operands))
        }
        found = equal if found is None else found & equal
    if not found:
        return "it does not compute down(act(gate(x)) * up(x)) with an act that swiglu knows"
    gate, up, down, layout, activation = min(found, key=lambda way: ACTIVATIONS.index(way[-1]))
    return MlpForm(gate, up, down, layout, types, activation)


def _products(module: nn.Module, leaves: list[str]) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """What may be formed of gate and up: with the module's own activation where it has one that the op knows, and
    else, where a function is its activation, with each of the op's."""

    def by_own(leaf: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda gate, up, joined: leaf(_apart(gate, up, joined)[0]) * _apart(gate, up, joined)[1]

    def by_reference(activation: str) -> Callable[..., torch.Tensor]:
        return lambda gate, up, joined: swiglu_reference(gate, up, activation=activation, joined=joined)

    own = [(gate_of(leaf), leaf) for name in leaves if (leaf := module._modules[name]) is not None]
    known = [(activation, by_own(leaf)) for activation, leaf in own if activation is not None]
    return known or [(activation, by_reference(activation)) for activation in ACTIVATIONS]


def _apart(gate: torch.Tensor, up: torch.Tensor | None, joined: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is not None:
        return gate, up
    if joined == "interleaved":
        return gate[..., ::2], gate[..., 1::2]
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _ways(calls: list[str], constants: list[torch.Tensor]) -> list[tuple[str, str, str, Any]]:
    """Who may be gate and up, and where: (gate, up, layout, operands of the op)."""
    first, second = constants
    if len(calls) == 2:
        return [(calls[0], calls[0], layout, _operands(first, layout)) for layout in _JOINED]
    return [
        (calls[0], calls[1], "apart", (first, second, None)),
        (calls[1], calls[0], "apart", (second, first, None)),
    ]


class GatedMlpPatch(Patch):
    """Gated MLPs by `ops.swiglu` and `ops.swiglu_linear`."""

    op = "swiglu"

    def recognise(self, module: nn.Module, scene: Scene) -> MlpForm | str | None:
        children = _children(module)
        if children is None:
            return None
        return set_on_instance(module) or _recognise(module, *children)

    def declines(self, site: Site, module: nn.Module, *args: Any, **kwargs: Any) -> str | None:
        if len(args) != 1 or kwargs:
            return "more than one tensor is given"
        for name, cls in site.form.leaves:
            leaf: Any = module._modules[name]
            if type(leaf) is not cls or has_hooks(leaf) or "forward" in leaf.__dict__:
                return f"its {name} has hooks, or has been exchanged"
        return no_float(args[0])

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        form: MlpForm = site.form
        modules, x = module._modules, args[0]
        down = modules[form.down]
        if form.layout == "apart":
            gate, up, joined = modules[form.gate](x), modules[form.up](x), None
        else:
            gate, up, joined = _operands(modules[form.gate](x), form.layout)
        if no_float(gate) or (up is not None and (type(up) not in PLAIN or up.dtype != gate.dtype)):
            return Late("its projections return no plain tensors of one dtype")
        options: dict[str, Any] = {"activation": form.activation, "joined": joined, "backend": site.backend}
        if not is_bare_linear(down):
            return down(swiglu(gate, up, **options))
        # What bare linear layers return nobody else has seen.
        ours = is_bare_linear(modules[form.gate]) and is_bare_linear(modules[form.up])
        return swiglu_linear(gate, up, down.weight, down.bias, overwrite=ours, **options)

    def sizes(self, module: nn.Module, form: MlpForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        down = module._modules[form.down]
        return (down.weight.dtype, (down.in_features,)) if isinstance(down, nn.Linear) else None
