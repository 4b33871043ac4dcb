"""Products of rows that lie in groups, each with a matrix of its own: the heavy part of a mixture's experts.

    y_r = x_r W_g            for the rows r of group g                               [S, M] of x [S, K] and W [G, K, M]
    dW_g = sum over r of x_r^T dy_r                                                                        [G, K, M]

Group g's rows are those from `ends[g - 1]` to `ends[g]`. Rows from the last end on belong to nobody: they are not read,
and what is returned for them is whatever the memory held. A group without rows gets a dW of zeros.

By device: PyTorch's grouped product on CUDA and the vendor's on an NPU, neither of which has to know on the host where
groups end; on the host itself, and wherever backend "torch" is asked for on an NPU, one group after another.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from ... import device as devices
from ... import tiling, vendor
from ...support.errors import one_line
from ...support.triton import jit, tl
from ..checks import has_values
from ..fallback import falls_back
from ..launch import launch
from ..trial import TRIAL_ERRORS, differs

__all__ = ["columns", "grouped_product", "outer_products", "trial", "unavailable", "weight_gradient"]

# Of a row, and of where a matrix begins: PyTorch's grouped product refuses others on CUDA.
_ALIGNED = 16


def unavailable(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], backend: str) -> str | None:
    """Why a device has no grouped product for a backend of rows of these sizes in a dtype, in words, or None."""
    by = devices.grouped_product_by(device)
    if _by_vendor(device, backend):
        return vendor.unavailable("moe_experts") or vendor.uncovered_experts(dtype, sizes)
    if by == "torch":
        if not hasattr(torch, "_grouped_mm"):
            return "this PyTorch has no grouped product"
        if dtype != torch.bfloat16 and not hasattr(F, "grouped_mm"):
            return f"the grouped product of this PyTorch takes bfloat16; got {str(dtype).removeprefix('torch.')}"
        if devices.compute_capability(device) < (8 if hasattr(F, "grouped_mm") else 9):
            return "the grouped product of this PyTorch does not run on this chip"
        odd = [size for size in sizes if size * dtype.itemsize % _ALIGNED]
        return f"rows of {odd[0]} elements: a grouped product wants multiples of {_ALIGNED} bytes" if odd else None
    return None if by is not None else "no grouped product is known on this kind of device"


@functools.cache
def trial(device: torch.device, dtype: torch.dtype, backend: str) -> str | None:
    """Tries the products on a device, once: with a group that is empty, rows of nobody, and matrices stored either way
    round. Why they had better not be used there, in words for a report, or None.

    What is called on an accelerator belongs to others, and its meaning may change from version to version. Here the
    host waits for the device; never again for the same arguments.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, dy, weight, stops = drawn(11, 32), drawn(11, 16), drawn(3, 32, 16), (5, 5, 9)
    parts = [(0, 5), (5, 5), (5, 9)]
    wanted = [torch.cat([x[a:b].float() @ w.float() for (a, b), w in zip(parts, weight, strict=True)])] * 2
    wanted.append(torch.stack([x[a:b].float().t() @ dy[a:b].float() for a, b in parts]))
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            rows, upstream, matrices = x.to(device), dy.to(device), weight.to(device)
            ends = torch.tensor(stops, dtype=torch.int32, device=device)
            groups = groups_of(ends, backend)
            turned = matrices.transpose(1, 2).contiguous().transpose(1, 2)
            got = [grouped_product(rows, matrix, groups, backend)[:9] for matrix in (matrices, turned)]
            got.append(outer_products(rows, upstream, ends, groups, backend))
            return differs("the grouped product", got, wanted, dtype)
    except TRIAL_ERRORS as error:
        return f"the grouped product raises there: {one_line(error, 120)}"


def _by_vendor(device: torch.device, backend: str) -> bool:
    return backend == "vendor" or (backend == "triton" and devices.grouped_product_by(device) == "vendor")


def groups_of(ends: torch.Tensor, backend: str) -> torch.Tensor:
    """The ends of groups as the device's product takes them: converted once for all products of a mixture."""
    return ends.long() if _by_vendor(ends.device, backend) else ends


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, backend: str) -> torch.Tensor:
    """y `[S, M]` of the module's docstring.

    Args:
        x: `[S, K]` without gaps.
        weight: `[G, K, M]`, or a transposed view of `[G, M, K]`.
        ends: `[G]`, of `groups_of`.
        backend: of the op.
    """
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[2])
    if _by_vendor(x.device, backend):
        return vendor.grouped_product(x, weight, ends)
    if devices.grouped_product_by(x.device) == "torch":
        return _grouped_mm(x, _aligned(weight), ends)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for g, start, end in _groups(ends):
        torch.mm(x[start:end], weight[g], out=y[start:end])
    return y


def outer_products(
    x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor, groups: torch.Tensor, backend: str
) -> torch.Tensor:
    """dW `[G, K, M]` of the module's docstring, of x `[S, K]` and dy `[S, M]` without gaps; ends `[G]` int32, and
    `groups_of` them."""
    shape = ends.shape[0], x.shape[1], dy.shape[1]
    if not x.shape[0]:
        return x.new_zeros(shape)
    if _by_vendor(x.device, backend):
        return _cleared(vendor.outer_products(x, dy, groups), ends, backend)
    if devices.grouped_product_by(x.device) == "torch":
        return _cleared(_grouped_mm(x.t(), dy, groups), ends, backend)
    dw = x.new_empty(shape)
    for g, start, end in _groups(groups):
        torch.mm(x[start:end].t(), dy[start:end], out=dw[g])
    return _cleared(dw, ends, backend)


def columns(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """A weight `[G, out, in]`, or transposed `[G, in, out]`, as the second factor of `grouped_product`."""
    return weight if transposed else weight.transpose(1, 2)


def weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, transposed: bool, ends: torch.Tensor, groups: torch.Tensor, backend: str
) -> torch.Tensor:
    """The gradient of such a weight as it is stored, from the rows before and the gradient behind its product."""
    before, behind = (x, dy) if transposed else (dy, x)
    return outer_products(before, behind, ends, groups, backend)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """PyTorch's, under its older name where it has no other."""
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(a, b, offs=ends)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """A weight that begins where the product wants it: that of a sharded buffer may not."""
    return weight if not has_values(weight) or weight.data_ptr() % _ALIGNED == 0 else weight.clone()


def _groups(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, start, end) of those that have rows. On meta there are none."""
    if not has_values(ends):
        return []
    bounds = ends.tolist()
    return [(g, start, end) for g, (start, end) in enumerate(zip([0, *bounds], bounds, strict=False)) if start < end]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of groups without rows. What the product writes there differs from chip to chip and from version to version
# of PyTorch, and is not always zero.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _clear_kernel(
    dw,  # [n_groups, size]
    ends,  # [n_groups] int32
    n_groups,
    size,
    BLOCK: tl.constexpr,
):
    for group in range(tl.program_id(0), n_groups, tl.num_programs(0)):
        end = tl.load(ends + group)
        start = 0
        if group > 0:
            start = tl.load(ends + group - 1)
        if start == end:
            at = dw + tl.cast(group, tl.int64) * size
            for block in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
                lane = block + tl.arange(0, BLOCK)
                tl.store(at + lane, tl.zeros([BLOCK], dw.dtype.element_ty), mask=lane < size)


@falls_back("moe_experts")
def _cleared(dw: torch.Tensor, ends: torch.Tensor, backend: str) -> torch.Tensor:
    """dw with zeros where a group has no rows. Where all have some, the kernel reads their ends and no more."""
    groups = ends.shape[0]
    size = dw.shape[1] * dw.shape[2]
    if backend in ("torch", "vendor") or not dw.is_contiguous() or size >= 1 << 31:
        before = torch.cat((ends.new_zeros(1), ends[:-1]))
        return dw.masked_fill_((before == ends).view(-1, 1, 1), 0)
    spec = devices.spec(dw.device)
    tile = tiling.clearing_block(dw.dtype.itemsize, spec)
    launch(
        _clear_kernel, tiling.clearing_grid(groups, spec), (dw, ends, groups, size),
        {"BLOCK": tile.size, **tile.options},
    )  # fmt: skip
    return dw
