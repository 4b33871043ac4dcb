"""Patches inside a module's own forward: rotary embedding in attention, residual-add RMSNorm in decoder layers.

Neither is a module of its own, so the source of the module's forward is parsed, one thing in it is exchanged, and the
result is bound per instance. Nothing of a model's code is copied into this package. In an attention, the function that
`apply_rotary_pos_emb` names is exchanged, and, where the model trades time for memory by gradient checkpointing, so is

    self.some_norm(self.some_projection(x).view(shape))

for a call that keeps no product; in a decoder layer, the three statements

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.some_norm(hidden_states)

become one call where `some_norm` is an RMSNorm that `_norms` recognises. Forwards that are decorated, close over
variables, or have no such statements are left alone. The one decoration that is known is that of transformers'
`GradientCheckpointingLayer`, which wraps the forward of every subclass when the subclass is made: ours is one.
"""

import __future__

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..ops.add_rms_norm import add_rms_norm
from ..ops.linear_rms_norm import linear_rms_norm
from ..ops.rope import rope, rope_reference
from ._classes import has_hooks, original_class, subclass_with_forward
from ._mlps import is_bare_linear
from ._norms import NormForm, is_candidate, keeps_own_code, recognise_norm

__all__ = ["normed_projections", "patched_layer_class", "patched_rope_class", "recognise_layer", "recognise_rope"]

_ROPE = "apply_rotary_pos_emb"
_ROTATE, _FUSED, _PROJECT = "_npu_kernels_rotate", "_npu_kernels_add_rms_norm", "_npu_kernels_linear_rms_norm"
_CHECKPOINTING = "forward_with_checkpointing"


def _plain_function(cls: Any) -> Any:
    """A class's own forward, when it can be bound anew."""
    function = cls.forward
    while getattr(getattr(function, "__code__", None), "co_name", "") == _CHECKPOINTING:
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType) or inspect.unwrap(function) is not function:
        return "its forward is decorated"
    if function.__closure__:
        return "its forward closes over variables"
    return function


@functools.cache
def _source(function: types.FunctionType) -> str | None:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None


def _norms_of(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if is_candidate(child)}


def _forms_of(norms: dict[str, nn.Module]) -> dict[str, NormForm]:
    """What is recognised of them."""
    return {name: form for name, child in norms.items() if isinstance(form := recognise_norm(child), NormForm)}


# The `from __future__` imports of the module that a function comes from are in its flags, and must be in the new one's.
_FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


def _rewritten(function: types.FunctionType, *rewrites: ast.NodeTransformer) -> types.FunctionType:
    """The function with its source transformed: same globals, defaults, file and line numbers."""
    source = _source(function)
    assert source is not None
    tree = ast.parse(source)
    for rewrite in rewrites:
        tree = ast.fix_missing_locations(rewrite.visit(tree))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    flags = function.__code__.co_flags & _FUTURE_FLAGS
    module_code = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(c for c in module_code.co_consts if isinstance(c, types.CodeType) and c.co_name == function.__name__)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__module__, new.__qualname__, new.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return new


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _rotates(function: Callable[..., Any]) -> bool:
    """Whether a function computes what `rope` does, bit for bit, on bf16 and fp32."""
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, cos, sin = (
        torch.randn(s, generator=generator, dtype=torch.float32, device="cpu")
        for s in ((2, 3, 4, 8), (2, 1, 4, 8), (2, 4, 8), (2, 4, 8))
    )
    for dtype in (torch.float32, torch.bfloat16):
        arguments = [t.to(dtype) for t in (q, k, cos, sin)]
        try:
            out = function(*arguments)
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False
        expected = rope_reference(*arguments)
        if not (isinstance(out, tuple) and len(out) == 2 and all(map(torch.equal, out, expected))):
            return False
    return True


def recognise_rope(module: nn.Module) -> types.FunctionType | str | None:
    """The forward of an attention that rotates as `rope` does; why it is left alone; None where nothing is rotated."""
    cls: Any = original_class(module)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or _ROPE not in code.co_names:
        return None
    function = _plain_function(cls)
    if isinstance(function, str):
        return function
    if _ROPE not in function.__globals__ or _source(function) is None:
        return f"its source, or its {_ROPE}, is not at hand"
    if not _rotates(function.__globals__[_ROPE]):
        return f"its {_ROPE} is not the rotation that rope knows"
    return function


class _OtherRotation(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != _ROPE:
            return node
        return ast.copy_location(ast.Attribute(ast.Name("self", ast.Load()), _ROTATE, node.ctx), node)


def _of_self(node: ast.expr) -> str | None:
    """The attribute `name` of a call `self.name(one argument)`."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    called = node.func
    if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"):
        return None
    return called.attr


class _NormedProjection(ast.NodeTransformer):
    """`found`: the norms of the pattern of the module's docstring."""

    def __init__(self, norms: set[str]) -> None:
        self.norms, self.found = norms, []  # type: tuple[set[str], list[str]]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        norm = _of_self(node)
        if norm not in self.norms or not isinstance(view := node.args[0], ast.Call):
            return node
        viewed = isinstance(view.func, ast.Attribute) and view.func.attr == "view" and len(view.args) == 1
        if not viewed or view.keywords or isinstance(view.args[0], ast.Starred):
            return node
        product = view.func.value  # type: ignore[attr-defined]
        if _of_self(product) is None:
            return node
        assert isinstance(norm, str)
        self.found.append(norm)
        helper = ast.Attribute(ast.Name("self", ast.Load()), _PROJECT, ast.Load())
        arguments = [node.func, ast.Constant(norm), product.func, product.args[0], view.args[0]]
        return ast.copy_location(ast.Call(helper, arguments, []), node)


def normed_projections(module: nn.Module, function: types.FunctionType) -> tuple[tuple[str, NormForm], ...]:
    """The norms right after projections in an attention's forward, each with its form."""
    forms = _forms_of(_norms_of(module))
    source, rewrite = _source(function), _NormedProjection({name for name, form in forms.items() if form.weighted})
    if source is not None:
        rewrite.visit(ast.parse(source))
    return tuple((name, forms[name]) for name in rewrite.found)


def _projecting(forms: dict[str, NormForm], backend: str | None) -> Callable[..., Any]:
    def project(norm: Any, name: str, projection: Any, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        heads = norm.weight.shape[0] == shape[-1]
        if not torch.is_grad_enabled() or has_hooks(norm) or not heads or not is_bare_linear(projection):
            normed: torch.Tensor = norm(projection(x).view(shape))
            return normed
        form = forms[name]
        return linear_rms_norm(
            x, projection.weight, norm.weight, projection.bias, form.eps, offset=form.offset, casting=form.casting,
            backend=backend,
        ).view(shape)  # fmt: skip

    return project


@functools.cache
def _rope_parts(
    function: types.FunctionType, forms: tuple[tuple[str, NormForm], ...], backend: str | None
) -> tuple[types.FunctionType, Callable[..., Any], Callable[..., Any]]:
    original = function.__globals__[_ROPE]

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any) -> Any:
        # Another axis for the heads, or tables that learn: the model's own.
        if rest or named or cos.requires_grad or q.dim() != 4:
            return original(q, k, cos, sin, *rest, **named)
        return rope(q, k, cos, sin, backend=backend)

    by_name = dict(forms)
    rewritten = _rewritten(function, _OtherRotation(), _NormedProjection(set(by_name)))
    return rewritten, rotate, _projecting(by_name, backend)


def patched_rope_class(
    module: nn.Module, function: types.FunctionType, forms: tuple[tuple[str, NormForm], ...], backend: str | None
) -> type[nn.Module]:
    """The class to give to a recognised attention; `forms`: norms whose projections are to keep no product."""
    cls: Any = original_class(module)
    forward, rotate, project = _rope_parts(function, forms, backend)
    return subclass_with_forward(cls, forward, ((_ROTATE, rotate), (_PROJECT, project)))


# ---------------------------------------------------------------------------------------------------------------------
# Residual add and norm
# ---------------------------------------------------------------------------------------------------------------------


def _names(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) of a statement `name = value`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def _added(value: ast.expr) -> tuple[str, str] | None:
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    left, right = value.left, value.right
    return (left.id, right.id) if isinstance(left, ast.Name) and isinstance(right, ast.Name) else None


def _norm_called(value: ast.expr, argument: str) -> str | None:
    """The attribute `norm` of a call `self.norm(argument)`."""
    norm = _of_self(value)
    given = value.args[0] if isinstance(value, ast.Call) and norm is not None else None
    return norm if isinstance(given, ast.Name) and given.id == argument else None


def _matched(first: ast.stmt, second: ast.stmt, third: ast.stmt) -> tuple[str, str, str] | None:
    """(hidden, residual, norm) where three statements are the pattern of the module's docstring."""
    a, b, c = _names(first), _names(second), _names(third)
    if a is None or b is None or c is None:
        return None
    hidden, residual, added = a[0], b[0], _added(a[1])
    copies = isinstance(b[1], ast.Name) and b[1].id == hidden
    norm = _norm_called(c[1], hidden)
    if added is None or set(added) != {hidden, residual} or hidden == residual or not copies:
        return None
    return (hidden, residual, norm) if c[0] == hidden and norm is not None else None


class _Rewrite(ast.NodeTransformer):
    def __init__(self, norms: set[str]) -> None:
        self.norms, self.found = norms, []  # type: tuple[set[str], list[str]]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        body, i = [], 0
        while i < len(node.body):
            match = _matched(*node.body[i : i + 3]) if i + 3 <= len(node.body) else None
            if match is None or match[2] not in self.norms:
                body.append(node.body[i])
                i += 1
                continue
            hidden, residual, norm = match
            text = f"{hidden}, {residual} = self.{_FUSED}(self.{norm}, {norm!r}, {hidden}, {residual})"
            body.append(ast.copy_location(ast.parse(text).body[0], node.body[i]))
            self.found.append(norm)
            i += 3
        node.body = body
        return node


def recognise_layer(module: nn.Module) -> tuple[types.FunctionType, tuple[tuple[str, NormForm], ...]] | str | None:
    """The forward of a decoder layer and its norms that follow a residual add; why it is left alone; None where it has
    no norms among its children."""
    norms = _norms_of(module)
    # A decoder layer has two norms or more; with one it is a model's last, or an attention's.
    if len(norms) < 2 or not any(True for child in module.children() if child not in norms.values()):
        return None
    function = _plain_function(original_class(module))
    if isinstance(function, str):
        return function
    source = _source(function)
    if source is None:
        return "its source is not at hand"
    forms = _forms_of(norms)
    rewrite = _Rewrite({name for name in forms if not has_hooks(norms[name])})
    rewrite.visit(ast.parse(source))
    if not rewrite.found:
        return "its forward has no residual add right before a norm"
    return function, tuple((name, forms[name]) for name in rewrite.found)


@functools.cache
def _layer_parts(
    function: types.FunctionType, forms: tuple[tuple[str, NormForm], ...], backend: str | None
) -> tuple[types.FunctionType, Callable[..., Any]]:
    by_name = dict(forms)

    def fused(norm: Any, name: str, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        if has_hooks(norm) or keeps_own_code("add_rms_norm", hidden, backend):
            total = residual + hidden
            return norm(total), total
        form = by_name[name]
        weight = norm.weight if form.weighted else None
        return add_rms_norm(
            hidden, residual, weight, form.eps, offset=form.offset, casting=form.casting, backend=backend
        )

    return _rewritten(function, _Rewrite(set(by_name))), fused


def patched_layer_class(
    module: nn.Module, found: tuple[types.FunctionType, tuple[tuple[str, NormForm], ...]], backend: str | None
) -> type[nn.Module]:
    """The class to give to a recognised decoder layer."""
    cls: Any = original_class(module)
    forward, fused = _layer_parts(*found, backend)
    return subclass_with_forward(cls, forward, ((_FUSED, fused),))
