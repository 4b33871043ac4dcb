"""The new gate: MLPs and experts that have it are found by what they compute, and served."""

import pytest
import torch
from torch import nn

from npu_trainer_kernels import apply_npu_kernels, vendor
from npu_trainer_kernels.descriptions import GATE
from npu_trainer_kernels.ops.gates import ACTIVATIONS, gate_options
from npu_trainer_kernels.patching.modules.gate_forms import GateForm, gate_form, gate_of
from tests.models import assert_outcome_close, batch, in_double, loss_and_gradients, small_model
from tests.patching.test_gates import test_activations_of_transformers as each_activation_is_found_or_not


def test_it_is_found():
    assert gate_of(nn.Sigmoid()) == "sigmoid"
    assert gate_form(lambda gate, up: torch.sigmoid(gate) * up) == GateForm("sigmoid")
    assert gate_form(lambda gate, up: torch.tanh(gate) * up) is None
    for name in ("sigmoid", "silu", "tanh"):
        each_activation_is_found_or_not(name)


@pytest.mark.parametrize(("family", "op"), [("llama", "swiglu"), ("qwen3-moe", "moe_experts")])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_with_it_is_served(family, op, backend):
    options, inputs = {"hidden_act": "sigmoid"}, batch()
    expected = loss_and_gradients(model := small_model(family, **options), inputs)
    with in_double():
        truth = loss_and_gradients(small_model(family, **options).double(), inputs)
    with apply_npu_kernels(served := small_model(family, **options), ops=[op], backend=backend) as kernels:
        assert {each.detail.partition(",")[0] for each in kernels.report().replaced} == {"sigmoid"}
        found = loss_and_gradients(served, inputs)
        assert kernels.report().ran[op] == 2
        assert kernels.report().declined == []
    assert_outcome_close(model, found, expected, truth, lambda: loss_and_gradients(model, inputs))


def test_the_ascend_compiler_gets_it_and_the_vendor_does_not():
    assert "sigmoid" in ACTIVATIONS
    assert "swiglu, sigmoid" in [entry.op for entry in GATE]
    assert vendor.uncovered_swiglu(gate_options("sigmoid", 1.0, None, 0.0, None)) is not None
