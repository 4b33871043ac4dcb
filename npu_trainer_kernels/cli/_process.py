"""Work that may take its process down, or hang, in a process of its own that says what it knows line by line.

The child writes JSON, one object a line, with `Lines`; the parent reads them with `read`. A kernel may raise anything,
and some of its failures are no exceptions at all: so the process is the boundary, and nothing is caught here.
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

# The key of a child's last line where it did not get to its end, and why it was ended where that was not its own doing.
ENDED = "ended"
OUT_OF_TIME, SILENT = "out of time", "silent"
# Of a process that has said everything.
_EXIT_SECONDS = 30.0


class Lines:
    """Where a child writes. Compilers and drivers print to stdout, from C as well: from here on that is stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def write(self, **line: Any) -> None:
        """A line, at once."""
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def ended(code: int, said: Sequence[str]) -> str | None:
    """Why a process ended before its end, by its exit code and what it wrote to stderr; None where it did not."""
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
    """A child's lines; where it did not get to its end the last one is `{"ended": reason, "why": ...}`, whose `why` is
    `OUT_OF_TIME`, `SILENT` or None. However it ends, or the reader does, no process that it started stays behind.

    Args:
        command: of the child.
        seconds: that it may take in all.
        environment: of the child.
        silence: seconds that may pass between two lines.
        given: what it reads from stdin.
    """
    # A session of its own: a signal reaches whatever it has started, and Ctrl-C in the terminal this process alone.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=dict(environment), start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    # stderr is read beside stdout, or a full pipe would stop the child.
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
                why = OUT_OF_TIME if left <= leaving else SILENT  # a driver that does not let go
                continue
            # Libraries print, too, while they are imported.
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
