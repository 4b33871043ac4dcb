"""How a Trainer's time divides into updates and the waiting between them, by the clock of the host.

No call here waits for the device. If the device still computes a part of a step when the host has finished it, that
part counts for the next code that waits for the device. On average over many steps this misplaces little time.
"""

import time

__all__ = ["StepTimes"]


class StepTimes:
    """The seconds of a Trainer's steps, and of what lies between them, on average since they were asked for last.

    A step of the optimizer goes from `on_step_begin` to `on_step_end`. The wait for it goes back to the end of the step
    before it, and that for the first step to the start.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forgets everything; the wait for the first step begins now."""
        self._updating = self._waiting = self._generated = 0.0
        self._updates = self._waits = 0
        self._since = time.perf_counter()

    def _passed(self) -> float:
        """Returns the seconds since the last event."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def step_began(self, generated: float) -> None:
        """Ends a wait.

        Args:
            generated: the seconds that the generation of completions has taken so far.
        """
        self._waiting += self._passed()
        self._waits += 1
        self._generated = generated

    def step_ended(self, generated: float) -> None:
        """Ends an update, which is the step less the generation of completions within it.

        Args:
            generated: as for `step_began`.
        """
        self._updating += self._passed() - (generated - self._generated)
        self._updates += 1

    def columns(self) -> dict[str, float]:
        """Returns the averages by their names in the logs; without a step since the last question there are none."""
        found = {}
        if self._updates:
            found["update_seconds"] = self._updating / self._updates
        if self._waits:
            found["waiting_seconds"] = self._waiting / self._waits
        self._updating = self._waiting = 0.0
        self._updates = self._waits = 0
        return found
