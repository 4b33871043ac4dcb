"""Comparison of an operator of PyTorch or the vendor on an accelerator with its expected results."""

from collections.abc import Sequence

import torch

__all__ = ["TRIAL_ERRORS", "differs"]

TRIAL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
"""The errors of an operator that a device, its driver or its library lacks or defines differently."""

# Allowed errors relative to the greatest value: a few roundings of the dtype. An operator with another meaning (one key
# too many in segments of a few tokens, a row in another group) is off by more than 0.1.
_ALLOWED = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
_ALLOWED_WIDE = 1e-3


def differs(what: str, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], dtype: torch.dtype) -> str | None:
    """Returns a reason for a report if the results differ from the expected ones, else None. Waits for the device.

    Args:
        what: the name of the operator in the reason.
        got: the results, in `dtype`; a NaN always differs.
        wanted: the expected results in a wider dtype, on any device.
        dtype: the dtype whose rounding errors are allowed.
    """
    off = torch.stack([
        (a.detach().to(b.device, b.dtype) - b.detach()).abs().max() / b.detach().abs().max()
        for a, b in zip(got, wanted, strict=True)
    ]).cpu().max().item()  # fmt: skip
    allowed = _ALLOWED.get(dtype, _ALLOWED_WIDE)
    return None if off <= allowed else f"{what} gives other numbers there (off by {off:.0e})"
