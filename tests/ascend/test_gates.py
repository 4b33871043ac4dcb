"""The gates of MLPs by trace: vector instructions per element, waits, and whether programs have the same to do."""

import pytest

from npu_trainer_kernels import device, ops
from npu_trainer_kernels.ascend.launcher import LaunchRecorder
from npu_trainer_kernels.ascend.lower import bind
from npu_trainer_kernels.ascend.plan import plan
from npu_trainer_kernels.ascend.trace import counts, trace
from npu_trainer_kernels.descriptions import GATE_DTYPES, GateTensors
from npu_trainer_kernels.ops.launch import use_launcher

CHIP = "Ascend910B4"
pytestmark = pytest.mark.usefixtures("kept_cache")

# Forward and backward, as counted by hand beside the kernels' formulas (ops/gates.py).
MINIMA = {
    "silu": ({}, 10, 15),
    "gelu_tanh": ({"activation": "gelu_tanh"}, 13, 24),
    "gelu": ({"activation": "gelu"}, 34, 42),
    "relu2": ({"activation": "relu2"}, 8, 11),
    "GPT-OSS": ({"alpha": 1.702, "limit": 7.0, "offset": 1.0}, 14, 31),
}


def launched(rows, width, dtype="bf16", **options):
    """Specialization and launch of forward and backward on gate and up that are halves of each row of one tensor."""
    recorder = LaunchRecorder()
    gate, up = GateTensors(GATE_DTYPES[dtype], "meta").floats(rows, 2 * width).chunk(2, -1)
    with device.use_chip(CHIP), use_launcher(recorder):
        ops.swiglu(gate, up, backend="ascend-lowering", **options).sum().backward()
    return [(launch.specialize(CHIP), launch) for launch in recorder.launches]


def program(spec, launch, number=0):
    return counts(trace(spec, launch.grid, bind(launch.kernel, launch.args, launch.constexprs)[0], number))


@pytest.mark.parametrize("name", MINIMA)
def test_no_more_instructions_than_counted_by_hand_and_no_waits(name):
    options, *minima = MINIMA[name]
    for (spec, launch), minimum in zip(launched(160, 2880, **options), minima, strict=True):
        seen = program(spec, launch)
        # What is written once for a whole tile takes a fraction of an instruction more.
        assert minimum <= seen.instructions_per_element(160 // 40 * 2880) <= 1.02 * minimum
        assert seen.waits == 0
        assert plan(spec).fixed_waits == 0


def test_backward_that_forms_the_product_takes_four_more():
    recorder, tensors = LaunchRecorder(), GateTensors(GATE_DTYPES["bf16"], "meta")
    gate, up = tensors.floats(160, 2 * 2880).chunk(2, -1)
    with device.use_chip(CHIP), use_launcher(recorder):
        y = ops.swiglu_linear(gate, up, tensors.floats(16, 2880), backend="ascend-lowering")
        y.sum().backward()
    launch = recorder.launches[-1]
    seen = program(launch.specialize(CHIP), launch)
    assert seen.instructions_per_element(160 // 40 * 2880) == 19


# Several rows a tile; one; two, four and eight tiles of a row.
@pytest.mark.parametrize("width", [1408, 2880, 11008, 18944])
def test_halves_are_spread_evenly_and_nothing_is_computed_twice(width):
    rows, minima, moved = 800, (10, 15), (3, 5)
    for (spec, launch), minimum, tensors in zip(launched(rows, width), minima, moved, strict=True):
        (programs,) = launch.grid
        for number in (0, 1, programs - 1):
            seen = program(spec, launch, number)
            share = rows * width / programs
            assert seen.bytes_in + seen.bytes_out == pytest.approx(tensors * 2 * share, rel=0.02)
            assert seen.vector_repeats * 64 / share == pytest.approx(minimum, rel=0.03)
