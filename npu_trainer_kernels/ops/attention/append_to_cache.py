"""Writes the key and the value of one token of each row into the row's cache, in one launch.

    keys[b, :, places[b]] = k[b]          values[b, :, places[b]] = v[b]          for the rows b with places[b] >= 0

The op is a part of `decode_attention`, and the choice of its backend is that op's.
"""

from __future__ import annotations

import torch

from ... import backends, device, tiling
from ...support.opaque import opaque
from ...support.triton import jit, tl
from ..checks import check_float, check_ids, check_range, check_same_device
from ..fallback import falls_back
from ..launch import launch

__all__ = ["append_in_torch", "append_to_cache"]


@jit
def _copy(source, target, n_heads, source_head, target_head, SIZE: tl.constexpr, HEADS: tl.constexpr,
          COLS: tl.constexpr):  # fmt: skip
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, COLS)[None, :]
    mask = (heads < n_heads) & (cols < SIZE)
    # The strides of heads are multiplied in 64 bits: a head of the cache is as long as its places.
    at = tl.cast(heads, tl.int64)
    tl.store(target + at * target_head + cols, tl.load(source + at * source_head + cols, mask=mask), mask=mask)


@jit(lengths=("n_rows",))
def _append_kernel(
    places,  # [n_rows]
    k,  # [n_rows, N_HEADS, SIZE] with strides k_row, k_head
    v,  # [n_rows, N_HEADS, VALUE_SIZE] likewise
    keys,  # [n_rows, N_HEADS, L, SIZE] with strides key_row, key_head, key_stride
    values,  # [n_rows, N_HEADS, L, VALUE_SIZE] likewise
    n_rows,
    k_row,
    k_head,
    v_row,
    v_head,
    key_row,
    key_head,
    key_stride,
    value_row,
    value_head,
    value_stride,
    N_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr,
):
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        place = tl.load(places + row).to(tl.int64)
        if place >= 0:
            at = tl.cast(row, tl.int64)
            _copy(k + at * k_row, keys + at * key_row + place * key_stride, N_HEADS, k_head, key_head, SIZE, HEADS,
                  COLS)  # fmt: skip
            _copy(v + at * v_row, values + at * value_row + place * value_stride, N_HEADS, v_head, value_head,
                  VALUE_SIZE, HEADS, VALUE_COLS)  # fmt: skip


def append_in_torch(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor
) -> None:
    """Computes the op in plain PyTorch."""
    # A row with a negative place writes its first place again: an index by a mask would wait for the device.
    row, place, live = torch.arange(len(places), device=k.device), places.long().clamp(min=0), places >= 0
    for token, cache in ((k, keys), (v, values)):
        cache[row, :, place] = torch.where(live[:, None, None], token, cache[row, :, place])


@falls_back("decode_attention")
def _append(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, backend: str
) -> None:
    if backend == "torch":
        append_in_torch(k, v, keys, values, places)
        return
    rows, heads, size = k.shape
    spec = device.spec(k.device)
    tile = tiling.cache_tile(heads, size, v.shape[2], spec)
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    launch(
        _append_kernel, (tiling.programs(rows, spec),),
        (places.int() if tiling.wants_int32_ids(spec) else places, k, v, keys, values, rows, *k.stride()[:2],
         *v.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
        {"N_HEADS": heads, "SIZE": size, "VALUE_SIZE": v.shape[2], "HEADS": tile.heads, "COLS": tile.cols,
         "VALUE_COLS": tile.value_cols, **tile.options},
    )  # fmt: skip


def _check(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v), ("keys", keys), ("values", values)):
        check_float(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient, which append_to_cache does not have; call it under "
                             "torch.no_grad(), or detach the tensor")  # fmt: skip
    check_ids("places", places)
    check_same_device(k=k, v=v, keys=keys, values=values, places=places)
    for name, tensor, cache_name, cache in (("k", k, "keys", keys), ("v", v, "values", values)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape [B, Hk, D]; got {list(tensor.shape)}")
        rows, heads, size = tensor.shape
        if cache.dim() != 4 or (*cache.shape[:2], cache.shape[3]) != tensor.shape:
            raise ValueError(f"{cache_name} must have shape [{rows}, {heads}, L, {size}]; got {list(cache.shape)}")
        if cache.dtype != tensor.dtype:
            raise ValueError(f"{cache_name} must have {name}'s dtype {tensor.dtype}; got {cache.dtype}")
        if size > 1 and cache.stride(3) != 1:
            raise ValueError(
                f"{cache_name} must be contiguous along its last dimension; got strides {list(cache.stride())}"
            )
    if v.shape[:2] != k.shape[:2] or values.shape[2] != keys.shape[2]:
        raise ValueError(
            f"v and values must have k's and keys' B, Hk and L; got {list(v.shape)} and {list(values.shape)} beside "
            f"{list(k.shape)} and {list(keys.shape)}"
        )
    if places.shape != k.shape[:1]:
        raise ValueError(f"places must have shape [{k.shape[0]}], one for each row; got {list(places.shape)}")
    check_range("places that are not negative", lambda: places.clamp(min=0), places.device, keys.shape[2])


@opaque
def append_to_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Writes the key and the value of one token of each row into a cache, in place: `keys[b, :, places[b]] = k[b]` and
    `values[b, :, places[b]] = v[b]`. A device's graph may contain the op, and then uses the places of each replay.

    Args:
        k: `[B, Hk, D]`, fp32, bf16 or fp16; any strides.
        v: `[B, Hk, Dv]`, likewise.
        keys: `[B, Hk, L, D]` in k's dtype; the elements of a key are contiguous, and other strides are free.
        values: `[B, Hk, L, Dv]` in v's dtype, likewise.
        places: `[B]` int32 or int64, below L. A row with a negative place writes nothing. On an accelerator the range
            is checked only with NPU_KERNELS_DEBUG=1.
        backend: overrides the choice of `backends.choose` for `decode_attention`.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes, dtypes or strides that do not match, a place out of range, a tensor that requires a
            gradient, an unknown backend.
    """
    _check(k, v, keys, values, places)
    if not k.shape[0]:
        return
    _append(k, v, keys, values, places, backends.choose("decode_attention", k.device, backend))
