"""Which names of other projects the package's code has, and whether an installed version has them; no project
but PyTorch is imported for either, so that a look at two hundred names takes a second."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "npu_trainer_kernels"
PROJECTS = ("transformers", "trl", "torch", "accelerate", "peft", "torch_npu")
_MODULE = re.compile(rf"({'|'.join(PROJECTS)})(\.[a-z_]\w*)+")
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
_OURS = ("_npu_kernels", "_shuffled")
# What reports about versions, and what adapts to Triton's.
_ABOUT_VERSIONS = ("cli/_environment.py", "support/foreign.py", "support/triton.py")
# Of Python itself: its modules, what they hold, and its named tuples.
_PYTHONS = frozenset((
    *sys.stdlib_module_names, "_current_frames", "_data", "_fields", "_getframe", "_inst", "_lru_cache_wrapper",
    "_make", "_reconstructor", "_replace",
))  # fmt: skip


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Returns the package's files, parsed, by path."""
    paths = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    # Triton and the Ascend compiler have pinned versions, and their own tests.
    others = ("ascend/", "support/triton.py", "support/foreign.py")
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if not name.startswith(others)}


@functools.cache
def own_names() -> frozenset[str]:
    """Returns the private names that the package itself defines."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.level:
                found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(name for name in found if _PRIVATE.fullmatch(name))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "made", "new")


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the lines and the private names of other projects in a file: attributes, imports, and strings that name
    an attribute."""
    parts = {id(part) for node in ast.walk(tree) if _makes_text(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [part for name in (*modules, *(each.name for each in node.names)) for part in name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [] if id(node) in parts else [node.value]
        for name in names:
            ours = name.startswith(_OURS) or name in own_names() or name in _PYTHONS
            if _PRIVATE.fullmatch(name) and not ours:
                yield getattr(node, "lineno", 0), name


def _makes_text(node: ast.AST) -> bool:
    """Whether strings in an expression are parts of a longer one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("removesuffix", "removeprefix", "startswith", "endswith")
    return isinstance(node, ast.JoinedStr)


def modules(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields the lines, modules and names of what a file takes out of other projects' modules, as an import or as a
    string. What a project's first two levels hand out is its public face, and torch's are documented."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _MODULE.fullmatch(node.module or ""):
            for alias in node.names:
                if not str(node.module).startswith("torch."):
                    yield node.lineno, str(node.module), alias.name
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(text := str(node.value)) and text[:6] != "torch.":
            yield node.lineno, text, ""


def compares_versions(path: str, tree: ast.Module) -> list[int]:
    """Returns the lines of a file that compare a version of another project."""
    if path in _ABOUT_VERSIONS:
        return []
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return [node.lineno for node in found if re.search(r"\bVersion\(|__version__[^)]*$", ast.unparse(node))]


# ---------------------------------------------------------------------------------------------------------------------
# The installed version
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _tree_of(module: str) -> ast.Module | None:
    """Returns a module of an installed project, parsed; a version need not go with what else is installed."""
    project, *parts = module.split(".")
    spec = importlib.util.find_spec(project)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    file = next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)
    return None if file is None else ast.parse(file.read_text())


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, and those inside of its conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _defines(body: list[ast.stmt], name: str) -> bool:
    for node in _statements(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any(name in (alias.asname or alias.name, "") for alias in node.names):
                return True
        elif any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node) if _stores(part)):
            return True
    return False


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _identifiers(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Returns the names in a function without its decorators, or in a class."""
    inside: list[ast.AST] = [*node.body, *([node.args] if isinstance(node, ast.FunctionDef) else [])]
    found: set[str] = set()
    for part in (each for top in inside for each in ast.walk(top)):
        for kind, field in ((ast.Name, "id"), (ast.Attribute, "attr"), (ast.arg, "arg"), (ast.FunctionDef, "name")):
            if isinstance(part, kind):
                found.add(getattr(part, field))
    return found


def exists(where: str, name: str) -> bool:
    """Whether the installed version has a name.

    Args:
        where: a module; a class or function in it, `module:Class`; or a method, `module:Class.method`.
        name: a name of the module, or one that the code of the class or function has, its arguments among them.
    """
    module, _, path = where.partition(":")
    if module.partition(".")[0] == "torch":
        return _is_in_torch(module, path, name)
    tree = _tree_of(module)
    if tree is None:
        return False
    if not path:
        return not name or _defines(tree.body, name) or _tree_of(f"{module}.{name}") is not None
    body, found = tree.body, None
    for part in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next((each for each in _statements(body) if isinstance(each, kinds) and each.name == part), None)
        if found is None:
            return False
        body = found.body
    return isinstance(found, ast.ClassDef | ast.FunctionDef) and (not name or name in _identifiers(found))


def _is_in_torch(module: str, path: str, name: str) -> bool:
    """Whether PyTorch, which is imported and partly no Python, has a name; what its code sets on instances counts."""
    found = _of_torch(module, path)
    if found is None:
        return False
    return not name or hasattr(found, name) or name in _set_by(found)


@functools.cache
def _of_torch(module: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(f"{module}:{path}" if path else module)
    except (ImportError, AttributeError):
        return None


@functools.cache
def _set_by(found: Any) -> set[str]:
    """Returns the names in the code of a class or a function."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    return _identifiers(tree) if isinstance(tree, ast.ClassDef | ast.FunctionDef) else set()
