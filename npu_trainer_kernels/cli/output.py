"""The output of a command, which is readable text or one JSON object, and its exit codes.

Results go to stdout, progress to stderr: as a bar in a terminal, elsewhere as a line for each step, since a bar would
be invisible and a log would be silent for minutes.
"""

import contextlib
import errno
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

__all__ = ["FINE", "FOUND", "STOPPED", "USAGE", "Output", "Steps", "UsageError", "first_line", "new_table", "plain",
           "unwritten"]  # fmt: skip

FINE, FOUND, USAGE = 0, 1, 2
STOPPED = 130  # the shells' exit code for Ctrl-C
# The numbers come first, since a narrow terminal cuts off the end.
_COUNT, _TIME, _WHAT = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")


class UsageError(Exception):
    """An error that the user can fix: a wrong argument, or a missing package. The message says how."""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def unwritten(error: OSError) -> str:
    """Returns what could not be written and why, and the beginning of what to do about it."""
    file = "" if error.filename is None else f" to {error.filename}"
    do = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make that possible"
    return f"nothing could be written{file}: {error.strerror or error}; {do}"


def new_table() -> Table:
    """Returns a table without frames and with narrow gaps, for narrow terminals."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


class Steps:
    """Progress through a number of steps (None: unknown); a context manager."""

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
        """Shows the current step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)
            return
        count = "" if self._total is None else f"[{self._done + 1}/{self._total}] "
        if self._line != count + what:
            self._line = count + what
            self._console.print(self._line, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """Counts a step as done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1)


def _records(table: Table) -> Text:
    """Returns a table as a block of lines for each row, for a terminal that is too narrow for its columns."""
    headers = [str(column.header) for column in table.columns]
    width = max(map(len, headers[1:]), default=0)
    lines = []
    for first, *rest in zip(*(column.cells for column in table.columns), strict=True):
        lines.append(str(first))
        lines += [f"  {h:{width}}  {cell}" for h, cell in zip(headers[1:], rest, strict=True) if str(cell)]
    return Text("\n".join([str(table.title), *lines] if table.title else lines))


class Output:
    """A command's output; a context manager.

    With `as_json` all other output, also that of libraries, goes to stderr, so that stdout has only the value of
    `result`.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout
        self._redirected = contextlib.ExitStack()
        # Wide unless it is a terminal: lines in a log or a pipe should not be wrapped.
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
        """Prints text; strings are printed in full and without markup."""
        self.console.print(*parts, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def paragraph(self, text: str, indent: int = 2) -> None:
        """Prints a paragraph, which is wrapped between words in a terminal."""
        lines = textwrap.wrap(text, max(20, self.console.width - indent), break_on_hyphens=False)
        self.text(textwrap.indent("\n".join(lines) if self._looked_at else text, " " * indent))

    def show(self, table: Table) -> None:
        """Prints a table, or blocks of lines if its columns do not fit."""
        endless = self.console.options.update(max_width=10_000)
        fits = self.console.measure(table, options=endless).maximum <= self.console.width
        self.console.print(table if fits else _records(table), highlight=False, soft_wrap=not fits)

    def progress(self, total: int | None = None) -> Steps:
        """Returns the progress on stderr: a bar that disappears at the end, or lines."""
        return Steps(Console(stderr=True), total)

    def bar(self) -> Progress:
        """Returns a progress bar; results are printed above it."""
        return Progress(_COUNT, _TIME, BarColumn(bar_width=16), _WHAT, console=self.console, transient=True)

    def result(self, value: dict[str, Any]) -> None:
        """Writes the command's result if `--json` is set. NaN and infinity, which JSON lacks, become null."""
        if not self.as_json:
            return
        text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except OSError as error:  # a full disk, or a pipe without a reader
            raise SystemExit(f"the result could not be written to stdout: {error}") from error

    def fail(self, message: str) -> None:
        """Reports an error that the user can fix."""
        self.result({"error": message})
        Console(stderr=True, soft_wrap=True).print(escape(message), highlight=False)


def plain(value: Any) -> Any:
    """Converts a value for JSON: tuples become lists, infinities and NaN become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
