"""Every op on the code that an NPU would get, executed on the CPU, against its reference by the one closeness rule.

The tiles are the chip's, so shapes are chosen to end in masked tails there: rows that fill no tile, columns that fill
no block.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from npu_trainer_kernels import device, ops, tiling
from npu_trainer_kernels.ascend.execute import LEVELS
from npu_trainer_kernels.ascend.launcher import LaunchRecorder, LoweringLauncher
from npu_trainer_kernels.ascend.plan import plan, violations
from npu_trainer_kernels.descriptions import GATE, GATE_DTYPES, GateTensors
from npu_trainer_kernels.ops.gates import ACTIVATIONS
from npu_trainer_kernels.ops.head.head_options import HeadOptions
from npu_trainer_kernels.ops.head.statistics import _raw_statistics
from npu_trainer_kernels.ops.launch import use_launcher
from npu_trainer_kernels.ops.norms.rms_kernels import CASTINGS
from tests.closeness import assert_op_close
from tests.ops.test_grpo_loss import FORMS, token_gradient, token_numbers
from tests.pairs import pairs

CHIP = "Ascend910B4"
# The other level is nearer to the chip.
pytestmark = [pytest.mark.usefixtures("kept_cache"), pytest.mark.full("ttadapter")]


def paired(**parameters):
    """Parameters of a test, of which every two values meet, and each with every dtype and level; see `tests.pairs`."""

    def keep(test):
        test.paired = parameters
        return test

    return keep


def pytest_generate_tests(metafunc):
    """Every dtype on the level that is nearer to the chip; on the one that it is made from, where the place of a fault
    shows, fp32 alone."""
    if "launcher" not in metafunc.fixturenames:
        return
    names, cases = ["launcher"], [(level,) for level in LEVELS]
    if "tensors" in metafunc.fixturenames:
        names, cases = ["launcher", "tensors"], [(LEVELS[0], "fp32"), *((LEVELS[1], dtype) for dtype in GATE_DTYPES)]
    parameters = getattr(metafunc.function, "paired", {})
    rows = [(*case, *values) for case, *values in pairs(cases, *parameters.values())]
    ids = ["-".join(map(str, row)) for row in rows]
    metafunc.parametrize([*names, *parameters], rows, indirect=names, ids=ids)


@pytest.fixture
def launcher(request):
    """Executes launches at one level of the lowering, with the chip's tiles."""
    launcher = LoweringLauncher(CHIP, request.param)
    with device.use_chip(CHIP), use_launcher(launcher):
        yield launcher


@pytest.fixture
def tensors(request):
    return GateTensors(GATE_DTYPES[request.param], "cpu")


def weighted(outputs):
    """A gradient that differs from element to element, for every differentiable output."""
    total = torch.zeros((), dtype=torch.float64)
    for number, y in enumerate(y for y in outputs if y is not None and y.requires_grad):
        # A loss is one element, and the sine of nought is nought.
        g = (torch.arange(y.numel()) * 0.37 + number).sin().view(y.shape) if y.dim() else torch.ones(())
        total = total + (y * g.to(y.dtype)).sum(dtype=torch.float64)
    return total


def check(launcher, op, inputs, kernels, **options):
    reference = getattr(ops, {"fused_linear_cross_entropy": "linear_cross_entropy"}.get(op, op) + "_reference")
    function = getattr(ops, op)
    assert_op_close(
        lambda *a: function(*a, backend="ascend-lowering", **options),
        lambda *a: reference(*a, **options),
        inputs,
        weighted,
    )
    assert set(launcher.traffic) == set(kernels), "the comparison says nothing where no kernel ran"


NORM = ("_forward_kernel", "_backward_kernel")
WEIGHTED = (*NORM, "_sum_kernel")
# Tiles of many rows and a tail; of a few rows; one row each, whole and in pieces; two halves, where there are any;
# column blocks whose last one is short.
NORM_SHAPES = [(150, 200), (7, 1250), (3, 4500), (3, 5120), (3, 6144), (5, 9000)]
NORMS = [*({"casting": casting} for casting in CASTINGS), {"casting": "gemma", "offset": 1.0}]


@paired(shape=[shape for shape in NORM_SHAPES if shape[1] != 6144], options=NORMS)
def test_rms_norm(launcher, tensors, shape, options):
    check(launcher, "rms_norm", [tensors.floats(*shape), tensors.floats(shape[1])], WEIGHTED, **options)


@paired(options=NORMS)
def test_rms_norm_in_halves(launcher, tensors, options):
    """Backward, of elements of two bytes: with every option."""
    check(launcher, "rms_norm", [tensors.floats(3, 6144), tensors.floats(6144)], WEIGHTED, **options)


# Halves, where there are any, are of elements of two bytes: forward if the sum is written, and backward.
@pytest.mark.parametrize("shape", [(3, 5120), (3, 6144)], ids=str)
@paired(mode=["pre", "post"])
def test_add_rms_norm_in_halves(launcher, tensors, shape, mode):
    inputs = [tensors.floats(*shape), tensors.floats(*shape), tensors.floats(shape[1])]
    check(launcher, "add_rms_norm", inputs, WEIGHTED, mode=mode)


@paired(shape=[shape for shape in NORM_SHAPES if shape[1] not in (5120, 6144)], mode=["pre", "post"])
def test_add_rms_norm(launcher, tensors, shape, mode):
    inputs = [tensors.floats(*shape), tensors.floats(*shape), tensors.floats(shape[1])]
    check(launcher, "add_rms_norm", inputs, WEIGHTED, mode=mode)


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_add_rms_norm_of_a_multiple(launcher, tensors, mode):
    inputs = [tensors.floats(150, 200), tensors.floats(150, 200), tensors.floats(200)]
    check(launcher, "add_rms_norm", inputs, WEIGHTED, mode=mode, multiplier=0.22)


@paired(shape=NORM_SHAPES, given=[1, 2, 3])
def test_layer_norm(launcher, tensors, shape, given):
    inputs = [tensors.floats(*shape), tensors.floats(shape[1]), tensors.floats(shape[1])]
    check(launcher, "layer_norm", inputs[:given], NORM if given == 1 else WEIGHTED)


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_layer_norm_of_a_large_mean(launcher, shape):
    """The mean's own rounding costs no digits of what is left."""
    tensors = GateTensors(torch.float32, "cpu")
    x = (300 + tensors.floats(*shape)).detach().requires_grad_()
    check(launcher, "layer_norm", [x, tensors.floats(shape[1]), tensors.floats(shape[1])], WEIGHTED)


# As above; then in groups, one and several column blocks each.
GATED = [*((shape, 1) for shape in NORM_SHAPES), ((150, 400), 2), ((3, 18000), 2)]
ORDERS = [
    {"order": "norm_first"},
    {"order": "norm_first", "casting": "gemma", "activation": "sigmoid"},
    {"order": "gate_first"},
]


@paired(grouped=GATED, options=ORDERS)
def test_gated_rms_norm(launcher, tensors, grouped, options):
    shape, groups = grouped
    inputs = [tensors.floats(*shape), tensors.floats(*shape), tensors.floats(shape[1])]
    check(launcher, "gated_rms_norm", inputs, WEIGHTED, groups=groups, **options)


def test_grouped_rms_norm_without_gate(launcher, tensors):
    inputs = [tensors.floats(150, 400), None, tensors.floats(400)]
    check(launcher, "gated_rms_norm", inputs, WEIGHTED, groups=2, casting="gemma", offset=1.0)


def test_add_rms_norm_to_an_fp32_residual(launcher):
    t = GateTensors(torch.bfloat16, "cpu")
    check(
        launcher, "add_rms_norm", [t.floats(11, 200), t.floats(11, 200, dtype=torch.float32), t.floats(200)], WEIGHTED
    )


@pytest.mark.parametrize("strided", [False, True])
def test_swiglu(launcher, tensors, strided):
    # Whole blocks and a tail: contiguous tensors are one row of 30000.
    gate, up = tensors.floats(3, 20000).detach().chunk(2, -1)
    if not strided:
        gate, up = gate.contiguous(), up.contiguous()
    check(launcher, "swiglu", [gate.requires_grad_(), up.requires_grad_()], NORM)


# Tiles of several rows, and rows that fill none; of one row each; equal tiles of a row; tiles with a mask.
@pytest.mark.parametrize("width", [1408, 2880, 11008, 8200])
def test_swiglu_of_halves(launcher, tensors, width):
    gate, up = tensors.floats(7, 2 * width).detach().chunk(2, -1)
    check(launcher, "swiglu", [gate.requires_grad_(), up.requires_grad_()], NORM)


@pytest.mark.parametrize("strided", [False, True])
def test_swiglu_linear(launcher, tensors, strided):
    gate, up = tensors.floats(3, 20000).detach().chunk(2, -1)
    if not strided:
        gate, up = gate.contiguous(), up.contiguous()
    inputs = [gate.requires_grad_(), up.requires_grad_(), tensors.floats(7, 10000)]
    check(launcher, "swiglu_linear", inputs, NORM)


GATES = [*({"activation": name} for name in ACTIVATIONS), {"alpha": 1.702, "limit": 7.0, "offset": 1.0}]


@pytest.mark.parametrize("options", GATES, ids=str)
def test_other_gates(launcher, tensors, options):
    # Beyond the limit, too.
    gate, up = ((5 * tensors.floats(3, 10000).detach()).requires_grad_() for _ in range(2))
    check(launcher, "swiglu", [gate, up], NORM, **options)


# Rows of their own with a tail each; one long row; tiles of several rows, and one that fills none.
@paired(shape=[(3, 9999), (3, 10000), (5, 704)], options=[{}, GATES[-1]], joined=["halves", "interleaved"])
def test_joined(launcher, tensors, joined, options, shape):
    rows, width = shape
    both = (5 * tensors.floats(rows, 2 * width).detach()).requires_grad_()
    check(launcher, "swiglu", [both], NORM, joined=joined, **options)


@pytest.mark.parametrize("joined", ["halves", "interleaved"])
def test_joined_with_its_projection(launcher, tensors, joined):
    inputs = [tensors.floats(3, 20000), None, tensors.floats(7, 10000)]
    check(launcher, "swiglu_linear", inputs, NORM, joined=joined, activation="gelu_tanh")


ROTATIONS = [
    {"tables": "pair"},
    {"pairs": "interleaved", "casting": "fp32"},
    {"pairs": "interleaved", "tables": "first_half"},
    {"pairs": "regrouped", "tables": "pair"},
]


@paired(options=ROTATIONS, rest=[0, 24])
def test_rotations(launcher, tensors, options, rest):
    q, k = tensors.floats(2, 3, 130, 64 + rest), tensors.floats(2, 1, 130, 64 + rest)
    width = 32 if options.get("tables") == "pair" else 64
    cos, sin = (tensors.floats(1, 130, width, grad=False) for _ in range(2))
    check(launcher, "rope", [q, k, cos, sin], ["_rotate_kernel"], **options)


@pytest.mark.parametrize("size", [64, 72, 96])
def test_rope(launcher, tensors, size):
    q, k = tensors.floats(2, 3, 130, size), tensors.floats(2, 1, 130, size)
    cos, sin = (tensors.floats(1, 130, size, grad=False) for _ in range(2))
    check(launcher, "rope", [q, k, cos, sin], ["_rotate_kernel"])


# One row at a time, since rows are no whole 32-byte units; several; column blocks.
@paired(columns=[200, 208, 9000], options=[{}, {"padding_idx": 4, "scale": 2.5}])
def test_embedding(launcher, tensors, columns, options):
    ids = tensors.ids(3, 50, below=17)
    check(launcher, "embedding", [ids, tensors.floats(19, columns)], ["_gather_kernel", "_scatter_kernel"], **options)


ROWS_OF_EXPERTS = ("_to_rows_kernel", "_sums_kernel", "_clear_kernel")
AT_ONCE = (*ROWS_OF_EXPERTS, "_gate_kernel", "_gate_backward_kernel")
IN_STEPS = (*ROWS_OF_EXPERTS, "_sums_backward_kernel", "_clear_tail_kernel", "_expert_sums_kernel")
GPT_OSS = {"alpha": 1.702, "limit": 1.0, "offset": 1.0, "interleaved": True}
EXPERTS = {
    # Tiles of many rows and a tail; rows in column blocks whose last one is short, of the rows and of the gate.
    "as it is": (200, 40, False, {}, AT_ONCE),
    "long rows": (9000, 40, False, {}, AT_ONCE),
    "a wide gate": (40, 9008, False, {"transposed": True}, AT_ONCE),
    "gpt-oss": (40, 200, True, GPT_OSS, (*AT_ONCE, "_expert_sums_kernel")),
    "gpt-oss, wide": (40, 2904, True, GPT_OSS, (*AT_ONCE, "_expert_sums_kernel")),
    "no gate": (40, 200, True, {"gated": False, "gate": "relu2"}, (*AT_ONCE, "_expert_sums_kernel")),
    "a gate of its own": (200, 40, True, {"gate": lambda h: torch.tanh(h[:, :40]) * h[:, 40:]}, IN_STEPS),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_moe_experts(launcher, tensors, name):
    hidden, inner, biased, options, kernels = EXPERTS[name]
    width = inner * (2 if options.get("gated", True) else 1)
    # Some have no expert here, and the second expert no rows.
    ids = tensors.ids(60, 3, below=6)
    ids[ids == 1] = 2
    up, down = (tensors.floats(*shape).detach() for shape in ((5, width, hidden), (5, hidden, inner)))
    if options.get("transposed"):
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    weights = [(up / hidden**0.5).requires_grad_(), (down / inner**0.5).requires_grad_()]
    biases = [tensors.floats(5, columns) for columns in (width, hidden)] if biased else [None, None]

    def call(op, **more):
        def function(x, ids, scores, up, down, up_bias, down_bias):
            return op(x, ids, scores, up, down, gate_up_bias=up_bias, down_bias=down_bias, **options, **more)

        return function

    inputs = [tensors.floats(60, hidden), ids, tensors.floats(60, 3), *weights, *biases]
    ours = call(ops.moe_experts, backend="ascend-lowering")
    assert_op_close(ours, call(ops.moe_experts_reference), inputs, weighted)
    assert set(launcher.traffic) == set(kernels), "the comparison says nothing where no kernel ran"


HEAD = ("_row_statistics_kernel", "_row_gradient_kernel")
# Shorter than the lanes; folded steps and a tail; several gradient blocks and a tail.
VOCABULARIES = [99, 3001, 20011]


def head_inputs(tensors, vocabulary):
    x = tensors.floats(5, 24)
    weight = (0.3 * tensors.floats(vocabulary, 24).detach()).requires_grad_()
    # Logits about 1, as the mean over 20011 logits about 0 is a small difference of large sums in any order.
    bias = (1 + tensors.floats(vocabulary).detach()).requires_grad_()
    return [x, weight, tensors.ids(5, below=vocabulary), bias]


@paired(
    vocabulary=VOCABULARIES,
    options=[{}, {"softcap": 3.0, "logit_scale": 2.0}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"reduction": "none"}],
)
def test_linear_cross_entropy(launcher, tensors, vocabulary, options):
    inputs = head_inputs(tensors, vocabulary)
    inputs[2][1] = -100
    check(launcher, "fused_linear_cross_entropy", inputs, HEAD, **options)


def test_linear_cross_entropy_with_class_weights(launcher, tensors):
    weights = torch.rand(3001) + 0.5
    options = {"class_weights": weights, "label_smoothing": 0.1, "softcap": 3.0}
    check(launcher, "fused_linear_cross_entropy", head_inputs(tensors, 3001), HEAD, **options)


def test_token_accuracy_and_predicted_ids(launcher, tensors):
    x, weight, target, bias = head_inputs(tensors, 3001)
    out = ops.fused_linear_cross_entropy(
        x, weight, target, bias, outputs=("token_accuracy", "predicted_ids"), backend="ascend-lowering"
    )
    argmax = torch.nn.functional.linear(x, weight, bias).argmax(-1)
    assert torch.equal(out.predicted_ids, argmax)
    assert out.token_accuracy == (argmax == target).float().mean()


@paired(
    vocabulary=VOCABULARIES,
    options=[
        {"outputs": ("entropy",), "temperature": 0.7},
        {"outputs": ("entropy", "is_top1", "mean_logit", "log_sum_sq_probs"), "softcap": 3.0},
    ],
)
def test_linear_logprob(launcher, tensors, vocabulary, options):
    check(launcher, "linear_logprob", head_inputs(tensors, vocabulary), HEAD, **options)


@paired(
    vocabulary=VOCABULARIES,
    beta=[0, 0.3, 1],
    options=[
        {},
        {"reduction": "none", "temperature": 0.7},
        {"outputs": ("log_prob", "entropy"), "softcap": 3.0, "teacher_softcap": 5.0},
    ],
)
def test_linear_divergence(launcher, tensors, vocabulary, beta, options):
    x, weight, ids, bias = head_inputs(tensors, vocabulary)
    teacher = [t.detach().flip(0).contiguous() for t in (x, weight, bias)]
    kernels = ("_row_statistics_kernel", "_row_divergence_kernel")
    inputs = [x, weight, *teacher[:2], bias, teacher[2]]
    check(launcher, "linear_divergence", inputs, kernels, beta=beta, ids=ids, **options)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [({}, (*HEAD, "_token_kernel")), ({"importance_level": "sequence", "entropy_coef": 0.01}, HEAD)],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True])
def test_grpo_loss(launcher, tensors, fused, options, kernels):
    x, weight, _, _ = head_inputs(tensors, 3001)
    x, ids, mask = x.detach().view(1, 5, 24).requires_grad_(), tensors.ids(1, 5, below=3001), torch.ones(1, 5)
    mask[:, 4] = 0
    logits = torch.nn.functional.linear(x, weight).detach().requires_grad_()
    old = torch.log_softmax(logits.detach().float(), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) + 0.1
    given = {"completion_mask": mask, "old_log_prob": old, "options": ops.GrpoOptions(**options)}
    name, inputs = ("fused_linear_grpo_loss", [x, weight]) if fused else ("grpo_loss", [logits])
    assert_op_close(
        lambda *a: getattr(ops, name)(*a, ids, torch.ones(1), backend="ascend-lowering", **given).loss,
        lambda *a: getattr(ops, name + "_reference")(*a, ids, torch.ones(1), **given).loss,
        inputs,
        lambda outputs: outputs[0],
    )
    assert set(launcher.traffic) == set(kernels if fused else HEAD)


@paired(options=FORMS, kl=[None, "plain", "corrected"], times=[1, 100])
def test_the_arithmetic_of_grpo_loss(launcher, options, kl, times):
    """A tail alone; blocks of one core and a tail."""
    options = replace(options, beta=0.3 if kl else 0.0, bias_corrected_kl=kl == "corrected")
    # Without a KL: a loss on-policy, which has neither old log-probabilities nor weights.
    numbers = token_numbers("cpu", *[kl is not None] * 3, times=times)
    assert (len(numbers[0]) > 2 * tiling.token_block(device.chip_spec(CHIP)).size) == (times > 1)
    with device.use_spec(replace(device.chip_spec(CHIP), vector_cores=1)):
        assert_op_close(token_gradient(options, "ascend-lowering"), token_gradient(options, "torch"), numbers)
    assert set(launcher.traffic) == {"_token_kernel"}


@paired(
    # A head, a group that one program computes, and one that several compute; heads that are no multiple of 32 bytes.
    heads=[(2, 2, 64, 64), (10, 2, 64, 64), (12, 1, 64, 128), (6, 3, 20, 36)],
    # One part, and several.
    places=[40, 300],
    options=[{}, {"window": 33}, {"softcap": 2.0, "scale": 1.0, "sinks": True}, {"window": 280, "sinks": True}],
)
def test_decode_attention(launcher, tensors, heads, places, options):
    q_heads, k_heads, size, value_size = heads
    lengths = torch.tensor([0, places, 1, places - 7], dtype=torch.int32)
    sinks = tensors.floats(q_heads, grad=False) if options.get("sinks") else None
    shapes = [(4, q_heads, size), (4, k_heads, places, size), (4, k_heads, places, value_size)]
    q, keys, values = (tensors.floats(*shape, grad=False) for shape in shapes)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = values[row, :, length:] = torch.nan
    several = places > 128 and options.get("window") != 33
    kernels = ["_attend_kernel", *(["_merge_kernel"] if several else [])]
    check(launcher, "decode_attention", [q, keys, values, lengths], kernels, **options | {"sinks": sinks})


@paired(
    # One block; equal ones; several whose last one is short.
    channels=[96, 4096, 2100],
    taps=[1, 3, 4, 8],
    activation=[None, "silu"],
    # Rows of two chunks; segments of one token, of fewer than taps, of a chunk and more.
    lengths=[None, (1, 2, 130, 1, 5)],
    given=["all", "no bias", "no state"],
)
def test_causal_conv1d(launcher, tensors, channels, taps, activation, lengths, given):
    batch, length, rows = (2, 131, 2) if lengths is None else (1, sum(lengths), len(lengths))
    x = tensors.floats(batch, length, channels).detach().transpose(1, 2).requires_grad_()
    weight, bias = tensors.floats(channels, taps), tensors.floats(channels) if given != "no bias" else None
    state = tensors.floats(rows, channels, taps - 1) if given != "no state" else None
    segments = None if lengths is None else ops.Segments.make(lengths, "cpu")

    def call(op, **more):
        options = {"activation": activation, "segments": segments, "return_state": True, **more}
        return lambda x, weight, bias, state: op(x, weight, bias, state=state, **options)

    ours = call(ops.causal_conv1d, backend="ascend-lowering")
    assert_op_close(ours, call(ops.causal_conv1d_reference), [x, weight, bias, state], weighted)
    assert set(launcher.traffic) == set(WEIGHTED), "the comparison says nothing where no kernel ran"


def test_append_to_cache(launcher, tensors):
    keys, values = tensors.floats(3, 5, 7, 20, grad=False), tensors.floats(3, 5, 7, 36, grad=False)
    k, v = tensors.floats(3, 5, 20, grad=False), tensors.floats(3, 5, 36, grad=False)
    expected = keys.clone(), values.clone()
    for row, place in ((0, 6), (2, 0)):
        expected[0][row, :, place], expected[1][row, :, place] = k[row], v[row]
    ops.append_to_cache(k, v, keys, values, torch.tensor([6, -1, 0]), backend="ascend-lowering")
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    assert set(launcher.traffic) == {"_append_kernel"}


@pytest.mark.parametrize("norm", [None, "llama", "gemma", "none"])
@pytest.mark.parametrize("rotated", [32, 16])
def test_qk_norm_rope_append(rotated, norm, launcher, tensors):
    heads = [(12, 32), (4, 32), (4, 16)]
    product = tensors.floats(3, sum(n * size for n, size in heads), grad=False)
    parts = product.split([n * size for n, size in heads], 1)
    q, k, v = (part.unflatten(1, of) for part, of in zip(parts, heads, strict=True))
    cos, sin, q_weight, k_weight = (
        tensors.floats(*shape, grad=False) for shape in ((3, rotated), (3, rotated), (32,), (32,))
    )
    places = torch.tensor([6, -1, 0])

    def call(backend):
        def prepared(q, k, v, cos, sin, q_weight, k_weight):
            keys, values = q.new_zeros(3, 4, 7, 32), q.new_zeros(3, 4, 7, 16)
            how = None if norm is None else ops.QkNorm(q_weight, k_weight, casting=norm)
            if backend is not None:
                out = ops.qk_norm_rope_append(q, k, v, cos, sin, keys, values, places, norm=how, backend=backend)
                return out, keys, values
            if norm is not None:
                q, k = (ops.rms_norm_reference(x, w, casting=norm) for x, w in ((q, q_weight), (k, k_weight)))
            q, k = (t[:, :, 0] for t in ops.rope_reference(q[:, :, None], k[:, :, None], cos[:, None], sin[:, None]))
            for row, place in ((0, 6), (2, 0)):
                keys[row, :, place], values[row, :, place] = k[row], v[row]
            return q, keys, values

        return prepared

    assert_op_close(call("ascend-lowering"), call(None), [q, k, v, cos, sin, q_weight, k_weight])
    assert set(launcher.traffic) == {"_prepare_kernel"}


def test_every_op_of_the_gate_is_executed_here():
    executed = {
        "rms_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "layer_norm",
        "swiglu",
        "swiglu_linear",
        "rope",
        "embedding",
        "moe_experts",
        "linear_cross_entropy",
        "linear_logprob",
        "linear_divergence",
        "grpo_loss",
        "decode_attention",
        "causal_conv1d",
    }
    assert {entry.op.partition(",")[0] for entry in GATE} == executed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_weights", [False, True])
def test_the_tile_of_the_statistics_fits_with_every_combination_of_flags(dtype, has_weights):
    logits = torch.empty(4096, 151936, dtype=dtype, device="meta")
    class_weights = torch.empty(151936, device="meta") if has_weights else None
    recorder = LaunchRecorder()
    with device.use_chip(CHIP), use_launcher(recorder):
        for softcap, entropy, squares, argmax in itertools.product((None, 30.0), *[(False, True)] * 3):
            options = HeadOptions(softcap=softcap, entropy=entropy, mean=True, log_sum_sq=squares, argmax=argmax)
            _raw_statistics(logits, class_weights, options, "ascend-lowering")
    plans = [plan(launch.specialize(CHIP)) for launch in recorder.launches]
    assert len(plans) == 16
    assert [violations(p) for p in plans] == [[]] * 16
