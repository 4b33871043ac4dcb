"""embedding against its reference: lookups, the deterministic gradient, padding, scale, bad ids."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ops import embedding, embedding_reference
from tests.closeness import assert_op_close
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
V = 13


def make(device, dtype=torch.float32, columns=45, shape=(3, 9), ids_dtype=torch.int64):
    """Ids of which some repeat and some never occur."""
    ids = torch.randint(0, V - 3, shape, device=device, dtype=ids_dtype)
    return [ids, torch.randn(V, columns, device=device).to(dtype).requires_grad_()]


def upstream(outputs):
    y = outputs[0]
    return (y * torch.linspace(-1, 1.5, y.numel(), device=y.device).view_as(y).to(y.dtype)).sum(dtype=torch.float64)


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: embedding(*a, backend=backend, **options),
        lambda *a: embedding_reference(*a, **options),
        inputs,
        upstream,
    )


# Tiles are of 2 x 32 in the interpreter: one block of columns and a tail, exactly two, less than one.
COLUMNS = [45, 64, 7]
OPTIONS = [{}, {"padding_idx": 4}, {"padding_idx": -5, "scale": 2.5}]


@pytest.mark.parametrize(("columns", "options", "dtype"), pairs(COLUMNS, OPTIONS, DTYPES), ids=str)
def test_matches_reference(device, backend, dtype, columns, options):
    check(make(device, dtype, columns), backend, **options)


@pytest.mark.parametrize("shape", [(), (1,), (40,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_ids_of_any_shape(device, backend, shape, ids_dtype):
    check(make(device, shape=shape, ids_dtype=ids_dtype), backend)


def test_one_id_many_times(device, backend):
    _, weight = make(device, torch.bfloat16)
    check([torch.full((60,), 5, device=device), weight], backend)


def test_gradient_adds_up_in_fp32(device, backend):
    ids = torch.zeros(513, dtype=torch.long, device=device)
    weight = torch.zeros(V, 7, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = embedding(ids, weight, backend=backend)
    (g,) = torch.autograd.grad(y, weight, torch.full_like(y, 0.125))
    # In bf16 the sum would stop at 32.
    assert torch.equal(g[0].float(), torch.full((7,), 64.0, device=device))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 4, "scale": 2.5}], ids=str)
@pytest.mark.parametrize("columns", [45, 64])
def test_backward_by_vocabulary(device, monkeypatch, columns, options):
    # What CUDA gets; elsewhere it would not be reached.
    monkeypatch.setattr(tiling, "vocabulary_tile", lambda cols, spec: tiling.RowTile(4, 32, -(-cols // 32)))
    check(make(device, torch.bfloat16, columns), "triton", **options)
    _, weight = make(device, torch.bfloat16, columns)
    check([torch.full((61,), 5, device=device), weight], "triton", **options)


def test_padding_row_is_read_and_gets_no_gradient(device, backend):
    ids, weight = make(device)
    pad = int(ids[0, 0])
    y = embedding(ids, weight, padding_idx=pad, backend=backend)
    assert torch.equal(y[0, 0], weight[pad])
    (g,) = torch.autograd.grad(y.sum(), weight)
    assert not g[pad].any()
    assert g[int(ids[ids != pad][0])].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embedding_has_the_bits_of_transformers(device, backend, dtype):
    ids, weight = make(device, dtype)
    module = Gemma3TextScaledWordEmbedding(V, 45, padding_idx=0, embed_scale=45**0.5).to(device, dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module(ids)
    scale = float(module.embed_scale.to(dtype))
    assert torch.equal(embedding(ids, weight, padding_idx=0, scale=scale, backend=backend), expected)


def test_strides(device, backend):
    ids, weight = make(device, shape=(9, 3))
    runs = []
    for i, w in ((ids.t().contiguous().t(), torch.cat([weight, weight], -1)[:, :45]), (ids, weight)):
        y = embedding(i, w, backend=backend)
        g = torch.linspace(0, 1, y.numel(), device=device).view(3, 9, 45).transpose(0, 1)
        runs.append([y, *torch.autograd.grad(y, weight, g)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_no_ids(device, backend):
    ids, weight = make(device, shape=(0, 3))
    y = embedding(ids, weight, padding_idx=1, backend=backend)
    assert y.shape == (0, 3, 45)
    assert not torch.autograd.grad(y.sum(), weight)[0].any()


def test_frozen_weight(device, backend):
    ids, weight = make(device)
    y = embedding(ids, weight.detach(), backend=backend)
    assert not y.requires_grad
    assert torch.equal(y, embedding_reference(ids, weight))


def test_a_weight_that_is_written_to_before_backward(device, backend):
    """As plain PyTorch's backward, this one does not read it."""
    ids, weight = make(device)
    y = embedding(ids, weight, scale=2.0, backend=backend)
    (expected,) = torch.autograd.grad(upstream([y]), weight, retain_graph=True)
    with torch.no_grad():
        weight.zero_()
    (found,) = torch.autograd.grad(upstream([y]), weight)
    assert torch.equal(found, expected)


def test_tied_weight_collects_both_gradients(device, backend):
    ids, weight = make(device)
    assert_op_close(
        lambda w: embedding(ids, w, backend=backend) @ w.t(),
        lambda w: embedding_reference(ids, w) @ w.t(),
        [weight],
        upstream,
    )


def test_same_bits_twice(device, backend):
    ids, weight = make(device, shape=(60,))
    runs = [torch.autograd.grad(upstream([embedding(ids, weight, backend=backend)]), weight) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_without_graph_break(device):
    def model(op):
        return lambda ids, weight: op(ids, torch.tanh(weight), padding_idx=3, scale=2.0)

    compiled = torch.compile(model(embedding), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(embedding_reference), make(device), upstream)


BAD = [
    (lambda i, w: (i.float(), w), {}, TypeError, "ids must be int64 or int32; got torch.float32"),
    (lambda i, w: (i, w.double()), {}, TypeError, "weight must be float32, bfloat16 or float16; got torch.float64"),
    (lambda i, w: (i, w[0]), {}, ValueError, r"weight must have shape \[V, D\].*got \[45\]"),
    (lambda i, w: (i + V, w), {}, ValueError, r"ids must lie in \[0, 13\); got values from"),
    (lambda i, w: (i - V, w), {}, ValueError, r"ids must lie in \[0, 13\); got values from -"),
    (lambda i, w: (i, w), {"padding_idx": 13}, ValueError, r"padding_idx must lie in \[-13, 13\); got 13"),
    (lambda i, w: (i, w), {"scale": float("nan")}, ValueError, "scale must be None or a finite number; got nan"),
    (lambda i, w: (i, w.to("meta")), {}, ValueError, "all tensors must be on one device"),
    (lambda i, w: (i, w), {"backend": "cudnn"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    ids, weight = make(torch.device("cpu"))
    with pytest.raises(error, match=message):
        embedding(*change(ids, weight.detach()), **options)
