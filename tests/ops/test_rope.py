"""rope against its reference and against transformers."""

from importlib import import_module

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from npu_trainer_kernels import tiling
from npu_trainer_kernels.device import GIB, KIB, DeviceSpec
from npu_trainer_kernels.ops import rope, rope_reference
from npu_trainer_kernels.ops._launch import use_launcher
from tests.closeness import assert_op_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tiles are of four tokens in the interpreter: two and a tail.
BATCH, HEADS, KV_HEADS, TOKENS = 2, 3, 2, 11


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


def check(inputs, backend, upstream=upstream):
    assert_op_close(lambda *a: rope(*a, backend=backend), rope_reference, inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [11, 4])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
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
    outputs = rope(q, k, cos, sin, backend=backend)
    back = torch.autograd.grad(outputs, (q, k), outputs)
    for a, b in zip(back, (q, k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_zero_tokens(device, backend):
    q, k, cos, sin = make(device, tokens=0)
    outputs = rope(q, k, cos, sin, backend=backend)
    assert [t.shape for t in torch.autograd.grad(sum(t.sum() for t in outputs), (q, k))] == [q.shape, k.shape]


def test_same_bits_twice(device, backend):
    inputs = make(device, torch.bfloat16)
    runs = [torch.autograd.grad(upstream(rope(*inputs, backend=backend)), inputs[:2]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_without_graph_break(device):
    def model(q, k, cos, sin):
        return rope(torch.tanh(q), k, cos, sin)

    inputs = make(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(upstream(model(*inputs)), inputs[:2])
    for a, b in zip(torch.autograd.grad(upstream(compiled(*inputs)), inputs[:2]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


BAD = [
    (lambda q, k, c, s: (q.double(), k, c, s), {}, TypeError, "q must be float32.*; got torch.float64"),
    (lambda q, k, c, s: (q, k.int(), c, s), {}, TypeError, "k must be float32.*; got torch.int32"),
    (lambda q, k, c, s: (q[0], k, c, s), {}, ValueError, r"q must have shape \[B, H, T, D\] with D even; got \[3, 11"),
    (lambda q, k, c, s: (q[..., :-1], k, c, s), {}, ValueError, r"q must have shape .*D even; got \[2, 3, 11, 63\]"),
    (lambda q, k, c, s: (q, k[:, :, 1:], c, s), {}, ValueError, r"k must have shape \[2, H, 11, 64\].*got \[2, 2, 10"),
    (lambda q, k, c, s: (q, k, c[:, 1:], s), {}, ValueError, r"cos must have shape \[2 or 1, 11, 64\].*got \[1, 10, "),
    (lambda q, k, c, s: (q, k, c, s[0]), {}, ValueError, r"sin must have shape \[2 or 1, 11, 64\].*got \[11, 64\]"),
    (lambda q, k, c, s: (q, k, c.requires_grad_(), s), {}, ValueError, "cos must not require a gradient"),
    (lambda q, k, c, s: (q, k, c, s.long()), {}, TypeError, "sin must be float32.*; got torch.int64"),
    (lambda q, k, c, s: (q, k, c, s.to("meta")), {}, ValueError, "all tensors must be on one device"),
    (lambda q, k, c, s: (q, k, c, s), {"backend": "cudnn"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    inputs = [t.detach() for t in make(torch.device("cpu"))]
    with pytest.raises(error, match=message):
        rope(*change(*inputs), **options)
