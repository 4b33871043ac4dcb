"""moe_experts against its reference: every gradient in every dtype, the variants, and rows and experts without each
other."""

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_trainer_kernels.ops import moe_experts, moe_experts_reference
from npu_trainer_kernels.ops.experts import grouped as grouped_module
from npu_trainer_kernels.ops.experts.moe_experts import unserved
from tests.closeness import assert_op_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPT_OSS = {"alpha": 1.702, "limit": 1.0, "offset": 1.0}
TENSORS = ("x", "expert_weights", "gate_up", "down", "gate_up_bias", "down_bias")


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_chance():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Case:
    """Ids of which some have no expert here, and an expert without rows; tiles of the interpreter are 4 x 64."""

    n: int = 9
    k: int = 3
    hidden: int = 40
    inner: int = 24
    experts: int = 5
    biased: bool = False
    ids: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, device, dtype=torch.float32, weights_dtype=None):
        """(ids, x, weights, gate_up, down and, where there are, their biases)."""
        ids = self.ids
        if ids is None:
            ids = torch.randint(0, self.experts + 2, (self.n, self.k), device=device)
            ids[ids == 1] = 2
        width = self.inner * (2 if self.options.get("gated", True) else 1)
        up = torch.randn(self.experts, width, self.hidden, device=device) / self.hidden**0.5
        down = torch.randn(self.experts, self.hidden, self.inner, device=device) / self.inner**0.5
        if self.options.get("transposed"):
            up, down = (t.transpose(1, 2).contiguous() for t in (up, down))
        made = [torch.randn(self.n, self.hidden, device=device), torch.rand(self.n, self.k, device=device), up, down]
        if self.biased:
            made += [torch.randn(self.experts, size, device=device) for size in (width, self.hidden)]
        made = [t.to(dtype).requires_grad_() for t in made]
        if weights_dtype is not None:
            made[1] = made[1].detach().to(weights_dtype).requires_grad_()
        return ids.to(device), *made

    def call(self, op, **more):
        def function(ids, x, weights, up, down, up_bias=None, down_bias=None):
            biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
            return op(x, ids, weights, up, down, **biases, **self.options, **more)

        return function

    def check(self, device, backend, dtype=torch.float32, **more):
        inputs = self.tensors(device, dtype, **more)
        ours, reference = self.call(moe_experts, backend=backend), self.call(moe_experts_reference)
        assert_op_close(ours, reference, inputs, upstream)


def upstream(outputs):
    y = outputs[0]
    return (y * torch.linspace(-1, 1.5, y.numel(), device=y.device).view_as(y).to(y.dtype)).sum(dtype=torch.float64)


def own_gate(h):
    return torch.tanh(h[:, :24]) * h[:, -24:]


def norm(y):
    return y * (y.square().mean(-1, keepdim=True) + 1e-2).rsqrt()


def options(**given):
    return Case(options=given)


VARIANTS = {
    "as it is": Case(),
    "biased": Case(biased=True),
    "transposed": options(transposed=True),
    "interleaved": options(interleaved=True),
    "gpt-oss": Case(biased=True, options={"transposed": True, "interleaved": True, **GPT_OSS}),
    "gelu": options(gate="gelu"),
    "gelu_tanh": options(gate="gelu_tanh"),
    "no gate": options(gated=False, gate="relu2"),
    "no gate, biased": Case(biased=True, options={"gated": False, "gate": "gelu", "transposed": True}),
    "a gate of its own": Case(biased=True, options={"gate": own_gate}),
    "no gate, code of its own": options(gated=False, gate=torch.sin, transposed=True),
    "post-norm": Case(biased=True, options={"post_norm": norm}),
    "post-norm, code of its own": options(gate=own_gate, post_norm=norm),
    "whole blocks": Case(hidden=128, inner=64, k=4, n=8),
    "several blocks": Case(hidden=72, inner=72, biased=True),
    "several blocks, interleaved": Case(inner=72, biased=True, options={"interleaved": True}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_matches_reference(device, backend, dtype, case):
    case.check(device, backend, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_the_router_in_fp32(device, backend, dtype):
    # Tokens enough for the reference's worst error to say how large its errors are.
    Case(n=120, biased=True).check(device, backend, dtype, weights_dtype=torch.float32)


SHAPES = {
    "one slot": Case(k=1),
    "one token": Case(n=1),
    "one token, one slot, one expert": Case(n=1, k=1, experts=1, ids=torch.zeros(1, 1, dtype=torch.int64)),
    "all in one expert": Case(ids=torch.full((9, 3), 4)),
    "nobody here": Case(ids=torch.full((9, 3), 5), biased=True),
    "some ids far beyond": Case(ids=torch.tensor([[0, 900, 4], [2**31 - 1, 7, 4]]), n=2),
    "in 32 bits": Case(ids=torch.randint(0, 6, (9, 3), dtype=torch.int32), biased=True),
}


@pytest.mark.parametrize("steps", [False, True], ids=["at once", "in steps"])
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_rows_of_any_number(device, backend, case, steps):
    extra = {"gate": own_gate, "post_norm": norm} if steps else {}
    Case(case.n, case.k, case.hidden, case.inner, case.experts, case.biased, case.ids, extra).check(device, backend)


@pytest.mark.parametrize("steps", [False, True], ids=["at once", "in steps"])
def test_no_tokens(device, backend, steps):
    case = Case(n=0, biased=True, ids=torch.zeros(0, 3, dtype=torch.int64), options={"gate": own_gate} if steps else {})
    inputs = case.tensors(device)
    y = case.call(moe_experts, backend=backend)(*inputs)
    assert y.shape == (0, 40)
    for leaf, gradient in zip(inputs[1:], torch.autograd.grad(y.sum(), inputs[1:]), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.count_nonzero()


@pytest.mark.parametrize("steps", [False, True], ids=["at once", "in steps"])
def test_rows_and_experts_without_each_other_get_zeros(device, backend, steps):
    case = Case(biased=True, options={"gate": own_gate} if steps else {})
    ids, *leaves = case.tensors(device)
    y = case.call(moe_experts, backend=backend)(ids, *leaves)
    grads = dict(zip(TENSORS, torch.autograd.grad(upstream([y]), leaves), strict=True))
    assert (ids >= 5).any()
    assert not grads["expert_weights"][ids >= 5].count_nonzero()
    assert grads["expert_weights"][ids < 5].all()
    for name in TENSORS[2:]:
        # Nobody is sent to the second.
        assert not grads[name][1].count_nonzero()
        assert all(g.count_nonzero() for g in grads[name][[0, 2, 3, 4]])


@pytest.mark.parametrize(
    "case", [VARIANTS["gpt-oss"], VARIANTS["post-norm, code of its own"]], ids=["at once", "in steps"]
)
def test_same_bits_twice(device, backend, case):
    inputs = case.tensors(device, torch.bfloat16)
    runs = [
        torch.autograd.grad(upstream([case.call(moe_experts, backend=backend)(*inputs)]), inputs[1:]) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_sums_are_in_fp32(device, backend):
    # 256 and 255 times a half: in bf16 the sum would stay at 256.
    ids = torch.zeros(1, 256, dtype=torch.int64, device=device)
    up = torch.ones(1, 8, 8, device=device, dtype=torch.bfloat16)
    down = torch.zeros_like(up)
    down[..., 0] = 1
    weights = torch.full((1, 256), 0.5, device=device, dtype=torch.bfloat16)
    weights[0, 0] = 256
    x = torch.ones(1, 8, device=device, dtype=torch.bfloat16) / 8
    y = moe_experts(x, ids, weights, up, down, gate="relu2", gated=False, backend=backend)
    assert torch.equal(y.float(), torch.full((1, 8), 384.0, device=device))


@pytest.mark.parametrize("frozen", range(1, 7))
def test_frozen_inputs_get_no_gradient(device, backend, frozen):
    case = Case(biased=True)
    inputs = list(case.tensors(device))
    inputs[frozen] = inputs[frozen].detach()
    assert_op_close(case.call(moe_experts, backend=backend), case.call(moe_experts_reference), inputs, upstream)


def test_any_strides(device, backend):
    case = Case(biased=True)
    ids, *leaves = case.tensors(device)

    def strided(x, weights, up, down, *biases):
        given = (
            ids.t().contiguous().t(), torch.stack([x, x], -1)[..., 0], weights.t().contiguous().t(),
            up.transpose(1, 2).contiguous().transpose(1, 2), down.transpose(1, 2).contiguous().transpose(1, 2),
        )  # fmt: skip
        assert not any(t.is_contiguous() for t in given)
        return case.call(moe_experts, backend=backend)(*given, *biases)

    assert_op_close(strided, lambda *a: case.call(moe_experts_reference)(ids, *a), leaves, upstream)


def test_code_of_the_models_own_trains_its_parameters(device, backend):
    scale = torch.rand(24, device=device, requires_grad=True)
    gain = torch.rand(40, device=device, requires_grad=True)

    def call(op, **more):
        def function(ids, x, weights, up, down, scale, gain):
            return op(
                x, ids, weights, up, down, gate=lambda h: own_gate(h) * scale, post_norm=lambda y: y * gain, **more
            )

        return function

    inputs = [*Case().tensors(device), scale, gain]
    assert_op_close(call(moe_experts, backend=backend), call(moe_experts_reference), inputs, upstream)


def test_of_all_rows_backward_keeps_one_tensor(device, backend):
    case = Case(n=64, hidden=40, inner=24)
    inputs = case.tensors(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        case.call(moe_experts, backend=backend)(*inputs)
    rows = {t.data_ptr(): t.shape for t in kept if t.is_floating_point() and t.shape[0] == 64 * 3}
    assert list(rows.values()) == [(64 * 3, 48)]


def test_what_a_frozen_parameter_alone_would_need_is_not_kept(device, backend):
    case = Case(n=7, biased=True)
    ids, *leaves = case.tensors(device)

    def kept(*frozen: str) -> int:
        given = [t.detach().requires_grad_(name not in frozen) for name, t in zip(TENSORS, leaves, strict=True)]
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            case.call(moe_experts, backend=backend)(ids, *given)
        return len(found)

    # The rows, and the matrix of the weights.
    assert kept("gate_up") == kept("down_bias") == kept() - 1
    assert kept("gate_up", "down_bias") == kept() - 2


def test_an_infinite_weight_reaches_its_own_experts_alone(device, backend):
    case = Case(ids=torch.tensor([[0, 2, 3]]), n=1, biased=True)
    inputs = case.tensors(device)
    with torch.no_grad():
        inputs[2][0, 1] = torch.inf
    y = case.call(moe_experts, backend=backend)(*inputs)
    (gradient,) = torch.autograd.grad(y, inputs[6], torch.ones_like(y))
    assert not gradient[2].isfinite().any()
    assert gradient[[0, 1, 3, 4]].isfinite().all()


def test_reads_no_number(backend):
    """Shapes do not depend on where tokens go: there are none on meta."""
    case = Case(biased=True, options=dict(GPT_OSS, interleaved=True))
    inputs = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in case.tensors(torch.device("cpu"))]
    y = case.call(moe_experts, backend="torch")(*inputs)
    grads = torch.autograd.grad(y.sum(), inputs[1:])
    assert [g.shape for g in (y, *grads)] == [t.shape for t in (inputs[1], *inputs[1:])]


@pytest.mark.parametrize("steps", [False, True], ids=["at once", "in steps"])
def test_autocast(device, backend, steps):
    case = Case(biased=True, options={"gate": own_gate} if steps else {})
    inputs = case.tensors(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = case.call(moe_experts, backend=backend)(*inputs)
    assert y.dtype == torch.float32
    grads = torch.autograd.grad(upstream([y]), inputs[1:])
    assert all(g.dtype == torch.float32 for g in grads)
    rounded = [t if t is inputs[0] else t.detach().bfloat16().requires_grad_() for t in inputs]
    rounded[2] = inputs[2]
    expected = case.call(moe_experts, backend=backend)(*rounded)
    assert torch.equal(y, expected.float())


def test_torch_compile_calls_it(device):
    case = Case(biased=True)

    def model(op):
        return lambda ids, x, *rest: case.call(op)(ids, torch.tanh(x), *rest) * 2

    compiled = torch.compile(model(moe_experts), backend="aot_eager")
    assert_op_close(compiled, model(moe_experts_reference), case.tensors(device), upstream)


WRONG = {
    "x": ({"x": torch.zeros(2, 3, 8)}, r"x must have shape \[N, H\]"),
    "ids": ({"expert_ids": torch.zeros(3, 2, dtype=torch.int64)}, r"expert_ids must have shape \[2, k\]"),
    "weights": ({"expert_weights": torch.zeros(2, 3)}, r"expert_weights must have expert_ids' shape \[2, 2\]"),
    "gate_up": ({"gate_up": torch.zeros(4, 8, 12)}, r"gate_up must have shape \[E, 2I, 8\] with transposed=False"),
    "odd gate_up": ({"gate_up": torch.zeros(4, 11, 8)}, "as many columns of up as of gate"),
    "down": ({"down": torch.zeros(4, 6, 8)}, r"down must have shape \[4, 8, 6\]"),
    "gate_up_bias": ({"gate_up_bias": torch.zeros(4, 6)}, r"gate_up_bias must have shape \[4, 12\]"),
    "down_bias": ({"down_bias": torch.zeros(8)}, r"down_bias must have shape \[4, 8\]"),
    "dtype of down": ({"down": torch.zeros(4, 8, 6).bfloat16()}, "down must have x's dtype torch.float32"),
    "negative ids": ({"expert_ids": torch.tensor([[0, -1], [0, 0]])}, "expert_ids must lie in"),
    "activation": ({"gate": "swish"}, "activation must be one of"),
    "limit without up": ({"gated": False, "gate_up": torch.zeros(4, 6, 8), "limit": 7.0}, "limit, offset and inter"),
    "alpha of a function": ({"gate": torch.sin, "alpha": 2.0}, "alpha, limit, offset and interleaved must be"),
    "backend": ({"backend": "cuda"}, "backend must be one of"),
    "what a gate returns": ({"gate": torch.sin}, r"gate must return a tensor of shape \[4, 6\]; got \[4, 12\]"),
    "what a norm returns": ({"post_norm": lambda y: y.sum(-1)}, r"post_norm must return a tensor of shape \[4, 8\]"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(changed, message):
    right = {
        "x": torch.zeros(2, 8), "expert_ids": torch.zeros(2, 2, dtype=torch.int64), "expert_weights": torch.zeros(2, 2),
        "gate_up": torch.zeros(4, 12, 8), "down": torch.zeros(4, 8, 6),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        moe_experts(**(right | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x must be float32, bfloat16 or float16"),
        ({"expert_ids": torch.zeros(2, 2)}, "expert_ids must be int64 or int32"),
        ({"gate": 3}, "gate must be the name of a gate or a function"),
    ],
    ids=["x", "ids", "gate"],
)
def test_wrong_types_are_named(changed, message):
    right = {
        "x": torch.zeros(2, 8), "expert_ids": torch.zeros(2, 2, dtype=torch.int64), "expert_weights": torch.zeros(2, 2),
        "gate_up": torch.zeros(4, 12, 8), "down": torch.zeros(4, 8, 6),
    }  # fmt: skip
    with pytest.raises(TypeError, match=message):
        moe_experts(**(right | changed))


def test_a_device_without_a_grouped_product_is_told(monkeypatch):
    assert unserved(torch.device("cpu"), torch.bfloat16, 40, 24) is None
    assert unserved(torch.device("mps"), torch.bfloat16, 40, 24) == "no grouped product is known on this kind of device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(grouped_module, "trial", lambda *args: None)
    cuda = torch.device("cuda")
    assert unserved(cuda, torch.bfloat16, 40, 24) is None
    assert (
        unserved(cuda, torch.bfloat16, 40, 28) == "rows of 28 elements: a grouped product wants multiples of 16 bytes"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)  # was asked for once, and never is again
    assert unserved(cuda, torch.bfloat16, 40, 24) is None
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert "takes bfloat16; got float32" in unserved(cuda, torch.float32, 40, 24)
    monkeypatch.delattr(torch, "_grouped_mm")
    assert unserved(cuda, torch.bfloat16, 40, 24) == "this PyTorch has no grouped product"


# ---------------------------------------------------------------------------------------------------------------------
# Models' own code, which shares nothing with the reference
# ---------------------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 40, "hidden_act": "silu", "intermediate_size": 24, "moe_intermediate_size": 24}
# Where the class is, what it wants in a configuration, and what the op is told.
CLASSES = {
    "Qwen3MoeExperts": ("qwen3_moe", {"num_experts": 5}, {}),
    "GptOssExperts": (
        "gpt_oss",
        {"num_local_experts": 5, "swiglu_alpha": 1.702, "swiglu_limit": 1.0},
        {"transposed": True, "interleaved": True, **GPT_OSS},
    ),
    "NemotronHExperts": (
        "nemotron_h",
        {"n_routed_experts": 5, "moe_latent_size": None, "mlp_hidden_act": "relu2"},
        {"gated": False, "gate": "relu2"},
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_computes_what_models_do(device, backend, name):
    family, given, options = CLASSES[name]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layer = getattr(modeling, name)(SimpleNamespace(**SIZES, **given, _experts_implementation="eager")).to(device)
    if "limit" in options:
        layer.alpha, layer.limit = options["alpha"], options["limit"]  # transformers 5.17 has no such settings
    case = Case(biased=layer.has_bias, ids=torch.randint(0, 5, (9, 3)), options=options)
    names = ["gate_up_proj" if layer.has_gate else "up_proj", "down_proj"]
    names += ["gate_up_proj_bias", "down_proj_bias"] if layer.has_bias else []

    def own(ids, x, weights, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, ids, weights))

    assert_op_close(case.call(moe_experts, backend=backend), own, case.tensors(device), upstream)
    assert_op_close(case.call(moe_experts_reference), own, case.tensors(device), upstream)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's grouped product, by the form that it has on the host
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped_mm(monkeypatch):
    """The calls that a GPU gets, on the host; rows of nobody and groups without rows hold NaN, as they may there."""
    original, calls = torch.nn.functional.grouped_mm, []

    def product(a, b, *, offs):
        calls.append((a.shape, b.shape))
        for t in (a, b):
            assert 1 in t.stride()
            assert all(s % 8 == 0 for s in t.stride() if s != 1)
        y = original(a, b, offs=offs)
        if a.dim() == b.dim() == 2:
            y[torch.cat((offs.new_zeros(1), offs[:-1])) == offs] = torch.nan
        else:
            y[offs[-1] :] = torch.nan
        return y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", product)
    monkeypatch.setattr(grouped_module.devices, "grouped_product_by", lambda device: "torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["as it is", "transposed", "gpt-oss", "post-norm, code of its own"])
def test_by_pytorchs_grouped_product(device, backend, grouped_mm, name, dtype):
    VARIANTS[name].check(device, backend, dtype)
    # Two forward, and two of each kind in backward.
    assert len(grouped_mm) == 6


@pytest.mark.parametrize("name", ["as it is", "post-norm, code of its own"])
def test_the_vendors_products_are_told_the_groups_in_one_tensor(device, monkeypatch, name):
    """They take int64, and our kernels int32: a conversion each would be six launches."""
    told = []

    def product(x, weight, groups):
        told.append(groups)
        return grouped(x, weight, groups.int(), "torch")

    def outer(x, dy, groups):
        told.append(groups)
        return outer_products(x, dy, groups.int(), groups.int(), "torch")

    grouped, outer_products, by_vendor = (
        grouped_module.grouped_product,
        grouped_module.outer_products,
        grouped_module._by_vendor,
    )

    def unless_here(where, backend):
        return backend != "torch" or by_vendor(where, backend)

    monkeypatch.setattr(grouped_module, "_by_vendor", unless_here)
    monkeypatch.setattr(grouped_module, "unavailable", lambda *args: None)
    monkeypatch.setattr(grouped_module.vendor, "grouped_product", product)
    monkeypatch.setattr(grouped_module.vendor, "outer_products", outer)
    case = VARIANTS[name]
    assert_op_close(case.call(moe_experts, backend="triton"), case.call(moe_experts_reference), case.tensors(device),
                    upstream)  # fmt: skip
    assert len(told) == 6
    assert {groups.dtype for groups in told} == {torch.int64}
    assert len({groups.data_ptr() for groups in told}) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is tried on an accelerator
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def untried():
    grouped_module.trial.cache_clear()
    yield
    grouped_module.trial.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_products_pass_their_trial(untried, dtype):
    assert grouped_module.trial(torch.device("cpu"), dtype, "torch") is None


def turned_matrices(right):
    return lambda x, weight, ends, backend: right(x, weight.flip(0), ends, backend)


def garbage_in_the_last_row(right):
    def wrong(x, weight, ends, backend):
        y = right(x, weight, ends, backend)
        y[8] = torch.nan
        return y

    return wrong


def groups_by_start(right):
    return lambda x, dy, ends, groups, backend: right(x, dy, ends, groups - groups[0], backend)


def absent(right):
    def wrong(*args):
        raise RuntimeError("group_type 2 is not supported\nand more")

    return wrong


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("grouped_product", turned_matrices, "gives other numbers there"),
        ("grouped_product", garbage_in_the_last_row, "off by nan"),
        ("outer_products", groups_by_start, "gives other numbers there"),
        ("outer_products", absent, "raises there: RuntimeError: group_type 2 is not supported"),
    ],
)
def test_wrong_products_fail_their_trial(untried, monkeypatch, name, fault, said):
    monkeypatch.setattr(grouped_module, name, fault(getattr(grouped_module, name)))
    reason = grouped_module.trial(torch.device("cpu"), torch.bfloat16, "torch")
    assert reason is not None
    assert said in reason
    assert "\n" not in reason


def test_an_accelerator_tries_its_products_once(monkeypatch):
    """And the report has the reason; on the host nothing is tried."""
    asked = []
    monkeypatch.setattr(grouped_module, "unavailable", lambda *args: None)
    monkeypatch.setattr(grouped_module, "trial", lambda *args: asked.append(args) or "it is broken")
    assert unserved(torch.device("cpu"), torch.bfloat16, 64, 32) is None
    assert not asked
    cuda = torch.device("cuda", 0)
    assert unserved(cuda, torch.bfloat16, 64, 32, backend="torch") == "it is broken"
    assert asked == [(cuda, torch.bfloat16, "torch")]
