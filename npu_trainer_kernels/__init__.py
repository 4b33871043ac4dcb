"""Fused kernels for Hugging Face Trainer and TRL on Ascend NPUs, CUDA GPUs and CPUs.

The names below are loaded on first use: importing this package needs nothing, not even torch, and works where Triton,
torch_npu or TRL is missing or broken. `npu_trainer_kernels.ops` holds the ops as functions.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import NpuKernelsArguments
    from .callback import NpuKernelsCallback
    from .grpo_trainer import GRPOTrainer
    from .ops.launch import KernelError
    from .patching import NpuKernels, Report, apply_npu_kernels
    from .rollouts import completions, serve_rollouts
    from .support.triton import MissingDependencyError

_HOMES = {
    "GRPOTrainer": ".grpo_trainer",
    "KernelError": ".ops.launch",
    "MissingDependencyError": ".support.triton",
    "NpuKernels": ".patching",
    "NpuKernelsArguments": ".arguments",
    "NpuKernelsCallback": ".callback",
    "Report": ".patching",
    "apply_npu_kernels": ".patching",
    "completions": ".rollouts",
    "serve_rollouts": ".rollouts",
}

__all__ = [
    "GRPOTrainer",
    "KernelError",
    "MissingDependencyError",
    "NpuKernels",
    "NpuKernelsArguments",
    "NpuKernelsCallback",
    "Report",
    "apply_npu_kernels",
    "completions",
    "serve_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
