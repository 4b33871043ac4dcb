"""Runs work that may crash or hang in a child process, which reports its results line by line.

The child writes one JSON object per line with `Lines`; the parent reads them with `read`. A failing kernel may raise
any exception, or crash the process without one: the process is the boundary, and no exception is caught here.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = ["ENDED", "OUT_OF_TIME", "SILENT", "Lines", "ended", "read"]

# The key of the last line if a child did not finish, and the values of `why` if the parent ended it.
ENDED = "ended"
OUT_OF_TIME, SILENT = "out of time", "silent"
# How long a process may take to exit after it has closed stdout.
_EXIT_SECONDS = 30.0


class Lines:
    """Writes a child's lines. It redirects stdout to stderr, since compilers and drivers print to stdout, also from
    C."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def write(self, **line: Any) -> None:
        """Writes a line, and flushes it."""
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def ended(code: int, said: Sequence[str]) -> str | None:
    """Returns why a process failed, from its exit code and the lines that it wrote to stderr; None: it did not."""
    if code == 0:
        return None
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in said if line.strip()]
    return lines[-1][:400] if lines else f"its process ended with exit code {code}"


def _forward(stream: IO[str], to: "queue.Queue[str | None]") -> None:
    for line in stream:
        to.put(line)
    to.put(None)


def read(
    command: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str],
    silence: float = float("inf"),
    given: str = "",
) -> Iterator[dict[str, Any]]:
    """Runs a child, and returns its lines. If it did not finish, the last line is `{"ended": reason, "why": ...}`, with
    `OUT_OF_TIME`, `SILENT` or None for `why`. In any case all processes that the child started are killed at the end.

    Args:
        command: the child's command.
        seconds: the time limit of the child.
        environment: the child's environment.
        silence: the maximum number of seconds between two lines.
        given: the child's stdin.
    """
    # In a new session the kill reaches all processes that the child started, and Ctrl-C reaches only this process.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=dict(environment), start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    # stderr is read concurrently with stdout, since a full pipe would block the child.
    said: list[str] = []
    readers = [
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=said.extend, args=(process.stderr,), daemon=True),
    ]
    why: str | None = None
    end = time.monotonic() + seconds
    try:
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(given)
        while why is None:
            left = end - time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, min(left, silence, threading.TIMEOUT_MAX)))
            except queue.Empty:
                why = OUT_OF_TIME if left <= silence else SILENT
                continue
            if line is None:
                leaving = min(silence, _EXIT_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, min(left, leaving)))
                    break
                why = OUT_OF_TIME if left <= leaving else SILENT  # for example, a driver does not release the process
                continue
            # Libraries may also print while they are imported.
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for reader in readers:
            reader.join(_EXIT_SECONDS)
    if why == OUT_OF_TIME:
        yield {ENDED: f"it was not done after {seconds:.0f} s", "why": why}
    elif why == SILENT:
        yield {ENDED: f"it did not come back within {silence:.0f} s", "why": why}
    elif (reason := ended(code, said)) is not None:
        yield {ENDED: reason, "why": None}
