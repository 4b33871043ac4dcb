"""scaled_tanh against its reference."""

import pytest
import torch

from npu_trainer_kernels.ops import scaled_tanh, scaled_tanh_reference
from tests.closeness import assert_op_close
from tests.pairs import pairs

# Blocks are of 64 elements in the interpreter: several and a tail, exactly some, less than one.
SHAPES = [(3, 45), (2, 64), (7,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = [1, 0.5, 30.0]


def make(device, dtype=torch.float32, shape=(3, 45), scale=1.0):
    """Numbers of every size: near zero, and where the function is flat."""
    x = torch.randn(shape, device=device) * torch.logspace(-3, 0.5, max(1, shape[-1] if shape else 1), device=device)
    return (scale * (x if shape else x.squeeze())).to(dtype).requires_grad_()


def upstream(outputs):
    y = outputs[0]
    return (y * torch.linspace(-1, 1.5, y.numel(), device=y.device).view_as(y).to(y.dtype)).sum(dtype=torch.float64)


@pytest.mark.parametrize(("shape", "dtype", "scale"), pairs(SHAPES, DTYPES, SCALES), ids=str)
def test_matches_reference(device, backend, shape, dtype, scale):
    assert_op_close(
        lambda x: scaled_tanh(x, scale, backend=backend),
        lambda x: scaled_tanh_reference(x, scale),
        [make(device, dtype, shape, scale)],
        upstream,
    )


def test_large_numbers_stay_finite(device, backend):
    x = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30], device=device, requires_grad=True)
    y = scaled_tanh(x, 2.0, backend=backend)
    assert y.tolist() == [-2.0, -2.0, 0.0, 2.0, 2.0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_any_strides(device, backend):
    x = make(device)
    runs = []
    for t in (x.t().contiguous().t(), x):
        y = scaled_tanh(t, 2.0, backend=backend)
        runs.append([y, *torch.autograd.grad(y.t().sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_nothing(device, backend):
    x = torch.ones(0, 3, device=device, requires_grad=True)
    y = scaled_tanh(x, 2.0, backend=backend)
    assert y.shape == torch.autograd.grad(y.sum(), x)[0].shape == (0, 3)


def test_frozen(device, backend):
    assert not scaled_tanh(make(device).detach(), 2.0, backend=backend).requires_grad


BAD = [
    (lambda x: x.double(), 2.0, {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    (lambda x: x, 0.0, {}, ValueError, "scale must be a positive finite number; got 0.0"),
    (lambda x: x, float("nan"), {}, ValueError, "scale must be a positive finite number; got nan"),
    (lambda x: x, 2.0, {"backend": "cudnn"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "scale", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, scale, options, error, message):
    with pytest.raises(error, match=message):
        scaled_tanh(change(make(torch.device("cpu")).detach()), scale, **options)
