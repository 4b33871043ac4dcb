"""Moves of names: arguments and attributes are called otherwise, in all places of a file that say them."""

import ast
import functools
import re
import types
from pathlib import Path
from typing import Any

import transformers

from .trees import (
    added_import,
    all_arguments,
    callee,
    children,
    classes,
    forward_of,
    helpers,
    layers,
    models,
    moved_by_name,
)

__all__ = ["arguments_renamed", "attributes_renamed", "cache_renamed", "rotation_renamed"]

_CACHES = ("past_key_values", "cache_params", "cache", "layer_past")
_NEW_CACHE = "kept_keys"
_TIED = re.compile(r"_tied_weights_keys = ([{\[].*?[}\]])", re.DOTALL)
_DEPRECATION = "from transformers.utils.deprecation import deprecate_kwarg"


def _is_simple(function: ast.FunctionDef) -> bool:
    """Whether names of a function's variables are said nowhere else: no function inside of it takes or makes them."""
    inside = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not function]
    reads = {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return not inside and not reads & {"locals", "vars"}


def _renamed(function: ast.FunctionDef, names: dict[str, str]) -> None:
    for each in all_arguments(function):
        each.arg = names.get(each.arg, each.arg)
    for statement in function.body:
        moved_by_name(statement, names)


def _rename(tree: ast.Module, new: dict[str, dict[str, str]], always: bool = False) -> None:
    """Renames arguments of forwards, by class, in the signatures, the bodies and the calls. Where some call's class is
    not known, or hands an argument on, and `always` if so asked, the forward goes on taking the old names, as a
    deprecated one does."""
    unknown: set[str] = set()
    taken = {
        name: {each.arg for each in all_arguments(f)} for name, cls in classes(tree).items() if (f := forward_of(cls))
    }
    for cls in classes(tree).values():
        held = children(tree, cls)
        for function in (n for n in cls.body if isinstance(n, ast.FunctionDef)):
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
                name = callee(call, function, held)
                for word in call.keywords:
                    if name is None or word.arg not in taken.get(name, ()):
                        unknown.add(word.arg or "")
                    elif word.arg is not None:
                        word.arg = new.get(name, {}).get(word.arg, word.arg)
    for name, names in new.items():
        function = forward_of(classes(tree)[name])
        assert function is not None
        _renamed(function, names)
        for old in sorted(names if always else unknown & set(names)):
            wrapper = ast.parse(f"deprecate_kwarg({old!r}, '99.0.0', new_name={names[old]!r})", mode="eval").body
            function.decorator_list.append(wrapper)
    added_import(tree, _DEPRECATION)


def cache_renamed(tree: ast.Module) -> None:
    """Calls the cache otherwise everywhere, under decorators that go on taking the old name, as 5.24 did."""
    new = {}
    for cls in (*layers(tree), *models(tree)):
        function = forward_of(cls)
        given = [] if function is None else [each.arg for each in all_arguments(function) if each.arg in _CACHES]
        if function is not None and len(given) == 1 and _is_simple(function):
            new[cls.name] = {given[0]: _NEW_CACHE}
    _rename(tree, new, always=True)


def arguments_renamed(tree: ast.Module) -> None:
    """Calls every argument of the layers' forwards otherwise, but for caches, and for forwards whose decorators may say
    what they hand on."""
    new = {}
    for cls in layers(tree):
        function = forward_of(cls)
        if function is not None and _is_simple(function) and not (function.decorator_list or _is_decorated(cls)):
            given = [each.arg for each in all_arguments(function) if each.arg not in _CACHES]
            new[cls.name] = {name: f"{name}_given" for name in given}
    _rename(tree, new)


def _is_decorated(cls: ast.ClassDef) -> bool:
    """Whether a decorator of a class wraps its forward."""
    return any("implementation" in ast.unparse(each) for each in cls.decorator_list)


def rotation_renamed(tree: ast.Module) -> None:
    """Calls the file's helpers, and every argument of theirs, otherwise: the rotation among them."""
    found = helpers(tree)
    new = {
        name: {each.arg: f"{each.arg}_given" for each in all_arguments(function)}
        for name, function in found.items() if _is_simple(function)
    }  # fmt: skip
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
        for word in call.keywords:
            word.arg = new.get(call.func.id, {}).get(word.arg or "", word.arg)
    for name, names in new.items():
        _renamed(found[name], names)
        found[name].name = f"helper_{list(new).index(name)}"
    moved_by_name(tree, {name: found[name].name for name in new})


@functools.cache
def _read_elsewhere() -> frozenset[str]:
    """The names that code of transformers outside of the model files reads."""
    root = Path(transformers.__file__).parent
    files = [*root.glob("*.py"), *(f for part in ("integrations", "generation", "utils", "loss", "distributed")
                                   for f in (root / part).rglob("*.py"))]  # fmt: skip
    codes: list[Any] = [compile(file.read_text(), "", "exec", dont_inherit=True) for file in files]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    # A model's file ties weights of modules of other files, by paths in strings.
    tied = [text for file in (root / "models").glob("*/modeling_*.py") for text in _TIED.findall(file.read_text())]
    parts = {part for text in tied for part in re.findall(r"\w+", text)}
    return frozenset(name for code in codes for name in code.co_names) | parts


def _made_modules(cls: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """The attributes of `self` that a class sets to modules."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            value = node.value
            made = isinstance(value, ast.Call) and (
                ast.unparse(value.func).startswith("nn.") or getattr(value.func, "id", "") in known
            )
            holds = made and not ast.unparse(value).startswith(("nn.Parameter", "nn.Buffer"))
            if ast.unparse(target.value) == "self" and (holds or ast.unparse(value).startswith("ACT2FN[")):
                found.add(target.attr)
    return found


def _root(node: ast.expr) -> str:
    """The name that an expression like `a.b.c` begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def attributes_renamed(tree: ast.Module) -> None:
    """Calls the attributes of layers that hold modules otherwise, but for those that code elsewhere reads."""
    known = classes(tree)
    found = set[str]().union(*(_made_modules(cls, known) for cls in layers(tree)))
    imported = {each.asname or each.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
                for each in node.names}  # fmt: skip
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _root(node) not in imported]
    of_models = set[str]().union(*(_made_modules(cls, known) for cls in models(tree)))
    of_configs = {node.attr for node in said if ast.unparse(node.value).endswith("config")}
    methods = {n.name for cls in known.values() for n in cls.body if isinstance(n, ast.FunctionDef)}
    new = {name: f"{name}_held" for name in found - of_models - of_configs - methods - _read_elsewhere()}
    for node in said:
        node.attr = new.get(node.attr, node.attr)
    # Class attributes, decorators and getattr have them in strings.
    parts: list[ast.AST] = []
    for part in (each for cls in known.values() for each in cls.body):
        parts += part.decorator_list if isinstance(part, ast.FunctionDef) else [part]
    strings = [node for part in parts for node in ast.walk(part)]
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if getattr(call.func, "id", "") in ("getattr", "hasattr", "setattr") and ast.unparse(call.args[0]) == "self":
            strings.append(call.args[1])
    for each in strings:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            each.value = ".".join(new.get(part, part) for part in each.value.split("."))
