"""Replaces residual additions followed by an RMSNorm in decoder layers. The three statements

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.some_norm(hidden_states)

become one call where `norm_forms` recognises `some_norm` as an RMSNorm. Sums with a factor, as in `residual +
hidden_states * self.some_number`, do so too; the factor is read at the call. Names do not matter, and statements that
only assign variables, and call nothing, may stand in between.
"""

import ast
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.checks import is_number
from ...ops.norms import add_rms_norm
from ..classes import original_class, subclass_with_forward
from ..patch import UNREPORTED, Patch, Scene, Site, guarded, keeps_own_code, no_float, set_on_instance, while_recognised
from ..probe import plain_forward, rewritten_forward, source_of
from .norm_forms import NormForm, exchanged, forms_of, full_shape, norms_of, of_other_dtypes

__all__ = ["AddRmsNormPatch"]

_FUSED = "_npu_kernels_add_rms_norm"


@dataclass(frozen=True)
class LayerForm:
    """A decoder layer's forward, and its norms that follow a residual add."""

    forward: types.FunctionType
    norms: tuple[tuple[str, type[nn.Module], NormForm], ...]

    @functools.cached_property
    def takes(self) -> dict[str, str]:
        """The name of the tensor that each norm's forward takes."""
        return {name: _taken(cls) for name, cls, _ in self.norms}

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[type[nn.Module], NormForm]]:
        """Class and form of each norm."""
        return {name: (cls, form) for name, cls, form in self.norms}

    def __str__(self) -> str:
        return ", ".join(self.by_name)


def _taken(kind: Any) -> str:
    """The name of the tensor that the forward of a norm's class takes."""
    return tuple(inspect.signature(kind.forward).parameters)[1]


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


def _norm_called(value: ast.expr, names: set[str]) -> str | None:
    """The attribute `norm` of a call `self.norm(name)` with one of these names, which may be given by name."""
    if not isinstance(value, ast.Call) or (norm := _attribute(value.func)) is None:
        return None
    given = [*value.args, *(word.value for word in value.keywords)]
    return norm if len(given) == 1 and isinstance(given[0], ast.Name) and given[0].id in names else None


@dataclass(frozen=True)
class _Match:
    """A sum and its norm among the statements of a forward.

    Attributes:
        at, until: the places of the two statements.
        total, normed: the variables that they set.
        norm: the attribute that is the norm, and the name under which it is given the sum, if it is by name.
        terms: the variables of the sum, in their order; multiplier: the attribute that the second is multiplied by.
    """

    at: int
    until: int
    total: str
    normed: str
    norm: str
    by_name: str | None
    terms: tuple[str, str]
    multiplier: str | None


def _matched(body: list[ast.stmt], at: int) -> _Match | None:
    """Returns the sum at a place and its norm behind it, if the sum is also in a variable that outlives its norm."""
    first = _names(body[at])
    added = None if first is None else _added(first[1])
    if first is None or added is None or added[0] == added[1]:
        return None
    same = {first[0]}  # the variables that have the sum
    for until, node in enumerate(body[at + 1 :], at + 1):
        last = _names(node)
        norm = None if last is None else _norm_called(last[1], same)
        if last is not None and norm is not None:
            words = last[1].keywords  # type: ignore[attr-defined]
            by_name = words[0].arg if words else None
            found = _Match(at, until, first[0], last[0], norm, by_name, added[:2], added[2])
            return found if same - {last[0]} else None
        if not _only_assigns(node):
            return None
        set_now = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and type(part.ctx) is ast.Store}
        copies = isinstance(value := getattr(node, "value", None), ast.Name) and value.id in same
        same = same | set_now if copies else same - set_now
    return None


_OF_VALUES = (
    ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.operator, ast.unaryop,
    ast.expr_context,
)  # fmt: skip


def _only_assigns(node: ast.stmt) -> bool:
    """Whether a statement sets variables to what takes no call, and so changes no tensor."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return isinstance(node, ast.Pass)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [*targets, *([] if node.value is None else ast.walk(node.value))]
    return all(isinstance(each, ast.Name) for each in targets) and all(isinstance(each, _OF_VALUES) for each in parts)


_NORMED = "_npu_kernels_normed"


class _Rewrite(ast.NodeTransformer):
    """Puts the call into a forward. `norms` has the name of the tensor that each norm's forward takes."""

    def __init__(self, norms: Mapping[str, str]) -> None:
        self.norms, self.found = norms, []  # type: tuple[Mapping[str, str], list[str]]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        body, i = node.body, 0
        while i < len(body):
            match = _matched(body, i)
            i += 1
            if match is None or match.by_name not in (None, self.norms.get(match.norm)) or match.norm not in self.norms:
                continue
            terms = ", ".join([*match.terms, *([f"self.{match.multiplier}"] if match.multiplier else [])])
            fused = f"{_NORMED}, {match.total} = self.{_FUSED}(self.{match.norm}, {match.norm!r}, {terms})"
            # The variable must not keep the tensor.
            taken = f"{match.normed} = {_NORMED}\ndel {_NORMED}"
            for place, text in ((match.until, taken), (match.at, fused)):
                body[place : place + 1] = [ast.copy_location(each, body[place]) for each in ast.parse(text).body]
            self.found.append(match.norm)
            i = match.until + 2
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
        rewrite = _Rewrite({name: _taken(original_class(norms[name])) for name in forms})
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
        forward = rewritten_forward(site.kind, _Rewrite(site.form.takes))
        return subclass_with_forward(site.kind, while_recognised(site, forward), ((_FUSED, fused),))
