"""layer_norm against its reference and against the modules of transformers and torch."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from npu_trainer_kernels.ops import layer_norm, layer_norm_reference
from tests.closeness import assert_as_close, assert_op_close, rounded
from tests.ops.test_rms_norm import DTYPES, SHAPES, VIEWS, upstream
from tests.pairs import pairs

OPTIONS = [{}, {"offset": 1.0}, {"eps": 1e-2}]


def make(device, dtype=torch.float32, shape=(11, 24), parameter_dtype=None):
    # Rows of different sizes and means: a wrong mean, rstd or eps shows.
    scale = torch.logspace(-2, 1, shape[-2], device=device)[:, None]
    x = (torch.randn(shape, device=device) + torch.linspace(-2, 2, shape[-2], device=device)[:, None]) * scale
    w, b = 1 + 0.5 * torch.randn(shape[-1], device=device), 0.5 * torch.randn(shape[-1], device=device)
    return [x.to(dtype).requires_grad_(), *(p.to(parameter_dtype or dtype).requires_grad_() for p in (w, b))]


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: layer_norm(*a, backend=backend, **options),
        lambda *a: layer_norm_reference(*a, **options),
        inputs,
        upstream,
    )


@pytest.mark.parametrize(("shape", "options", "dtype"), pairs(SHAPES, OPTIONS, DTYPES), ids=str)
def test_matches_reference(device, backend, dtype, shape, options):
    check(make(device, dtype, shape), backend, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(11, 24), (3, 256)], ids=str)
@pytest.mark.parametrize("given", [1, 2])
def test_without_bias_and_weight(device, backend, dtype, shape, given):
    inputs = make(device, dtype, shape)
    check([*inputs[:given], *[None] * (3 - given)], backend)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_parameters_of_another_dtype(device, backend, dtypes):
    inputs = make(device, dtypes[0], parameter_dtype=dtypes[1])
    check(inputs, backend)
    assert layer_norm(*inputs, backend=backend).dtype == dtypes[0]


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1)], ids=str)
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    check(inputs, backend)


@pytest.mark.parametrize("shape", [(11, 32), (3, 200)], ids=str)
def test_a_mean_that_is_large_beside_the_rest_costs_no_digits(device, backend, shape):
    """A sum of squares would cancel: 300^2 has no digits left for a variance of one."""
    x, w, b = make(device, shape=shape)
    check([(300 + torch.randn_like(x)).detach().requires_grad_(), w, b], backend)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_which_epsilon_counts(device, backend, dtype, eps):
    x, w, b = make(device, dtype)
    wide = x.detach().float() - x.detach().float().mean(-1, keepdim=True)
    small = (wide / wide.pow(2).mean(-1, keepdim=True).sqrt() * eps**0.5).to(dtype)
    check([small.requires_grad_(), w, b], backend, eps=eps)


def test_a_constant_row_is_finite(device, backend):
    x = torch.full((2, 24), 3.0, device=device, requires_grad=True)
    check([x, torch.ones(24, device=device, requires_grad=True), None], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_forward_in_torch_has_the_bits_of_cohere(dtype, size):
    """Also of rows so small that their epsilon counts."""
    x, w, _ = make(torch.device("cpu"), dtype, (4, 7, 96))
    norm = CohereLayerNorm(96).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(w)
        expected = norm(x * size)
        assert torch.equal(layer_norm(x * size, w, None, 1e-5, backend="torch"), expected)


FUSED = {
    "nn.LayerNorm": (nn.LayerNorm(96), 3, {}),
    "without bias": (nn.LayerNorm(96, bias=False), 2, {}),
    "without weight": (nn.LayerNorm(96, elementwise_affine=False), 1, {}),
    "Olmo": (OlmoLayerNorm(96), 1, {}),
    "Nemotron": (NemotronLayerNorm1P(96), 3, {"offset": 1.0}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_matches_modules_around_the_fused_operator(device, backend, dtype, name):
    """PyTorch's own operator adds up in another order: as close to the truth as that."""
    module, given, options = FUSED[name]
    inputs = [t.detach() for t in make(device, dtype, (4, 7, 96))[:given]]
    module = module.to(device, dtype)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), inputs[1:], strict=True):
            parameter.copy_(value)
        actual, expected = layer_norm(*inputs, backend=backend, **options), module(inputs[0])
        truth = layer_norm_reference(*(t.double() for t in inputs), **options)
    assert_as_close(actual, expected, truth, name, lambda: rounded(lambda: module(inputs[0])))


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(device, backend, view):
    x, w, b = make(device, shape=(3, 5, 24))
    strided = VIEWS[view](x.detach())
    assert not strided.is_contiguous()
    assert_op_close(
        lambda *a: layer_norm(*a, backend=backend),
        layer_norm_reference,
        [strided.requires_grad_(), w, b],
        lambda outputs: upstream([VIEWS[view](outputs[0])]),
    )


def test_zero_rows(device, backend):
    x = torch.zeros(0, 24, device=device, requires_grad=True)
    w, b = (torch.randn(24, device=device, requires_grad=True) for _ in range(2))
    y = layer_norm(x, w, b, backend=backend)
    gx, gw, gb = torch.autograd.grad(y.sum(), (x, w, b))
    assert y.shape == gx.shape == (0, 24)
    assert gw.shape == gb.shape == (24,)
    assert not gw.any()
    assert not gb.any()


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [torch.autograd.grad(upstream([layer_norm(*inputs, backend=backend)]), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_without_graph_break(device):
    def model(x, w, b):
        return layer_norm(torch.tanh(x), w, b) * 2

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, lambda x, w, b: layer_norm_reference(torch.tanh(x), w, b) * 2, make(device), upstream)


BAD = [
    (lambda x, w, b: (x.double(), w, b), {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    (lambda x, w, b: (x, w, b.long()), {}, TypeError, "bias must be float32, bfloat16 or float16; got torch.int64"),
    (lambda x, w, b: (x, w[:-1], b), {}, ValueError, r"weight must have shape \[24\].*got \[23\]"),
    (lambda x, w, b: (x, w, b[:-1]), {}, ValueError, r"bias must have the weight's shape \[24\]; got \[23\]"),
    (lambda x, w, b: (x, None, b), {}, ValueError, r"bias must be None without a weight; got one of shape \[24\]"),
    (lambda x, w, b: (x, w, b, -1.0), {}, ValueError, r"eps must be .* not negative; got -1\.0"),
    (lambda x, w, b: (x,), {"offset": 1.0}, ValueError, "offset must be 0 without a weight; got 1"),
    (lambda x, w, b: (x, w, b), {"backend": "cudnn"}, ValueError, "backend must be one of"),
    (lambda x, w, b: (x, w, b.to("meta")), {}, ValueError, "on one device; got x on cpu, bias on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    x, w, b = make(torch.device("cpu"))
    with pytest.raises(error, match=message):
        layer_norm(*change(x.detach(), w.detach(), b.detach()), **options)
