"""swiglu against its reference."""

import pytest
import torch

from npu_trainer_kernels.ops import swiglu, swiglu_reference
from tests.closeness import assert_op_close

# Blocks are of 64 elements in the interpreter: several and a tail, exactly some, less than one.
SHAPES = [(3, 5, 45), (4, 64), (7,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(device, dtype=torch.float32, shape=(3, 5, 45)):
    # Gates far out on both sides: sigma saturates there.
    gate, up = (torch.randn(shape, device=device) * scale for scale in (6, 1))
    return [gate.to(dtype).requires_grad_(), up.to(dtype).requires_grad_()]


def upstream(outputs):
    y = outputs[0]
    return (y * torch.linspace(-1, 1.5, y.numel(), device=y.device).view_as(y).to(y.dtype)).sum(dtype=torch.float64)


def check(inputs, backend):
    assert_op_close(lambda *a: swiglu(*a, backend=backend), swiglu_reference, inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(device, backend, dtype, shape):
    check(make(device, dtype, shape), backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_in_torch_has_the_bits_of_transformers(dtype):
    from transformers.activations import ACT2FN

    gate, up = make(torch.device("cpu"), dtype)
    assert torch.equal(swiglu(gate, up, backend="torch"), ACT2FN["silu"](gate) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_stay_finite(device, backend):
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], device=device, requires_grad=True)
    check([gate, torch.ones(5, device=device, requires_grad=True)], backend)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, backend)


@pytest.mark.parametrize("width", [45, 64, 130])
def test_halves_of_one_tensor(device, backend, width):
    both = torch.randn(3, 5, 2 * width, device=device, requires_grad=True)
    assert_op_close(
        lambda t: swiglu(*t.chunk(2, -1), backend=backend),
        lambda t: swiglu_reference(*t.chunk(2, -1)),
        [both],
        upstream,
    )


def test_any_strides(device, backend):
    gate, up = make(device)
    strided = gate.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([up, up], -1)[..., 0]
    runs = []
    for a, b in (strided, (gate, up)):
        y = swiglu(a, b, backend=backend)
        runs.append([y, *torch.autograd.grad(y.transpose(0, 1).sum(), (gate, up))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("shape", [(0, 45), (3, 0)])
def test_nothing(device, backend, shape):
    gate, up = make(device, shape=shape)
    y = swiglu(gate, up, backend=backend)
    assert y.shape == shape
    assert all(g.shape == shape for g in torch.autograd.grad(y.sum(), (gate, up)))


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [torch.autograd.grad(upstream([swiglu(*inputs, backend=backend)]), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_compile_without_graph_break(device):
    def model(gate, up):
        return swiglu(torch.tanh(gate), up) * 2

    inputs = make(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(upstream([model(*inputs)]), inputs)
    for a, b in zip(torch.autograd.grad(upstream([compiled(*inputs)]), inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


BAD = [
    (lambda g, u: (g.double(), u), {}, TypeError, "gate must be float32, bfloat16 or float16; got torch.float64"),
    (lambda g, u: (g, u.int()), {}, TypeError, "up must be float32, bfloat16 or float16; got torch.int32"),
    (lambda g, u: (g, u.half()), {}, ValueError, r"up must have gate's dtype torch\.float32; got torch\.float16"),
    (lambda g, u: (g, u[..., 1:]), {}, ValueError, r"up must have gate's shape \[3, 5, 45\]; got \[3, 5, 44\]"),
    (lambda g, u: (g[0, 0, 0], u[0, 0, 0]), {}, ValueError, r"gate must have at least one dimension; got \[\]"),
    (lambda g, u: (g, u.to("meta")), {}, ValueError, "all tensors must be on one device"),
    (lambda g, u: (g, u), {"backend": "cudnn"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    inputs = [t.detach() for t in make(torch.device("cpu"))]
    with pytest.raises(error, match=message):
        swiglu(*change(*inputs), **options)
