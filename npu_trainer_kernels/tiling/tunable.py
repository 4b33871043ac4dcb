"""Tiles that `npu-kernels tune` varies: half or twice the size of the formula, with half or twice the warps.

The file of measurements can express nothing else, so no content of it can make a tile that does not cover its row.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar

from ..device import DeviceSpec
from ..evidence import tuned
from ..evidence.tuned import Variation
from .common import ColumnsTile, RowTile

__all__ = ["TUNABLE", "asked_tiles", "forget_tiles", "try_variation", "tunable", "tunable_on_npus", "varied"]

_Tile = TypeVar("_Tile")
TUNABLE: dict[str, Any] = {}
"""The functions whose tiles can be tuned, by name. The last argument of each function is the device."""
_asked: set[tuple[str, tuple[Any, ...]]] = set()
_tried: dict[tuple[str, tuple[Any, ...]], Variation] = {}


def tunable(fn: Callable[..., _Tile], on: Callable[[DeviceSpec], bool] = lambda spec: True) -> Callable[..., _Tile]:
    """Caches a tile function and, on devices for which `on` is true, applies the variation measured there."""

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
    """Like `tunable`, but only on NPUs, where no tile was ever timed. Elsewhere `tune` would only take longer."""
    return tunable(fn, lambda spec: spec.has_buffer)


def varied(tile: Any, by: Variation | None) -> Any:
    """Returns a tile with its rows, size, fold, block or columns, and its warps, halved or doubled as `by` says. A tile
    of None stays None, and fields that it lacks are ignored.

    Whether a larger tile fits an NPU is only known from its compiler.
    """
    if tile is None or by is None:
        return tile
    name = next(name for name in ("rows", "size", "fold", "block", "cols") if hasattr(tile, name))
    # Do not change the size of a tile in halves, because its kernel processes one row at a time.
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
    """Clears the caches of all tunable tiles and the record of `asked_tiles`."""
    _asked.clear()
    for function in TUNABLE.values():
        function.cache_clear()


def asked_tiles() -> set[tuple[str, tuple[Any, ...]]]:
    """Returns the tiles that were computed since `forget_tiles`, as (function, arguments)."""
    return set(_asked)


def try_variation(name: str, args: tuple[Any, ...], by: Variation | None) -> None:
    """Varies one tile in this process, regardless of measurements. None ends this."""
    if by is None:
        _tried.pop((name, args), None)
    else:
        _tried[name, args] = by
    forget_tiles()
