"""Attention of one query for each row to the first keys of the row's cache, as generation needs it.

    s_hj = cap(scale q_h k_j)            cap(s) = softcap tanh(s / softcap), or s          fp32
    p_hj = exp(s_hj - m_h) / l_h         m_h = max over j of s_hj          l_h = sum over j of exp(s_hj - m_h)
    o_h  = sum over j of p_hj v_j        rounded once, to q's dtype

for the keys j of `start .. length - 1` of a row, where start = max(0, length - window), or 0. Hq / Hk heads of q share
a head of keys. With sinks l_h has the term exp(sink_h - m_h), and m_h is at least sink_h. The kernels read neither keys
nor values of a row of length 0, and its output is zero.

The keys of a row are split into parts of equal length. Each part is the task of one program, for the heads of q that
share the keys. A program writes its own m, l and o' = sum of exp(s - m) v in fp32, and a second kernel merges parts i:

    m = max of m_i          l = sum of exp(m_i - m) l_i          o = sum of exp(m_i - m) o'_i / l

With one part the first kernel writes the output. The host knows how many parts there are, and the device finds where
they begin: only loops on the device depend on lengths. So a graph of the device may contain the op. No result depends
on the order of programs.
"""

from __future__ import annotations

import torch

from ... import backends, device, tiling
from ...support.opaque import opaque
from ...support.triton import INTERPRETED, jit, tl
from ..blocks import load
from ..checks import check_float, check_range, check_same_device, is_number
from ..fallback import falls_back
from ..head import transformed
from ..launch import launch
from .segments import Options

__all__ = ["attend_in_parts", "decode_attention", "decode_attention_reference"]


def decode_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the op in plain PyTorch, with a mask over all places of the cache. A device's graph may contain it."""
    return _by_mask(q, keys, values, lengths, sinks, _options(q, scale, window, softcap))


def _by_mask(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    rows, heads, size = q.shape
    places, ends = torch.arange(keys.shape[2], device=keys.device), lengths.unsqueeze(1)
    seen = places < ends
    if options.window is not None:
        seen = seen & (places >= ends - options.window)
    # The heads of q that share a head of keys become the rows of one product.
    grouped = q.reshape(rows, keys.shape[1], heads // keys.shape[1], size)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, *grouped.shape[1:3], 1).expand(rows, -1, -1, -1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        # Of a row without keys the softmax is NaN.
        p = scores.softmax(-1).masked_fill((ends < 1)[:, None, None], 0)
    # Places that no query sees may contain anything, and zero times NaN would be NaN.
    out = torch.matmul(p.to(values.dtype), values.masked_fill(~seen[:, None, :, None], 0))
    return out.view(rows, heads, values.shape[3])


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


# On CUDA a step multiplies on the matrix unit: its scores are a tile [HEADS, KEYS], and m, total (l of the formulas)
# and acc have a row for each head. On an NPU the matrix unit would have to pass the scores to the vector unit, for a
# few heads. There every key of a step is a *lane* with statistics of its own: m, total and acc have a row for each head
# and each key of a step, a step adds nothing up over keys, and the lanes are merged once, at the end. This needs only
# sums along the last and along the first of two axes: the library of the 910 has no sum along the axis between two
# others, and none along the last of three axes.


@jit
def _lanes(x, HEADS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr):
    """Returns `[HEADS * KEYS, COLS]` for a tile `[KEYS, COLS]`."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], [HEADS, KEYS, COLS]), [HEADS * KEYS, COLS])


@jit
def _step(
    q,  # [HEADS, COLS], or for lanes [HEADS * KEYS, COLS]
    keys,  # pointer to the first key of the step
    values,
    n_keys,  # keys of the step
    m, total, acc,
    key_stride, value_stride, inner, outer,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr, HAS_CAP: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds KEYS keys, or with MASKED the `n_keys` of them that exist, to the statistics m and total and to acc."""
    at = tl.arange(0, KEYS)
    cols, value_cols = tl.arange(0, COLS), tl.arange(0, VALUE_COLS)
    found = at[:, None] < n_keys
    k = load(
        keys + at[:, None] * key_stride + cols[None, :], found & (cols[None, :] < SIZE), MASKED or SIZE != COLS
    )  # fmt: skip
    v = load(
        values + at[:, None] * value_stride + value_cols[None, :], found & (value_cols[None, :] < VALUE_SIZE),
        MASKED or VALUE_SIZE != VALUE_COLS,
    )  # fmt: skip
    if WIDE:
        k, v = k.to(tl.float32), v.to(tl.float32)
    if DOT:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = transformed(s, inner, outer, HAS_CAP, False)
        if MASKED:
            s = tl.where(at[None, :] < n_keys, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1), propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp(s - m_new[:, None])
        fall = tl.exp(m - m_new)
        total = total * fall + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fall[:, None], input_precision="ieee")
    else:
        s = tl.sum(q * _lanes(k, HEADS, KEYS, COLS), axis=1)
        s = transformed(s, inner, outer, HAS_CAP, False)
        if MASKED:
            lane = tl.reshape(tl.broadcast_to(at[None, :], [HEADS, KEYS]), [HEADS * KEYS])
            s = tl.where(lane < n_keys, s, -float("inf"))
        m_new = tl.maximum(m, s, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp(s - m_new)
        fall = tl.exp(m - m_new)
        total = total * fall + p
        acc = acc * fall[:, None] + p[:, None] * _lanes(v, HEADS, KEYS, VALUE_COLS)
    return m_new, total, acc


@jit
def _write(
    heads,  # [ROWS], of the group
    m, total,  # [ROWS, 1] or [ROWS, VALUE_COLS]
    acc,  # [ROWS, VALUE_COLS]
    sinks, out, statistics, sums, pair, group, split, n_statistics, GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_COLS: tl.constexpr, SPLITS: tl.constexpr, COPIES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Writes the output of some heads or, if a row has several parts, what this part adds to it."""
    cols = tl.arange(0, VALUE_COLS)[None, :]
    real = heads < GROUP
    stored = real[:, None] & (cols < VALUE_SIZE)
    if HAS_SINKS:  # noqa: SIM102  a constant: without sinks nothing of the branch is compiled
        # The first part has the sink, as if it were a key whose value is zero.
        if split == 0:
            sink = tl.load(sinks + group * GROUP + heads, mask=real, other=0.0).to(tl.float32)[:, None]
            m_new = tl.maximum(m, sink, propagate_nan=tl.PropagateNan.ALL)
            fall = tl.exp(m - m_new)
            total = total * fall + tl.exp(sink - m_new)
            acc = acc * fall
            m = m_new
    if SPLITS == 1:
        # Only of a row without keys total is zero.
        acc = acc / tl.where(total > 0, total, 1.0)
        tl.store(out + (pair * GROUP + heads[:, None]) * VALUE_SIZE + cols, acc.to(out.dtype.element_ty), mask=stored)
    else:
        at = (pair * GROUP + heads) * SPLITS + split
        if COPIES == 1:
            tl.store(statistics + at, tl.max(m, axis=1), mask=real)
            tl.store(statistics + n_statistics + at, tl.max(total, axis=1), mask=real)
        else:
            copies = real[:, None] & (cols < COPIES)
            tl.store(statistics + at[:, None] * COPIES + cols, m, mask=copies)
            tl.store(statistics + n_statistics + at[:, None] * COPIES + cols, total, mask=copies)
        tl.store(sums + at[:, None] * VALUE_SIZE + cols, acc, mask=stored)


@jit
def _attend(
    task, q, keys, values, lengths, sinks, out, statistics, sums, q_row, q_head, key_row, key_head, key_stride,
    value_row, value_head, value_stride, n_tasks, window, inner, outer, N_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr, SPLITS: tl.constexpr, COPIES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Computes one part of one row for HEADS heads of q that share one head of keys."""
    PIECES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ROWS: tl.constexpr = HEADS if DOT else HEADS * KEYS
    split = task % SPLITS
    piece = task // SPLITS % PIECES
    pair = task // (SPLITS * PIECES)
    row = tl.cast(pair // N_GROUPS, tl.int64)
    group = tl.cast(pair % N_GROUPS, tl.int64)
    length = tl.load(lengths + row)
    start = 0
    if HAS_WINDOW:
        start = tl.where(length > window, length - window, 0)
    # Parts begin at multiples of a step after `start`; the last ones may be empty.
    each = ((length - start + KEYS - 1) // KEYS + SPLITS - 1) // SPLITS * KEYS
    first = start + split * each
    end = tl.where(first + each < length, first + each, length)

    heads = piece * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    at_q = q + row * q_row + (group * GROUP + heads[:, None]) * q_head + cols[None, :]
    queries = load(at_q, (heads[:, None] < GROUP) & (cols[None, :] < SIZE), GROUP % HEADS != 0 or SIZE != COLS)
    if WIDE:
        queries = queries.to(tl.float32)
    if not DOT:
        queries = tl.reshape(tl.broadcast_to(queries[:, None, :], [HEADS, KEYS, COLS]), [ROWS, COLS])
    keys += row * key_row + group * key_head
    values += row * value_row + group * value_head
    # m is finite where there are no keys, so that no difference is NaN.
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_COLS], tl.float32)
    whole = first
    if not DOT:
        # On an NPU a mask costs as much as the arithmetic, so only the rest of the keys has one.
        whole = first + tl.where(end > first, end - first, 0) // KEYS * KEYS
        for at in range(first, whole, KEYS):
            place = tl.cast(at, tl.int64)
            m, total, acc = _step(
                queries, keys + place * key_stride, values + place * value_stride, end - at, m, total, acc, key_stride,
                value_stride, inner, outer, SIZE, VALUE_SIZE, HEADS, KEYS, COLS, VALUE_COLS, HAS_CAP, False, DOT, WIDE,
            )  # fmt: skip
    for at in range(whole, end, KEYS):
        place = tl.cast(at, tl.int64)
        m, total, acc = _step(
            queries, keys + place * key_stride, values + place * value_stride, end - at, m, total, acc, key_stride,
            value_stride, inner, outer, SIZE, VALUE_SIZE, HEADS, KEYS, COLS, VALUE_COLS, HAS_CAP, True, DOT, WIDE,
        )  # fmt: skip

    n_statistics = n_tasks // PIECES * GROUP * COPIES
    if DOT:
        _write(heads, m[:, None], total[:, None], acc, sinks, out, statistics, sums, pair, group, split, n_statistics,
               GROUP, VALUE_SIZE, VALUE_COLS, SPLITS, COPIES, HAS_SINKS)  # fmt: skip
    else:
        # One head after another. The lanes of other heads weigh nothing. Statistics are as wide as the sum, because
        # scalars would stall an NPU.
        lanes = tl.arange(0, ROWS)
        for head in range(0, HEADS):
            own = (lanes >= head * KEYS) & (lanes < head * KEYS + KEYS)
            m_own = tl.broadcast_to(tl.where(own, m, LOWEST)[:, None], [ROWS, VALUE_COLS])
            l_own = tl.broadcast_to(tl.where(own, total, 0.0)[:, None], [ROWS, VALUE_COLS])
            top = tl.max(m_own, axis=0)[None, :]
            weight = tl.exp(m_own - top)
            _write(piece * HEADS + head + tl.arange(0, 1), top, tl.sum(weight * l_own, axis=0)[None, :],
                   tl.sum(weight * acc, axis=0)[None, :], sinks, out, statistics, sums, pair, group, split,
                   n_statistics, GROUP, VALUE_SIZE, VALUE_COLS, SPLITS, COPIES, HAS_SINKS)  # fmt: skip


@jit(lengths=("n_tasks", "window"))
def _attend_kernel(
    q,  # [B, Hq, SIZE] with strides q_row, q_head
    keys,  # [B, N_GROUPS, L, SIZE] with strides key_row, key_head, key_stride
    values,  # [B, N_GROUPS, L, VALUE_SIZE] likewise
    lengths,  # [B] int32
    sinks,  # [Hq], or anything without HAS_SINKS
    out,  # [B, Hq, VALUE_SIZE] contiguous, written with one split
    statistics,  # [2, B, Hq, SPLITS, COPIES] fp32, m and total, written with several
    sums,  # [B, Hq, SPLITS, VALUE_SIZE] fp32, likewise
    q_row,
    q_head,
    key_row,
    key_head,
    key_stride,
    value_row,
    value_head,
    value_stride,
    n_tasks,  # B * N_GROUPS * SPLITS * (the number of programs for the heads of a group)
    window,
    inner,
    outer,
    N_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    COLS: tl.constexpr,
    VALUE_COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    COPIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    LOWEST: tl.constexpr,
):
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        _attend(task, q, keys, values, lengths, sinks, out, statistics, sums, q_row, q_head, key_row, key_head,
                key_stride, value_row, value_head, value_stride, n_tasks, window, inner, outer, N_GROUPS, GROUP, SIZE,
                VALUE_SIZE, HEADS, KEYS, COLS, VALUE_COLS, SPLITS, COPIES, HAS_WINDOW, HAS_SINKS,
                HAS_CAP, DOT, WIDE, LOWEST)  # fmt: skip


@jit(lengths=("n_heads",))
def _merge_kernel(
    statistics,  # [2, n_heads, SPLITS, COPIES] fp32
    sums,  # [n_heads, SPLITS, SIZE] fp32
    out,  # [n_heads, SIZE]
    n_heads,  # B * Hq
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    COPIES: tl.constexpr,
):
    # All values are tiles of at least one dimension: an NPU's scalar unit would wait for each scalar.
    parts = tl.arange(0, SPLITS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    n_statistics = tl.cast(n_heads, tl.int64) * SPLITS * COPIES
    for head in range(tl.program_id(0), n_heads, tl.num_programs(0)):
        at = tl.cast(head, tl.int64) * SPLITS + parts
        copies = statistics + at * COPIES + tl.arange(0, COPIES)[None, :]
        m = tl.max(tl.load(copies), axis=1)[:, None]
        totals = tl.max(tl.load(copies + n_statistics), axis=1)[:, None]
        top = tl.max(m, axis=0)[None, :]
        weight = tl.exp(m - top)
        total = tl.sum(weight * totals, axis=0)[None, :]
        part = load(sums + at * SIZE + cols, cols < SIZE, SIZE != COLS)
        # Only of a row without keys the total is zero.
        merged = tl.sum(weight * part, axis=0)[None, :] / tl.where(total > 0, total, 1.0)
        target = out + tl.cast(head, tl.int64) * SIZE + cols
        tl.store(target, merged.to(out.dtype.element_ty), mask=cols < SIZE)


_LOWEST = torch.finfo(torch.float32).min


# ---------------------------------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------------------------------


def attend_in_parts(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor | None,
    options: Options, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes the op by its kernels, with the tile's number of parts of a row, or with `splits`, a power of two."""
    rows, heads, size = q.shape
    groups, capacity, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    out = q.new_empty(rows, heads, value_size)
    if not out.numel() or not capacity:
        return out.zero_()
    if q.stride(2) != 1:
        q = q.contiguous()
    spec = device.spec(q.device)
    narrow = options.window is not None and options.window < capacity
    most = options.window if narrow and options.window is not None else capacity
    group = heads // groups
    tile = tiling.decode_tile(group, size, value_size, q.element_size(), rows * groups, most, spec)
    splits = splits or tile.splits
    statistics = sums = out
    if splits > 1:
        statistics = q.new_empty(2, rows, heads, splits, tile.copies, dtype=torch.float32)
        sums = q.new_empty(rows, heads, splits, value_size, dtype=torch.float32)
    inner, outer, cap = options.scale, 1.0, 0
    if options.softcap is not None:
        inner, outer, cap = options.scale / options.softcap, options.softcap, 2 if device.has_libdevice(q.device) else 1
    if sinks is not None and not spec.has_warps:
        sinks = sinks.float()  # an NPU would convert each scalar on its vector unit, and wait
    tasks = rows * groups * -(-group // tile.heads) * splits
    launch(
        _attend_kernel, (tiling.programs(tasks, spec),),
        (q, keys, values, lengths, out if sinks is None else sinks, out, statistics, sums, q.stride(0), q.stride(1),
         *keys.stride()[:3], *values.stride()[:3], tasks, most, inner, outer),
        {"N_GROUPS": groups, "GROUP": group, "SIZE": size, "VALUE_SIZE": value_size, "HEADS": tile.heads,
         "KEYS": tile.keys, "COLS": tile.cols, "VALUE_COLS": tile.value_cols, "SPLITS": splits, "COPIES": tile.copies,
         "HAS_WINDOW": narrow, "HAS_SINKS": sinks is not None, "HAS_CAP": cap, "DOT": tile.dot,
         # The interpreter multiplies matrices of bf16 only as fp32.
         "WIDE": INTERPRETED or not tile.dot, "LOWEST": _LOWEST, **tile.options},
    )  # fmt: skip
    if splits > 1:
        launch(
            _merge_kernel, (tiling.programs(rows * heads, spec),), (statistics, sums, out, rows * heads),
            {"SIZE": value_size, "COLS": tile.value_cols, "SPLITS": splits, "COPIES": tile.copies,
             **tile.options},
        )  # fmt: skip
    return out


@falls_back("decode_attention")
def _computed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor | None,
    options: Options, backend: str,
) -> torch.Tensor:  # fmt: skip
    if backend == "torch":
        return _by_mask(q, keys, values, lengths, sinks, options)
    return attend_in_parts(q, keys, values, lengths, sinks, options)


def _options(q: torch.Tensor, scale: float | None, window: int | None, softcap: float | None) -> Options:
    return Options(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap)


def _check(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    given = [("q", q), ("keys", keys), ("values", values)]
    for name, tensor in given if sinks is None else [*given, ("sinks", sinks)]:
        check_float(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient, which decode_attention does not have; call it under "
                             "torch.no_grad(), or detach the tensor")  # fmt: skip
    if not isinstance(lengths, torch.Tensor) or lengths.dtype != torch.int32:
        got = lengths.dtype if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an int32 tensor; got {got}")
    check_same_device(q=q, keys=keys, values=values, lengths=lengths, sinks=sinks)
    if q.dim() != 3:
        raise ValueError(f"q must have shape [B, Hq, D]; got {list(q.shape)}")
    rows, heads, size = q.shape
    if keys.dim() != 4 or (keys.shape[0], keys.shape[3]) != (rows, size) or not keys.shape[1] or heads % keys.shape[1]:
        raise ValueError(
            f"keys must have shape [{rows}, Hk, L, {size}] with Hk a divisor of {heads}; got {list(keys.shape)}"
        )
    if values.dim() != 4 or values.shape[:3] != keys.shape[:3]:
        shape = ", ".join(map(str, keys.shape[:3]))
        raise ValueError(f"values must have shape [{shape}, Dv]; got {list(values.shape)}")
    if not q.dtype == keys.dtype == values.dtype:
        raise ValueError(f"q, keys and values must have one dtype; got {q.dtype}, {keys.dtype} and {values.dtype}")
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(f"{name} must be contiguous along its last dimension; got strides {list(tensor.stride())}")
    if lengths.shape != (rows,):
        raise ValueError(f"lengths must have shape [{rows}], one for each row; got {list(lengths.shape)}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape [{heads}], one for each head of q; got {list(sinks.shape)}")
    check_range("lengths", lengths, lengths.device, keys.shape[2] + 1)


def _check_options(options: Options) -> None:
    if not is_number(options.scale):
        raise ValueError(f"scale must be None or a finite number; got {options.scale!r}")
    if options.window is not None and (type(options.window) is not int or options.window < 1):
        raise ValueError(f"window must be None or a positive int; got {options.window!r}")
    if options.softcap is not None and not (is_number(options.softcap) and options.softcap > 0):
        raise ValueError(f"softcap must be None or a positive number; got {options.softcap!r}")


@opaque
def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes the attention of one query for each row to the first keys of the row. The module's docstring has the
    formulas. The op has no gradient. A device's graph may contain it, and then uses the lengths of each replay.

    Args:
        q: `[B, Hq, D]`, fp32, bf16 or fp16; any strides.
        keys: `[B, Hk, L, D]` in q's dtype, with Hk a divisor of Hq; the elements of a key are contiguous, and other
            strides are free.
        values: `[B, Hk, L, Dv]`, likewise.
        lengths: `[B]` int32, in 0 .. L: a row attends to its places 0 .. length - 1. On an accelerator the range is
            checked only with NPU_KERNELS_DEBUG=1.
        scale: factor of the scores; None for D ** -0.5.
        window: the maximum number of keys that a row attends to, which are its last ones; None for all.
        softcap: soft cap of the scaled scores, or None.
        sinks: `[Hq]`, one additional logit per head in the softmax, without a value; or None.
        backend: overrides the choice of `backends.choose`.

    Returns:
        `[B, Hq, Dv]` in q's dtype, contiguous; zeros for a row of length 0.

    Raises:
        TypeError: a dtype that is not allowed.
        ValueError: shapes, dtypes or strides that do not match, an option or a length out of range, a tensor that
            requires a gradient, an unknown backend.
    """
    _check(q, keys, values, lengths, sinks)
    options = _options(q, scale, window, softcap)
    _check_options(options)

    def at() -> backends.Shape:
        return q.dtype, q.shape[0] * keys.shape[2], (q.shape[1], keys.shape[1], q.shape[2])

    chosen = backends.choose("decode_attention", q.device, backend, at=at)
    return _computed(q, keys, values, lengths, sinks, options, chosen)
