"""Finds out whether `npu-kernels run` can reach a command: its Python must read PYTHONPATH and a sitecustomize."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..support.switch import RUN

__all__ = ["unreachable"]

# Options of Python. -P and -s leave PYTHONPATH as it is.
_ISOLATING = {"I": "ignores PYTHONPATH", "E": "ignores PYTHONPATH", "S": "reads no sitecustomize"}
_WITH_VALUE = ("W", "X")
_LAST = ("c", "m")  # what follows them are the arguments of the program
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?")
_CALLBACK = "use NpuKernelsCallback in the script"


def unreachable(command: Sequence[str]) -> str | None:
    """Returns why the environment of a command does not switch on the kernels in it, and what to do, or None.

    It looks at the options of Python and of `env` at the beginning of the command, and at the first line of a script.
    Whatever a shell, a launcher or another machine does with the environment is not known here.
    """
    found = _of_words(command)
    if found is not None or not command or command[0].endswith(".py"):
        return found
    words = _first_line(command[0])
    found = _of_words(words)
    return None if found is None else f"the first line of {command[0]} has {found}"


def _of_words(words: Sequence[str]) -> str | None:
    if not words:
        return None
    program, *options = words
    name = Path(program).name
    if name == "env":
        return _of_env(options)
    if _PYTHON.fullmatch(name) is None:
        return None
    for letter in _letters(options):
        if letter in _ISOLATING:
            return f"{name} -{letter}: Python {_ISOLATING[letter]} (leave -{letter} out, or {_CALLBACK})"
    return None


def _letters(options: Sequence[str]) -> Iterator[str]:
    """Yields the one-letter options before the program's arguments, also those that share a dash."""
    left = iter(options)
    for word in left:
        if word == "--check-hash-based-pycs":
            next(left, None)
        if word.startswith("--"):
            continue
        if not word.startswith("-") or word == "-":
            return
        for at, letter in enumerate(word[1:], 1):
            yield letter
            if letter in _LAST:
                return
            if letter in _WITH_VALUE:
                if at == len(word) - 1:
                    next(left, None)
                break


def _of_env(options: Sequence[str]) -> str | None:
    """Reads the options and assignments of `env`, then the command behind them."""
    left = list(options)
    while left and (left[0].startswith("-") or "=" in left[0]):
        word = left.pop(0)
        if word in ("-S", "--split-string"):
            continue
        given = f"{word} {left.pop(0)}" if word in ("-u", "--unset", "-C", "--chdir") and left else word
        unset = re.sub(r"^(?:-u|--unset)[ =]?", "", given)
        clears = word in ("-", "-i", "--ignore-environment") or (unset != given and unset in ("PYTHONPATH", RUN))
        if clears or word.startswith("PYTHONPATH="):
            return (f"env {given} starts the command without PYTHONPATH and {RUN} as they are set here (put "
                    "`npu-kernels run` behind it, directly in front of the training command)")  # fmt: skip
    return _of_words(left)


def _first_line(program: str) -> list[str]:
    """Returns the words after `#!` of a script, empty for other files."""
    file = shutil.which(program)
    if file is None:
        return []
    try:
        with open(file, "rb") as opened:
            line = opened.readline(512)
    except OSError:
        return []
    return line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
