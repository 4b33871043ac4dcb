"""Which implementation serves an op on a device, why, and how a user overrides it.

Per op and kind of device there is an ordered list; the first backend that can run there is used. A user overrides it
with the environment variable `NPU_KERNELS_BACKEND` (`"torch"` for every op, or `"rms_norm=torch,swiglu=triton"`), with
the `backend` argument of `apply_npu_kernels`, or with the `backend` argument of a single op; the nearest one wins. An
override that cannot run raises: a backend that was asked for by name is never replaced silently.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from . import _triton

__all__ = ["BACKENDS", "OPS", "Choice", "choose", "explain", "keeps_plain", "parse_override", "unavailable"]

BACKENDS = ("triton", "torch", "ascend-lowering")
ENVIRONMENT = "NPU_KERNELS_BACKEND"


@dataclass(frozen=True)
class Choice:
    """A line of the table: a backend and the evidence that puts it in this place."""

    backend: str
    evidence: str


_CPU = (Choice("torch", "the only one that runs natively on a CPU (the Triton interpreter is for tests)"),)
_TRITON_FIRST = {
    "npu": (
        Choice("triton", "compiles for the chip without spilling its unified buffer; not timed on hardware"),
        Choice("torch", "used where triton-ascend cannot be imported"),
    ),
    "cuda": (
        Choice("triton", "fewer passes over memory than PyTorch's own kernels"),
        Choice("torch", "used where Triton cannot be imported"),
    ),
    "cpu": _CPU,
}
_ORDER: dict[str, dict[str, tuple[Choice, ...]]] = {
    "rms_norm": _TRITON_FIRST,
    "add_rms_norm": _TRITON_FIRST,
    "swiglu": _TRITON_FIRST,
    "rope": _TRITON_FIRST,
    "embedding": _TRITON_FIRST,
    "linear_cross_entropy": _TRITON_FIRST,
    "linear_logprob": _TRITON_FIRST,
    "grpo_loss": _TRITON_FIRST,
}
OPS = tuple(_ORDER)

# Where a model's own PyTorch code is at least as fast as every backend here: such ops are put into a model only when
# they are asked for by name.
_PLAIN: dict[str, dict[str, str]] = {
    "cpu": dict.fromkeys(
        ("swiglu", "rope", "embedding"),
        "the model's own code is as fast on a CPU (timed: `python -m benchmarks --device cpu`)",
    )
}


def unavailable(backend: str, kind: str) -> str | None:
    """Why `backend` cannot run on this kind of device, or None when it can."""
    if backend == "triton":
        if _triton.IMPORT_ERROR is not None:
            return (
                f"Triton cannot be imported ({type(_triton.IMPORT_ERROR).__name__}: {_triton.IMPORT_ERROR}); "
                f"install 'npu_trainer_kernels[{'npu' if kind == 'npu' else 'cuda'}]'"
            )
        if kind == "cpu" and not _triton.INTERPRETED:
            return "on a CPU Triton runs only in its interpreter (TRITON_INTERPRET=1, for tests)"
    if backend == "ascend-lowering" and kind != "cpu":
        return "it executes the Ascend compiler's output on CPU tensors"
    return None


def _check_op(op: str) -> None:
    if op not in _ORDER:
        raise ValueError(f"backend: unknown op {op!r}; the ops are {', '.join(OPS)}")


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


@functools.cache
def parse_override(text: str) -> Mapping[str, str]:
    """`"torch"` or `"op=backend,op=backend"` as a mapping from op to backend. Raises `ValueError` for unknown names."""
    result: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, separator, backend = part.partition("=")
        if not separator:
            op, backend = "", op
        _check_backend(backend)
        if op:
            _check_op(op)
        result.update({op: backend} if op else dict.fromkeys(OPS, backend))
    return result


@functools.cache
def _choose(op: str, kind: str, override: str | None, environment: str) -> tuple[str, str]:
    _check_op(op)
    asked, source = parse_override(override or "").get(op), "the backend argument"
    if asked is None:
        asked, source = parse_override(environment).get(op), f"{ENVIRONMENT}={environment}"
    if asked is not None:
        reason = unavailable(asked, kind)
        if reason is not None:
            raise ValueError(f"{op}: backend {asked!r} (from {source}) cannot run on {kind}: {reason}")
        return asked, f"asked for by {source}"
    skipped: list[str] = []
    for choice in _ORDER[op][kind]:
        reason = unavailable(choice.backend, kind)
        if reason is None:
            return choice.backend, "; ".join([choice.evidence, *skipped])
        skipped.append(f"not {choice.backend}: {reason}")
    raise AssertionError(f"{op} has no backend on {kind}")  # every list ends with torch


def _kind(device: torch.device) -> str:
    return device.type if device.type in ("npu", "cuda") else "cpu"


def choose(op: str, device: torch.device, override: str | None = None) -> str:
    """The name of the backend that serves `op` on `device`.

    Args:
        op: one of `OPS`.
        device: where the op's tensors are.
        override: a backend, `"op=backend,..."`, or None.

    Raises:
        ValueError: unknown op or backend, or a backend that was asked for cannot run there.
    """
    if torch.compiler.is_compiling():
        return "torch"
    return _choose(op, _kind(device), override, os.environ.get(ENVIRONMENT, ""))[0]


def keeps_plain(op: str, device: torch.device, override: str | None = None) -> str | None:
    """Why a model keeps its own code for `op` on this device unless the op is asked for, or None."""
    environment = os.environ.get(ENVIRONMENT, "")
    if op in parse_override(override or "") or op in parse_override(environment):
        return None
    return _PLAIN.get(_kind(device), {}).get(op)


def explain(op: str, device: torch.device, override: str | None = None) -> tuple[str, str]:
    """`choose`, with the reason."""
    return _choose(op, _kind(device), override, os.environ.get(ENVIRONMENT, ""))
