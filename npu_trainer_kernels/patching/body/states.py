"""Lets modules that carry a state along a row take a packed row: the state ends where a segment ends.

A *state module* is a child of a decoder layer, or of a layer inside of one, whose forward calls functions that
`state_forms` recognises (a short convolution, a gated delta rule, the scan of Mamba 2). Its forward is rewritten
(`probe.source`): each of these calls asks first whether a packed row is on its way, and is then computed by the row's
segments. All else in the module, its projections and norms, works on each token by itself, and stays as it is.

A mask brings the row, as it does for attention (`packed.py`), so that a layer which a checkpoint repeats finds it
again: these layers are called without a mask (transformers makes none for a batch without padding), and get the row's
in its place.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..classes import derived, original_class
from ..parallel import serve_inside
from ..probe import plain_forward, rewritten_forward, self_attribute
from ..undo import Undo
from .packed import PackedMask, Packing, Unserved, packed_row, row_under_way
from .state_forms import OtherCall, StateForm, arguments_of, compute, state_form

__all__ = ["carry_by_segments", "has_own_state_code"]

_CARRIED = "_npu_kernels_carried"
_BY = "_npu_kernels_carries_by"


def carry_by_segments(body: nn.Module, undo: Undo) -> frozenset[type[nn.Module]]:
    """Prepares the state modules of a text-only body, and their layers, for packed rows.

    Args:
        body: the body.
        undo: records the changes; modules that it has changed already are skipped.

    Returns:
        the classes of the state modules.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    found: set[type[nn.Module]] = set()

    def prepare(module: nn.Module, own: Callable[[Any], dict[str, Any]]) -> None:
        kind: Any = type(module)
        if getattr(kind, _BY, None) is undo:
            return
        if kind not in classes:
            classes[kind] = derived(kind, {_BY: undo, **own(kind)})
        undo.set_class(module, classes[kind])
        serve_inside(module, classes[kind], undo)

    layers = [layer for child in body.children() if isinstance(child, nn.ModuleList) for layer in child]
    # Zamba 2 has a layer with a state inside of another layer.
    parts = [part for layer in layers for part in layer.modules()]
    for layer in parts:
        mixers = [child for child in layer.children() if _carries(child)]
        for mixer in mixers:
            found.add(original_class(mixer))
            prepare(mixer, _of_mixer)
        if mixers:
            prepare(layer, _of_layer)
    return frozenset(found)


def has_own_state_code(body: nn.Module) -> bool:
    """Whether a body carries its states by transformers' own operators, since no package with kernels is installed."""
    layers = [layer for child in body.children() if isinstance(child, nn.ModuleList) for layer in child]
    kinds: set[Any] = {original_class(module) for layer in layers for module in layer.children()}
    return any(
        _is_fallback(kind, name) for kind in kinds for name, form in _forms_of(kind).items() if form.name != "shortcut"
    )


def _is_fallback(kind: Any, name: str) -> bool:
    """Whether transformers' decorator of a function calls the function itself, not another package's."""
    function = _own_forward(kind)
    assert function is not None
    chosen = inspect.getclosurevars(function.__globals__[name]).nonlocals
    return chosen.get("is_new_implementation") is False and _forms_of(kind)[name].name != "convolution"


# ---------------------------------------------------------------------------------------------------------------------
# A state module
# ---------------------------------------------------------------------------------------------------------------------


def _own_forward(kind: Any) -> types.FunctionType | None:
    """Returns a class's own forward, if it can be rewritten."""
    plain = plain_forward(kind)
    return None if isinstance(plain, str) else plain


@functools.cache
def _forms_of(kind: Any) -> dict[str, StateForm]:
    """Returns the functions that a class's forward calls and that are recognised, by name."""
    function = _own_forward(kind)
    if function is None:
        return {}
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    functions = {name: each for name, each in named.items() if isinstance(each, types.FunctionType)}
    forms = {name: form for name, each in functions.items() if (form := state_form(each)) is not None}
    return forms if any(form.name != "shortcut" for form in forms.values()) else {}


def _carries(module: nn.Module) -> bool:
    """Whether a module's class calls such functions, and calling it runs the class's forward, which no other patch has
    rewritten."""
    kind: Any = original_class(module)
    ours = (vars(cls).get("forward") for cls in type(module).__mro__ if _BY in vars(cls))
    return "forward" not in vars(module) and type(module).forward in (kind.forward, *ours) and bool(_forms_of(kind))


class _Calls(ast.NodeTransformer):
    """Rewrites `name(...)` to `self._npu_kernels_carried("name", name)(...)`."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            arguments: list[ast.expr] = [ast.Constant(node.func.id), node.func]
            node.func = ast.copy_location(ast.Call(self_attribute(_CARRIED), arguments, []), node.func)
        return node


def _of_mixer(kind: Any) -> dict[str, Any]:
    """Returns what a state module's class has of its own."""
    original = getattr(kind, "_npu_kernels_original", kind)
    forms = _forms_of(original)
    function = _own_forward(original)
    assert function is not None
    recognised = {name: function.__globals__[name] for name in forms}
    by_segments = rewritten_forward(original, _Calls(set(forms)))

    def carried(name: str, now: Callable[..., Any]) -> Callable[..., Any]:
        row = row_under_way()
        if row is None:
            return now
        if now is not recognised[name]:
            raise Unserved(f"its {name} has been exchanged")
        return functools.partial(_by_segments, name, forms[name], now, row)

    @functools.wraps(kind.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        mask = next((each for each in given if type(each) is PackedMask and each.packing.carries), None)
        if mask is None:
            if row_under_way() is not None:
                raise Unserved(f"its {original.__name__} is not given its layer's mask")
            return kind.forward(module, *args, **kwargs)
        if original.forward is not recognised_forward:
            raise Unserved(f"its {original.__name__} has been given another forward")
        args = tuple(None if type(each) is PackedMask else each for each in args)
        kwargs = {name: None if type(each) is PackedMask else each for name, each in kwargs.items()}
        mask.packing.carried.add(original)
        with packed_row(mask.packing) if row_under_way() is None else contextlib.nullcontext():
            return by_segments(module, *args, **kwargs)

    recognised_forward = original.forward
    return {"forward": forward, _CARRIED: staticmethod(carried)}


def _by_segments(
    name: str, form: StateForm, function: Callable[..., Any], row: Packing, *args: Any, **kwargs: Any
) -> Any:
    """Computes a call of a recognised function by the segments of a row."""
    if form.name == "shortcut":
        return None
    try:
        given = arguments_of(function, args, kwargs)
        out = compute(form, given, row.states, row.backend)
    except OtherCall as error:
        raise Unserved(f"its {name} is given {error}") from None
    return (out, None) if form.returns_state else out


# ---------------------------------------------------------------------------------------------------------------------
# Its layer
# ---------------------------------------------------------------------------------------------------------------------


def _of_layer(kind: Any) -> dict[str, Any]:
    """Returns what the class of a state module's layer has of its own: its missing mask is the packed row's."""
    original = getattr(kind, "_npu_kernels_original", kind)
    parameters = inspect.signature(original.forward).parameters
    masks = {name: i for i, name in enumerate(parameters, -1) if "mask" in name}

    @functools.wraps(kind.__call__)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        row = row_under_way()
        if row is not None:
            given = (each for each in kwargs.values() if type(each) is PackedMask and each.window is None)
            mask = next(given, None) or PackedMask(row, None)
            named = {name for name, i in masks.items() if i >= len(args)}
            args = tuple(mask if i in masks.values() and _of_ones(each, row) else each for i, each in enumerate(args))
            kwargs = {**kwargs, **{name: mask for name in named if _of_ones(kwargs.get(name), row)}}
        return kind.__call__(layer, *args, **kwargs)

    return {"__call__": call}


def _of_ones(mask: Any, row: Packing) -> bool:
    """Whether a mask is none, or the packed row's of ones, which transformers hands on where it has no numbers."""
    return mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (1, row.tokens))
