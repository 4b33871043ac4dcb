"""Applies the kernels to a model and removes them again: the frame, which the folders below it use.

1. `apply.py`: `apply_npu_kernels` asks every patch of `patches.py` about every module, and returns the handle.
2. `patch.py`: what a patch is, and the check before every call; `classes.py`: the class that a recognised module gets;
   `undo.py`: every change, and its way back.
3. `call.py`: the forward of a patched model that is running, with the labels and the plan for it; `learned_plan.py`:
   a plan that a head has learned from its first backward passes.
4. `audit.py`: compares the ops with the model's own code, on a batch of the run; `report.py`: what ran, and why not.
5. Forwards that others have set on modules: `parallel.py` those of a tensor-parallel plan, `bound_forwards.py` those of
   Hugging Face's package `kernels`, for which `hub_layers.py` has layers.

Recognition is in `modules/`, `head/`, `body/` and `layers/`, with the means of `probe/`.
"""

from .apply import NpuKernels, apply_npu_kernels, handle_of
from .patches import PATCHES
from .report import LeftAlone, Replaced, Report

__all__ = [
    "PATCHES",
    "LeftAlone",
    "NpuKernels",
    "Replaced",
    "Report",
    "apply_npu_kernels",
    "handle_of",
]  # fmt: skip
