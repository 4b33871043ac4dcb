"""Applies the kernels to a model and removes them again."""

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
