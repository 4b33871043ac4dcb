"""add_rms_norm against its reference: both modes, values and gradients of both outputs."""

import itertools

import pytest
import torch

from npu_trainer_kernels.ops import add_rms_norm, add_rms_norm_reference, rms_norm
from tests.closeness import assert_as_close, assert_op_close, rounded
from tests.ops.test_rms_norm import HALVES
from tests.pairs import pairs

# As for rms_norm: row tiles with a tail, columns with and without a mask, column blocks.
SHAPES = [(11, 24), (11, 32), (3, 5, 96), (5, 200), (3, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [{}, {"casting": "gemma", "offset": 1.0}, {"casting": "none", "eps": 1e-2}]


def make(device, dtype=torch.float32, shape=(11, 24), residual_dtype=None, weight_dtype=None):
    x = torch.randn(shape, device=device) * torch.logspace(-2, 1, shape[-2], device=device)[:, None]
    residual = torch.randn(shape, device=device)
    w = 1 + 0.5 * torch.randn(shape[-1], device=device)
    dtypes = dtype, residual_dtype or dtype, weight_dtype or dtype
    return [t.to(d).requires_grad_() for t, d in zip((x, residual, w), dtypes, strict=True)]


def upstream(outputs):
    """Gradients that differ from element to element and between the outputs."""
    return sum(
        (t * torch.linspace(-1, 1.5 + i, t.numel(), device=t.device).sin().view_as(t).to(t.dtype)).sum(
            dtype=torch.float64
        )
        for i, t in enumerate(outputs)
    )


def check(inputs, backend, upstream=upstream, **options):
    assert_op_close(
        lambda *a: add_rms_norm(*a, backend=backend, **options),
        lambda *a: add_rms_norm_reference(*a, **options),
        inputs,
        upstream,
    )


MODES = ["pre", "post"]
CASES = [
    *pairs([shape for shape in SHAPES if shape != HALVES], OPTIONS, DTYPES, MODES),
    *itertools.product([HALVES], OPTIONS, DTYPES, MODES),
]


@pytest.mark.parametrize(("shape", "options", "dtype", "mode"), CASES, ids=str)
def test_matches_reference(device, backend, dtype, shape, options, mode):
    check(make(device, dtype, shape), backend, mode=mode, **options)


@pytest.mark.parametrize(
    ("dtype", "multiplier", "shape", "mode"),
    pairs(DTYPES, [0.22, -3, 0.0], [(11, 24), (5, 200)], ["pre", "post"]), ids=str,
)  # fmt: skip
def test_multiplier(device, backend, dtype, shape, multiplier, mode):
    check(make(device, dtype, shape), backend, mode=mode, multiplier=multiplier)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("mode", ["pre", "post"])
def test_multiplier_of_another_dtype_than_the_residual(device, backend, dtypes, mode):
    """The product is rounded to x's dtype before it is added."""
    check(make(device, *dtypes[:1], residual_dtype=dtypes[1]), backend, mode=mode, multiplier=0.22)


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiplied_and_added_with_the_bits_of_a_decoder_layer(device, backend, dtype):
    x, residual, w = make(device, dtype)
    _, s = add_rms_norm(x, residual, w, multiplier=0.22, backend=backend)

    def of_torch():
        return residual + x * 0.22

    expected = of_torch()
    if dtype == torch.float32:
        # A GPU multiplies and adds in one operation, which rounds once: as exact as both.
        assert_as_close(s, expected, residual.double() + x.double() * 0.22, "sum", lambda: rounded(of_torch))
    else:
        assert torch.equal(s, expected)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_two_used(device, backend, used):
    check(make(device), backend, lambda outputs: upstream([outputs[used]]))


@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(11, 24), (5, 200)], ids=str)
def test_mixed_dtypes(device, backend, dtypes, mode, shape):
    check(make(device, dtypes[0], shape, *dtypes[1:]), backend, mode=mode)


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_without_weight(device, backend, mode):
    check([*make(device)[:2], None], backend, mode=mode)


@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)], ids=str)
def test_frozen_inputs_get_no_gradient(device, backend, frozen, mode):
    inputs = make(device)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    check(inputs, backend, mode=mode)


def test_sum_and_norm_have_the_bits_of_the_separate_ops(device, backend):
    x, residual, w = make(device, torch.bfloat16)
    y, s = add_rms_norm(x, residual, w, backend=backend)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, rms_norm(x + residual, w, backend=backend))
    assert torch.equal(y, add_rms_norm(x, residual, w, mode="post", backend=backend))


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_any_strides(device, backend, mode):
    x, residual, w = make(device, shape=(3, 5, 24))
    views = torch.cat([x, x], -1)[..., :24], residual.transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(v.is_contiguous() for v in views)
    runs = []
    for a, b in (views, (x, residual)):
        outputs = add_rms_norm(a, b, w, mode=mode, backend=backend)
        outputs = outputs if mode == "pre" else [outputs]
        runs.append([*outputs, *torch.autograd.grad(upstream(outputs), (x, residual, w))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_zero_rows(device, backend, mode):
    x, residual = (torch.zeros(0, 24, device=device, requires_grad=True) for _ in range(2))
    w = torch.randn(24, device=device, requires_grad=True)
    outputs = add_rms_norm(x, residual, w, mode=mode, backend=backend)
    total = sum(t.sum() for t in (outputs if mode == "pre" else [outputs]))
    gx, gr, gw = torch.autograd.grad(total, (x, residual, w))
    assert gx.shape == gr.shape == (0, 24)
    assert not gw.any()


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [torch.autograd.grad(upstream(add_rms_norm(*inputs, backend=backend)), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_torch_compile_without_graph_break(device, mode):
    def model(op):
        return lambda x, residual, w: op(torch.tanh(x), residual, w, mode=mode)

    compiled = torch.compile(model(add_rms_norm), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(add_rms_norm_reference), make(device), upstream)


BAD = [
    (lambda x, r, w: (x.double(), r, w), {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    (lambda x, r, w: (x, r.long(), w), {}, TypeError, "residual must be float32, bfloat16 or float16; got torch.int64"),
    (lambda x, r, w: (x, r[:-1], w), {}, ValueError, r"residual must have x's shape \[11, 24\]; got \[10, 24\]"),
    (lambda x, r, w: (x, r, w[:-1]), {}, ValueError, r"weight must have shape \[24\].*got \[23\]"),
    (lambda x, r, w: (x, r, w), {"mode": "mid"}, ValueError, "mode must be one of pre, post; got 'mid'"),
    (lambda x, r, w: (x, r, w), {"casting": "fp8"}, ValueError, "casting must be one of .*; got 'fp8'"),
    (lambda x, r, w: (x, r, w), {"eps": -1.0}, ValueError, r"eps must be .* not negative; got -1\.0"),
    (lambda x, r, w: (x, r.to("meta"), w), {}, ValueError, "all tensors must be on one device"),
    (lambda x, r, w: (x, r, w), {"backend": "cudnn"}, ValueError, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    inputs = [t.detach() for t in make(torch.device("cpu"))]
    with pytest.raises(error, match=message):
        add_rms_norm(*change(*inputs), **options)
