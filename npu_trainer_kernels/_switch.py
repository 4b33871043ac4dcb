"""What is on or off: environment variables and arguments."""

import os

__all__ = ["RUN", "check_switch", "switch"]

# Whether `npu-kernels run` puts the kernels into the Trainers of a process.
RUN = "NPU_KERNELS_RUN"
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def switch(name: str, default: bool = False) -> bool:
    """Whether an environment variable is on; `default` where it is not set. `ValueError` for anything else."""
    value = os.environ.get(name, "")
    if not value:
        return default
    if value.lower() not in _ON + _OFF:
        raise ValueError(f"{name} must be one of {', '.join(_ON + _OFF)}; got {value!r}")
    return value.lower() in _ON


def check_switch(name: str, value: object) -> None:
    """Raises `ValueError` unless an argument is a bool: "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")
