"""What a program issues: counted by hand for small kernels, and against the bytes that the executed lowering moves."""

from dataclasses import replace

import pytest
import torch

from npu_trainer_kernels import descriptions, device
from npu_trainer_kernels.ascend.device_library import Event
from npu_trainer_kernels.ascend.launcher import LaunchRecorder, LoweringLauncher
from npu_trainer_kernels.ascend.lower import Specialization, bind
from npu_trainer_kernels.ascend.pipes import simulate
from npu_trainer_kernels.ascend.plan import plan
from npu_trainer_kernels.ascend.toolchain import ToolchainError
from npu_trainer_kernels.ascend.trace import counts, trace
from npu_trainer_kernels.ops.launch import use_launcher

from . import toys

CHIP = "Ascend910B4"
ROWS, COLS = 8, 65536


def _followed(kernel, out=torch.bfloat16, chip=CHIP, **constexprs):
    """The events and the plan of one program that does all rows."""
    x, y = (torch.empty(ROWS, COLS, dtype=dtype, device="meta") for dtype in (torch.bfloat16, out))
    spec = Specialization.of(kernel, (x, y, ROWS, COLS), constexprs, chip)
    return trace(spec, (1,), bind(kernel, (x, y, ROWS, COLS), constexprs)[0]), plan(spec)


def test_instructions_bytes_and_transfers_are_those_of_a_hand_count():
    events, _ = _followed(toys.silu, BLOCK=8192)
    did = counts(events)
    elements = ROWS * COLS
    assert (did.bytes_in, did.bytes_out) == (2 * elements, 2 * elements)
    assert did.loads == elements // 8192
    # To fp32 and back, times -1, exp, + 1 and what the division by it takes: 64 lanes each.
    assert did.by_name["VCONV"] == 2 * elements // 64
    assert did.by_name["VEXP"] == did.by_name["VMULS"] == did.by_name["VDIV"] == elements // 64
    assert did.instructions_per_element(elements) == 7
    assert did.waits == 0


def test_waits_inside_the_device_library_are_counted_where_the_plan_shows_none():
    selecting, plan_of_it = _followed(toys.row_maxima, torch.float32, BLOCK=4096, SELECT=True)
    comparing, plan_of_other = _followed(toys.row_maxima, torch.float32, BLOCK=4096, SELECT=False)
    assert plan_of_it.vector_scalar_switches == plan_of_other.vector_scalar_switches == 2
    blocks = COLS // 4096
    # Each select waits once; the last maximum of a row is a wait of the plan and one of the library's.
    assert counts(selecting).waits == ROWS * (blocks + 2)
    assert counts(selecting).waits_of_library == ROWS * (blocks + 1)
    assert counts(comparing).waits == ROWS * 2


def test_each_program_of_a_grid_has_its_share():
    x, y = (torch.empty(ROWS, COLS, dtype=torch.bfloat16, device="meta") for _ in range(2))
    args = (x, y, ROWS, COLS)
    spec = Specialization.of(toys.silu, args, {"BLOCK": 8192}, CHIP)
    loads = [
        counts(trace(spec, (3,), bind(toys.silu, args, {"BLOCK": 8192})[0], program)).loads for program in range(3)
    ]
    assert loads == [3 * 8, 3 * 8, 2 * 8]


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "rope, half", "add_rms_norm, post, gemma", "embedding, scaled"])
def test_the_bytes_are_those_that_the_executed_lowering_moves(op, kept_cache):
    """The lowering is executed on another way, by other tools: transfers there are counted where they happen."""
    entry = next(entry for entry in descriptions.GATE if entry.op == op)
    size, rows = entry.sizes[0], 16
    executed, recorder = LoweringLauncher(CHIP), LaunchRecorder()
    with device.use_spec(replace(device.chip_spec(CHIP), vector_cores=1)):
        with use_launcher(executed):
            entry.call(descriptions.GateTensors(torch.bfloat16, "cpu"), rows, size)
        with use_launcher(recorder):
            entry.call(descriptions.GateTensors(torch.bfloat16, "cpu" if entry.follows_ids else "meta"), rows, size)
    moved = dict.fromkeys(executed.traffic, 0)
    for launch in recorder.launches:
        spec = launch.specialize(CHIP)
        did = counts(trace(spec, launch.grid, bind(launch.kernel, launch.args, launch.constexprs)[0]))
        moved[spec.name] += did.bytes_in + did.bytes_out
    for name, traffic in executed.traffic.items():
        assert moved[name] == traffic.bytes_in + traffic.bytes_out, name


def test_the_950s_plan_has_no_loops_to_follow():
    with pytest.raises(ToolchainError, match="it has jumps in the place of loops"):
        _followed(toys.silu, chip="Ascend950PR_9589", BLOCK=8192)


def test_a_plan_that_does_not_fit_cannot_be_followed():
    with pytest.raises(ToolchainError, match="no plan fits"):
        _followed(toys.silu, BLOCK=65536)


def _tiles(number, waits):
    """Loads of a tile and work on it; the next load waits for the work, or for that before it."""
    events = []
    for tile in range(number):
        if tile >= waits:
            events.append(Event("wait", "V", waits="MTE2", flag=0))
        events += [
            Event("load", "", 1, 16384),
            Event("set", "MTE2", waits="V", flag=1),
            Event("wait", "MTE2", waits="V", flag=1),
            Event("vector", "VADD", 256),
            Event("set", "V", waits="MTE2", flag=0),
        ]
    return events


def test_a_fixed_wait_costs_the_overlap():
    one_buffer, two_buffers = simulate(_tiles(64, 1), CHIP), simulate(_tiles(64, 2), CHIP)
    assert round(one_buffer.vector) == round(two_buffers.vector) == 64 * 256 * 2
    # Loads of 16 KiB take 1355 cycles, what is done with them 512: beside each other, or one after the other.
    assert two_buffers.cycles < 1.05 * two_buffers.loads
    assert one_buffer.cycles > one_buffer.loads + 0.95 * one_buffer.vector


def test_a_tile_that_overlaps_is_found_faster():
    found = {}
    for block in (16384, 12288):
        events, planned = _followed(toys.silu, BLOCK=block)
        found[block] = planned.fixed_waits, simulate(events, CHIP).cycles
    assert found[16384][0] == 1
    assert found[12288][0] == 0
    assert found[12288][1] < 0.7 * found[16384][1]


def test_what_the_rates_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"chip must be one of Ascend910B1, .*; got 'Ascend910_9382'"):
        simulate([], "Ascend910_9382")
    with pytest.raises(ValueError, match="none of 'VNEW'"):
        simulate([Event("vector", "VNEW", 1)], CHIP)
