"""Counts of what leaving padding out has saved."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Savings"]


@dataclass
class Savings:
    """Counts the positions of the batches that were packed.

    Attributes:
        positions: all positions.
        live: those with a token.
        computed: the tokens that went through the body.
        trained: the calls with a gradient.
        packed: the rows that a collator had packed.
        mixed: what the model's own code does to these, if it does not keep them apart as well, or empty.
        read: why padding is computed from now on, if a loss was found to read it, or empty.
        beside: which modules compute padding nevertheless, or empty.
    """

    positions: int = 0
    live: int = 0
    computed: int = 0
    trained: int = 0
    packed: int = 0
    mixed: str = ""
    read: str = ""
    beside: str = ""

    def __str__(self) -> str:
        if not self.positions:
            return self.beside  # also before anything ran: padding of some modules is computed
        saved = 1 - self.computed / self.live
        return (
            f"{self.live / self.positions:.0%} of the positions were live"
            + (f", {saved:.0%} of their tokens saved by shared beginnings" if saved else "")
            + (f", {self.beside}" if self.beside else "")
            + (f", {self.packed} packed rows each by itself" if self.packed else "")
            + (f", {self.mixed}" if self.mixed else "")
        )
