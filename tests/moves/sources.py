"""Imports transformers' model files with moved sources.

A moved file has the name of the file that it comes from, and `inspect` finds its text: to the package it is a file of a
release. `install` is for the whole process; nothing is written to a disk.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers

__all__ = ["Move", "install", "moved"]

Move = Callable[[ast.Module], None]
_NAME = re.compile(r"transformers\.models\.(?!auto\.)\w+\.modeling_\w+")


def moved(text: str, moves: Sequence[Move]) -> str:
    """The text of a file after moves."""
    tree = ast.parse(text)
    for move in moves:
        move(tree)
        ast.fix_missing_locations(tree)
    return ast.unparse(tree) + "\n"


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, origin: Path, moves: Sequence[Move]) -> None:
        # As much of the path as transformers reads a model's name from; there is no such file.
        self.file = str(Path("moved").joinpath(*origin.parts[-4:]))
        self._origin, self._moves = origin, moves

    def get_source(self, fullname: str) -> str:
        return moved(self._origin.read_text(), self._moves)

    def exec_module(self, module: types.ModuleType) -> None:
        text = self.get_source(module.__name__)
        module.__file__ = self.file
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        exec(compile(text, self.file, "exec", dont_inherit=True), vars(module))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = moves

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if _NAME.fullmatch(fullname) else None
        if found is None or found.origin is None:
            return None
        loader = _Loader(Path(found.origin), self._moves)
        return importlib.util.spec_from_loader(fullname, loader, origin=loader.file)


def install(moves: Sequence[Move]) -> None:
    """Has this process import every model file moved. Files that other packages have imported are forgotten first."""
    for name in list(filter(_NAME.fullmatch, sys.modules)):
        del sys.modules[name]
        # What transformers' lazy modules keep of it.
        for lazy in (transformers, sys.modules[name.rpartition(".")[0]]):
            kept = [key for key, value in vars(lazy).items() if getattr(value, "__module__", None) == name]
            for key in (*kept, *(key for key, value in vars(lazy).items() if getattr(value, "__name__", None) == name)):
                delattr(lazy, key)
    sys.meta_path.insert(0, _Finder(moves))
