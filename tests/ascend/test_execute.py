import pytest
import torch

from npu_trainer_kernels import device
from npu_trainer_kernels.ascend.execute import LEVELS, Traffic, execute
from npu_trainer_kernels.ascend.launcher import LaunchRecorder, LoweringLauncher, lowering_launcher
from npu_trainer_kernels.ascend.lower import Specialization, bind
from npu_trainer_kernels.ascend.toolchain import ToolchainError
from npu_trainer_kernels.ops.launch import launch, use_launcher

from . import toys

ROWS, COLS = 77, 1000  # of 1024: every row ends in a masked tail
pytestmark = pytest.mark.parametrize("level", LEVELS)


def _run(level, kernel, grid, *args, **constexprs):
    spec = Specialization.of(kernel, args, constexprs, "Ascend910B4")
    return execute(spec, grid, bind(kernel, args, constexprs)[0], level)


def _input(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, COLS, generator=generator).to(dtype), torch.randn(ROWS, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("programs", [1, 8, 100])
def test_rows_with_masked_tails(level, dtype, programs):
    x, scale = _input(dtype)
    y = torch.full((ROWS + 1, COLS), 7.0, dtype=dtype)
    moved = _run(level, toys.scaled_rows, (programs,), x, scale, y, ROWS, COLS, 0.5, BLOCK=1024)
    assert torch.equal(y[:ROWS], (x.float() * scale[:, None] * 0.5).to(dtype))
    assert torch.equal(y[ROWS], torch.full((COLS,), 7.0, dtype=dtype))
    row = COLS * dtype.itemsize
    assert moved == Traffic(
        bytes_in=ROWS * row,
        bytes_out=ROWS * row,
        transfers_in=ROWS,
        transfers_out=ROWS,
        scalar_loads=ROWS,
        scalar_bytes=ROWS * 4,
    )
    assert moved.bytes == 2 * ROWS * row + 4 * ROWS


def test_tiles_with_masks_in_both_directions(level):
    x, scale = _input(torch.bfloat16)
    y = torch.full((ROWS + 4, COLS), 7.0, dtype=torch.bfloat16)
    moved = _run(level, toys.scaled_tiles, (8,), x, scale, y, ROWS, COLS, ROWS=4, BLOCK=1024)
    assert torch.equal(y[:ROWS], (x.float() * scale[:, None]).bfloat16())
    assert y[ROWS:].eq(7.0).all()
    tiles = -(-ROWS // 4)
    assert moved == Traffic(
        bytes_in=ROWS * COLS * 2 + ROWS * 4, bytes_out=ROWS * COLS * 2, transfers_in=2 * tiles, transfers_out=tiles
    )


def test_a_grid_of_three_dimensions(level):
    y = torch.zeros(4, 3, 2, 32, dtype=torch.int32)
    moved = _run(level, toys.grid_of_three, (2, 3, 4), y, X=2, Y=3)
    z, row, x = torch.meshgrid(torch.arange(4), torch.arange(3), torch.arange(2), indexing="ij")
    assert torch.equal(y, (x + 10 * row + 100 * z).int()[..., None].expand(4, 3, 2, 32))
    assert (moved.transfers_out, moved.bytes_out) == (24, 24 * 32 * 4)


def test_rounding_and_negation_survive_the_rewrites(level):
    x = torch.tensor([-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 1e6 + 0.75] * 8)
    y = torch.full((3, 64), -9, dtype=torch.int32)
    _run(level, toys.converted, (1,), x, y, BLOCK=64)
    assert torch.equal(y, torch.stack([x.int(), x.floor().int(), (~(x > 0)).int()]))


def test_tensors_are_raw_pointers(level):
    # A view with an offset and a gap between its rows: the kernel, which knows one row length, walks straight on.
    storage = torch.arange(4096, dtype=torch.float32)
    view = storage[5:].as_strided((2, 16), (64, 1))
    y = torch.zeros(2, 16)
    _run(level, toys.scaled_rows, (1,), view, torch.ones(2), y, 2, 16, 1.0, BLOCK=16)
    assert torch.equal(y.flatten(), storage[5:37])


def test_an_element_gather_is_counted_by_element(level):
    x, _ = _input(torch.bfloat16)
    index = torch.randperm(COLS, generator=torch.Generator().manual_seed(1)).int()
    y = torch.zeros_like(x)
    moved = _run(level, toys.gathered_rows, (8,), x, index, y, ROWS, COLS, BLOCK=1024)
    assert torch.equal(y, x[:, index.long()])
    assert moved.bytes_in == ROWS * COLS * 4
    # The masked tail is gathered too, and thrown away.
    assert (moved.scalar_loads, moved.scalar_bytes) == (ROWS * 1024, ROWS * 1024 * 2)


def test_atomics_run_only_as_triton_emits_them(level):
    x = torch.ones(ROWS, COLS)
    y = torch.zeros(COLS)
    if level == "hfusion":
        with pytest.raises(ToolchainError) as error:
            _run(level, toys.column_sums, (8,), x, y, ROWS, COLS, BLOCK=1024)
        assert error.value.kernel == "column_sums"
        assert "hfusion" in error.value.stage
        return
    moved = _run(level, toys.column_sums, (8,), x, y, ROWS, COLS, BLOCK=1024)
    assert torch.equal(y, torch.full((COLS,), float(ROWS)))
    assert moved == Traffic(bytes_in=ROWS * COLS * 4, transfers_in=ROWS, atomic_bytes=ROWS * COLS * 4)


def test_arguments_that_cannot_be_run_raise(level):
    x, scale = _input(torch.float32)
    arguments = (x, scale, torch.empty_like(x), ROWS, COLS, 1.0)
    with pytest.raises(ValueError, match="grid must be one to three positive ints"):
        _run(level, toys.scaled_rows, (0,), *arguments, BLOCK=1024)
    with pytest.raises(ValueError, match="level must be one of ttadapter, hfusion; got 'machine'"):
        _run("machine", toys.scaled_rows, (1,), *arguments, BLOCK=1024)
    with pytest.raises(ValueError, match="x must be a CPU tensor; it is on meta"):
        _run(level, toys.scaled_rows, (1,), x.to("meta"), *arguments[1:], BLOCK=1024)


@pytest.mark.parametrize(
    ("kernel", "options", "fault"),
    [
        (toys.beyond_the_end, {"LOADS": False, "BLOCK": 64}, r"y is read or written \d+ bytes past its end"),
        (toys.beyond_the_end, {"LOADS": True, "BLOCK": 64}, r"x is read or written \d+ bytes past its end"),
        (toys.before_the_start, {"BLOCK": 32}, "y is written 12 bytes before its start"),
        (toys.far_away, {"BLOCK": 32}, "memory that is no argument's is read or written"),
    ],
)
def test_what_is_no_arguments_is_not_touched(level, kernel, options, fault):
    x, y = torch.ones(3, 67), torch.full((3, 67), 7.0)
    with pytest.raises(ToolchainError, match=fault) as error:
        _run(level, kernel, (1,), x, y, 3, 67, **options)
    assert (error.value.kernel, error.value.stage) == (kernel.__name__, f"running on the CPU ({level})")
    assert y.eq(7.0).all()


def test_arguments_of_one_storage_share_it(level):
    storage = torch.cat([torch.ones(64), torch.zeros(64)])
    _run(level, toys.beyond_the_end, (1,), storage[:64], storage[64:], 1, 64, LOADS=False, BLOCK=64)
    assert torch.equal(storage, torch.ones(128))


def test_the_launcher_serves_the_launch_seam_and_adds_up(level):
    x, scale = _input(torch.float32)
    y = torch.zeros_like(x)
    launcher = LoweringLauncher(level=level)
    with device.use_chip("Ascend910B4"), use_launcher(launcher):
        for _ in range(2):
            launch(toys.scaled_rows, (4,), (x, scale, y, ROWS, COLS, 1.0), {"BLOCK": 1024})
    assert torch.equal(y, x * scale[:, None])
    assert launcher.traffic.keys() == {"scaled_rows"}
    assert launcher.total.transfers_in == 2 * ROWS
    with pytest.raises(ValueError, match="chip must be one of"):
        LoweringLauncher(chip="Ascend000")
    assert lowering_launcher.chip is None, "it lowers for the chip whose tiles the launch has"


def test_the_recorder_runs_nothing(level):
    x = torch.empty(ROWS, COLS, device="meta")
    recorder = LaunchRecorder()
    with use_launcher(recorder):
        launch(toys.scaled_rows, (4,), (x, x, x, ROWS, COLS, 1.0), {"BLOCK": 1024})
    (recorded,) = recorder.launches
    assert (recorded.kernel, recorded.grid, recorded.constexprs) == (toys.scaled_rows, (4,), {"BLOCK": 1024})
    assert recorded.args[0] is x
    assert recorded.specialize("Ascend910B1").chip == "Ascend910B1"
