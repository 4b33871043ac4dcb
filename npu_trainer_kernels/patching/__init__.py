"""Putting the kernels into a model and taking them out again."""

from ._apply import PATCHES, NpuKernels, apply_npu_kernels
from ._report import FORMS, LeftAlone, Replaced, Report

__all__ = ["FORMS", "PATCHES", "LeftAlone", "NpuKernels", "Replaced", "Report", "apply_npu_kernels"]
