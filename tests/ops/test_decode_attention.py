"""The attention of generation, and the writing of its cache, against loops over rows and heads."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

from npu_trainer_kernels import ops, tiling
from npu_trainer_kernels.device import KIB, DeviceSpec
from npu_trainer_kernels.ops import append_to_cache, decode_attention, launch
from tests.closeness import assert_op_close
from tests.conftest import DEVICE
from tests.ops.test_shared_rows import Waits
from tests.pairs import pairs

# The package's name for it is the function.
op = import_module("npu_trainer_kernels.ops.attention.decode_attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CAPACITY = 40
LENGTHS = (0, 1, CAPACITY, 3, 17, 33)
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "a window wider than most rows": {"window": 32},
    "a window wider than all": {"window": 100},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "softcap and window": {"softcap": 2.0, "window": 9},
}
# (Hq, Hk): groups of one, of two, of three, and one group of all.
HEADS = [(4, 4), (4, 2), (6, 2), (8, 1)]


# ---------------------------------------------------------------------------------------------------------------------
# The reference, and tiles
# ---------------------------------------------------------------------------------------------------------------------


def row_by_row(q, keys, values, lengths, sinks=None, *, scale=None, window=None, softcap=None):
    """One head of one row after another, with the keys that it sees cut out of the cache."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], values.shape[3])
    for row, length in enumerate(lengths.tolist()):
        start = 0 if window is None else max(0, length - window)
        for head in range(q.shape[1] if length else 0):
            of_keys = head * keys.shape[1] // q.shape[1]
            k, v = (t[row, of_keys, start:length] for t in (keys, values))
            scores = (k @ q[row, head]).to(exact) * (q.shape[2] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].to(exact)))
            out[row, head] = scores.softmax(0)[: length - start].to(v.dtype) @ v
    return out


def tile_of(splits: int, dot: bool, heads: int | None = None) -> Callable[..., tiling.DecodeTile]:
    """A tile function with so many parts of a row, on the matrix unit or beside it, and so many heads of a group.
    Beside it a part writes its statistics as often as on an NPU, if values have so many columns."""
    original = tiling.decode_tile

    def tile(*args) -> tiling.DecodeTile:
        found = original(*args)
        if dot:
            wide = {name: max(16, getattr(found, name)) for name in ("heads", "keys", "cols", "value_cols")}
            return dataclasses.replace(found, splits=splits, dot=True, **wide)
        copies = min(8, found.value_cols)
        return dataclasses.replace(found, splits=splits, heads=heads or found.heads, copies=copies)

    return tile


WAYS = {
    "one part": (1, False),
    "parts of few heads": (4, False, 2),
    "dot": (1, True),
    "dot in parts": (8, True),
}


NAMES = ["torch", *(["its own tile"] if DEVICE != "cpu" else WAYS)]


@pytest.fixture(params=NAMES)
def way(request, monkeypatch) -> str:
    """A backend, Triton's with each kind of tile."""
    if request.param in WAYS:
        monkeypatch.setattr(tiling, "decode_tile", tile_of(*WAYS[request.param]))
    return "torch" if request.param == "torch" else "triton"


def tensors(device, dtype=torch.float32, heads=(4, 2), size=8, value_size=12, lengths=LENGTHS, sinks=False):
    """q, keys, values, lengths and perhaps sinks. The cache has NaN wherever no row may read."""
    rows = len(lengths)
    shapes = [(rows, heads[0], size), (rows, heads[1], CAPACITY, size), (rows, heads[1], CAPACITY, value_size)]
    q, keys, values = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    for row, length in enumerate(lengths):
        keys[row, :, length:] = values[row, :, length:] = math.nan
    given = [q, keys, values, torch.tensor(lengths, dtype=torch.int32, device=device)]
    return [*given, torch.randn(heads[0], device=device).to(dtype)] if sinks else given


def check(given, backend, **options):
    def ours(q, keys, values, lengths, sinks=None):
        return decode_attention(q, keys, values, lengths, sinks=sinks, backend=backend, **options)

    def reference(*given):
        return row_by_row(*given, **options)

    assert_op_close(ours, reference, given)


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "heads", "sinks", "way"),
    pairs(list(OPTIONS), DTYPES, HEADS, [False, True], NAMES),
    indirect=["way"],
    ids=str,
)
def test_options_dtypes_and_heads(options, dtype, heads, sinks, way, device):
    check(tensors(device, dtype, heads, size=16, sinks=sinks), way, **OPTIONS[options])


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 8), (5, 24), (1, 1)])
def test_sizes_of_heads(size, value_size, way, device):
    check(tensors(device, size=size, value_size=value_size), way)


@pytest.mark.parametrize(
    ("lengths", "sinks", "way"),
    pairs([(0,), (1,), (CAPACITY,), (7,), (0, 0, 0), (CAPACITY,) * 3], [False, True], NAMES),
    indirect=["way"],
    ids=str,
)
def test_lengths(lengths, sinks, way, device):
    check(tensors(device, heads=(8, 4), lengths=lengths, sinks=sinks), way)


def test_a_row_without_keys_is_zero(way, device):
    for given in (tensors(device), tensors(device, sinks=True)):
        sinks = given[4] if len(given) > 4 else None
        out = decode_attention(*given[:4], sinks=sinks, backend=way)
        dead = given[3] == 0
        assert not out[dead].any()
        assert out[~dead].all()


def test_large_scores(way, device):
    """Scores whose exponentials overflow, the largest last or in the middle of a row; sinks likewise."""
    q, keys, values, lengths, sinks = tensors(device, sinks=True)
    peak = torch.linspace(-300, 300, CAPACITY, device=device)
    for shift in (0, 13):
        check([q, keys * peak.roll(shift)[:, None], values, lengths], way)
        check([q, keys * peak.roll(shift)[:, None], values, lengths, sinks * 200], way)


@pytest.mark.parametrize("layout", ["tokens first", "parts of a wider cache", "keys and values in one tensor"])
def test_strides(layout, way, device):
    q, keys, values, lengths = tensors(device, value_size=8)
    expected = decode_attention(q, keys, values, lengths, backend=way)
    if layout == "tokens first":
        keys, values = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, values))
    elif layout == "parts of a wider cache":
        keys, values = (
            torch.nn.functional.pad(t, (3, 5, 2, 7), value=math.nan)[:, :, 2:-7, 3:-5] for t in (keys, values)
        )
    else:
        keys, values = torch.stack((keys, values), 3).unbind(3)
    assert not keys.is_contiguous()
    # Queries as a projection makes them, and some whose elements are apart.
    for each in (q, torch.cat((q, q), 2)[:, :, :8], q.transpose(1, 2).contiguous().transpose(1, 2)):
        if way == "torch":  # PyTorch's products round by the layout of what they are given
            check([each, keys, values, lengths], way)
        else:
            assert torch.equal(decode_attention(each, keys, values, lengths, backend=way), expected)


def test_the_package_reference(device):
    given = tensors(device, sinks=True)
    for options in OPTIONS.values():
        found = ops.decode_attention_reference(*given[:4], sinks=given[4], **options)
        torch.testing.assert_close(found, row_by_row(*given, **options))


def test_the_same_bits_every_time(way, device):
    given = tensors(device, torch.bfloat16, sinks=True)
    first, *others = (decode_attention(*given[:4], sinks=given[4], backend=way) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


def test_a_row_alone_has_the_bits_that_it_has_among_others(way, device):
    q, keys, values, lengths = tensors(device)
    whole = decode_attention(q, keys, values, lengths, backend=way)
    if way == "triton":
        alone = decode_attention(q[4:5], keys[4:5], values[4:5], lengths[4:5], backend=way)
        assert torch.equal(whole[4:5], alone)


def test_of_no_row(device, backend):
    q, keys, values, lengths = tensors(device)
    assert decode_attention(q[:0], keys[:0], values[:0], lengths[:0], backend=backend).shape == (0, 4, 12)


# ---------------------------------------------------------------------------------------------------------------------
# What a graph of the device requires
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches() -> Iterator[list[tuple[str, tuple, tuple, dict]]]:
    """Name, grid, numbers and constants of every launch inside the test."""
    found = []

    def spy(kernel, grid, args, constexprs):
        numbers = tuple(a for a in args if not isinstance(a, torch.Tensor))
        found.append((kernel.__name__, grid, numbers, constexprs))
        launch._run(kernel, grid, args, constexprs)

    with launch.use_launcher(spy):
        yield found


class WaitsOfMasks(Waits):
    """Counts also indices that are masks: a device finds out on the way how many elements they take."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::index"):
            masks = (t for t in args[1] if isinstance(t, torch.Tensor) and t.dtype == torch.bool)
            self.found += [func._schema.name for _ in masks]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("options", ["plain", "window 5", "softcap"])
def test_nothing_waits_for_the_device_or_depends_on_lengths(options, way, device, launches, monkeypatch):
    # On a CPU the range of lengths is checked, which reads them.
    for module in (op, import_module("npu_trainer_kernels.ops.attention.append_to_cache")):
        monkeypatch.setattr(module, "check_range", lambda *given: None)
    q, keys, values, lengths = (t.nan_to_num(1.0) for t in tensors(device))
    k, v = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, 12, device=device)

    def step(lengths):
        launches.clear()
        with WaitsOfMasks() as waits:
            append_to_cache(k, v, keys, values, lengths - 1, backend=way)
            decode_attention(q, keys, values, lengths, backend=way, **OPTIONS[options])
        assert waits.found == []
        return list(launches)

    first = step(lengths)
    assert first == step(torch.zeros_like(lengths)) == step(torch.full_like(lengths, CAPACITY))
    assert bool(first) == (way == "triton")


def test_one_part_is_one_launch(device, launches, monkeypatch):
    given = tensors(device)
    for splits, names in ((1, ["_attend_kernel"]), (2, ["_attend_kernel", "_merge_kernel"])):
        with monkeypatch.context() as patch:
            patch.setattr(tiling, "decode_tile", tile_of(splits, DEVICE != "cpu"))
            launches.clear()
            decode_attention(*given, backend="triton")
        assert [name for name, *_ in launches] == names


def test_of_a_window_no_more_parts_than_its_keys_need():
    spec = DeviceSpec("cuda", "NVIDIA H200", 132, 256 * KIB)
    assert tiling.decode_tile(8, 64, 64, 2, 64, 4096, spec).splits == 8
    assert tiling.decode_tile(8, 64, 64, 2, 64, 128, spec).splits == 1


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_append(heads, dtype, places_dtype, device, backend):
    places = torch.tensor([3, -1, 0, 9, -7], dtype=places_dtype, device=device)
    keys, values = (torch.randn(5, heads, 10, size, device=device).to(dtype) for size in (8, 12))
    k, v = (torch.randn(5, heads, size, device=device).to(dtype) for size in (8, 12))
    expected = keys.clone(), values.clone()
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            expected[0][row, :, place], expected[1][row, :, place] = k[row], v[row]
    assert append_to_cache(k, v, keys, values, places, backend=backend) is None
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_append_to_strided_tensors(device, backend):
    places = torch.tensor([2, -1, 5], device=device)
    whole = torch.randn(3, 6, 2, 4, 8, device=device)  # tokens first, keys and values of a head beside each other
    expected = whole.clone()
    keys, values = (whole[:, :, i].transpose(1, 2) for i in (0, 1))
    k, v = torch.randn(3, 8, 4, device=device).transpose(1, 2), torch.randn(3, 4, 16, device=device)[:, :, ::2]
    expected[0, 2], expected[2, 5] = (torch.stack((k[row], v[row])) for row in (0, 2))
    append_to_cache(k, v, keys, values, places, backend=backend)
    assert torch.equal(whole, expected)


def test_append_of_no_row(device, backend):
    k, cache = torch.zeros(0, 2, 8, device=device), torch.zeros(0, 2, 4, 8, device=device)
    append_to_cache(k, k, cache, cache, torch.zeros(0, dtype=torch.int32, device=device), backend=backend)


def test_steps_of_generation(way, device):
    """A cache that is filled token by token gives what attention to all tokens gives."""
    tokens = [torch.randn(6, 2, heads, 8, device=device) for heads in (4, 2, 2)]
    keys, values = (torch.full((2, 2, 8, 8), math.nan, device=device) for _ in range(2))
    for step, (q, k, v) in enumerate(zip(*tokens, strict=True)):
        places = torch.tensor([step, step - 2], dtype=torch.int32, device=device)  # the second row starts later
        append_to_cache(k, v, keys, values, places, backend=way)
        out = decode_attention(q, keys, values, (places + 1).clamp(min=0), window=3, backend=way)
        for row, first in ((0, 0), (1, 2)):
            seen = slice(max(first, step - 2), step + 1)
            k_seen, v_seen = (t[seen, row].transpose(0, 1).repeat_interleave(2, 0) for t in tokens[1:])
            expected = torch.nn.functional.scaled_dot_product_attention(q[row].unsqueeze(1), k_seen, v_seen).squeeze(1)
            torch.testing.assert_close(out[row], expected if step >= first else torch.zeros_like(expected))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(6, 8)}, ValueError, r"q must have shape \[B, Hq, D\]; got \[6, 8\]"),
        ({"q": torch.zeros(6, 4, 8).int()}, TypeError, "q must be float32, bfloat16 or float16; got torch.int32"),
        ({"q": torch.zeros(6, 4, 8).double()}, TypeError, "q must be float32, bfloat16 or float16; got torch.float64"),
        ({"q": None}, TypeError, "q must be a tensor; got NoneType"),
        ({"q": torch.zeros(6, 4, 8, requires_grad=True)}, ValueError, "q must not require a gradient"),
        ({"keys": torch.zeros(6, 3, 40, 8)}, ValueError, r"keys must have shape \[6, Hk, L, 8\] with Hk a div"),
        ({"keys": torch.zeros(7, 2, 40, 8)}, ValueError, r"keys must have shape .* got \[7, 2, 40, 8\]"),
        ({"keys": torch.zeros(6, 2, 40, 4)}, ValueError, "keys must have shape"),
        ({"keys": torch.zeros(6, 0, 40, 8)}, ValueError, "keys must have shape"),
        ({"keys": torch.zeros(6, 2, 8, 40).mT}, ValueError, "keys must be contiguous along its last dim.*; got str"),
        ({"values": torch.zeros(6, 2, 39, 8)}, ValueError, r"values must have shape \[6, 2, 40, Dv\]; got \[6, 2, 39"),
        ({"values": torch.zeros(6, 2, 40, 8).half()}, ValueError, "q, keys and values must have one dtype; got"),
        ({"values": torch.zeros(6, 2, 8, 40).mT}, ValueError, "values must be contiguous along its last dimension"),
        ({"lengths": torch.zeros(6).long()}, TypeError, "lengths must be an int32 tensor; got torch.int64"),
        ({"lengths": [1] * 6}, TypeError, "lengths must be an int32 tensor; got list"),
        ({"lengths": torch.zeros(7).int()}, ValueError, r"lengths must have shape \[6\], one for each row; got \[7\]"),
        ({"lengths": torch.full((6,), 41).int()}, ValueError, r"lengths must lie in \[0, 41\); got .* from 41 to 41"),
        ({"lengths": torch.full((6,), -1).int()}, ValueError, r"lengths must lie in \[0, 41\); got .* from -1 to -1"),
        ({"lengths": torch.zeros(6, device="meta").int()}, ValueError, "all tensors must be on one device"),
        ({"sinks": torch.zeros(6)}, ValueError, r"sinks must have shape \[4\], one for each head of q; got \[6\]"),
        ({"window": 0}, ValueError, "window must be None or a positive int; got 0"),
        ({"window": 2.0}, ValueError, "window must be None or a positive int; got 2.0"),
        ({"softcap": 0.0}, ValueError, "softcap must be None or a positive number; got 0.0"),
        ({"scale": math.inf}, ValueError, "scale must be None or a finite number; got inf"),
        ({"backend": "cudnn"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, error, message):
    given = dict(zip(("q", "keys", "values", "lengths"), tensors("cpu"), strict=True)) | changes
    with pytest.raises(error, match=message):
        decode_attention(**given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(5, 8)}, ValueError, r"k must have shape \[B, Hk, D\]; got \[5, 8\]"),
        ({"k": torch.zeros(5, 2, 8).int()}, TypeError, "k must be float32, bfloat16 or float16; got torch.int32"),
        ({"v": torch.zeros(5, 2, 8).half()}, ValueError, "values must have v's dtype torch.float16; got torch.float32"),
        ({"v": torch.zeros(5, 2, 8, requires_grad=True)}, ValueError, "v must not require a gradient"),
        ({"keys": torch.zeros(5, 3, 6, 8)}, ValueError, r"keys must have shape \[5, 2, L, 8\]; got \[5, 3, 6, 8\]"),
        ({"keys": torch.zeros(5, 2, 8, 6).mT}, ValueError, "keys must be contiguous along its last dimension"),
        ({"values": torch.zeros(5, 2, 7, 8)}, ValueError, "v and values must have k's and keys' B, Hk and L"),
        ({"places": torch.zeros(5)}, TypeError, "places must be int64 or int32; got torch.float32"),
        ({"places": torch.zeros(4).int()}, ValueError, r"places must have shape \[5\], one for each row; got \[4\]"),
        ({"places": torch.full((5,), 6)}, ValueError, r"places .* must lie in \[0, 6\); got values from 6 to 6"),
        ({"backend": "cudnn"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments_of_append(changes, error, message):
    given = {
        "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8), "keys": torch.zeros(5, 2, 6, 8),
        "values": torch.zeros(5, 2, 6, 8), "places": torch.zeros(5).int(),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        append_to_cache(**(given | changes))


def test_without_gradients_parameters_are_taken(device, backend):
    q, keys, values, lengths = tensors(device)
    sinks = torch.nn.Parameter(torch.zeros(4, device=device))
    with pytest.raises(ValueError, match="sinks must not require a gradient"):
        decode_attention(q, keys, values, lengths, sinks=sinks, backend=backend)
    with torch.no_grad():
        decode_attention(q, keys, values, lengths, sinks=sinks, backend=backend)
