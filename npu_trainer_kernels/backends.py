"""Chooses the implementation (backend) of an op on a device, and gives the reason.

For each op and kind of device `table` has an ordered list, and the first backend that can run is used. A user overrides
it with the environment variable `NPU_KERNELS_BACKEND` (`"torch"` for every op, or `"rms_norm=torch,swiglu=triton"`),
with the `backend` argument of `apply_npu_kernels`, or with the `backend` argument of a single op; the most specific one
wins. An override that cannot run raises an error: a backend that a user names is never replaced silently.

The measurements of `npu-kernels tune` on this machine (`tuned`) take precedence over the table, but only for calls of
the measured shapes.

The vendor's operators cover only some calls of an op. If the table chose them, the next backend runs the other calls;
if a user named them, such a call raises an error.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence

import torch

from . import device as devices
from . import vendor
from .evidence import tuned
from .evidence.table import TABLE
from .options import BACKENDS, KERNEL_BACKENDS, OPS, STRICT, check_op, has_kernels, parse_override
from .support import triton
from .support.switch import switch, variable

__all__ = [
    "BACKENDS",
    "OPS",
    "Shape",
    "asked_for",
    "choose",
    "every_measurement",
    "explain",
    "failures",
    "forget_failures",
    "has_failed",
    "is_strict",
    "keeps_plain",
    "measurements",
    "of_head",
    "of_rows",
    "parse_override",
    "record_failure",
    "strict_override",
    "unavailable",
]

ENVIRONMENT = "NPU_KERNELS_BACKEND"


def unavailable(backend: str, kind: str, op: str | None = None) -> str | None:
    """Returns why `backend` cannot run (`op`) on this kind of device, or None if it can."""
    if backend in KERNEL_BACKENDS and op is not None and not has_kernels(op):
        return "there is no kernel of ours for it"
    if op is not None and ((backend == "triton" and kind == "npu") or backend == "ascend-lowering"):
        order = TABLE[op].order["npu"]
        if all(choice.backend != "triton" for choice in order):
            return f"its kernels are not for NPUs: {order[-1].evidence}"
    if backend == "triton":
        if triton.IMPORT_ERROR is not None:
            return (
                f"Triton cannot be imported ({type(triton.IMPORT_ERROR).__name__}: {triton.IMPORT_ERROR}); "
                f"in a checkout of npu_trainer_kernels: pip install '.[{'npu-any' if kind == 'npu' else 'cuda'}]'"
            )
        if kind == "other":
            return "no kernel was made for this kind of device"
        if kind == "cpu" and not triton.INTERPRETED:
            return "on a CPU Triton runs only in its interpreter (TRITON_INTERPRET=1, for tests)"
    if backend == "ascend-lowering" and kind != "cpu":
        return "it executes the Ascend compiler's output on CPU tensors"
    if backend == "vendor":
        # With `use_chip` any device replaces an NPU, to check calls without one.
        if kind != "npu" and not devices.stands_for_npu():
            state = devices.torch_npu_state()
            return "it runs on Ascend NPUs" + (f", and {state}" if state else "")
        return vendor.unavailable(op) if op is not None else None
    return None


@functools.cache
def _asked_for(op: str, override: str | None, environment: str) -> tuple[str | None, str]:
    """Returns the backend that a user named, or None, and the argument or variable that named it."""
    check_op(op)
    asked = parse_override(override or "").get(op)
    if asked is not None:
        return asked, "the backend argument"
    return parse_override(environment, ENVIRONMENT).get(op), f"{ENVIRONMENT}={environment}"


Shape = tuple[torch.dtype, int, tuple[int, ...]]
"""The shape of a call: dtype, number of tokens, and the model's sizes, named by `descriptions.Workload.model_sizes`."""


def of_rows(x: torch.Tensor) -> Shape:
    """Returns the shape of an op on rows of x."""
    return x.dtype, math.prod(x.shape[:-1]), x.shape[-1:]


def of_head(x: torch.Tensor, weight: torch.Tensor) -> Shape:
    """Returns the shape of a head with weight `[V, H]` on rows of x."""
    vocabulary, hidden = weight.shape
    return x.dtype, math.prod(x.shape[:-1]), (hidden, vocabulary)


def _measured(op: str, device: torch.device, at: Callable[[], Shape] | None) -> tuned.Entry | None:
    """Returns the measurement of `npu-kernels tune` for calls of this shape on the device, or None."""
    if at is None or not tuned.machines():
        return None
    machine = tuned.machine(devices.spec(device).name)
    if machine is None or op not in machine.ops:
        return None
    dtype, tokens, sizes = at()
    return machine.at(op, str(dtype).removeprefix("torch."), tokens, sizes)


def every_measurement(op: str, device: torch.device, override: str | None = None) -> tuple[tuned.Entry, ...]:
    """Returns all measurements of `npu-kernels tune` for an op on this device; none if a user named a backend."""
    if not tuned.machines() or asked_for(op, override):
        return ()
    machine = tuned.machine(devices.spec(device).name)
    return () if machine is None else machine.ops.get(op, ())


def measurements(
    op: str, device: torch.device, override: str | None, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[tuned.Entry, ...]:
    """Returns the measurements of `every_measurement` for a dtype and a model's sizes, one for each range of tokens."""
    name = str(dtype).removeprefix("torch.")
    return tuple(entry for entry in every_measurement(op, device, override) if entry.covers(name, sizes))


@functools.cache
def _by_table(op: str, kind: str, measured: tuned.Entry | None, uncovered: bool) -> tuple[str, str]:
    """Returns the fastest measured backend, or else the first one of the table that can run, and the reason. With
    `uncovered`, it skips the vendor, for calls that the vendor does not cover."""
    if measured is not None and not (uncovered and measured.backend == "vendor"):
        reason = unavailable(measured.backend, kind, op)
        if reason is None:
            return measured.backend, str(measured)
    skipped: list[str] = []
    for choice in TABLE[op].order[kind]:
        if uncovered and choice.backend == "vendor":
            continue
        reason = unavailable(choice.backend, kind, op)
        if reason is None:
            return choice.backend, "; ".join([choice.evidence, *skipped])
        skipped.append(f"not {choice.backend}: {reason}")
    raise AssertionError(f"{op} has no backend on {kind}")  # every list ends with torch


class _Strict(str):
    """The name of a backend whose failure raises an error. The type carries the request of one model into backward."""


@functools.cache
def _asks_strict(override: str) -> bool:
    return STRICT in (part.strip() for part in override.split(","))


_strictly = functools.cache(_Strict)


def strict_override(override: str | None) -> str:
    """Returns an override that chooses the same backends and makes their failures raise an error."""
    return STRICT if not override else f"{override},{STRICT}"


def _choose(op: str, kind: str, measured: tuned.Entry | None, asked: str | None, source: str) -> tuple[str, str]:
    """Returns the backend, and why, for the answer of `_asked_for`."""
    if asked is None:
        return _by_table(op, kind, measured, False)
    reason = unavailable(asked, kind, op)
    if reason is not None:
        raise ValueError(f"{op}: backend {asked!r} (from {source}) cannot run on {kind}: {reason}")
    return asked, f"asked for by {source}"


Reason = Callable[[], str | None]


def choose(
    op: str,
    device: torch.device,
    override: str | None = None,
    uncovered: Reason | None = None,
    unwanted: Reason | None = None,
    at: Callable[[], Shape] | None = None,
) -> str:
    """Returns the name of the backend that runs `op` on `device`. It is always `"torch"` while `torch.compile` traces.

    Args:
        op: one of `OPS`.
        device: the device of the op's tensors.
        override: a backend, `"op=backend,..."`, or None.
        uncovered: returns why the vendor's operators do not cover this call, or None; called if they were chosen.
        unwanted: returns why they should not run this call unless a user named them, or None; called likewise.
        at: returns the shape of the call, to look up measurements; called if there are measurements of the op.

    Raises:
        ValueError: an unknown op or backend, or a named backend that cannot run there or does not cover the call.
    """
    if override is not None and not isinstance(override, str):
        parse_override(override)  # raises; below, the override would be the key of a cache
    if torch.compiler.is_compiling():
        # An unknown name is an error here too. Call the function below the cache, because Dynamo warns of caches.
        _asked_for.__wrapped__(op, override, os.environ.get(ENVIRONMENT, ""))
        return "torch"
    strict = override is not None and _asks_strict(override)
    asked, source = _asked_for(op, override, variable(ENVIRONMENT))
    measured = _measured(op, device, at) if asked is None else None
    kind = devices.kind_of(device)
    # A strict model tries a kernel again that has failed for another model.
    if not strict and _failures and (op, kind) in _failures:
        return "torch"
    name = _choose(op, kind, measured, asked, source)[0]
    if name == "vendor":
        name = _covering(op, kind, measured, asked, source, uncovered, unwanted)
    return _strictly(name) if strict else name


def _covering(
    op: str, kind: str, measured: tuned.Entry | None, asked: str | None, source: str, uncovered: Reason | None,
    unwanted: Reason | None,
) -> str:  # fmt: skip
    """Returns "vendor", which was chosen, or the backend for calls that the vendor does not cover."""
    reason = uncovered() if uncovered is not None else None
    if asked is not None and reason is not None:
        raise ValueError(
            f"{op}: backend 'vendor' (from {source}) does not cover this call: {reason}; "
            f"it covers {vendor.SERVED[op].covers}"
        )
    if asked is None and reason is None and unwanted is not None:
        reason = unwanted()
    if reason is None:
        return "vendor"
    return _by_table(op, kind, measured, True)[0]


def asked_for(op: str, override: str | None = None) -> bool:
    """Whether a user named a backend for the op."""
    return _asked_for(op, override, variable(ENVIRONMENT))[0] is not None


def keeps_plain(op: str, device: torch.device, override: str | None = None, *, fused: bool = False) -> str | None:
    """Returns why, by the table, a model keeps its own code for `op` on this device unless a user asks for the op, or
    None. `fused` says whether that code is one PyTorch operator. `measurements` take precedence over the table."""
    if asked_for(op, override):
        return None
    row, kind = TABLE[op], devices.kind_of(device)
    kept = row.keeps_plain.get(kind) or (row.keeps_fused.get(kind) if fused else None)
    return None if kept is None else kept.evidence


def explain(
    op: str, device: torch.device, override: str | None = None, uncovered: Reason | None = None
) -> tuple[str, str]:
    """Returns the result of `choose` for calls of a shape that was not measured, and the reason."""
    if uncovered is not None and choose(op, device, override) != choose(op, device, override, uncovered):
        return choose(op, device, override, uncovered), f"the vendor's operator does not cover it: {uncovered()}"
    kind = devices.kind_of(device)
    if (op, kind) in _failures:
        return "torch", f"its kernel failed here: {_failures[op, kind]}"
    asked, source = _asked_for(op, override, variable(ENVIRONMENT))
    name, reason = _choose(op, kind, None, asked, source)
    if name == "vendor":
        others = _by_table(op, kind, None, True)[0]
        rest = f"goes to {others}" if asked is None else "raises"
        served = vendor.SERVED[op]
        reason += f". It covers {served.covers}; what it does not cover {rest}"
        if asked is None and served.not_repeatable is not None:
            reason += f", and so does {served.not_repeatable}"
    elif asked is None and kind == "cpu":
        state = devices.torch_npu_state()
        reason += f"; {state}" if state else ""
    return name, reason


# ---------------------------------------------------------------------------------------------------------------------
# Kernels that failed
# ---------------------------------------------------------------------------------------------------------------------

_failures: dict[tuple[str, str], str] = {}


def record_failure(ops: Sequence[str], device: torch.device, reason: str) -> None:
    """Makes `ops` run in torch on this kind of device from now on, and warns."""
    for op in ops:
        _failures[op, devices.kind_of(device)] = reason
    warnings.warn(
        f"{', '.join(ops)}: torch takes over for the rest of this process, slower but right: {reason}. "
        "Ask for strict (NPU_KERNELS_STRICT=1) to stop instead.",
        RuntimeWarning,
        stacklevel=2,
    )


def has_failed(op: str, device: torch.device) -> bool:
    """Whether a kernel of `op` has failed on this kind of device."""
    return bool(_failures) and (op, devices.kind_of(device)) in _failures


def failures() -> dict[str, str]:
    """Returns the reason for each op that runs in torch because one of its kernels failed."""
    return {op: reason for (op, _), reason in _failures.items()}


def forget_failures() -> None:
    """Forgets all failures, so that the kernels are tried again."""
    _failures.clear()


def is_strict(backend: str = "") -> bool:
    """Whether a kernel's failure raises an error: because of the override (`strict_override`) for which `choose`
    returned this name, or of NPU_KERNELS_STRICT=1."""
    return isinstance(backend, _Strict) or switch("NPU_KERNELS_STRICT")
