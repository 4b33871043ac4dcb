"""Which code a family's model is made of, so that families with the same code can stand for each other.

A piece is a module class that a patch may look at, by what its forward says: without names of the family, docstrings
and annotations, with the functions that it calls for a rotation and the activation that it holds. Of an attention only
the statements with norms and rotations count, of the model itself those with head, logits and loss. Towers for images
and sound are left out: text does not reach them.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from typing import Any

import torch
from torch import nn

from .tiny import VARIANTS, families, model_class, tiny_config

__all__ = ["pieces_of", "representatives"]

_LOOKED_AT = re.compile(r"norm|mlp|feedforward|ffn|expert|glu|dense|layer|block|scaled.*embedding", re.IGNORECASE)
_ATTENDS = re.compile(r"attention|attn", re.IGNORECASE)
_TOWERS = re.compile(r"vision|visual|image|audio|speech|patch|conv|encoder|qformer|perceiver|resampler", re.IGNORECASE)
_ROTATES = re.compile(r"rotary|rope|rotate", re.IGNORECASE)


class _Plainer(ast.NodeTransformer):
    """Takes away what makes copies of the same code look different."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns, node.decorator_list = None, []
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = node.id.removeprefix(self._prefix)
        return node


@functools.cache
def _says(function: Any, prefix: str) -> str:
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):  # made at run time, as a dataclass's methods are
        return repr(function)
    return ast.unparse(ast.fix_missing_locations(_Plainer(prefix).visit(tree)))


def _prefix(cls: type[nn.Module]) -> str:
    """The family's name as its classes carry it, from the model that most of them belong to."""
    names = [name for name in vars(__import__(cls.__module__, fromlist=["_"])) if name.endswith("PreTrainedModel")]
    own = [name.removesuffix("PreTrainedModel") for name in names if name != "PreTrainedModel"]
    return next((name for name in sorted(own, key=len, reverse=True) if name and cls.__name__.startswith(name)), "")


@functools.cache
def _piece(cls: type[nn.Module], statements: str | None = None) -> str:
    """The forward of a class, or its statements that match a pattern, and the rotations that it calls."""
    prefix = _prefix(cls)
    text = _says(cls.forward, prefix)
    if statements is not None:
        body = ast.parse(text).body[0].body if text.startswith("def ") else []  # type: ignore[attr-defined]
        text = "\n".join(said for node in body if re.search(statements, said := ast.unparse(node)))
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    names = code.co_names if code is not None else ()
    functions = [inspect.unwrap(cls.forward).__globals__.get(name) for name in names if _ROTATES.search(name)]
    return "\n".join([text, *(_says(f, prefix) for f in functions if isinstance(f, types.FunctionType))])


def _activation(module: nn.Module) -> str:
    for name, value in (*vars(module).items(), *module._modules.items()):
        if "act" in name and callable(value):
            return getattr(value, "__name__", type(value).__name__)
    return ""


def pieces_of(task: str, kind: str) -> frozenset[int]:
    """The pieces of a family's model, as hashes."""
    with torch.device("meta"):
        model = model_class(task, kind)(tiny_config(task, kind))
    found = {_piece(type(model), "lm_head|logits|loss")}
    for path, module in model.named_modules():
        cls = type(module)
        if not cls.__module__.startswith("transformers.models") or _TOWERS.search(path):
            continue
        if _ATTENDS.search(cls.__name__):
            found.add(_piece(cls, "rotary|rope|_norm"))
        elif _LOOKED_AT.search(cls.__name__):
            found.add(_piece(cls) + _activation(module))
    return frozenset(hash(piece) for piece in found)


def representatives() -> list[tuple[str, str]]:
    """Families that have every piece between them, each time the one with the most pieces not had yet; and variants."""
    everyone = list(families())
    left = {family: pieces_of(*family) for family in everyone if family[1] not in VARIANTS}
    chosen, had = {family for family in everyone if family[1] in VARIANTS}, frozenset[int]()
    while True:
        best = max(left, key=lambda family: len(left[family] - had))
        if not left[best] - had:
            return [family for family in everyone if family in chosen]
        chosen.add(best)
        had |= left[best]
