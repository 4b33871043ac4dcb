"""Tiles that `npu-kernels tune` varies: half or twice the size that the formula gives, with half or twice the warps.

No more can be said there, so that no file, whatever it holds, makes a tile that does not cover its row.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar

from .. import tuned
from ..device import DeviceSpec
from ..tuned import Variation
from .common import ColumnsTile, RowTile

__all__ = ["TUNABLE", "asked_tiles", "forget_tiles", "try_variation", "tunable", "tunable_on_npus", "varied"]

_Tile = TypeVar("_Tile")
TUNABLE: dict[str, Any] = {}
"""The functions whose tiles can be tuned, by name. The last argument of each is the device."""
_asked: set[tuple[str, tuple[Any, ...]]] = set()
_tried: dict[tuple[str, tuple[Any, ...]], Variation] = {}


def tunable(fn: Callable[..., _Tile], on: Callable[[DeviceSpec], bool] = lambda spec: True) -> Callable[..., _Tile]:
    """`cache`, and beyond it what was measured on the device, where it is one that `on` is true of."""

    @cache
    @wraps(fn)
    def tile(*args: Any) -> Any:
        *sizes, spec = args
        if not on(spec):
            return fn(*args)
        key = fn.__name__, args
        _asked.add(key)
        measured = tuned.variation(fn.__name__, tuple(sizes), spec.name)
        return varied(fn(*args), _tried.get(key, measured))

    TUNABLE[fn.__name__] = tile
    return tile


def tunable_on_npus(fn: Callable[..., _Tile]) -> Callable[..., _Tile]:
    """As `tunable`, on NPUs alone, where none was ever timed: elsewhere `tune` would only take longer."""
    return tunable(fn, lambda spec: spec.has_buffer)


def varied(tile: Any, by: Variation | None) -> Any:
    """A tile with its rows, size, fold, block or columns halved or doubled, and its warps; None, and what does not
    exist, stay.

    Whether a larger one fits an NPU, its compiler says.
    """
    if tile is None or by is None:
        return tile
    name = next(name for name in ("rows", "size", "fold", "block", "cols") if hasattr(tile, name))
    # A row in halves is on the chip alone: its kernel takes one at a time.
    size = 0 if isinstance(tile, RowTile) and tile.halves else by.size
    value = max(1, _shifted(getattr(tile, name), size))
    changes: dict[str, Any] = {name: min(value, tile.width) if isinstance(tile, ColumnsTile) else value}
    if "num_warps" in tile.options:
        warps = max(1, min(32, _shifted(tile.options["num_warps"], by.warps)))
        changes["options"] = {**tile.options, "num_warps": warps}
    return replace(tile, **changes)


def _shifted(value: int, by: int) -> int:
    return value << by if by >= 0 else value >> -by


def forget_tiles() -> None:
    """Computes every tunable tile anew when it is next asked for; `asked_tiles` starts anew, too."""
    _asked.clear()
    for function in TUNABLE.values():
        function.cache_clear()


def asked_tiles() -> set[tuple[str, tuple[Any, ...]]]:
    """Which tiles were computed since `forget_tiles`: (function, arguments)."""
    return set(_asked)


def try_variation(name: str, args: tuple[Any, ...], by: Variation | None) -> None:
    """Varies one tile in this process, whatever was measured; None: no longer."""
    if by is None:
        _tried.pop((name, args), None)
    else:
        _tried[name, args] = by
    forget_tiles()
