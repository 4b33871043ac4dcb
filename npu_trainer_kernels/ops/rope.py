"""Rotary position embedding of queries and keys (arXiv:2104.09864), in the variants of transformers' models.

Let (x1, x2) be a pair of elements that are rotated together, and c1, s1 and c2, s2 their cosines and sines:

    y1 = x1 c1 - x2 s1         dx1 = dy1 c1 + dy2 s2
    y2 = x2 c2 + x1 s2         dx2 = dy2 c2 - dy1 s1

Backward is the same kernel with s1 and s2 exchanged and negated. The kernels compute in fp32. Forward saves only cos
and sin. The variants differ in which elements of a head form a pair, and in how much of a head is rotated:

    pairs        halves: (i, i + R/2) of the first R elements       interleaved: (2i, 2i + 1)
                 regrouped: interleaved in the input, halves in the output
    tables       each: R numbers, one per element, in the order of the head       pair: R/2 numbers, one per pair
                 first_half: R numbers, of which the first half are one per pair
    R            the number of rotated elements, from the tables' width; the other elements of a head are copied
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from .. import backends, device, tiling, vendor
from ..support.triton import jit, tl
from .blocks import load, load_fp32, store
from .checks import check_choice, check_float, check_same_device
from .fallback import falls_back
from .host import once_differentiable, promoted
from .launch import launch

__all__ = ["CASTINGS", "PAIRS", "TABLES", "Rotation", "rope", "rope_of_checked", "rope_reference",
           "rotated_pairs", "rotation", "unserved"]  # fmt: skip

PAIRS = ("halves", "interleaved", "regrouped")
TABLES = ("each", "pair", "first_half")
CASTINGS = ("promote", "back", "fp32")


@dataclass(frozen=True, eq=False)
class Rotation:
    """The checked options of a rotation. Outside of compiled graphs, equal options give the same object.

    Attributes:
        pairs: one of `PAIRS`.
        tables: one of `TABLES`.
        casting: one of `CASTINGS`.
        heads: the dimension of q and k that counts heads, 1 or 2; the other one counts tokens.
        flags: the constants of the kernels, for forward and for backward.
    """

    pairs: str
    tables: str
    casting: str
    heads: int
    flags: tuple[dict[str, int], dict[str, int]] = field(repr=False)

    def rotated_size(self, width: int) -> int:
        """Returns R for tables with `width` columns."""
        return 2 * width if self.tables == "pair" else width

    def out_dtype(self, x: torch.dtype, table: torch.dtype) -> torch.dtype:
        """Returns the dtype of rotated x."""
        return promoted(x, table) if self.casting == "promote" else x

    def strides(self, of: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the strides between sequences, heads and tokens of a tensor with strides `of`."""
        return of[:3] if self.heads == 1 else (of[0], of[2], of[1])  # type: ignore[return-value]

    def sizes(self, of: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns the numbers of sequences, heads, tokens and elements of a head of a tensor with shape `of`."""
        return of if self.heads == 1 else (of[0], of[2], of[1], of[3])  # type: ignore[return-value]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates x in plain PyTorch, bit for bit as the models' functions do."""
        y = _turned(x.float() if self.casting == "fp32" else x, cos, sin, self, False)
        return y if self.casting == "promote" else y.to(x.dtype)


def _pairs_of(x: torch.Tensor, by_turns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if by_turns:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _of_pairs(first: torch.Tensor, second: torch.Tensor, by_turns: bool) -> torch.Tensor:
    return torch.stack((first, second), -1).flatten(-2) if by_turns else torch.cat((first, second), -1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Rotation, inverse: bool) -> torch.Tensor:
    """Rotates x, or with `inverse` a gradient of rotated values, in the promoted dtype."""
    cos, sin = cos.unsqueeze(form.heads), sin.unsqueeze(form.heads)
    size, by_turns, regroups = form.rotated_size(cos.shape[-1]), form.pairs == "interleaved", form.pairs == "regrouped"
    if form.tables != "each":
        cos, sin = (_of_pairs(t[..., : size // 2], t[..., : size // 2], by_turns) for t in (cos, sin))
    if inverse:
        sin = -_of_pairs(*_pairs_of(sin, by_turns)[::-1], by_turns)
    turned = x if size == x.shape[-1] else x[..., :size]
    if regroups and not inverse:
        turned = _of_pairs(*_pairs_of(turned, True), False)
    x1, x2 = _pairs_of(turned, by_turns)
    y = turned * cos + _of_pairs(-x2, x1, by_turns) * sin
    if regroups and inverse:
        y = _of_pairs(*_pairs_of(y, False), True)
    return y if size == x.shape[-1] else torch.cat((y, x[..., size:]), -1)


_Key = TypeVar("_Key", bound=torch.Tensor | None)


def rope_reference(
    q: torch.Tensor,
    k: _Key,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairs: str = "halves",
    tables: str = "each",
    casting: str = "promote",
    heads: int = 1,
) -> tuple[torch.Tensor, _Key]:
    """Computes the op in plain PyTorch."""
    form = rotation(pairs, tables, casting, heads)
    return form.rotate(q, cos, sin), cast(_Key, None if k is None else form.rotate(k, cos, sin))


def rotation(pairs: str, tables: str, casting: str, heads: int) -> Rotation:
    """Checks the options of `rope` and returns them as a `Rotation`."""
    key = pairs, tables, casting, heads
    try:
        form = _known.get(key)
    except TypeError:
        # An option that cannot be hashed is not allowed either; `_checked` names it in its error.
        form = None
    if form is None:
        form = _checked(*key)
        if not torch.compiler.is_compiling():
            _known[key] = form
    return form


_known: dict[tuple[Any, ...], Rotation] = {}


def _checked(pairs: str, tables: str, casting: str, heads: int) -> Rotation:
    check_choice("pairs", pairs, PAIRS)
    check_choice("tables", tables, TABLES)
    check_choice("casting", casting, CASTINGS)
    if type(heads) is not int or heads not in (1, 2):
        raise ValueError(f"heads must be 1 or 2; got {heads!r}")
    if pairs == "regrouped" and tables == "each":
        raise ValueError("tables must be one of pair, first_half with pairs='regrouped'; got 'each'")
    reads, writes = int(pairs != "halves"), int(pairs == "interleaved")
    kind = writes if tables == "each" else 2
    forward, backward = (
        {"X_BY_TURNS": x, "Y_BY_TURNS": y, "TABLE": kind} for x, y in ((reads, writes), (writes, reads))
    )
    return Rotation(pairs, tables, casting, heads, (forward, backward))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. BY_TURNS: pairs are (2i, 2i + 1), else (i, i + HALF). TABLE: 0 has one number per element, in halves; 1 the
# same, interleaved; 2 one number per pair. REST: the number of elements of a head after 2 HALF, which are copied.
# ---------------------------------------------------------------------------------------------------------------------


@jit
def _mask(left, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    return (tl.arange(0, ROWS)[:, None] < left) & (tl.arange(0, COLS)[None, :] < WIDTH)


@jit
def _columns(pointer, row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns pointers `[ROWS, COLS]` to columns of successive tokens."""
    return pointer + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, COLS)[None, :]


@jit
def _split(both, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Splits a tile `[ROWS, 2 COLS]` of interleaved pairs into both members, in fp32."""
    x1, x2 = tl.split(tl.reshape(both, (ROWS, COLS, 2)))
    return x1.to(tl.float32), x2.to(tl.float32)


@jit
def _joined(y1, y2, dtype: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Joins both members into an interleaved tile, in the dtype of the output, which takes less space on the chip."""
    return tl.reshape(tl.join(y1.to(dtype), y2.to(dtype)), (ROWS, 2 * COLS))


@jit
def _load_pairs(x, row_stride, mask, left, BY_TURNS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
                COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Loads both members of the pairs of successive tokens, in fp32."""
    if BY_TURNS:
        # Load once with a wide access and split on the chip.
        at = _columns(x, row_stride, ROWS, 2 * COLS)
        return _split(load(at, _mask(left, 2 * HALF, ROWS, 2 * COLS), MASKED), ROWS, COLS)
    else:
        x1 = load_fp32(_columns(x, row_stride, ROWS, COLS), mask, MASKED)
        x2 = load_fp32(_columns(x + HALF, row_stride, ROWS, COLS), mask, MASKED)
        return x1, x2


@jit
def _load_table(table, row_stride, mask, left, TABLE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
                COLS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Loads the cosines or sines of both members."""
    if TABLE == 2:
        one = load_fp32(_columns(table, row_stride, ROWS, COLS), mask, MASKED)
        return one, one
    else:
        return _load_pairs(table, row_stride, mask, left, TABLE, HALF, ROWS, COLS, MASKED)


@jit
def rotated_pairs(x1, x2, c1, c2, s1, s2, INVERSE: tl.constexpr):
    """Rotates both members of the pairs in fp32."""
    if INVERSE:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    return y1, y2


@jit
def _rotate_tile(x, y, cos, sin, batch, token, n_tokens, n_heads, x_batch, x_head, x_token, y_batch, y_head, y_token,
                 cos_batch, cos_token, sin_batch, sin_token, INVERSE: tl.constexpr, X_BY_TURNS: tl.constexpr,
                 Y_BY_TURNS: tl.constexpr, TABLE: tl.constexpr, TAIL: tl.constexpr, HALF: tl.constexpr,
                 REST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                 REST_COLS: tl.constexpr):  # fmt: skip
    """Rotates all heads of the tokens at `token`, which share one read of cos and sin."""
    MASKED: tl.constexpr = TAIL or COLS != HALF
    left = n_tokens - token
    mask = _mask(left, HALF, ROWS, COLS)
    batch = tl.cast(batch, tl.int64)
    token = tl.cast(token, tl.int64)
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    c1, c2 = _load_table(cos, cos_token, mask, left, TABLE, HALF, ROWS, COLS, MASKED)
    s1, s2 = _load_table(sin, sin_token, mask, left, TABLE, HALF, ROWS, COLS, MASKED)
    x += batch * x_batch + token * x_token
    y += batch * y_batch + token * y_token
    for head in range(0, n_heads):
        x_at = x + tl.cast(head, tl.int64) * x_head
        y_at = y + tl.cast(head, tl.int64) * y_head
        x1, x2 = _load_pairs(x_at, x_token, mask, left, X_BY_TURNS, HALF, ROWS, COLS, MASKED)
        y1, y2 = rotated_pairs(x1, x2, c1, c2, s1, s2, INVERSE)
        if Y_BY_TURNS:
            both = _joined(y1, y2, y.dtype.element_ty, ROWS, COLS)
            store(_columns(y_at, y_token, ROWS, 2 * COLS), both, _mask(left, 2 * HALF, ROWS, 2 * COLS), MASKED)
        else:
            store(_columns(y_at, y_token, ROWS, COLS), y1, mask, MASKED)
            store(_columns(y_at + HALF, y_token, ROWS, COLS), y2, mask, MASKED)
        if REST:
            rest_mask = _mask(left, REST, ROWS, REST_COLS)
            rest = load(_columns(x_at + 2 * HALF, x_token, ROWS, REST_COLS), rest_mask, TAIL or REST_COLS != REST)
            store(_columns(y_at + 2 * HALF, y_token, ROWS, REST_COLS), rest, rest_mask, TAIL or REST_COLS != REST)


@jit(lengths=("n_batches", "n_tokens"))
def _rotate_kernel(
    x,  # [n_batches, n_heads, n_tokens, 2 HALF + REST] by strides, of which the last one is 1; likewise y
    y,
    cos,  # [n_batches, n_tokens, width that TABLE implies] by strides; likewise sin
    sin,
    n_batches,
    n_tokens,
    n_heads,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    INVERSE: tl.constexpr,
    X_BY_TURNS: tl.constexpr,
    Y_BY_TURNS: tl.constexpr,
    TABLE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
):
    whole = n_tokens // ROWS
    for task in range(tl.program_id(0), n_batches * whole, tl.num_programs(0)):
        batch = task // whole
        _rotate_tile(x, y, cos, sin, batch, (task - batch * whole) * ROWS, n_tokens, n_heads, x_batch, x_head, x_token,
                     y_batch, y_head, y_token, cos_batch, cos_token, sin_batch, sin_token, INVERSE, X_BY_TURNS,
                     Y_BY_TURNS, TABLE, False, HALF, REST, ROWS, COLS, REST_COLS)  # fmt: skip
    if whole * ROWS < n_tokens:
        # The tokens of each sequence that do not fill a tile. Start with the last program, which has the fewest tiles.
        for batch in range(tl.num_programs(0) - 1 - tl.program_id(0), n_batches, tl.num_programs(0)):
            _rotate_tile(x, y, cos, sin, batch, whole * ROWS, n_tokens, n_heads, x_batch, x_head, x_token, y_batch,
                         y_head, y_token, cos_batch, cos_token, sin_batch, sin_token, INVERSE, X_BY_TURNS, Y_BY_TURNS,
                         TABLE, True, HALF, REST, ROWS, COLS, REST_COLS)  # fmt: skip


@jit
def _head_group(q, k, q_head, k_head, INDEX: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
                WIDTH: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Returns pointers `[GROUP, COLS]` to the first columns of a token's heads in group INDEX (q's groups precede k's),
    and the mask of the heads and of the WIDTH columns that exist. A mask that is always true compiles to nothing."""
    Q_GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    cols = tl.arange(0, COLS)[None, :]
    if INDEX < Q_GROUPS:
        heads = tl.cast(INDEX * GROUP + tl.arange(0, GROUP)[:, None], tl.int64)
        return q + heads * q_head + cols, (heads < Q_HEADS) & (cols < WIDTH)
    else:
        heads = tl.cast((INDEX - Q_GROUPS) * GROUP + tl.arange(0, GROUP)[:, None], tl.int64)
        return k + heads * k_head + cols, (heads < K_HEADS) & (cols < WIDTH)


@jit
def _load_group_table(table, TABLE: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr):
    """Loads the cosines or sines of a token for a group of heads. The tile has a row for each head, so that each thread
    reads its own elements, 16 bytes at a time. A single row would be read 2 bytes at a time and pass through shared
    memory."""
    if TABLE == 1:
        wide = tl.broadcast_to(tl.arange(0, 2 * COLS)[None, :], (GROUP, 2 * COLS))
        return _split(load(table + wide, wide < 2 * HALF, COLS != HALF), GROUP, COLS)
    else:
        cols = tl.broadcast_to(tl.arange(0, COLS)[None, :], (GROUP, COLS))
        t1 = load_fp32(table + cols, cols < HALF, COLS != HALF)
        if TABLE == 2:
            return t1, t1
        return t1, load_fp32(table + HALF + cols, cols < HALF, COLS != HALF)


@jit
def _rotate_pair_kernel(
    q,  # [n_batches, Q_HEADS, n_tokens, 2 HALF + REST] by strides, of which the last one is 1
    k,  # likewise, with K_HEADS
    yq,  # written; q's shape
    yk,  # written; k's shape
    cos,  # [n_batches, n_tokens, width that TABLE implies] by strides; likewise sin
    sin,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    yq_batch,
    yq_head,
    yq_token,
    yk_batch,
    yk_head,
    yk_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    INVERSE: tl.constexpr,
    X_BY_TURNS: tl.constexpr,
    Y_BY_TURNS: tl.constexpr,
    TABLE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    PACKED: tl.constexpr,  # q, k, yq and yk have stride 2 HALF + REST between heads
):
    # A program rotates one token of q and k, GROUP heads at a time. It reads AHEAD groups before it writes the first.
    GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP + (K_HEADS + GROUP - 1) // GROUP
    if PACKED:
        # In most models the heads of a token are contiguous. With constant strides the compiler issues loads earlier.
        q_head = 2 * HALF + REST
        k_head = 2 * HALF + REST
        yq_head = 2 * HALF + REST
        yk_head = 2 * HALF + REST
    token = tl.cast(tl.program_id(0), tl.int64)
    batch = tl.cast(tl.program_id(1), tl.int64)
    q += batch * q_batch + token * q_token
    k += batch * k_batch + token * k_token
    yq += batch * yq_batch + token * yq_token
    yk += batch * yk_batch + token * yk_token
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    groups = tl.tuple([])
    rests = tl.tuple([])
    for i in tl.static_range(GROUPS + AHEAD):
        if i == AHEAD:
            c1, c2 = _load_group_table(cos, TABLE, HALF, GROUP, COLS)
            s1, s2 = _load_group_table(sin, TABLE, HALF, GROUP, COLS)
        if i < GROUPS:
            # Hold the loaded groups in registers in their dtype: bf16 needs half as many as fp32.
            if X_BY_TURNS:
                x, mask = _head_group(q, k, q_head, k_head, i, Q_HEADS, K_HEADS, 2 * HALF, GROUP, 2 * COLS)
                groups += ((tl.load(x, mask=mask),),)
            else:
                x, mask = _head_group(q, k, q_head, k_head, i, Q_HEADS, K_HEADS, HALF, GROUP, COLS)
                groups += ((tl.load(x, mask=mask), tl.load(x + HALF, mask=mask)),)
            if REST:
                x, mask = _head_group(q, k, q_head, k_head, i, Q_HEADS, K_HEADS, REST, GROUP, REST_COLS)
                rests += (tl.load(x + 2 * HALF, mask=mask),)
        if i >= AHEAD:
            if X_BY_TURNS:
                x1, x2 = _split(groups[i - AHEAD][0], GROUP, COLS)
            else:
                x1 = groups[i - AHEAD][0].to(tl.float32)
                x2 = groups[i - AHEAD][1].to(tl.float32)
            y1, y2 = rotated_pairs(x1, x2, c1, c2, s1, s2, INVERSE)
            if Y_BY_TURNS:
                y, mask = _head_group(yq, yk, yq_head, yk_head, i - AHEAD, Q_HEADS, K_HEADS, 2 * HALF, GROUP, 2 * COLS)
                store(y, _joined(y1, y2, y.dtype.element_ty, GROUP, COLS), mask, True)
            else:
                y, mask = _head_group(yq, yk, yq_head, yk_head, i - AHEAD, Q_HEADS, K_HEADS, HALF, GROUP, COLS)
                store(y, y1, mask, True)
                store(y + HALF, y2, mask, True)
            if REST:
                y, mask = _head_group(yq, yk, yq_head, yk_head, i - AHEAD, Q_HEADS, K_HEADS, REST, GROUP, REST_COLS)
                store(y + 2 * HALF, rests[i - AHEAD], mask, True)


# ---------------------------------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------------------------------


def _with_unit_stride(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride()[-1] == 1 else t.contiguous()


def _like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocates the output for t, with t's order of dimensions in memory."""
    return torch.empty_like(t) if t.dtype is dtype else torch.empty_like(t, dtype=dtype)


def _table_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Returns the strides between sequences (0 if they share one table) and between tokens."""
    return strides[0] if shape[0] > 1 else 0, strides[1]


# The maximum of a CUDA grid's second dimension.
_MOST_BATCHES = (1 << 16) - 1


@functools.lru_cache(maxsize=1 << 10)
def _pair_plan(
    q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], q_strides: tuple[int, ...],
    k_strides: tuple[int, ...], cos_strides: tuple[int, ...], sin_strides: tuple[int, ...], form: Rotation,
    inverse: bool, tile: tiling.HeadsTile,
) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Returns the launch that rotates q and k of these shapes and strides: its grid, the strides of q and k and of the
    tables, and the constants for outputs with and without gaps between heads. All layers of a model share it."""
    n_batches, q_heads, n_tokens, size = form.sizes(q)
    k_heads = k[form.heads]
    half = form.rotated_size(cos[-1]) // 2
    rest = size - 2 * half
    of_q, of_k = form.strides(q_strides), form.strides(k_strides)
    constants = {
        "INVERSE": inverse, **form.flags[inverse], "HALF": half, "REST": rest, "Q_HEADS": q_heads, "K_HEADS": k_heads,
        "GROUP": tile.heads, "COLS": tile.cols, "REST_COLS": tiling.next_power_of_2(rest) if rest else 1,
        "AHEAD": tile.ahead, "PACKED": False, **tile.options,
    }  # fmt: skip
    packed = {**constants, "PACKED": of_q[1] == of_k[1] == size}
    tables = (*_table_strides(cos, cos_strides), *_table_strides(cos, sin_strides))
    return (n_tokens, n_batches), (*of_q, *of_k), tables, constants, packed


def _rotate_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype],
    form: Rotation, inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotates q and k into the two dtypes of `dtypes`, in one launch if that is faster."""
    shape, k_shape, of_table, heads = q.shape, k.shape, cos.shape, form.heads
    half = form.rotated_size(of_table[2]) // 2
    tile = tiling.rope_pair_tile(shape[heads], k_shape[heads], half, device.spec(q.device))
    if tile is None or shape[0] > _MOST_BATCHES or 0 in shape or 0 in k_shape:
        return _rotate(q, cos, sin, dtypes[0], form, inverse), _rotate(k, cos, sin, dtypes[1], form, inverse)
    q, k = _with_unit_stride(q), _with_unit_stride(k)
    grid, strides, table_strides, constants, packed = _pair_plan(
        shape, k_shape, of_table, q.stride(), k.stride(), cos.stride(), sin.stride(), form, inverse, tile
    )
    yq, yk = _like(q, dtypes[0]), _like(k, dtypes[1])
    of_yq, of_yk = form.strides(yq.stride()), form.strides(yk.stride())
    launch(
        _rotate_pair_kernel, grid, (q, k, yq, yk, cos, sin, *strides, *of_yq, *of_yk, *table_strides),
        packed if of_yq[1] == of_yk[1] == shape[3] else constants,
    )  # fmt: skip
    return yq, yk


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, form: Rotation, inverse: bool
) -> torch.Tensor:
    """Rotates x into `dtype`. The result has x's order of dimensions in memory, as with elementwise operations."""
    x = _with_unit_stride(x)
    y = _like(x, dtype)
    if not x.numel():
        return y
    n_batches, n_heads, n_tokens, size = form.sizes(x.shape)
    half = form.rotated_size(cos.shape[-1]) // 2
    spec = device.spec(x.device)
    itemsize = max(x.dtype.itemsize, cos.dtype.itemsize, sin.dtype.itemsize)
    tile = tiling.rope_tile(half, size - 2 * half, itemsize, form.pairs != "halves", spec)
    launch(
        _rotate_kernel, (tiling.programs(n_batches * -(-n_tokens // tile.rows), spec),),
        (x, y, cos, sin, n_batches, n_tokens, n_heads, *form.strides(x.stride()), *form.strides(y.stride()),
         *_table_strides(cos.shape, cos.stride()), *_table_strides(sin.shape, sin.stride())),
        {"INVERSE": inverse, **form.flags[inverse], "HALF": half, "REST": size - 2 * half, "ROWS": tile.rows,
         "COLS": tile.cols, "REST_COLS": tile.rest_cols, **tile.options},
    )  # fmt: skip
    return y


@falls_back("rope")
def _forward(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, form: Rotation, backend: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if backend == "torch":
        return form.rotate(q, cos, sin), None if k is None else form.rotate(k, cos, sin)
    if backend == "vendor":
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return vendor.rotate(q, cos, sin), None if k is None else vendor.rotate(k, cos, sin)
    table = promoted(cos.dtype, sin.dtype)
    dtype = form.out_dtype(q.dtype, table)
    if k is None:
        return _rotate(q, cos, sin, dtype, form, False), None
    k_dtype = dtype if k.dtype is q.dtype else form.out_dtype(k.dtype, table)
    return _rotate_pair(q, k, cos, sin, (dtype, k_dtype), form, False)


@falls_back("rope")
def _backward(
    cos: torch.Tensor, sin: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype | None], form: Rotation, backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Returns the gradients of q and k in `dtypes`; None where dq or dk is None."""
    given = list(zip((dq, dk), dtypes, strict=True))
    if backend == "torch":
        # With casting "fp32" models convert x to fp32 first, so convert the gradient likewise.
        wide = form.casting == "fp32"
        q, k = (
            None if d is None else _turned(d.float() if wide else d, cos, sin, form, True).to(dtype)
            for d, dtype in given
        )
    elif backend == "vendor":
        c, (s1, s2) = cos.unsqueeze(1), sin.unsqueeze(1).chunk(2, -1)
        inverse = -torch.cat((s2, s1), -1)
        q, k = (None if d is None else vendor.rotate(d, c, inverse).to(dtype) for d, dtype in given)
    elif dq is not None and dk is not None:
        assert dtypes[1] is not None
        return _rotate_pair(dq, dk, cos, sin, (dtypes[0], dtypes[1]), form, True)
    else:
        q, k = (None if d is None or dtype is None else _rotate(d, cos, sin, dtype, form, True) for d, dtype in given)
    return q, k


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
                form: Rotation, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if backend != "torch":
            cos, sin = _with_unit_stride(cos), _with_unit_stride(sin)
        ctx.save_for_backward(cos, sin)
        ctx.options = (q.dtype, None if k is None else k.dtype), form, backend
        ctx.set_materialize_grads(False)
        return _forward(q, k, cos, sin, form, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        dq, dk = dq if needs_q else None, dk if needs_k else None
        dq, dk = _backward(cos, sin, dq, dk, *ctx.options)
        return dq, dk, None, None, None, None


def _check_table(name: str, table: torch.Tensor, batch: int, tokens: int, width: int) -> None:
    check_float(name, table)
    shape = table.shape
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] != tokens or shape[2] != width:
        raise ValueError(
            f"{name} must have shape [{batch} or 1, {tokens}, {width}], as q and cos say; got {list(shape)}"
        )
    if table.requires_grad:
        raise ValueError(f"{name} must not require a gradient: rope does not differentiate its tables")


def rope(
    q: torch.Tensor,
    k: _Key,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairs: str = "halves",
    tables: str = "each",
    casting: str = "promote",
    heads: int = 1,
    backend: str | None = None,
) -> tuple[torch.Tensor, _Key]:
    """Rotates queries and keys by position. The module's docstring has the formulas.

    Args:
        q: `[B, Hq, T, D]`, fp32, bf16 or fp16; any strides.
        k: `[B, Hkv, T, D]`, or None.
        cos: `[B or 1, T, R]`, or R / 2 with `tables="pair"`; R is even and at most D. The elements of a head after the
            first R are copied. It must not require a gradient.
        sin: likewise.
        pairs: which elements are rotated together: `"halves"`, `"interleaved"`, or `"regrouped"`, which reads
            interleaved pairs and returns halves.
        tables: the layout of the tables: `"each"`, one number per element; `"pair"`, one per pair; `"first_half"`, one
            per pair in the first half of R columns, of which the second half is not read.
        casting: the models' dtypes. `"promote"` computes in the promoted dtype of q (or k) and the tables and returns
            it; `"back"` computes likewise and returns q's dtype; `"fp32"` computes in fp32 and returns q's dtype. The
            kernel always computes in fp32.
        heads: the dimension of q and k that counts heads: 1, or 2 for `[B, T, H, D]`.
        backend: overrides the choice of `backends.choose`.

    Returns:
        Rotated q and k; None for k if it was None.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes that do not match, an R that is odd or larger than D, tables that require a gradient, an
            option that is not allowed, an unknown backend, a call that does not suit `backend="vendor"`.
    """
    form = rotation(pairs, tables, casting, heads)
    check_float("q", q)
    layout = "[B, H, T, D]" if heads == 1 else "[B, T, H, D]"
    shape = q.shape
    if len(shape) != 4 or not shape[-1]:
        raise ValueError(f"q must have shape {layout} with D at least 2; got {list(shape)}")
    batch, _, tokens, size = form.sizes(shape)
    if k is not None:
        check_float("k", k)
        n_keys, _, key_tokens, key_size = form.sizes(k.shape) if k.dim() == 4 else (0, 0, 0, 0)
        if n_keys != batch or key_tokens != tokens or key_size != size:
            raise ValueError(f"k must have q's shape {list(shape)} but for its heads, {layout}; got {list(k.shape)}")
    width = cos.shape[-1] if cos.dim() == 3 else 0
    size_rotated = form.rotated_size(width)
    if not 0 < size_rotated <= size or size_rotated % 2:
        raise ValueError(
            f"cos must have shape [{batch} or 1, {tokens}, {'R / 2' if tables == 'pair' else 'R'}] with R even and at "
            f"most {size}, as q says; got {list(cos.shape)}"
        )
    _check_table("cos", cos, batch, tokens, width)
    _check_table("sin", sin, batch, tokens, width)
    if unserved(q, cos, form, backend) is not None:
        backend = "torch"
    return rope_of_checked(q, k, cos, sin, form, backend)


def unserved(q: torch.Tensor, cos: torch.Tensor, form: Rotation, backend: str | None) -> str | None:
    """Returns why the kernel does not rotate these heads on their device unless a user asks for it by name; None if it
    does, or if `torch.compile` traces the call, which uses no kernels."""
    if torch.compiler.is_compiling():
        return None
    spec = device.spec(q.device)
    if not spec.has_buffer or backends.asked_for("rope", backend):
        return None
    half, size = form.rotated_size(cos.shape[-1]) // 2, q.shape[-1]
    itemsize = min(q.dtype.itemsize, cos.dtype.itemsize)
    return tiling.rope_unserved(half, size - 2 * half, itemsize, form.pairs != "halves", spec)


def rope_of_checked(
    q: torch.Tensor, k: _Key, cos: torch.Tensor, sin: torch.Tensor, form: Rotation, backend: str | None
) -> tuple[torch.Tensor, _Key]:
    """`rope` without its checks: the caller has checked dtypes and shapes and has called `unserved`."""
    where = q.device
    if cos.device != where or sin.device != where or (k is not None and k.device != where):
        check_same_device(q=q, k=k, cos=cos, sin=sin)

    def at() -> backends.Shape:
        batch, n_heads, tokens, size = form.sizes(q.shape)
        return q.dtype, batch * tokens, (n_heads, 0 if k is None else k.shape[form.heads], size)

    chosen = backends.choose("rope", where, backend, lambda: vendor.uncovered_rope(q, k, cos, sin, form), at=at)
    if chosen == "torch" and torch.compiler.is_compiling():
        return form.rotate(q, cos, sin), cast(_Key, None if k is None else form.rotate(k, cos, sin))
    return _Rope.apply(q, k, cos, sin, form, chosen)
