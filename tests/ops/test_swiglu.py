"""swiglu against its reference."""

from types import SimpleNamespace

import pytest
import torch

from npu_trainer_kernels.ops import swiglu, swiglu_linear, swiglu_linear_reference, swiglu_reference
from npu_trainer_kernels.ops.gates import ACTIVATIONS
from tests.closeness import assert_op_close
from tests.pairs import pairs

# In the interpreter, of gates far out.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
# Blocks are of 64 elements in the interpreter: several and a tail, exactly some, less than one.
SHAPES = [(3, 5, 45), (3, 5, 48), (4, 64), (7,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(device, dtype=torch.float32, shape=(3, 5, 45)):
    # Gates far out on both sides: sigma saturates there.
    gate, up = (torch.randn(shape, device=device) * scale for scale in (6, 1))
    return [gate.to(dtype).requires_grad_(), up.to(dtype).requires_grad_()]


def upstream(outputs):
    y = outputs[0]
    return (y * torch.linspace(-1, 1.5, y.numel(), device=y.device).view_as(y).to(y.dtype)).sum(dtype=torch.float64)


def check(inputs, backend, **options):
    assert_op_close(
        lambda *a: swiglu(*a, backend=backend, **options), lambda *a: swiglu_reference(*a, **options), inputs, upstream
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(device, backend, dtype, shape):
    check(make(device, dtype, shape), backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_in_torch_has_the_bits_of_transformers(dtype):
    from transformers.activations import ACT2FN

    gate, up = make(torch.device("cpu"), dtype)
    assert torch.equal(swiglu(gate, up, backend="torch"), ACT2FN["silu"](gate) * up)


def test_large_gates_stay_finite(device, backend):
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], device=device, requires_grad=True)
    check([gate, torch.ones(5, device=device, requires_grad=True)], backend)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    inputs = make(device)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, backend)


# In the interpreter tiles of eight rows and of four, and rows that fill none; blocks of a row.
@pytest.mark.parametrize("width", [8, 16, 45, 64, 130])
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
    def model(op):
        return lambda gate, up: op(torch.tanh(gate), up) * 2

    compiled = torch.compile(model(swiglu), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(swiglu_reference), make(device), upstream)


# ---------------------------------------------------------------------------------------------------------------------
# Other gates, and both in one tensor
# ---------------------------------------------------------------------------------------------------------------------


GPT_OSS = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
GATES = [
    {"activation": "gelu"},
    {"activation": "gelu_tanh"},
    {"activation": "relu2"},
    {"alpha": 1.702},
    {"limit": 0.75},
    {"activation": "gelu_tanh", "limit": 2.0, "offset": -0.5},
    GPT_OSS,
]


def test_every_activation_is_among_the_gates():
    assert {each.get("activation", "silu") for each in GATES} == set(ACTIVATIONS)


def make_joined(device, dtype=torch.float32, shape=(3, 5, 45), joined="halves"):
    gate, up = (t.detach() for t in make(device, dtype, shape))
    both = torch.cat([gate, up], -1) if joined == "halves" else torch.stack([gate, up], -1).flatten(-2)
    return both.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", GATES, ids=str)
def test_other_gates_match_reference(device, backend, dtype, options):
    # Most of up and some of the gates beyond a limit of 7.
    gate, up = make(device, dtype)
    up = (5 * up.detach()).requires_grad_()
    check([gate, up], backend, **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "joined", "options"), pairs(SHAPES, DTYPES, ["halves", "interleaved"], [{}, GPT_OSS]), ids=str
)
def test_joined_matches_reference(device, backend, dtype, shape, joined, options):
    check([make_joined(device, dtype, shape, joined)], backend, joined=joined, **options)


@pytest.mark.parametrize("joined", ["halves", "interleaved"])
@pytest.mark.parametrize("width", [45, 48])
def test_joined_has_the_bits_of_two_tensors(device, backend, joined, width):
    both = make_joined(device, torch.bfloat16, (3, 5, width), joined)
    parts = both.chunk(2, -1) if joined == "halves" else (both[..., ::2], both[..., 1::2])
    runs = []
    for y in (swiglu(both, joined=joined, backend=backend), swiglu(*parts, backend=backend)):
        runs.append([y, *torch.autograd.grad(upstream([y]), both)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("joined", ["halves", "interleaved"])
def test_joined_of_any_strides(device, backend, joined):
    both = make_joined(device, joined=joined)
    strided = both.transpose(0, 1).contiguous().transpose(0, 1)
    runs = []
    for t in (strided, both):
        y = swiglu(t, joined=joined, backend=backend)
        runs.append([y, *torch.autograd.grad(y.transpose(0, 1).sum(), both)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("joined", ["halves", "interleaved"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_joined(device, backend, joined, shape):
    both = torch.ones(*shape, device=device, requires_grad=True)
    y = swiglu(both, joined=joined, backend=backend)
    assert y.shape == (shape[0], shape[1] // 2)
    assert torch.autograd.grad(y.sum(), both)[0].shape == shape


def test_a_value_at_its_limit_has_a_gradient(device, backend):
    """As `torch.clamp` has it; the value right beyond has none."""
    at = torch.tensor([2.0, -2.0, 1.0], device=device)
    gate, up = (t.requires_grad_() for t in (at.clone(), at.flip(0)))
    check([gate, up], backend, limit=2.0)
    beyond = torch.nextafter(at, 4 * at)
    gate, up = (t.requires_grad_() for t in (beyond.clone(), beyond.clone()))
    dgate, dup = torch.autograd.grad(swiglu(gate, up, limit=2.0, backend=backend).sum(), (gate, up))
    assert [bool(t) for t in dgate] == [False, True, True]
    assert [bool(t) for t in dup] == [False, False, True]


@pytest.mark.parametrize("options", GATES, ids=str)
def test_large_values_of_other_gates_stay_finite(device, backend, options):
    values = [torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4], device=device, requires_grad=True) for _ in range(2)]
    check(values, backend, **options)


def model_gates():
    """(what a model computes of gate and up, the options that say so), from transformers' own code."""
    from transformers.activations import ACT2FN
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

    def act(name):
        return lambda both: ACT2FN[name](both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]

    def own(cls, **numbers):
        return lambda both: cls._apply_gate(SimpleNamespace(act_fn=ACT2FN["silu"], **numbers), both)

    halves, limited = {"joined": "halves"}, {"joined": "halves", "limit": 7.0}
    return {
        "silu": (act("silu"), halves),
        "gelu": (act("gelu"), {"activation": "gelu", **halves}),
        "gelu_pytorch_tanh": (act("gelu_pytorch_tanh"), {"activation": "gelu_tanh", **halves}),
        "relu2": (act("relu2"), {"activation": "relu2", **halves}),
        "quick_gelu": (act("quick_gelu"), {"alpha": 1.702, **halves}),
        "gpt-oss": (own(GptOssExperts, limit=7.0, alpha=1.702), {**GPT_OSS, "joined": "interleaved"}),
        "minimax-m3": (own(MiniMaxM3VLExperts, swiglu_limit=7.0, swiglu_alpha=1.702), {**GPT_OSS, **halves}),
        "deepseek-v4": (own(DeepseekV4Experts, limit=7.0), limited),
        "glm-5-next": (own(Glm5NextTextExperts, swiglu_limit=7.0), limited),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", model_gates())
def test_in_torch_it_has_the_bits_of_the_models(dtype, name):
    function, options = model_gates()[name]
    both = (12 * torch.randn(7, 64)).to(dtype)
    assert torch.equal(swiglu(both, backend="torch", **options), function(both))


@pytest.mark.parametrize("name", model_gates())
def test_it_is_as_close_as_the_models_are(device, backend, name):
    """Also where a model rounds elsewhere, as the other spellings of GELU do in bf16."""
    function, options = model_gates()[name]
    both = (4 * torch.randn(7, 64, device=device)).bfloat16().requires_grad_()
    assert_op_close(lambda t: swiglu(t, backend=backend, **options), function, [both], upstream)


@pytest.mark.parametrize("spelling", ["gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_tanh_is_as_close_as_its_other_spellings(device, backend, dtype, spelling):
    from transformers.activations import ACT2FN

    def plain(gate, up):
        return ACT2FN[spelling](gate) * up

    inputs = make(device, dtype)
    assert_op_close(lambda *a: swiglu(*a, activation="gelu_tanh", backend=backend), plain, inputs, upstream)


@pytest.mark.parametrize("options", GATES, ids=str)
@pytest.mark.parametrize("joined", [None, "halves", "interleaved"])
def test_linear_with_other_gates(device, backend, options, joined):
    gate, up, weight, bias = make_linear(device, torch.bfloat16)
    if joined is not None:
        gate, up = make_joined(device, torch.bfloat16, joined=joined), None
    check_linear([gate, up, weight, bias], backend, joined=joined, **options)


@pytest.mark.parametrize("joined", ["halves", "interleaved"])
@pytest.mark.parametrize("width", [45, 48])
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=str)
def test_overwriting_what_is_joined_changes_no_gradient(device, backend, joined, width, options):
    both, runs = make_joined(device, torch.bfloat16, (3, 5, width), joined), []
    _, _, *rest = make_linear(device, torch.bfloat16, (3, 5, width))
    for overwrite in (False, True):
        given = both * 1
        before = given.detach().clone()
        z = swiglu_linear(given, None, *rest, overwrite=overwrite, joined=joined, backend=backend, **options)
        runs.append([z, *torch.autograd.grad(upstream([z]), [both, *rest])])
        assert torch.equal(given, before) != (overwrite and backend != "torch")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_other_gates_compile_without_graph_break(device):
    def model(op):
        return lambda both, weight: op(torch.tanh(both), None, weight, joined="interleaved", **GPT_OSS) * 2

    inputs = [make_joined(device, joined="interleaved"), make_linear(device)[2]]
    compiled = torch.compile(model(swiglu_linear), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(swiglu_linear_reference), inputs, upstream)


BAD_GATES = [
    ({"activation": "swish"}, "activation must be one of silu, .*; got 'swish'"),
    ({"activation": "gelu", "alpha": 2.0}, "alpha must be a finite number, and 1 with another .*; got 2.0"),
    ({"alpha": float("inf")}, "alpha must be a finite number.*; got inf"),
    ({"limit": 0.0}, "limit must be None or a positive finite number; got 0.0"),
    ({"limit": float("nan")}, "limit must be None or a positive finite number; got nan"),
    ({"offset": "1"}, "offset must be a finite number; got '1'"),
    ({"joined": "rows"}, "joined must be one of halves, interleaved; got 'rows'"),
    ({"joined": "halves"}, "up must be None where gate holds both, as joined='halves' says"),
    ({"up": None}, "up must be a tensor unless joined says how gate holds both; got None"),
    ({"up": None, "joined": "halves"}, r"gate must have an even last dimension with joined='halves'; got \[3, 5, 45\]"),
]


@pytest.mark.parametrize(("options", "message"), BAD_GATES, ids=str)
def test_a_bad_gate_names_argument_value_and_what_is_allowed(options, message):
    gate, up = (t.detach() for t in make(torch.device("cpu")))
    with pytest.raises(ValueError, match=message):
        swiglu(gate, **{"up": up, **options})
    with pytest.raises(ValueError, match=message):
        swiglu_linear(gate, options.get("up", up), torch.ones(2, 45), **{k: v for k, v in options.items() if k != "up"})


# ---------------------------------------------------------------------------------------------------------------------
# With the projection that follows
# ---------------------------------------------------------------------------------------------------------------------


def make_linear(device, dtype=torch.float32, shape=(3, 5, 45), has_bias=True):
    weight = (torch.randn(11, shape[-1], device=device) / shape[-1] ** 0.5).to(dtype).requires_grad_()
    bias = torch.randn(11, device=device).to(dtype).requires_grad_() if has_bias else None
    return [*make(device, dtype, shape), weight, bias]


def check_linear(inputs, backend, overwrite=False, **options):
    assert_op_close(
        lambda *a: swiglu_linear(*a, backend=backend, overwrite=overwrite, **options),
        lambda *a: swiglu_linear_reference(*a, **options),
        inputs,
        upstream,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_matches_reference(device, backend, dtype, shape, has_bias):
    check_linear(make_linear(device, dtype, shape, has_bias), backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_has_the_bits_of_swiglu_and_linear(device, backend, dtype):
    inputs = make_linear(device, dtype)
    runs = []
    for op in (
        lambda g, u, w, b: swiglu_linear(g, u, w, b, backend=backend),
        lambda g, u, w, b: torch.nn.functional.linear(swiglu(g, u, backend=backend), w, b),
    ):
        z = op(*inputs)
        runs.append([z, *torch.autograd.grad(upstream([z]), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (2,), (3,), (2, 3), (0, 1, 3)], ids=str)
def test_linear_with_frozen_inputs(device, backend, frozen):
    inputs = make_linear(device)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    check_linear(inputs, backend)


def test_linear_of_halves_of_one_tensor(device, backend):
    _, _, weight, bias = make_linear(device)
    both = torch.randn(3, 5, 90, device=device, requires_grad=True)
    assert_op_close(
        # Halves are not contiguous: nothing may be overwritten then.
        lambda t, w, b: swiglu_linear(*t.chunk(2, -1), w, b, overwrite=True, backend=backend),
        lambda t, w, b: swiglu_linear_reference(*t.chunk(2, -1), w, b),
        [both, weight, bias],
        upstream,
    )


def test_linear_keeps_no_product(device, backend):
    inputs, kept = make_linear(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_linear(*inputs, backend=backend)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in inputs[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_overwriting_changes_no_gradient(device, backend, dtype):
    leaves, runs = make_linear(device, dtype), []
    for overwrite in (False, True):
        gate, up = (t * 1 for t in leaves[:2])
        before = gate.detach().clone()
        z = swiglu_linear(gate, up, *leaves[2:], overwrite=overwrite, backend=backend)
        runs.append([z, *torch.autograd.grad(upstream([z]), leaves)])
        assert torch.equal(gate, before) != (overwrite and backend != "torch")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_graph_that_is_kept_is_not_overwritten(device, backend):
    leaves = make_linear(device)
    loss = upstream([swiglu_linear(*(t * 1 for t in leaves[:2]), *leaves[2:], overwrite=True, backend=backend)])
    runs = [torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, True, False)]
    assert all(torch.equal(a, b) for later in runs[1:] for a, b in zip(runs[0], later, strict=True))


@pytest.mark.parametrize("shape", [(0, 45), (3, 0)])
def test_linear_of_nothing(device, backend, shape):
    inputs = make_linear(device, shape=shape)
    z = swiglu_linear(*inputs, overwrite=True, backend=backend)
    assert z.shape == (*shape[:-1], 11)
    assert [g.shape for g in torch.autograd.grad(z.sum(), inputs)] == [t.shape for t in inputs]


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_linear_under_autocast(device, backend, gate_dtype):
    inputs = [*make(device, gate_dtype), *make_linear(device)[2:]]
    runs = []
    for op in (
        lambda g, u, w, b: swiglu_linear(g, u, w, b, backend=backend),
        lambda g, u, w, b: torch.nn.functional.linear(swiglu(g, u, backend=backend), w, b),
    ):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            z = op(*inputs)
        runs.append([z, *torch.autograd.grad(upstream([z]), inputs)])
    assert runs[0][0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_linear_under_checkpointing(device, backend):
    from torch.utils.checkpoint import checkpoint

    leaves, runs = make_linear(device), []
    for keep in (False, True):

        def block(gate, up, weight, bias):
            return swiglu_linear(gate * 1, up * 1, weight, bias, overwrite=True, backend=backend)

        z = checkpoint(block, *leaves, use_reentrant=False) if keep else block(*leaves)
        runs.append(torch.autograd.grad(upstream([z]), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_linear_compiles_without_graph_break(device):
    def model(op):
        return lambda gate, up, weight, bias: op(torch.tanh(gate), up, weight, bias) * 2

    compiled = torch.compile(model(swiglu_linear), backend="aot_eager", fullgraph=True)
    assert_op_close(compiled, model(swiglu_linear_reference), make_linear(device), upstream)


BAD_LINEAR = [
    (lambda w, b: (w.double(), b), TypeError, "weight must be float32, bfloat16 or float16; got torch.float64"),
    (lambda w, b: (w.half(), b), ValueError, r"weight must have gate's dtype torch\.float32 without autocast"),
    (lambda w, b: (w, b.half()), ValueError, r"bias must have gate's dtype torch\.float32 without autocast"),
    (lambda w, b: (w[:, 1:], b), ValueError, r"weight must have shape \[H, 45\], as gate says; got \[11, 44\]"),
    (lambda w, b: (w[0], b), ValueError, r"weight must have shape \[H, 45\]"),
    (lambda w, b: (w, b[1:]), ValueError, r"bias must have shape \[11\]; got \[10\]"),
    (lambda w, b: (w.to("meta"), b), ValueError, "all tensors must be on one device"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_LINEAR)
def test_bad_projection_names_argument_value_and_what_is_allowed(change, error, message):
    gate, up, weight, bias = (t.detach() for t in make_linear(torch.device("cpu")))
    with pytest.raises(error, match=message):
        swiglu_linear(gate, up, *change(weight, bias))


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
