"""A kernel that fails does not end the run: PyTorch takes over.

A *step* is a function that computes a part of an op with the backend that its last argument names; backend "torch"
computes the same from the same arguments. `falls_back` decorates a step. If a kernel cannot be compiled or launched
(`KernelError`, which means that it has written nothing), or an operator of the vendor fails, all ops that use the step
run in torch for the rest of the process. The package warns once, and `backends.explain` and the report state the
reason. With `strict` the step raises the error instead. Two errors are always raised as they are, and the op keeps its
backend: an out-of-memory error, which is not the kernel's fault, and the delayed error of an earlier operator, whose
unwritten output torch would otherwise read.

With NPU_KERNELS_DEBUG=1 a step checks its result and raises `FloatingPointError` if it contains a NaN or an infinity
and torch's result does not. The check waits for the device and copies the arguments.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from .. import backends, device
from .checks import debug
from .launch import KernelError

__all__ = ["falls_back"]

_EARLIER = (
    "npu_trainer_kernels: this is the failure of an operator that was called before, and perhaps not of this package; "
    "the call above is only where it surfaced. ASCEND_LAUNCH_BLOCKING=1 makes it fail where it is called."
)

Step = TypeVar("Step", bound=Callable[..., Any])


def falls_back(*ops: str) -> Callable[[Step], Step]:
    """Decorates a step of `ops`. The first argument of the step is a tensor, the last one is the backend."""

    def decorate(step: Step) -> Step:
        @functools.wraps(step)
        def guarded(*args: Any) -> Any:
            backend = args[-1]
            if backend == "torch":
                return step(*args)
            given = args[:-1]
            # Ask `has_failed` first, because it is the cheaper question.
            if backends.has_failed(ops[0], given[0].device) and not backends.is_strict(backend):
                return step(*given, "torch")
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in given] if debug() else None
            # The vendor's operators raise the same errors as PyTorch's, and do not write to their arguments.
            failure = RuntimeError if backend == "vendor" else KernelError
            try:
                result = step(*args)
            except RuntimeError as error:
                if device.is_of_an_earlier_call(error):
                    error.add_note(_EARLIER)
                    raise
                if not isinstance(error, failure) or backends.is_strict(backend) or device.is_out_of_memory(error):
                    raise
                backends.record_failure(ops, given[0].device, str(error))
                return step(*given, "torch")
            if copies is not None:
                # A step that works in place returns None, and its result is its first argument.
                ours = given[0] if result is None else result
                if not _finite(ours):
                    expected = step(*copies, "torch")
                    if _finite(copies[0] if expected is None else expected):
                        raise FloatingPointError(
                            f"{ops[0]}: {step.__name__} gave a number that is not finite on {given[0].device} with "
                            f"backend {backend!r}, where torch gives finite ones; use backend='torch' for it"
                        )
            return result

        return cast(Step, guarded)

    return decorate


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in _tensors(value) if t.is_floating_point())
