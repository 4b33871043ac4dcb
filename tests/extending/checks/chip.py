"""The new chip: every kernel gets a tile on it, and the Ascend gate compiles for it."""

import pytest
import torch

from npu_trainer_kernels import device, tiling
from npu_trainer_kernels.ascend import gate
from npu_trainer_kernels.descriptions import GATE, GATE_DTYPES, GateTensors
from npu_trainer_kernels.ops.launch import use_launcher
from npu_trainer_kernels.tiling.limits import limits, tile_limit

CHIP = "Ascend910B5"


def test_it_is_known():
    with device.use_chip(CHIP):
        spec = device.spec(torch.device("cpu"))
    assert (spec.kind, spec.name, spec.vector_cores, spec.on_chip_bytes) == ("npu", CHIP, 44, 192 << 10)
    assert device.sized_as(CHIP) == spec
    assert CHIP in gate.CHIPS


@pytest.mark.parametrize("entry", GATE, ids=lambda entry: entry.op)
def test_every_op_gets_its_tiles(entry):
    """Forward and backward without memory, at the sizes of models that the Ascend gate has."""
    launched = []
    with device.use_chip(CHIP), use_launcher(lambda kernel, *rest: launched.append(kernel)):
        for name in entry.dtypes:
            tensors = GateTensors(GATE_DTYPES[name], "cpu" if entry.reads_values else "meta")
            for size in {entry.sizes[0], entry.sizes[-1]}:
                entry.call(tensors, entry.rows, size)
    assert launched


def test_every_limit_of_a_tile_has_a_number():
    spec = device.chip_spec(CHIP)
    assert all(tile_limit(limit.kernel, limit.itemsize, spec) > 0 for limit in limits())


def test_every_tile_that_may_be_tuned_was_asked_for():
    """By the tests before this one: they reach all of `tiling`."""
    asked = {name for name, args in tiling.asked_tiles() if args[-1].name == CHIP}
    assert asked == set(tiling.TUNABLE)
