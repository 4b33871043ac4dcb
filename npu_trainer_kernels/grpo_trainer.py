"""`GRPOTrainer`: TRL's, with the kernels on. Its loss is TRL's own; no code of it is copied here."""

from typing import Any

from .arguments import NpuKernelsArguments
from .patching import Report
from .support.optional import INSTALL
from .support.triton import MissingDependencyError

try:
    from trl import GRPOTrainer as _GRPOTrainer
except (ImportError, OSError, RuntimeError) as error:
    raise MissingDependencyError(
        f"GRPOTrainer needs TRL, which cannot be imported ({type(error).__name__}: {error}): "
        f"pip install {INSTALL['trl']} {INSTALL['datasets']}"
    ) from error

__all__ = ["GRPOTrainer"]


class GRPOTrainer(_GRPOTrainer):
    """A drop-in for `trl.GRPOTrainer` with one more argument; it equals TRL's trainer with an `NpuKernelsCallback`.

    Args:
        npu_kernels: the options; None: all ops, on the device's default backends. With
            `NpuKernelsArguments(use_npu_kernels=False)` this is TRL's trainer.

    Raises:
        TypeError: `npu_kernels` is something else.
    """

    def __init__(self, *args: Any, npu_kernels: NpuKernelsArguments | None = None, **kwargs: Any) -> None:
        if npu_kernels is not None and not isinstance(npu_kernels, NpuKernelsArguments):
            raise TypeError(f"npu_kernels must be an NpuKernelsArguments, or None; got {type(npu_kernels).__name__}")
        super().__init__(*args, **kwargs)
        chosen = NpuKernelsArguments(use_npu_kernels=True) if npu_kernels is None else npu_kernels
        self._npu_kernels = chosen.callbacks()
        for callback in self._npu_kernels:
            if npu_kernels is None:  # there may be no command line
                callback.in_full = 'npu_kernels=NpuKernelsArguments(use_npu_kernels=True, npu_kernels_report="full")'
            self.add_callback(callback)
            callback.attach(self)

    def npu_kernels_report(self) -> Report:
        """Returns the report of the patched model; empty where the kernels are off."""
        return self._npu_kernels[0].report() if self._npu_kernels else Report()
