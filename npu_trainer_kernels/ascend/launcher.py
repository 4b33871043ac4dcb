"""Launchers for `ops.launch.use_launcher`: `LaunchRecorder` records launches,
`LoweringLauncher` executes lowered kernels."""

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import device
from ..ops.launch import execute_on_host
from .execute import LEVELS, Traffic, execute
from .lower import Specialization, bind

__all__ = ["LaunchRecorder", "LoweringLauncher", "RecordedLaunch", "lowering_launcher"]


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as an op made it: `kernel[grid](*args, **constexprs)`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]

    def specialize(self, chip: str) -> Specialization:
        """Returns the specialization that the compiler would get for this launch on `chip`."""
        return Specialization.of(self.kernel, self.args, self.constexprs, chip)


@dataclass
class LaunchRecorder:
    """A launcher that runs nothing: `with use_launcher(recorder): op(...)`, then read `recorder.launches`."""

    launches: list[RecordedLaunch] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        self.launches.append(RecordedLaunch(kernel, tuple(grid), tuple(args), dict(constexprs)))


@dataclass
class LoweringLauncher:
    """A launcher that executes kernels as the Ascend compiler lowers them, on CPU tensors.

    Attributes:
        chip: the chip to lower for; None: the chip whose tiles the launch has (`device.spec`).
        level: `"ttadapter"` or `"hfusion"`, see `execute`.
        traffic: the traffic of all launches, by kernel name.
    """

    chip: str | None = None
    level: str = "ttadapter"
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chip is not None:
            device.chip_spec(self.chip)
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {self.level!r}")

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        spec = Specialization.of(kernel, args, constexprs, self.chip or _chip_of(args[0].device))
        moved = execute(spec, grid, bind(kernel, args, constexprs)[0], self.level)
        self.traffic[spec.name] = self.traffic.get(spec.name, Traffic()) + moved

    @property
    def total(self) -> Traffic:
        """The traffic of all launches."""
        return sum(self.traffic.values(), Traffic())


def _chip_of(where: torch.device) -> str:
    spec = device.spec(where)
    if not spec.has_buffer:
        raise ValueError(
            "the Ascend lowering needs a chip to lower for: set NPU_KERNELS_CHIP or "
            f"NPU_KERNELS_BACKEND=ascend-lowering, or use device.use_chip; got {spec.name!r}"
        )
    return spec.name


lowering_launcher = LoweringLauncher()
"""The launcher of the backend named "ascend-lowering"."""
execute_on_host(lowering_launcher)
