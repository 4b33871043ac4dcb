"""Code that has an op's values in one forward and is something else nevertheless: it is left alone, and the report does
not say that it was replaced."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import LlamaConfig, T5Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaModel, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm

from npu_trainer_kernels import apply_npu_kernels
from tests.models import SMALL, small_model


def product(mlp, x):
    return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)


def normed(norm, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(x.dtype)


def scaled(embedding, ids):
    return F.embedding(ids, embedding.weight) * embedding.embed_scale.to(embedding.weight.dtype)


def noisy(module, x):
    return x + torch.rand_like(x) if module.training else x


def shrunk(x):
    """The same values, and half the gradient."""
    return x / 2 + x.detach() / 2


def without_gradient_of_rstd(norm, x):
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x.float() * rstd.detach()).to(x.dtype)


def over_the_second_dimension(norm, x):
    rstd = torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x.float() * rstd).to(x.dtype)


MLPS = {
    "its input is scaled": lambda mlp, x: mlp.down_proj(product(mlp, x * 2)),
    "the gate sees another input": lambda mlp, x: mlp.down_proj(
        mlp.act_fn(mlp.gate_proj(x.roll(1, 1))) * mlp.up_proj(x)
    ),
    "the gate's input is detached": lambda mlp, x: mlp.down_proj(
        mlp.act_fn(mlp.gate_proj(x.detach())) * mlp.up_proj(x)
    ),
    "the gate is detached": lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)).detach() * mlp.up_proj(x)),
    "its input is added": lambda mlp, x: x.sum(-1, keepdim=True) + mlp.down_proj(product(mlp, x)),
    "it drops out in training": lambda mlp, x: mlp.down_proj(F.dropout(product(mlp, x), 0.5, mlp.training)),
    "its product is clamped": lambda mlp, x: mlp.down_proj(product(mlp, x).clamp(-1e3, 1e3)),
}
NORMS = {
    "noise in training": lambda norm, x: normed(norm, noisy(norm, x)),
    "without the gradient of rstd": without_gradient_of_rstd,
    "without the gradient of its weight": lambda norm, x: normed(norm, x) / norm.weight * norm.weight.detach(),
    "over the second dimension": over_the_second_dimension,
    "its input is clamped": lambda norm, x: normed(norm, x.clamp(-100, 100)),
    "another dtype": lambda norm, x: normed(norm, x).float(),
}
EMBEDDINGS = {
    "noise in training": lambda embedding, ids: noisy(embedding, scaled(embedding, ids)),
    "half the gradient": lambda embedding, ids: shrunk(scaled(embedding, ids)),
}
EXPERTS = {
    "half the gradient": lambda experts, x, ids, weights: type(experts).__base__.forward(
        experts, shrunk(x), ids, weights
    ),
    "noise in training": lambda experts, x, ids, weights: type(experts).__base__.forward(
        experts, noisy(experts, x), ids, weights
    ),
}


def experts():
    return small_model("qwen3-moe").model.layers[0].mlp.experts


# Why, by op; and for MLPs whose projections do not all have the MLP's input.
WHY = {
    "swiglu": "it does not compute down(act(gate(x)) * up(x)) with an act that swiglu knows",
    "rms_norm": "it does not compute an RMSNorm that rms_norm knows",
    "embedding": "it is not an embedding times a scale",
    "moe_experts": "its own code computes something else than its flags say",
}
OTHER_INPUT = "its projections are given something else than its input"
OTHERWISE = dict.fromkeys(("its input is scaled", "the gate sees another input", "the gate's input is detached"),
                          OTHER_INPUT)  # fmt: skip


MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "swiglu": (lambda: LlamaMLP(LlamaConfig(**SMALL)), {"itself": LlamaMLP.forward, **MLPS}),
    "rms_norm": (lambda: LlamaRMSNorm(48), {"itself": normed, **NORMS}),
    "embedding": (lambda: Gemma3TextScaledWordEmbedding(9, 48, 0, 7.0), {"itself": scaled, **EMBEDDINGS}),
    "moe_experts": (experts, {"itself": None, **EXPERTS}),
}
CASES = [(op, name) for op, (_, forwards) in MODULES.items() for name in forwards]


@pytest.mark.parametrize(("op", "name"), CASES)
def test_what_is_nearly_an_op_is_left_alone(op, name):
    make, forwards = MODULES[op]
    module = make().eval()
    if forwards[name] is not None:
        module.__class__ = type("Mine", (type(module),), {"forward": forwards[name]})
    state = torch.get_rng_state()
    with apply_npu_kernels(nn.Sequential(module), ops=[op]) as kernels:
        report = kernels.report()
    assert len(report.replaced) == (name == "itself"), report
    left = [] if name == "itself" else [("0", OTHERWISE.get(name, WHY[op]))]
    assert [(each.module, each.reason) for each in report.left_alone if each.op == op] == left
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in module.modules())


def raises(kind):
    def forward(module, *given):
        raise kind("not with so few rows")

    return forward


def twice_gated(mlp, x):
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.gate_proj(x))


def of_halves(norm, x):
    return F.layer_norm(x.unflatten(-1, (2, -1)), (24,), eps=norm.eps).flatten(-2) * norm.weight + norm.bias


# op -> a module, another forward of it, and why it is left alone.
UNKNOWN = [
    ("rms_norm", lambda: LlamaRMSNorm(48), raises(ValueError), "its forward cannot be probed (ValueError)"),
    ("swiglu", MODULES["swiglu"][0], raises(IndexError), "its forward cannot be probed (IndexError)"),
    ("embedding", MODULES["embedding"][0], raises(TypeError), "its forward cannot be probed (TypeError)"),
    ("moe_experts", experts, lambda experts, x, ids, weights: experts.absent,
     "its forward cannot be probed (AttributeError)"),
    ("rms_norm", lambda: LlamaRMSNorm(48), lambda norm, x: (normed(norm, x), x),
     "its forward does not return one tensor"),
    ("layer_norm", lambda: nn.LayerNorm(48), of_halves, "it does not compute a layer norm that layer_norm knows"),
    ("swiglu", MODULES["swiglu"][0], twice_gated, "its forward does not call each of its projections once"),
    ("swiglu", MODULES["swiglu"][0], lambda mlp, x: (mlp.down_proj(product(mlp, x)), x),
     "its forward does not call each of its projections once"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "make", "forward", "why"), UNKNOWN)
def test_what_a_probe_makes_nothing_of_is_left_alone(op, make, forward, why):
    module = make()
    module.__class__ = kind = type("Mine", (type(module),), {"forward": forward})
    with apply_npu_kernels(nn.Sequential(module), ops=[op]) as kernels:
        assert type(module) is kind
        assert [(each.op, each.reason) for each in kernels.report().left_alone] == [(op, why)]


def mean_of_weights_dtype(norm, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return (norm.weight.float() * wide).to(norm.weight.dtype)


@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [T5LayerNorm, LlamaRMSNorm, "in its weight's dtype"], ids=str)
def test_norms_of_two_dtypes(cls, of_input, of_weight):
    """T5's returns what its weight is of, and models that keep some projections in fp32 hand it fp32."""
    cls = type("Mine", (LlamaRMSNorm,), {"forward": mean_of_weights_dtype}) if isinstance(cls, str) else cls
    model = nn.Sequential(cls(48).to(of_weight))
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 48).to(of_input)
    expected = model(x)
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels:
        found = model(x.requires_grad_())
        served = cls is LlamaRMSNorm or of_input is of_weight
        assert kernels.report().ran["rms_norm"] == served
        reasons = [] if served else ["parameters of another dtype than what is normed"]
        assert [each.reason for each in kernels.report().declined] == reasons
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_layers_that_repeat_each_other_are_probed_once(monkeypatch):
    from npu_trainer_kernels.patching.modules import norm_forms

    probed, original = [], norm_forms._recognise
    monkeypatch.setattr(norm_forms, "_recognise", lambda module: probed.append(module) or original(module))
    model = small_model("llama")
    model.model.layers[1].input_layernorm.variance_epsilon = 0.05
    with apply_npu_kernels(model, ops=["rms_norm", "layer_norm", "gated_rms_norm", "add_rms_norm"]) as kernels:
        assert [r.detail for r in kernels.report().replaced if "eps=0.05" in r.detail] == [
            "casting=llama, offset=0, eps=0.05"
        ]
    assert len(probed) == 2


class Limited(LlamaMLP):
    """As DeepSeek-V4's, whose gate is the usual one but for large numbers."""

    limit = 10.0

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


def test_a_limit_of_a_gated_mlp_is_seen():
    model = nn.Sequential(Limited(LlamaConfig(**SMALL)))
    model[0].limit = 10.0
    x = 1e3 * torch.randn(2, 3, 48)
    expected = model(x)
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        assert [r.detail for r in kernels.report().replaced] == ["silu, limit=10.0"]
        assert_close(model(x), expected)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_last_projection_that_is_kept_in_fp32(adapted):
    """As in T5, which casts what it gives to it."""
    config = T5Config(d_model=48, d_ff=80, dropout_rate=0.0, feed_forward_proj="gated-gelu")
    model = nn.Sequential(T5DenseGatedActDense(config).bfloat16())
    model[0].wo.float()
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["wo"], r=2))
    x = torch.randn(2, 3, 48).bfloat16()
    expected = model(x)
    with apply_npu_kernels(model, ops=["swiglu"]) as kernels:
        found = model(x)
        assert [each.reason for each in kernels.report().declined] == [
            "its last projection is of another dtype than the others"
        ]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


class Mixes(LlamaDecoderLayer):
    """Its tokens see each other's mean in training."""

    def forward(self, hidden_states, *args, **kwargs):
        out = super().forward(hidden_states, *args, **kwargs)
        return out + out.mean(1, keepdim=True) if self.training else out


class MixingModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(Mixes(config, i) for i in range(config.num_hidden_layers))


def test_a_body_that_mixes_tokens_in_training_alone():
    config = LlamaConfig(**SMALL)
    for cls, served in ((LlamaModel, True), (MixingModel, False)):
        with apply_npu_kernels(cls(config).eval(), ops=["varlen_attention"]) as kernels:
            assert len(kernels.report().replaced) == served
            assert ["not what they are in their own" in left.reason for left in kernels.report().left_alone] == (
                [] if served else [True]
            )
