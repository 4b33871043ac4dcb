"""What the code knows of devices: whether an NPU's products of bf16 factors give fp32 results is tried, not assumed."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_trainer_kernels import backends
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


def npu(monkeypatch, name, **properties):
    """The spec of an NPU of that name, as torch_npu's properties have it."""
    given = SimpleNamespace(name=name, total_memory=1 << 36, **properties)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_properties=lambda index: given), raising=False)
    return devices._query.__wrapped__(SimpleNamespace(type="npu", index=0))


@pytest.mark.parametrize(
    ("properties", "cores"), [({"vector_core_num": 36}, 36), ({"vector_core_num": 0}, 40), ({}, 40)]
)
def test_the_number_of_vector_cores_is_the_cards_own_where_torch_npu_says_it(monkeypatch, properties, cores):
    spec = npu(monkeypatch, "Ascend910B4", **properties)
    assert spec == replace(devices.ASCEND_CHIPS["Ascend910B4"], vector_cores=cores, memory_bytes=1 << 36)


@pytest.mark.parametrize(
    ("name", "like"), [("Ascend950DT_0000", "Ascend950PR_9579"), ("Ascend910_0000", "Ascend910B4")]
)
def test_an_unknown_chip_gets_the_tiles_of_its_generation_and_a_warning(monkeypatch, name, like):
    with pytest.warns(UserWarning, match=f"unknown Ascend chip '{name}': tiles are sized as for {like} "):
        spec = npu(monkeypatch, name, vector_core_num=60)
    known = devices.ASCEND_CHIPS[like]
    assert (spec.name, spec.vector_cores, spec.on_chip_bytes) == (name, 60, known.on_chip_bytes)


PACKAGE = Path(devices.__file__).parent
# Where a kind of device is named, and why: everything else asks `device.py` what a device can do.
NAMED_IN = {
    "device.py": "the only file that asks a driver",
    "backends.py": "which package to install, which backend runs on which kind",
    "cli/": "what is said to people, by the device that they have",
    "fit/": "the card that a prediction is for",
    "ascend/": "the compiler of one kind of chip",
    "patching/head/promise_records.py": "a number on the host is no tensor of the batch",
    "ops/slices.py": "PyTorch's generators are told apart by a device's type",
}


def names_a_kind(node):
    return isinstance(node, ast.Constant) and node.value in ("npu", "cuda")


def test_no_other_file_names_a_kind_of_device():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if any(map(names_a_kind, ast.walk(ast.parse(file.read_text())))):
            found.add(file.relative_to(PACKAGE).as_posix())
    assert {name for name in found if not name.startswith(tuple(NAMED_IN))} == set()


def test_gpus_of_amd_are_none_that_a_tile_or_a_figure_is_for(monkeypatch):
    """PyTorch calls them "cuda", too."""
    card = torch.device("cuda")
    assert devices.kind_of(card) == ("cuda" if torch.version.hip is None else "other")
    monkeypatch.setattr(devices, "_KINDS", {"npu": "npu", "cuda": "other"})
    assert devices.kind_of(card) == "other"
    spec = devices._query.__wrapped__(card)
    assert (spec.kind, spec.has_warps, spec.has_buffer) == ("other", False, False)
    assert devices.grouped_product_by(card) is None
    assert not devices.has_libdevice(card)
    for op in backends.OPS:
        assert backends.choose(op, card) == "torch"
