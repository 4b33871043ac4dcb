"""Prepares one token of each row for `decode_attention`, in one launch: the norm of its queries and keys, their
rotation, and the writing of its key and value into the row's cache.

    q' = rotate(rms_norm(q[b], q_weight))       [Hq, D], returned
    k' = rotate(rms_norm(k[b], k_weight))       [Hk, D]
    keys[b, :, places[b]] = k'          values[b, :, places[b]] = v[b]          for the rows b with places[b] >= 0

The norm is that of `rms_norm` over each head, or none (Llama); the rotation is that of `rope` by halves, of the first R
elements of a head. Rounding happens where these ops round: the statistics, the norm and the rotation are computed in
fp32; the normed values are rounded to the dtype that `rms_norm` returns, the rotated values to the one that `rope`
returns, and those to the dtype of the cache.

The op is a part of `decode_attention`, and the choice of its backend is that op's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import backends, device, tiling
from ...support.opaque import opaque
from ...support.triton import jit, tl
from ..blocks import load_fp32, rounded, row_of_weight, store
from ..checks import check_float, check_ids, check_range, check_same_device
from ..fallback import falls_back
from ..host import promoted
from ..launch import launch
from ..norms import check_norm_options, normed_tile, rms_norm_reference
from ..rope import Rotation, rotated_pairs, rotation
from .append_to_cache import append_in_torch

__all__ = ["QkNorm", "qk_norm_rope_append", "rotated_dtype"]


@dataclass(frozen=True)
class QkNorm:
    """The norm of queries and keys, with the arguments of `ops.rms_norm`.

    Attributes:
        q_weight: [D].
        k_weight: [D], in q_weight's dtype.
        eps, offset, casting: as in `rms_norm`.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float = 1e-6
    offset: float = 0.0
    casting: str = "llama"

    def out_dtype(self, x: torch.dtype) -> torch.dtype:
        """Returns the dtype of normed x."""
        return promoted(x, self.q_weight.dtype) if self.casting == "llama" else x


# ---------------------------------------------------------------------------------------------------------------------
# Kernel. TABLE: 0 has one number per element, 2 one number per pair. HALF: half of the rotated elements of a head; REST
# elements are not rotated.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _table(pointer, TABLE: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr):
    """Loads the cosines or sines of both members of the pairs, fp32 `[1, COLS]`."""
    cols = tl.arange(0, COLS)[None, :]
    first = load_fp32(pointer + cols, cols < HALF, COLS != HALF)
    if TABLE == 2:
        return first, first
    else:
        return first, load_fp32(pointer + HALF + cols, cols < HALF, COLS != HALF)


@jit
def _normed(x, rstd, weight, offset, like, WIDTH: tl.constexpr, COLS: tl.constexpr, CASTING: tl.constexpr,
            ROUND: tl.constexpr):  # fmt: skip
    """Norms some columns of heads, rounded as `rms_norm` returns them."""
    w = row_of_weight(weight, offset, WIDTH, COLS, 1, COLS != WIDTH, CASTING != "gemma")
    w = rounded(w, like, CASTING == "none")
    return rounded(normed_tile(x, rstd, w, like, True, True, CASTING), like, ROUND)


@jit
def _rotate_heads(x, y, weight, cos, sin, n_heads, x_head, y_head, eps, offset, NORMED: tl.constexpr,
                  CASTING: tl.constexpr, ROUND_NORMED: tl.constexpr, ROUND_ROTATED: tl.constexpr, TABLE: tl.constexpr,
                  HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
                  REST_COLS: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Norms and rotates HEADS heads of a token, of which `n_heads` exist."""
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, COLS)[None, :]
    # The strides of heads are multiplied in 64 bits: a head of the cache is as long as its places.
    at = tl.cast(heads, tl.int64)
    MASKED: tl.constexpr = TAIL or COLS != HALF
    mask = (heads < n_heads) & (cols < HALF)
    x1 = load_fp32(x + at * x_head + cols, mask, MASKED)
    x2 = load_fp32(x + at * x_head + HALF + cols, mask, MASKED)
    rest_cols = tl.arange(0, REST_COLS)[None, :]
    rest_mask = (heads < n_heads) & (rest_cols < REST)
    REST_MASKED: tl.constexpr = TAIL or REST_COLS != REST
    rest = x1
    if REST:
        rest = load_fp32(x + at * x_head + 2 * HALF + rest_cols, rest_mask, REST_MASKED)
    if NORMED:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST:
            squares += tl.sum(rest * rest, axis=1)
        rstd = tl.rsqrt(squares * (1.0 / (2 * HALF + REST)) + eps)
        x1 = _normed(x1, rstd, weight, offset, x, HALF, COLS, CASTING, ROUND_NORMED)
        x2 = _normed(x2, rstd, weight + HALF, offset, x, HALF, COLS, CASTING, ROUND_NORMED)
        if REST:
            rest = _normed(rest, rstd, weight + 2 * HALF, offset, x, REST, REST_COLS, CASTING, ROUND_NORMED)
    c1, c2 = _table(cos, TABLE, HALF, COLS)
    s1, s2 = _table(sin, TABLE, HALF, COLS)
    y1, y2 = rotated_pairs(x1, x2, c1, c2, s1, s2, False)
    store(y + at * y_head + cols, rounded(y1, x, ROUND_ROTATED), mask, MASKED)
    store(y + at * y_head + HALF + cols, rounded(y2, x, ROUND_ROTATED), mask, MASKED)
    if REST:
        store(y + at * y_head + 2 * HALF + rest_cols, rounded(rest, x, ROUND_ROTATED), rest_mask, REST_MASKED)


@jit(lengths=("n_rows",))
def _prepare_kernel(
    places,  # [n_rows]
    q,  # [n_rows, Q_HEADS, 2 HALF + REST] with strides q_row, q_head
    k,  # [n_rows, K_HEADS, 2 HALF + REST] likewise
    v,  # [n_rows, K_HEADS, VALUE_SIZE] likewise
    q_weight,  # [2 HALF + REST], read if NORMED; likewise k_weight
    k_weight,
    cos,  # [n_rows, width that TABLE implies] with stride cos_row; likewise sin
    sin,
    out,  # [n_rows, Q_HEADS, 2 HALF + REST] contiguous
    keys,  # [n_rows, K_HEADS, L, 2 HALF + REST] with strides key_row, key_head, key_stride
    values,  # [n_rows, K_HEADS, L, VALUE_SIZE] likewise
    n_rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    cos_row,
    sin_row,
    key_row,
    key_head,
    key_stride,
    value_row,
    value_head,
    value_stride,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    CASTING: tl.constexpr,
    ROUND_NORMED: tl.constexpr,  # normed values have q's dtype; otherwise they are fp32
    ROUND_ROTATED: tl.constexpr,  # rotated values have q's dtype; otherwise they are fp32
    TABLE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr,
):
    # A task is HEADS heads of one row: of its queries, or of its keys and values.
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PARTS + (K_HEADS + HEADS - 1) // HEADS
    SIZE: tl.constexpr = 2 * HALF + REST
    for task in range(tl.program_id(0), n_rows * PARTS, tl.num_programs(0)):
        row = tl.cast(task // PARTS, tl.int64)
        part = task % PARTS
        if part < Q_PARTS:
            first = tl.cast(part * HEADS, tl.int64)
            _rotate_heads(
                q + row * q_row + first * q_head, out + (row * Q_HEADS + first) * SIZE, q_weight, cos + row * cos_row,
                sin + row * sin_row, Q_HEADS - first, q_head, SIZE, eps, offset, NORMED, CASTING, ROUND_NORMED,
                ROUND_ROTATED, TABLE, HALF, REST, HEADS, COLS, REST_COLS, Q_HEADS % HEADS != 0,
            )  # fmt: skip
        else:
            place = tl.load(places + row).to(tl.int64)
            if place >= 0:
                first = tl.cast((part - Q_PARTS) * HEADS, tl.int64)
                _rotate_heads(
                    k + row * k_row + first * k_head, keys + row * key_row + first * key_head + place * key_stride,
                    k_weight, cos + row * cos_row, sin + row * sin_row, K_HEADS - first, k_head, key_head, eps, offset,
                    NORMED, CASTING, ROUND_NORMED, ROUND_ROTATED, TABLE, HALF, REST, HEADS, COLS, REST_COLS,
                    K_HEADS % HEADS != 0,
                )  # fmt: skip
                heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, VALUE_COLS)[None, :]
                mask = (heads < K_HEADS - first) & (cols < VALUE_SIZE)
                MASKED: tl.constexpr = K_HEADS % HEADS != 0 or VALUE_COLS != VALUE_SIZE
                at = tl.cast(heads, tl.int64)
                value = load_fp32(v + row * v_row + (first + at) * v_head + cols, mask, MASKED)
                target = values + row * value_row + (first + at) * value_head + place * value_stride + cols
                store(target, value, mask, MASKED)


# ---------------------------------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------------------------------


def rotated_dtype(x: torch.dtype, table: torch.dtype, norm: QkNorm | None, form: Rotation) -> torch.dtype:
    """Returns the dtype of rotated queries of dtype x, before they are converted to the cache's."""
    return form.out_dtype(x if norm is None else norm.out_dtype(x), table)


def _in_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, places: torch.Tensor, norm: QkNorm | None, form: Rotation,
) -> torch.Tensor:  # fmt: skip
    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = rms_norm_reference(x, weight, norm.eps, offset=norm.offset, casting=norm.casting)
        return form.rotate(x[:, :, None], cos[:, None], sin[:, None])[:, :, 0].to(keys.dtype)

    q_weight, k_weight = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    q, k = rotated(q, q_weight), rotated(k, k_weight)
    append_in_torch(k, v.to(values.dtype), keys, values, places)
    return q


@falls_back("decode_attention")
def _computed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, places: torch.Tensor, norm: QkNorm | None, form: Rotation, backend: str,
) -> torch.Tensor:  # fmt: skip
    if backend == "torch":
        return _in_torch(q, k, v, cos, sin, keys, values, places, norm, form)
    rows, heads, size = q.shape
    k_heads, value_size = k.shape[1], v.shape[2]
    spec = device.spec(q.device)
    half = form.rotated_size(cos.shape[1]) // 2
    rest = size - 2 * half
    tile = tiling.token_tile(heads, k_heads, half, rest, value_size, spec)
    q, k, v, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, cos, sin))
    normed = q.dtype if norm is None else norm.out_dtype(q.dtype)
    out = q.new_empty(rows, heads, size, dtype=keys.dtype)
    parts = -(-heads // tile.heads) + -(-k_heads // tile.heads)
    launch(
        _prepare_kernel, (tiling.programs(rows * parts, spec),),
        (places.int() if tiling.wants_int32_ids(spec) else places, q, k, v, q if norm is None else norm.q_weight,
         k if norm is None else norm.k_weight, cos, sin, out, keys, values, rows, *q.stride()[:2], *k.stride()[:2],
         *v.stride()[:2], cos.stride(0), sin.stride(0), *keys.stride()[:3], *values.stride()[:3],
         0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset),
        {"Q_HEADS": heads, "K_HEADS": k_heads, "VALUE_SIZE": value_size, "NORMED": norm is not None,
         "CASTING": "llama" if norm is None else norm.casting, "ROUND_NORMED": normed is q.dtype,
         "ROUND_ROTATED": form.out_dtype(normed, promoted(cos.dtype, sin.dtype)) is q.dtype,
         "TABLE": form.flags[0]["TABLE"], "HALF": half, "REST": rest, "HEADS": tile.heads, "COLS": tile.cols,
         "REST_COLS": tile.rest_cols, "VALUE_COLS": tile.value_cols, **tile.options},
    )  # fmt: skip
    return out


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, places: torch.Tensor, norm: QkNorm | None, form: Rotation,
) -> None:  # fmt: skip
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "keys": keys, "values": values}
    if norm is not None:
        given |= {"q_weight": norm.q_weight, "k_weight": norm.k_weight}
    for name, tensor in given.items():
        check_float(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient, which qk_norm_rope_append does not have; call it "
                             "under torch.no_grad(), or detach the tensor")  # fmt: skip
    check_ids("places", places)
    check_same_device(**given, places=places)
    if q.dim() != 3:
        raise ValueError(f"q must have shape [B, Hq, D]; got {list(q.shape)}")
    rows, _, size = q.shape
    if k.dim() != 3 or (k.shape[0], k.shape[2]) != (rows, size) or k.dtype != q.dtype:
        raise ValueError(
            f"k must have shape [{rows}, Hk, {size}] and q's dtype {q.dtype}; got {list(k.shape)} in {k.dtype}"
        )
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must have shape [{rows}, {k.shape[1]}, Dv]; got {list(v.shape)}")
    width = cos.shape[1] if cos.dim() == 2 else 0
    rotated = form.rotated_size(width)
    if width < 1 or cos.shape[0] != rows or rotated % 2 or rotated > size:
        columns = "R / 2" if form.tables == "pair" else "R"
        raise ValueError(
            f"cos must have shape [{rows}, {columns}] with R even and at most {size}; got {list(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos's shape {list(cos.shape)}; got {list(sin.shape)}")
    for name, cache, token in (("keys", keys, k), ("values", values, v)):
        _, heads, length = token.shape
        if cache.dim() != 4 or (*cache.shape[:2], cache.shape[3]) != token.shape:
            raise ValueError(f"{name} must have shape [{rows}, {heads}, L, {length}]; got {list(cache.shape)}")
        if length > 1 and cache.stride(3) != 1:
            raise ValueError(f"{name} must be contiguous along its last dimension; got strides {list(cache.stride())}")
    if values.shape[2] != keys.shape[2]:
        raise ValueError(f"values must have as many places as keys, {keys.shape[2]}; got {values.shape[2]}")
    if places.shape != (rows,):
        raise ValueError(f"places must have shape [{rows}], one for each row; got {list(places.shape)}")
    if norm is not None:
        check_norm_options(norm.eps, norm.offset, norm.casting)
        for name, weight in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
            if weight.shape != (size,) or weight.dtype != norm.q_weight.dtype:
                raise ValueError(f"{name} must have shape [{size}] and q_weight's dtype {norm.q_weight.dtype}; got "
                                 f"{list(weight.shape)} in {weight.dtype}")  # fmt: skip
    check_range("places that are not negative", lambda: places.clamp(min=0), places.device, keys.shape[2])


@opaque
def qk_norm_rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    *,
    norm: QkNorm | None = None,
    tables: str = "each",
    casting: str = "promote",
    backend: str | None = None,
) -> torch.Tensor:
    """Norms and rotates the queries and keys of one token of each row, and writes the key and the value into the row's
    cache, in place. The module's docstring has the formulas. The op has no gradient. A device's graph may contain it,
    and then uses the places of each replay.

    Args:
        q: `[B, Hq, D]`, fp32, bf16 or fp16; any strides. A view of a joint product of queries, keys and values is read
            where it is.
        k: `[B, Hk, D]` in q's dtype, likewise.
        v: `[B, Hk, Dv]`, fp32, bf16 or fp16, likewise.
        cos: `[B, R]`, or R / 2 with `tables="pair"`; R is even and at most D. The elements of a head after the first R
            are not rotated.
        sin: likewise.
        keys: `[B, Hk, L, D]`, fp32, bf16 or fp16; the elements of a key are contiguous, and other strides are free.
        values: `[B, Hk, L, Dv]`, likewise.
        places: `[B]` int32 or int64, below L. A row with a negative place writes nothing to the cache. On an
            accelerator the range is checked only with NPU_KERNELS_DEBUG=1.
        norm: the norm of each head; None for none.
        tables: the layout of the tables, as in `rope`. Pairs are always halves of the rotated elements.
        casting: the dtypes of the rotation, as in `rope`.
        backend: overrides the choice of `backends.choose` for `decode_attention`.

    Returns:
        `[B, Hq, D]` in the dtype of `keys`, contiguous: the rotated queries.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes, dtypes or strides that do not match, a place out of range, a tensor that requires a
            gradient, an option that is not allowed, an unknown backend.
    """
    form = rotation("halves", tables, casting, 1)
    _check(q, k, v, cos, sin, keys, values, places, norm, form)
    chosen = backends.choose("decode_attention", q.device, backend)
    if not q.shape[0]:
        return q.new_empty(q.shape, dtype=keys.dtype)
    return _computed(q, k, v, cos, sin, keys, values, places, norm, form, chosen)
