"""What several devices change: shares of what lasts, and units that are gathered while they are used.

It is a model, and not a run: the step is that of one device. A unit is a layer, as accelerate wraps models; what is in
no layer (embedding, last norm, head) is the root unit, which stays gathered from forward to backward.

- `ddp`: everything is everywhere, and gradients a second time, in the buckets that are reduced. Where DDP does not
  look for unused parameters, a third time in the second step: it reduces the first step's gradients in a single
  bucket, since it has yet to learn in which order they come, and makes those that it keeps when the second forward
  begins. Over NCCL the first one is still there then. PyTorch holds what a collective has worked on until a thread
  that looks ten times a second has found it done and one more collective has been sent after that. Between two steps
  there is hardly time for both, so what is sent next lets go of it: what TRL's trainers gather for their logs once the
  loss is known, or the first bucket of the backward. With more time it goes earlier, and the run takes one copy less;
  what fits has to fit either way.
- `fsdp2`: weights, gradients and optimiser in shares. The root unit is gathered for the whole step, and a layer beside
  it; once backward has come to the layers a second one, and a layer's gradients as a whole, twice: as they come, and
  as what is reduced. The root unit's gradients are whole until the end. With the Trainer's `bf16` accelerate keeps
  what is trained in fp32.
- `zero3`: the same, with DeepSpeed's fp32 copy of what is trained in the optimiser, and weights and gradients in their
  dtype.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ._setup import Setup

__all__ = ["FIRST_BUCKET", "Beside", "Shares", "Units", "beside", "shares_of", "units_of"]

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket that DDP reduces in a backward (torch's `kDefaultFirstBucketBytes`)."""

_FP32 = 4
# DeepSpeed's optimiser has, for each number that is trained, the number itself and Adam's two in fp32.
_ZERO3_OPTIMISER = 3 * _FP32


@dataclass(frozen=True)
class Shares:
    """What a device holds of a tensor, by what the tensor is for."""

    frozen: float = 1.0
    trained: float = 1.0
    gradients: float = 1.0
    optimiser: float = 1.0


def shares_of(setup: Setup, trained: torch.dtype) -> Shares:
    """Of a setup whose trained weights are of a dtype."""
    if setup.sharding in ("none", "ddp"):
        return Shares()
    share = 1 / setup.devices
    if setup.sharding == "zero3":
        return Shares(share, share, share, share * _ZERO3_OPTIMISER / (2 * trained.itemsize))
    upcast = share * _FP32 / trained.itemsize if setup.autocast else share
    return Shares(share, upcast, upcast, upcast)


@dataclass(frozen=True)
class Units:
    """Bytes of gathered units.

    Attributes:
        root: weights in no layer.
        layer: the weights of the largest layer.
        layer_gradients: the gradients of the layer whose gradients are largest.
        trained: all that is trained.
        in_root: ids of the parameters in no layer.
        last: the layer with which backward begins; in a model without layers the model.
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
    """The units of a model: the members of its longest list of layers, and the rest."""
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
    """Bytes that several devices add.

    Attributes:
        step: from the beginning of forward to the end of backward.
        layers: beside these, once backward has come to the layers.
        start: beside these, from the beginning of forward until something is sent.
    """

    step: int = 0
    layers: int = 0
    start: int = 0


def beside(setup: Setup, units: Units) -> Beside:
    """What several devices add to a step."""
    if setup.sharding == "none":
        return Beside()
    if setup.sharding == "ddp":
        return Beside(units.trained, start=0 if setup.looks_for_unused else units.trained)
    return Beside(units.root + units.layer, units.layer + 2 * units.layer_gradients)
