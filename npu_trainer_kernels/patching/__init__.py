"""Putting the kernels into a model and taking them out again."""

from ._apply import NpuKernels, apply_npu_kernels, check_ops, check_tiled_mlp, handle_of
from ._report import FORMS, LeftAlone, Replaced, Report
from .table import PATCHES

__all__ = [
    "FORMS", "PATCHES", "LeftAlone", "NpuKernels", "Replaced", "Report", "apply_npu_kernels", "check_ops",
    "check_tiled_mlp", "handle_of",
]  # fmt: skip
