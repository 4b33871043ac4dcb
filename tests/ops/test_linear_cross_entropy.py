"""fused_linear_cross_entropy against its reference: values, gradients, options, edges and bad input."""

import itertools

import pytest
import torch

from npu_trainer_kernels import tiling
from npu_trainer_kernels.ops import fused_linear_cross_entropy, linear_cross_entropy_reference
from npu_trainer_kernels.ops.head import chunks
from tests.closeness import assert_op_close
from tests.pairs import pairs

# Vocabulary and hidden size divide nothing; the interpreter's tiles are small, so a row takes several steps and a tail.
N, H, V = 37, 24, 301
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(device, dtype=torch.float32, bias=True, ignored=True):
    x = torch.randn(N, H, device=device, dtype=dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, H, device=device)).to(dtype).requires_grad_()
    b = torch.randn(V, device=device, dtype=dtype).requires_grad_() if bias else None
    target = torch.randint(0, V, (N,), device=device)
    if ignored:
        target[::5] = -100
    return [x, weight, target, b]


def upstream(outputs):
    """A gradient that differs from token to token."""
    loss = outputs[0]
    return (loss * torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).view_as(loss)).sum()


def check(inputs, backend, chunk_rows=None, **options):
    assert_op_close(
        lambda *a: fused_linear_cross_entropy(*a, backend=backend, chunk_rows=chunk_rows, **options),
        lambda *a: linear_cross_entropy_reference(*a, **options),
        inputs,
        upstream,
    )


OPTIONS = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"softcap": 3.0, "logit_scale": 2.0, "label_smoothing": 0.1, "z_loss": 1e-2},
    {"label_smoothing": 0.2},
    {"z_loss": 1e-2, "num_items": 100},
    {"reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
]


@pytest.mark.parametrize(("options", "dtype", "chunk_rows"), pairs(OPTIONS, DTYPES, [None, 8]), ids=str)
def test_matches_reference(device, backend, dtype, chunk_rows, options):
    check(make(device, dtype), backend, chunk_rows, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"logit_scale": 0.25}, {"reduction": "sum"}], ids=str)
# Steps of 64 columns and a tail of two; a tail alone; lanes that see nothing.
@pytest.mark.parametrize("width", [32, 256, 512])
def test_statistics_and_gradient_in_one_kernel(device, monkeypatch, width, options):
    # What CUDA gets; elsewhere it would not be reached.
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, width, 3))
    check(make(device), "triton", 8, **options)
    check(make(device), "triton", 8, class_weights=torch.rand(V, device=device) + 0.5, **options)


PARTS = [((29,), 128), ((12, 20, 29), 128), ((12, 20, 29), 96)]


@pytest.mark.parametrize(("parts", "dtype", "bias"), pairs(PARTS, DTYPES, [False, True]), ids=str)
def test_first_chunk_lies_where_the_gradient_will(device, monkeypatch, parts, dtype, bias):
    stops, columns = parts
    # What CUDA gets of sizes that are too large for a test.
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 3))
    monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks(stops, columns))
    shapes, original = [], chunks._project

    def project(x, weight, *args):
        shapes.append((x.shape[0], weight.shape[0]))
        return original(x, weight, *args)

    monkeypatch.setattr(chunks, "_project", project)
    check(make(device, dtype, bias), "triton")
    later = [(b - a, V) for a, b in itertools.pairwise(stops)]
    assert shapes == [(stops[0], columns), (stops[0], V - columns), *later]


def check_under_autocast(device, backend):
    def under_autocast(fn, **options):
        def call(*inputs):
            with torch.autocast(device.type, torch.bfloat16):
                return fn(*inputs, **options)

        return call

    ours = under_autocast(fused_linear_cross_entropy, backend=backend)
    assert_op_close(ours, under_autocast(linear_cross_entropy_reference), make(device, bias=False), lambda out: out[0])


def test_first_chunk_in_an_fp32_gradient_under_autocast(device, monkeypatch):
    monkeypatch.setattr(tiling, "fused_tile", lambda *args: tiling.StatisticsTile(2, 32, 3))
    monkeypatch.setattr(tiling, "borrowing_chunks", lambda *args: tiling.BorrowingChunks((12, 29), 128))

    check_under_autocast(device, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_memory_rounds_each_chunk_and_no_more(device, backend, dtype):
    inputs = make(device, dtype)
    exact = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    for each, low_memory in ((inputs, True), (exact, False)):
        fused_linear_cross_entropy(*each, chunk_rows=8, low_memory=low_memory, backend=backend).backward()
    assert torch.equal(inputs[0].grad, exact[0].grad)

    def in_chunks(x, w, t, b):
        """Autograd adds up what it has of each chunk in the weight's dtype."""
        count = (t != -100).sum()
        return sum(linear_cross_entropy_reference(x[i : i + 8], w, t[i : i + 8], b, num_items=count)
                   for i in range(0, N, 8))  # fmt: skip

    def ours(*given):
        return fused_linear_cross_entropy(*given, chunk_rows=8, low_memory=True, backend=backend)

    assert_op_close(ours, in_chunks, inputs, upstream)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_class_weights(device, backend, options):
    k = torch.rand(V, device=device) + 0.5
    check(make(device), backend, 8, class_weights=k, **options)


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, backend, 8)


def test_without_bias_and_without_ignored_targets(device, backend):
    check(make(device, bias=False, ignored=False), backend, 8)


def test_num_items_as_tensor_equals_number(device, backend):
    x, w, t, b = make(device)
    a = fused_linear_cross_entropy(x, w, t, b, num_items=torch.tensor(17, device=device), backend=backend)
    assert a.item() == fused_linear_cross_entropy(x, w, t, b, num_items=17, backend=backend).item()


def test_leading_shapes_strides_and_int32(device, backend):
    def strided(x, w, t):
        x = torch.stack([x, x], -1)[..., 0].view(1, N, H)
        assert not x.is_contiguous()
        return fused_linear_cross_entropy(x, w.t().contiguous().t(), t.int().view(1, N), backend=backend)

    assert_op_close(strided, linear_cross_entropy_reference, make(device)[:3], upstream)


def test_all_ignored_is_a_zero_that_can_be_differentiated(device, backend):
    x, w, t, b = make(device)
    loss = fused_linear_cross_entropy(x, w, torch.full_like(t, -100), b, backend=backend)
    grads = torch.autograd.grad(loss, (x, w, b))
    assert loss.item() == 0.0
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_goes_into_gradients_of_no_target_whatever_arrives(device, backend, reduction, frozen):
    """A sum that is divided by no items is sent an infinity; PyTorch's own loss passes none of it on."""
    x, w, t, b = make(device)
    wanted = (x,) if frozen else (x, w, b)
    loss = fused_linear_cross_entropy(
        x, w.detach() if frozen else w, torch.full_like(t, -100), b.detach() if frozen else b, reduction=reduction,
        backend=backend,
    )  # fmt: skip
    for found in torch.autograd.grad(loss.sum() / torch.zeros((), device=device), wanted):
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_zero_rows(device, backend, reduction):
    x = torch.zeros(0, H, device=device, requires_grad=True)
    w = torch.randn(V, H, device=device, requires_grad=True)
    loss = fused_linear_cross_entropy(
        x, w, torch.zeros(0, dtype=torch.long, device=device), reduction=reduction, backend=backend
    )
    gx, gw = torch.autograd.grad(loss.sum(), (x, w))
    assert loss.sum().item() == 0.0
    assert gx.shape == x.shape
    assert not gw.any()


def test_tied_weight_collects_both_gradients(device, backend):
    w = torch.randn(V, H, device=device, requires_grad=True)
    ids = torch.randint(0, V, (N,), device=device)
    embed = torch.nn.functional.embedding
    assert_op_close(
        lambda w: fused_linear_cross_entropy(embed(ids, w), w, ids, backend=backend),
        lambda w: linear_cross_entropy_reference(embed(ids, w), w, ids),
        [w],
        lambda outputs: outputs[0],
    )


def test_second_backward_gives_the_same_gradient(device, backend):
    def twice(x, w, t, b):
        loss = fused_linear_cross_entropy(x, w, t, b, backend=backend)
        first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
        return [*first, *torch.autograd.grad(loss, (x, w, b))]

    def expected(x, w, t, b):
        return 2 * torch.autograd.grad(linear_cross_entropy_reference(x, w, t, b), (x, w, b))

    assert_op_close(twice, expected, make(device))


def test_autocast_computes_in_its_dtype(device, backend):
    check_under_autocast(device, backend)


def test_no_grad(device, backend):
    def without(fn, **options):
        def call(*inputs):
            with torch.no_grad():
                loss = fn(*inputs, **options)
            assert not loss.requires_grad
            return loss

        return call

    ours = without(fused_linear_cross_entropy, backend=backend)
    assert_op_close(ours, without(linear_cross_entropy_reference), make(device))


def test_outputs(device, backend):
    x, w, t, b = make(device)
    out = fused_linear_cross_entropy(x, w, t, b, outputs=("token_accuracy", "predicted_ids"), backend=backend)
    argmax = torch.nn.functional.linear(x, w, b).argmax(-1)
    valid = t != -100
    assert torch.equal(out.predicted_ids, torch.where(valid, argmax, -100))
    assert out.token_accuracy.item() == pytest.approx((argmax == t)[valid].float().mean().item())


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [
        torch.autograd.grad(
            fused_linear_cross_entropy(*inputs, chunk_rows=8, backend=backend), [inputs[0], inputs[1], inputs[3]]
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_of_a_model_that_contains_it(device):
    def model(op):
        return lambda x, w, t: op(torch.tanh(x), w, t) * 2

    compiled = torch.compile(model(fused_linear_cross_entropy), backend="aot_eager")
    assert_op_close(compiled, model(linear_cross_entropy_reference), make(device)[:3], upstream)


BAD = [
    (lambda x, w, t: (x.long(), w, t), {}, TypeError, "x must be float32"),
    (lambda x, w, t: (x, w.double(), t), {}, TypeError, "weight must be float32"),
    (lambda x, w, t: (x, w, t.float()), {}, TypeError, "target must be int64"),
    (lambda x, w, t: (x, w[:, :-1], t), {}, ValueError, r"x must have shape \[..., 23\]"),
    (lambda x, w, t: (x, w[0], t), {}, ValueError, "weight must have shape"),
    (lambda x, w, t: (x, w, t[:-1]), {}, ValueError, r"target must have x's leading shape \[37\]; got \[36\]"),
    (lambda x, w, t: (x, w, t, w[0]), {}, ValueError, r"bias must have shape \[301\]"),
    (lambda x, w, t: (x, w, t + V), {}, ValueError, r"target must lie in \[0, 301\)"),
    (lambda x, w, t: (x, w, t), {"reduction": "avg"}, ValueError, "reduction must be one of mean, sum, none; got"),
    (lambda x, w, t: (x, w, t), {"reduction": "sum", "num_items": 3}, ValueError, "num_items"),
    (lambda x, w, t: (x, w, t), {"num_items": 0}, ValueError, "num_items must be positive and finite; got 0"),
    (lambda x, w, t: (x, w, t), {"softcap": 0.0}, ValueError, "softcap must be None or a positive"),
    (lambda x, w, t: (x, w, t), {"label_smoothing": 1.5}, ValueError, "label_smoothing must lie in"),
    (lambda x, w, t: (x, w, t), {"chunk_rows": {}}, ValueError, "chunk_rows must be None or a positive int; got {}"),
    (lambda x, w, t: (x, w, t), {"chunk_rows": 0}, ValueError, "chunk_rows must be None or a positive int; got 0"),
    (lambda x, w, t: (x, w, t), {"ignore_index": None}, ValueError, "ignore_index must be a 64-bit int; got None"),
    (lambda x, w, t: (x, w, t), {"z_loss": -1.0}, ValueError, "z_loss must be finite and not negative"),
    (lambda x, w, t: (x, w, t), {"class_weights": torch.ones(3)}, ValueError, "class_weights must have shape"),
    (lambda x, w, t: (x, w, t), {"outputs": ("loss",)}, ValueError, "outputs must be a sequence of"),
    (lambda x, w, t: (x, w, t), {"backend": "cudnn"}, ValueError, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    x, w, t, _ = make(torch.device("cpu"), ignored=False)
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy(*change(x.detach(), w.detach(), t), **options)
