"""Applies the kernels to a model and removes them again."""

from .apply import NpuKernels, apply_npu_kernels, check_ops, check_tiled_mlp, handle_of
from .patches import PATCHES
from .report import FORMS, LeftAlone, Replaced, Report

__all__ = [
    "FORMS", "PATCHES", "LeftAlone", "NpuKernels", "Replaced", "Report", "apply_npu_kernels", "check_ops",
    "check_tiled_mlp", "handle_of",
]  # fmt: skip
