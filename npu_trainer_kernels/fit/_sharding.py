"""Models the memory of several devices: shares of sharded tensors, and units that are gathered while they are used.

No collective runs: the step is that of one device, and this module adds the difference. A unit is a layer, as
accelerate wraps models; the weights in no layer (embedding, last norm, head) are the root unit, which stays gathered
from forward to backward.

- `ddp`: every device has everything, and a second copy of the gradients in the buckets that are reduced. If DDP does
  not look for unused parameters, there is a third copy in the second step: DDP reduces the first step's gradients in a
  single bucket, since it does not know their order yet, and allocates its final buckets when the second forward begins.
  With NCCL the first bucket still exists then: PyTorch keeps the tensors of a collective until a thread that checks ten
  times a second has found it complete and another collective has been launched after that. Between two steps there is
  hardly time for both, so the next collective frees the bucket: the gathering of values for the logs of TRL's trainers
  after the loss, or the first bucket of the backward. With more time between steps it is freed earlier, and the run
  needs one copy less; a step has to fit in both cases.
- `fsdp2`: weights, gradients and optimiser state are sharded. The root unit and one layer are gathered for the whole
  step; once backward reaches the layers also a second layer, and two unsharded copies of a layer's gradients: as
  computed, and as the input of the reduction. The root unit's gradients are unsharded until the end. With the Trainer's
  `bf16` accelerate keeps trained weights in fp32.
- `zero3`: as `fsdp2`, but DeepSpeed's optimiser has an fp32 copy of trained weights, and weights and gradients keep
  their dtype.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ._setup import Setup

__all__ = ["FIRST_BUCKET", "Beside", "Shares", "Units", "beside", "shares_of", "units_of"]

FIRST_BUCKET = 1 << 20
"""The bytes of the first bucket that DDP reduces in a backward (torch's `kDefaultFirstBucketBytes`)."""

_FP32 = 4
# DeepSpeed's optimiser has three fp32 numbers for each trained weight: the weight and Adam's two moments.
_ZERO3_OPTIMISER = 3 * _FP32


@dataclass(frozen=True)
class Shares:
    """The fraction of a tensor's bytes that a device has, by the tensor's purpose."""

    frozen: float = 1.0
    trained: float = 1.0
    gradients: float = 1.0
    optimiser: float = 1.0


def shares_of(setup: Setup, trained: torch.dtype) -> Shares:
    """Returns the shares of a setup; `trained`: the dtype of its trained weights."""
    if setup.sharding in ("none", "ddp"):
        return Shares()
    share = 1 / setup.devices
    if setup.sharding == "zero3":
        return Shares(share, share, share, share * _ZERO3_OPTIMISER / (2 * trained.itemsize))
    upcast = share * _FP32 / trained.itemsize if setup.autocast else share
    return Shares(share, upcast, upcast, upcast)


@dataclass(frozen=True)
class Units:
    """The bytes of gathered units.

    Attributes:
        root: the weights in no layer.
        layer: the weights of the largest layer.
        layer_gradients: the gradients of the layer whose gradients are largest.
        trained: all trained weights.
        in_root: ids of the parameters in no layer.
        last: the layer with which backward begins; in a model without layers, the model.
    """

    root: int
    layer: int
    layer_gradients: int
    trained: int
    in_root: frozenset[int]
    last: nn.Module


def _bytes(parameters: dict[int, nn.Parameter], trained: bool = False) -> int:
    return sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad or not trained)


def units_of(model: nn.Module) -> Units:
    """Returns the units of a model: the layers of its longest `ModuleList`, and the rest."""
    every = {id(p): p for p in model.parameters()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    modules = list(max(lists, key=len, default=()))
    layers = [{id(p): p for p in layer.parameters()} for layer in modules]
    inside = {key for layer in layers for key in layer}
    root = {key: p for key, p in every.items() if key not in inside}
    return Units(
        root=_bytes(root),
        layer=max(map(_bytes, layers), default=0),
        layer_gradients=max((_bytes(layer, trained=True) for layer in layers), default=0),
        trained=_bytes(every, trained=True),
        in_root=frozenset(root),
        last=modules[-1] if modules else model,
    )


@dataclass(frozen=True)
class Beside:
    """The additional bytes of several devices.

    Attributes:
        step: bytes from the beginning of forward to the end of backward.
        layers: further bytes once backward has reached the layers.
        start: further bytes from the beginning of forward until the next collective.
    """

    step: int = 0
    layers: int = 0
    start: int = 0


def beside(setup: Setup, units: Units) -> Beside:
    """Returns the additional bytes of several devices in a step."""
    if setup.sharding == "none":
        return Beside()
    if setup.sharding == "ddp":
        return Beside(units.trained, start=0 if setup.looks_for_unused else units.trained)
    return Beside(units.root + units.layer, units.layer + 2 * units.layer_gradients)
