"""This package's ops for transformers' `use_kernels=True` and Hugging Face's package `kernels`.

    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=kernel_config())

or, with `kernels` alone,

    kernels.register_kernel_mapping(kernel_mapping())
    kernels.kernelize(model, mode=kernels.Mode.TRAINING)

Nothing is downloaded: the layers are those of `patching.hub_layers`. They serve norms, rotations, short convolutions
and, where a class was given their name, gated MLPs. All else that this package has belongs to a whole model or to its
trainer, not to a layer: `apply_npu_kernels` and `NpuKernelsCallback` bring it, with or without `use_kernels=True`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from packaging.requirements import Requirement
from torch import nn

from . import device
from .patching import LeftAlone, Report
from .patching.hub_layers import NAMES, layer_of, site_of
from .patching.patch import Site
from .support.triton import MissingDependencyError

if TYPE_CHECKING:
    from transformers import KernelConfig

__all__ = ["DEVICES", "kernel_config", "kernel_mapping", "report"]

DEVICES = tuple(kind for kind in device.KINDS if kind != "other")
"""The kinds of device for which the layers are registered, by the names that `kernels` has for them."""


# The versions that are tested together (`locks/hub-kernels.in`).
_PAIR = "transformers==5.22.2 kernels==0.17.2"


@dataclass(frozen=True)
class _Layer:
    """A repository as `kernels` wants one, without a folder or a download. Equal ones load the same class."""

    name: str

    def load(self) -> type[nn.Module]:
        return NAMES[self.name]

    def __str__(self) -> str:
        return f"npu_trainer_kernels (layer {self.name})"


def _checked(layers: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(layers, str):
        raise TypeError(f"layers must be a sequence of names, as [{layers!r}]; got the string {layers!r}")
    chosen = tuple(NAMES) if layers is None else tuple(layers)
    unknown = [name for name in chosen if name not in NAMES]
    if unknown or not chosen:
        raise ValueError(f"layers must be names among {', '.join(NAMES)}, at least one; got {list(chosen)}")
    return chosen


def kernel_mapping(layers: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the layers of this package as a mapping for `kernels.register_kernel_mapping` and `use_kernel_mapping`.

    transformers registers its own mapping again whenever it kernelizes a model, so this one serves `kernels.kernelize`;
    for `use_kernels=True`, give transformers `kernel_config()`.

    Args:
        layers: names of transformers' for kernels, keys of `patching.hub_layers.NAMES`; None: all of them.

    Raises:
        TypeError: `layers` is a string.
        ValueError: an unknown name, or none.
    """
    return {name: dict.fromkeys(DEVICES, _Layer(name)) for name in _checked(layers)}


def kernel_config(layers: Sequence[str] | None = None) -> "KernelConfig":
    """Returns a `KernelConfig` with which `from_pretrained(..., use_kernels=True, kernel_config=...)` uses this
    package's layers. All else in the model keeps its own code; no kernel is downloaded.

    Args:
        layers: names of transformers' for kernels, keys of `patching.hub_layers.NAMES`; None: all of them.

    Raises:
        MissingDependencyError: `kernels` is missing, or of a version that the installed transformers does not take.
        TypeError: `layers` is a string.
        ValueError: an unknown name, or none; in `from_pretrained`, a model without any of these layers.
    """
    chosen = _checked(layers)
    try:
        from transformers import KernelConfig
        from transformers.utils import is_kernels_available
    except ImportError as error:
        raise MissingDependencyError(
            f"kernel_config needs a transformers with KernelConfig; these two were tested together: pip install {_PAIR}"
        ) from error
    if not is_kernels_available():
        raise MissingDependencyError(_kernels_to_install())

    class NpuKernelConfig(KernelConfig):
        """Maps the layers that a model has; transformers calls both methods once it has made the model."""

        def sanitize_kernel_mapping(self, model: nn.Module) -> None:
            """Finds the names for kernels in a model."""
            self.store_registered_layer_names(model)
            if not set(chosen) & set(self.registered_layer_names.values()):
                names = sorted(set(self.registered_layer_names.values())) or ["none"]
                raise ValueError(
                    f"{type(model).__name__} has none of the layers {', '.join(chosen)}; its names for kernels: "
                    f"{', '.join(names)}. Load it without kernel_config, and use NpuKernelsCallback"
                )

        def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
            """Sets the mapping. For a name without any device, `kernels` keeps the model's code and does not warn."""
            others: dict[str, Any] = {name: {} for name in self.registered_layer_names.values() if name not in chosen}
            self.kernel_mapping = {**others, **kernel_mapping(chosen)}

    return NpuKernelConfig(inherit_mapping=False)


def _kernels_to_install() -> str:
    """Returns what `kernel_config` needs, with a command that leaves the installed transformers alone. The extra
    `transformers[kernels]` makes pip go back to an older transformers if the index has no such `kernels`."""
    installed = metadata.version("transformers")
    of_extra = (Requirement(each) for each in metadata.requires("transformers") or ())
    wanted = next(
        (f"kernels{each.specifier}" for each in of_extra
         if each.name == "kernels" and each.marker is not None and each.marker.evaluate({"extra": "kernels"})),
        "kernels",
    )  # fmt: skip
    text = f"kernel_config needs {wanted}, as transformers {installed} takes it: pip install '{wanted}'"
    if f"transformers=={installed}" in _PAIR:
        return text
    return (
        f"{text}. If the index has no such version: these two were tested together, and replace transformers "
        f"{installed}: pip install {_PAIR}"
    )


def _hub_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules, and functions that `kernels` has made modules of, that have a layer of this package."""
    seen: set[nn.Module] = set()
    for path, module in model.named_modules():
        functions = (vars(module).get("_kernel_funcs") or {}).items()
        for name, part in ((path, module), *((f"{path}.{name}", each) for name, each in functions)):
            if part not in seen and layer_of(part) is not None:
                seen.add(part)
                yield name, part


def report(model: nn.Module) -> Report:
    """Returns which modules the layers of this package serve, how often, and which keep their own code and why.

    A layer recognises its module at its first call: before that, the report says so. Functions such as a rotation are
    one object for all models of a family, and are counted for all of them.

    Args:
        model: a model that `kernels` has kernelized with `kernel_config()` or `kernel_mapping()`.
    """
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = Report(device=device.spec(where).name)
    waiting = 0
    for path, module in _hub_modules(model):
        site = site_of(module, where)
        if isinstance(site, Site):
            site.paths[:] = [path]
            found.sites.append(site)
        elif site is not None:
            found.left_alone.append(LeftAlone(path, type(module).__name__, "use_kernels", site))
        else:
            waiting += 1
    if waiting:
        found.note(f"{waiting} modules with a layer of this package had no call yet: run a batch, then ask again")
    elif not found.sites and not found.left_alone:
        found.note(
            "no module has a layer of this package: load the model by "
            "from_pretrained(..., use_kernels=True, kernel_config=kernel_config())"
        )
    return found
