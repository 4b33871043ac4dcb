"""gated_rms_norm against its reference and against the modules of transformers."""

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from npu_trainer_kernels.ops import gated_rms_norm, gated_rms_norm_reference
from tests.closeness import assert_op_close
from tests.models import since
from tests.ops.test_rms_norm import DTYPES, VIEWS, upstream
from tests.pairs import pairs

# As for rms_norm; in groups of 12 and of 8 columns, of 100 (two blocks of 64 each, the last one short), of 128.
SHAPES = [((11, 24), 1), ((3, 5, 96), 1), ((2, 37), 1), ((5, 200), 1), ((11, 24), 2), ((37, 32), 4), ((5, 400), 2),
          ((3, 256), 2)]  # fmt: skip
OPTIONS = [
    {"order": "norm_first", "casting": "llama"},
    {"order": "norm_first", "casting": "gemma", "activation": "sigmoid"},
    {"order": "gate_first", "casting": "llama"},
    {"order": "gate_first", "casting": "gemma", "offset": 1.0, "eps": 1e-2},
]


def make(device, dtype=torch.float32, shape=(11, 24), gate_dtype=None, weight_dtype=None):
    # Rows of very different sizes: a wrong rstd or eps shows.
    x = torch.randn(shape, device=device) * torch.logspace(-2, 1, shape[-2], device=device)[:, None]
    gate, w = 2 * torch.randn(shape, device=device), 1 + 0.5 * torch.randn(shape[-1], device=device)
    made = x.to(dtype), gate.to(gate_dtype or dtype), w.to(weight_dtype or dtype)
    return [t.requires_grad_() for t in made]


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: gated_rms_norm(*a, backend=backend, **options),
        lambda *a: gated_rms_norm_reference(*a, **options),
        inputs,
        upstream,
    )


@pytest.mark.parametrize(("grouped", "options", "dtype"), pairs(SHAPES, OPTIONS, DTYPES), ids=str)
def test_matches_reference(device, backend, dtype, grouped, options):
    shape, groups = grouped
    check(make(device, dtype, shape), backend, groups=groups, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), [((11, 24), 2), ((5, 400), 2)], ids=str)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_without_gate(device, backend, dtype, shape, groups, casting):
    x, _, w = make(device, dtype, shape)
    check([x, None, w], backend, groups=groups, casting=casting)


@pytest.mark.parametrize("gate", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_dtypes_of_gate_and_weight(device, backend, gate, dtypes, options):
    inputs = make(device, dtypes[0], gate_dtype=gate, weight_dtype=dtypes[1])
    check(inputs, backend, **options)
    promotes = options["order"] == "gate_first" and options["casting"] == "llama"
    expected = torch.float32 if promotes else dtypes[0]
    assert gated_rms_norm(*inputs, backend=backend, **options).dtype == expected


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
def test_frozen_inputs_get_no_gradient(device, backend, frozen, options):
    inputs = make(device)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    check(inputs, backend, **options)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_rows_in_which_epsilon_counts(device, backend, dtype, options, eps):
    x, gate, w = make(device, dtype)
    small = (x.detach().float() / x.detach().float().pow(2).mean(-1, keepdim=True).sqrt() * eps**0.5).to(dtype)
    check([small.requires_grad_(), gate, w], backend, eps=eps, **options)


@pytest.mark.parametrize("size", [30.0, 200.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gates_far_from_zero(device, backend, options, size):
    x, gate, w = make(device)
    check([x, (size * gate.detach().sign()).requires_grad_(), w], backend, **options)


KIMI = KimiLinearRMSNormGated(96)
# Zamba2's is there in every version; those that are newer, or have had groups since.
BAILING = since("5.20", "bailing_hybrid", "BailingHybridRMSNormGated")
NEMOTRON_H = since("5.20", "nemotron_h", "NemotronHRMSNormGated")
BAMBA = since("5.23", "bamba", "BambaRMSNormGated")
MODULES = [
    (Qwen3NextRMSNormGated(96), {}),
    *((each(96), {"casting": "gemma", "activation": "sigmoid"}) for each in BAILING),
    (KIMI, {"casting": "gemma", "activation": KIMI.activation}),
    *((each(96, 96), {"order": "gate_first"}) for each in BAMBA),
    (Zamba2RMSNormGated(96, 32), {"order": "gate_first", "groups": 3}),
    *((each(96, 24), {"order": "gate_first", "groups": 4}) for each in NEMOTRON_H),
    (FalconH1RMSNormGated(96, n_groups=2), {"casting": "gemma", "groups": 2}),
    (FalconH1RMSNormGated(96, norm_before_gate=False), {"order": "gate_first", "casting": "gemma"}),
]


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize(("norm", "options"), MODULES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_forward_in_torch_has_the_bits_of_transformers(norm, options, dtypes, size):
    """Also of rows so small that their epsilon counts."""
    x, gate, w = (t.detach() for t in make(torch.device("cpu"), dtypes[0], (4, 7, 96), weight_dtype=dtypes[1]))
    norm = norm.to(dtypes[1])
    with torch.no_grad():
        norm.weight.copy_(w)
        expected = norm(x * size, gate)
    y = gated_rms_norm(x * size, gate, w, 1e-6, backend="torch", **options)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(device, backend, view, options):
    x, gate, w = make(device, shape=(3, 5, 24))
    strided = [VIEWS[view](t.detach()) for t in (x, gate)]
    assert not strided[0].is_contiguous()
    inputs = [*(t.requires_grad_() for t in strided), w]
    assert_op_close(
        lambda *a: gated_rms_norm(*a, groups=2, backend=backend, **options),
        lambda *a: gated_rms_norm_reference(*a, groups=2, **options),
        inputs,
        lambda outputs: upstream([VIEWS[view](outputs[0])]),
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_zero_rows(device, backend, groups):
    x, gate = (torch.zeros(0, 24, device=device, requires_grad=True) for _ in range(2))
    w = torch.randn(24, device=device, requires_grad=True)
    y = gated_rms_norm(x, gate, w, groups=groups, backend=backend)
    gx, gz, gw = torch.autograd.grad(y.sum(), (x, gate, w))
    assert y.shape == gx.shape == gz.shape == (0, 24)
    assert gw.shape == (24,)
    assert not gw.any()


def test_same_bits_twice(device, backend):
    inputs = make(device)
    runs = [
        torch.autograd.grad(upstream([gated_rms_norm(*inputs, groups=2, backend=backend)]), inputs) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_torch_compile_without_graph_break(device, options):
    def model(x, gate, w):
        return gated_rms_norm(torch.tanh(x), gate, w, groups=2, **options) * 2

    def plain(x, gate, w):
        return gated_rms_norm_reference(torch.tanh(x), gate, w, groups=2, **options) * 2

    assert_op_close(torch.compile(model, backend="aot_eager", fullgraph=True), plain, make(device), upstream)


BAD = [
    (lambda x, z, w: (x.double(), z, w), {}, TypeError, "x must be float32, bfloat16 or float16; got torch.float64"),
    (lambda x, z, w: (x, z.long(), w), {}, TypeError, "gate must be float32, bfloat16 or float16; got torch.int64"),
    (lambda x, z, w: (x, z, None), {}, TypeError, "weight must be a tensor; got NoneType"),
    (lambda x, z, w: (x, z, w[:-1]), {}, ValueError, r"weight must have shape \[24\].*got \[23\]"),
    (lambda x, z, w: (x, z[:-1], w), {}, ValueError, r"gate must have x's shape \[11, 24\]; got \[10, 24\]"),
    (lambda x, z, w: (x, z, w, -1.0), {}, ValueError, r"eps must be .* not negative; got -1\.0"),
    (lambda x, z, w: (x, z, w), {"offset": float("inf")}, ValueError, "offset must be a finite number; got inf"),
    (lambda x, z, w: (x, z, w), {"casting": "none"}, ValueError, "casting must be one of llama, gemma; got 'none'"),
    (lambda x, z, w: (x, z, w), {"order": "both"}, ValueError, "order must be one of norm_first, gate_first; got 'b"),
    (lambda x, z, w: (x, z, w), {"activation": "relu"}, ValueError, "activation must be one of silu, sigmoid; got"),
    (lambda x, z, w: (x, z, w), {"groups": 5}, ValueError, "groups must be a positive int that divides .* 24; got 5"),
    (lambda x, z, w: (x, z, w), {"groups": 2.0}, ValueError, r"groups must be a positive int .*; got 2\.0"),
    (lambda x, z, w: (x, z, w), {"backend": "cudnn"}, ValueError, "backend must be one of"),
    (lambda x, z, w: (x, z.to("meta"), w), {}, ValueError, "on one device; got x on cpu, gate on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "error", "message"), BAD)
def test_bad_input_names_argument_value_and_what_is_allowed(change, options, error, message):
    with pytest.raises(error, match=message):
        gated_rms_norm(*change(*(t.detach() for t in make(torch.device("cpu")))), **options)
