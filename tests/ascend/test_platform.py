"""What is stated of chips and versions, against the compiler's own tables."""

import re
import sys
from importlib import metadata

import pytest
import torch

from npu_trainer_kernels import device
from npu_trainer_kernels.ascend.lower import Specialization, lower
from npu_trainer_kernels.ascend.plan import planned
from npu_trainer_kernels.cli._environment import TRITON_ASCEND

from . import toys


@pytest.mark.parametrize("chip", device.ASCEND_CHIPS)
def test_a_chip_has_the_cores_and_the_memory_that_the_compiler_plans_with(chip):
    spec = Specialization.of(toys.zeros, (torch.empty(64, 64, device="meta"), 64, 64), {"BLOCK": 64}, chip)
    facts = dict(re.findall(r'"(\w+)", (\d+) : i32', planned(spec.name, lower(spec), chip)))
    known = device.ASCEND_CHIPS[chip]
    assert (known.vector_cores, known.on_chip_bytes) == (int(facts["VECTOR_CORE_COUNT"]), int(facts["UB_SIZE"]) // 8)


def test_this_triton_ascend_is_stated_with_the_python_of_its_wheel():
    made_for = TRITON_ASCEND[metadata.version("triton-ascend")]
    first, last = (int(version.removeprefix("3.")) for version in made_for.pythons)
    tags = re.findall(r"^Tag: cp3(\d+)-", metadata.distribution("triton-ascend").read_text("WHEEL"), re.MULTILINE)
    assert {int(tag) for tag in tags} == {sys.version_info.minor}
    assert first <= sys.version_info.minor <= last
