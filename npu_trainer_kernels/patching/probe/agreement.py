"""Whether foreign code equals a form beyond one forward's bits: in training, in evaluation, and in gradients."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..patch import PROBE_ERRORS

__all__ = ["MODES", "agree", "repeatable"]

MODES = (False, True)
"""Evaluation and training: a model is often patched in the one and run in the other."""

_TOLERANCE = 1e-4
"""Relative to the largest value, in fp32. Rounding makes about 1e-6 of it, another formula more than 1e-2."""


@contextlib.contextmanager
def repeatable(where: torch.device | None = None) -> Iterator[None]:
    """Restores the random states of torch (also of a device), Python and NumPy, whatever a probe has drawn."""
    kind = "cpu" if where is None else where.type
    beside: dict[str, Any] = {"devices": []} if kind == "cpu" else {"devices": [where], "device_type": kind}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(**beside):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def agree(function: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether two functions of fp32 tensors on the CPU have the same values and the same gradients: a detached factor,
    or noise, does not show in the values of one forward."""
    try:
        found, expected = _outcome(function, inputs), _outcome(reference, inputs)
    except PROBE_ERRORS:
        return False
    return all(map(_close, found, expected))


def _outcome(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        if not out.requires_grad:
            return [out, *(None for _ in leaves)]
        upstream = torch.randn(out.shape, generator=torch.Generator("cpu").manual_seed(2), dtype=out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream, allow_unused=True)]


def _close(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
