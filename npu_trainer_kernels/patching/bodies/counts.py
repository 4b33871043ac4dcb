"""What the report says of captured bodies, and the calls of ops that graphs stand for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from ..patch import Site

__all__ = ["Counts", "calls_apart"]


class Counts:
    """Counts of calls.

    Attributes:
        replayed, eager: the numbers of calls.
        reasons: why the model's own code ran, with the number of calls.
        seconds: the time spent on capturing.
        captured: the number of graphs that were captured.
    """

    def __init__(self) -> None:
        self.replayed = self.eager = 0
        self.reasons: Counter[str] = Counter()
        self.seconds = 0.0
        self.captured = 0
        self._asked_at = 0, 0

    def share_since(self) -> float:
        """Returns the share of the calls since the last question that were replayed."""
        now = self.replayed, self.eager
        replayed, eager = (new - old for new, old in zip(now, self._asked_at, strict=True))
        self._asked_at = now
        return replayed / max(replayed + eager, 1)

    def replayed_line(self, what: str) -> str:
        """Returns the share of the calls that were replayed, and how many there were, for the report."""
        calls = self.replayed + self.eager
        return f"{what}: {self.replayed / calls:.0%} of {calls} calls replayed"

    def reason_lines(self) -> list[str]:
        """Returns a line for each reason, for the report."""
        return [f"  {calls} calls: {reason}" for reason, calls in self.reasons.items()]


@contextlib.contextmanager
def calls_apart(sites: Sequence[Site], ran: list[tuple[Site, int]]) -> Iterator[None]:
    """Inside the `with` block a function runs twice to be captured, and nobody uses the results, so no call of an op
    counts.

    Args:
        sites: where ops serve modules.
        ran: gets each site that one run has called, with the number of its calls.
    """
    counts = [(site, site.ran, site.declined.copy()) for site in sites]
    try:
        yield
    finally:
        for site, before, declined in counts:
            ran += [(site, (site.ran - before) // 2)] if site.ran > before else []
            site.ran, site.declined = before, declined
