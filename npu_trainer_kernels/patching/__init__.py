"""Applies the kernels to a model and removes them again."""

from .apply import NpuKernels, apply_npu_kernels, check_ops, check_tiled_mlp, handle_of
from .layers import CAPTURE_MODES, check_capture
from .patches import PATCHES
from .report import REPORT_LENGTHS, LeftAlone, Replaced, Report

__all__ = [
    "CAPTURE_MODES",
    "PATCHES",
    "REPORT_LENGTHS",
    "LeftAlone",
    "NpuKernels",
    "Replaced",
    "Report",
    "apply_npu_kernels",
    "check_capture",
    "check_ops",
    "check_tiled_mlp",
    "handle_of",
]  # fmt: skip
