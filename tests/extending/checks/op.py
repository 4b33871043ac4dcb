"""The new op: what serves it, and that it is put into a module whose code computes it."""

import pytest
import torch
from torch import nn

from npu_trainer_kernels import apply_npu_kernels, backends, ops
from tests.closeness import assert_op_close

CPU = torch.device("cpu")
NOT_MEASURED = "not measured on this kind of device"


class Capped(nn.Module):
    """Its names are not the op's."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, states):
        return self.cap * torch.tanh(states / self.cap)


class Off(Capped):
    def forward(self, states):
        return self.cap * torch.tanh(states / self.cap) * 1.001


def model(kind=Capped) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), kind(3.0))


def test_it_is_public():
    assert {"scaled_tanh", "scaled_tanh_reference"} <= set(ops.__all__)


def test_torch_serves_it_until_somebody_has_measured():
    assert backends.explain("scaled_tanh", CPU) == (
        "torch", "no other backend was measured on this kind of device: triton by name",
    )  # fmt: skip
    assert backends.choose("scaled_tanh", CPU) == "torch"
    for where in (CPU, torch.device("cuda")):
        assert backends.keeps_plain("scaled_tanh", where) == NOT_MEASURED


def test_triton_serves_it_by_name():
    assert backends.choose("scaled_tanh", CPU, "triton") == "triton"
    assert backends.choose("scaled_tanh", CPU, "scaled_tanh=triton") == "triton"


def test_a_model_keeps_its_own_code_and_the_report_says_why():
    with apply_npu_kernels(model()) as kernels:
        report = kernels.report()
    assert [each.op for each in report.replaced] == []
    assert [each.reason for each in report.left_alone if each.op == "scaled_tanh"] == [NOT_MEASURED]
    assert f"scaled_tanh: {NOT_MEASURED}" in report.text(full=True)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_by_name_it_is_put_into_the_module(backend):
    x, own = torch.randn(5, 8), model()
    with apply_npu_kernels(served := model(), ops=["scaled_tanh"], backend=backend) as kernels:
        assert_op_close(served[1], own[1], [own[0](x).detach().requires_grad_()], lambda out: out[0].sum())
        report = kernels.report()
    (replaced,) = report.replaced
    assert (replaced.module, replaced.kind, replaced.backend) == ("1", "Capped", backend)
    assert replaced.detail == "scale=3"
    assert report.declined == []
    assert report.ran["scaled_tanh"] > 0
    assert f"scaled_tanh  {backend}: Capped" in report.text()


def test_what_computes_something_else_keeps_its_own_code():
    with apply_npu_kernels(model(Off), ops=["scaled_tanh"]) as kernels:
        assert kernels.report().replaced == []
