"""The preparation of a token for the attention of generation, against the separate ops in plain PyTorch."""

from importlib import import_module

import pytest
import torch

from npu_trainer_kernels.ops import (
    QkNorm,
    launch,
    qk_norm_rope_append,
    rms_norm_reference,
    rope_reference,
)
from npu_trainer_kernels.ops.attention.qk_norm_rope_append import rotated_dtype
from npu_trainer_kernels.ops.norms import CASTINGS
from npu_trainer_kernels.ops.rope import CASTINGS as ROTATIONS
from npu_trainer_kernels.ops.rope import TABLES, rotation
from tests.closeness import assert_op_close
from tests.conftest import DEVICE
from tests.ops.test_shared_rows import Waits

op = import_module("npu_trainer_kernels.ops.attention.qk_norm_rope_append")
PLACES = (3, -1, 0, 9, -7)
ROWS, CAPACITY = len(PLACES), 10
# Heads of queries and of keys, with and without parts of a tile that do not exist.
HEADS = [(4, 4), (8, 2), (16, 8), (9, 3), (3, 1)]
# (D, R, Dv): whole heads rotated, a part of them, and sizes that no tile has.
SIZES = {"whole": (8, 8, 8), "a part": (16, 4, 12), "odd sizes": (20, 12, 6)}
NORMS = {
    "none": None,
    "llama": {"casting": "llama"},
    "gemma": {"casting": "gemma", "offset": 1.0, "eps": 1e-5},
    "rounded products": {"casting": "none", "eps": 1e-3},
    "llama with an offset": {"casting": "llama", "offset": 1.0},
}
# Of the heads, the weights, the tables and the cache: one for all; a model under autocast; a model in bf16 whose norms
# and tables are fp32.
F, B, H = torch.float32, torch.bfloat16, torch.float16
DTYPES = {
    "fp32": (F, F, F, F),
    "bf16": (B, B, B, B),
    "fp16": (H, H, H, H),
    "autocast": (B, F, F, B),
    "mixed": (B, B, F, B),
}


def inputs(device, heads=(8, 2), sizes="whole", dtypes=(F, F, F, F), table="each"):
    """q, k and v as views of one product, the tables and the weights of the norms."""
    (q_heads, k_heads), (size, rotated, value_size), (dtype, of_weight, of_table, _) = heads, SIZES[sizes], dtypes
    parts = [q_heads * size, k_heads * size, k_heads * value_size]
    product = torch.randn(ROWS, sum(parts), device=device).to(dtype)
    q, k, v = (
        part.unflatten(1, (-1, n)) for part, n in zip(product.split(parts, 1), (size, size, value_size), strict=True)
    )
    width = rotated // 2 if table == "pair" else rotated
    cos, sin = (torch.randn(ROWS, width, device=device).to(of_table) for _ in range(2))
    weights = [(torch.rand(size, device=device) + 0.5).to(of_weight) for _ in range(2)]
    return [q, k, v, cos, sin, *weights]


def caches(device, given, dtype, places=PLACES):
    (_, k, v), count = given[:3], len(places)
    keys, values = (
        torch.zeros(count, k.shape[1], CAPACITY, n, device=device, dtype=dtype) for n in (k.shape[2], v.shape[2])
    )
    return keys, values, torch.tensor(places, dtype=torch.int32, device=device)


def separate(q, k, v, cos, sin, q_weight, k_weight, *, dtype, norm, **options):
    """The results of the separate ops in plain PyTorch: rotated q, and the caches."""
    if norm is not None:
        q, k = (rms_norm_reference(x, w, **norm) for x, w in ((q, q_weight), (k, k_weight)))
    q, k = rope_reference(q[:, :, None], k[:, :, None], cos[:, None], sin[:, None], **options)
    # The truth in fp64 is not rounded.
    wide = (lambda t: t) if v.dtype is torch.float64 else (lambda t: t.to(dtype))
    keys, values = (wide(t).new_zeros(ROWS, t.shape[1], CAPACITY, t.shape[-1]) for t in (k, v))
    for row, place in enumerate(PLACES):
        if place >= 0:
            keys[row, :, place], values[row, :, place] = wide(k[row, :, 0]), wide(v[row])
    return wide(q[:, :, 0]), keys, values


def at_once(q, k, v, cos, sin, q_weight, k_weight, *, dtype, norm, backend, **options):
    keys, values, places = caches(q.device, [q, k, v], dtype)
    norm = None if norm is None else QkNorm(q_weight, k_weight, **({"eps": 1e-6} | norm))
    out = qk_norm_rope_append(q, k, v, cos, sin, keys, values, places, norm=norm, backend=backend, **options)
    return out, keys, values


def compared(given, backend, dtype, norm, **options):
    named = {"dtype": dtype, "norm": NORMS[norm], **options}
    assert_op_close(
        lambda *tensors: at_once(*tensors, backend=backend, **named),
        lambda *tensors: separate(*tensors, **named),
        given,
    )
    if backend == "torch":
        for found, expected in zip(at_once(*given, backend=backend, **named), separate(*given, **named), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_sizes_and_norms(heads, sizes, norm, device, backend):
    compared(inputs(device, heads, sizes), backend, F, norm)


@pytest.mark.parametrize("norm", ["none", "llama", "gemma", "rounded products"])
@pytest.mark.parametrize("rotated", ROTATIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_dtypes(dtypes, rotated, norm, device, backend):
    given = inputs(device, dtypes=DTYPES[dtypes])
    compared(given, backend, DTYPES[dtypes][3], norm, casting=rotated)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("table", TABLES)
def test_tables(table, sizes, device, backend):
    compared(inputs(device, sizes=sizes, table=table), backend, F, "llama", tables=table)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU rounds a product and a sum at once")
def test_rounding_happens_where_the_separate_ops_round(device):
    """bf16: the kernel's values are those of fp32 arithmetic rounded after the norm and after the rotation, bit for bit
    where sums are exact."""
    q, k, v, cos, sin, q_weight, k_weight = inputs(device, dtypes=DTYPES["bf16"])
    # Powers of two have exact sums of squares in any order.
    q, k = (torch.exp2(torch.randint(-3, 3, t.shape, device=device).float()).to(B) for t in (q, k))
    found = at_once(q, k, v, cos, sin, q_weight, k_weight, dtype=B, norm=NORMS["llama"], backend="triton")
    normed = [rms_norm_reference(x, w) for x, w in ((q, q_weight), (k, k_weight))]
    rotated, _ = (
        t[:, :, 0].to(B)
        for t in rope_reference(*(x[:, :, None].float() for x in normed), cos[:, None].float(), sin[:, None].float())
    )
    assert torch.equal(found[0], rotated)


@pytest.mark.parametrize("strided", ["tokens first", "every second"])
def test_strided_tensors(strided, device, backend):
    q, k, v, cos, sin, *weights = inputs(device)
    keys, values, places = caches(device, [q, k, v], F)
    expected = separate(q, k, v, cos, sin, *weights, dtype=F, norm=None)
    if strided == "tokens first":
        whole = torch.zeros(ROWS, CAPACITY, 2, 2, 8, device=device)  # keys and values of a head beside each other
        keys, values = (whole[:, :, i].transpose(1, 2) for i in (0, 1))
    else:
        q, k, v, cos, sin = (t.repeat_interleave(2, -1)[..., ::2] for t in (q, k, v, cos, sin))
    out = qk_norm_rope_append(q, k, v, cos, sin, keys, values, places.long(), backend=backend)
    for found, each in zip((out, keys, values), expected, strict=True):
        torch.testing.assert_close(found, each)


def test_one_table_of_all_rows(device, backend):
    q, k, v, cos, sin, *_ = inputs(device)
    keys, values, places = caches(device, [q, k, v], F)
    one = [t[:1].expand(ROWS, -1) for t in (cos, sin)]
    out = qk_norm_rope_append(q, k, v, *one, keys, values, places, backend=backend)
    again = qk_norm_rope_append(q, k, v, *(t.contiguous() for t in one), keys, values, places, backend=backend)
    assert torch.equal(out, again)


def test_a_row_without_a_place_writes_nothing(device, backend):
    q, k, v, cos, sin, *_ = inputs(device)
    keys, values, places = caches(device, [q, k, v], F)
    keys.fill_(7), values.fill_(7)
    qk_norm_rope_append(q, k, v, cos, sin, keys, values, torch.full_like(places, -1), backend=backend)
    assert (keys == 7).all()
    assert (values == 7).all()


def test_of_no_row(device, backend):
    q, k, v, cos, sin, *_ = (t[:0] for t in inputs(device))
    keys, values, places = caches(device, [q, k, v], B, places=())
    out = qk_norm_rope_append(q, k, v, cos, sin, keys, values, places, backend=backend)
    assert (out.shape, out.dtype) == ((0, 8, 8), B)


def test_one_launch_without_copies_that_waits_for_nothing(device, monkeypatch):
    # On a CPU the range of places is checked, which reads them.
    monkeypatch.setattr(op, "check_range", lambda *given: None)
    launches = []

    def spy(kernel, grid, args, constexprs):
        launches.append((kernel.__name__, grid, [t.data_ptr() for t in args if isinstance(t, torch.Tensor)]))
        launch._run(kernel, grid, args, constexprs)

    given = inputs(device, dtypes=DTYPES["bf16"])
    with launch.use_launcher(spy), Waits() as waits:
        at_once(*given, dtype=B, norm=NORMS["llama"], backend="triton")
    assert waits.found == []
    assert [name for name, *_ in launches] == ["_prepare_kernel"]
    assert {t.data_ptr() for t in given} < set(launches[0][2]), "it reads copies"


def test_the_dtype_of_rotated_queries():
    norm = QkNorm(torch.ones(2), torch.ones(2))
    forms = {casting: rotation("halves", "each", casting, 1) for casting in ROTATIONS}
    assert rotated_dtype(B, B, None, forms["promote"]) is B
    assert rotated_dtype(B, F, None, forms["promote"]) is F
    assert rotated_dtype(B, F, None, forms["back"]) is B
    assert rotated_dtype(B, B, norm, forms["back"]) is F
    assert rotated_dtype(B, B, QkNorm(torch.ones(2), torch.ones(2), casting="gemma"), forms["promote"]) is B
    assert set(CASTINGS) == {"llama", "gemma", "none"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(5, 8)}, ValueError, r"q must have shape \[B, Hq, D\]; got \[5, 8\]"),
        ({"q": torch.zeros(5, 8, 8).int()}, TypeError, "q must be float32, bfloat16 or float16; got torch.int32"),
        ({"q": torch.zeros(5, 8, 8, requires_grad=True)}, ValueError, "q must not require a gradient"),
        ({"k": torch.zeros(5, 2, 6)}, ValueError, r"k must have shape \[5, Hk, 8\] and q's dtype .* got \[5, 2, 6\]"),
        ({"k": torch.zeros(5, 2, 8).half()}, ValueError, "k must have shape .* in torch.float16"),
        ({"v": torch.zeros(5, 3, 8)}, ValueError, r"v must have shape \[5, 2, Dv\]; got \[5, 3, 8\]"),
        ({"cos": torch.zeros(5, 3)}, ValueError, r"cos must have shape \[5, R\] with R even and at most 8; got \[5, 3"),
        ({"cos": torch.zeros(5, 10)}, ValueError, "cos must have shape"),
        ({"cos": torch.zeros(4, 8)}, ValueError, "cos must have shape"),
        ({"cos": torch.zeros(5, 8), "tables": "pair"}, ValueError, r"cos must have shape \[5, R / 2\]"),
        ({"sin": torch.zeros(5, 6)}, ValueError, r"sin must have cos's shape \[5, 8\]; got \[5, 6\]"),
        ({"keys": torch.zeros(5, 3, 6, 8)}, ValueError, r"keys must have shape \[5, 2, L, 8\]; got \[5, 3, 6, 8\]"),
        ({"keys": torch.zeros(5, 2, 8, 6).mT}, ValueError, "keys must be contiguous along its last dimension"),
        ({"values": torch.zeros(5, 2, 7, 8)}, ValueError, "values must have as many places as keys, 6; got 7"),
        ({"places": torch.zeros(5)}, TypeError, "places must be int64 or int32; got torch.float32"),
        ({"places": torch.zeros(4).int()}, ValueError, r"places must have shape \[5\], one for each row; got \[4\]"),
        ({"places": torch.full((5,), 6)}, ValueError, r"places .* must lie in \[0, 6\); got values from 6 to 6"),
        ({"norm": QkNorm(torch.ones(8), torch.ones(4))}, ValueError, r"k_weight must have shape \[8\] .* got \[4\]"),
        ({"norm": QkNorm(torch.ones(8), torch.ones(8).half())}, ValueError, "k_weight must have .* in torch.float16"),
        ({"norm": QkNorm(torch.ones(8), torch.ones(8), eps=-1.0)}, ValueError, "eps must be a finite number"),
        ({"norm": QkNorm(torch.ones(8), torch.ones(8), casting="x")}, ValueError, "casting must be one of llama"),
        ({"tables": "both"}, ValueError, "tables must be one of each, pair, first_half; got 'both'"),
        ({"casting": "up"}, ValueError, "casting must be one of promote, back, fp32; got 'up'"),
        ({"backend": "cudnn"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, error, message):
    given = {
        "q": torch.zeros(5, 8, 8), "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8), "cos": torch.zeros(5, 8),
        "sin": torch.zeros(5, 8), "keys": torch.zeros(5, 2, 6, 8), "values": torch.zeros(5, 2, 6, 8),
        "places": torch.zeros(5).int(),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        qk_norm_rope_append(**(given | changes))
