"""Grouped matrix products: rows in groups, and a matrix per group. They dominate the time of a mixture's experts.

    y_r = x_r W_g            for the rows r of group g                               [S, M] of x [S, K] and W [G, K, M]
    dW_g = sum over r of x_r^T dy_r                                                                        [G, K, M]

Group g has the rows from `ends[g - 1]` to `ends[g]`. Rows after the last end belong to no group: the product does not
read them and leaves their results uninitialised. dW of a group without rows is zero.

On CUDA this is PyTorch's grouped product, on an NPU the vendor's; both read the ends of groups on the device. On the
host, and with backend "torch" on an NPU, it is a loop over the groups.
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

# PyTorch's grouped product on CUDA requires that rows and the start of a matrix are multiples of this many bytes.
_ALIGNED = 16


def unavailable(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], backend: str) -> str | None:
    """Returns why a backend has no grouped product on a device for rows of these sizes and dtype, or None if it has."""
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
    """Compares the products on a device with their formulas, for an empty group, rows of no group and both layouts of
    the matrices. Returns a reason for a report if they differ, else None.

    The products on an accelerator belong to PyTorch or the vendor, and their behaviour may change between versions. The
    comparison waits for the device; its result is cached.
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
    """Converts the ends of groups to the dtype of the device's product, once for all products of a mixture."""
    return ends.long() if _by_vendor(ends.device, backend) else ends


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, backend: str) -> torch.Tensor:
    """Computes y `[S, M]` of the module's docstring.

    Args:
        x: `[S, K]`, contiguous.
        weight: `[G, K, M]`, or a transposed view of `[G, M, K]`.
        ends: `[G]`, from `groups_of`.
        backend: the backend of the op.
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
    """Computes dW `[G, K, M]` of the module's docstring from contiguous x `[S, K]` and dy `[S, M]`. `ends` is `[G]`
    int32, `groups` is `groups_of(ends)`."""
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
    """Returns a weight `[G, out, in]`, or transposed `[G, in, out]`, as the second factor of `grouped_product`."""
    return weight if transposed else weight.transpose(1, 2)


def weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, transposed: bool, ends: torch.Tensor, groups: torch.Tensor, backend: str
) -> torch.Tensor:
    """Computes the gradient of a weight in its layout, from its product's input x and output gradient dy."""
    before, behind = (x, dy) if transposed else (dy, x)
    return outer_products(before, behind, ends, groups, backend)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Calls PyTorch's grouped product, by its private name in older versions."""
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(a, b, offs=ends)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """Copies a weight unless its start is aligned for the product. A weight in a sharded buffer may not be aligned."""
    return weight if not has_values(weight) or weight.data_ptr() % _ALIGNED == 0 else weight.clone()


def _groups(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """Returns (group, start, end) of the groups that have rows; none for meta tensors."""
    if not has_values(ends):
        return []
    bounds = ends.tolist()
    return [(g, start, end) for g, (start, end) in enumerate(zip([0, *bounds], bounds, strict=False)) if start < end]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of groups without rows. The values that the product writes there depend on the chip and on PyTorch's
# version, and are not always zero.
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
    """Sets dw to zero for groups without rows. If all groups have rows, the kernel only reads their ends."""
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
