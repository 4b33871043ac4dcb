"""Environment variables and arguments that switch something on or off."""

import functools
import os
from typing import Any

__all__ = ["RUN", "audit_steps", "check_switch", "switch", "switch_off_run", "variable"]

# The variable with which `npu-kernels run` switches on the kernels in the Trainers of a process.
RUN = "NPU_KERNELS_RUN"
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")

_as_kept = functools.cache(os.environ.encodekey)


def variable(name: str) -> str:
    """Returns an environment variable, or an empty string if it is not set.

    Ops read variables at every call, and `os.environ.get` raises and catches two exceptions for a variable that is not
    set; two such reads took a twelfth of a norm's forward. So this function reads the dict inside `os.environ`.
    """
    environment: Any = os.environ
    kept = getattr(environment, "_data", None)
    if kept is None:  # other code has replaced `os.environ` by a plain dict
        return str(environment.get(name, ""))
    value = kept.get(_as_kept(name))
    return "" if value is None else str(environment.decodevalue(value))


def switch(name: str, default: bool = False) -> bool:
    """Whether an environment variable is on; `default` if it is not set. Raises `ValueError` for an invalid value."""
    value = variable(name)
    if not value:
        return default
    if value.lower() not in _ON + _OFF:
        raise ValueError(f"{name} must be one of {', '.join(_ON + _OFF)}; got {value!r}")
    return value.lower() in _ON


def switch_off_run() -> None:
    """Switches off the automatic patching of Trainers, for programs that choose themselves which Trainer gets the
    kernels. In a shell with the variables of `run --print-env`, their baselines would get the kernels, too."""
    if RUN in os.environ:
        os.environ[RUN] = "0"


def check_switch(name: str, value: object) -> None:
    """Raises `ValueError` unless an argument is a bool. Without the check the string "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")


def audit_steps(name: str, value: object) -> int | None:
    """Parses the number of optimizer steps between comparisons of the patched model with its original code: 0 for
    "first" (the first batch alone), None for "off". Raises `ValueError` for other values that are not positive."""
    if isinstance(value, str) and value in ("first", "off"):
        return 0 if value == "first" else None
    steps = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{name} must be 'first', 'off' or a positive number of steps; got {value!r}")
    return steps
