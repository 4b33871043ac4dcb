"""The rule of trials: what others' operators give on an accelerator, beside what they should."""

from collections.abc import Sequence

import torch

__all__ = ["TRIAL_ERRORS", "differs"]

TRIAL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
"""What an operator raises that a device, its driver or its library does not have, or has in another form."""

# Of the greatest value: some roundings of the dtype. What is meant in another way (a key too many in segments of a few
# tokens, a row in another group) makes more than 0.1.
_ALLOWED = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
_ALLOWED_WIDE = 1e-3


def differs(what: str, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], dtype: torch.dtype) -> str | None:
    """Why results are not those that are wanted, in words for a report, or None. The host waits for the device.

    Args:
        what: gives them, for the words.
        got: the results, in `dtype`; NaN is never right.
        wanted: the same in a wide dtype, anywhere.
        dtype: whose roundings are allowed.
    """
    off = torch.stack([
        (a.detach().to(b.device, b.dtype) - b.detach()).abs().max() / b.detach().abs().max()
        for a, b in zip(got, wanted, strict=True)
    ]).cpu().max().item()  # fmt: skip
    allowed = _ALLOWED.get(dtype, _ALLOWED_WIDE)
    return None if off <= allowed else f"{what} gives other numbers there (off by {off:.0e})"
