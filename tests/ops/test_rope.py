"""rope against its reference and against transformers."""

from importlib import import_module

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from npu_trainer_kernels import backends, tiling
from npu_trainer_kernels import device as device_of
from npu_trainer_kernels.device import GIB, KIB, DeviceSpec
from npu_trainer_kernels.ops import rope, rope_reference
from npu_trainer_kernels.ops.launch import use_launcher
from tests.closeness import assert_as_close, assert_op_close, rounded_if_needed
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tiles are of four tokens in the interpreter: two and a tail.
BATCH, HEADS, KV_HEADS, TOKENS = 2, 3, 2, 11
BY_TURNS = {"pairs": "interleaved"}


def make(device, dtype=torch.float32, size=64, tokens=TOKENS, table_dtype=None, batched=False, transposed=True):
    """q, k (transposed views, as models have them), cos and sin."""
    q, k = (
        torch.randn(BATCH, tokens, heads, size, device=device).to(dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS)
    )
    if not transposed:
        q, k = q.contiguous(), k.contiguous()
    # Halves that differ: a kernel that reads the same half twice is wrong here, though not in a model.
    angle = torch.rand(BATCH if batched else 1, tokens, size, device=device) * 7
    tables = [t.to(table_dtype or dtype) for t in (1.5 * angle.cos(), angle.sin())]
    return [q.requires_grad_(), k.requires_grad_(), *tables]


def upstream(outputs):
    """A gradient that differs from element to element."""
    return sum(
        (t * torch.linspace(-1, 2 + i, t.numel(), device=t.device).sin().view(t.shape).to(t.dtype)).sum(
            dtype=torch.float64
        )
        for i, t in enumerate(outputs)
    )


def check(inputs, backend, upstream=upstream, **options):
    assert_op_close(
        lambda *a: rope(*a, backend=backend, **options), lambda *a: rope_reference(*a, **options), inputs, upstream
    )


@pytest.mark.parametrize(("size", "dtype", "tokens"), pairs([6, 64, 96, 128, 256], DTYPES, [11, 4]), ids=str)
def test_matches_reference(device, backend, dtype, size, tokens):
    check(make(device, dtype, size, tokens), backend)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts(device, backend, batched, transposed):
    check(make(device, batched=batched, transposed=transposed), backend)


@pytest.fixture
def in_one_launch(monkeypatch):
    """Makes rope rotate q and k in one launch, as on CUDA, so many heads at a time and so many groups of them ahead."""

    def ask(heads, ahead):
        def tile(q_heads, k_heads, half, spec):
            return tiling.HeadsTile(heads, tiling.next_power_of_2(half), ahead)

        monkeypatch.setattr(tiling, "rope_pair_tile", tile)

    return ask


# Of 3 heads of q and 2 of k: five groups of one; two and one with a rest in q; one each with rests in both.
@pytest.mark.parametrize(("heads", "ahead"), [(1, 1), (1, 2), (1, 5), (2, 1), (2, 5), (4, 1), (4, 5)])
@pytest.mark.parametrize("size", [24, 64])
def test_queries_and_keys_in_one_launch(device, in_one_launch, size, heads, ahead):
    in_one_launch(heads, ahead)
    check(make(device, torch.bfloat16, size, batched=True), "triton")


def test_the_usual_size_in_one_launch(device, in_one_launch):
    in_one_launch(4, 1)
    check(make(device, size=128, tokens=5), "triton")


@pytest.mark.parametrize(("dtype", "batched", "transposed"), pairs(DTYPES, [False, True], [False, True]), ids=str)
def test_layouts_in_one_launch(device, in_one_launch, dtype, batched, transposed):
    in_one_launch(2, 2)
    check(make(device, dtype, batched=batched, transposed=transposed, table_dtype=torch.float32), "triton")


@pytest.mark.parametrize("apart", [0, 1])
def test_heads_of_one_of_two_apart_in_one_launch(device, in_one_launch, apart):
    in_one_launch(2, 2)
    inputs = make(device)
    inputs[apart] = inputs[apart].detach().contiguous().requires_grad_()
    check(inputs, "triton")


def test_one_projection_in_one_launch(device, in_one_launch):
    # Between the tokens of q lie those of k, which the outputs leave out.
    in_one_launch(2, 2)
    q, k, *tables = make(device)
    both = torch.cat([q, k], 1).detach().transpose(1, 2).contiguous().transpose(1, 2)
    q, k = (t.requires_grad_() for t in both.split([HEADS, KV_HEADS], 1))
    check([q, k, *tables], "triton")


def test_more_sequences_than_a_grid_takes(device, in_one_launch, monkeypatch):
    in_one_launch(2, 2)
    inputs, launched = make(device), []
    for most in (BATCH, BATCH - 1):
        monkeypatch.setattr(import_module("npu_trainer_kernels.ops.rope"), "_MOST_BATCHES", most)
        with use_launcher(lambda kernel, *_: launched.append(kernel.__name__)):
            rope(*inputs, backend="triton")
    assert launched == ["_rotate_pair_kernel", "_rotate_kernel", "_rotate_kernel"]


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [((32, 8), 128, 8), ((32, 8), 64, 16), ((14, 2), 64, 16), ((3, 2), 64, 4), ((1, 1), 6, 1), ((8, 8), 4096, 1),
     ((128, 128), 128, 8), ((129, 128), 128, None)],
)  # fmt: skip
def test_few_enough_groups_of_heads_in_one_launch(heads, size, expected):
    tile = tiling.rope_pair_tile(*heads, size // 2, DeviceSpec("cuda", "a card", 132, 256 * KIB, 80 * GIB))
    assert (tile and tile.heads) == expected


@pytest.mark.parametrize(
    ("size", "rotated", "options", "served"),
    [(96, 24, {}, False), (128, 32, {}, True), (88, 88, BY_TURNS, False), (80, 80, BY_TURNS, True)],
)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_what_reads_single_elements_on_an_npu_is_not_given_to_the_kernel_unless_asked_for(
    monkeypatch, size, rotated, options, served, backend
):
    monkeypatch.setattr(backends, "choose", lambda op, device, asked, *rest, **options: asked or "triton")
    q, k = (torch.randn(1, heads, 5, size).bfloat16() for heads in (3, 2))
    cos, sin = torch.randn(2, 1, 5, rotated).bfloat16()
    launched = []
    with device_of.use_chip("Ascend910B4"), use_launcher(lambda kernel, *rest: launched.append(kernel)):
        found = rope(q, k, cos, sin, backend=backend, **options)
    assert bool(launched) == (served or backend is not None)
    if not launched:
        expected = rope_reference(q, k, cos, sin, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tables_of_another_dtype(device, backend):
    inputs = make(device, torch.bfloat16, table_dtype=torch.float32)
    check(inputs, backend)
    assert rope(*inputs, backend=backend)[0].dtype == torch.float32


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_in_torch_has_the_bits_of_transformers(dtype, size):
    """Of every size that models have: the reference is the same code."""
    inputs = make(torch.device("cpu"), dtype, size, batched=True)
    outputs = rope(*inputs, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(outputs, apply_rotary_pos_emb(*inputs), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Other forms
# ---------------------------------------------------------------------------------------------------------------------


FORMS = [
    {"tables": "pair"},
    {"tables": "first_half"},
    {"pairs": "interleaved"},
    {"pairs": "interleaved", "tables": "pair"},
    {"pairs": "interleaved", "tables": "first_half"},
    {"pairs": "regrouped", "tables": "pair"},
    {"pairs": "regrouped", "tables": "first_half"},
]


def make_form(device, dtype=torch.float32, size=64, rotated=64, tables="each", **options):
    """`make` with tables for `rotated` of a head's elements. Numbers that no model has, but that all differ."""
    q, k, cos, sin = make(device, dtype, size, batched=True, **options)
    width = rotated // 2 if tables == "pair" else rotated
    return [q, k, cos[..., :width].contiguous(), sin[..., :width].contiguous()]


# At 12 of 24 there are masked columns and a rest.
@pytest.mark.parametrize(("options", "dtype", "sizes"), pairs(FORMS, DTYPES, [(128, 128), (24, 12)]), ids=str)
def test_forms_match_reference(device, backend, dtype, options, sizes):
    check(make_form(device, dtype, *sizes, options.get("tables", "each")), backend, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotated"), [(128, 64), (128, 96), (7, 2)])
def test_a_part_of_a_head(device, backend, dtype, size, rotated):
    inputs = [t.detach() for t in make_form(device, dtype, 256, rotated)]
    inputs[:2] = [t[..., :size].requires_grad_() for t in inputs[:2]]
    check(inputs, backend)


@pytest.mark.parametrize("options", [{}, *FORMS], ids=str)
def test_what_does_not_rotate_passes_through(device, backend, options):
    q, k, *tables = make_form(device, torch.bfloat16, 24, 12, options.get("tables", "each"))
    outputs = rope(q, k, *tables, backend=backend, **options)
    gradients = torch.autograd.grad(outputs, (q, k), outputs)
    for x, y, g in zip((q, k), outputs, gradients, strict=True):
        assert torch.equal(y[..., 12:], x[..., 12:])
        assert torch.equal(g[..., 12:], x[..., 12:])
        assert not torch.equal(y[..., :12], x[..., :12])


@pytest.mark.parametrize(
    ("options", "sizes", "groups"), pairs([{}, *FORMS], [(64, 64), (24, 12)], [(1, 1), (2, 5)]), ids=str
)
def test_forms_in_one_launch(device, in_one_launch, options, sizes, groups):
    in_one_launch(*groups)
    check(make_form(device, torch.bfloat16, *sizes, options.get("tables", "each")), "triton", **options)


@pytest.mark.parametrize("options", [{}, *FORMS], ids=str)
def test_tokens_before_heads(device, backend, options):
    q, k, *tables = make_form(device, tables=options.get("tables", "each"))
    runs = []
    for heads in (1, 2):
        given = [t if heads == 1 else t.transpose(1, 2) for t in (q, k)]
        outputs = rope(*given, *tables, heads=heads, backend=backend, **options)
        outputs = [t if heads == 1 else t.transpose(1, 2) for t in outputs]
        runs.append([*outputs, *torch.autograd.grad(upstream(outputs), (q, k))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("options", [{}, {"pairs": "interleaved"}], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_queries_alone(device, backend, in_one_launch, options, grouped):
    if grouped and backend == "triton":
        in_one_launch(2, 2)
    q, k, *tables = make(device, torch.bfloat16)
    both = rope(q, k, *tables, backend=backend, **options)[0]
    alone, none = rope(q, None, *tables, backend=backend, **options)
    assert none is None
    assert torch.equal(alone, both)
    gradients = [torch.autograd.grad(upstream([t]), q)[0] for t in (alone, both)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("casting", ["promote", "back", "fp32"])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_castings(device, backend, casting, table_dtype):
    inputs = make(device, torch.bfloat16, table_dtype=table_dtype)
    check(inputs, backend, casting=casting)
    expected = table_dtype if casting == "promote" else torch.bfloat16
    assert {t.dtype for t in rope(*inputs, casting=casting, backend=backend)} == {expected}


def test_other_forms_compile_without_graph_break(device):
    def model(op):
        return lambda q, k, cos, sin: op(
            torch.tanh(q), k, cos, sin, pairs="interleaved", tables="first_half", casting="fp32"
        )

    compiled = torch.compile(model(rope), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(rope_reference), make_form(device, size=24, rotated=12), upstream)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_two_used(device, backend, used):
    check(make(device), backend, lambda outputs: upstream([outputs[used]]))


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, backend)


def test_outputs_keep_the_layout_of_the_inputs(device, backend):
    inputs = make(device)
    for out, x in zip(rope(*inputs, backend=backend), inputs[:2], strict=True):
        assert out.stride() == x.stride()


def test_any_strides(device, backend):
    q, k, cos, sin = make(device)
    runs = []
    for a, b in ((torch.stack([q, q], -1)[..., 0], k.flip(0).flip(0)), (q, k)):
        wide = torch.stack([cos, cos], -1)[..., 0]
        outputs = rope(a, b, wide, torch.cat([sin, sin], -1)[..., : sin.shape[-1]], backend=backend)
        g = [torch.ones(1, device=device).expand_as(t) for t in outputs]
        runs.append([*outputs, *torch.autograd.grad(outputs, (q, k), g)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_backward_undoes_a_rotation(device, backend):
    q, k, cos, sin = make(device)
    half = torch.rand(1, TOKENS, 32, device=device) * 7
    cos, sin = (torch.cat([t, t], -1) for t in (half.cos(), half.sin()))

    def there_and_back(op, **options):
        outputs = op(q, k, cos, sin, **options)
        return torch.autograd.grad(outputs, (q, k), outputs)

    ours, plain = there_and_back(rope, backend=backend), there_and_back(rope_reference)
    moved = rounded_if_needed(lambda: there_and_back(rope_reference))
    for i, (a, b, t) in enumerate(zip(ours, plain, (q, k), strict=True)):
        assert_as_close(a, b, t.detach(), "back", moved(i))


def test_zero_tokens(device, backend):
    q, k, cos, sin = make(device, tokens=0)
    outputs = rope(q, k, cos, sin, backend=backend)
    assert [t.shape for t in torch.autograd.grad(sum(t.sum() for t in outputs), (q, k))] == [q.shape, k.shape]


def test_same_bits_twice(device, backend):
    inputs = make(device, torch.bfloat16)
    runs = [torch.autograd.grad(upstream(rope(*inputs, backend=backend)), inputs[:2]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_without_graph_break(device):
    def model(op):
        return lambda q, k, cos, sin: op(torch.tanh(q), k, cos, sin)

    compiled = torch.compile(model(rope), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(rope_reference), make(device), upstream)


BAD = [
    (lambda q, k, c, s: (q.double(), k, c, s), {}, TypeError, "q must be float32.*; got torch.float64"),
    (lambda q, k, c, s: (q, k.int(), c, s), {}, TypeError, "k must be float32.*; got torch.int32"),
    (
        lambda q, k, c, s: (q[0], k, c, s),
        {},
        ValueError,
        r"q must have shape \[B, H, T, D\] with D at least 2; got \[3, 11",
    ),
    (
        lambda q, k, c, s: (q[..., :-1], k, c, s),
        {},
        ValueError,
        r"k must have q's shape \[2, 3, 11, 63\].*got \[2, 2, 11, 64\]",
    ),
    (
        lambda q, k, c, s: (q, k[:, :, 1:], c, s),
        {},
        ValueError,
        r"k must have q's shape \[2, 3, 11, 64\] but for.*got \[2, 2, 10",
    ),
    (lambda q, k, c, s: (q, k, c[:, 1:], s), {}, ValueError, r"cos must have shape \[2 or 1, 11, 64\].*got \[1, 10, "),
    (lambda q, k, c, s: (q, k, c, s[0]), {}, ValueError, r"sin must have shape \[2 or 1, 11, 64\].*got \[11, 64\]"),
    (lambda q, k, c, s: (q, k, c.requires_grad_(), s), {}, ValueError, "cos must not require a gradient"),
    (lambda q, k, c, s: (q, k, c, s.long()), {}, TypeError, "sin must be float32.*; got torch.int64"),
    (lambda q, k, c, s: (q, k, c, s.to("meta")), {}, ValueError, "all tensors must be on one device"),
    (lambda q, k, c, s: (q, k, c, s), {"backend": "cudnn"}, ValueError, "backend must be one of"),
    (lambda q, k, c, s: (q, k, c[0], s), {}, ValueError, r"cos must have shape \[2 or 1, 11, R\].*got \[11, 64\]"),
    (lambda q, k, c, s: (q, k, c[..., :5], s), {}, ValueError, r"cos must have shape .*R even.*got \[1, 11, 5\]"),
    (
        lambda q, k, c, s: (q, k, c[..., :8], s),
        {},
        ValueError,
        r"sin must have shape \[2 or 1, 11, 8\].*got \[1, 11, 64\]",
    ),
    (lambda q, k, c, s: (q, k, c, s), {"tables": "pair"}, ValueError, r"cos must have shape .*R / 2.*at most 64"),
    (lambda q, k, c, s: (q, k, c, s), {"pairs": "rows"}, ValueError, "pairs must be one of halves, .*; got 'rows'"),
    (lambda q, k, c, s: (q, k, c, s), {"tables": "all"}, ValueError, "tables must be one of each, .*; got 'all'"),
    (lambda q, k, c, s: (q, k, c, s), {"casting": "fp16"}, ValueError, "casting must be one of .*; got 'fp16'"),
    (lambda q, k, c, s: (q, k, c, s), {"heads": 3}, ValueError, "heads must be 1 or 2; got 3"),
    (
        lambda q, k, c, s: (q, k, c, s),
        {"pairs": "regrouped"},
        ValueError,
        "tables must be one of pair, first_half with",
    ),
]


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    inputs = [t.detach() for t in make(torch.device("cpu"))]
    with pytest.raises(error, match=message):
        rope(*change(*inputs), **options)
