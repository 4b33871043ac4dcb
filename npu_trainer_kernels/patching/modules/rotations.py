"""Replaces rotary embeddings in attention, and the normed projections before them.

Both are parts of an attention's forward, whose source is rewritten (`probe.source`). Rotating functions are found by
name and recognised by what they compute (`rotation_forms`). Where the model uses gradient checkpointing,

    self.some_norm(self.some_projection(x).view(shape))

becomes a call that does not save the product.
"""

import ast
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.checks import FLOATS
from ...ops.norms import linear_rms_norm
from ...ops.rope import unserved
from ...support.configs import setting
from ..bound_forwards import kernel_of_package, own_function
from ..classes import original_class, subclass_with_forward
from ..patch import (
    PLAIN,
    LateRefusal,
    Patch,
    Scene,
    Site,
    guarded,
    is_transformed,
    no_float,
    others_kernel,
    set_on_instance,
    while_recognised,
)
from ..probe import called_on_self, plain_forward, rewritten_forward, self_attribute, source_of
from .mlps import is_bare_linear, parameter_of
from .norm_forms import NormForm, exchanged, forms_of, norms_of
from .rotation_forms import RopeForm, form_of_call, rope_form, rotate, rotates, rotation_call

__all__ = ["RopePatch", "helper_of"]

_PROJECT = "_npu_kernels_linear_rms_norm"
_DTYPES = frozenset((*FLOATS, torch.complex64))
_OTHER = LateRefusal("other arguments, or other shapes, than its form has")


@dataclass(frozen=True)
class AttentionForm:
    """An attention's forward, its rotating functions, and its norms whose projections' products are not saved."""

    forward: types.FunctionType
    rotations: tuple[tuple[str, RopeForm], ...]
    norms: tuple[tuple[str, type[nn.Module], NormForm], ...]

    def __str__(self) -> str:
        parts = [str(form) for _, form in self.rotations if str(form)]
        if self.norms:
            parts.append(f"no product kept before {', '.join(name for name, *_ in self.norms)}")
        return "; ".join(parts)


def helper_of(name: str) -> str:
    """Returns the name of the attribute by which a patched attention calls the rotating function of this name."""
    return f"_npu_kernels_{name}"


class _OtherRotation(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            node.func = ast.copy_location(self_attribute(helper_of(node.func.id)), node.func)
        return node


class _NormedProjection(ast.NodeTransformer):
    """Rewrites the pattern of the module's docstring; `found` lists the norms in it."""

    def __init__(self, norms: set[str]) -> None:
        self.norms, self.found = norms, []  # type: tuple[set[str], list[str]]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        norm = called_on_self(node)
        if norm not in self.norms or not isinstance(view := node.args[0], ast.Call):
            return node
        viewed = isinstance(view.func, ast.Attribute) and view.func.attr == "view" and len(view.args) == 1
        if not viewed or view.keywords or isinstance(view.args[0], ast.Starred):
            return node
        product = view.func.value  # type: ignore[attr-defined]
        if called_on_self(product) is None:
            return node
        assert isinstance(norm, str)
        self.found.append(norm)
        arguments = [node.func, ast.Constant(norm), product.func, product.args[0], view.args[0]]
        return ast.copy_location(ast.Call(self_attribute(_PROJECT), arguments, []), node)


def _normed_projections(
    module: nn.Module, function: types.FunctionType, scene: Scene
) -> tuple[tuple[str, type[nn.Module], NormForm], ...]:
    """Returns the norms right after projections in an attention's forward, each with its class and form."""
    norms = norms_of(module)
    forms = forms_of(norms, scene.norms)
    rewrite = _NormedProjection({name for name, form in forms.items() if form.weighted})
    rewrite.visit(ast.parse(source_of(function) or ""))
    return tuple((name, original_class(norms[name]), forms[name]) for name in dict.fromkeys(rewrite.found))


def _is_rotation(value: Any, cls: Any) -> bool:
    """Whether a name of a forward is a function of the same file that rotates, whatever it is called."""
    own = isinstance(value, types.FunctionType) and value.__module__ == cls.__module__
    return own and rope_form(value) is not None


def _has_tables(module: nn.Module, code: types.CodeType | None) -> bool:
    """Whether a forward of a module with parameters has variables `cos` and `sin`."""
    return {"cos", "sin"} <= {*getattr(code, "co_varnames", ())} and any(True for _ in module.parameters())


_IN_ITS_CODE = "its forward has cosines and sines, and calls no function that rope knows"


def _kernel_instead(function: Any) -> str | None:
    """Returns which kernel the package `kernels` runs instead of a model's function, or None."""
    return kernel_of_package(function) if isinstance(function, nn.Module) else None


def _while_named(name: str, names: dict[str, Any], served: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a rotation that calls `served` while the model's code has the recognised function under this name."""
    recognised = names[name]

    def rotate(*args: Any, **kwargs: Any) -> Any:
        now = names[name]
        return (served if now is recognised and _kernel_instead(now) is None else now)(*args, **kwargs)

    return rotate


def _projecting(site: Site) -> Callable[..., Any]:
    attention: AttentionForm = site.form
    norms = {name: (kind, form) for name, kind, form in attention.norms}

    def project(norm: Any, name: str, projection: Any, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        kind, form = norms[name]
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed()
        plain = plain and no_float(x) is None and is_bare_linear(projection) and exchanged(norm, kind, form) is None
        if not plain or form.one_dtype or norm._parameters["weight"].shape[0] != shape[-1]:
            normed: torch.Tensor = norm(projection(x).view(shape))
            return normed
        y = linear_rms_norm(
            x, parameter_of(projection, "weight"), norm._parameters["weight"], parameter_of(projection, "bias"),
            form.eps, offset=form.offset, casting=form.casting, backend=site.backend,
        )  # fmt: skip
        # y has that shape unless the model joins or splits dimensions of x; a view would be a node of the graph.
        same = y.shape[:-2] == shape[:-2] and shape[-2] in (-1, y.shape[-2])
        return y if same else y.view(shape)

    return project


class RopePatch(Patch):
    """Replaces rotations in attention by `ops.rope`."""

    op = "rope"

    def recognise(self, module: nn.Module, scene: Scene) -> AttentionForm | str | None:
        cls: Any = original_class(module)
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        space = getattr(inspect.unwrap(cls.forward), "__globals__", {})
        names = [name for name in getattr(code, "co_names", ()) if rotates(name) or _is_rotation(space.get(name), cls)]
        functions = {name: own for name in names if (own := own_function(space.get(name))) is not None}
        if not functions:
            return _IN_ITS_CODE if _has_tables(module, code) else None
        reason = set_on_instance(module)
        function = plain_forward(cls)
        if reason is not None or isinstance(function, str):
            return reason or str(function)
        whose = {
            name: each
            for name, function in functions.items()
            if (each := others_kernel(function) or _kernel_instead(space[name])) is not None
        }
        if whose:
            return "; ".join(f"its {name} is {each}" for name, each in whose.items())
        forms = {name: form for name, each in functions.items() if (form := rope_form(each)) is not None}
        if not forms:
            return f"its {', '.join(functions)} is not a rotation that rope knows"
        norms = _normed_projections(module, function, scene) if scene.checkpoints and "rms_norm" in scene.ops else ()
        return AttentionForm(function, tuple(forms.items()), norms)

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        # This serves a function: `module` is that function's form.
        for given in (*args, *kwargs.values()):
            if type(given) in PLAIN:
                if given.dtype not in _DTYPES:
                    return f"{str(given.dtype).removeprefix('torch.')} values"
            elif isinstance(given, torch.Tensor):
                return f"a {type(given).__name__} is no plain tensor"
        return None

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        form: RopeForm = module
        call = rotation_call(form, args, kwargs)
        if call is None:
            return _OTHER
        reason = unserved(call.q, call.cos, form_of_call(form, call), site.backend)
        return rotate(form, call, site.backend) if reason is None else LateRefusal(reason)

    def sizes(self, module: Any, form: AttentionForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        of_layer = functools.partial(setting, getattr(module, "config", None), layer=getattr(module, "layer_idx", 0))
        found = (of_layer("num_attention_heads"), of_layer("num_key_value_heads"), getattr(module, "head_dim", None))
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        sizes = tuple(size for size in found if type(size) is int)
        return None if dtype is None or len(sizes) < len(found) else (dtype, sizes)

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        q = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        return q.numel() // (q.shape[1] * q.shape[-1]) if q is not None and q.dim() == 4 else 0

    def patched_class(self, site: Site) -> type[nn.Module]:
        bind = functools.partial
        attention: AttentionForm = site.form
        helpers = [(_PROJECT, _projecting(site))]
        for name, form in attention.rotations:
            guard, run = bind(self.declines, site, form), bind(self.run, site, form)
            served = guarded(site, guard, run, attention.forward.__globals__[name], self.tokens)
            helpers.append((helper_of(name), _while_named(name, attention.forward.__globals__, served)))
        rotation = _OtherRotation({name for name, _ in attention.rotations})
        projection = _NormedProjection({name for name, *_ in attention.norms})
        forward = while_recognised(site, rewritten_forward(site.kind, rotation, projection))
        return subclass_with_forward(site.kind, forward, tuple(helpers))
