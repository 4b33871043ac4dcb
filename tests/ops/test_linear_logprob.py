"""linear_logprob against its reference: every output, every gradient, options, edges and bad input."""

import pytest
import torch

from npu_trainer_kernels.ops import linear_logprob, linear_logprob_reference
from npu_trainer_kernels.ops.head.linear_logprob import OUTPUTS
from tests.closeness import assert_op_close
from tests.pairs import pairs

N, H, V = 29, 20, 333


def make(device, dtype=torch.float32, bias=True):
    x = torch.randn(N, H, device=device, dtype=dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, H, device=device)).to(dtype).requires_grad_()
    b = torch.randn(V, device=device, dtype=dtype).requires_grad_() if bias else None
    return [x, weight, torch.randint(0, V, (N,), device=device), b]


def weighted(*fields):
    """Upstream gradients that differ from token to token, for the named fields of the output."""

    def upstream(outputs):
        total = 0.0
        for i in fields:
            total = total + (outputs[i] * torch.sin(torch.arange(N, device=outputs[i].device) + i)).sum()
        return total

    return upstream


LOG_PROB, ENTROPY, _, MEAN_LOGIT, _ = range(5)


FIELDS = [(LOG_PROB,), (ENTROPY,), (MEAN_LOGIT,), (LOG_PROB, ENTROPY, MEAN_LOGIT)]
OPTIONS = [{}, {"temperature": 0.7}, {"softcap": 4.0, "temperature": 1.3}, {"logit_scale": 0.5, "softcap": 2.0}]


@pytest.mark.parametrize(
    ("fields", "options", "dtype"), pairs(FIELDS, OPTIONS, [torch.float32, torch.bfloat16, torch.float16]), ids=str
)
def test_matches_reference(device, backend, dtype, fields, options):
    assert_op_close(
        lambda *a: linear_logprob(*a, outputs=OUTPUTS, backend=backend, **options),
        lambda *a: linear_logprob_reference(*a, outputs=OUTPUTS, **options),
        make(device, dtype),
        weighted(*fields),
    )


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    assert_op_close(
        lambda *a: linear_logprob(*a, backend=backend), linear_logprob_reference, inputs, weighted(LOG_PROB)
    )


@pytest.mark.parametrize("output", OUTPUTS)
def test_each_output_alone(device, backend, output):
    inputs = make(device, bias=False)
    out = linear_logprob(*inputs, outputs=(output,), backend=backend)
    everything = linear_logprob(*inputs, outputs=OUTPUTS, backend=backend)
    for name, value in out._asdict().items():
        if name in ("log_prob", output):
            assert torch.equal(value, getattr(everything, name))
        else:
            assert value is None


def test_is_top1_takes_the_first_of_equal_logits(device, backend):
    x = torch.ones(2, 1, device=device)
    weight = torch.zeros(200, 1, device=device)
    weight[[70, 150]] = 1.0
    out = linear_logprob(x, weight, torch.tensor([70, 150], device=device), outputs=("is_top1",), backend=backend)
    assert out.is_top1.tolist() == [True, False]


def test_ids_at_both_ends_of_the_vocabulary(device, backend):
    x, w, _, b = make(device)
    ids = torch.tensor([0, V - 1] * N, device=device)[:N]
    assert_op_close(
        lambda *a: linear_logprob(*a, backend=backend), linear_logprob_reference, [x, w, ids, b], weighted(LOG_PROB)
    )


def test_very_large_and_infinite_logits(device, backend):
    w = torch.randn(V, 2, device=device)
    x = torch.tensor([[3e4, 0.0], [0.0, -1e6]], device=device)
    ids = torch.tensor([5, 6], device=device)
    assert_op_close(lambda *a: linear_logprob(*a, backend=backend), linear_logprob_reference, [x, w, ids])
    masked = torch.zeros(V, device=device)
    masked[100:] = -torch.inf
    inputs = [torch.zeros(1, 2, device=device), w, ids[:1], masked]
    assert_op_close(lambda *a: linear_logprob(*a, backend=backend), linear_logprob_reference, inputs)


def test_shapes_and_zero_rows(device, backend):
    x, w, ids, b = make(device)
    out = linear_logprob(x.view(1, N, H), w, ids.view(1, N), b, outputs=OUTPUTS, backend=backend)
    assert all(t.shape == (1, N) for t in out)
    empty = linear_logprob(x[:0], w, ids[:0], b, outputs=OUTPUTS, backend=backend)
    assert all(t.shape == (0,) for t in empty)
    assert not torch.autograd.grad(empty.log_prob.sum(), w)[0].any()


BAD = [
    ({"temperature": 0.0}, ValueError, "temperature must be a positive finite number; got 0.0"),
    ({"softcap": -1.0}, ValueError, "softcap must be None or a positive finite number; got -1.0"),
    ({"logit_scale": float("nan")}, ValueError, "logit_scale must be a finite number; got nan"),
    ({"outputs": ("entropies",)}, ValueError, r"outputs must be a sequence of entropy, .* got \('entropies',\)"),
    ({"outputs": "entropy"}, ValueError, "outputs must be a sequence"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options(options, error, message):
    x, w, ids, b = make(torch.device("cpu"))
    with pytest.raises(error, match=message):
        linear_logprob(x, w, ids, b, **options)


def test_ids_out_of_range():
    x, w, ids, b = make(torch.device("cpu"))
    ids[3] = -1
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 333\); got values from -1"):
        linear_logprob(x, w, ids, b)
