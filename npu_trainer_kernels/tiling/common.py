"""Shared by all tiles: integer arithmetic, the number of programs, and the basic tile classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..device import DeviceSpec

__all__ = [
    "Block",
    "ColumnsTile",
    "RowTile",
    "accumulating_programs",
    "cdiv",
    "launch_options",
    "next_power_of_2",
    "programs",
]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least `n` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def programs(tasks: int, spec: DeviceSpec, blocks: int = 1) -> int:
    """Returns the number of programs, at least 1, for `tasks` independent row tiles of each of `blocks` column blocks.

    On Ascend the grid is persistent, with one program per vector core: the runtime refuses grids beyond 65535, and each
    further wave costs a launch. Elsewhere the hardware schedules, and one program per tile balances best.
    """
    if spec.has_buffer:
        return max(1, min(tasks, spec.vector_cores // blocks))
    return tasks if tasks > 0 else 1


def launch_options(spec: DeviceSpec, num_warps: int) -> dict[str, int]:
    """Returns the launch options that exist on this kind of device: only CUDA has warps."""
    return {"num_warps": num_warps} if spec.has_warps else {}


def accumulating_programs(
    tasks: int, spec: DeviceSpec, blocks: int = 1, options: Mapping[str, int] | None = None
) -> int:
    """Returns the number of programs for `tasks` row tiles if each program writes one row of sums over its tiles.
    `options` are the tile's launch options."""
    if spec.has_warps:
        # 16 warps per multiprocessor hide each other's latency; more would only write more partial sums (H200).
        each = max(1, 16 // (options or {}).get("num_warps", 4))
        return max(1, min(tasks, each * spec.vector_cores // blocks))
    return programs(tasks, spec, blocks)


@dataclass(frozen=True)
class RowTile:
    """Tile of a kernel over rows: a step processes `rows` rows of `cols` columns. These are whole rows, or one of
    `blocks` column blocks of each row, or both halves of one row (`halves`). A tile of one row is folded into `fold`
    pieces (`row_sums` of `ops/blocks.py`)."""

    rows: int
    cols: int
    blocks: int = 1
    options: dict[str, int] = field(default_factory=dict, hash=False)
    fold: int = 1
    halves: bool = False

    @property
    def pieces(self) -> int:
        """The number of pieces into which a row is folded."""
        return self.fold if self.rows == 1 else 1


@dataclass(frozen=True)
class Block:
    """Block of an elementwise kernel: a step processes `size` contiguous elements."""

    size: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ColumnsTile:
    """Block of a kernel that processes single rows in any order: a step processes `cols` of the `width` columns."""

    cols: int
    width: int
    options: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def blocks(self) -> int:
        """The number of blocks of a row."""
        return cdiv(self.width, self.cols)
