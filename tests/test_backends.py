"""The choice of backend: order, overrides, and errors."""

import pytest
import torch

from npu_trainer_kernels import backends

CPU = torch.device("cpu")


def test_cpu_uses_torch_and_says_why():
    name, reason = backends.explain("rms_norm", CPU)
    assert name == "torch"
    assert "CPU" in reason


@pytest.mark.parametrize("text", ["triton", "rms_norm=triton", "linear_logprob=torch, rms_norm=triton"])
def test_argument_overrides(text):
    assert backends.choose("rms_norm", CPU, text) == "triton"


def test_environment_overrides_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_BACKEND", "rms_norm=triton")
    assert backends.choose("rms_norm", CPU) == "triton"
    assert backends.choose("linear_logprob", CPU) == "torch"
    assert backends.choose("rms_norm", CPU, "torch") == "torch"
    assert "NPU_KERNELS_BACKEND=rms_norm=triton" in backends.explain("rms_norm", CPU)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cudnn", "backend must be one of triton, torch, .*; got 'cudnn'"),
        ("rms_norm=", "backend must be one of"),
        ("norm=torch", "unknown op 'norm'; the ops are rms_norm"),
    ],
)
def test_bad_overrides(text, message):
    with pytest.raises(ValueError, match=message):
        backends.choose("rms_norm", CPU, text)


def test_every_op_ends_with_torch_on_every_device():
    for op, order in backends._ORDER.items():
        assert set(order) == {"npu", "cuda", "cpu"}, op
        assert all(choices[-1].backend == "torch" for choices in order.values()), op
        assert all(choice.evidence for choices in order.values() for choice in choices), op
