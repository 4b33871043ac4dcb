"""Finds, in an attention's forward, the rotation of queries and keys and the update of the cache right after it:

    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)

`cached_rotation` returns the forward with one call in place of these two statements, for code that computes both at
once: `q, k, v = self.<NAME>(cache, {}, v, self.layer_idx, q, k, cos, sin)`. The dict has the keywords of the update, as
in `cache.update(k, v, self.layer_idx, kwargs=kwargs)`. Nothing of the forward can see the values between the two
statements. The norms of q and k move into the call where nothing sees theirs either: where `q = self.q_norm(x)`,
perhaps transposed, is the last statement before the rotation that has q in it, and the same holds for k.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops import QkNorm
from ..classes import is_patched_class, original_class
from ..patch import set_on_instance
from ..probe import called_on_self, plain_forward, rewritten_forward, self_attribute, source_of
from .norm_forms import NormForm, exchanged, recognise_norm
from .rotation_forms import RopeForm, rope_form, rotates
from .rotations import helper_of

__all__ = ["CachedRotation", "cached_rotation"]

NAME = "_npu_kernels_rotate_and_cache"


@dataclass(frozen=True)
class CachedRotation:
    """An attention whose rotation and update of the cache are one call.

    Attributes:
        forward: its forward with the call of `self.<NAME>`.
        form: the form of the rotation.
        rotate: the rotation as the attention would call it.
        norms: q's and k's norm, which the call has to apply; None: it gets what they return, or there are none.
        norm: their form.
    """

    forward: types.FunctionType
    form: RopeForm
    rotate: Callable[..., Any]
    norms: tuple[nn.Module, nn.Module] | None = None
    norm: NormForm | None = None

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the norms that the call has to apply."""
        return (q, k) if self.norms is None else (self.norms[0](q), self.norms[1](k))

    def qk_norm(self) -> QkNorm | None:
        """Returns these norms as the op's argument."""
        if self.norms is None or self.norm is None:
            return None
        q_weight, k_weight = (norm._parameters["weight"] for norm in self.norms)
        assert q_weight is not None
        assert k_weight is not None
        return QkNorm(q_weight, k_weight, self.norm.eps, self.norm.offset, self.norm.casting)


@dataclass(frozen=True)
class _Found:
    """The two statements in a forward.

    Attributes:
        at: the place of the first one in the body.
        function: the name of the rotating function.
        norms: the names of q's and k's norms that may move into the call.
    """

    at: int
    function: str
    norms: tuple[str, str] | None


def _name(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _assigned(node: ast.stmt) -> tuple[list[str | None], ast.expr] | None:
    """Returns the names and the value of an assignment to a name or to several."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    return [_name(part) for part in (target.elts if isinstance(target, ast.Tuple) else [target])], node.value


def _rotation(node: ast.stmt, functions: set[str]) -> tuple[str, str, str] | None:
    """Returns f, q and k of a statement `q, k = f(q, k, ...)`."""
    found = _assigned(node)
    if found is None or not isinstance(found[1], ast.Call) or len(found[0]) != 2:
        return None
    (q, k), call = found[0], found[1]
    function = _name(call.func)
    if q is None or k is None or q == k or function not in functions:
        return None
    others = (*call.args[2:], *(word.value for word in call.keywords))
    same = [_name(each) for each in call.args[:2]] == [q, k] and all(word.arg for word in call.keywords)
    if not same or any(isinstance(each, ast.Starred) or {q, k} & _names(each) for each in others):
        return None
    assert function is not None
    return function, q, k


def _update(node: ast.stmt, q: str, k: str) -> tuple[str, str, ast.expr, list[ast.keyword]] | None:
    """Returns c, v, i and the keywords of a statement `if c is not None: k, v = c.update(k, v, i, ...)`."""
    if not isinstance(node, ast.If) or len(node.body) != 1 or node.orelse or not isinstance(node.test, ast.Compare):
        return None
    test, found = node.test, _assigned(node.body[0])
    cache = _name(test.left)
    if cache is None or ast.unparse(test) != f"{cache} is not None" or found is None:
        return None
    names, call = found
    if len(names) != 2 or names[0] != k or not isinstance(call, ast.Call) or len(call.args) != 3:
        return None
    if any(word.arg is None or _name(word.value) is None for word in call.keywords):
        return None
    v, layer = names[1], call.args[2]
    if v is None or len({q, k, v, cache}) != 4 or ast.unparse(call.func) != f"{cache}.update":
        return None
    others = set().union(*map(_names, (layer, *(word.value for word in call.keywords))))
    same = [_name(each) for each in call.args[:2]] == [k, v] and {q, k, v}.isdisjoint(others)
    return (cache, v, layer, call.keywords) if same else None


def _norm_call(body: list[ast.stmt], name: str) -> ast.Call | None:
    """Returns the call of a norm whose result, perhaps transposed, is all that the statements do last with a name."""
    last = next((node for node in reversed(body) if name in _names(node)), None)
    found = None if last is None else _assigned(last)
    if found is None or found[0] != [name]:
        return None
    value = found[1]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "transpose":
        if [ast.unparse(each) for each in value.args] != ["1", "2"] or value.keywords:
            return None
        value = value.func.value
    return value if isinstance(value, ast.Call) and called_on_self(value) is not None else None


def _body(tree: ast.Module) -> list[ast.stmt]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body


@functools.cache
def _found(function: types.FunctionType) -> _Found | None:
    """Returns where a forward has the two statements, if it has each once."""
    tree = ast.parse(source_of(function) or "")
    if not tree.body or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    body = _body(tree)
    functions = {name for name in function.__code__.co_names if rotates(name)}
    places = [at for at, node in enumerate(body[:-1]) if _rotation(node, functions) is not None]
    if len(places) != 1:
        return None
    at = places[0]
    rotation = _rotation(body[at], functions)
    assert rotation is not None
    name, q, k = rotation
    if _update(body[at + 1], q, k) is None:
        return None
    of_q, of_k = (_norm_call(body[:at], each) for each in (q, k))
    if of_q is None or of_k is None:
        return _Found(at, name, None)
    return _Found(at, name, (str(called_on_self(of_q)), str(called_on_self(of_k))))


class _AtOnce(ast.NodeTransformer):
    """Puts the call in the place of the two statements, and takes the norms out if they move into it."""

    def __init__(self, found: _Found, without_norms: bool) -> None:
        self._found, self._without_norms = found, without_norms

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        at = self._found.at
        rotation = _rotation(node.body[at], {self._found.function})
        assert rotation is not None
        _, q, k = rotation
        update = _update(node.body[at + 1], q, k)
        assert update is not None
        cache, v, layer, words = update
        statement: Any = node.body[at]
        options = ast.Dict([ast.Constant(word.arg) for word in words], [word.value for word in words])
        given = [ast.Name(cache, ast.Load()), options, ast.Name(v, ast.Load()), layer, *statement.value.args]
        call = ast.Call(self_attribute(NAME), given, statement.value.keywords)
        targets = ast.Tuple([ast.Name(each, ast.Store()) for each in (q, k, v)], ast.Store())
        for name in (q, k) if self._without_norms else ():
            norm = _norm_call(node.body[:at], name)
            assert norm is not None
            before = next(each for each in reversed(node.body[:at]) if name in _names(each))
            _Argument(norm).visit(before)
        node.body[at : at + 2] = [ast.copy_location(ast.Assign([targets], call), statement)]
        return node


class _Argument(ast.NodeTransformer):
    """Puts the argument of a call in its place."""

    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if node is self._call:
            return node.args[0]
        self.generic_visit(node)
        return node


@functools.cache
def _rewritten(kind: Any, found: _Found, without_norms: bool) -> types.FunctionType:
    return rewritten_forward(kind, _AtOnce(found, without_norms))


def _norms_form(norms: tuple[nn.Module, nn.Module], known: dict[Any, Any]) -> NormForm | None:
    """Returns the form of two norms that `rms_norm` serves; None: they have two forms, or one that the op lacks."""
    forms = [recognise_norm(norm, known) for norm in norms]
    form = forms[0]
    if not isinstance(form, NormForm) or forms[1] != form or not form.weighted or form.one_dtype:
        return None
    served = all(is_patched_class(type(n)) and exchanged(n, original_class(n), form) is None for n in norms)
    return form if served else None


def cached_rotation(module: nn.Module, known: dict[Any, Any]) -> CachedRotation | None:
    """Returns an attention's forward with its rotation and the update of its cache as one call; None for a module
    without them, and for one whose rotation `ops.rope` does not serve.

    Args:
        module: a module of a model that the kernels are applied to.
        known: a cache of the forms of norms.
    """
    kind: Any = original_class(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if not any(rotates(name) for name in getattr(code, "co_names", ())) or set_on_instance(module) is not None:
        return None
    function = plain_forward(kind)
    found = None if isinstance(function, str) else _found(function)
    if found is None or isinstance(function, str):
        return None
    rotate = getattr(module, helper_of(found.function), None)
    served = function.__globals__.get(found.function)
    form = rope_form(served) if isinstance(served, types.FunctionType) else None
    if rotate is None or form is None or form.pairs != "halves" or form.roles != ("q", "k", "cos", "sin"):
        return None
    norms = None
    if found.norms is not None:
        q, k = (getattr(module, name, None) for name in found.norms)
        norms = (q, k) if isinstance(q, nn.Module) and isinstance(k, nn.Module) else None
    norm = None if norms is None else _norms_form(norms, known)
    norms = None if norm is None else norms
    return CachedRotation(_rewritten(kind, found, norms is not None), form, rotate, norms, norm)
