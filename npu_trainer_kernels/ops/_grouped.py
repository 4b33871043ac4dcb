"""Products of rows that lie in groups, each with a matrix of its own: the heavy part of a mixture's experts.

    y_r = x_r W_g^T          for the rows r of group g                               [S, M] of x [S, K] and W [G, M, K]
    dW_g = sum over r of dy_r x_r^T                                                                        [G, M, K]

Group g's rows are those from `ends[g - 1]` to `ends[g]`; rows from `ends[-1]` on belong to nobody, are not read, and
what is returned for them is whatever the memory held. A group without rows gets a dW of zeros.

By device: PyTorch's grouped product on CUDA, the vendor's on an NPU, neither of which needs to know on the host where
groups end; on the host itself one group after another.
"""

from __future__ import annotations

import torch

from .. import device as devices

__all__ = ["unavailable"]


def unavailable(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...] = ()) -> str | None:
    """Why a device has no grouped product of matrices in a dtype whose rows have these sizes, or None."""
    kind = devices.kind_of(device)
    return None if kind == "cpu" else f"there is no grouped product on {kind}"
