"""Attention by a table with bounds: the values and gradients of attention by lengths, and rows without room."""

import dataclasses
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from npu_trainer_kernels.ops import varlen_attention
from npu_trainer_kernels.ops.attention import BoundedSegments, Room, needs_lengths, segment_kernels, table_of
from npu_trainer_kernels.ops.attention.shared_rows import take
from tests.ops.test_varlen_attention import LAYOUTS, OPTIONS, SHARED, Layout

# The package's name for it is the function.
varlen = import_module("npu_trainer_kernels.ops.attention.varlen_attention")
Given = tuple[list[int], list[int], np.ndarray | None]


def around(row: Room, *others: Room) -> Room:
    return Room.around(row, Room.bucket(row.tokens), others)


def given_of(layout: Layout) -> Given:
    lengths = list(layout.queries)
    if layout.keys is None:
        return lengths, lengths, None
    return lengths, [len(part) for part in layout.keys], np.array([row for part in layout.keys for row in part])


def outcome(layout: Layout, options: dict[str, Any], room: Room | None) -> list[torch.Tensor]:
    """The result of the row's own tokens and the gradients of q, k and v, and of sinks where there are some."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((layout.n, 4, 8), (layout.n, 2, 8), (layout.n, 2, 8))
    own = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(layout.n, 4, 8, generator=generator, dtype=torch.float64)
    options = {**options, "sinks": sinks if options.get("sinks") else None}
    wanted = [*own, *([] if options["sinks"] is None else [sinks])]
    if room is None:
        out = varlen_attention(*own, layout.segments("cpu"), **options)
    else:
        filling = [torch.full((room.tokens - layout.n, *t.shape[1:]), 3.0, dtype=t.dtype) for t in own]
        filled = [torch.cat(pair) for pair in zip(own, filling, strict=True)]
        segments = BoundedSegments(torch.from_numpy(table_of(room, *given_of(layout))), room)
        whole = varlen_attention(*filled, segments, **options)
        assert whole.isfinite().all()
        out = whole[: layout.n]
    return [out, *torch.autograd.grad(out, wanted, upstream)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("option", [*OPTIONS, "sinks"])
def test_values_and_gradients_are_those_of_lengths(name: str, option: str) -> None:
    layout, options = LAYOUTS[name], OPTIONS.get(option, {"sinks": True, "window": 3})
    row = Room.needed(*given_of(layout))
    expected = outcome(layout, options, None)
    tight = dataclasses.replace(row, segments=row.segments)
    wide = around(row)
    rooms = [tight, wide, dataclasses.replace(wide, longest=row.longest)]
    for room in rooms:
        assert room.for_row(row) is None
        for found, value in zip(outcome(layout, options, room), expected, strict=True):
            torch.testing.assert_close(found, value)


@pytest.mark.parametrize("bound", [each.name for each in dataclasses.fields(Room)])
def test_a_bound_that_is_too_small_is_refused(bound: str) -> None:
    given = given_of(SHARED)
    row = Room.needed(*given)
    table_of(row, *given)
    small = dataclasses.replace(row, **{bound: getattr(row, bound) - 1})
    with pytest.raises(ValueError, match=f"^{bound} must be at most {getattr(small, bound)}; the row needs"):
        table_of(small, *given)


def test_rows_with_keys_of_their_own_and_shared_ones_have_other_tables() -> None:
    row, other = Room.needed([3, 4], [3, 4], None), Room.needed(*given_of(SHARED))
    for one, two in ((row, other), (other, row)):
        assert around(one).for_row(two) == "its segments share keys, or a row's do not"
        assert not around(one).covers(around(two))


def test_bounds_grow_and_cover_what_they_covered() -> None:
    few, many = Room.needed([20, 30], [20, 30], None), Room.needed([3] * 20, [3] * 20, None)
    narrow = around(few)
    assert narrow.for_row(many) == "segments must be at most 16; the row needs 21"
    wide = around(many, narrow)
    assert wide.for_row(few) is wide.for_row(many) is None
    assert wide.covers(narrow)
    assert not narrow.covers(wide)


def test_gradients_of_keys_in_no_segment_are_not_read() -> None:
    """An attention kernel leaves there what the memory had before."""
    given = given_of(SHARED)
    room = dataclasses.replace(around(Room.needed(*given)), keys=256)
    segments = BoundedSegments(torch.from_numpy(table_of(room, *given)), room)
    x = torch.randn(room.tokens, 2, requires_grad=True)
    assert segments.keys is not None
    keys = take(x, segments.keys)
    upstream = torch.ones_like(keys)
    upstream[int(segments.cu_k[-1]) :] = torch.nan
    (found,) = torch.autograd.grad(keys, x, upstream)
    uses = np.bincount(np.concatenate([given[2], np.arange(SHARED.n, room.tokens)]))
    assert found[:, 0].tolist() == uses.tolist()


def test_rows_in_no_segment_get_what_is_no_number() -> None:
    room = Room(8, 2, 8)
    table = torch.tensor([0, 3, 5])
    q = torch.randn(8, 1, 8)
    out = varlen_attention(q, q, q, BoundedSegments(table, room))
    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()


@pytest.mark.parametrize(
    ("device", "dtype", "options", "reason"),
    [
        ("cpu", torch.float32, {"softcap": 2.0}, None),
        ("cuda", torch.bfloat16, {"window": 3, "sinks": True}, None),
        (
            "cuda",
            torch.float32,
            {},
            "no flash attention serves float32 with heads of 64, and others go by",
        ),
        ("cuda", torch.bfloat16, {"softcap": 2.0, "sinks": True}, "no flash attention serves bfloat16 with a soft cap"),
        ("cuda", torch.bfloat16, {"backend": "vendor"}, "torch_npu's attention takes the lengths of segments from"),
    ],
)
def test_attention_that_needs_lengths(
    device: str, dtype: torch.dtype, options: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_kernels.devices, "widest_flash_head", lambda _: 256)
    monkeypatch.setattr(varlen.backends, "explain", lambda *_: (options.get("backend", "torch"), ""))
    found = needs_lengths(torch.device(device), dtype, (64, 64), **options)
    assert found is None if reason is None else str(found).startswith(reason)
