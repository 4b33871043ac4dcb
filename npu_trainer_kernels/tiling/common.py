"""What all tiles have in common: whole numbers, the number of programs, and the plainest forms of a tile."""

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
    """The smallest power of two that is at least `n` (at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def programs(tasks: int, spec: DeviceSpec, blocks: int = 1) -> int:
    """How many programs to start for `tasks` independent row tiles (of each of `blocks` column blocks): at least 1.

    On Ascend a persistent grid of one program per vector core (a grid beyond 65535 is refused there, and each further
    wave costs a launch); elsewhere the hardware schedules, and one program per tile balances best.
    """
    if spec.has_buffer:
        return max(1, min(tasks, spec.vector_cores // blocks))
    return tasks if tasks > 0 else 1


def launch_options(spec: DeviceSpec, num_warps: int) -> dict[str, int]:
    """Launch options that exist on this kind of device (warps are a CUDA notion)."""
    return {"num_warps": num_warps} if spec.has_warps else {}


def accumulating_programs(
    tasks: int, spec: DeviceSpec, blocks: int = 1, options: Mapping[str, int] | None = None
) -> int:
    """How many programs to start for `tasks` row tiles when each program adds up a row of its own over its tiles;
    `options` are the tile's launch options."""
    if spec.has_warps:
        # 16 warps a multiprocessor hide each other's latency; more would only write more partial sums (H200).
        each = max(1, 16 // (options or {}).get("num_warps", 4))
        return max(1, min(tasks, each * spec.vector_cores // blocks))
    return programs(tasks, spec, blocks)


@dataclass(frozen=True)
class RowTile:
    """Blocks of a kernel over rows: a step takes `rows` rows of `cols` columns: whole rows, or one of `blocks` of each,
    or both `halves` of one row. A tile of one row goes in `fold` pieces (`row_sums` of `ops/blocks.py`)."""

    rows: int
    cols: int
    blocks: int = 1
    options: dict[str, int] = field(default_factory=dict, hash=False)
    fold: int = 1
    halves: bool = False

    @property
    def pieces(self) -> int:
        """In how many pieces a row goes."""
        return self.fold if self.rows == 1 else 1


@dataclass(frozen=True)
class Block:
    """Block of an elementwise kernel: a step takes `size` elements that lie one after another."""

    size: int
    options: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ColumnsTile:
    """Block of a kernel that takes rows one by one, wherever they lie: a step takes `cols` of the `width` columns."""

    cols: int
    width: int
    options: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def blocks(self) -> int:
        """Of a row."""
        return cdiv(self.width, self.cols)
