"""Where a command writes: text for people, or one JSON object; and its exit codes."""

import contextlib
import json
import math
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["FINE", "FOUND", "USAGE", "Output", "UsageError"]

FINE, FOUND, USAGE = 0, 1, 2


class UsageError(Exception):
    """What the user can mend: an argument, or something to install. The message says how."""


class Output:
    """A command's output; a context manager.

    With `as_json` everything that is printed meanwhile, also by libraries, goes to stderr, so that stdout holds what
    `result` is given and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout
        self._redirected = contextlib.ExitStack()
        # Wide where nobody looks: a log or a pipe should hold whole lines.
        self.console = Console(width=None if sys.stderr.isatty() or sys.stdout.isatty() else 170)

    def __enter__(self) -> "Output":
        if self.as_json:
            self._redirected.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._redirected.close()

    def text(self, *parts: Any, style: str = "") -> None:
        """For people; strings are printed as they are, without markup, and in full."""
        self.console.print(*parts, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def show(self, renderable: Any) -> None:
        """For people: a table."""
        self.console.print(renderable)

    def progress(self) -> Progress:
        """A progress bar that leaves nothing behind."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True)

    def result(self, value: dict[str, Any]) -> None:
        """The command's result, written where `--json` was asked for. JSON has no NaN and no infinity: null."""
        if self.as_json:
            self._stdout.write(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")
            self._stdout.flush()

    def fail(self, message: str) -> None:
        """An error that the user can mend."""
        self.result({"error": message})
        Console(stderr=True, soft_wrap=True).print(escape(message), highlight=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
