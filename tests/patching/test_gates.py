"""Recognition of what models' own gates compute."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2CLS, ACT2FN

from npu_trainer_kernels.ops import swiglu, swiglu_reference
from npu_trainer_kernels.ops.gates import ACTIVATIONS
from npu_trainer_kernels.patching.modules.gate_forms import GateForm, gate_form, gate_of, joined_gate_form, numbers_of
from tests.models import module_of


def same_function(activation, name: str) -> bool:
    """Whether an activation is one of `ops.swiglu`'s but for rounding: those that differ do so by 1e-4 and more."""
    numbers = torch.cat([torch.linspace(-12, 12, 4801, dtype=torch.float64), torch.tensor([-1e3, 1e3]).double()])
    found, expected = activation(numbers), swiglu_reference(numbers, torch.ones_like(numbers), activation=name)
    return (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("name", ACT2CLS)
def test_activations_of_transformers(name):
    meant = [known for known in ACTIVATIONS if same_function(ACT2FN[name].double(), known)]
    assert [gate_of(ACT2FN[name])] == (meant or [None])


def test_activations_of_torch():
    assert [gate_of(f) for f in (functional.silu, torch.nn.SiLU(), functional.gelu, torch.nn.GELU("tanh"))] == [
        "silu", "silu", "gelu", "gelu_tanh",
    ]  # fmt: skip


FAULTS = {
    "a factor": lambda x: functional.silu(x) * 1.001,
    "one number": lambda x: functional.silu(x).masked_fill(x == 2.5, 0.0),
    "beyond a bound": lambda x: functional.silu(x.clamp(max=2e4)),
    "in bf16": lambda x: functional.silu(x) if x.dtype == torch.float32 else functional.gelu(x),
    "in fp32": lambda x: functional.silu(x) if x.dtype == torch.bfloat16 else functional.gelu(x),
    "another dtype": lambda x: functional.silu(x).double(),
    "two results": lambda x: (functional.silu(x), x),
    "two arguments": lambda x, y: functional.silu(x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    assert gate_of(FAULTS[fault]) is None


def own(cls, name="silu", **numbers):
    module = SimpleNamespace(act_fn=ACT2FN[name], hidden=2880, **numbers)
    return joined_gate_form(lambda both: cls._apply_gate(module, both), numbers_of(module))


def test_gates_of_experts():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
    from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    oss = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
    assert own(GptOssExperts, limit=7.0, alpha=1.702) == GateForm(**oss, joined="interleaved")
    assert own(OpenAIPrivacyFilterExperts, limit=7.0, alpha=1.702) == GateForm(**oss, joined="halves")
    assert own(MiniMaxM3VLExperts, swiglu_limit=7.0, swiglu_alpha=1.702) == GateForm(**oss, joined="halves")
    assert own(DeepseekV4Experts, limit=10.0) == GateForm(limit=10.0, joined="halves")
    assert own(DeepseekV4Experts, "gelu_pytorch_tanh", limit=10.0).activation == "gelu_tanh"
    # It is clamped behind the activation; without a limit that is nothing.
    assert own(Step3p7Experts, limit=7.0) is None
    assert own(Step3p7Experts, limit=float("inf")) == GateForm(joined="halves")
    # It rounds once.
    if beam := module_of("beam"):
        assert own(beam.BeamExperts) is None


def test_gates_of_two_tensors():
    assert gate_form(lambda g, u: u * functional.silu(g)) == GateForm()
    assert gate_form(lambda g, u: functional.gelu(g, approximate="tanh") * u) == GateForm("gelu_tanh")
    assert gate_form(lambda g, u: functional.silu(u) * g) is None
    assert gate_form(lambda g, u: functional.silu(g) * u.clamp(max=1e4)) is None
    assert gate_form(lambda g, u: functional.silu(g) * (u + 1)) == GateForm(offset=1.0)
    assert gate_form(lambda g, u: g * torch.sigmoid(1.702 * g) * u, (1.702, 3.0)) == GateForm(alpha=1.702)
    assert gate_form(lambda g, u: g * torch.sigmoid(1.702 * g) * u, (3.0,)) is None


def test_a_form_is_what_swiglu_computes():
    both = torch.randn(4, 32)
    form = joined_gate_form(lambda t: functional.silu(t[..., ::2]) * t[..., 1::2])
    assert str(form) == "silu, joined=interleaved"
    assert torch.equal(swiglu(both, backend="torch", **form.options), functional.silu(both[..., ::2]) * both[..., 1::2])
