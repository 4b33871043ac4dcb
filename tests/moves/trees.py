"""What a model's file of transformers holds, as parts of its syntax tree."""

import ast
from collections.abc import Iterator

__all__ = [
    "Owner",
    "added_import",
    "all_arguments",
    "blocks",
    "body_of",
    "callee",
    "children",
    "classes",
    "forward_of",
    "forwards",
    "functions",
    "helpers",
    "is_docstring",
    "layers",
    "loaded",
    "local_names",
    "models",
    "moved_by_name",
    "stored",
]

Owner = ast.ClassDef | None


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """The classes of a file, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions of a file, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def forward_of(cls: ast.ClassDef) -> ast.FunctionDef | None:
    """The forward that a class has of its own."""
    return next((n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "forward"), None)


def _is_model(cls: ast.ClassDef, known: dict[str, ast.ClassDef]) -> bool:
    bases = [ast.unparse(base).rpartition(".")[2] for base in cls.bases]
    return any(
        "PreTrainedModel" in base or "GenerationMixin" in base or (base in known and _is_model(known[base], known))
        for base in bases
    )


def models(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes that users make: bodies, and models with a head."""
    known = classes(tree)
    return [cls for cls in known.values() if _is_model(cls, known) and forward_of(cls)]


def layers(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes of modules that a model is made of."""
    known = classes(tree)
    return [cls for cls in known.values() if forward_of(cls) and not _is_model(cls, known)]


def forwards(tree: ast.Module) -> list[ast.FunctionDef]:
    """The forwards of the file's layers."""
    return [found for cls in layers(tree) if (found := forward_of(cls)) is not None]


def helpers(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions of a file that the file itself does nothing with but call them (or name them to a decorator)."""
    found = functions(tree)
    called, named = {}, {}  # type: dict[str, int], dict[str, int]
    decorators = [d for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for d in node.decorator_list]
    given = {id(part) for each in decorators for part in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called[node.func.id] = called.get(node.func.id, 0) + 1
        if isinstance(node, ast.Name) and id(node) not in given:
            named[node.id] = named.get(node.id, 0) + 1
    return {name: each for name, each in found.items() if 0 < called.get(name, 0) == named.get(name, 0)}


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def body_of(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of a function behind its docstring."""
    return function.body[1:] if is_docstring(function.body[0]) else function.body


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a function, but for functions and classes inside of it."""
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list) and found:
            yield found
            for each in found:
                if not isinstance(each, ast.FunctionDef | ast.ClassDef):
                    yield from blocks(each)


def all_arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """A function's arguments, but for self, *args and **kwargs."""
    given = function.args
    return [each for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg not in ("self", "cls")]


def loaded(node: ast.AST) -> set[str]:
    """The names that code reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def stored(node: ast.AST) -> set[str]:
    """The names that code sets or deletes."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def local_names(function: ast.FunctionDef) -> set[str]:
    """The names of a function's own variables."""
    given = function.args
    others = {each.arg for each in (given.vararg, given.kwarg) if each is not None}
    return {"self", *(each.arg for each in all_arguments(function)), *others, *stored(function)}


def _made(value: ast.expr, known: dict[str, ast.ClassDef]) -> str | None:
    """The class of the file that an expression makes a module, or modules, of."""
    names = [n.func.id for n in ast.walk(value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    found = {name for name in names if name in known}
    return found.pop() if len(found) == 1 else None


def children(tree: ast.Module, cls: ast.ClassDef) -> dict[str, str]:
    """By attribute of `self`, the class of the file that `__init__` makes its value (or the values in it) of."""
    known, found = classes(tree), {}  # type: dict[str, ast.ClassDef], dict[str, str]
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            made = _made(node.value, known) or ("" if isinstance(node.value, ast.Call) else None)
            if made is not None and isinstance(target.value, ast.Name) and target.value.id == "self":
                if found.get(target.attr, made) != made:
                    return {}  # one of several classes, some perhaps of other files
                found[target.attr] = made
    found = {name: made for name, made in found.items() if made}
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in known:
            found = {**children(tree, known[base.id]), **found}
    return found


def _looped(function: ast.FunctionDef) -> dict[str, str]:
    """By loop variable, the attribute of `self` that it goes over."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            over = [
                n.attr for n in ast.walk(node.iter) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
            ]
            names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
            if over and names:
                found[names[-1]] = over[0]
    return found


def callee(call: ast.Call, function: ast.FunctionDef, held: dict[str, str]) -> str | None:
    """The class of the file whose forward a call runs; `held` is what `children` returned."""
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
        return held.get(call.func.attr)
    if isinstance(call.func, ast.Name):
        return held.get(_looped(function).get(call.func.id, ""))
    return None


def added_import(tree: ast.Module, text: str) -> None:
    """Adds an import behind the docstring and the imports from `__future__`."""
    at = next(
        i for i, node in enumerate(tree.body)
        if not is_docstring(node) and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    )  # fmt: skip
    tree.body.insert(at, ast.parse(text).body[0])


def moved_by_name(node: ast.AST, names: dict[str, str]) -> None:
    """Renames variables."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            part.id = names[part.id]
