"""What the code knows of devices: whether an NPU's products of bf16 factors give fp32 results is tried, not assumed."""

from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_trainer_kernels import device as devices
from tests.conftest import DEVICE

MM, ADDMM = torch.mm, torch.addmm


def products(monkeypatch: pytest.MonkeyPatch, rounded: bool = False, adds: bool = True) -> None:
    """Gives the CPU products with `out_dtype`; wrong ones: rounded on the way, or without the sum."""

    def result(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        exact = MM(a.float(), b.float())
        return exact.to(a.dtype).float() if rounded else exact

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
        assert out_dtype == out.dtype == torch.float32
        return out.copy_(result(a, b))

    def addmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        return options["out"].copy_(total + result(a, b) if adds else result(a, b))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


def test_products_that_work_are_found(monkeypatch):
    products(monkeypatch)
    assert devices.try_fp32_output_product(torch.device("cpu")) is True


@pytest.mark.parametrize("wrong", [{"rounded": True}, {"adds": False}], ids=str)
def test_products_that_are_wrong_are_not_used(monkeypatch, wrong):
    products(monkeypatch, **wrong)
    assert devices.try_fp32_output_product(torch.device("cpu")) is False


def test_products_that_do_not_exist_are_not_used():
    assert devices.try_fp32_output_product(torch.device("cpu")) is False


def test_the_device_of_the_tests_is_what_it_is_taken_for():
    where = torch.device(DEVICE)
    assert devices.has_fp32_output_product(where) is devices.try_fp32_output_product(where)


def test_without_numbers_nothing_is_decided(monkeypatch):
    products(monkeypatch)
    with FakeTensorMode():
        assert devices.try_fp32_output_product(torch.device("cpu")) is None


def test_an_npu_is_asked_once(monkeypatch):
    answers = [None, True]
    monkeypatch.setattr(devices, "_npu_products", {})
    monkeypatch.setattr(devices, "try_fp32_output_product", lambda where: answers.pop(0))

    class Device(NamedTuple):
        type: str
        index: int

    npu: Any = Device("npu", 0)
    # The first time it cannot be told.
    assert [devices.has_fp32_output_product(npu) for _ in range(3)] == [False, True, True]
    assert answers == []
