"""One kernel that does not work is no reason to lose a run.

A *step* does a piece of an op by the backend that its last argument names, and has a torch twin behind the same
arguments. `falls_back` guards it: when a kernel cannot be compiled or launched (`KernelError`: nothing has been written
then), or an operator of the vendor's fails, the ops that use it go on in torch for the rest of the process, with one
warning, and `backends.explain` and the report give the reason. With `strict` the error is raised instead. Memory that
has run out is no fault of a kernel's: that error is raised as it is, and the op keeps its backend. So is the failure of
an earlier operator that surfaces here: it has left its numbers unwritten, and torch would go on with those.

Under NPU_KERNELS_DEBUG=1 a step's result is looked at: `FloatingPointError` where it holds a NaN or an infinity and the
torch twin's does not. That waits for the device and copies the arguments.
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
    """Guards a step that serves `ops`; its first argument is a tensor, its last the backend."""

    def decorate(step: Step) -> Step:
        @functools.wraps(step)
        def guarded(*args: Any) -> Any:
            backend = args[-1]
            if backend == "torch":
                return step(*args)
            given = args[:-1]
            # In this order: that nothing has failed is known at once.
            if backends.has_failed(ops[0], given[0].device) and not backends.is_strict(backend):
                return step(*given, "torch")
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in given] if debug() else None
            # The vendor's operators raise what PyTorch's own do, and write to nothing that they are given.
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
                # What a step returns, or, where it works in place, its first argument.
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
