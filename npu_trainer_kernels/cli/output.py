"""Where a command writes: text for people, or one JSON object; and its exit codes.

Results go to stdout, progress to stderr: as a bar in a terminal, and as a line for each step elsewhere, where a bar
would be invisible and a log silent for minutes.
"""

import contextlib
import json
import math
import os
import sys
import textwrap
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["FINE", "FOUND", "STOPPED", "USAGE", "Output", "Steps", "UsageError", "first_line", "new_table", "plain"]

FINE, FOUND, USAGE = 0, 1, 2
STOPPED = 130  # as shells have it for Ctrl-C
# The numbers first: a narrow terminal cuts off the end.
_COUNT, _TIME, _WHAT = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")


class UsageError(Exception):
    """What the user can mend: an argument, or something to install. The message says how."""


def first_line(error: Exception) -> str:
    """Of what an error says; the name of its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def new_table() -> Table:
    """A table without frames, whose columns stand close: it is to be read in a narrow terminal, too."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


class Steps:
    """Progress through a known number of steps; a context manager."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._total, self._done, self._line = total, 0, ""
        self._console = console
        columns = (SpinnerColumn(), _TIME, _WHAT) if total is None else (_COUNT, _TIME, _WHAT)
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total)

    def __enter__(self) -> "Steps":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Says what is being done now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)
            return
        count = "" if self._total is None else f"[{self._done + 1}/{self._total}] "
        if self._line != count + what:
            self._line = count + what
            self._console.print(self._line, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """A step is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1)


def _records(table: Table) -> Text:
    """A table as a block of lines for each row, for a terminal that is too narrow for its columns."""
    headers = [str(column.header) for column in table.columns]
    width = max(map(len, headers[1:]), default=0)
    lines = []
    for first, *rest in zip(*(column.cells for column in table.columns), strict=True):
        lines.append(str(first))
        lines += [f"  {h:{width}}  {cell}" for h, cell in zip(headers[1:], rest, strict=True) if str(cell)]
    return Text("\n".join([str(table.title), *lines] if table.title else lines))


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
        self._looked_at = sys.stderr.isatty() or sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(width=None if self._looked_at else 170)

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

    def paragraph(self, text: str, indent: int = 2) -> None:
        """For people: a remark, in a terminal wrapped between words."""
        lines = textwrap.wrap(text, max(20, self.console.width - indent), break_on_hyphens=False)
        self.text(textwrap.indent("\n".join(lines) if self._looked_at else text, " " * indent))

    def show(self, table: Table) -> None:
        """For people: a table; row by row where its columns would not fit."""
        endless = self.console.options.update(max_width=10_000)
        fits = self.console.measure(table, options=endless).maximum <= self.console.width
        self.console.print(table if fits else _records(table), highlight=False, soft_wrap=not fits)

    def progress(self, total: int | None = None) -> Steps:
        """What is being done, on stderr: a bar that leaves nothing behind, or lines."""
        return Steps(Console(stderr=True), total)

    def bar(self) -> Progress:
        """A bar above which results are printed while they come."""
        return Progress(_COUNT, _TIME, BarColumn(bar_width=16), _WHAT, console=self.console, transient=True)

    def result(self, value: dict[str, Any]) -> None:
        """The command's result, written where `--json` was asked for. JSON has no NaN and no infinity: null."""
        if not self.as_json:
            return
        text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except OSError as error:  # a disk that is full, a pipe that nobody reads any more
            raise SystemExit(f"the result could not be written to stdout: {error}") from error

    def fail(self, message: str) -> None:
        """An error that the user can mend."""
        self.result({"error": message})
        Console(stderr=True, soft_wrap=True).print(escape(message), highlight=False)


def plain(value: Any) -> Any:
    """A value as JSON has it: tuples as lists, null for what is no finite number."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
