"""linear_rms_norm against its reference, and against the linear layer and the norm that it stands for."""

import pytest
import torch
from torch.nn.functional import linear

from npu_trainer_kernels.ops import linear_rms_norm, linear_rms_norm_reference, rms_norm
from tests.closeness import assert_op_close
from tests.ops.test_rms_norm import OPTIONS, upstream
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, SIZE = 3, 24


def make(device, dtype=torch.float32, shape=(2, 5, 19), has_bias=True):
    # Rows of very different sizes: a wrong rstd shows.
    x = torch.randn(shape, device=device) * torch.logspace(-2, 1, shape[-2], device=device)[:, None]
    weight = torch.randn(HEADS * SIZE, shape[-1], device=device) / shape[-1] ** 0.5
    bias = 0.1 * torch.randn(HEADS * SIZE, device=device) if has_bias else None
    norm = 1 + 0.5 * torch.randn(SIZE, device=device)
    return [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, norm, bias)]


def apart(x, weight, norm, bias, backend, **options):
    return rms_norm(linear(x, weight, bias).view(*x.shape[:-1], HEADS, SIZE), norm, backend=backend, **options)


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: linear_rms_norm(*a, backend=backend, **options),
        lambda *a: linear_rms_norm_reference(*a, **options),
        inputs,
        upstream,
    )


def gradients(y, inputs):
    return [y, *torch.autograd.grad(upstream([y]), [t for t in inputs if t is not None])]


@pytest.mark.parametrize(("options", "dtype", "has_bias"), pairs(OPTIONS, DTYPES, [False, True]), ids=str)
def test_matches_reference(device, backend, dtype, has_bias, options):
    check(make(device, dtype, has_bias=has_bias), backend, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 19), (1, 1, 19), (2, 3, 2, 19)], ids=str)
def test_has_the_bits_of_linear_and_norm(device, backend, dtype, shape):
    inputs = make(device, dtype, shape)
    runs = [gradients(op(*inputs, backend=backend), inputs) for op in (linear_rms_norm, apart)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 3), (1, 2, 3)], ids=str)
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    check(inputs, backend)


def test_the_product_is_not_kept(device, backend):
    inputs, kept = make(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_rms_norm(*inputs, backend=backend)
    *given, rstd = kept
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in inputs]
    assert rstd.numel() == 2 * 5 * HEADS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(device, backend, dtype):
    inputs = make(device, dtype)
    inputs[1:] = make(device)[1:]
    runs = []
    for op in (linear_rms_norm, apart):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = op(*inputs, backend=backend)
        runs.append(gradients(y, inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_under_checkpointing(device, backend):
    from torch.utils.checkpoint import checkpoint

    inputs = make(device)

    def block(*leaves):
        return linear_rms_norm(*leaves, backend=backend)

    runs = [gradients(block(*inputs), inputs), gradients(checkpoint(block, *inputs, use_reentrant=False), inputs)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_of_nothing(device, backend):
    inputs = make(device, shape=(2, 0, 19))
    y = linear_rms_norm(*inputs, backend=backend)
    assert y.shape == (2, 0, HEADS, SIZE)
    assert all(not g.any() for g in torch.autograd.grad(y.sum(), inputs))


def test_compiles_without_graph_break(device):
    compiled = torch.compile(lambda x, *rest: linear_rms_norm(x * 2, *rest), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, lambda x, *rest: linear_rms_norm_reference(x * 2, *rest), make(device), upstream)


BAD = [
    ({"x": lambda t: t.double()}, {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    ({"weight": lambda t: t.int()}, {}, TypeError, "weight must be float32, bfloat16 or float16; got torch.int32"),
    ({"norm_weight": lambda t: t.int()}, {}, TypeError, "norm_weight must be float32, bfloat16 or float16"),
    ({"weight": lambda t: t.half()}, {}, ValueError, r"weight must have x's dtype torch\.float32 without autocast"),
    ({"bias": lambda t: t.half()}, {}, ValueError, r"bias must have x's dtype torch\.float32 without autocast"),
    ({"weight": lambda t: t[:, 1:]}, {}, ValueError, r"weight must have shape \[heads D, H\].*got \[72, 18\] for x"),
    ({"weight": lambda t: t[0]}, {}, ValueError, r"weight must have shape \[heads D, H\]"),
    ({"weight": lambda t: t[1:]}, {}, ValueError, r"D a divisor of weight's 71 rows; got \[24\]"),
    ({"norm_weight": lambda t: t[:0]}, {}, ValueError, r"norm_weight must have shape \[D\].*got \[0\]"),
    ({"norm_weight": lambda t: t[None]}, {}, ValueError, r"norm_weight must have shape \[D\].*got \[1, 24\]"),
    ({"bias": lambda t: t[1:]}, {}, ValueError, r"bias must have shape \[72\]; got \[71\]"),
    ({"norm_weight": lambda t: t.to("meta")}, {}, ValueError, "all tensors must be on one device"),
    ({}, {"eps": -1.0}, ValueError, "eps must be a finite number that is not negative; got -1.0"),
    ({}, {"casting": "bert"}, ValueError, "casting must be"),
    ({}, {"backend": "cudnn"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("changes", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(changes, options, error, message):
    names = ("x", "weight", "norm_weight", "bias")
    inputs = dict(zip(names, (t.detach() for t in make(torch.device("cpu"))), strict=True))
    with pytest.raises(error, match=message):
        linear_rms_norm(**{**inputs, **{name: change(inputs[name]) for name, change in changes.items()}}, **options)
