"""Which patched model is computing right now.

Forward hooks on the patched model put a `Call` into a context variable while its forward runs; TRL's seam reads it, and
input tokens are counted there. Nothing is stored on the model, so copies of a patched model do not share state, and two
models, or two threads, do not see each other's calls.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.checks import has_values
from ..ops.head import GrpoPlan
from ..support.opaque import opaque
from .learned_plan import LearnedPlan
from .undo import Undo

__all__ = [
    "Call",
    "CallSettings",
    "HeadPlan",
    "Scored",
    "current_call",
    "current_plan",
    "generates",
    "track_calls",
    "use_labels",
    "use_plan",
]


class HeadPlan(Protocol):
    """What a trainer knows of the loss before the head has run."""

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int, scored: "Scored | None") -> GrpoPlan | None:
        """The plan for a head of so many rows, or None where it is for other rows, or does not fit. Which rows those
        are `scored` says, where that is known."""

    def mismatch(self, share: float) -> None:
        """Told the share of rows whose real gradient was not the plan's."""


@dataclass
class CallSettings:
    """What the calls of a patched model have in common.

    Attributes:
        trl: serves TRL's seam inside the model's forward (`head.trl_seam.TrlHeadPatch`), or None.
        tokens: input tokens of the training forwards so far, on this process, padding included.
        live: those of them that are no padding; on the device, where that is counted without waiting for it.
        caches: whether a training forward that is not told returns the cache that its configuration speaks of.
        learned: what is known of the gradient that TRL sends back, where no trainer hands over a plan.
        shares: whether what rows begin with alike is computed once, in training.
        compacts: whether TRL's head is given no rows without a label; not where there are shapes without numbers.
    """

    trl: Any = None
    shares: bool = False
    compacts: bool = True
    tokens: int = 0
    live: Any = 0
    caches: bool = True
    learned: LearnedPlan = field(default_factory=LearnedPlan)


class Scored:
    """The places of a batch that TRL's head scores: those whose label is not -100. They are read from the device once
    for a forward, with the layout of the batch where the body reads that.

    Attributes:
        labels: `[B, L]`, as the model was given them.
        ahead: how many places a label is behind the one that predicts it: 0 where they were shifted before.
        places: `[n]`, into the `[B, L - ahead]` places that the head is given; None: not read yet.
        left_to_us: whether TRL hands over all places, so that those without a label are left out here.
    """

    def __init__(self, labels: torch.Tensor, ahead: int) -> None:
        self.labels, self.ahead = labels, ahead
        self.places: np.ndarray | None = None
        self.left_to_us = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the places that the head is given."""
        return self.labels.shape[0], self.labels.shape[1] - self.ahead

    @property
    def mask(self) -> torch.Tensor:
        """On the device, which of them are scored: bool."""
        return self.labels[:, self.ahead :] != -100

    def read(self) -> np.ndarray:
        """`places`; the host waits for the device where they are not known."""
        if self.places is None:
            self.places = np.flatnonzero(self.mask.cpu().numpy())
        return self.places


@dataclass(frozen=True)
class Call:
    """One forward of a patched model: whose it is, and the call that it is nested in.

    Attributes:
        labels: that it was given, or that its trainer keeps for a loss of its own.
        divisor: what the loss is going to be divided by, as `transformers.Trainer` tells the model; None: not known.
        generates: whether it has one token of each row, and no gradient is wanted.
        scored: the places that TRL's head scores, where it was given the labels of a batch.
    """

    settings: CallSettings
    module: nn.Module
    previous: "Call | None"
    labels: torch.Tensor | None = None
    divisor: int | float | torch.Tensor | None = None
    generates: bool = False
    scored: Scored | None = None


_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("npu_kernels_call", default=None)
_kept: contextvars.ContextVar[Any] = contextvars.ContextVar("npu_kernels_labels", default=None)
_plan: contextvars.ContextVar[HeadPlan | None] = contextvars.ContextVar("npu_kernels_plan", default=None)


def current_plan() -> HeadPlan | None:
    """The plan that the trainer whose loss is being computed has handed over, if any."""
    return _plan.get()


@contextlib.contextmanager
def use_plan(plan: HeadPlan | None) -> Iterator[None]:
    """Hands a plan to TRL's head for the length of the `with` block."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@contextlib.contextmanager
def use_labels(labels: Any) -> Iterator[None]:
    """Says which labels a loss outside of the model has, for the length of the `with` block."""
    token = _kept.set(labels)
    try:
        yield
    finally:
        _kept.reset(token)


def current_call() -> Call | None:
    """The call whose forward is running on this thread, if any."""
    return _current.get()


def generates() -> bool:
    """Whether the forward that is running on this thread has one token of each row, without gradients, as generation
    with a cache has it."""
    call = _current.get()
    return call is not None and call.generates


# Asked once a module and token. Traced it is a constant: in a graph every op stands aside.
generates._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a model's forward; ids and mask come first in all of them."""
    place = ("input_ids", "attention_mask").index(name)
    return kwargs.get(name, args[place] if len(args) > place else None)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    ids, embedded = _given("input_ids", args, kwargs), kwargs.get("inputs_embeds")
    if isinstance(ids, FakeTensor) or isinstance(embedded, FakeTensor):
        return 0
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    return embedded.shape[:-1].numel() if isinstance(embedded, torch.Tensor) else 0


def _has_one_column(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    ids = _given("input_ids", args, kwargs)
    rows = kwargs.get("inputs_embeds") if ids is None else ids
    return isinstance(rows, torch.Tensor) and rows.dim() > 1 and rows.shape[1] == 1


def _scored(kwargs: dict[str, Any]) -> Scored | None:
    shifted = kwargs.get("shift_labels")
    labels, ahead = (kwargs.get("labels"), 1) if shifted is None else (shifted, 0)
    # Without numbers there is nothing to read.
    return (
        Scored(labels, ahead) if isinstance(labels, torch.Tensor) and labels.dim() == 2 and has_values(labels) else None
    )


def _untracked(*args: Any, **kwargs: Any) -> None:
    """In a graph that may not be broken there are no calls to know of: TRL's own head serves it."""


@functools.partial(opaque, in_full_graphs=_untracked)
def _enter(settings: CallSettings, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    outer = _current.get()
    if outer is None and module.training and torch.is_grad_enabled() and (tokens := _tokens(args, kwargs)):
        mask = _given("attention_mask", args, kwargs)
        settings.tokens += tokens
        if type(mask) is torch.Tensor and mask.device.type != "meta" and mask.numel() == tokens:
            settings.live = settings.live + mask.count_nonzero()
        else:
            settings.live = settings.live + tokens
    # PEFT's model hands them on to the inner one by name.
    labels = kwargs.get("labels", _kept.get())
    labels = labels if isinstance(labels, torch.Tensor) else None
    one = not torch.is_grad_enabled() and _has_one_column(args, kwargs)
    scored = _scored(kwargs) if settings.trl is not None and kwargs.get("fused_lm_head") else None
    _current.set(Call(settings, module, outer, labels, kwargs.get("num_items_in_batch"), one, scored))


@functools.partial(opaque, in_full_graphs=_untracked)
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    # This runs also where another hook has raised before `_enter`: then there is nothing to leave, and the call that is
    # running is another model's.
    call = _current.get()
    while call is not None and call.module is not module:
        call = call.previous
    if call is not None:
        _current.set(call.previous)


def track_calls(module: nn.Module, settings: CallSettings, undo: Undo) -> None:
    """Makes `current_call` answer while `module`'s forward runs, also when it raises."""
    before = module.register_forward_pre_hook(functools.partial(_enter, settings), with_kwargs=True, prepend=True)
    after = module.register_forward_hook(_leave, always_call=True)
    undo.add(before.remove)
    undo.add(after.remove)
