"""The states of random generators: a rollout leaves them as `generate` would."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch

__all__ = ["Draws", "Generators", "random_state", "set_random_state"]


def random_state(where: torch.device) -> torch.Tensor:
    """Returns the state of a device's generator."""
    return torch.get_rng_state() if where.type == "cpu" else torch.get_device_module(where).get_rng_state(where)


def set_random_state(where: torch.device, state: torch.Tensor) -> None:
    """Sets the state of a device's generator."""
    if where.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)


class Draws:
    """The draws of noise of one rollout. The host hears late that all rows have ended, and has drawn for more tokens by
    then, so the states after the latest draws are kept.

    Args:
        where: the device whose generator draws.
        latest: how many states are kept.

    Attributes:
        count: the number of draws.
    """

    def __init__(self, where: torch.device, latest: int) -> None:
        self._where, self.count = where, 0
        self._after: deque[torch.Tensor] = deque(maxlen=latest)

    def made_one(self) -> None:
        """Notes that noise was drawn."""
        self.count += 1
        self._after.append(random_state(self._where))

    def go_back_to(self, count: int) -> None:
        """Sets the generator to its state after so many draws."""
        if count < self.count:
            set_random_state(self._where, self._after[count - self.count - 1])
            self.count = count


class Generators:
    """The states that the generators of Python, NumPy and torch have now.

    Args:
        where: the device of the model, whose generator is among them.
    """

    def __init__(self, where: torch.device) -> None:
        self._where, self._on_device = where, random_state(where)
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def set_back(self) -> None:
        """Sets all of them to these states."""
        of_python, of_numpy, of_torch = self._states
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        set_random_state(self._where, self._on_device)

    def drawn_from(self) -> str | None:
        """Returns which generator of the host, that no graph draws from, has another state now; None: none has."""
        of_python, of_numpy, of_torch = self._states
        if random.getstate() != of_python:
            return "Python's"
        now = np.random.get_state()
        if any(not np.array_equal(a, b) for a, b in zip(now, of_numpy, strict=True)):
            return "NumPy's"
        if self._where.type != "cpu" and not torch.equal(torch.get_rng_state(), of_torch):
            return "torch's, of the CPU"
        return None
