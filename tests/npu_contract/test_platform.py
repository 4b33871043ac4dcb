"""What is stated of chips and versions, against torch_npu's own tables."""

import re
from importlib import metadata
from pathlib import Path

import torch
import torch_npu

from npu_trainer_kernels import device
from npu_trainer_kernels.cli._environment import TORCH_NPU_CANN
from npu_trainer_kernels.device import KIB

LIBRARY = Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so"
# Of the A2 and A3 and the generations after it; older ones have no vector cores of their own.
NAME = re.compile(rb"\x00(Ascend(?:910B\d[A-Z]?(?:-\d)?|910_\d{4}|950[A-Z]{2}_\w+))(?=\x00)")
# In torch_npu, and not in the compiler.
UNKNOWN = {"Ascend910_9363", "Ascend950DT_9582x", "Ascend950PR_957bx"}


def names() -> set[str]:
    return {found.decode() for found in NAME.findall(LIBRARY.read_bytes())}


def test_every_chip_is_in_the_table_or_gets_the_tiles_of_its_generation():
    assert len([name for name in names() if name.startswith("Ascend950")]) == 34
    assert names() - device.ASCEND_CHIPS.keys() <= UNKNOWN
    assert device.ASCEND_CHIPS.keys() <= names()
    for name in names():
        kib = 248 if name.startswith("Ascend950") else 192
        assert device.sized_as(name).on_chip_bytes == kib * KIB, name


def test_the_properties_of_a_device_have_the_number_of_its_vector_cores():
    assert isinstance(vars(torch_npu._C._NPUDeviceProperties)["vector_core_num"], property)
    assert torch.npu.get_device_properties.__module__.startswith("torch_npu")


def test_cann_is_as_its_description_says():
    text = metadata.metadata("torch_npu").get_payload() or metadata.metadata("torch_npu")["Description"]
    table, cann = {}, ""
    for row in re.findall(r"^\| *(CANN [\w.]+)? *\| *[\d.]+ *\| *([\w.]+) *\| *v?[\w.-]+ *\|", text, re.MULTILINE):
        cann = row[0].removeprefix("CANN ") or cann
        table[row[1]] = cann
    assert TORCH_NPU_CANN.items() <= table.items()
    served = {name for name in table if tuple(map(int, re.findall(r"\d+", name)[:3])) >= (2, 7, 1)}
    assert TORCH_NPU_CANN.keys() == served, "every one that this package runs with"
