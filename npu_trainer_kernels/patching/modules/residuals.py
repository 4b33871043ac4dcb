"""Replaces residual additions followed by an RMSNorm in decoder layers. The three statements

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.some_norm(hidden_states)

become one call where `norm_forms` recognises `some_norm` as an RMSNorm. Sums with a factor, as in `residual +
hidden_states * self.some_number`, do so too; the factor is read at the call.
"""

import ast
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.checks import is_number
from ...ops.norms import add_rms_norm
from ..classes import original_class, subclass_with_forward
from ..patch import UNREPORTED, Patch, Scene, Site, guarded, keeps_own_code, no_float, set_on_instance, while_recognised
from ..probe import called_on_self, plain_forward, rewritten_forward, source_of
from .norm_forms import NormForm, exchanged, forms_of, full_shape, norms_of, of_other_dtypes

__all__ = ["AddRmsNormPatch"]

_FUSED = "_npu_kernels_add_rms_norm"


@dataclass(frozen=True)
class LayerForm:
    """A decoder layer's forward, and its norms that follow a residual add."""

    forward: types.FunctionType
    norms: tuple[tuple[str, type[nn.Module], NormForm], ...]

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[type[nn.Module], NormForm]]:
        """Class and form of each norm."""
        return {name: (cls, form) for name, cls, form in self.norms}

    def __str__(self) -> str:
        return ", ".join(self.by_name)


def _names(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Returns (name, value) of a statement `name = value`, else None."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def _added(value: ast.expr) -> tuple[str, str, str | None] | None:
    """Returns the names of a sum's terms, and the attribute of `self` that the second is multiplied by."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add) or not isinstance(value.left, ast.Name):
        return None
    right, multiplier = value.right, None
    if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult):
        multiplier, right = _attribute(right.right), right.left
        if multiplier is None:
            return None
    return (value.left.id, right.id, multiplier) if isinstance(right, ast.Name) else None


def _attribute(node: ast.expr) -> str | None:
    """`name` of `self.name`."""
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if of_self else None  # type: ignore[attr-defined]


def _norm_called(value: ast.expr, argument: str) -> str | None:
    """The attribute `norm` of a call `self.norm(argument)`."""
    norm = called_on_self(value)
    given = value.args[0] if isinstance(value, ast.Call) and norm is not None else None
    return norm if isinstance(given, ast.Name) and given.id == argument else None


@dataclass(frozen=True)
class _Match:
    """The variables in the pattern of the module's docstring: the sum's terms in their order, and the attribute that
    the second term is multiplied by. Only `hidden` may be multiplied."""

    hidden: str
    residual: str
    norm: str
    terms: tuple[str, str]
    multiplier: str | None


def _matched(first: ast.stmt, second: ast.stmt, third: ast.stmt) -> _Match | None:
    a, b, c = _names(first), _names(second), _names(third)
    if a is None or b is None or c is None:
        return None
    hidden, residual, added = a[0], b[0], _added(a[1])
    copies = isinstance(b[1], ast.Name) and b[1].id == hidden
    norm = _norm_called(c[1], hidden)
    if added is None or set(added[:2]) != {hidden, residual} or hidden == residual or not copies:
        return None
    *terms, multiplier = added
    if c[0] != hidden or norm is None or (multiplier is not None and terms[1] != hidden):
        return None
    return _Match(hidden, residual, norm, (terms[0], terms[1]), multiplier)


class _Rewrite(ast.NodeTransformer):
    def __init__(self, norms: set[str]) -> None:
        self.norms, self.found = norms, []  # type: tuple[set[str], list[str]]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        body, i = [], 0
        while i < len(node.body):
            match = _matched(*node.body[i : i + 3]) if i + 3 <= len(node.body) else None
            if match is None or match.norm not in self.norms:
                body.append(node.body[i])
                i += 1
                continue
            terms = ", ".join([*match.terms, *([f"self.{match.multiplier}"] if match.multiplier else [])])
            text = f"{match.hidden}, {match.residual} = self.{_FUSED}(self.{match.norm}, {match.norm!r}, {terms})"
            body.append(ast.copy_location(ast.parse(text).body[0], node.body[i]))
            self.found.append(match.norm)
            i += 3
        node.body = body
        return node


def _own(norm: Any, name: str, first: torch.Tensor, second: torch.Tensor, *multiplier: Any) -> tuple[Any, torch.Tensor]:
    """Computes the three statements as the model does."""
    total = first + second * multiplier[0] if multiplier else first + second
    return norm(total), total


class AddRmsNormPatch(Patch):
    """Replaces residual additions right before norms by `ops.add_rms_norm`."""

    op = "add_rms_norm"

    def recognise(self, module: nn.Module, scene: Scene) -> LayerForm | str | None:
        norms = norms_of(module)
        # A decoder layer has two norms or more, and other modules with parameters. A module with one norm is a model or
        # an attention; an attention with norms of its queries and keys has nothing but linear layers besides.
        if len(norms) < 2 or not any(any(True for _ in child.parameters()) for child in module.children()):
            return None
        if all(isinstance(child, nn.Linear) or child in norms.values() for child in module.children()):
            return None
        # Calls of a norm with another forward would all be declined.
        aside = {name: reason for name, norm in norms.items() if (reason := set_on_instance(norm)) is not None}
        forms = forms_of({name: norm for name, norm in norms.items() if name not in aside}, scene.norms)
        if not forms:
            return next((f"{name}: {reason}" for name, reason in aside.items()), None)
        reason = set_on_instance(module)
        function = plain_forward(original_class(module))
        if reason is not None or isinstance(function, str):
            return reason or str(function)
        rewrite = _Rewrite(set(forms))
        rewrite.visit(ast.parse(source_of(function) or ""))
        if not rewrite.found:
            return "its forward has no residual add right before a norm"
        return LayerForm(
            function, tuple((name, original_class(norms[name]), forms[name]) for name in dict.fromkeys(rewrite.found))
        )

    def declines(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> str | None:
        norm, (name, first, second, *multiplier) = module, args
        cls, form = site.form.by_name[name]
        reason = exchanged(norm, cls, form) or no_float(first) or no_float(second)
        reason = reason or of_other_dtypes(norm, form, first, second)
        if reason is None and multiplier and not is_number(multiplier[0]):
            return "what the hidden states are multiplied by is no finite number"
        if reason is None and (first.shape != second.shape or not (first.is_contiguous() and second.is_contiguous())):
            # Models call `view` on the sum, which has the layout of its first term.
            reason = "hidden states that are not contiguous, or of two shapes"
        if reason is None and keeps_own_code(site, first):
            return UNREPORTED
        return reason

    def run(self, site: Site, module: Any, *args: Any, **kwargs: Any) -> Any:
        norm, (name, first, second, *multiplier) = module, args
        _, form = site.form.by_name[name]
        weight = norm._parameters["weight"] if form.weighted else None
        options = {"offset": form.offset, "casting": form.casting, "backend": site.backend}
        if multiplier:
            return add_rms_norm(second, first, weight, form.eps, multiplier=multiplier[0], **options)
        return add_rms_norm(first, second, weight, form.eps, **options)

    def sizes(self, module: nn.Module, form: LayerForm) -> tuple[torch.dtype, tuple[int, ...]] | None:
        weight: Any = module._modules[form.norms[0][0]]._parameters.get("weight")  # type: ignore[union-attr]
        return None if weight is None else (weight.dtype, tuple(full_shape(weight)))

    def tokens(self, *args: Any, **kwargs: Any) -> int:
        return args[2].numel() // args[2].shape[-1]

    def patched_class(self, site: Site) -> type[nn.Module]:
        bind = functools.partial
        fused = guarded(site, bind(self.declines, site), bind(self.run, site), _own, self.tokens)
        forward = rewritten_forward(site.kind, _Rewrite(set(site.form.by_name)))
        return subclass_with_forward(site.kind, while_recognised(site, forward), ((_FUSED, fused),))
