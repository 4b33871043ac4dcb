"""What is on or off: environment variables and arguments."""

import functools
import os
from typing import Any

__all__ = ["RUN", "audit_steps", "check_switch", "switch", "switch_off_run", "variable"]

# Whether `npu-kernels run` puts the kernels into the Trainers of a process.
RUN = "NPU_KERNELS_RUN"
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")

_as_kept = functools.cache(os.environ.encodekey)


def variable(name: str) -> str:
    """An environment variable; empty where it is not set.

    Ops ask for variables at every call, and `os.environ.get` raises and catches two exceptions for one that is not set:
    twice that was a twelfth of a norm's forward. So it is looked up where `os.environ` keeps it.
    """
    environment: Any = os.environ
    kept = getattr(environment, "_data", None)
    if kept is None:  # somebody has put a plain dict there
        return str(environment.get(name, ""))
    value = kept.get(_as_kept(name))
    return "" if value is None else str(environment.decodevalue(value))


def switch(name: str, default: bool = False) -> bool:
    """Whether an environment variable is on; `default` where it is not set. `ValueError` for anything else."""
    value = variable(name)
    if not value:
        return default
    if value.lower() not in _ON + _OFF:
        raise ValueError(f"{name} must be one of {', '.join(_ON + _OFF)}; got {value!r}")
    return value.lower() in _ON


def switch_off_run() -> None:
    """For programs that say themselves which Trainer has the kernels: in a shell that has what `run --print-env`
    prints, what they train without the kernels would have them, too."""
    if RUN in os.environ:
        os.environ[RUN] = "0"


def check_switch(name: str, value: object) -> None:
    """Raises `ValueError` unless an argument is a bool: "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")


def audit_steps(name: str, value: object) -> int | None:
    """After how many optimizer steps the model is compared with its own code again: 0 for the first batch alone, None
    for never. Raises `ValueError` for what is neither "first", "off" nor a positive number."""
    if isinstance(value, str) and value in ("first", "off"):
        return 0 if value == "first" else None
    steps = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{name} must be 'first', 'off' or a positive number of steps; got {value!r}")
    return steps
