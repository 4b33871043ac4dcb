import pytest
import torch

from npu_trainer_kernels.ascend.lower import Specialization
from npu_trainer_kernels.ascend.plan import MAX_SWITCHES, delays, plan, violations

from . import toys

BF16, FP32 = torch.bfloat16, torch.float32


def _plan(kernel, *shape_and_dtype, chip="Ascend910B4", out=BF16, **constexprs):
    """Plans a kernel at 4001 x 4093, from meta tensors by its parameters' names."""
    tensors = {"x": BF16, "y": out, "scale": FP32, "index": torch.int32}
    numbers = {"n_rows": 4001, "n_cols": 4093, "factor": 2.0}
    args = []
    for name in kernel.arg_names:
        if name in tensors:
            args.append(torch.empty(4001, 4093, dtype=tensors[name], device="meta"))
        elif name in numbers:
            args.append(numbers[name])
    return plan(Specialization.of(kernel, tuple(args), constexprs, chip))


def _rules(planned):
    return [violation.partition(":")[0] for violation in violations(planned)]


@pytest.mark.parametrize("chip", ["Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910_9382"])
def test_a_good_kernel_passes(chip):
    planned = _plan(toys.scaled_rows, BLOCK=4096, chip=chip)
    assert violations(planned) == []
    assert (planned.kernel, planned.chip, planned.fits) == ("scaled_rows", chip, True)
    assert planned.buffer_size == 192 * 1024
    # In and out as bf16 and one fp32 tile between them, each twice; the output shares its place with the fp32 tile.
    assert planned.buffer_used == 2 * 4096 * (2 + 4)
    assert planned.double_buffered
    assert planned.single_buffers == 0
    assert planned.bytes_streamed == 2 * 4096 * 2
    assert planned.largest_transfer == 4096 * 2
    # To fp32, twice a multiplication, to bf16: each fp32 wide. The fill of a masked tail is bf16.
    assert planned.vector_bytes == 4 * 4096 * 4 + 4096 * 2
    assert planned.vector_scalar_switches == 0


def test_the_950_is_planned_by_its_own_compiler():
    planned = _plan(toys.scaled_rows, BLOCK=4096, chip="Ascend950PR_9589")
    assert (planned.fits, planned.double_buffered, violations(planned)) == (True, True, [])
    assert planned.buffer_size == 248 * 1024
    # In and out as bf16, each twice: what is between them stays in the vector unit's registers.
    assert planned.buffer_used == 2 * 4096 * (2 + 2)


@pytest.mark.parametrize(
    ("kernel", "constexprs", "rules"),
    [
        (toys.scaled_tiles, {"ROWS": 4, "BLOCK": 1024}, []),
        (toys.scaled_rows, {"BLOCK": 65536}, ["buffer overflow"]),
        (toys.scaled_rows, {"BLOCK": 4096, "multibuffer": False}, ["double buffering lost"]),
        (toys.doubled_in_place, {"BLOCK": 2048}, ["double buffering lost"]),
        (toys.gathered_rows, {"BLOCK": 1024}, ["element loop"]),
        (toys.columns, {"BLOCK": 1024}, ["element transfers"]),
        (toys.column_sums, {"BLOCK": 4096, "out": FP32}, ["atomics"]),
        (toys.scalar_logsumexp, {"BLOCK": 4096, "out": FP32}, ["vector/scalar switches"]),
        (toys.block_maxima, {"BLOCK": 4096, "out": FP32}, ["vector/scalar switches"]),
    ],
)
def test_the_950s_plans_are_read_by_their_jumps(kernel, constexprs, rules):
    planned = _plan(kernel, chip="Ascend950PR_9589", **constexprs)
    assert _rules(planned) == rules
    if planned.fits:
        there = _plan(kernel, chip="Ascend910B4", **constexprs)
        assert (planned.bytes_streamed, planned.largest_transfer) == (there.bytes_streamed, there.largest_transfer)


def test_an_overflow_is_named_with_what_it_would_need():
    planned = _plan(toys.scaled_rows, BLOCK=65536)
    assert _rules(planned) == ["buffer overflow"]
    assert not planned.fits
    assert (planned.buffer_used, planned.buffer_size) == (65536 * (2 + 4), 192 * 1024)


def test_lost_double_buffering_is_named():
    planned = _plan(toys.scaled_rows, BLOCK=24576)
    assert planned.fits
    assert planned.multi_buffer_dropped
    assert _rules(planned) == ["double buffering lost"]


def test_double_buffering_that_was_switched_off_is_named():
    planned = _plan(toys.scaled_rows, BLOCK=4096, multibuffer=False)
    assert (planned.multi_buffer_dropped, planned.double_buffered, planned.single_buffers) == (False, False, 2)
    assert _rules(planned) == ["double buffering lost"]


def test_what_never_changes_needs_one_buffer():
    planned = _plan(toys.zeros, BLOCK=4096, multibuffer=False)
    assert (planned.double_buffered, planned.single_buffers, violations(planned)) == (True, 1, [])


def test_loads_that_wait_for_stores_are_named():
    apart, in_place = _plan(toys.doubled, BLOCK=2048), _plan(toys.doubled_in_place, BLOCK=2048)
    assert (apart.loads_after_stores, violations(apart)) == (0, [])
    assert in_place.double_buffered
    assert in_place.loads_after_stores == 1
    assert _rules(in_place) == ["double buffering lost"]


def test_a_load_that_waits_for_the_vector_unit_is_counted():
    overlaps, waits = (_plan(toys.silu, BLOCK=block) for block in (12288, 16384))
    assert (overlaps.fixed_waits, delays(overlaps)) == (0, [])
    assert (waits.double_buffered, violations(waits), waits.fixed_waits) == (True, [], 1)
    assert delays(waits) == ["fixed waits: 1 of the next tile's loads for the vector unit"]


def test_a_loop_over_elements_of_hbm_is_named():
    planned = _plan(toys.gathered_rows, BLOCK=1024)
    assert _rules(planned) == ["element loop", "element transfers"]
    assert planned.element_loops == 1
    # 1024 gathered elements, less one for each 512 bytes of the 4096 of indices and 2048 of output.
    assert planned.element_transfers == 1024 - (4096 + 2048) // 512


def test_a_loop_over_elements_of_the_buffer_is_named():
    planned = _plan(toys.running_sums, BLOCK=1024)
    assert _rules(planned) == ["element loop"]


def test_transfers_of_single_elements_are_named():
    planned = _plan(toys.columns, BLOCK=1024)
    assert _rules(planned) == ["element transfers"]
    assert planned.element_transfers == 1024 - 2048 // 512


def test_a_number_per_row_is_paid_for_by_the_row():
    planned = _plan(toys.scaled_tiles, ROWS=4, BLOCK=1024)
    assert violations(planned) == []
    assert planned.tiny_vector_ops == 1  # the fill of the four factors


def test_a_masked_tile_of_whole_rows_is_one_transfer():
    planned = _plan(toys.scaled_whole_rows, COLS=1024, ROWS=4)
    assert violations(planned) == []
    assert planned.bytes_streamed == 2 * 4 * 1024 * 2
    assert planned.largest_transfer == 4 * 1024 * 2


def test_an_atomic_is_named():
    planned = _plan(toys.column_sums, BLOCK=4096, out=FP32)
    assert _rules(planned) == ["atomics"]
    assert planned.atomics == 1


def test_too_many_switches_are_named():
    planned = _plan(toys.scalar_logsumexp, BLOCK=4096, out=FP32)
    assert _rules(planned) == ["vector/scalar switches"]
    assert planned.vector_scalar_switches == 10 > MAX_SWITCHES
    assert planned.block_switches == 8


def test_switches_at_each_block_are_named_however_few():
    planned = _plan(toys.block_maxima, BLOCK=4096, out=FP32)
    assert 0 < planned.vector_scalar_switches <= MAX_SWITCHES
    assert planned.block_switches > 0
    assert _rules(planned) == ["vector/scalar switches"]


def test_a_plan_comes_from_the_cache_with_the_time_that_it_took():
    first, second = _plan(toys.scaled_rows, BLOCK=4096), _plan(toys.scaled_rows, BLOCK=4096)
    assert first == second
    assert first.seconds == second.seconds > 0
