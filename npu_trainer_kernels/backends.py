"""Which implementation serves an op on a device, why, and how a user overrides it.

Per op and kind of device `table` has an ordered list; the first backend that can run there is used. A user overrides it
with the environment variable `NPU_KERNELS_BACKEND` (`"torch"` for every op, or `"rms_norm=torch,swiglu=triton"`), with
the `backend` argument of `apply_npu_kernels`, or with the `backend` argument of a single op; the nearest one wins. An
override that cannot run raises: a backend that was asked for by name is never replaced silently.

What `npu-kernels tune` measured on the machine goes before the table (`tuned`), for calls of the shapes that it
measured and no others.

The vendor's operators cover some calls of an op and not others. Where the table chose them, the next backend in order
serves the others; where they were asked for by name, such a call raises.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from . import device as devices
from . import tuned, vendor
from .support import triton
from .support.switch import switch, variable
from .table import TABLE

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

BACKENDS = ("triton", "torch", "vendor", "ascend-lowering")
ENVIRONMENT = "NPU_KERNELS_BACKEND"
_STRICT = "strict"
# Backends that run kernels of ours.
_KERNELS = ("triton", "ascend-lowering")
OPS = tuple(TABLE)


def unavailable(backend: str, kind: str, op: str | None = None) -> str | None:
    """Why `backend` cannot run (`op`) on this kind of device, or None when it can."""
    if backend in _KERNELS and op is not None and not _has_kernels(op):
        return "there is no kernel of ours for it"
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
        # With `use_chip` any device stands for an NPU, as when checking calls without one.
        if kind != "npu" and not devices.stands_for_npu():
            state = devices.torch_npu_state()
            return "it runs on Ascend NPUs" + (f", and {state}" if state else "")
        return vendor.unavailable(op) if op is not None else None
    return None


def _has_kernels(op: str) -> bool:
    return any(choice.backend == "triton" for order in TABLE[op].order.values() for choice in order)


def _check_op(op: str, name: str = "backend") -> None:
    if op not in TABLE:
        raise ValueError(f"{name}: unknown op {op!r}; the ops are {', '.join(OPS)}")


def parse_override(text: str, name: str = "backend") -> Mapping[str, str]:
    """`"torch"` or `"op=backend,op=backend"` as a mapping from op to backend. Raises `ValueError` for anything else, in
    a message that begins with `name`: of the argument, option or variable that the text is from.

    `"triton"` without an op is for those that have such kernels; for others the table decides as ever. The word
    `strict` among them is no backend: it makes a kernel's failure raise (`is_strict`).
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} must be 'torch' or 'op=backend,...'; got {text!r}")
    result: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part == _STRICT:
            continue
        op, separator, backend = part.partition("=")
        if not separator:
            op, backend = "", op
        if backend not in BACKENDS:
            raise ValueError(f"{name} must be one of {', '.join(BACKENDS)}; got {backend!r}")
        if op:
            _check_op(op, name)
        every = (each for each in OPS if backend not in _KERNELS or _has_kernels(each))
        result.update({op: backend} if op else dict.fromkeys(every, backend))
    return result


@functools.cache
def _asked_for(op: str, override: str | None, environment: str) -> tuple[str | None, str]:
    """(the backend that was asked for by name or None, by what)."""
    _check_op(op)
    asked = parse_override(override or "").get(op)
    if asked is not None:
        return asked, "the backend argument"
    return parse_override(environment, ENVIRONMENT).get(op), f"{ENVIRONMENT}={environment}"


Shape = tuple[torch.dtype, int, tuple[int, ...]]
"""Of a call: dtype, tokens, and the sizes of the model that `workloads.Workload.model_sizes` names."""


def of_rows(x: torch.Tensor) -> Shape:
    """Of an op on rows of x."""
    return x.dtype, math.prod(x.shape[:-1]), x.shape[-1:]


def of_head(x: torch.Tensor, weight: torch.Tensor) -> Shape:
    """Of a head with weight `[V, H]` on rows of x."""
    vocabulary, hidden = weight.shape
    return x.dtype, math.prod(x.shape[:-1]), (hidden, vocabulary)


def _measured(op: str, device: torch.device, at: Callable[[], Shape] | None) -> tuned.Entry | None:
    """What `npu-kernels tune` found for calls of this shape on the device."""
    if at is None or not tuned.machines():
        return None
    machine = tuned.machine(devices.spec(device).name)
    if machine is None or op not in machine.ops:
        return None
    dtype, tokens, sizes = at()
    return machine.at(op, str(dtype).removeprefix("torch."), tokens, sizes)


def every_measurement(op: str, device: torch.device, override: str | None = None) -> tuple[tuned.Entry, ...]:
    """What `npu-kernels tune` found for an op on this device, of whatever sizes; nothing where a backend is asked for
    by name."""
    if not tuned.machines() or asked_for(op, override):
        return ()
    machine = tuned.machine(devices.spec(device).name)
    return () if machine is None else machine.ops.get(op, ())


def measurements(
    op: str, device: torch.device, override: str | None, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[tuned.Entry, ...]:
    """What `npu-kernels tune` found for an op of a model's sizes, each for a range of tokens; nothing where a backend
    is asked for by name."""
    name = str(dtype).removeprefix("torch.")
    return tuple(entry for entry in every_measurement(op, device, override) if entry.covers(name, sizes))


@functools.cache
def _by_table(op: str, kind: str, measured: tuned.Entry | None, uncovered: bool) -> tuple[str, str]:
    """The backend that was measured to be the fastest, or else the first one of the table that runs, and why;
    `uncovered`: for the calls that the vendor does not cover."""
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
    """The name of a backend whose failure raises: what was asked of one model goes with its calls into backward."""


@functools.cache
def _asks_strict(override: str) -> bool:
    return _STRICT in (part.strip() for part in override.split(","))


_strictly = functools.cache(_Strict)


def strict_override(override: str | None) -> str:
    """The override that chooses the same backends and makes their failures raise."""
    return _STRICT if not override else f"{override},{_STRICT}"


def _choose(
    op: str, device: torch.device, override: str | None, environment: str, at: Callable[[], Shape] | None = None
) -> tuple[str, str]:
    asked, source = _asked_for(op, override, environment)
    kind = devices.kind_of(device)
    if asked is None:
        return _by_table(op, kind, _measured(op, device, at), False)
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
    """The name of the backend that serves `op` on `device`. Where `torch.compile` traces it is `"torch"`, whatever was
    asked for.

    Args:
        op: one of `OPS`.
        device: where the op's tensors are.
        override: a backend, `"op=backend,..."`, or None.
        uncovered: why the vendor's operators do not cover this call, or None; asked where they were chosen.
        unwanted: why this call had better not go to them unless they were asked for by name, or None.
        at: the call's shape, for what was measured of such calls; asked where the op was measured at all.

    Raises:
        ValueError: unknown op or backend, or a backend that was asked for cannot run there or does not cover the call.
    """
    if override is not None and not isinstance(override, str):
        parse_override(override)  # says what is allowed; below it would be the key of a cache
    if torch.compiler.is_compiling():
        # A wrong name is an error here too. Dynamo traces the function below the cache, and warns of caches.
        _asked_for.__wrapped__(op, override, os.environ.get(ENVIRONMENT, ""))
        return "torch"
    environment = variable(ENVIRONMENT)
    strict = override is not None and _asks_strict(override)
    # What has failed for another model is tried again where it is to raise.
    if not strict and has_failed(op, device):
        return "torch"
    name = _choose(op, device, override, environment, at)[0]
    if name == "vendor":
        name = _covering(op, device, override, environment, uncovered, unwanted, at)
    return _strictly(name) if strict else name


def _covering(
    op: str, device: torch.device, override: str | None, environment: str, uncovered: Reason | None,
    unwanted: Reason | None, at: Callable[[], Shape] | None,
) -> str:  # fmt: skip
    """The vendor, which was chosen, or who serves the calls that it does not cover."""
    asked, source = _asked_for(op, override, environment)
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
    return _by_table(op, devices.kind_of(device), _measured(op, device, at), True)[0]


def asked_for(op: str, override: str | None = None) -> bool:
    """Whether a backend is asked for by name."""
    return _asked_for(op, override, variable(ENVIRONMENT))[0] is not None


def keeps_plain(op: str, device: torch.device, override: str | None = None, *, fused: bool = False) -> str | None:
    """Why, by the table, a model keeps its own code for `op` on this device unless the op is asked for, or None; what
    was measured (`measurements`) goes before it. `fused`: that code is one operator of PyTorch's."""
    if asked_for(op, override):
        return None
    row, kind = TABLE[op], devices.kind_of(device)
    kept = row.keeps_plain.get(kind) or (row.keeps_fused.get(kind) if fused else None)
    return None if kept is None else kept.evidence


def explain(
    op: str, device: torch.device, override: str | None = None, uncovered: Reason | None = None
) -> tuple[str, str]:
    """`choose` for calls of a shape that was not measured, with the reason."""
    if uncovered is not None and choose(op, device, override) != choose(op, device, override, uncovered):
        return choose(op, device, override, uncovered), f"the vendor's operator does not cover it: {uncovered()}"
    if has_failed(op, device):
        return "torch", f"its kernel failed here: {_failures[op, devices.kind_of(device)]}"
    environment = variable(ENVIRONMENT)
    name, reason = _choose(op, device, override, environment)
    asked, _ = _asked_for(op, override, environment)
    if name == "vendor":
        others = _by_table(op, devices.kind_of(device), None, True)[0]
        rest = f"goes to {others}" if asked is None else "raises"
        served = vendor.SERVED[op]
        reason += f". It covers {served.covers}; what it does not cover {rest}"
        if asked is None and served.not_repeatable is not None:
            reason += f", and so does {served.not_repeatable}"
    elif asked is None and devices.kind_of(device) == "cpu":
        state = devices.torch_npu_state()
        reason += f"; {state}" if state else ""
    return name, reason


# ---------------------------------------------------------------------------------------------------------------------
# Kernels that failed
# ---------------------------------------------------------------------------------------------------------------------

_failures: dict[tuple[str, str], str] = {}


def record_failure(ops: Sequence[str], device: torch.device, reason: str) -> None:
    """From now on `ops` run in torch on this kind of device; warns."""
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
    """Why ops run in torch since one of their kernels failed, by op; empty where none has."""
    return {op: reason for (op, _), reason in _failures.items()}


def forget_failures() -> None:
    """Gives kernels that have failed another try."""
    _failures.clear()


def is_strict(backend: str = "") -> bool:
    """Whether a kernel's failure raises: asked for by the backend's override (`strict_override`), for which `choose`
    returned this name, or by NPU_KERNELS_STRICT=1."""
    return isinstance(backend, _Strict) or switch("NPU_KERNELS_STRICT")
