"""Checks of arguments that several ops share. Every message names the argument, its value and what is allowed."""

from collections.abc import Sequence

import torch

__all__ = ["FLOATS", "check_choice", "check_float", "check_ids", "check_same_device"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int64, torch.int32)


def check_float(name: str, tensor: torch.Tensor) -> None:
    """`tensor` must be fp32, bf16 or fp16."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16; got {tensor.dtype}")


def check_ids(name: str, tensor: torch.Tensor) -> None:
    """`tensor` must hold int64 or int32 ids."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in _IDS:
        raise TypeError(f"{name} must be int64 or int32; got {tensor.dtype}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """`value` must be one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """All tensors that are given must be on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        raise ValueError("all tensors must be on one device; got " + ", ".join(f"{n} on {d}" for n, d in devices.items()))
