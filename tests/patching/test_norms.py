"""Norms of every kind: what is recognised of transformers' own classes, and whole small models that have them."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.patching import PATCHES
from npu_trainer_kernels.patching.modules.norm_forms import GatedNormForm, LayerNormForm, NormForm, recognise_norm
from npu_trainer_kernels.support.foreign import at_least
from tests.closeness import assert_as_close, rounded, rounded_if_needed
from tests.models import SMALL, batch, since

# Newer than the others, or with groups since.
BAILING = since("5.20", "bailing_hybrid", "BailingHybridRMSNormGated")
NEMOTRON_H = since("5.20", "nemotron_h", "NemotronHRMSNormGated")
CENTRED = since("5.20", "muse_spark", "MuseSparkTextCenteredRMSNorm")
BAMBA = since("5.23", "bamba", "BambaRMSNormGated")
MAMBA2 = since("5.23", "mamba2", "MambaRMSNormGated")
# Before, rows of one token lose their dimension of tokens and their gates do not: [B, D] times [B, 1, D] is [B, B, D].
FALCON_H1, ONE_TOKEN = at_least("transformers", "5.23"), "its code asks whether seq_len == 1"


def gated(order, activation, casting, groups, needs_gate, eps=1e-6):
    return GatedNormForm(eps, 0.0, order, activation, casting, groups, True, needs_gate)


FORMS = [
    (GemmaRMSNorm(64), NormForm(1e-6, 1.0, "gemma", True)),
    (Cohere2LayerNorm(64), LayerNormForm(1e-5, 0.0, True, False, fused=False)),
    (nn.LayerNorm(64), LayerNormForm(1e-5, 0.0, True, True, fused=True, one_dtype=True)),
    (nn.LayerNorm(64, bias=False, eps=1e-6), LayerNormForm(1e-6, 0.0, True, False, fused=True, one_dtype=True)),
    (nn.LayerNorm(48, elementwise_affine=False), LayerNormForm(1e-5, 0.0, False, False, fused=True)),
    (OlmoLayerNorm(48), LayerNormForm(1e-5, 0.0, False, False, fused=True)),
    (NemotronLayerNorm1P(64), LayerNormForm(1e-5, 1.0, True, True, fused=True, one_dtype=True)),
    (Qwen3NextRMSNormGated(64), gated("norm_first", "silu", "llama", 1, True)),
    *((each(64), gated("norm_first", "sigmoid", "gemma", 1, True)) for each in BAILING),
    (KimiLinearRMSNormGated(64), gated("norm_first", "sigmoid", "gemma", 1, True)),
    *((each(64, 64), gated("gate_first", "silu", "llama", 1, False)) for each in BAMBA),
    (Zamba2RMSNormGated(64, 16), gated("gate_first", "silu", "llama", 4, False)),
    *((each(64, 8), gated("gate_first", "silu", "llama", 8, False)) for each in NEMOTRON_H),
    *((each(64, 32), gated("gate_first", "silu", "llama", 2, False)) for each in MAMBA2),
    (FalconH1RMSNormGated(64, n_groups=4), gated("norm_first", "silu", "gemma", 4, False) if FALCON_H1 else ONE_TOKEN),
    (
        FalconH1RMSNormGated(64, n_groups=4, norm_before_gate=False),
        gated("gate_first", "silu", "gemma", 4, False) if FALCON_H1 else ONE_TOKEN,
    ),
    (Qwen4ExpTextRMSNorm(64), NormForm(1e-6, 1.0, "gemma", True)),
    # It casts once more than the others.
    *((each(64), "it does not compute an RMSNorm that rms_norm knows") for each in CENTRED),
    (Qwen4ExpTextRMSNorm(64, 16), GatedNormForm(1e-6, 1.0, "norm_first", "silu", "gemma", 4, False, False)),
]


@pytest.mark.parametrize(("module", "form"), FORMS, ids=lambda v: type(v).__name__)
def test_what_is_recognised(module, form):
    found = recognise_norm(module)
    assert found == (form if isinstance(form, str) else replace(form, settings=found.settings))


class _Off(nn.Module):
    """A norm that differs from one that is known in a single place."""

    def __init__(self, fault):
        super().__init__()
        self.weight, self.eps, self.fault = nn.Parameter(torch.ones(64)), 1e-6, fault

    def forward(self, x, gate=None):
        wide = x.float()
        if self.fault == "squares":
            wide = wide * wide
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * (wide * rstd).to(x.dtype)
        gate = gate.float()
        a = torch.tanh(gate) if self.fault == "activation" else nn.functional.silu(gate)
        if self.fault == "casting":
            a = a.to(x.dtype)
        return (y * a).to(x.dtype)


@pytest.mark.parametrize("fault", ["squares", "activation", "casting"])
def test_what_is_a_little_different_is_left_alone(fault):
    assert recognise_norm(_Off(fault)) == "it does not compute a gated RMSNorm that gated_rms_norm knows"
    assert isinstance(recognise_norm(_Off("")), GatedNormForm)


_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16, "mamba_n_groups": 1,
                          "mamba_chunk_size": 8}  # fmt: skip
# What differs from SMALL, and how often each op's norms and adds run in a forward.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
         "experts_implementation": "eager"},
        {"rms_norm": 5, "gated_rms_norm": 1, "add_rms_norm": 2},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}, {"rms_norm": 3, "gated_rms_norm": 1, "add_rms_norm": 2}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 32, "residual_multiplier": 0.22, "experts_implementation": "eager"},
        {"rms_norm": 3, "gated_rms_norm": 1, "add_rms_norm": 2},
    ),
    "nemotron-h": (
        "NemotronH",
        {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
         "layers_block_type": ["mamba", "attention"]},
        {"rms_norm": 3, "gated_rms_norm": 1},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.0625}, {"layer_norm": 3}),
    "granite": ("Granite", {"residual_multiplier": 0.22}, {"rms_norm": 3, "add_rms_norm": 2}),
    "starcoder2": ("Starcoder2", {}, {"layer_norm": 5}),
}  # fmt: skip
NORM_OPS = ("rms_norm", "gated_rms_norm", "layer_norm", "add_rms_norm")


def make(name):
    kind, differs, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **differs})
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def loss_and_gradients(model):
    """As `tests.models` has it; experts that get no token have no gradient."""
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_whole_models_have_their_own_loss_and_gradients(name, backend):
    model, plain = make(name), make(name)
    expected, truth = loss_and_gradients(plain), loss_and_gradients(make(name).double())
    moved = rounded_if_needed(lambda: loss_and_gradients(plain))
    with apply_npu_kernels(model, ops=NORM_OPS, backend=",".join(f"{op}={backend}" for op in NORM_OPS)) as kernels:
        found = loss_and_gradients(model)
        report = kernels.report()
        assert {op: count for op, count in report.ran.items() if count} == MODELS[name][2]
        assert report.declined == []
        assert [left for left in report.left_alone if left.counts] == []
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert_as_close(value, expected[key], truth[key], f"{name} {key}", moved(key))


def test_pytorchs_own_layer_norm_stays_unless_it_is_asked_for():
    with apply_npu_kernels(make("starcoder2")) as kernels:
        left = [each for each in kernels.report().left_alone if each.op == "layer_norm"]
        assert {each.kind for each in left} == {"LayerNorm"}
        assert all("one pass over its input already" in each.reason and not each.counts for each in left)
    with apply_npu_kernels(make("cohere")) as kernels:
        assert {each.kind for each in kernels.report().replaced if each.op == "layer_norm"} == {"CohereLayerNorm"}
    assert "layer_norm" in PATCHES


def declined(kernels):
    return [(each.reason, each.calls) for each in kernels.report().declined]


NOT_GATED = {
    "none": "no gate is given",
    "another shape": "x and gate of two shapes",
    "fp64": "float64 values",
    "a third argument": "more than one tensor and a gate are given",
}


@pytest.mark.parametrize("given", NOT_GATED)
def test_calls_that_are_not_for_the_gated_norm(given):
    x, gate = torch.randn(3, 5, 64), torch.randn(3, 5, 64)
    module = nn.Sequential(KimiLinearRMSNormGated(64))
    norm = module[0]
    calls = {
        "none": lambda: norm(x),
        "another shape": lambda: norm(x, gate[:1]),
        "fp64": lambda: norm(x, gate.double()),
        "a third argument": lambda: norm(x, gate, None),
    }
    with apply_npu_kernels(module, ops=["gated_rms_norm"]) as kernels:
        assert torch.equal(norm(x, gate=gate), norm(x, gate))
        try:
            result = calls[given]()
        except (AttributeError, TypeError) as error:
            result = type(error)
        assert kernels.report().ran == {"gated_rms_norm": 2}
        assert declined(kernels) == [(NOT_GATED[given], 1)]
    try:
        expected = calls[given]()
    except (AttributeError, TypeError) as error:
        expected = type(error)
    assert result is expected if isinstance(expected, type) else torch.equal(result, expected)


def test_autocast_leaves_the_fused_operator_alone():
    module = nn.Sequential(nn.LayerNorm(64))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), apply_npu_kernels(module, ops=["layer_norm"]) as kernels:
        assert module[0](x).dtype == nn.LayerNorm(64)(x).dtype
        assert declined(kernels) == [("autocast runs torch.nn.functional.layer_norm in float32", 1)]


def test_the_multiplier_is_read_at_every_call():
    def loss_of(each):
        return each(**batch()).loss.detach()

    model = make("granite")
    with apply_npu_kernels(model, ops=["add_rms_norm"]) as kernels:
        for value in (0.22, 0.5):
            for layer in model.model.layers:
                layer.residual_multiplier = value
            other, truth = make("granite"), make("granite").double()
            for layer in (*other.model.layers, *truth.model.layers):
                layer.residual_multiplier = value
            moved = functools.partial(rounded, functools.partial(loss_of, other))
            assert_as_close(*map(loss_of, (model, other, truth)), str(value), moved)
        assert kernels.report().ran == {"add_rms_norm": 4}
        model.model.layers[0].residual_multiplier = torch.tensor(0.5)
        model(**batch())
        assert declined(kernels) == [("what the hidden states are multiplied by is no finite number", 1)]
