"""rms_norm against its reference and against the modules of transformers."""

import functools
import itertools

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from npu_trainer_kernels.ops import rms_norm, rms_norm_reference
from npu_trainer_kernels.ops.norms import CASTINGS
from tests.closeness import assert_op_close
from tests.pairs import pairs

# In the interpreter 11 rows are two tiles of four and a tail, 32 columns need no mask, 96 take one row at a time, 128
# too, folded, 200 and 320 go in blocks of 64, and so do 256 unless they go in two halves.
SHAPES = [(11, 24), (11, 32), (3, 5, 96), (3, 128), (1, 3), (2, 37), (5, 200), (3, 256), (2, 320)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {"casting": "llama"},
    {"casting": "llama", "offset": 1.0},
    {"casting": "gemma"},
    {"casting": "gemma", "offset": 1.0},
    {"casting": "none"},
    {"casting": "none", "offset": 1.0, "eps": 1e-2},
]


def test_every_casting_is_among_the_options():
    assert {each["casting"] for each in OPTIONS} == set(CASTINGS)


def test_castings_differ(device, backend):
    """In 16 bits each rounds elsewhere: one that the code does not know would be another one's twin."""
    x, weight = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((64, 96), (96,)))
    for function in (rms_norm_reference, functools.partial(rms_norm, backend=backend)):
        made = [function(x, weight, casting=casting) for casting in CASTINGS]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(made, 2))


def test_a_casting_that_is_not_known_is_refused():
    message = f"casting must be one of {', '.join(CASTINGS)}; got 'new'"
    with pytest.raises(ValueError, match=message):
        rms_norm_reference(torch.randn(2, 4), torch.randn(4), casting="new")
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.randn(2, 4), torch.randn(4), casting="new")


def make(device, dtype=torch.float32, shape=(11, 24), weight_dtype=None):
    # Rows of very different sizes: a wrong rstd or eps shows.
    x = torch.randn(shape, device=device) * torch.logspace(-2, 1, shape[-2], device=device)[:, None]
    w = 1 + 0.5 * torch.randn(shape[-1], device=device)
    return [x.to(dtype).requires_grad_(), w.to(weight_dtype or dtype).requires_grad_()]


def upstream(outputs):
    """A gradient that differs from element to element."""
    y = outputs[0]
    g = torch.linspace(-1, 1.5, y.numel(), device=y.device).sin().view_as(y)
    return (y * g.to(y.dtype)).sum(dtype=torch.float64)


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: rms_norm(*a, backend=backend, **options),
        lambda *a: rms_norm_reference(*a, **options),
        inputs,
        upstream,
    )


# In two halves go rows of one size and of two bytes: that size with every option in every dtype.
HALVES = (3, 256)
CASES = [
    *pairs([shape for shape in SHAPES if shape != HALVES], OPTIONS, DTYPES),
    *itertools.product([HALVES], OPTIONS, DTYPES),
]


@pytest.mark.parametrize(("shape", "options", "dtype"), CASES, ids=str)
def test_matches_reference(device, backend, dtype, shape, options):
    check(make(device, dtype, shape), backend, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("casting", CASTINGS)
def test_without_weight(device, backend, dtype, casting):
    check([make(device, dtype)[0], None], backend, casting=casting)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_weight_of_another_dtype(device, backend, dtypes, casting):
    inputs = make(device, dtypes[0], weight_dtype=dtypes[1])
    check(inputs, backend, casting=casting)
    expected = torch.float32 if casting == "llama" else dtypes[0]
    assert rms_norm(*inputs, casting=casting, backend=backend).dtype == expected


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, backend)


MODULES = [
    (LlamaRMSNorm, {"casting": "llama"}),
    (Qwen3RMSNorm, {"casting": "llama"}),
    (GemmaRMSNorm, {"casting": "gemma", "offset": 1.0}),
    (Gemma3RMSNorm, {"casting": "gemma", "offset": 1.0}),
    (Olmo2RMSNorm, {"casting": "gemma"}),
]


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize(("module", "options"), MODULES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_forward_in_torch_has_the_bits_of_transformers(module, options, dtypes, size):
    """Also of rows so small that their epsilon counts."""
    x, w = make(torch.device("cpu"), dtypes[0], (4, 7, 96), dtypes[1])
    x = x.detach() * size
    norm = module(96).to(dtypes[1])
    with torch.no_grad():
        norm.weight.copy_(w)
        expected = norm(x)
    y = rms_norm(x, w, 1e-6, backend="torch", **options)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


VIEWS = {
    "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "columns apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "one row repeated": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(device, backend, view):
    x, w = make(device, shape=(3, 5, 24))
    strided = VIEWS[view](x)
    assert not strided.is_contiguous()
    y = rms_norm(strided, w, backend=backend)
    plain = strided.detach().contiguous().requires_grad_()
    expected = rms_norm(plain, w, backend=backend)
    assert torch.equal(y, expected)
    g = VIEWS[view](torch.randn_like(y))
    assert torch.equal(torch.autograd.grad(y, w, g, retain_graph=True)[0],
                       torch.autograd.grad(expected, w, g.contiguous(), retain_graph=True)[0])  # fmt: skip
    through_view = torch.autograd.grad(strided, x, torch.autograd.grad(expected, plain, g.contiguous())[0])[0]
    assert torch.equal(torch.autograd.grad(y, x, g)[0], through_view)


def test_zero_rows(device, backend):
    x = torch.zeros(0, 24, device=device, requires_grad=True)
    w = torch.randn(24, device=device, requires_grad=True)
    y = rms_norm(x, w, backend=backend)
    gx, gw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == gx.shape == (0, 24)
    assert gw.shape == (24,)
    assert not gw.any()


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [each for each in OPTIONS if "eps" not in each], ids=str)
def test_rows_in_which_epsilon_counts(device, backend, dtype, options, eps):
    """Their mean square is epsilon's size; beside rows near one, in 16 bits, half or twice an epsilon is not seen."""
    x, w = make(device, dtype)
    small = (x.detach().float() / x.detach().float().pow(2).mean(-1, keepdim=True).sqrt() * eps**0.5).to(dtype)
    check([small.requires_grad_(), w], backend, eps=eps, **options)


def test_a_row_of_zeros_is_finite(device, backend):
    x = torch.zeros(2, 24, device=device, requires_grad=True)
    w = torch.ones(24, device=device, requires_grad=True)
    check([x, w], backend)


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [torch.autograd.grad(upstream([rms_norm(*inputs, backend=backend)]), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradient_of_first_order_only(device, backend):
    x, w = make(device)
    (g,) = torch.autograd.grad(rms_norm(x, w, backend=backend).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        g.sum().backward()


@pytest.mark.parametrize("options", OPTIONS[1::2], ids=str)
def test_torch_compile_without_graph_break(device, options):
    def model(op):
        return lambda x, w: op(torch.tanh(x), w, **options) * 2

    compiled = torch.compile(model(rms_norm), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(rms_norm_reference), make(device), upstream)


BAD = [
    (lambda x, w: (x.double(), w), {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    (lambda x, w: (x, w.long()), {}, TypeError, "weight must be float32, bfloat16 or float16; got torch.int64"),
    (lambda x, w: (x[0, 0], w), {}, ValueError, r"x must have shape \[\.\.\., H\] with H >= 1; got \[\]"),
    (lambda x, w: (x, w[:-1]), {}, ValueError, r"weight must have shape \[24\].*got \[23\]"),
    (lambda x, w: (x, w, -1.0), {}, ValueError, r"eps must be .* not negative; got -1\.0"),
    (lambda x, w: (x, w, float("nan")), {}, ValueError, "eps must be .*; got nan"),
    (lambda x, w: (x, w), {"offset": float("inf")}, ValueError, "offset must be a finite number; got inf"),
    (lambda x, w: (x,), {"offset": 1.0}, ValueError, "offset must be 0 without a weight; got 1"),
    (lambda x, w: (x, w), {"casting": "bf16"}, ValueError, "casting must be one of .*; got 'bf16'"),
    (lambda x, w: (x, w), {"backend": "cudnn"}, ValueError, "backend must be one of"),
    (lambda x, w: (x, w.to("meta")), {}, ValueError, "all tensors must be on one device; got x on cpu, weight on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    x, w = make(torch.device("cpu"))
    with pytest.raises(error, match=message):
        rms_norm(*change(x.detach(), w.detach()), **options)
